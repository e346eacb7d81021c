"""``casnap import``."""

from __future__ import annotations

from typing import Any

import click

from casnap.cli.arguments import (
    endpoint_option,
    exclusive_option,
    is_exclusive,
    named,
    options_for,
    request_fields,
)
from casnap.cli.output import counted, counts, emit, json_option, phases, safe, size
from casnap.files.report import ImportReport
from casnap.snapshot import store_above
from casnap.storage.location import locate_snapshot
from casnap.store import Store, import_snapshot

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
    "--rank", type=click.IntRange(min=0), help="The rank whose TorchSnapshot state to import."
)
@click.option("--overwrite", is_flag=True, help="Replace a snapshot of this name.")
@click.option("--dry-run", is_flag=True, help="Only show what would be imported.")
@exclusive_option
@endpoint_option
@json_option
def import_(
    source: str,
    snapshot: str,
    key: str | None,
    rank: int | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Import safetensors, torch.save, DCP or TorchSnapshot files as a snapshot.

    The store is found, or made, as for a take. Chunks that it has are not stored again. No code in
    a file runs: a file that needs pickle is refused.
    """
    reach = options_for(snapshot)  # raises for a dry run, too
    opened: list[tuple[Store, str]] = []

    def find() -> tuple[Store, str]:
        opened.append(
            store_above(snapshot, reach, create=True, exclusive=is_exclusive()),
        )
        return opened[-1]

    with phases() as progress:
        options = {"overwrite": overwrite, "progress": progress}
        place = None if dry_run else find
        report = import_snapshot(source, snapshot, place, options, key=key, rank=rank, metadata={})
    if as_json:
        emit({**_which(snapshot, reach, *opened), **_facts_of(report)})
        return
    would = "would be " if dry_run else ""
    values = f" and {counted(report.values, 'value')}" if report.values else ""
    files = counted(report.files, "file")
    click.echo(
        f"{safe(snapshot)}: {counted(report.tensors, 'tensor')}{values} of {files} "
        f"({report.format}) {would}imported"
    )
    new = "" if dry_run else f", {size(report.new_bytes)} new"
    click.echo(f"{size(report.logical_bytes)}{new}, below {', '.join(map(safe, report.keys[:8]))}")


def _which(
    path: str, reach: dict[str, Any] | None, opened: tuple[Store, str] | None = None
) -> dict[str, Any]:
    """Return which snapshot it is, and the requests that were made; none by a dry run."""
    if opened is None:
        found = locate_snapshot(path, reach)
        return named(found.backend, found.name, None)
    store, name = opened
    full, commit = store.outer_name(name), store.row(name).commit.hex()
    return {**named(store.objects.backend, full, commit), **request_fields(store)}


def _facts_of(report: ImportReport) -> dict[str, Any]:
    return {
        "dry_run": report.dry_run,
        "format": report.format,
        "key_names": report.keys,
        **counts(report, "files", "tensors", "values"),
        "logical_bytes": report.logical_bytes,
        "new_bytes": report.new_bytes,
        "metadata": report.metadata,
        "seconds": report.seconds,
    }
