"""The actual lengths of a store's packs, and whether the packs exist.

The index tells what was written. Since then somebody may have deleted a pack, or a backup that was
restored in part may have left it too short. On a disk, a look at a pack is one system call. On a
remote store it is a request, so one listing replaces many looks, and a process remembers the
lengths for a day.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

from casnap.backends.base import Backend
from casnap.format.records import PackId, id_from_name, pack_key
from casnap.runtime.fork import new_lock
from casnap.runtime.threads import mapped
from casnap.runtime.typing import override

GONE = -1
"""The length of a pack that is missing."""
_BELIEVED = 86400.0
# The objects in a page of a listing; the number of packs from which folders are listed one by one.
_PAGE_KEYS, _MANY = 1000, 64_000
# The most packs that one rank lists for the others, in some 5 MB.
_MOST_TOLD = 1 << 18


class PackLengths:
    """The lengths of packs on a disk. Nothing is remembered: each call looks at the files.

    Args:
        backend: The backend of the place.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def of(self, packs: Collection[PackId], total: int) -> dict[PackId, int]:
        """Return the length of each pack in bytes; ``GONE`` for a missing one.

        Args:
            packs: The packs.
            total: About how many packs the store has.
        """
        return {pack: self._length(pack) for pack in packs}

    def note(self, lengths: Mapping[PackId, int]) -> None:
        """Note the lengths of packs that this process has written, or another rank has listed."""

    def has_to_list(self) -> bool:
        """Whether this process knows no lengths yet. If so, one rank may list the packs for all."""
        return False

    def listed_for(self, ranks: int, total: int) -> dict[PackId, int]:
        """List the packs for many ranks, unless it takes fewer requests if each rank looks itself.

        Args:
            ranks: How many ranks will look at packs.
            total: About how many packs the store has.

        Returns:
            The length of each pack; empty if each rank should look for itself.
        """
        return {}

    def forget(self, packs: Collection[PackId]) -> None:
        """Forget the lengths of packs that a read found missing or cut off."""

    def _length(self, pack: PackId) -> int:
        size = self._backend.size_if_there(pack_key(pack))
        return GONE if size is None else size


class RememberedLengths(PackLengths):
    """The lengths of packs on a remote store, which this process remembers for a day."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._lock = new_lock()
        # The lengths that this process saw or wrote; since when; and how many single looks it made.
        self._seen: dict[bytes, int] = {}
        self._since = -math.inf
        self._single_looks = 0

    @override
    def of(self, packs: Collection[PackId], total: int) -> dict[PackId, int]:
        with self._lock:
            self._begin_anew_if_old()
            unseen = [pack for pack in packs if pack not in self._seen]
            if self._single_looks + len(unseen) > total // _PAGE_KEYS:
                self._seen |= listed_packs(self._backend, are_many=total > _MANY)
                self._single_looks = 0
                # A listing may be older than the newest packs.
                unseen = [pack for pack in unseen if pack not in self._seen]
            self._single_looks += len(unseen)
            lengths = dict(mapped(self._length, unseen, self._backend.in_flight))
            self._seen |= {pack: size for pack, size in lengths.items() if size != GONE}
            return {pack: self._seen.get(pack, GONE) for pack in packs}

    def _begin_anew_if_old(self) -> None:
        if self._is_old():
            self._seen, self._since, self._single_looks = {}, time.monotonic(), 0

    def _is_old(self) -> bool:
        return time.monotonic() - self._since > _BELIEVED

    @override
    def note(self, lengths: Mapping[PackId, int]) -> None:
        with self._lock:
            self._begin_anew_if_old()
            self._seen.update(lengths.items())

    @override
    def has_to_list(self) -> bool:
        return self._is_old()

    @override
    def listed_for(self, ranks: int, total: int) -> dict[PackId, int]:
        # Each rank would make a request or more, so list if that takes no more requests.
        if not 0 < total <= min(ranks * _PAGE_KEYS, _MOST_TOLD):
            return {}
        listed = listed_packs(self._backend, are_many=total > _MANY)
        return {PackId(pack): size for pack, size in listed.items()}

    @override
    def forget(self, packs: Collection[PackId]) -> None:
        with self._lock:
            for pack in packs:
                self._seen.pop(pack, None)


def listed_packs(
    backend: Backend, *, are_many: bool, others: list[str] | None = None
) -> dict[bytes, int]:
    """Return the length of each pack in a store, by its id, whether or not a root names the pack.

    Args:
        backend: The backend of the store.
        are_many: Whether the store has very many packs. Then the folders of packs are listed one by
            one, several at a time.
        others: A list that gets the keys of the other files in these folders. Casnap does not
            delete such files.
    """
    folders = [f"packs/{n:02x}" for n in range(256)] if are_many else ["packs"]
    lengths: dict[bytes, int] = {}
    for _, sizes in mapped(backend.sizes, folders, backend.in_flight if are_many else 1):
        for key, size in sizes.items():
            ident = id_from_name(key.rpartition("/")[2])
            if ident is not None and pack_key(ident) == key:
                lengths[ident] = size
            elif others is not None:
                others.append(key)
    return lengths
