"""``casnap cache``."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
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
from casnap.runtime.environment import cache_folder, why_refused
from casnap.storage.chunks.chunk_cache import FOLDER, URI, CachedPack, cached_packs


@click.command()
@click.argument("store", required=False)
@click.option("--clear", is_flag=True, help="Delete what is listed.")
@json_option
def cache(store: str | None, clear: bool, as_json: bool) -> None:
    """Show, or clear, the chunks of remote stores that this host keeps.

    Without STORE, lists all stores. STORE is a URI, or an id from the list. A host keeps chunks if
    cache_bytes= or CASNAP_CACHE_BYTES is set. Clearing is safe: processes that need the chunks
    read them from the store again.
    """
    base = cache_folder()
    folder = None if base is None else base / FOLDER
    reason = None if folder is None or not folder.exists() else why_refused(folder)
    if reason is not None:
        raise CommandError(f"{quote(str(folder))} {reason}, so casnap does not use it")
    packs = [] if folder is None else sorted(cached_packs(folder), key=attrgetter("store_id"))
    stores = [_fields(list(group)) for _, group in groupby(packs, key=attrgetter("store_id"))]
    if store is not None:
        stores = _named(store, stores)
    store_ids = {fields["id"] for fields in stores}
    if clear:
        for pack in packs:
            if pack.store_id in store_ids:
                pack.path.unlink(missing_ok=True)
    total = sum(fields["cached_bytes"] for fields in stores)
    if as_json:
        listed = [{**s, "used_time": json_time(s["used_time"])} for s in stores]
        facts = {"folder": str(folder or ""), "cached_bytes": total, "cleared": clear}
        emit({**facts, "stores": listed})
        return
    if stores:
        rows = [
            (
                s["store"],
                size(s["cached_bytes"]),
                f"{s['pack_count']:,}",
                moment(s["used_time"]),
                s["id"],
            )
            for s in stores
        ]
        table(("STORE", "BYTES", "PACKS", "USED", "ID"), rows, numbers={"BYTES", "PACKS"})
    state = "cleared" if clear else "cached"
    say(f"{size(total)} {state} in {str(folder) if folder else 'no folder'}")


def _fields(packs: list[CachedPack]) -> dict[str, Any]:
    """Return what is cached of one store, as JSON has it, but for the form of the time."""
    first = packs[0]
    return {
        "store": _uri(first.path.parents[2]),
        "id": first.store_id,
        "cached_bytes": sum(pack.nbytes for pack in packs),
        "pack_count": len(packs),
        "used_time": max(pack.used for pack in packs),
    }


def _uri(folder: Path) -> str:
    try:
        return (folder / URI).read_text("utf-8", "surrogateescape")
    except OSError:
        return "?"


def _named(store: str, stores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    named = [fields for fields in stores if store.rstrip("/") in (fields["store"], fields["id"])]
    if not named:
        hint = nearest(store, [fields["store"] for fields in stores])
        raise CommandError(f"nothing of {quote(store)} is cached on this host{hint}")
    return named
