"""What this host keeps of stores, for people: their indexes, and chunks of remote ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from casnap.backends.local.local_paths import exists
from casnap.errors import StoreError
from casnap.runtime.environment import why_refused
from casnap.storage.lookup.index_cache import cached_indexes
from casnap.storage.reading.chunk_cache import FOLDER, cached_packs, noted_uri


@dataclass
class CachedStore:
    """What this host keeps of a store.

    Attributes:
        store_id: The id of the store; empty for what is known of places, whatever stores are there.
        uri: Where the store is, or was, when it was used last; empty if that is not known.
        last_use: When it was used last, in seconds since the epoch.
        index_bytes: How many bytes its index takes up on the disk.
        cached_bytes: How many bytes its chunks take up there.
        pack_count: In so many packs these lie.
    """

    store_id: str
    uri: str = ""
    last_use: float = 0.0
    index_bytes: int = 0
    cached_bytes: int = 0
    pack_count: int = 0
    _deletions: list[Callable[[], None]] = field(default_factory=list)

    def clear(self) -> None:
        """Delete it. Processes that use it can go on."""
        for delete in self._deletions:
            delete()

    def _add(self, uri: str, last_use: float, *deletions: Callable[[], None]) -> None:
        # A store that was moved or copied has the index of each place.
        if uri and (last_use >= self.last_use or not self.uri):
            self.uri = uri
        self.last_use = max(self.last_use, last_use)
        self._deletions += deletions


def cached_stores(base: Path | None) -> list[CachedStore]:
    """Return what this host keeps of each store, by their URIs.

    Args:
        base: The folder for caches; None if there is none.

    Raises:
        StoreError: Another user can change what is there.
    """
    if base is None:
        return []
    folder = base / FOLDER
    if exists(folder) and (reason := why_refused(folder)) is not None:
        raise StoreError(f"'{folder}' {reason}, so casnap does not use it")
    stores: dict[str, CachedStore] = {}
    for index in cached_indexes(base):
        store_id = index.store_id or ""
        kept = stores.setdefault(store_id, CachedStore(store_id))
        kept._add(index.uri, index.last_use, index.delete)
        kept.index_bytes += index.nbytes
    by_store = attrgetter("store_id")
    for store_id, group in groupby(sorted(cached_packs(folder), key=by_store), by_store):
        packs = list(group)
        kept = stores.setdefault(store_id, CachedStore(store_id))
        last_use = max(pack.last_use for pack in packs)
        kept._add(noted_uri(folder, store_id), last_use, *(pack.delete for pack in packs))
        kept.cached_bytes = sum(pack.nbytes for pack in packs)
        kept.pack_count = len(packs)
    return sorted(stores.values(), key=lambda kept: kept.uri or "?")
