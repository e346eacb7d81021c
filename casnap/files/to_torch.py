"""Exporting a file of ``torch.save``."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from casnap.files.chosen import (
    ChosenPart,
    equal_ones,
    is_plain,
    sparse_below,
    tensors_of,
    without_tied,
)
from casnap.files.chunks import Placed, Writer
from casnap.files.report import ExportOptions, ExportReport
from casnap.files.target import Target
from casnap.files.torch_archive import Pickled, Reserved, known_bytes, laid_out, pickled
from casnap.format.entries import Entry, TensorEntry
from casnap.format.names import key_of
from casnap.restore.loading import Loading
from casnap.runtime.progress import Progress
from casnap.runtime.torch_modes import plain
from casnap.state.flatten import inflate
from casnap.state.tensors import TENSOR_DTYPES, Leaf
from casnap.storage.contents import Contents

_SPARE = 1 << 20


def export_torch(
    contents: Contents,
    part: ChosenPart,
    out: Path,
    options: ExportOptions,
    progress: Progress | None,
) -> ExportReport:
    """Export a state with all its values. It is read by ``torch.load``.

    Raises:
        FileFormatError: What is said to be tied is not.
        UnsupportedTypeError: A value was stored with ``allow_pickle``.
    """
    streamed = _streamed(part)
    tensors, _ = tensors_of(part, TENSOR_DTYPES, contents.where)
    _, names = without_tied(tensors, options.tied, contents.where)
    tied = {tensors[name].path: tensors[same].path for name, same in names.items()}
    kept = {path: entry for path, entry in streamed.items() if path not in tied}
    total = sum(entry.data.nbytes for entry in kept.values())
    report = ExportReport(options.dry_run, "torch", {out.name: total}, len(streamed), total)
    report.tied = names
    report.equal = {n: same for n, same in equal_ones(tensors) if n not in names}
    if options.dry_run:
        return report
    with Target(out, is_folder=False, needed=total) as target:
        with target.file(out.name) as fd:
            numbered = list(kept.items())
            reserved = Reserved(fd, sum(e.data.nbytes + 64 for _, e in numbered) + _SPARE)
            with plain():
                value = pickled(_state(contents, part, numbered, tied, reserved))
            archive = NewArchive(0, value, reserved, numbered)
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, archive.nbytes)
            crcs: dict[int, int] = {}
            Writer(contents, total, progress).write(fd, archive.placed, crcs)
            archive.finish(fd, crcs)
        report.files = target.sizes
    return report


def _streamed(part: ChosenPart) -> dict[str, TensorEntry]:
    """Return the tensors that are written chunk by chunk; all else is read whole."""
    inside = sparse_below(part)
    return {
        path: entry
        for path, entry in part.entries.items()
        if isinstance(entry, TensorEntry) and is_plain(entry) and not path.startswith(inside)
    }


def _state(
    contents: Contents,
    part: ChosenPart,
    numbered: list[tuple[str, TensorEntry]],
    tied: dict[str, str],
    reserved: Reserved,
) -> Any:
    """Return the state, with memory that is never read in place of the tensors to write."""
    leaves = {
        path: Leaf(path, entry, reserved.tensor(i, entry.dtype, entry.shape))
        for i, (path, entry) in enumerate(numbered)
    }
    for path, same in tied.items():
        leaves[path] = Leaf(path, part.entries[path], leaves[same].content)
    leaves |= read_values(contents, {p: e for p, e in part.entries.items() if p not in leaves})
    if part.path:
        return inflate(part.path, leaves)
    keys = dict.fromkeys(path.partition("/")[0] for path in part.entries)
    return {key_of(key): inflate(key, leaves) for key in keys}


def read_values(contents: Contents, entries: dict[str, Entry]) -> dict[str, Leaf]:
    """Read entries whole."""
    loading = Loading(contents)
    for path, entry in entries.items():
        loading.add(path, entry)
    return loading.load()


class NewArchive:
    """The archive of one value, at its place in a file.

    Args:
        at: Where in the file it begins.
        value: The value.
        reserved: Knows which tensors stand for others.
        numbered: These others, by their numbers: path and entry.

    Attributes:
        nbytes: Its length.
        placed: The tensors to write, and where.
    """

    def __init__(
        self, at: int, value: Pickled, reserved: Reserved, numbered: list[tuple[str, TensorEntry]]
    ) -> None:
        self._at = at
        self._value = value
        layout = laid_out(value)
        self.nbytes = layout.nbytes
        self.placed: list[Placed] = []
        self._starts = [at + start for start in layout.starts]
        self._known: dict[int, bytes] = {}
        for start, storage in zip(self._starts, value.storages, strict=True):
            number = reserved.owner(storage)
            if number is None:
                self._known[start] = known_bytes(storage)
            else:
                self.placed.append(Placed(*numbered[number], start))

    def finish(self, fd: int, crcs: Mapping[int, int]) -> None:
        """Write all but the tensors.

        Args:
            fd: The file.
            crcs: The CRC-32 of each tensor that was written, by its place.
        """
        own = {start: zlib.crc32(data) for start, data in self._known.items()}
        layout = laid_out(self._value, [own[s] if s in own else crcs[s] for s in self._starts])
        for offset, data in layout.pieces.items():
            os.pwrite(fd, data, self._at + offset)
        for start, data in self._known.items():
            os.pwrite(fd, data, start)
