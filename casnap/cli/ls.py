"""``casnap ls``."""

from __future__ import annotations

import click

from casnap.cli.arguments import (
    endpoint_option,
    metadata_of,
    open_store,
    request_fields,
    snapshot_fields,
    snapshots_of,
    store_fields,
)
from casnap.cli.output import described, emit, json_option, moment, safe, size, table
from casnap.storage.mirror_notes import is_unmirrored
from casnap.storage.other_formats import hint_in


@click.command()
@click.argument("store", required=False)
@click.argument("prefix", required=False)
@endpoint_option
@json_option
def ls(store: str | None, prefix: str | None, as_json: bool) -> None:
    """List the snapshots of a store, the newest last.

    Without STORE, lists the store at or above the current folder. PREFIX limits the list to one
    run. LOGICAL is the size of the state, NEW how much the snapshot added to the store.
    """
    place = open_store(store)
    found = snapshots_of(place, prefix)
    if as_json:
        listed = [snapshot_fields(s) for s in found]
        emit({**store_fields(place), "snapshots": listed, **request_fields(place)})
        return
    if not found:
        folder = place.objects.backend.folder
        hint = "" if folder is None else hint_in(folder / place.folder(prefix))
        click.echo(safe(hint or f"{place.uri} holds no snapshot yet"), err=True)
        return
    rows = [
        (
            safe(s.name),
            moment(s.time),
            size(s.stats.logical_bytes),
            size(s.stats.new_bytes),
            f"{s.stats.entries:,}",
            described(metadata_of(s), s.tags, unmirrored=is_unmirrored(s.row)),
        )
        for s in found
    ]
    header = ("NAME", "TIME", "LOGICAL", "NEW", "ENTRIES", "METADATA")
    table(header, rows, numbers={"LOGICAL", "NEW", "ENTRIES"})
