"""``casnap upgrade``."""

from __future__ import annotations

import click

from casnap.cli.arguments import (
    endpoint_option,
    exclusive_option,
    open_store,
    request_fields,
)
from casnap.cli.output import emit, json_option, safe


@click.command()
@click.argument("store", default=".")
@exclusive_option
@endpoint_option
@json_option
def upgrade(store: str, as_json: bool) -> None:
    """Upgrade a store to the newest format.

    In the new format, takes stay fast and small however many snapshots the store holds. Snapshots,
    chunks and packs do not change. Older versions of casnap then refuse the store, so update all
    of its users first.
    """
    place = open_store(store)
    was = place.format
    upgraded = place.upgrade()
    if as_json:
        facts = {"upgraded": upgraded, "format": place.format, **request_fields(place)}
        emit({"store": place.objects.backend.uri, **facts})
    elif upgraded:
        click.echo(f"{safe(place.objects.backend.uri)}: format {was} -> {place.format}")
    else:
        click.echo(f"{safe(place.objects.backend.uri)} has the newest format already: {was}")
