"""Writing segments for the next root: a commit adds one, merges small ones, drops freed packs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from casnap.backends.costs import LOCAL, Costs
from casnap.errors import CasnapError, StorageFullError
from casnap.format.records import (
    PackId,
    Record,
    Root,
    Segment,
    SegmentId,
    SegmentRef,
    count_deltas,
    encode_segment,
    merged_segment,
    segment_counts,
    segment_key,
)
from casnap.storage.lookup.index import IndexView
from casnap.storage.packs.pack_writer import new_id
from casnap.storage.reading.repository import Repository

MERGE_MOST = 640_000
"""The most records and bases of a segment. So it has less than 48 MiB, however many packs."""
_SMALL = 1 << 15
# The most records, bases and packs of a merged segment. They have 53, 40 and 16 bytes each.
_MOST = 900_000


def add_segment(
    store: Repository, view: IndexView, segment: Segment, base: int
) -> tuple[SegmentRef, ...]:
    """Write a new segment, merged with small ones; return the segments of the next root.

    Args:
        store: The store.
        view: The index as the last root sees it.
        segment: The new segment.
        base: The root number that ids of segments begin with.
    """
    *large, segment = _divided(segment)
    refs = [write_segment(store, part, base) for part in large]
    sizes = {ref: ref.weight + len(view.segments[SegmentId(ref.id)]) for ref in view.root.segments}
    new_size = weight_of(segment)
    merged = _to_merge(sizes, new_size, store.backend.costs.levels)
    unmerged = tuple(ref for ref in view.root.segments if ref not in merged)
    last_written = _write_merged(store, view, segment, merged, (), base)
    return (*unmerged, *refs, *last_written)


Groups: TypeAlias = tuple[tuple[SegmentRef, ...], ...]
"""Groups of segments. Each group is written anew as one segment."""


@dataclass(frozen=True)
class Rewriting:
    """New segments in place of old ones, without some packs.

    Attributes:
        base: The root number that the ids of the new segments begin with.
        without: The packs that were left out.
        groups: The old segments.
        new_refs: The new segments.
    """

    base: int
    without: frozenset[PackId]
    groups: Groups
    new_refs: tuple[SegmentRef, ...]

    def fits(self, root: Root, without: frozenset[PackId]) -> bool:
        """Whether the root after ``root`` can have the new segments.

        It can if ``root`` still names all old segments, the same packs are to be left out, and the
        fence has not passed the new segments.

        Args:
            root: The last root.
            without: The packs to leave out of the next root.
        """
        names_all = set(chain(*self.groups)).issubset(root.segments)
        return names_all and root.fence <= self.base and without == self.without

    def applied(self, root: Root) -> tuple[SegmentRef, ...]:
        """Return the segments of the root after ``root``, which this must fit."""
        replaced = set(chain(*self.groups))
        return tuple(ref for ref in root.segments if ref not in replaced) + self.new_refs

    def discard(self, store: Repository) -> None:
        """Delete the new segments. No root may name them."""
        for ref in self.new_refs:
            store.backend.delete(segment_key(ref.id))


def segments_to_rewrite(view: IndexView, without: Collection[PackId], costs: Costs) -> Groups:
    """Return the segments that list packs to leave out, and small segments if there are many.

    Args:
        view: The index as a root sees it.
        without: The packs to leave out.
        costs: The costs of the store's place.
    """
    segments = view.root.segments
    affected = [ref for ref in segments if not view.segments[SegmentId(ref.id)].isdisjoint(without)]
    small = [ref for ref in segments if ref.weight < _SMALL and ref not in affected]
    # Takes merge small segments themselves, so a few are normal. On a remote store, each costs a
    # request.
    few = costs.merged if affected else LOCAL.merged
    return tuple(map(tuple, _groups(affected + (small if len(small) >= few else []))))


def rewrite_segments(
    store: Repository, view: IndexView, groups: Groups, without: frozenset[PackId]
) -> Rewriting:
    """Write segments anew, without some packs.

    A new segment keeps every place of every other pack, duplicates too: a take in flight may rely
    on any of them.

    Args:
        store: The store.
        view: The index as a root sees it.
        groups: The segments.
        without: The packs to leave out.

    Raises:
        StorageFullError: There is no room. The segments that were written before are deleted.
    """
    new_refs: list[SegmentRef] = []
    try:
        for group in groups:
            new_refs += _write_merged(store, view, Segment((), []), group, without, view.root.seq)
    except StorageFullError:
        Rewriting(view.root.seq, without, (), tuple(new_refs)).discard(store)
        raise
    return Rewriting(view.root.seq, without, groups, tuple(new_refs))


def drop_packs(
    store: Repository, view: IndexView, without: Collection[PackId]
) -> tuple[SegmentRef, ...]:
    """Rewrite segments without some packs; return the segments of the next root."""
    groups = segments_to_rewrite(view, without, store.backend.costs)
    return rewrite_segments(store, view, groups, frozenset(without)).applied(view.root)


def _write_merged(
    store: Repository,
    view: IndexView,
    new_segment: Segment,
    refs: Collection[SegmentRef],
    without: Collection[PackId],
    base: int,
) -> list[SegmentRef]:
    """Write a new segment and old ones as one; return it, or nothing if it lists no pack."""
    content, packs = encode_segment(new_segment), new_segment.packs
    if refs:
        parts = [store.index.sealed_or_kept(ref) for ref in refs]
        content, packs = merged_segment([(content, "a new segment"), *parts], without)
    if not packs:
        return []
    ident = _put_segment(store, content, base)
    view.cache.keep_segment(ident, packs, new_segment.records)
    store.index.keep_small(ident, content)
    return [SegmentRef(ident, *segment_counts(content))]


def write_segment(store: Repository, segment: Segment, base: int) -> SegmentRef:
    """Write a segment without merging it, so that another process may name it in a root."""
    ident = _put_segment(store, encode_segment(segment), base)
    return SegmentRef(ident, len(segment.records), segment.deltas)


def write_segments(store: Repository, segment: Segment, base: int) -> tuple[SegmentRef, ...]:
    """Write a segment without merging it; a large one becomes several."""
    return tuple(write_segment(store, part, base) for part in _divided(segment))


def write_sealed(store: Repository, sealed: Iterable[bytes], base: int) -> SegmentRef:
    """Write segments that ranks have sealed as one segment."""
    content, _ = merged_segment((part, "what a rank wrote") for part in sealed)
    return SegmentRef(_put_segment(store, content, base), *segment_counts(content))


def _divided(segment: Segment) -> list[Segment]:
    """Divide a large segment, by its packs, into smaller ones."""
    if _weight(segment.records) <= MERGE_MOST:
        return [segment]
    of_pack: dict[bytes, list[Record]] = {pack: [] for pack in segment.packs}
    for record in segment.records:
        of_pack[record[1].pack].append(record)
    parts: list[tuple[list[PackId], list[Record]]] = [([], [])]
    weight = 0
    for pack, records in of_pack.items():
        more = _weight(records)
        if weight and weight + more > MERGE_MOST:
            parts.append(([], []))
            weight = 0
        parts[-1][0].append(PackId(pack))
        parts[-1][1].extend(records)
        weight += more
    return [Segment(tuple(packs), records) for packs, records in parts]


def weight_of(segment: Segment) -> int:
    """Return the number of records, bases and packs of a segment, added up."""
    return _weight(segment.records) + len(segment.packs)


def _weight(records: list[Record]) -> int:
    """Return the number of records and of their bases, added up."""
    return len(records) + count_deltas(records)


def _put_segment(store: Repository, content: bytes, base: int) -> SegmentId:
    """Write a segment, and make it and all packs durable. If that fails, the segment is deleted."""
    ident = SegmentId(new_id(base))
    try:
        store.backend.write(segment_key(ident), content)
        store.backend.sync()
    except BaseException:
        with suppress(CasnapError):
            store.backend.delete(segment_key(ident))
        raise
    return ident


def _groups(refs: Iterable[SegmentRef]) -> list[list[SegmentRef]]:
    """Divide segments into groups, each small enough to be merged into one segment."""
    groups: list[list[SegmentRef]] = []
    total = MERGE_MOST
    for ref in refs:
        total += ref.weight
        if total > MERGE_MOST:
            groups.append([])
            total = ref.weight
        groups[-1].append(ref)
    return groups


def _to_merge(
    sizes: Mapping[SegmentRef, int], new_size: int, levels: Sequence[tuple[int, int]]
) -> list[SegmentRef]:
    """Return the segments to merge with a new segment.

    Once there are several segments of about one size, they become one. So the number of segments
    grows with the logarithm of the number of records. So does the number of times that a record is
    written again.

    Args:
        sizes: How many records, bases and packs each segment has.
        new_size: How many the new segment has.
        levels: For each level, the most records, bases and packs of its segments; and how many of
            its segments to merge with a new one.
    """
    merged: list[SegmentRef] = []
    total = new_size
    for most, others in levels:
        of_level = [s for s, size in sizes.items() if size <= most and s not in merged]
        more = sum(sizes[s] for s in of_level)
        if len(of_level) >= others and total + more <= _MOST:
            merged += of_level
            total += more
        if total <= most:
            break
    return merged
