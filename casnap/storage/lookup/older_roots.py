"""Older roots, which stand in when the newest root names files that are missing.

If a store was copied file by file while others wrote to it, the copy may have a root, but not all
packs and segments that the root names. An older root in the copy may have all its files. The copy
can then be read as of this older root. Only a repair puts its content as a new newest root.
"""

from __future__ import annotations

from casnap.backends.base import Backend
from casnap.format.records import (
    PackId,
    Root,
    SealedSegment,
    SegmentId,
    StoreConfig,
    pack_key,
    segment_key,
)
from casnap.runtime.typing import override
from casnap.storage.lookup.index import Index
from casnap.storage.lookup.newest_root import NewestRoot
from casnap.storage.lookup.pack_lengths import GONE, listed_packs


class OlderRoot(NewestRoot):
    """Gives readers an older root in place of the newest one, which names a missing file.

    This ends once another root follows ``newest``, or once the file ``lacked`` appears or changes
    its length. From then on, the newest root is returned.

    Args:
        backend: The backend of the place.
        config: The store's ``casnap.json``.
        newest: The newest root.
        lacked: The key of a file that the newest root names, and that is missing or too short.
        older: The older root.
    """

    def __init__(
        self, backend: Backend, config: StoreConfig, newest: Root, lacked: str, older: Root
    ) -> None:
        super().__init__(backend, config)
        self._newest, self._lacked, self._older = newest, lacked, older
        self._length = backend.size_if_there(lacked)

    @override
    def look(self) -> Root:
        root = super().look()
        return self._older if root == self._newest and self._still_lacks() else root

    def _still_lacks(self) -> bool:
        return self._backend.size_if_there(self._lacked) == self._length


class FilesThere:
    """Says whether all files that a root names exist. All packs are listed once, at the beginning.

    Args:
        backend: The backend of the place.
        index: The index.
    """

    def __init__(self, backend: Backend, index: Index) -> None:
        self._backend = backend
        self._index = index
        self._lengths = listed_packs(backend, are_many=False)
        # Where the last record of each pack ends, by segment.
        self._ends: dict[bytes, dict[PackId, int]] = {}

    def lacking(self, root: Root) -> str | None:
        """Return the key of a missing or too short file that a root names; None if there is none.

        A condemned pack may be missing: the root needs no chunk that only this pack holds.

        Raises:
            DamagedError: A segment exists, but is damaged.
        """
        for ref in reversed(root.segments):
            key = segment_key(SegmentId(ref.id))
            if self._backend.size_if_there(key) is None:
                return key
            if ref.id not in self._ends:
                self._ends[ref.id] = _ends_in(SealedSegment(*self._index.sealed(ref)))
            for pack, end in self._ends[ref.id].items():
                if pack not in root.condemned and self._lengths.get(pack, GONE) < end:
                    return pack_key(pack)
        return None


def _ends_in(segment: SealedSegment) -> dict[PackId, int]:
    ends = dict.fromkeys(segment.packs, 0)
    for _, number, offset, nbytes, _, _ in segment.records():
        pack = segment.packs[number]
        ends[pack] = max(ends[pack], offset + nbytes)
    return ends
