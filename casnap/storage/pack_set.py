"""The packs that some segments list, without making one set of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from casnap.format.records import PackId


class PackSet:
    """The union of some sets of packs, without a few packs.

    A store may have very many packs, and each commit adds few. So the sets are shared between the
    views of an index, and no question asked here takes time in proportion to their size.

    Args:
        parts: The sets.
        without: Packs that are not in it.
    """

    __slots__ = ("_parts", "_without")

    def __init__(
        self, parts: Iterable[frozenset[PackId]], without: Collection[PackId | bytes] = ()
    ) -> None:
        # The largest set first, since most packs are in it.
        self._parts = sorted(parts, key=len, reverse=True)
        self._without = frozenset(without)

    def __contains__(self, pack: object) -> bool:
        return pack not in self._without and any(pack in part for part in self._parts)

    def __iter__(self) -> Iterator[PackId]:
        return iter(frozenset[PackId]().union(*self._parts) - self._without)

    def __bool__(self) -> bool:
        return any(pack not in self._without for part in self._parts for pack in part)

    @property
    def at_most(self) -> int:
        """As many packs as it has, or more: a pack that lies in several sets counts for each."""
        return sum(map(len, self._parts))

    def issuperset(self, packs: Iterable[PackId]) -> bool:
        """Whether it has all of these packs."""
        return all(pack in self for pack in packs)

    def lacking(self, packs: Iterable[PackId]) -> set[PackId]:
        """Return those of these packs that it lacks."""
        return {pack for pack in packs if pack not in self}

    def without(self, packs: Collection[PackId | bytes]) -> PackSet:
        """Return the set without some packs."""
        return PackSet(self._parts, self._without.union(packs))
