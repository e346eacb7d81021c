"""Write the segments of the next root: add one, merge small ones, leave out freed packs."""

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
"""The most records and bases of a segment, together. They bound its length to 48 MiB."""
_SMALL = 1 << 15
# The most records, bases and packs of a merged segment. They have 53, 40 and 16 bytes each.
_MOST = 900_000


def add_segment(
    store: Repository, view: IndexView, segment: Segment, base: int
) -> tuple[SegmentRef, ...]:
    """Write a new segment, merged with small ones; return the segments of the next root.

    Args:
        store: The store.
        view: The index according to the last root.
        segment: The new segment.
        base: The number of the root that segments are written under.
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
    """New segments that replace old ones. They leave out some packs.

    Attributes:
        base: The number of the root that the new segments are written under.
        without: The packs that were left out.
        groups: The old segments. Each group was merged into one new segment.
        new_refs: The new segments.
    """

    base: int
    without: frozenset[PackId]
    groups: Groups
    new_refs: tuple[SegmentRef, ...]

    def fits(self, root: Root, without: frozenset[PackId]) -> bool:
        """Whether the root after the last root may name the new segments.

        It may on three conditions: the last root still names all old segments, its fence has not
        passed the new segments, and the same packs are to be left out.

        Args:
            root: The last root.
            without: The packs to leave out of the next root.
        """
        names_all = set(chain(*self.groups)).issubset(root.segments)
        return names_all and root.fence <= self.base and without == self.without

    def applied(self, root: Root) -> tuple[SegmentRef, ...]:
        """Return the segments of the next root. :meth:`fits` must be true for ``root``."""
        replaced = set(chain(*self.groups))
        return tuple(ref for ref in root.segments if ref not in replaced) + self.new_refs

    def discard(self, store: Repository) -> None:
        """Delete the new segments. The caller knows that no root names them."""
        for ref in self.new_refs:
            store.backend.delete(segment_key(ref.id))


def segments_to_rewrite(view: IndexView, without: Collection[PackId], costs: Costs) -> Groups:
    """Return groups of segments to rewrite: those that list a pack to leave out.

    If there are many small segments, they are rewritten too, to merge them.

    Args:
        view: The index according to a root.
        without: The packs to leave out.
        costs: The costs of requests at the store's place.
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
    """Merge each group of segments into a new segment, without some packs.

    A new segment keeps every place in every other pack, even if a chunk has several places: a take
    that is under way may rely on any of them.

    Args:
        store: The store.
        view: The index according to a root.
        groups: The groups of segments.
        without: The packs to leave out.

    Raises:
        StorageFullError: The disk is full. The new segments were deleted.
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
    """Rewrite segments without some packs; return the segments of the next root.

    Args:
        store: The store.
        view: The index according to the last root.
        without: The packs to leave out.
    """
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
    """Merge a new segment and stored ones, and write the result.

    Returns:
        The reference to the merged segment in a list; an empty list if it would list no pack.
    """
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
    """Write a segment without merging it, for a root that another process puts."""
    ident = _put_segment(store, encode_segment(segment), base)
    return SegmentRef(ident, len(segment.records), segment.deltas)


def write_segments(store: Repository, segment: Segment, base: int) -> tuple[SegmentRef, ...]:
    """Write a segment without merging it. A large one is written as several."""
    return tuple(write_segment(store, part, base) for part in _divided(segment))


def write_sealed(store: Repository, sealed: Iterable[bytes], base: int) -> SegmentRef:
    """Merge the sealed segments of several ranks, and write the result."""
    content, _ = merged_segment((part, "what a rank wrote") for part in sealed)
    return SegmentRef(_put_segment(store, content, base), *segment_counts(content))


def _divided(segment: Segment) -> list[Segment]:
    """Divide a segment into smaller ones if it is large. A pack's records stay together."""
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
    """Return the number of a segment's records, bases and packs together."""
    return _weight(segment.records) + len(segment.packs)


def _weight(records: list[Record]) -> int:
    """Return the number of records and of their bases together."""
    return len(records) + count_deltas(records)


def _put_segment(store: Repository, content: bytes, base: int) -> SegmentId:
    """Write a segment. Make it and all new packs durable.

    If this fails, delete the segment.
    """
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
    """Divide segments into groups. The segments of a group can be merged into one."""
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
    """Return which segments to merge with a new segment.

    Once there are several segments of about the same size, they are merged. So the number of
    segments grows with the logarithm of the number of records, and so does the number of times that
    a record is written again.

    Args:
        sizes: The number of records, bases and packs of each segment.
        new_size: The number of records, bases and packs of the new segment.
        levels: For each size class of segments, the smallest class first: the most records, bases
            and packs of a segment in it; and how many such segments are merged at the least.
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
