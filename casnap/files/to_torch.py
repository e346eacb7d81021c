"""Export a file of ``torch.save``."""

from __future__ import annotations

from typing import Any

from casnap.files.export_output import ExportOutput
from casnap.files.export_selection import (
    Part,
    equal_tensors,
    is_plain,
    named_tensors,
    sparse_below,
    without_tied,
)
from casnap.files.file_reports import ExportOptions, ExportPlan, ExportReport
from casnap.files.tensor_writer import TensorWriter
from casnap.files.torch_archive import Archive, StandIns, write_archives
from casnap.format.entries import Entry, TensorEntry
from casnap.format.names import key_of
from casnap.restore.loading import Loading
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.flatten import inflate
from casnap.state.tensors import TENSOR_DTYPES, Leaf
from casnap.storage import Contents


def plan_torch(contents: Contents, part: Part, name: str, options: ExportOptions) -> ExportPlan:
    """Plan an export of a state with all its values, as a file that ``torch.load`` reads.

    Raises:
        FileFormatError: A name of ``options.tied`` is no tensor, or no other tensor equals it.
        UnsupportedTypeError: A value was stored with ``allow_pickle``.
    """
    # Plain tensors are written chunk by chunk; all other values are read whole.
    inside = sparse_below(part)
    streamed = {
        path: entry
        for path, entry in part.entries.items()
        if isinstance(entry, TensorEntry) and is_plain(entry) and not path.startswith(inside)
    }
    tensors, _ = named_tensors(part, TENSOR_DTYPES, contents.label)
    _, tied_names = without_tied(tensors, options.tied, contents.label)
    tied_to = {tensors[name].path: tensors[alias].path for name, alias in tied_names.items()}
    entries = {path: entry for path, entry in streamed.items() if path not in tied_to}
    total = sum(entry.payload.nbytes for entry in entries.values())
    report = ExportReport(options.dry_run, "torch", {name: total}, len(streamed), total)
    report.tied, report.equal = tied_names, equal_tensors(tensors, tied_names)

    def write(output: ExportOutput, writer: TensorWriter) -> None:
        with output.file(name) as fd:
            stand_ins = StandIns(entries.values())
            with without_torch_modes():
                state = _state(contents, part, entries, tied_to, stand_ins)
                archive = Archive(0, state, stand_ins)
            write_archives(fd, writer, [archive], archive.nbytes)

    return ExportPlan(report, write)


def _state(
    contents: Contents,
    part: Part,
    entries: dict[str, TensorEntry],
    tied_to: dict[str, str],
    stand_ins: StandIns,
) -> Any:
    """Return the state, with stand-ins for the tensors that are written chunk by chunk.

    Args:
        contents: The snapshot.
        part: The part that is exported.
        entries: Path → entry of each tensor that gets a stand-in.
        tied_to: Path of each tied tensor → path of the tensor whose stand-in it shares.
        stand_ins: Makes the stand-ins.
    """
    leaves = {path: Leaf(path, e, stand_ins.tensor(path, e)) for path, e in entries.items()}
    for path, first_path in tied_to.items():
        entry = part.entries[path]
        assert isinstance(entry, TensorEntry)
        leaves[path] = Leaf(path, entry, leaves[first_path].content)
    leaves |= read_values(contents, {p: e for p, e in part.entries.items() if p not in leaves})
    if part.path:
        return inflate(part.path, leaves)
    keys = dict.fromkeys(path.partition("/")[0] for path in part.entries)
    return {key_of(key): inflate(key, leaves) for key in keys}


def read_values(contents: Contents, entries: dict[str, Entry]) -> dict[str, Leaf]:
    """Read whole entries into memory; return their leaves by path."""
    loading = Loading(contents)
    for path, entry in entries.items():
        loading.add(path, entry)
    return loading.load()
