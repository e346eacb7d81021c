"""``casnap du``."""

from __future__ import annotations

from dataclasses import asdict

import click

from casnap.cli.arguments import (
    endpoint_option,
    named_fields,
    open_store,
    print_requests,
    request_fields,
    snapshots_of,
    store_fields,
)
from casnap.cli.output import counted, emit, json_option, phases, safe, size, table
from casnap.maintenance.usage import stored_bytes, usage


@click.command()
@click.argument("store", required=False)
@click.argument("prefix", required=False)
@endpoint_option
@json_option
def du(store: str | None, prefix: str | None, as_json: bool) -> None:
    """Show the disk usage of snapshots: logical, stored and unique bytes.

    LOGICAL is the size of the state. STORED is everything in the store that the snapshot refers
    to. UNIQUE is the part of it that no other snapshot refers to: what deleting it would free.
    """
    place = open_store(store)
    found = snapshots_of(place, prefix)
    objects = place.objects
    with phases(lambda: place.requests) as report:
        usages = usage([s.contents for s in found], objects, report)
    logical, stored = sum(u.logical_bytes for u in usages), stored_bytes(objects)
    if as_json:
        # The name of a usage is that in the view; here it is that in the store.
        listed = [{**asdict(u), **named_fields(s)} for s, u in zip(found, usages, strict=True)]
        totals = {"logical_bytes": logical, "stored_bytes": stored}
        emit({**store_fields(place), "snapshots": listed, **totals, **request_fields(place)})
        return
    if found:
        rows = [
            (safe(s.name), size(u.logical_bytes), size(u.stored_bytes), size(u.unique_bytes))
            for s, u in zip(found, usages, strict=True)
        ]
        header = ("NAME", "LOGICAL", "STORED", "UNIQUE")
        table(header, rows, numbers={"LOGICAL", "STORED", "UNIQUE"})
    what = f"{counted(len(found), 'snapshot')} of {size(logical)}"
    click.echo(f"{what}; {safe(objects.backend.uri)} takes up {size(stored)} in packs")
    print_requests(place.requests)
