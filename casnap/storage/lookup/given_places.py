"""Read chunks at places that the caller names: a check of a store cannot trust the index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from casnap.format.digest import Digest
from casnap.format.records import Place
from casnap.runtime.typing import override
from casnap.storage.lookup.index_cache import preferred
from casnap.storage.lookup.lookup_order import Bases, Left, LocalLookup, Lookup, Rung, Step


class GivenPlaces(LocalLookup):
    """A lookup that tries only the places that its caller gives.

    Args:
        lookup: Another lookup of the store, whose newest root and index this one uses.
        places_of: Returns the places of a chunk, given its digest.
    """

    def __init__(self, lookup: Lookup, places_of: Callable[[Digest], list[Place]]) -> None:
        super().__init__(lookup.newest, lookup.index)
        self._places_of = places_of

    @override
    def rungs(self) -> Sequence[Rung]:
        return (self._given,)

    def _given(self, left: Left) -> Iterator[Step]:
        digests = list(left.wants)
        yield Step(left.at(digests, self.bases().find(digests)))

    @override
    def bases(self) -> Bases:
        places_of = self._places_of
        return Bases(lambda digests: [preferred(places_of(d)) for d in digests], places_of)
