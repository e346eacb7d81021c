"""Exporting a checkpoint that ``dcp.load`` reads with its own FileSystemReader."""

from __future__ import annotations

import io
import os
import pickle  # noqa: TID251 - written, never read
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from casnap.errors import FileFormatError
from casnap.files.chosen import ChosenPart
from casnap.files.chunks import Writer
from casnap.files.dcp_names import Stored, described
from casnap.files.report import ExportOptions, ExportReport
from casnap.files.target import Target
from casnap.files.to_torch import NewArchive, read_values
from casnap.files.torch_archive import PAGED_BYTES, Reserved, pickled
from casnap.format.entries import TensorEntry
from casnap.runtime.buffers import PAGE
from casnap.runtime.progress import Progress
from casnap.runtime.torch_modes import plain
from casnap.state.flatten import inflate
from casnap.storage.contents import Contents

_ALIGNMENT = 64


def export_dcp(
    contents: Contents,
    part: ChosenPart,
    out: Path,
    options: ExportOptions,
    progress: Progress | None,
) -> ExportReport:
    """Export a state, under the names that ``dcp.load`` has for a snapshot.

    Raises:
        FileFormatError: What is at the path is one tensor or value.
        UnsupportedTypeError: A value was stored with ``allow_pickle``, or two have one name.
    """
    metadata, values = described(contents, part.entries, part.path)
    about = metadata.state_dict_metadata
    tensors = {n for n in values if isinstance(about[n], TensorStorageMetadata)}
    total = sum(_nbytes(values[name]) for name in tensors)
    report = ExportReport(options.dry_run, "dcp", {}, len(tensors), total)
    if not values:
        raise FileFormatError(f"{contents.where}: there is nothing to export at this path")
    files = _files(values, options.max_shard_size)
    report.files = {name: sum(_nbytes(values[n]) for n in names) for name, names in files.items()}
    if options.dry_run:
        return report
    write = _Files(contents, part, metadata, values, Writer(contents, total, progress)).write
    with Target(out, is_folder=True, needed=total) as target:
        for file, names in files.items():
            with target.file(file) as fd, plain():
                write(fd, file, names)
        with target.file(".metadata") as fd:
            os.pwrite(fd, pickle.dumps(metadata), 0)
        report.files = target.sizes
    return report


def _nbytes(stored: Stored) -> int:
    return stored.entry.data.nbytes if isinstance(stored.entry, TensorEntry) else 0


def _files(values: Mapping[str, Stored], most: int | None) -> dict[str, list[str]]:
    """Return the names of the values in each file: as many as fit, in order."""
    found: list[list[str]] = [[]]
    filled = 0
    for name, stored in values.items():
        if most is not None and found[-1] and filled + _nbytes(stored) > most:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += _nbytes(stored)
    return {f"__0_{i}.distcp": names for i, names in enumerate(found)}


class _Files:
    """Writes the files of a checkpoint, and notes in the metadata what is where."""

    def __init__(
        self,
        contents: Contents,
        part: ChosenPart,
        metadata: Metadata,
        values: Mapping[str, Stored],
        writer: Writer,
    ) -> None:
        metadata.storage_data, metadata.version = {}, CURRENT_DCP_VERSION
        self._contents = contents
        self._part = part
        self._metadata = metadata
        self._values = values
        self._writer = writer

    def write(self, fd: int, file: str, names: list[str]) -> None:
        """Write a file: one value behind the other."""
        reserved = Reserved(fd, sum(_nbytes(self._values[n]) + _ALIGNMENT for n in names))
        os.ftruncate(fd, 0)
        at, archives, objects = 0, list[NewArchive](), dict[int, bytes]()
        for name in names:
            about = self._metadata.state_dict_metadata[name]
            path, entry = self._values[name]
            # So that large tensors begin on a page.
            step = PAGE if _nbytes(self._values[name]) >= PAGED_BYTES else _ALIGNMENT
            at = -(-at // step) * step
            if isinstance(about, TensorStorageMetadata) and isinstance(entry, TensorEntry):
                offset: torch.Size | None = torch.Size([0] * len(entry.shape))
                value = pickled(reserved.tensor(0, entry.dtype, entry.shape))
                archives.append(NewArchive(at, value, reserved, [(path, entry)]))
                nbytes = archives[-1].nbytes
            else:
                offset = None
                objects[at] = self._object(path)
                nbytes = len(objects[at])
            index = MetadataIndex(name, offset)
            self._metadata.storage_data[index] = _StorageInfo(file, at, nbytes)
            at += nbytes
        os.posix_fallocate(fd, 0, at)
        crcs: dict[int, int] = {}
        self._writer.write(fd, (p for archive in archives for p in archive.placed), crcs)
        for archive in archives:
            archive.finish(fd, crcs)
        for start, data in objects.items():
            os.pwrite(fd, data, start)

    def _object(self, path: str) -> bytes:
        """Return a value that is not a tensor, as torch.save writes it."""
        entries = self._part.entries
        below = {p: e for p, e in entries.items() if p == path or p.startswith(f"{path}/")}
        buffer = io.BytesIO()
        torch.save(inflate(path, read_values(self._contents, below)), buffer)
        return buffer.getvalue()
