"""``casnap cache``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

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
from casnap.runtime.environment import cache_folder, local_path
from casnap.storage import CachedStore


@click.command()
@click.argument("store", required=False)
@click.option("--clear", is_flag=True, help="Delete what is listed.")
@json_option
def cache(store: str | None, clear: bool, as_json: bool) -> None:
    """Show, or clear, what this host keeps of stores: their indexes, and chunks of remote ones.

    Without STORE, lists all stores. STORE is a URI, or an id from the list. A host keeps chunks if
    cache_bytes= or CASNAP_CACHE_BYTES is set. Clearing is safe: processes read from the store again
    what they need. The index of a store that is gone, or that nobody used for a month, is deleted
    when an index of another store is made.
    """
    folder = cache_folder()
    kept = CachedStore.all_in(folder)
    if store is not None:
        kept = _named(store, kept)
    if clear:
        for each in kept:
            each.clear()
    # Facts about a place whose store is unknown make no row, but their bytes count in the total.
    stores = [each for each in kept if each.store_id]
    cached_bytes = sum(each.cached_bytes for each in kept)
    index_bytes = sum(each.index_bytes for each in kept)
    if as_json:
        facts = {"folder": str(folder or ""), "cached_bytes": cached_bytes, "cleared": clear}
        emit({**facts, "index_bytes": index_bytes, "stores": list(map(_fields, stores))})
        return
    if stores:
        rows = [
            (
                each.uri or "?",
                size(each.index_bytes),
                size(each.cached_bytes),
                f"{each.pack_count:,}",
                moment(each.last_use),
                each.store_id,
            )
            for each in stores
        ]
        headings = ("STORE", "INDEX", "CHUNKS", "PACKS", "USED", "ID")
        table(headings, rows, numbers={"INDEX", "CHUNKS", "PACKS"})
    state = "cleared" if clear else "cached"
    say(f"{size(index_bytes + cached_bytes)} {state} in {str(folder) if folder else 'no folder'}")


def _fields(kept: CachedStore) -> dict[str, Any]:
    return {
        "store": kept.uri or "?",
        "id": kept.store_id,
        "cached_bytes": kept.cached_bytes,
        "index_bytes": kept.index_bytes,
        "pack_count": kept.pack_count,
        "used_time": json_time(kept.last_use),
    }


def _named(store: str, kept: list[CachedStore]) -> list[CachedStore]:
    names = {store.rstrip("/"), store}
    if "://" not in store:
        # A store on this host is listed by its real path.
        names.add(str(Path(local_path(store)).resolve()))
    # A place whose store is unknown cannot be named.
    stores = [each for each in kept if each.store_id]
    matches = [each for each in stores if names & {each.uri or "?", each.store_id}]
    if not matches:
        advice = nearest(store, [each.uri or "?" for each in stores])
        raise CommandError(f"nothing of {quote(store)} is cached on this host{advice}")
    return matches
