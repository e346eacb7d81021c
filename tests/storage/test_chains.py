"""What chunks stand on that are stored as deltas: chains that end, and all those that do not."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import pytest

from casnap.format.codec import Codec
from casnap.format.delta import MOST_LINKS
from casnap.format.digest import Digest
from casnap.format.records import (
    DeltaPlace,
    PackId,
    Place,
    SealedSegment,
    Segment,
    encode_segment,
)
from casnap.storage.lookup import chains
from casnap.storage.lookup.chains import ShortestChains, can_carry, chains_below, closure


def digest(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def whole(number: int) -> Place:
    return Place(b"pack", number, 10, 10, Codec.PLANES)


def delta(number: int, base: int) -> Place:
    return DeltaPlace(b"pack", number, 10, 10, Codec.DELTA, digest(base))


class Places:
    """Where some chunks lie.

    Attributes:
        asked: The chunks that were looked for, level by level.
    """

    def __init__(self, places: list[Place]) -> None:
        self._places = {digest(place.offset): place for place in places}
        self.asked: list[list[Digest]] = []

    def __call__(self, digests: list[Digest]) -> Sequence[Place | None]:
        self.asked.append(digests)
        return [self._places.get(each) for each in digests]


def numbers(places: Places, *tops: int) -> list[list[int]]:
    """Return the chains of some chunks, by the numbers of their links."""
    chains = chains_below(map(digest, tops), places)
    assert list(chains) == [digest(top) for top in dict.fromkeys(tops)]
    return [[place.offset for _, place in chain] for chain in chains.values()]


def test_each_chunk_comes_with_all_that_it_stands_on() -> None:
    places = Places([whole(0), delta(1, 0), delta(2, 1), delta(3, 1), whole(4)])
    assert numbers(places, 2, 4, 3, 0, 2) == [[2, 1, 0], [4], [3, 1, 0], [0]]
    # A level at a time, and nothing twice.
    assert places.asked == [[digest(n) for n in (2, 4, 3, 0)], [digest(1)]]


def test_nothing_is_asked_for_nothing() -> None:
    places = Places([])
    assert numbers(places) == []
    assert not places.asked


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([], id="nowhere"),
        pytest.param([delta(1, 2), delta(2, 3)], id="a base is nowhere"),
        pytest.param([delta(1, 1)], id="stands on itself"),
        pytest.param([delta(1, 2), delta(2, 3), delta(3, 2)], id="a circle"),
        pytest.param([Place(b"pack", 1, 10, 10, Codec.DELTA)], id="says no base"),
    ],
)
def test_a_chain_without_end_is_none(places: list[Place]) -> None:
    # What is asked for beside it has its own chain.
    assert numbers(Places([*places, whole(9), delta(8, 9)]), 1, 8) == [[], [8, 9]]


def test_a_chain_has_no_more_deltas_than_readers_apply() -> None:
    deltas = [delta(n, n - 1) for n in range(1, 3 * MOST_LINKS)]
    longest = list(range(MOST_LINKS, -1, -1))
    places = Places([whole(0), *deltas])
    assert numbers(places, MOST_LINKS, MOST_LINKS + 1) == [longest, []]
    # However long it is, it is not followed further.
    places = Places([whole(0), *deltas])
    assert numbers(places, 3 * MOST_LINKS - 1) == [[]]
    assert len(places.asked) == MOST_LINKS + 1


def test_what_a_delta_can_be_made_on() -> None:
    places = Places([whole(0), *(delta(n, n - 1) for n in range(1, MOST_LINKS + 1))])
    full, last, short = chains_below(map(digest, (MOST_LINKS, MOST_LINKS - 1, 1)), places).values()
    assert can_carry(short, digest(9))
    assert not can_carry(short, digest(1))
    assert not can_carry(short, digest(0))
    assert can_carry(last, digest(MOST_LINKS + 1))
    assert not can_carry(full, digest(MOST_LINKS + 1))
    assert not can_carry([], digest(9))


def stored(choice: random.Random, count: int) -> dict[Digest, list[Place]]:
    """Return the places of some chunks, most of them deltas on any of the others."""
    places: dict[Digest, list[Place]] = {}
    for number in range(count):
        deltas = [delta(number, choice.randrange(count + 1)) for _ in range(choice.choice([1, 2]))]
        places[digest(number)] = choice.choice([deltas, deltas, [whole(number)]])
        if choice.random() < 0.1:
            places[digest(number)] = [*deltas, whole(number)]
    return places


def shortest(places: dict[Digest, list[Place]]) -> dict[bytes, float]:
    """Return how many deltas the shortest chain of each chunk has, found the slow way."""
    lengths: dict[bytes, float] = {}
    for _ in places:
        for each, there in places.items():
            steps = [1 + lengths.get(p.base, math.inf) for p in there if isinstance(p, DeltaPlace)]
            lengths[each] = min(steps, default=math.inf) if len(steps) == len(there) else 0
    return lengths


@pytest.mark.parametrize("seed", range(40))
def test_the_shortest_chain_counts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MOST_LINKS", 3)
    choice = random.Random(seed)
    places = stored(choice, 30)
    found = ShortestChains(lambda each: places.get(each, ()))
    for _ in range(3):
        lengths = shortest(places)
        for each in choice.choices(list(places), k=60):
            for place in places[each]:
                below = lengths.get(place.base, math.inf) if isinstance(place, DeltaPlace) else -1
                assert found.ends(place) == (below < 3)
                # Of what is far longer, it need not be known whether it ends.
                assert found.is_too_long(place) <= (below >= 3)
                assert found.is_too_long(place) or not 3 <= below < math.inf
        # Some turn out to be bad.
        for each in choice.sample(list(places), 5):
            places[each] = places[each][1:]
        found.forget()


@pytest.mark.parametrize("seed", range(20))
def test_a_scan_finds_all_bases_and_the_deltas_without_end(seed: int) -> None:
    choice = random.Random(seed)
    places = stored(choice, 30)
    records = [(each, place) for each, there in places.items() for place in there]
    pack = PackId(bytes(16))
    moved = [
        (d, msgspec.structs.replace(p, pack=pack, offset=i)) for i, (d, p) in enumerate(records)
    ]
    # Two segments may list the same place.
    parts = [choice.sample(moved, len(moved) // 2), moved]
    segments = [SealedSegment(encode_segment(Segment((pack,), part)), "it") for part in parts]
    bases = closure(segments, segments)
    lengths = shortest(places)
    deltas = [(d, p) for d, p in moved if isinstance(p, DeltaPlace)]
    without = {(pack, p.offset) for d, p in deltas if lengths.get(p.base, math.inf) == math.inf}
    assert bases.endless == without
    assert bases.nowhere == {p.base for _, p in deltas if (pack, p.offset) in without}
    for each in places:
        needed, before = {each}, set[bytes]()
        while needed != before:
            before = set(needed)
            needed.update(p.base for d, p in deltas if d in before)
        assert bases.below([each]) >= needed - {each}
        assert bases.below([each]) <= needed
