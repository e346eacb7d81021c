"""Find a few digests in large segments by reading parts of them.

The records of a segment are sorted by digest, and digests are evenly spread. So the position of a
record is known to within a few thousand records. Records are not verified here. A reader verifies
each chunk; if a record was wrong, the reader uses the whole index instead.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping

import lmdb

from casnap.backends.base import Backend
from casnap.errors import BackendError, DamagedError
from casnap.format.digest import Digest
from casnap.format.records import (
    ID_SIZE,
    SEGMENT_RECORD_SIZE,
    PackId,
    Place,
    RawRecord,
    Root,
    SegmentId,
    SegmentLayout,
    SegmentRef,
    segment_key,
)
from casnap.runtime.threads import mapped
from casnap.storage.lookup.index import PackSet, RemoteIndex, packs_in

_log = logging.getLogger("casnap")
# A smaller index is read whole even for one digest.
_WHOLE_BYTES = 8 << 20
# A digest is nearly always within this many standard deviations of its expected position.
_DEVIATIONS = 3
_LOOKS = 3
# How many digests are looked for in all segments, to look for the others where these were found.
_WAVES = 3


class SegmentRanges:
    """Finds a few digests in a remote store by reading parts of its large segments.

    Args:
        backend: The backend of the store.
        index: The index of the store.
    """

    def __init__(self, backend: Backend, index: RemoteIndex) -> None:
        self._backend = backend
        self._index = index
        self._lengths: dict[SegmentId, int] = {}

    def find(self, root: Root, digests: list[Digest]) -> list[Place | None]:
        """Find digests in the index of a root without reading its large segments as a whole.

        Returns:
            For each digest a place, or None if the search has not found one. A place may be wrong.
            All are None if reading the whole index costs less.
        """
        try:
            return self._find(root, digests)
        except TimeoutError:
            # Though an OSError, it is not the file system's: a user's alarm raises it.
            raise
        except (lmdb.Error, OSError, BackendError, DamagedError) as e:
            _log.debug("%s: the index is read whole: %s", self._backend.uri, e)
            return [None] * len(digests)

    def _find(self, root: Root, digests: list[Digest]) -> list[Place | None]:
        cache = self._index.cache
        unknown = [ref for ref in root.segments if packs_in(cache, ref) is None]
        small = self._backend.costs.small_records
        large = [ref for ref in unknown if ref.weight > small]
        nbytes = sum(ref.weight for ref in unknown) * SEGMENT_RECORD_SIZE
        windows = [window_bytes(ref.count) for ref in large]
        # The first digest is looked for in all segments, most others only where it was found.
        expected = sum(windows) + max(windows, default=0) * len(digests)
        if nbytes < _WHOLE_BYTES or expected * 4 > nbytes:
            return [None] * len(digests)
        listed = self._index.learn(cache, [ref for ref in root.segments if ref not in large])
        places = cache.place(digests, PackSet(listed.values()))
        by_digest = {
            d: place for d, place in zip(digests, places, strict=True) if place is not None
        }
        remaining = [d for d in digests if d not in by_digest]
        if remaining:
            searched = search(self._backend, large, self._lengths_of(large), remaining)
            by_digest |= {
                digest: record_list[0][1] for digest, record_list in searched.items() if record_list
            }
        return [by_digest.get(digest) for digest in digests]

    def _lengths_of(self, refs: list[SegmentRef]) -> dict[SegmentId, int]:
        """Return the lengths of segments in bytes. They never change, so they are remembered."""
        unseen = [ref for ref in refs if SegmentId(ref.id) not in self._lengths]
        if len(unseen) == 1:
            self._lengths[SegmentId(unseen[0].id)] = self._backend.size(segment_key(unseen[0].id))
        elif unseen:
            sizes = self._backend.sizes("index")
            self._lengths |= {SegmentId(r.id): sizes.get(segment_key(r.id), 0) for r in unseen}
        return self._lengths


def search(
    backend: Backend,
    segments: Iterable[SegmentRef],
    lengths: Mapping[SegmentId, int],
    digests: Iterable[Digest],
) -> dict[Digest, list[tuple[SegmentId, Place]]]:
    """Search segments for digests by reading parts of them.

    All segments are searched for a first digest. The segments that have it are searched for all
    other digests, since the chunks of a tensor are mostly in one segment. The digests that were not
    found are searched for in the same way.

    Args:
        backend: The backend of the store.
        segments: The segments.
        lengths: The length of each segment in bytes.
        digests: The digests to look for.

    Returns:
        For each digest the segments and places that were found.

    Raises:
        PlaceError: A segment cannot be read.
        FileNotFoundError: A segment is missing.
    """
    layouts = [(r, SegmentLayout.of(r, lengths.get(SegmentId(r.id), 0))) for r in segments]
    searches = [_Search(backend, ref, layout) for ref, layout in layouts if layout is not None]
    digests = list(dict.fromkeys(digests))
    _look_in_waves(searches, digests, backend.in_flight)
    places: dict[Digest, list[tuple[SegmentId, Place]]] = {digest: [] for digest in digests}
    hits = [one for one in searches if one.found]
    for one, of_segment in mapped(lambda s: s.places(), hits, backend.in_flight):
        for digest, place in of_segment:
            places[digest].append((one.ident, place))
    return places


def _look_in_waves(searches: list[_Search], todo: list[Digest], at_once: int) -> None:
    """Look for digests in segments, without a search of all segments for each digest.

    All segments are searched for a first digest. The segments that have it are searched for all
    other digests. This is repeated a few times with the digests that were not found. Then all
    segments are searched for what is still not found.

    Args:
        searches: A search for each segment. They note the records that they find.
        todo: The digests.
        at_once: How many segments to read at once.
    """
    for _ in range(_WAVES):
        if len(todo) < 2:
            break
        probe, *todo = todo
        homes = [one for one, known_there in _look(searches, [probe], at_once) if known_there]
        known_digests = {d for _, known_there in _look(homes, todo, at_once) for d in known_there}
        todo = [digest for digest in todo if digest not in known_digests]
    _look(searches, todo, at_once)


def _look(
    searches: list[_Search], digests: list[Digest], at_once: int
) -> list[tuple[_Search, set[Digest]]]:
    return list(mapped(lambda s: s.look(digests), searches if digests else [], at_once))


def window_bytes(count: int) -> int:
    """Return about how many bytes to read, in order to find one digest among ``count`` records."""
    return min(count, 2 * _reach(count, 0.5)) * SEGMENT_RECORD_SIZE


def _reach(count: int, share: float) -> int:
    return 8 + math.ceil(_DEVIATIONS * math.sqrt(count * share * (1 - share)))


def _digest(record: RawRecord) -> bytes:
    return record[0]


class _Search:
    """A search in one segment.

    Attributes:
        ident: The id of the segment.
        found: The digests and records that were found.
    """

    def __init__(self, backend: Backend, ref: SegmentRef, layout: SegmentLayout) -> None:
        self.ident = SegmentId(ref.id)
        self.found: list[tuple[Digest, RawRecord]] = []
        self._backend = backend
        self._key = segment_key(ref.id)
        self._count = ref.count
        self._layout = layout

    def look(self, digests: list[Digest]) -> set[Digest]:
        """Look for digests in the segment; return those that it has."""
        before = len(self.found)
        todo = {digest: self._window(digest, 0) for digest in digests}
        for look in range(1, _LOOKS + 1):
            wider = {}
            for digest, records in self._records(todo).items():
                start, stop = todo[digest]
                is_inside = not records or (
                    (start == 0 or records[0][0] < digest)
                    and (stop == self._count or records[-1][0] > digest)
                )
                if not is_inside:
                    wider[digest] = self._window(digest, look)
                    continue
                at = bisect_left(records, bytes(digest), key=_digest)
                while at < len(records) and records[at][0] == digest:
                    self.found.append((digest, records[at]))
                    at += 1
            todo = wider
            if not todo:
                break
        return {digest for digest, _ in self.found[before:]}

    def _window(self, digest: Digest, look: int) -> tuple[int, int]:
        share = int.from_bytes(digest[:8], "big") / 2**64
        reach = _reach(self._count, share) * 4**look
        middle = int(self._count * share)
        return max(0, middle - reach), min(self._count, middle + reach)

    def _records(self, windows: dict[Digest, tuple[int, int]]) -> dict[Digest, list[RawRecord]]:
        buffers = {
            digest: bytearray((stop - start) * SEGMENT_RECORD_SIZE)
            for digest, (start, stop) in windows.items()
        }
        targets = [
            (self._layout.offset(windows[digest][0]), memoryview(buffer))
            for digest, buffer in buffers.items()
        ]
        sizes = self._backend.read_into(self._key, targets) if targets else []
        return {
            digest: self._layout.decode(buffer)
            for (digest, buffer), n in zip(buffers.items(), sizes, strict=True)
            if n == len(buffer)
        }

    def places(self) -> list[tuple[Digest, Place]]:
        """Return the places of the records that were found. This reads the ids of their packs."""
        numbers = sorted({n for _, (_, n, *_) in self.found if n < self._layout.packs})
        ids = {n: bytearray(ID_SIZE) for n in numbers}
        if ids:
            offsets = [(self._layout.pack_offset(n), memoryview(ids[n])) for n in numbers]
            self._backend.read_into(self._key, offsets)
        return [
            (digest, Place(PackId(bytes(ids[n])), *fields))
            for digest, (_, n, *fields) in self.found
            # The place of a delta lacks its base here, but the delta's own bytes name it.
            if n in ids
        ]
