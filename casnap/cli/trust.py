"""``casnap trust``."""

from __future__ import annotations

import click

from casnap.backends import LocalBackend
from casnap.cli.arguments import open_store
from casnap.cli.output import Failure, emit, json_option, quoted, safe
from casnap.storage.location import trust as add_to_trusted


@click.command()
@click.argument("store")
@json_option
def trust(store: str, as_json: bool) -> None:
    """Let another user's store be found by walking up from a path.

    Snapshots whose path lies below STORE are then taken to it and read from it. Without this,
    only a store of your own is found that way, or one that is named.
    """
    place = open_store(store)
    backend = place.objects.backend
    if place.prefix or not isinstance(backend, LocalBackend):
        raise Failure(f"{quoted(store)} is no store itself; name {backend.uri}")
    add_to_trusted(backend.folder)
    if as_json:
        emit({"store": place.uri, "trusted": True})
    else:
        click.echo(f"{safe(place.uri)} is trusted from now on")
