"""``casnap cache``."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import click

from casnap.backends.places import exists
from casnap.cli.output import (
    CommandError,
    emit,
    json_option,
    json_time,
    moment,
    quote,
    say,
    size,
    table,
)
from casnap.errors import nearest
from casnap.runtime.environment import cache_folder, local_path, why_refused
from casnap.storage.lookup.index_cache import CachedIndex, cached_indexes
from casnap.storage.reading.chunk_cache import FOLDER, URI, CachedPack, cached_packs


@click.command()
@click.argument("store", required=False)
@click.option("--clear", is_flag=True, help="Delete what is listed.")
@json_option
def cache(store: str | None, clear: bool, as_json: bool) -> None:
    """Show, or clear, what this host keeps of stores: their indexes, and chunks of remote ones.

    Without STORE, lists all stores. STORE is a URI, or an id from the list. A host keeps chunks if
    cache_bytes= or CASNAP_CACHE_BYTES is set. Clearing is safe: processes that need what was
    cached read it from the store again. The index of a store that is gone, or that nobody used for
    a month, is deleted when that of another one is made.
    """
    base = cache_folder()
    folder = None if base is None else base / FOLDER
    reason = None if folder is None or not exists(folder) else why_refused(folder)
    if reason is not None:
        raise CommandError(f"{quote(str(folder))} {reason}, so casnap does not use it")
    packs = [] if folder is None else sorted(cached_packs(folder), key=attrgetter("store_id"))
    indexes = [] if base is None else list(cached_indexes(base))
    stores = _stores(packs, indexes)
    if store is not None:
        stores = _stores_named(store, stores)
    store_ids = {fields["id"] for fields in stores}
    packs = [pack for pack in packs if pack.store_id in store_ids]
    # What is known of a place alone is no row, and counts where all is shown.
    indexes = [i for i in indexes if i.store_id in store_ids or (store, i.store_id) == (None, None)]
    if clear:
        for pack in packs:
            pack.path.unlink(missing_ok=True)
        for index in indexes:
            index.delete()
    cached_bytes = sum(pack.nbytes for pack in packs)
    index_bytes = sum(index.nbytes for index in indexes)
    if as_json:
        listed = [{**s, "used_time": json_time(s["used_time"])} for s in stores]
        facts = {"folder": str(base or ""), "cached_bytes": cached_bytes, "cleared": clear}
        emit({**facts, "index_bytes": index_bytes, "stores": listed})
        return
    if stores:
        rows = [
            (
                s["store"],
                size(s["index_bytes"]),
                size(s["cached_bytes"]),
                f"{s['pack_count']:,}",
                moment(s["used_time"]),
                s["id"],
            )
            for s in stores
        ]
        headings = ("STORE", "INDEX", "CHUNKS", "PACKS", "USED", "ID")
        table(headings, rows, numbers={"INDEX", "CHUNKS", "PACKS"})
    state = "cleared" if clear else "cached"
    say(f"{size(index_bytes + cached_bytes)} {state} in {str(base) if base else 'no folder'}")


def _stores(packs: list[CachedPack], indexes: list[CachedIndex]) -> list[dict[str, Any]]:
    """Return what is cached of each store, as JSON has it, but for the form of the time."""
    stores: dict[str, dict[str, Any]] = {}

    def add(ident: str, uri: str, last_use: float, **counts: int) -> None:
        nothing = {"cached_bytes": 0, "index_bytes": 0, "pack_count": 0, "used_time": 0.0}
        fields = stores.setdefault(ident, {"store": "?", "id": ident, **nothing})
        # A store that was moved or copied has the index of each place.
        if uri and (last_use >= fields["used_time"] or fields["store"] == "?"):
            fields["store"] = uri
        fields["used_time"] = max(fields["used_time"], last_use)
        for name, count in counts.items():
            fields[name] += count

    for index in indexes:
        if index.store_id is not None:
            add(index.store_id, index.uri, index.last_use, index_bytes=index.nbytes)
    for ident, group in groupby(packs, key=attrgetter("store_id")):
        of_store = list(group)
        nbytes, last_use = (
            sum(pack.nbytes for pack in of_store),
            max(pack.last_use for pack in of_store),
        )
        uri = _uri(of_store[0].path.parents[2])
        add(ident, uri, last_use, cached_bytes=nbytes, pack_count=len(of_store))
    return sorted(stores.values(), key=lambda fields: str(fields["store"]))


def _uri(folder: Path) -> str:
    try:
        return (folder / URI).read_text("utf-8", "surrogateescape")
    except OSError:
        return ""


def _stores_named(store: str, stores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {store.rstrip("/"), store}
    if "://" not in store:
        # A store on this host is listed by its real path.
        names.add(str(Path(local_path(store)).resolve()))
    matches = [fields for fields in stores if names & {fields["store"], fields["id"]}]
    if not matches:
        hint = nearest(store, [fields["store"] for fields in stores])
        raise CommandError(f"nothing of {quote(store)} is cached on this host{hint}")
    return matches
