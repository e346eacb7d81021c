"""Chains of deltas: a chunk that is stored as a delta, its base, the base of that base, and so on.

A chain begins with the wanted chunk, and ends with a chunk that is not stored as a delta. It has no
end if a base has no place, if the chain comes back to a chunk in it, or if it has more deltas than
readers apply.

There are three ways to follow chains. Readers and writers ask :func:`chains_below`, with one place
for each chunk. A check asks :class:`ShortestChains`, since a chunk is whole if it can be read at
any of its places. A collector, which reads all of the index, asks :func:`closure` for all needed
bases.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from casnap.format.codec import Codec
from casnap.format.delta import MOST_LINKS
from casnap.format.digest import Digest
from casnap.format.records import (
    DeltaPlace,
    PackId,
    Place,
    Record,
    Root,
    SealedSegment,
    SegmentRef,
)
from casnap.storage.lookup.index import Index

_DELTA = int(Codec.DELTA)

Find = Callable[[list[Digest]], Sequence[Place | None]]
"""Returns a place, or None, for each digest."""


def bases_at(places: Iterable[Place | None]) -> list[Digest]:
    """Return the digests of the bases of the deltas among some places, each base once."""
    return list(dict.fromkeys([Digest(p.base) for p in places if isinstance(p, DeltaPlace)]))


def chains_below(digests: Iterable[Digest], find: Find) -> dict[Digest, list[Record]]:
    """Return the chains of some chunks.

    Args:
        digests: The digests of the chunks.
        find: Finds places. It is called for all first bases together, then for all second bases,
            and so on, and for each digest once.

    Returns:
        For each chunk its chain: the digest and place of the chunk, of its base, and so on. The
        chain is empty if it cannot be followed to a chunk that is not stored as a delta, or has
        more deltas than readers apply.
    """
    tops = level = list(dict.fromkeys(digests))
    places: dict[Digest, Place | None] = {}
    for _ in range(1 + MOST_LINKS):
        if not level:
            break
        found = find(level)
        places |= zip(level, found, strict=True)
        level = [base for base in bases_at(found) if base not in places]
    return {digest: _chain(digest, places) for digest in tops}


def _chain(digest: Digest, places: Mapping[Digest, Place | None]) -> list[Record]:
    chain: list[Record] = []
    while (place := places.get(digest)) is not None:
        chain.append((digest, place))
        if place.codec != _DELTA:
            return chain
        # A delta that does not say its base cannot be relied on.
        if exceeds(len(chain) - 1, place) or not isinstance(place, DeltaPlace):
            break
        digest = Digest(place.base)
    return []


def exceeds(deltas: int, place: Place) -> bool:
    """Whether a chain has too many deltas for readers once a chunk is added to its end.

    Args:
        deltas: How many deltas the chain has so far.
        place: The place of the chunk to add.
    """
    return deltas >= MOST_LINKS and place.codec == _DELTA


def can_carry(chain: Sequence[Record], digest: Digest) -> bool:
    """Whether a chunk can be stored as a delta against the first chunk of a chain.

    It cannot if the chain contains the chunk, or already has as many deltas as readers apply.

    Args:
        chain: The chain of the base, as :func:`chains_below` returns it. If it is empty, the
            result is False.
        digest: The digest of the chunk.
    """
    return 0 < len(chain) <= MOST_LINKS and digest not in dict(chain)


class ShortestChains:
    """Measures the shortest chain of each chunk: each base may be read at any of its places.

    A check of a store asks for many chunks, and for some of them several times. So the lengths are
    remembered.

    Args:
        places: Returns the places of a chunk that may be used, given its digest.
    """

    def __init__(self, places: Callable[[Digest], Iterable[Place]]) -> None:
        self._places = places
        self._lengths: dict[Digest, float] = {}

    def forget(self) -> None:
        """Forget all lengths, since other places may be used now."""
        self._lengths.clear()

    def ends(self, place: Place) -> bool:
        """Whether a chunk can be read at a place.

        The chunk can be read if it is not stored as a delta at this place, or if its chain has no
        more deltas than readers apply.
        """
        return not isinstance(place, DeltaPlace) or self._below(Digest(place.base)) < MOST_LINKS

    def is_too_long(self, place: Place) -> bool:
        """Whether a place has a chain that ends, but has more deltas than readers apply."""
        if not isinstance(place, DeltaPlace):
            return False
        return MOST_LINKS <= self._below(Digest(place.base)) < math.inf

    def _below(self, digest: Digest) -> float:
        """Return the number of deltas in the shortest chain of a chunk.

        Returns:
            The number; infinity if no chain ends. If it is too large for readers, it need not be
            exact.
        """
        level, seen, deltas, best = [digest], {digest}, 0, math.inf
        line: list[Digest] = []
        while level and deltas < min(best, MOST_LINKS):
            if len(level) == 1 and len(line) == deltas:
                line += level
            below: list[Digest] = []
            for each in level:
                if each in self._lengths:
                    best = min(best, deltas + self._lengths[each])
                    continue
                places = list(self._places(each))
                if not all(isinstance(place, DeltaPlace) for place in places):
                    best = min(best, deltas)
                below += [base for base in bases_at(places) if base not in seen]
                seen.update(below)
            level, deltas = below, deltas + 1
        if level and best >= MOST_LINKS:
            # The search stopped before the end, so this says nothing about the chunks below.
            best, line = 2 * MOST_LINKS, []
        self._lengths |= {each: best - number for number, each in enumerate(line)}
        self._lengths[digest] = best
        return self._lengths[digest]


class DeltaBases:
    """The bases of all deltas in some segments.

    A chunk may be stored as several deltas, and then has several bases. The length of a chain does
    not matter here: a collector must keep a base even if the chain is too long for readers.

    Attributes:
        endless: The places (pack, offset) of deltas that cannot be applied, since their chains do
            not end with a chunk that is not stored as a delta.
        nowhere: The digests of bases that cannot be read, since they have no place but those of
            ``endless`` deltas.
    """

    def __init__(self) -> None:
        self._bases: dict[bytes, set[bytes]] = defaultdict(set)
        self.endless: set[tuple[PackId, int]] = set()
        self.nowhere: set[bytes] = set()

    def note(self, digest: bytes, base: bytes) -> None:
        """Note that a chunk is stored as a delta of a base.

        Args:
            digest: The digest of the chunk.
            base: The digest of the base.
        """
        self._bases[digest].add(base)

    def below(self, digests: Iterable[bytes]) -> set[bytes]:
        """Return the bases of some chunks, the bases of these bases, and so on."""
        bases: set[bytes] = set()
        pending = [digest for digest in digests if digest in self._bases]
        while pending:
            new = self._bases[pending.pop()] - bases
            bases |= new
            pending += [digest for digest in new if digest in self._bases]
        return bases


def closure(with_deltas: Iterable[SealedSegment], segments: Iterable[SealedSegment]) -> DeltaBases:
    """Return the bases of all deltas in some segments, and the deltas whose chains do not end.

    Args:
        with_deltas: The segments that have deltas.
        segments: All segments. They are read only if there are deltas.
    """
    bases = DeltaBases()
    deltas: dict[tuple[PackId, int], bytes] = {}
    standing_on: dict[bytes, list[tuple[PackId, int]]] = defaultdict(list)
    for segment in with_deltas:
        for (digest, n, offset, *_), base in segment.records_of_deltas():
            place = segment.packs[n], offset
            deltas[place] = digest
            standing_on[base].append(place)
            bases.note(digest, base)
    if not deltas:
        return bases
    # Go from the bases that are no deltas up to all chunks that are deltas of them.
    with_end = {
        digest
        for segment in segments
        for digest, _, _, _, _, codec in segment.records()
        if digest in standing_on and codec != _DELTA
    }
    pending = list(with_end)
    while pending:
        for place in standing_on.pop(pending.pop(), ()):
            # Two segments may list the same delta; only the first counts.
            delta = deltas.pop(place, None)
            if delta is not None and delta not in with_end:
                with_end.add(delta)
                pending.append(delta)
    bases.nowhere, bases.endless = set(standing_on), set(deltas)
    return bases


class NewBases:
    """Finds the bases of deltas in the segments of successive roots. It reads each segment once."""

    def __init__(self) -> None:
        self._read: frozenset[SegmentRef] = frozenset()

    def of(self, root: Root, index: Index) -> set[bytes]:
        """Return the bases of all deltas in those segments of a root that were not read before.

        Raises:
            DamagedError: A segment is missing or damaged.
        """
        unread = (ref for ref in root.segments if ref not in self._read)
        bases = {base for ref in unread for base in index.bases_in(ref)}
        self._read = frozenset(root.segments)
        return bases
