"""What a chunk stands on that is stored as a delta: its base, the base of that, and so on.

A chain begins with the wanted chunk, and ends with one that is no delta. It has no end if a base is
nowhere, if it comes back to itself, or if it has more deltas than readers apply.

Who wants to read or rely on chunks, each at one place, asks :func:`chains_below`. A check asks
:class:`ShortestChains`, since a chunk is whole if it is so at any of its places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from casnap.format.codec import Codec
from casnap.format.delta import MOST_LINKS
from casnap.format.digest import Digest
from casnap.format.records import DeltaPlace, Place, Record

_DELTA = int(Codec.DELTA)

Find = Callable[[list[Digest]], Sequence[Place | None]]
"""Returns, for each digest, a place of it, or None."""


def bases_at(places: Iterable[Place | None]) -> list[Digest]:
    """Return the bases of the deltas at some places, each once."""
    return list(dict.fromkeys([Digest(p.base) for p in places if isinstance(p, DeltaPlace)]))


def chains_below(digests: Iterable[Digest], find: Find) -> dict[Digest, list[Record]]:
    """Return some chunks with all bases below them, and where each lies.

    Args:
        digests: The chunks.
        find: Finds places. It is asked level by level, and once for each digest.

    Returns:
        The chain of each chunk; empty if the chunk is nowhere, or the chain has no end.
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
    while (place := places.get(digest)) is not None and not exceeds(len(chain), place):
        chain.append((digest, place))
        if place.codec != _DELTA:
            return chain
        if not isinstance(place, DeltaPlace):
            # A delta that does not say its base cannot be relied on.
            return []
        digest = Digest(place.base)
    return []


def exceeds(deltas: int, place: Place) -> bool:
    """Whether a chain of so many deltas cannot go on with what lies at a place."""
    return deltas >= MOST_LINKS and place.codec == _DELTA


def can_carry(chain: Sequence[Record], digest: Digest) -> bool:
    """Whether a chunk can be stored as a delta on the first chunk of a chain.

    It cannot if that chain has no end, or no room for one more delta, or stands on the chunk.
    """
    return 0 < len(chain) <= MOST_LINKS and digest not in dict(chain)


class ShortestChains:
    """How long chains are if each chunk is read at the place that makes them shortest.

    The lengths are remembered, as far as they follow from what was asked. A check asks for each
    chunk of a store alone, and for many again, while it finds out which places do not count.

    Args:
        places: Returns all places of a chunk that count.
    """

    def __init__(self, places: Callable[[Digest], Iterable[Place]]) -> None:
        self._places = places
        self._lengths: dict[Digest, float] = {}

    def forget(self) -> None:
        """Forget all, since other places count now."""
        self._lengths.clear()

    def ends(self, place: Place) -> bool:
        """Whether what lies at a place can be read, or stands on what can."""
        return not isinstance(place, DeltaPlace) or self._below(Digest(place.base)) < MOST_LINKS

    def is_too_long(self, place: Place) -> bool:
        """Whether what lies at a place stands on what can be read only by longer chains."""
        if not isinstance(place, DeltaPlace):
            return False
        return MOST_LINKS <= self._below(Digest(place.base)) < math.inf

    def _below(self, digest: Digest) -> float:
        """Return how many deltas the shortest chain of a chunk has, as far as that is known.

        If none ends, infinity; if none ends that is short enough for readers, some number that is
        too large.
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
            # What lies deeper was not looked at, so this says nothing of the others.
            best, line = 2 * MOST_LINKS, []
        self._lengths |= {each: best - number for number, each in enumerate(line)}
        self._lengths[digest] = best
        return self._lengths[digest]
