"""One commit for many ranks: each rank hands a list of its packs to the rank that commits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct

from casnap.errors import FencedError, StorageFullError, StoreError
from casnap.format.records import (
    ID_SIZE,
    PackId,
    Root,
    SegmentRef,
    decode_segment,
    pack_key,
    segment_key,
)
from casnap.runtime.threads import mapped
from casnap.storage.lookup.index import PackSet
from casnap.storage.reading.repository import Repository
from casnap.storage.writing.segments import MERGE_MOST

# The most records of all ranks that go into the segment of the committing rank.
MOST_RECORDS = 1 << 16


class Handover(Struct, array_like=True):
    """A message to the rank that commits: which packs another rank has written and relies on.

    Attributes:
        relied_on: The concatenated ids of the packs that the rank relies on.
        base_seq: The number of the root that the rank's own packs are written under.
        new_bytes: The stored bytes of the chunks and nodes that the rank added.
        records: The records of these chunks and nodes, as a sealed segment that is not stored yet.
            Empty if there are none, or too many for the segment of the rank that commits.
        weight: The number of records, bases and packs that this message leaves out, since they are
            too many, and that must be written into another segment; 0 if there are none.
        segments: The segments that the rank wrote, for itself and other ranks.
        sample: The id of one of the rank's packs; empty if it wrote none.
        place: A digest that is equal for ranks that write to the same place.
        fenced: Why packs of the rank are gone, for example deleted by a collector; "" if none are.
        full: Why the rank could not write all its packs; "" if it could.
        requests: How many requests the rank has made, by kind.
    """

    relied_on: bytes = b""
    base_seq: int = 0
    new_bytes: int = 0
    records: bytes = b""
    weight: int = 0
    segments: tuple[SegmentRef, ...] = ()
    sample: bytes = b""
    place: bytes = b""
    fenced: str = ""
    full: str = ""
    requests: dict[str, int] = {}

    @staticmethod
    def segment_writers(handovers: Sequence[Handover]) -> list[int]:
        """Choose the ranks that write segments, if ranks have too many records for a handover.

        Each chosen rank writes one segment: of its own records and those of the ranks after it, up
        to the next writer. So there are few segments even with many ranks.

        Args:
            handovers: The handovers of all ranks, in their order.
        """
        writers: list[int] = []
        filled = MERGE_MOST
        for rank, handover in enumerate(handovers):
            weight = handover.weight
            if weight and filled + weight > MERGE_MOST:
                writers.append(rank)
                filled = 0
            filled += weight
        return writers

    @property
    def is_whole(self) -> bool:
        """Whether all packs of the rank are written and exist, so that a root may name them."""
        return not (self.fenced or self.full)

    def check_whole(self) -> None:
        """Check that the rank could write all its packs, and that they exist.

        Raises:
            FencedError: Some packs are gone.
            StorageFullError: The rank found the disk full.
        """
        if self.fenced:
            raise FencedError(self.fenced)
        if self.full:
            raise StorageFullError(self.full)


class OtherRanks:
    """The handovers of the other ranks of a take, which the rank that commits has gathered.

    Without arguments, it stands for a process that takes alone.

    Args:
        gather: Returns the handovers, as for
            :meth:`~casnap.storage.writing.session.Session.include`.
        check: Raises an error if the other ranks have given up.

    Raises:
        FencedError: A pack that a rank wrote or relies on is gone.
        StorageFullError: A rank found the disk full.

    Attributes:
        base_seq: The least root number that any of the ranks' packs is written under.
        new_bytes: The stored bytes that the ranks added to the store.
        requests: How many requests the ranks have made, by kind.
        relied_on: The packs that the ranks rely on.
        segments: The segments that the ranks wrote.
        packs: The ranks' packs that no segment lists yet.
        samples: One pack for each rank, or at least for each place where ranks write.
        records: The records of ``packs``.
        check: Raises an error if the other ranks have given up.
    """

    def __init__(
        self,
        gather: Callable[[int], Sequence[Handover]] = lambda _: (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._gather = gather
        self.check = check
        self._take_over(0)

    def _take_over(self, seq: int) -> None:
        handovers = self._gather(seq)
        for handover in handovers:
            handover.check_whole()
        self.base_seq = min((handover.base_seq for handover in handovers), default=1 << 62)
        self.new_bytes = sum(handover.new_bytes for handover in handovers)
        self.requests = sum((Counter(handover.requests) for handover in handovers), Counter[str]())
        self.relied_on = {
            PackId(handover.relied_on[at : at + ID_SIZE])
            for handover in handovers
            for at in range(0, len(handover.relied_on), ID_SIZE)
        }
        self.segments = tuple(ref for handover in handovers for ref in handover.segments)
        segments_of_ranks = [
            decode_segment(handover.records, "what a rank wrote")
            for handover in handovers
            if handover.records
        ]
        self.packs = tuple(pack for segment in segments_of_ranks for pack in segment.packs)
        self.samples = tuple(PackId(h.sample) for h in handovers if h.sample)
        self.records = [record for segment in segments_of_ranks for record in segment.records]

    def move_past_fence(self, root: Root, live_packs: PackSet) -> None:
        """Have the ranks hand over again if a fence has passed their packs, or a pack is gone.

        Args:
            root: The root that the commit will follow.
            live_packs: The packs that this root names.

        Raises:
            FencedError: A pack that a rank wrote or relies on is gone.
        """
        if root.fence > self.base_seq or not live_packs.issuperset(self.relied_on):
            self._take_over(root.seq)

    def _is_kept(self, store: Repository) -> bool:
        """Whether the ranks' packs are safe from collectors: no fence has passed them."""
        return store.newest().fence <= self.base_seq

    def check_written(self, store: Repository) -> None:
        """Check that this rank sees the files that the other ranks have written.

        Raises:
            FencedError: A collector may have deleted the files.
            StoreError: Another rank writes to another storage, such as a copy of the store.
        """
        # At a remote place, one pack of a rank shows where it writes: a put file is seen by all.
        backend = store.backend
        packs = self.samples if backend.costs.one_asks else {*self.packs, *self.samples}
        ends = dict.fromkeys(map(pack_key, packs), 0)
        ends |= {segment_key(ref.id): 0 for ref in self.segments}
        for _, place in self.records:
            key = pack_key(place.pack)
            if key in ends:
                ends[key] = max(ends[key], place.offset + place.stored_size)
        while True:
            sizes = dict(mapped(backend.size_if_there, ends, backend.in_flight))
            absent = next((key for key, size in sizes.items() if size is None), None)
            if absent is None or not backend.appears(absent, partial(self._is_kept, store)):
                break
        lacking = [key for key, size in sizes.items() if size is None or size < ends[key]]
        if lacking and not self._is_kept(store):
            raise FencedError
        if lacking:
            raise StoreError(
                f"{backend.where(lacking[0])}, which another rank has written, is not there, "
                "or not whole, where rank 0 looks; all ranks must see one storage (a copy of a "
                "store, on a disk of each host, is another one)"
            )
