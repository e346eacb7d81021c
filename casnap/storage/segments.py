"""The segments of the next root: each commit adds one, small ones are merged, freed packs leave."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from casnap.errors import StorageFullError
from casnap.format.records import (
    PackId,
    Record,
    Root,
    Segment,
    SegmentId,
    SegmentRef,
    encode_segment,
    merged_segment,
    segment_key,
)
from casnap.storage.index import View
from casnap.storage.objects import Objects
from casnap.storage.pack import new_id

_MERGE_AT = 16
_MERGE_MOST = 1 << 20
_SMALL = 1 << 15


def add_segment(
    objects: Objects, view: View, segment: Segment, base: int
) -> tuple[SegmentRef, ...]:
    """Write a segment of all that is new, merged with small ones; return the list for a root.

    Args:
        objects: The store.
        view: As the root sees it that the next one follows.
        segment: What is new.
        base: The root number that the id is made under.
    """
    merged = _to_merge(view.root.segments, len(segment.records))
    new = (encode_segment(segment), "a new segment")
    kept = tuple(ref for ref in view.root.segments if ref not in merged)
    return (*kept, *_write_merged(objects, view, [new], merged, (), base, segment.records))


@dataclass(frozen=True)
class Rewriting:
    """Segments that were written anew, and those that they stand for.

    Attributes:
        base: The root under which that was done.
        without: The packs that were left out.
        replaced: The segments that are to go.
        new: Those that take their place.
    """

    base: int
    without: frozenset[PackId]
    replaced: frozenset[SegmentRef]
    new: tuple[SegmentRef, ...]

    def applied(self, root: Root, without: frozenset[PackId]) -> tuple[SegmentRef, ...] | None:
        """Return the segments of the root after this one, or None where it does not fit any more.

        It fits a root that still names all that was replaced, if the same packs are to go, and if
        no fence is past the names of the new ones.
        """
        fits = self.replaced.issubset(root.segments) and root.fence <= self.base
        if not fits or without != self.without:
            return None
        return tuple(ref for ref in root.segments if ref not in self.replaced) + self.new

    def discard(self, objects: Objects) -> None:
        """Delete what was written, since no root names it, and none will."""
        for ref in self.new:
            objects.backend.delete(segment_key(ref.id))


def rewrite_segments(objects: Objects, view: View, without: Collection[PackId]) -> Rewriting:
    """Write segments anew without some packs, and merge small ones.

    Each keeps every place of every other pack, duplicates too: a take in flight may rely on any
    of them.

    Args:
        objects: The store.
        view: As a root sees it that names all these segments.
        without: The packs to leave out.
    """
    gone = frozenset(without)
    segments = view.root.segments
    affected = [ref for ref in segments if not gone.isdisjoint(view.segments[SegmentId(ref.id)])]
    small = [ref for ref in segments if ref.count < _SMALL and ref not in affected]
    # A few small ones are what takes leave behind; they merge them themselves.
    todo = affected + (small if affected or len(small) >= _MERGE_AT else [])
    new: list[SegmentRef] = []
    try:
        for group in _groups(todo):
            new += _write_merged(objects, view, [], group, gone, view.root.seq, [])
    except StorageFullError:
        Rewriting(view.root.seq, gone, frozenset(), tuple(new)).discard(objects)
        raise
    return Rewriting(view.root.seq, gone, frozenset(todo), tuple(new))


def drop_packs(objects: Objects, view: View, without: Collection[PackId]) -> tuple[SegmentRef, ...]:
    """Rewrite segments without some packs; return the list for the root after that of the view."""
    segments = rewrite_segments(objects, view, without).applied(view.root, frozenset(without))
    assert segments is not None
    return segments


def _write_merged(
    objects: Objects,
    view: View,
    parts: list[tuple[bytes, str]],
    refs: list[SegmentRef],
    without: Collection[PackId],
    base: int,
    new: list[Record],
) -> list[SegmentRef]:
    """Write some parts and segments as one; return the reference to it, if it lists any pack."""
    parts = parts + [objects.index.sealed(ref) for ref in refs]
    content, packs, count = merged_segment(parts, without)
    if not packs:
        return []
    ident = _put(objects, content, base)
    view.cache.keep_segment(ident, packs, new)
    return [SegmentRef(ident, count)]


def write_segment(objects: Objects, segment: Segment, base: int) -> SegmentRef:
    """Write a segment as it is, for another process to name in a root."""
    ident = _put(objects, encode_segment(segment), base)
    return SegmentRef(ident, len(segment.records))


def _put(objects: Objects, content: bytes, base: int) -> SegmentId:
    """Write a segment once all that it lists is durable, and make it so too."""
    ident = SegmentId(new_id(base))
    objects.backend.sync()
    objects.backend.write(segment_key(ident), content)
    objects.backend.sync()
    return ident


def _groups(refs: Iterable[SegmentRef]) -> list[list[SegmentRef]]:
    """Cut a list of segments into groups that may become one segment each."""
    groups: list[list[SegmentRef]] = []
    total = _MERGE_MOST
    for ref in refs:
        total += ref.count
        if total > _MERGE_MOST:
            groups.append([])
            total = ref.count
        groups[-1].append(ref)
    return groups


def _to_merge(segments: tuple[SegmentRef, ...], count: int) -> list[SegmentRef]:
    """Return the segments to merge with a new one of ``count`` records.

    Whenever sixteen are of about one size they become one, so their number grows with the
    logarithm of the records, and each record is written again as often; but none grows past a
    million records, so that whoever reads one needs little memory.
    """
    merged: list[SegmentRef] = []
    total = count
    tier = _tier(total)
    while True:
        same = [s for s in segments if s not in merged and _tier(s.count) <= tier]
        more = sum(s.count for s in same)
        if len(same) < _MERGE_AT - 1 or total + more > _MERGE_MOST:
            return merged
        merged += same
        total += more
        tier = max(_tier(total), tier + 1)


def _tier(count: int) -> int:
    return max(count.bit_length() - 6, 0) // 3
