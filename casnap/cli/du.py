"""``casnap du``."""

from __future__ import annotations

from dataclasses import asdict

import click

from casnap.cli.arguments import (
    identity_of,
    open_store,
    reading_options,
    snapshots_of,
    store_fields,
)
from casnap.cli.garbage import disk_fields, what_frees
from casnap.cli.output import emit, print_requests, progress_bars, say, size, table
from casnap.maintenance.usage import disk_usage, usage
from casnap.runtime.sizes import amount
from casnap.view import repository_of


@click.command()
@click.argument("store", required=False)
@click.argument("prefix", required=False)
@reading_options
def du(store: str | None, prefix: str | None, as_json: bool) -> None:
    """Show the disk usage of snapshots: logical, stored and unique bytes.

    LOGICAL is the size of the state. STORED counts all bytes in the store that the snapshot needs,
    also as bases of deltas. UNIQUE counts bytes that no other snapshot needs: deleting this one
    frees them. The last lines are about the whole store: its size, what deltas save, and garbage.
    """
    place = open_store(store)
    snapshots = snapshots_of(place, prefix)
    with progress_bars(lambda: place.requests) as progress:
        usages = usage([s.contents for s in snapshots], repository_of(place), progress)
    logical, disk = sum(u.logical_bytes for u in usages), disk_usage(repository_of(place))
    if as_json:
        # A usage has the name in the view; JSON has the full name in the store.
        listed = [{**asdict(u), **identity_of(s)} for s, u in zip(snapshots, usages, strict=True)]
        totals = {"logical_bytes": logical, **disk_fields(repository_of(place), disk)}
        emit({**store_fields(place), "snapshots": listed, **totals}, place)
        return
    if snapshots:
        rows = [
            (s.name, size(u.logical_bytes), size(u.stored_bytes), size(u.unique_bytes))
            for s, u in zip(snapshots, usages, strict=True)
        ]
        header = ("NAME", "LOGICAL", "STORED", "UNIQUE")
        table(header, rows, numbers={"LOGICAL", "STORED", "UNIQUE"})
    total = f"{amount(len(snapshots), 'snapshot')} of {size(logical)}"
    say(f"{total}; {repository_of(place).backend.uri} takes up {size(disk.nbytes)}")
    if disk.saved_bytes:
        say(f"deltas and compressed chunks take up {size(disk.saved_bytes)} less than whole ones")
    if disk.waiting_bytes:
        say(what_frees(repository_of(place), f"{size(disk.waiting_bytes)} of it", condemned=True))
    if disk.orphaned_bytes:
        say(f"{size(disk.orphaned_bytes)} of it are left over, or being written; see `casnap gc`")
    print_requests(place.requests)
