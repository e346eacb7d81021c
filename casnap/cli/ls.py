"""``casnap ls``."""

from __future__ import annotations

import click

from casnap.cli.arguments import (
    metadata_of,
    open_store,
    reading_options,
    snapshot_fields,
    snapshots_of,
    store_fields,
)
from casnap.cli.output import amount, emit, moment, say, size, summary, table
from casnap.snapshot import Snapshot
from casnap.view import repository_of, view_of


@click.command()
@click.argument("store", required=False)
@click.argument("prefix", required=False)
@click.option("--wide", is_flag=True, help="Cut nothing, however narrow the terminal is.")
@reading_options
def ls(store: str | None, prefix: str | None, wide: bool, as_json: bool) -> None:
    """List the snapshots of a store, the newest last.

    Without STORE, lists the store at or above the current folder. PREFIX limits the list to one
    run. METADATA begins with the tags. NEW is how much the snapshot added to the store, LOGICAL the
    size of the state. On a narrow terminal, long metadata are cut first, then the last columns.
    """
    place = open_store(store)
    snapshots = snapshots_of(place, prefix)
    if as_json:
        from casnap.cli.mirror import commits_lacking

        lacking = commits_lacking(place, snapshots)
        listed = [snapshot_fields(snapshot, lacking) for snapshot in snapshots]
        emit({**store_fields(place), "snapshots": listed}, place)
        return
    if not snapshots:
        from casnap.storage import ForeignCheckpoints

        folder = repository_of(place).backend.folder
        advice = (
            ""
            if folder is None
            else ForeignCheckpoints(folder / view_of(place).folder(prefix)).advice_within()
        )
        say(advice or f"{place.uri} holds no snapshot yet", err=True)
        return
    rows = list(map(_cells, snapshots))
    header = ("NAME", "METADATA", "TIME", "NEW", "LOGICAL", "ENTRIES")
    table(header, rows, numbers={"NEW", "LOGICAL", "ENTRIES"}, cut="METADATA", wide=wide)
    if condemned := repository_of(place).recent().condemned:
        say(f"{amount(len(condemned), 'pack')} of garbage to be freed; see `casnap du`", err=True)


def _cells(snapshot: Snapshot) -> tuple[str, ...]:
    row = snapshot.row
    told = summary(
        metadata_of(snapshot),
        row.tags,
        holds=row.awaited,
        thinned=row.is_thinned,
        unknown_features=row.unknown_features,
    )
    new, logical, entries = row.stats.new_bytes, row.stats.logical_bytes, row.stats.entries
    return snapshot.name, told, moment(row.time), size(new), size(logical), f"{entries:,}"
