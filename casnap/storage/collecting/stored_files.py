"""The packs and segments in a store, whether or not the newest root names them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache

from casnap.errors import BackendError, DamagedError
from casnap.format.records import PackId, Root, id_from_name, pack_key, segment_key
from casnap.runtime.progress import Progress
from casnap.runtime.threads import mapped
from casnap.storage.commit_log.roots import read_root
from casnap.storage.lookup.index import IndexView
from casnap.storage.lookup.pack_lengths import listed_packs
from casnap.storage.reading.repository import Repository

_DELETERS = 4


def base_of(ident: bytes) -> int:
    """Return the base of a pack or segment: the number of the root that it was written under."""
    return int.from_bytes(ident[:6], "big")


class StoredFiles:
    """The packs and segments that were in the store when this object was created.

    Args:
        store: The store.
        root: A root of the store. It tells how large the store is, and so how to list it.
        lists_packs: Whether to list the packs, which takes long if there are many. Otherwise only
            packs that are added later are known.

    Attributes:
        packs: The ids of the packs.
        segments: The ids of the segments.
        others: The keys of other objects in the folders of packs and segments.
    """

    def __init__(self, store: Repository, root: Root, *, lists_packs: bool = True) -> None:
        self._backend = backend = store.backend
        is_large = sum(ref.count for ref in root.segments) > backend.costs.many_records
        self._knows_all = lists_packs
        self.others: list[str] = []
        self._sizes = (
            listed_packs(backend, are_many=is_large, others=self.others) if lists_packs else {}
        )
        self.packs = set(self._sizes)
        self.segments = set[bytes]()
        for key, size in backend.sizes("index").items():
            ident = id_from_name(key.removeprefix("index/"))
            if ident is None:
                self.others.append(key)
            else:
                self.segments.add(ident)
                self._sizes[ident] = size
        self.time_of = cache(self._time_of)

    def __contains__(self, ident: object) -> bool:
        """Whether a known pack or segment has this id, and was not deleted since."""
        return ident in self.packs or ident in self.segments

    def unnamed(self, view: IndexView) -> dict[str, bytes]:
        """Return the files that the root of a view does not name: key → id."""
        packs = {pack_key(ident): ident for ident in view.packs.lacking(map(PackId, self.packs))}
        return packs | {segment_key(i): i for i in self.segments - view.segments.keys()}

    def size_of(self, keys: Iterable[str]) -> int:
        """Return the bytes of some files together; a file that is gone counts as 0."""
        return sum(map(self._size, keys))

    def _size(self, key: str) -> int:
        ident = id_from_name(key.rpartition("/")[2]) or b""
        if not self._knows_all and ident not in self._sizes:
            self._sizes[ident] = self._backend.size_if_there(key) or 0
        return self._sizes.get(ident, 0)

    def add(self, packs: Iterable[PackId]) -> None:
        """Add packs that were not listed.

        Call this before a root leaves these packs out of its segments.
        """
        if self._knows_all:
            return
        new = set(packs) - self.packs
        self.size_of(map(pack_key, new))
        self.packs |= new

    def delete(
        self, files: dict[str, bytes], progress: Progress
    ) -> tuple[dict[str, int], dict[str, str]]:
        """Delete some files, several at a time.

        Args:
            files: The key of each file → the id of the pack or segment.
            progress: Called with the current phase, how many files are done, and the total.

        Returns:
            The bytes of each deleted file; and the reason for each file that this user may not
            delete, such as another user's file in a sticky folder.
        """
        most = self._backend.costs.delete_batch
        keys = list(files)
        batches = [keys[at : at + most] for at in range(0, len(keys), most)]
        sizes: dict[str, int] = {}
        refused: dict[str, str] = {}
        for batch, errors in mapped(self._backend.delete_all, batches, _DELETERS):
            refused |= {key: str(error) for key, error in errors.items()}
            sizes |= {key: self._size(key) for key in batch if key not in errors}
            progress("deleting", len(sizes) + len(refused), len(keys))
        # The next collection tries the refused files again.
        self.packs.difference_update(files.values())
        self.segments.difference_update(files.values())
        return sizes, refused

    def _time_of(self, seq: int) -> float | None:
        """Return the time that a root has; None if the root cannot be read."""
        try:
            return read_root(self._backend, seq).time
        except (FileNotFoundError, DamagedError, BackendError):
            return None

    def age_of(self, seq: int, newest: Root) -> float:
        """Return the age of a root in seconds: this host's time less the time in the root.

        Args:
            seq: The number of the root. If the root cannot be read, the age of the next root is
                returned. It is lower, so the collector only waits longer.
            newest: The newest root.
        """
        for number in range(seq, newest.seq):
            put_at = self.time_of(number)
            if put_at is not None:
                return time.time() - put_at
        return time.time() - newest.time
