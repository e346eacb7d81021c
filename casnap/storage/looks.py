"""Looks at objects: whether they are there, and how long they are.

On a local disk each look is one call. On a remote store it is a request, so many objects are looked
at in one listing, and what was seen is believed for a day (``docs/decisions/0027``).
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Collection, Iterable, Mapping

from casnap.backends.base import Backend
from casnap.format.records import PackId, SegmentId, id_from_name, pack_key, segment_key
from casnap.runtime.threads import mapped
from casnap.storage.cache import Cache

GONE = -1
"""The length of an object that is not there."""
_BELIEVED = 86400.0
_SEEN = struct.Struct("<qd")
# A page of a listing names so many objects.
_PAGE_KEYS, _MANY = 1000, 64_000


class Looks:
    """The packs and segments of a store that one change has seen.

    Args:
        backend: Where the store lives.
        cache: Where a remote store's objects that were seen are noted.
    """

    def __init__(self, backend: Backend, cache: Cache) -> None:
        self._backend = backend
        self._cache = cache
        self._lock = threading.Lock()
        self._packs: dict[PackId, int] = {}
        self._listed: dict[bytes, int] = {}
        self._heads = 0

    def lengths(self, packs: Collection[PackId], known: int) -> dict[PackId, int]:
        """Return the lengths of some packs. Each is looked at only once.

        Args:
            packs: The packs.
            known: How many packs the store has, about.
        """
        unseen = [pack for pack in packs if pack not in self._packs]
        if unseen and self._backend.is_remote:
            with self._lock:
                self._look_together(unseen, known)
        else:
            self._packs |= {pack: self._length(pack_key(pack)) for pack in unseen}
        return {pack: self._packs[pack] for pack in packs}

    def again(self, packs: Collection[PackId]) -> dict[PackId, int]:
        """Return the lengths of packs that were looked at before, before the root is put.

        On a remote store the first look suffices: only a user who deletes by hand, or a rule of the
        bucket, removes a pack that is live.
        """
        if not self._backend.is_remote:
            self._packs = {pack: self._length(pack_key(pack)) for pack in packs}
        return {pack: self._packs[pack] for pack in packs}

    def segments(self, segments: Iterable[SegmentId]) -> dict[SegmentId, int]:
        """Return the lengths of some segments."""
        if not self._backend.is_remote:
            return {ident: self._length(segment_key(ident)) for ident in segments}
        found = {ident: seen_length(self._cache, ident) for ident in segments}
        unseen = [ident for ident, size in found.items() if size == GONE]
        if unseen:
            keys = self._backend.sizes("index") if len(unseen) > 1 else None
            for ident in unseen:
                key = segment_key(ident)
                found[ident] = self._length(key) if keys is None else keys.get(key, GONE)
            note_seen(self._cache, {i: found[i] for i in unseen})
        return found

    def _length(self, key: str) -> int:
        size = self._backend.size_if_there(key)
        return GONE if size is None else size

    def _look_together(self, packs: list[PackId], known: int) -> None:
        """Note the lengths of packs: those that were seen, and others by single looks or a list."""
        if unseen := self._unseen(packs):
            # Another rank of this host may be looking at the same packs.
            with self._cache.learning():
                self._look(self._unseen(unseen), known)

    def _unseen(self, packs: list[PackId]) -> list[PackId]:
        """Note the lengths of packs that this host has seen, and return the others."""
        seen = {pack: seen_length(self._cache, pack) for pack in packs}
        self._packs |= {pack: size for pack, size in seen.items() if size != GONE}
        return [pack for pack in packs if seen[pack] == GONE]

    def _look(self, unseen: list[PackId], known: int) -> None:
        """Look at packs, some one by one. What an earlier list lacks may be younger than that."""
        listed = self._listed
        found = {pack: listed[pack] for pack in unseen if pack in listed}
        unlisted = [pack for pack in unseen if pack not in listed]
        if self._heads + len(unlisted) > known // _PAGE_KEYS:
            self._listed = listed_packs(self._backend, many=known > _MANY)
            self._heads = 0
            found |= {pack: self._listed.get(pack, GONE) for pack in unlisted}
        else:
            self._heads += len(unlisted)
            found |= {pack: self._length(pack_key(pack)) for pack in unlisted}
        self._packs |= found
        note_seen(self._cache, found)


def listed_packs(backend: Backend, *, many: bool) -> dict[bytes, int]:
    """Return the length of each pack of a remote store, whether or not a root names it.

    Args:
        backend: Where the store lives.
        many: Whether there are so many that their folders are listed one by one, several at a time.
    """

    def listed(folder: str) -> dict[bytes, int]:
        sizes = backend.sizes(folder).items()
        named = ((id_from_name(key.rpartition("/")[2]), key, size) for key, size in sizes)
        # casnap deletes only files whose names match its own grammar.
        return {i: size for i, key, size in named if i is not None and pack_key(i) == key}

    folders = [f"packs/{n:02x}" for n in range(256)] if many else ["packs"]
    found: dict[bytes, int] = {}
    for _, of_folder in mapped(listed, folders, backend.in_flight if many else 1):
        found |= of_folder
    return found


def seen_length(cache: Cache, ident: bytes) -> int:
    """Return the length of an object that this host saw within the last day; else ``GONE``."""
    note = cache.note(b"seen" + ident)
    if note is None or len(note) != _SEEN.size:
        return GONE
    size, at = _SEEN.unpack(note)
    return int(size) if 0 <= time.time() - at < _BELIEVED else GONE


def note_seen(cache: Cache, lengths: Mapping[PackId, int] | Mapping[SegmentId, int]) -> None:
    """Note the lengths of objects that were just seen, or written; forget those that are gone."""
    now = time.time()
    cache.keep_notes({b"seen" + ident: _SEEN.pack(n, now) for ident, n in lengths.items()})
