"""Exporting a file of ``torch.save``."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from casnap.files.chosen import (
    Part,
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
    contents: Contents, part: Part, out: Path, options: ExportOptions, progress: Progress | None
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
            os.ftruncate(fd, 0)
            write_archive(fd, 0, value, reserved, numbered, Writer(contents, total, progress))
        report.files = target.sizes
    return report


def _streamed(part: Part) -> dict[str, TensorEntry]:
    """Return the tensors that are written chunk by chunk; all else is read whole."""
    inside = sparse_below(part)
    return {
        path: entry
        for path, entry in part.entries.items()
        if isinstance(entry, TensorEntry) and is_plain(entry) and not path.startswith(inside)
    }


def _state(
    contents: Contents,
    part: Part,
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


def write_archive(
    fd: int,
    at: int,
    value: Pickled,
    reserved: Reserved,
    numbered: list[tuple[str, TensorEntry]],
    writer: Writer,
) -> int:
    """Write the archive of a value to a file; return its length.

    Args:
        fd: The file.
        at: Where in the file.
        value: The value.
        reserved: Knows which tensors stand for others.
        numbered: These others, by their numbers: path and entry.
        writer: Writes them.
    """
    layout = laid_out(value)
    placed, crcs = list[Placed](), dict[int, int]()
    known: dict[int, bytes] = {}
    for start, storage in zip(layout.starts, value.storages, strict=True):
        number = reserved.owner(storage)
        if number is None:
            known[start] = known_bytes(storage)
            crcs[at + start] = zlib.crc32(known[start])
        else:
            placed.append(Placed(*numbered[number], at + start))
    writer.write(fd, placed, crcs)
    layout = laid_out(value, [crcs[at + start] for start in layout.starts])
    for offset, data in (*layout.pieces.items(), *known.items()):
        os.pwrite(fd, data, at + offset)
    return layout.nbytes
