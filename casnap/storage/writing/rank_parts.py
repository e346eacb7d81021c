"""One commit for many ranks: each rank hands over its part to the rank that commits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import Struct

from casnap.format.records import (
    ID_SIZE,
    PackId,
    Root,
    SegmentRef,
    decode_segment,
)
from casnap.storage.lookup.index import PackSet

# Up to so many records, over all ranks, go into the one segment that the committing rank writes.
MOST_RECORDS = 1 << 16


class RankPart(Struct, array_like=True):
    """The packs that one rank has written and relies on, for a root that another rank puts.

    Attributes:
        reused: The ids of the packs that it relies on, one behind the other.
        base: The root number that the ids of its own packs begin with.
        new_bytes: Bytes of chunks and nodes that it added, as stored.
        records: Where these lie, as a sealed segment that is not written yet. Empty if there are
            none, or so many that the rank wrote a segment itself.
        segments: The segments that it wrote.
        fenced: If packs are gone, because a collector deleted them, say: the reason.
        requests: How many requests it has made, by kind.
    """

    reused: bytes
    base: int
    new_bytes: int
    records: bytes = b""
    segments: tuple[SegmentRef, ...] = ()
    fenced: str = ""
    requests: dict[str, int] = {}


class OtherRanks:
    """The other ranks of a take, for the rank that commits; none by default.

    Args:
        handovers: What each of them handed over.
        move: Has each rank give its packs new ids, made under a root of this number, and returns
            the new handovers.
        check: Raises if the other ranks have given up, and would not learn of a commit.

    Attributes:
        base: The least base of their packs.
        new_bytes: Bytes that they added to the store.
        requests: How many requests they have made, by kind.
        reused: The packs that they rely on.
        segments: The segments that they wrote.
        packs: Their packs that no segment lists yet.
        samples: One of these packs of each rank.
        records: The records of these packs.
        check: Raises if the other ranks have given up.
    """

    def __init__(
        self,
        handovers: Sequence[RankPart] = (),
        move: Callable[[int], Sequence[RankPart]] = lambda _: (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._move = move
        self.check = check
        self._take_over(handovers)

    def _take_over(self, handovers: Sequence[RankPart]) -> None:
        self.base = min((h.base for h in handovers), default=1 << 62)
        self.new_bytes = sum(h.new_bytes for h in handovers)
        self.requests = sum((Counter(h.requests) for h in handovers), Counter[str]())
        self.reused = {
            PackId(h.reused[at : at + ID_SIZE])
            for h in handovers
            for at in range(0, len(h.reused), ID_SIZE)
        }
        self.segments = tuple(ref for h in handovers for ref in h.segments)
        segments_of_ranks = [
            decode_segment(h.records, "what a rank wrote") for h in handovers if h.records
        ]
        self.packs = tuple(pack for segment in segments_of_ranks for pack in segment.packs)
        self.samples = tuple(segment.packs[0] for segment in segments_of_ranks if segment.packs)
        self.records = [record for segment in segments_of_ranks for record in segment.records]

    def move_past_fence(self, root: Root, live_packs: PackSet) -> None:
        """Move their packs, if the fence of a root is past them or it lacks a pack relied on.

        Args:
            root: The root.
            live_packs: The packs that it names.
        """
        if root.fence > self.base or not live_packs.issuperset(self.reused):
            self._take_over(self._move(root.seq))
