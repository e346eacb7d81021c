"""``casnap trust``."""

from __future__ import annotations

import click

from casnap.backends import LocalBackend
from casnap.cli.arguments import open_store
from casnap.cli.output import CommandError, emit, json_option, quoted, safe
from casnap.storage.location import trust as add_to_trusted
from casnap.storage.uris import store_uri


@click.command()
@click.argument("store")
@json_option
def trust(store: str, as_json: bool) -> None:
    """Let another user's store be found by walking up from a path.

    Snapshots with paths below STORE are then stored in it and read from it. Without trust, casnap
    finds only your own stores by walking up, and uses another user's store only if you name it.
    """
    if store_uri(store) is not None:
        raise CommandError(
            f"{quoted(store)} is on a server, where no store is looked for above a path"
        )
    place = open_store(store)
    backend = place.objects.backend
    if place.prefix or not isinstance(backend, LocalBackend):
        raise CommandError(f"{quoted(store)} is not itself a store; name {backend.uri}")
    add_to_trusted(backend.folder)
    if as_json:
        emit({"store": place.uri, "trusted": True})
    else:
        click.echo(f"{safe(place.uri)} is trusted from now on")
