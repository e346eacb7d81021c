"""The packs of earlier commits that a change relies on, and whether their files are there.

The index says what was written, not what is still there: a file may have been deleted by hand, or
cut off by a partly restored backup. So each pack is looked at twice: when the change first relies
on it, while missing chunks can still be stored anew, and again before the root is put.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, KeysView
from dataclasses import replace

from casnap.errors import DamagedError, FencedError
from casnap.format.digest import Digest, split_digests
from casnap.format.records import (
    FOOTER_RECORD_SIZE,
    ID_SIZE,
    PackId,
    Place,
    Segment,
    SegmentId,
    encode_segment,
    pack_key,
    segment_key,
)
from casnap.storage.index import View
from casnap.storage.looks import Looks
from casnap.storage.objects import Objects

_log = logging.getLogger("casnap")
COLLECTED = (
    "a garbage collector whose grace was shorter than this has deleted packs that were written "
    "or relied on; take again, and give `casnap gc` a longer --grace"
)
_GONE = (
    "packs that this relied on are gone or cut off, such as {key}, though the store names them; "
    "take again, which stores the missing chunks anew. `casnap check` says what else is hurt"
)
_EMPTY_SEGMENT = len(encode_segment(Segment((), [])))
_SEGMENT_RECORD = FOOTER_RECORD_SIZE + 4


class ReliedPacks:
    """The packs that one change relies on, for which digests, and how long they must be.

    Args:
        objects: The store.
        view: The index as the change sees it.
    """

    def __init__(self, objects: Objects, view: View) -> None:
        self._objects = objects
        self._view = view
        self._lock = threading.Lock()
        # Pack → the digests relied on there, one behind the other; and where the last of them ends.
        self._digests: dict[PackId, bytearray] = {}
        self._ends: dict[PackId, int] = {}
        self._looks = Looks(objects.backend, view.cache)

    @property
    def packs(self) -> KeysView[PackId]:
        """The packs."""
        return self._digests.keys()

    def rely(self, digests: list[Digest]) -> list[bool]:
        """Rely on the digests that are in live, existing packs; return which are in none."""
        return [place is None for place in self.rely_on(digests)]

    def rely_on(self, digests: list[Digest]) -> list[Place | None]:
        """Rely on the digests that are in live, existing packs; return a place of each, or None."""
        found = self._find(digests)
        with self._lock:
            for digest, place in zip(digests, found, strict=True):
                if place is not None:
                    pack, end = PackId(place.pack), place.offset + place.stored
                    self._digests.setdefault(pack, bytearray()).extend(digest)
                    self._ends[pack] = max(end, self._ends.get(pack, 0))
        return found

    def _find(self, digests: list[Digest]) -> list[Place | None]:
        """Find digests in packs that exist; drop from the view those that do not."""
        while True:
            view = self._view
            found = self._objects.index.find(view, digests, to_rely=True)
            bad = self._bad(found)
            if not bad:
                return found
            if self._objects.newest() == view.root:
                _log.warning(
                    "%s: %d packs are gone or cut off, such as %s; the needed chunks are "
                    "stored anew; `casnap check` says what else is hurt",
                    self._objects.backend.uri,
                    len(bad),
                    pack_key(min(bad)),
                )
            with self._lock:
                self._view = replace(self._view, live=self._view.live.without(bad))

    def _bad(self, found: Iterable[Place | None]) -> set[PackId]:
        """Return the packs that are too short or missing; look at each file only once."""
        ends: dict[PackId, int] = {}
        for place in found:
            if place is not None:
                pack, end = PackId(place.pack), place.offset + place.stored
                ends[pack] = max(end, ends.get(pack, 0))
        lengths = self._looks.lengths(ends.keys(), self._view.packs.at_most)
        return {pack for pack, end in ends.items() if lengths[pack] < end}

    def confirm(self, latest: View, *, with_index: bool = True) -> None:
        """Look at all packs again, for a newer root; rely on other places of what is gone.

        Args:
            latest: The index as that root sees it.
            with_index: Look at its segments, too.

        Raises:
            FencedError: A digest is in no live pack any more.
            DamagedError: A segment of the root is gone.
        """
        lengths = self._looks.again(self._ends.keys())
        bad = {pack for pack, end in self._ends.items() if lengths[pack] < end}
        self._view = replace(latest, live=latest.live.without(bad))
        gone = latest.packs.lacking(self._digests) | bad
        lacking = self.rely(
            list(dict.fromkeys(split_digests(b"".join(self._digests[p] for p in gone))))
        )
        if any(lacking):
            bad = {pack for pack in bad if pack in latest.packs}
            raise FencedError(_GONE.format(key=pack_key(min(bad))) if bad else COLLECTED)
        for pack in gone:
            del self._digests[pack], self._ends[pack]
        if with_index:
            self._confirm_segments(latest)

    def _confirm_segments(self, latest: View) -> None:
        """Check that a host that has not cached the index can read it too."""
        lengths = self._looks.segments([SegmentId(ref.id) for ref in latest.root.segments])
        for ref in latest.root.segments:
            ident = SegmentId(ref.id)
            packs = len(latest.segments[ident])
            whole = _EMPTY_SEGMENT + packs * ID_SIZE + ref.count * _SEGMENT_RECORD
            key = segment_key(ident)
            if lengths[ident] != whole:
                raise DamagedError(
                    f"the index segment {self._objects.backend.where(key)} is missing, or has "
                    f"another length than the {whole:,} bytes that it was written with; "
                    "`casnap repair` makes the index anew"
                )
