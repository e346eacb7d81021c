"""Making a change to a store stand: packs, then segments, then the root that names them.

The protocol, and the argument for it, are in ``docs/commit-protocol.md``. In short: a writer bases
itself on root ``n`` and may rely only on packs that are live in ``n``; it publishes root ``m + 1``
if everything that it relied on is still there in ``m``, under names that the fence has not passed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

from casnap.buffers import shared_pool
from casnap.codec import Codec
from casnap.digest import Digest, digest_of
from casnap.errors import FencedError, StorageFullError
from casnap.format import (
    NodeRef,
    PackId,
    Place,
    Root,
    Row,
    Segment,
    SegmentRef,
    segment_key,
)
from casnap.index import View
from casnap.manifest import Tree
from casnap.objects import Objects
from casnap.pack import CHUNKS, NODES, PackFiller, PackWriter, moved_place
from casnap.pipeline import Crew
from casnap.roots import put_root
from casnap.segments import added

_PASSED = (
    "the store's garbage collector went past this take, which stood still too long, and deleted "
    "what it relied on; take again"
)

Changes = Mapping[str, Row | None]
"""Rows of the table to set, or (None) to remove."""


class Transaction:
    """One change to a store, from the root that it is based on to the root that it publishes.

    Args:
        objects: The store.
        crew: Whom the background threads belong to.
        codec: How new chunks are stored.

    Attributes:
        base: The index as the root sees it that this change is based on.
        commit: The id that tells the own root from others.

    Raises:
        UnsupportedFormatError: The store uses a feature that its writers have to know.
    """

    def __init__(self, objects: Objects, crew: Crew, codec: Codec = Codec.RAW) -> None:
        objects.check_writable("write to")
        self._objects = objects
        self.base: View = objects.view()
        self.commit = os.urandom(16)
        pool = shared_pool(objects.config.chunk_size + (64 << 10))
        seq = self.base.root.seq
        folder = os.urandom(1)
        self._chunks = PackWriter(objects.backend, seq, folder, CHUNKS, pool, crew, codec)
        self._nodes = PackWriter(objects.backend, seq, folder, NODES, pool, crew, codec)
        self._node_filler = self._nodes.filler()
        self._copies: dict[PackWriter, PackFiller] = {}
        self._fresh: dict[Digest, tuple[bytes, Place]] = {}
        self._relied: set[PackId] = set()
        self._claimed: set[Digest] = set()
        self._lock = threading.Lock()
        self._may_stand = False
        self._segment: SegmentRef | None = None
        self._written_under = seq

    @property
    def new_bytes(self) -> int:
        """Bytes of chunks and nodes that were new, as stored."""
        nodes = sum(place.stored for _, place in self._fresh.values())
        return self._chunks.stored_bytes + nodes

    def chunk_writer(self) -> ChunkWriter:
        """Return what one thread stores chunks with."""
        return ChunkWriter(self, self._chunks.filler(), guess=self._chunks.codec == Codec.RAW)

    def unknown(self, digests: list[Digest]) -> list[bool]:
        """Rely on what is there; claim, and tell, what nobody wrote yet."""
        found = self._objects.index.find(self.base, digests, to_rely=True)
        distrusted = self._objects.index.distrusted
        new = []
        with self._lock:
            for digest, place in zip(digests, found, strict=True):
                rely = place is not None and digest not in distrusted
                if rely and place is not None:
                    self._relied.add(PackId(place.pack))
                new.append(not rely and digest not in self._claimed)
                if new[-1]:
                    self._claimed.add(digest)
        return new

    def copy(self, digest: Digest, raw: memoryview, *, is_node: bool) -> None:
        """Store a chunk or node again, wherever else it may lie; from any thread."""
        with self._lock:
            if digest in self._claimed:
                return
            self._claimed.add(digest)
            writer = self._nodes if is_node else self._chunks
            if writer not in self._copies:
                self._copies[writer] = writer.filler()
            self._copies[writer].add_known([(digest, raw)])

    def placed(self) -> dict[bytes, PackId]:
        """Return the packs that all lies in that was stored, once it is published."""
        records = [*self._chunks.records, *self._nodes.records]
        return {digest: PackId(place.pack) for digest, place in records}

    def put_node(self, node: bytes) -> Digest:
        """Store a tree node, or a list of digests, if it is new."""
        digest = digest_of(node)
        if self.unknown([digest])[0]:
            self._add_node(digest, node)
        return digest

    def _put_table_node(self, node: bytes) -> Digest:
        """Store a node of the table, whatever the base holds: the table follows the newest root."""
        digest = digest_of(node)
        if digest not in self._claimed:
            self._claimed.add(digest)
            self._add_node(digest, node)
        return digest

    def _add_node(self, digest: Digest, node: bytes) -> None:
        self._node_filler.add_known([(digest, node)])
        self._fresh[digest] = (node, self._node_filler.last())

    def publish(self, change: Callable[[Tree[Row], int], Changes]) -> Root:
        """Commit: write what is left, then put the root; on a lost race look again and repeat.

        Args:
            change: Says which rows to set or remove, given the table as it is now and the number
                of the root to be; raises to give up.

        Raises:
            FencedError: What was relied on has been collected.
        """
        for filler in self._copies.values():
            filler.seal()
        self._chunks.finish()
        while True:
            root = self._objects.current(lambda newest: self._after(newest, change))
            # From here on a root may stand that names what was written.
            self._may_stand = True
            try:
                if put_root(self._objects.backend, root):
                    # Only now: what a failed take stored anew is gone again.
                    self._objects.index.distrusted.difference_update(self._claimed)
                    return root
            except StorageFullError:
                # Nothing can have been put.
                self._may_stand = False
                raise
            # The number is another's for ever.
            self._may_stand = False
            self._delete_segment()

    def _after(self, m: Root, change: Callable[[Tree[Row], int], Changes]) -> Root:
        """Return the root to put after ``m``, all that it names being written."""
        latest = self._objects.index.view(m)
        # What is condemned is listed still, and comes back by this commit.
        if not self._relied <= latest.packs:
            raise FencedError(_PASSED)
        table = self._objects.tree(m.table, Row)
        new_table = table.edited(change(table, m.seq + 1), self._put_table_node)
        self._node_filler.seal()
        self._nodes.finish()
        if m.fence > self._written_under:
            self._move(m.seq)
        return Root(
            seq=m.seq + 1,
            commit=self.commit,
            time=time.time(),
            fence=m.fence,
            table=None if new_table is None else self.ref(new_table, m.table),
            segments=self._segments(latest),
            # What was condemned meanwhile, and is relied on, is rescued: whole packs, always.
            condemned={p: seq for p, seq in m.condemned.items() if p not in self._relied},
            lost=m.lost,
        )

    def _move(self, seq: int) -> None:
        """Bring what was written under an older root than the fence to this side of it.

        Whatever a collector deletes by the old names, the new ones are safe from it.
        """
        try:
            moved = self._chunks.move(seq) | self._nodes.move(seq)
        except FileNotFoundError:
            raise FencedError(_PASSED) from None
        self._fresh = {
            digest: (node, moved_place(place, moved))
            for digest, (node, place) in self._fresh.items()
        }
        self._written_under = seq

    def ref(self, digest: Digest, known: NodeRef | None = None) -> NodeRef:
        """Return a node with a hint to its place."""
        if known is not None and known.digest == digest:
            return known
        if digest in self._fresh:
            return NodeRef(digest, self._fresh[digest][1])
        return NodeRef(digest, self._objects.index.find(self.base, [digest])[0])

    def _segments(self, latest: View) -> tuple[SegmentRef, ...]:
        packs = (*self._chunks.packs, *self._nodes.packs)
        if not packs:
            return latest.root.segments
        segment = Segment(packs, [*self._chunks.records, *self._nodes.records])
        self._delete_segment()
        segments = added(self._objects, latest, segment, self._written_under)
        self._segment = segments[-1]
        self._objects.index.keep_nodes([(d, node) for d, (node, _) in self._fresh.items()])
        return segments

    def _delete_segment(self) -> None:
        """Delete the segment of a try that came to nothing."""
        segment, self._segment = self._segment, None
        if segment is not None:
            self._objects.backend.delete(segment_key(segment.id))

    def close(self) -> None:
        """Give memory back, and delete what was written unless a root may stand that names it."""
        for filler in (self._node_filler, *self._copies.values()):
            filler.seal()
        # The threads of both end, whatever fails after that.
        for packs in (self._chunks, self._nodes):
            packs.close()
        if not self._may_stand:
            self._delete_segment()
            for packs in (self._chunks, self._nodes):
                packs.delete_packs()


class ChunkWriter:
    """Stores chunks from one thread: hashed where they lie, and copied only if new.

    While all that comes is new, as in a first take, chunks are copied first and hashed only once,
    in the pack.
    """

    def __init__(self, transaction: Transaction, filler: PackFiller, *, guess: bool) -> None:
        self._transaction = transaction
        self._filler = filler
        self._guess = guess
        self._all_new = guess and not transaction.base.live

    def store(self, raws: list[memoryview]) -> list[Digest]:
        """Store those chunks that are in no live pack, and return the digests of all."""
        if self._all_new:
            return self._filler.add(raws, self._unknown)
        digests = [digest_of(raw) for raw in raws]
        new = self._unknown(digests)
        fresh = [(d, raw) for d, raw, n in zip(digests, raws, new, strict=True) if n]
        self._filler.add_known(fresh)
        return digests

    def _unknown(self, digests: list[Digest]) -> list[bool]:
        new = self._transaction.unknown(digests)
        self._all_new = self._guess and all(new)
        return new

    def finish(self) -> None:
        """Hand over what is left."""
        self._filler.seal()
