"""``casnap import``."""

from __future__ import annotations

from typing import Any

import click

from casnap.cli.arguments import identity, is_exclusive, options_for, writing_options
from casnap.cli.output import amount, emit, progress_bars, say, size
from casnap.files.file_reports import ImportReport
from casnap.storage import locate_snapshot
from casnap.store import Store, import_snapshot
from casnap.view import View, view_above

EXAMPLES = """\
\b
Examples:
  casnap import model.safetensors models/base/v1
  casnap import llama/ models/llama/v1           a folder of shards with their index
  casnap import checkpoint.pt models/run1/step_100
  casnap import dcp/step_100 models/run1/step_100
  casnap import old/step_100 models/run1/step_100 --rank 0      TorchSnapshot, of many ranks
"""


@click.command("import", epilog=EXAMPLES)
@click.argument("source", metavar="FILE_OR_DIR")
@click.argument("snapshot", metavar="STORE/NAME")
@click.option(
    "--key", metavar="KEY", help="The snapshot's key to import under [model, or the file's keys]."
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="The rank whose state to import, of TorchSnapshot or torch_checkpointing.",
)
@click.option("--overwrite", is_flag=True, help="Replace a snapshot of this name.")
@click.option("--dry-run", is_flag=True, help="Only show what would be imported.")
@writing_options
def import_(
    source: str,
    snapshot: str,
    key: str | None,
    rank: int | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Import safetensors, torch.save, DCP, TorchSnapshot or torch_checkpointing as a snapshot.

    The store is found, or made, as for a take. Chunks that it has are not stored again. No code in
    a file runs: a file that needs pickle is refused.
    """
    reach = options_for(snapshot)  # raises for a dry run, too
    places: list[tuple[View, str]] = []

    def find() -> tuple[View, str]:
        places.append(
            view_above(snapshot, reach, create=True, is_typed=True, exclusive=is_exclusive()),
        )
        return places[-1]

    with progress_bars() as progress:
        options = {"overwrite": overwrite, "progress": progress}
        place = None if dry_run else find
        report = import_snapshot(source, snapshot, place, options, key=key, rank=rank, metadata={})
    if as_json:
        document = {**_identity(snapshot, reach, *places), **_facts_of(report)}
        emit(document, *(Store._of(view) for view, _ in places))
        return
    would = "would be " if dry_run else ""
    values = f" and {amount(report.values, 'value')}" if report.values else ""
    files = amount(report.files, "file")
    say(
        f"{snapshot}: {amount(report.tensors, 'tensor')}{values} of {files} "
        f"({report.format}) {would}imported"
    )
    new_text = "" if dry_run else f", {size(report.new_bytes)} new"
    say(f"{size(report.logical_bytes)}{new_text}, below {', '.join(report.keys[:8])}")


def _identity(
    path: str, reach: dict[str, Any] | None, place: tuple[View, str] | None = None
) -> dict[str, Any]:
    """Return which snapshot it is, for JSON."""
    if place is None:
        location = locate_snapshot(path, reach, is_typed=True)
        return identity(location.backend, location.name, None)
    view, name = place
    return identity(view.repository.backend, view.outer_name(name), view.row(name).commit.hex())


def _facts_of(report: ImportReport) -> dict[str, Any]:
    return {
        "dry_run": report.dry_run,
        "format": report.format,
        "key_names": report.keys,
        "file_count": report.files,
        "tensor_count": report.tensors,
        "value_count": report.values,
        "logical_bytes": report.logical_bytes,
        "new_bytes": report.new_bytes,
        "metadata": report.metadata,
        "seconds": report.seconds,
    }
