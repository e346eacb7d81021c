"""``casnap ls``."""

from __future__ import annotations

from collections.abc import Collection

import click

from casnap.cli.arguments import (
    metadata_of,
    open_store,
    reading_options,
    snapshot_fields,
    snapshots_of,
    store_fields,
)
from casnap.cli.output import MUST, emit, moment, say, size, summary, table
from casnap.runtime.sizes import amount
from casnap.snapshot import Snapshot
from casnap.view import repository_of, view_of

_MOST = 56
"""How many characters of metadata a narrow terminal shows before it shows the last columns."""


@click.command()
@click.argument("store", required=False)
@click.argument("prefix", required=False)
@click.option("--wide", is_flag=True, help="Cut and leave out nothing.")
@reading_options
def ls(store: str | None, prefix: str | None, wide: bool, as_json: bool) -> None:
    """List the snapshots of a store, the newest last.

    Without STORE, lists the store at or above the current folder. PREFIX limits the list to one
    run. METADATA begins with the tags, and says if a snapshot has NaN. NEW is how much the snapshot
    added to the store, LOGICAL the size of the state. The speed of a run ("eval_runtime") is left
    out of the metadata. On a narrow terminal, long metadata are cut first; then the last columns
    are left out.
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
    rows = [_cells(snapshot, wide=wide) for snapshot in snapshots]
    header = ("NAME", "METADATA", "TIME", "NEW", "LOGICAL", "ENTRIES")

    def least() -> int:
        must = max(len(_told(snapshot, brief=True, only=MUST)) for snapshot in snapshots)
        return min(must + 2, _MOST)

    numbers = {"NEW", "LOGICAL", "ENTRIES"}
    table(header, rows, numbers, cut="METADATA", least=least, wide=wide)
    if condemned := repository_of(place).recent().condemned:
        say(f"{amount(len(condemned), 'pack')} of garbage to be freed; see `casnap du`", err=True)


def _cells(snapshot: Snapshot, *, wide: bool) -> tuple[str, ...]:
    row = snapshot.row
    told = _told(snapshot, brief=not wide)
    new, logical, entries = row.stats.new_bytes, row.stats.logical_bytes, row.stats.entries
    return snapshot.name, told, moment(row.time), size(new), size(logical), f"{entries:,}"


def _told(snapshot: Snapshot, *, brief: bool, only: Collection[str] | None = None) -> str:
    """Return the tags, the metadata and the state of a snapshot in one line.

    Args:
        snapshot: The snapshot.
        brief: Whether to leave out the metadata about speed.
        only: The keys of the metadata to show; None for all.
    """
    row, metadata = snapshot.row, metadata_of(snapshot)
    if metadata is not None and only is not None:
        metadata = {key: value for key, value in metadata.items() if key in only}
    return summary(
        metadata,
        row.tags,
        holds=row.awaited,
        thinned=row.is_thinned,
        unhealthy=row.unhealthy,
        unknown_features=row.unknown_features,
        brief=brief,
    )
