"""What a chunk stands on that is stored as a delta: its base, the base of that, and so on.

A chain begins with the wanted chunk, and ends with one that is no delta. It has no end if a base is
nowhere, if it comes back to itself, or if it has more deltas than readers apply.
"""

from __future__ import annotations

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
