"""``casnap init``."""

from __future__ import annotations

import click

from casnap.cli.arguments import open_store, options_for, writing_options
from casnap.cli.output import CommandError, emit, quote, say
from casnap.format.records import DEFAULT_CHUNK_SIZE, serving_below
from casnap.storage import CODECS, Changes, Location, chunk_size_of
from casnap.store import NewStore
from casnap.view import repository_of, view_of


def _chunk_size(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return chunk_size_of(text)
    except ValueError:
        raise click.BadParameter(
            f"{quote(text)} is not a power of two from 64KiB to 64MiB"
        ) from None


@click.command()
@click.argument("store", default=".")
@click.option(
    "--chunk-size",
    callback=_chunk_size,
    metavar="SIZE",
    help="The chunk size, which cannot be changed later: a power of two, 64KiB to 64MiB [1MiB].",
)
@click.option(
    "--codec",
    type=click.Choice(CODECS),
    help="How chunks are stored; `casnap config` says more, and changes it later [auto].",
)
@writing_options
def init(store: str, chunk_size: int | None, codec: str | None, as_json: bool) -> None:
    """Make a store.

    STORE is a folder, the current one by default. All runs that take snapshots below it then use
    this store and share equal chunks. If a store is there already, it stays as it is, and runs
    below it use it from then on.
    """
    location = Location.of_store(store, options_for(store))
    if location.name:
        uri = location.backend.uri
        raise CommandError(
            f"{uri}/{location.name} lies in the store {uri}, which keeps all snapshots below it; "
            "there is nothing to make"
        )
    size = chunk_size or DEFAULT_CHUNK_SIZE
    place = open_store(store, create=NewStore(chunk_size=size, codec=codec)).make()
    Changes(repository_of(place)).edit_settings(serving_below)
    stored_codec = place.settings["codec"]
    if chunk_size not in (None, place.chunk_size):
        raise CommandError(
            f"{place.uri} is a store already, of {binary(place.chunk_size)} chunks, which cannot "
            "be changed"
        )
    if codec not in (None, stored_codec):
        raise CommandError(
            f"{place.uri} is a store already, whose codec is {stored_codec!s:.80}; `casnap config "
            f"{place.uri} codec={codec}` changes it"
        )
    # To make a store probes its place. If the store was there before, its bucket may have begun to
    # keep versions since.
    repository_of(place).check_put_if_absent()
    if as_json:
        document = {
            "store": place.uri,
            "id": place.id,
            "chunk_size_bytes": place.chunk_size,
            "codec": stored_codec,
            "created": view_of(place).is_new,
        }
        emit(document, place)
        return
    since = "now" if view_of(place).is_new else "already"
    say(f"{place.uri} is a store {since}, of {binary(place.chunk_size)} chunks")


def binary(nbytes: int) -> str:
    """Return a chunk size as text: in MiB if it is a whole number of MiB, else in KiB."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
