"""``casnap gc``."""

from __future__ import annotations

import time
from typing import Any

import click

from casnap.cli.arguments import open_whole_store, store_fields, writing_options
from casnap.cli.option_types import duration_or_none, share
from casnap.cli.output import (
    emit,
    json_time,
    moment,
    print_requests,
    print_warnings,
    progress_bars,
    report_fields,
    say,
    size,
)
from casnap.runtime.sizes import amount
from casnap.storage import GcOptions, GcReport, collect
from casnap.store import Store
from casnap.view import repository_of

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
    default=None,
    show_default="what the store is set to, or 24h",
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
@click.option(
    "--recode-after",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="COUNT",
    help="Recode all but so many of the newest snapshots of each folder (0: none).",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@writing_options
def gc(
    store: str | None,
    grace: float | None,
    repack: float,
    recode_after: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Collect garbage: delete what no snapshot of a store needs.

    Processes that delete snapshots collect garbage by themselves. A collection is safe while runs
    take snapshots, and beside other collections. It condemns the packs that no snapshot needs. The
    first collection after the grace deletes them, so that readers can finish. After an
    interruption, repeat it.

    On a disk it first recodes older snapshots: it stores their chunks as differences from the
    snapshot before, where that is smaller. See `casnap config --help`.
    """
    place = open_whole_store(store)
    report = collect_garbage(
        place,
        GcOptions(grace=grace, repack=repack, dry_run=dry_run, recode_after=recode_after or None),
    )
    if as_json:
        emit({**store_fields(place), **garbage_fields(report)}, place)
    else:
        show(place, report)
        print_requests(place.requests)


def collect_garbage(place: Store, options: GcOptions) -> GcReport:
    """Collect the garbage of a store, with a progress bar on a terminal."""
    with progress_bars(lambda: place.requests) as report:
        return collect(repository_of(place), options, report)


def garbage_fields(report: GcReport) -> dict[str, Any]:
    """Return, for JSON, what a collection did, or a dry run would do."""
    fields = report_fields(report, *_NUMBERS)
    fields["waiting_until_time"] = json_time(fields.pop("waiting_until"))
    return fields


_NUMBERS = (
    "snapshots",
    "live_chunks",
    "condemned_packs",
    "rescued_packs",
    "repacked_packs",
    "recoded_snapshots",
    "recoded_chunks",
    "merged_segments",
    "deleted_packs",
    "deleted_segments",
    "waiting_packs",
    "lost_chunks",
)


def show(place: Store, report: GcReport) -> None:
    """Print what a collection did, or a dry run would do."""
    r, would = report, "would be " if report.dry_run else ""
    live_text = f"{amount(r.live_chunks, 'chunk')} of {size(r.live_bytes)}"
    uri = repository_of(place).backend.uri
    say(f"{uri}: {amount(r.snapshots, 'snapshot')} marked, {live_text} needed")
    if r.lost_chunks:
        say(f"{amount(r.lost_chunks, 'chunk')} known to be lost; see `casnap check`")
    _show_copies(r, would)
    if r.rescued_packs:
        say(f"{amount(r.rescued_packs, 'condemned pack')} {would}rescued")
    if r.condemned_packs:
        packs = amount(r.condemned_packs, "pack")
        say(f"{packs} of {size(r.condemned_bytes)} {would}condemned")
    if r.merged_segments > 0:
        is_shorter = "would be" if r.dry_run else "is"
        say(f"the index {is_shorter} {amount(r.merged_segments, 'segment')} shorter")
    if r.fence is not None:
        is_raised = "would be" if r.dry_run else "was"
        # A dry run does not know how many roots the copying of packs would put.
        or_later = " or a later one" if r.dry_run and r.repacked_packs else ""
        say(f"the fence {is_raised} raised to root {r.fence:,}{or_later}")
    packs, segments = amount(r.deleted_packs, "pack"), amount(r.deleted_segments, "segment")
    say(f"{packs} and {segments} {would}deleted: {size(r.freed_bytes)} freed")
    if r.refused:
        files, example = amount(len(r.refused), "file"), min(r.refused)
        say(
            f"{files} could not be deleted: only their owners may do that, by running gc; "
            f"such as {r.refused[example]}"
        )
    print_warnings(r.warnings)
    if r.waiting_packs:
        waiting = f"{amount(r.waiting_packs, 'condemned pack')} of {size(r.waiting_bytes)} to go"
        until = r.waiting_until or 0.0
        if until <= time.time():
            say(f"{waiting} when the takes under way have ended: the next gc frees all of it")
            return
        say(
            f"{waiting} when the grace is over: a gc after {moment(until)} frees all of it, "
            "--grace 0 frees it now"
        )


def _show_copies(report: GcReport, would: str) -> None:
    if report.recoded_snapshots and report.dry_run:
        say(
            f"{amount(report.recoded_snapshots, 'snapshot')} would be recoded first; how much that "
            "saves is not known before"
        )
    if report.recoded_chunks:
        snapshots = amount(report.recoded_snapshots, "snapshot")
        saved = f"{amount(report.recoded_chunks, 'chunk')} take up {size(report.saved_bytes)} less"
        say(f"{snapshots} recoded: {saved}")
    if report.repacked_packs:
        packs = amount(report.repacked_packs, "pack")
        about = "about " if report.dry_run else ""
        say(f"{packs} {would}repacked: {about}{size(report.copied_bytes)} copied")
