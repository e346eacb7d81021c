"""Export a checkpoint that ``dcp.load`` reads with its own FileSystemReader."""

from __future__ import annotations

import io
import os
import pickle  # noqa: TID251 - written, never read

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from casnap.errors import FileFormatError
from casnap.files.dcp_names import described
from casnap.files.export_output import ExportOutput
from casnap.files.export_selection import Part, shards_by_size
from casnap.files.file_reports import ExportOptions, ExportPlan, ExportReport
from casnap.files.tensor_writer import TensorWriter
from casnap.files.to_torch import read_values
from casnap.files.torch_archive import ALIGNMENT, PAGED_BYTES, Archive, StandIns, write_archives
from casnap.format.entries import TensorEntry
from casnap.runtime.buffers import PAGE
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.flatten import inflate
from casnap.storage import Contents

_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")  # torch 2.7 and 2.8 write none


def plan_dcp(contents: Contents, part: Part, name: str, options: ExportOptions) -> ExportPlan:
    """Plan an export of a state, under the names by which ``dcp.load`` knows its values.

    Args:
        contents: The snapshot.
        part: The part to export.
        name: The name of the output.
        options: The options of the export.

    Raises:
        FileFormatError: A single tensor or value is at the path.
        UnsupportedTypeError: A value was stored with ``allow_pickle``, or two have one name.
    """
    metadata, values = described(contents, part.entries, part.path)
    metadata.storage_data, metadata.version = {}, _VERSION
    if not values:
        raise FileFormatError(f"{contents.label}: there is nothing to export at this path")
    sizes = {
        name: content.entry.payload.nbytes if isinstance(content.entry, TensorEntry) else 0
        for name, content in values.items()
    }
    tensors = {
        name: (content.path, content.entry)
        for name, content in values.items()
        if isinstance(metadata.state_dict_metadata[name], TensorStorageMetadata)
        and isinstance(content.entry, TensorEntry)
    }
    groups = shards_by_size(sizes, options.max_shard_size)
    files = {f"__0_{i}.distcp": names for i, names in enumerate(groups)}
    report = ExportReport(
        options.dry_run,
        "dcp",
        {file: sum(sizes[n] for n in names) for file, names in files.items()},
        len(tensors),
        sum(sizes[name] for name in tensors),
    )

    def write(output: ExportOutput, writer: TensorWriter) -> None:
        for file, names in files.items():
            with output.file(file) as fd, without_torch_modes():
                write_file(fd, file, names, writer)
        with output.file(".metadata") as fd:
            os.pwrite(fd, pickle.dumps(metadata), 0)

    def write_file(fd: int, file: str, names: list[str], writer: TensorWriter) -> None:
        """Write values one after the other, and put the place of each into the metadata.

        Args:
            fd: The file.
            file: Its name.
            names: The names of the values in DCP.
            writer: Writes the tensors.
        """
        stand_ins = StandIns(tensors[name][1] for name in names if name in tensors)
        at, archives, objects = 0, list[Archive](), dict[int, bytes]()
        for name in names:
            # Large tensors begin on a page.
            step = PAGE if sizes[name] >= PAGED_BYTES else ALIGNMENT
            at = -(-at // step) * step
            if name in tensors:
                path, entry = tensors[name]
                offset: torch.Size | None = torch.Size([0] * len(entry.shape))
                archives.append(Archive(at, stand_ins.tensor(path, entry), stand_ins))
                nbytes = archives[-1].nbytes
            else:
                offset = None
                objects[at] = _saved(contents, part, values[name].path)
                nbytes = len(objects[at])
            index = MetadataIndex(name, offset)
            metadata.storage_data[index] = _StorageInfo(file, at, nbytes)
            at += nbytes
        write_archives(fd, writer, archives, at)
        for start, data in objects.items():
            os.pwrite(fd, data, start)

    return ExportPlan(report, write)


def _saved(contents: Contents, part: Part, path: str) -> bytes:
    """Return the bytes that ``torch.save`` writes for the value at a path, which is no tensor."""
    entries = {p: e for p, e in part.entries.items() if p == path or p.startswith(f"{path}/")}
    buffer = io.BytesIO()
    torch.save(inflate(path, read_values(contents, entries)), buffer)
    return buffer.getvalue()
