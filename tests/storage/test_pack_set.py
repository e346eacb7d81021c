"""The set of packs of some segments, against a frozenset."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from casnap.format.records import PackId
from casnap.storage.chunks.index import PackSet

packs = st.integers(0, 12).map(lambda n: PackId(bytes([n]) * 16))
sets = st.frozensets(packs, max_size=8)


@given(st.lists(sets, max_size=4), sets, sets, sets)
def test_a_set_without_making_it(
    parts: list[frozenset[PackId]],
    without: frozenset[PackId],
    more: frozenset[PackId],
    asked: frozenset[PackId],
) -> None:
    plain = frozenset[PackId]().union(*parts) - without
    for ours, expected in (
        (PackSet(parts, without), plain),
        (PackSet(parts, without).without(more), plain - more),
    ):
        assert set(ours) == expected
        assert bool(ours) == bool(expected)
        assert {p for p in asked if p in ours} == asked & expected
        assert ours.lacking(asked) == asked - expected
        assert ours.issuperset(asked) == (asked <= expected)
