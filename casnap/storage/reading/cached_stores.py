"""This host's caches of each store, for people: indexes, and chunks of remote stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from casnap.backends.local_files import exists
from casnap.errors import StoreError
from casnap.runtime.environment import why_refused
from casnap.storage.lookup.index_cache import cached_indexes
from casnap.storage.reading.chunk_cache import FOLDER, cached_packs, noted_uri


@dataclass
class CachedStore:
    """This host's caches of one store.

    Attributes:
        store_id: The id of the store; "" for notes about places that name no store.
        uri: The URI by which the store was last used; "" if it is not known.
        last_use: When the caches were last used, in seconds since the epoch.
        index_bytes: How many bytes the cached indexes take up on the disk.
        cached_bytes: How many bytes the cached chunks take up on the disk.
        pack_count: How many packs have cached chunks.
    """

    store_id: str
    uri: str = ""
    last_use: float = 0.0
    index_bytes: int = 0
    cached_bytes: int = 0
    pack_count: int = 0
    _deletions: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def all_in(cls, base: Path | None) -> list[CachedStore]:
        """Return this host's caches of each store, sorted by URI.

        Args:
            base: The folder for caches; None if there is none.

        Raises:
            StoreError: The folder of cached chunks belongs to another user, or is not on a disk of
                this host.
        """
        if base is None:
            return []
        folder = base / FOLDER
        if exists(folder) and (reason := why_refused(folder)) is not None:
            raise StoreError(f"'{folder}' {reason}, so casnap does not use it")
        stores: dict[str, CachedStore] = {}
        for index in cached_indexes(base):
            store_id = index.store_id or ""
            kept = stores.setdefault(store_id, cls(store_id))
            kept._add(index.uri, index.last_use, index.delete)
            kept.index_bytes += index.nbytes
        by_store = attrgetter("store_id")
        for store_id, group in groupby(sorted(cached_packs(folder), key=by_store), by_store):
            packs = list(group)
            kept = stores.setdefault(store_id, cls(store_id))
            last_use = max(pack.last_use for pack in packs)
            kept._add(noted_uri(folder, store_id), last_use, *(pack.delete for pack in packs))
            kept.cached_bytes = sum(pack.nbytes for pack in packs)
            kept.pack_count = len(packs)
        return sorted(stores.values(), key=lambda kept: kept.uri or "?")

    def clear(self) -> None:
        """Delete these caches. Processes that use them can go on."""
        for delete in self._deletions:
            delete()

    def _add(self, uri: str, last_use: float, *deletions: Callable[[], None]) -> None:
        # A store that was moved or copied has a cached index for each place.
        if uri and (last_use >= self.last_use or not self.uri):
            self.uri = uri
        self.last_use = max(self.last_use, last_use)
        self._deletions += deletions
