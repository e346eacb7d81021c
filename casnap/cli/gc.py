"""``casnap gc``."""

from __future__ import annotations

import re
from dataclasses import asdict

import click

from casnap.cli.durations import duration
from casnap.cli.output import counted, emit, json_option, phases, quoted, size
from casnap.cli.places import open_store, place_of
from casnap.gc import GcReport
from casnap.store import Store

_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)%")

grace_option = click.option(
    "--grace",
    type=duration,
    default="24h",
    show_default=True,
    metavar="TIME",
    help="Keep for so long what nobody needs any more; 0 for not at all.",
)


def _share(text: str) -> float:
    found = _SHARE.fullmatch(text)
    if found is None or float(found[1]) > 100:
        raise click.BadParameter(f"{quoted(text)} is no share; write 50%, or 0% for never")
    return float(found[1]) / 100


@click.command()
@click.argument("store", required=False)
@grace_option
@click.option(
    "--repack",
    type=_share,
    default="50%",
    show_default=True,
    metavar="SHARE",
    help="Copy what is needed out of packs of which less than this is.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@click.option(
    "--exclusive",
    is_flag=True,
    help="Nobody else writes to the store: for places that cannot keep writers apart.",
)
@json_option
def gc(
    store: str | None,
    grace: float,
    repack: float,
    dry_run: bool,
    exclusive: bool,
    as_json: bool,
) -> None:
    r"""Collect garbage: delete what no snapshot needs.

    Safe while runs take snapshots, and beside other collectors. What nobody needs is condemned
    first, and deleted by the first gc after the grace, so that whoever still reads it can end; so
    run it regularly. After an interruption, run it again.

    \b
    Examples:
      casnap gc /ckpts --dry-run
      casnap gc /ckpts --grace 1h
      casnap gc /ckpts --grace 0      free it all at once; takes that rely on it begin again
    """
    place = open_store(store)
    report = collected(place, grace, repack, dry_run=dry_run, exclusive=exclusive)
    if as_json:
        emit({**place_of(place), **asdict(report)})
    else:
        show(report)


def collected(
    place: Store, grace: float, repack: float = 0.5, *, dry_run: bool, exclusive: bool = False
) -> GcReport:
    """Collect the garbage of a store, with a progress bar on a terminal."""
    with phases() as report:
        return place.gc(
            grace=grace, repack=repack, dry_run=dry_run, exclusive=exclusive, progress=report
        )


def show(report: GcReport) -> None:
    """Print what was done, or would be."""
    r, would = report, "would be " if report.dry_run else ""
    needed = f"{counted(r.live_chunks, 'chunk')} of {size(r.live_bytes)}"
    click.echo(f"{counted(r.snapshots, 'snapshot')} marked: {needed} needed")
    if r.lost_chunks:
        click.echo(f"{counted(r.lost_chunks, 'chunk')} known to be lost; see `casnap check`")
    if r.repacked_packs:
        packs = counted(r.repacked_packs, "pack")
        click.echo(f"{packs} {would}repacked: {size(r.copied_bytes)} copied")
    if r.rescued_packs:
        click.echo(f"{counted(r.rescued_packs, 'condemned pack')} {would}taken back")
    if r.condemned_packs:
        packs = counted(r.condemned_packs, "pack")
        click.echo(f"{packs} of {size(r.condemned_bytes)} {would}condemned")
    if r.merged_segments > 0:
        click.echo(f"the index is {counted(r.merged_segments, 'segment')} shorter")
    if r.fence is not None:
        click.echo(f"the fence was raised to root {r.fence:,}")
    packs, segments = counted(r.deleted_packs, "pack"), counted(r.deleted_segments, "segment")
    click.echo(f"{packs} and {segments} {would}deleted: {size(r.freed_bytes)} freed")
    if r.waiting_packs:
        packs = counted(r.waiting_packs, "condemned pack")
        click.echo(f"{packs} of {size(r.waiting_bytes)} go when the grace is over: run gc again")
