"""``casnap import``."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import click

from casnap.cli.arguments import endpoint_option, exclusive_option, is_exclusive, options_for
from casnap.cli.output import counted, emit, json_option, phases, safe, size
from casnap.opened.finding import store_above
from casnap.upkeep import import_snapshot

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
    find = partial(store_above, snapshot, reach, create=True, exclusive=is_exclusive())
    with phases() as progress:
        options = {"overwrite": overwrite, "progress": progress}
        place = None if dry_run else find
        report = import_snapshot(source, snapshot, place, options, key=key, rank=rank, metadata={})
    if as_json:
        emit(asdict(report))
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
