"""``casnap gc``."""

from __future__ import annotations

from typing import Any

import click

from casnap.cli.arguments import (
    endpoint_option,
    exclusive_option,
    open_whole_store,
    print_requests,
    request_fields,
    store_fields,
)
from casnap.cli.option_types import duration_or_none, share
from casnap.cli.output import counted, counts, emit, json_option, phases, print_warnings, safe, size
from casnap.maintenance.gc import GcOptions, GcReport, collect
from casnap.store import Store

EXAMPLES = """\
\b
Examples:
  casnap gc /ckpts --dry-run
  casnap gc /ckpts --grace 1h
  casnap gc /ckpts --grace 0      free it all now; takes that rely on it start again
"""

grace_option = click.option(
    "--grace",
    type=duration_or_none,
    default="24h",
    show_default=True,
    metavar="TIME",
    help="How long to keep unreferenced data (0: delete it now).",
)


@click.command(epilog=EXAMPLES)
@click.argument("store", required=False)
@grace_option
@click.option(
    "--repack",
    type=share,
    default="50%",
    show_default=True,
    metavar="SHARE",
    help="Repack packs of which less than this share is needed (0: never).",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@exclusive_option
@endpoint_option
@json_option
def gc(
    store: str | None,
    grace: float,
    repack: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Collect garbage: delete what no snapshot of a store needs.

    Safe while runs take snapshots, and beside other collectors. A run condemns unreferenced packs,
    and the first run after the grace deletes them, so that readers can finish. So run it
    regularly. After an interruption, run it again.
    """
    place = open_whole_store(store)
    report = collect_garbage(place, GcOptions(grace=grace, repack=repack, dry_run=dry_run))
    if as_json:
        emit({**store_fields(place), **garbage_fields(report), **request_fields(place)})
    else:
        show(place, report)
        print_requests(place.requests)


def collect_garbage(place: Store, options: GcOptions) -> GcReport:
    """Collect the garbage of a store, with a progress bar on a terminal."""
    with phases(lambda: place.requests) as report:
        return collect(place.objects, options, report)


def garbage_fields(report: GcReport) -> dict[str, Any]:
    """Return what was done, or would be, for JSON."""
    rest = {name: value for name, value in vars(report).items() if name not in _THINGS}
    return {**counts(report, *_THINGS), **rest}


_THINGS = (
    "snapshots",
    "live_chunks",
    "condemned_packs",
    "rescued_packs",
    "repacked_packs",
    "merged_segments",
    "deleted_packs",
    "deleted_segments",
    "waiting_packs",
    "lost_chunks",
)


def show(place: Store, report: GcReport) -> None:
    """Print what was done, or would be."""
    r, would = report, "would be " if report.dry_run else ""
    needed = f"{counted(r.live_chunks, 'chunk')} of {size(r.live_bytes)}"
    uri = safe(place.objects.backend.uri)
    click.echo(f"{uri}: {counted(r.snapshots, 'snapshot')} marked, {needed} needed")
    if r.lost_chunks:
        click.echo(f"{counted(r.lost_chunks, 'chunk')} known to be lost; see `casnap check`")
    if r.repacked_packs:
        packs = counted(r.repacked_packs, "pack")
        click.echo(f"{packs} {would}repacked: {size(r.copied_bytes)} copied")
    if r.rescued_packs:
        click.echo(f"{counted(r.rescued_packs, 'condemned pack')} {would}rescued")
    if r.condemned_packs:
        packs = counted(r.condemned_packs, "pack")
        click.echo(f"{packs} of {size(r.condemned_bytes)} {would}condemned")
    if r.merged_segments > 0:
        click.echo(f"the index is {counted(r.merged_segments, 'segment')} shorter")
    if r.fence is not None:
        click.echo(f"the fence was raised to root {r.fence:,}")
    packs, segments = counted(r.deleted_packs, "pack"), counted(r.deleted_segments, "segment")
    click.echo(f"{packs} and {segments} {would}deleted: {size(r.freed_bytes)} freed")
    if r.refused:
        files, first = counted(len(r.refused), "file"), min(r.refused)
        click.echo(
            f"{files} could not be deleted: only their owners may do that, by running gc; "
            f"such as {safe(r.refused[first])}"
        )
    print_warnings(r.warnings)
    if r.waiting_packs:
        packs = counted(r.waiting_packs, "condemned pack")
        click.echo(f"{packs} of {size(r.waiting_bytes)} to go when the grace is over: run gc again")
