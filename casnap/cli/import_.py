"""``casnap import``."""

from __future__ import annotations

from dataclasses import asdict

import click

from casnap.cli.arguments import endpoint_option, exclusive_option, is_exclusive, options_for
from casnap.cli.output import counted, emit, json_option, phases, safe, size
from casnap.opened import OpenStore, find
from casnap.upkeep import imported

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
    "--key", metavar="KEY", help="The key to put all below [model, or the keys that there are]."
)
@click.option(
    "--rank", type=click.IntRange(min=0), help="Whose view of a TorchSnapshot folder to import."
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

    The store is found, or made, as for a take. Chunks that it has are not stored again. No code of
    a file is run: what needs pickle is refused.
    """
    storage_options = options_for(snapshot)

    def where() -> tuple[OpenStore, str]:
        opened, name = find(snapshot, storage_options, None, create=True)
        opened.objects.backend.exclusive |= is_exclusive()
        return opened, name

    with phases() as progress:
        options = {"overwrite": overwrite, "progress": progress}
        place = None if dry_run else where
        report = imported(source, snapshot, place, options, key=key, rank=rank, metadata={})
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
