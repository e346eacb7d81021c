"""Making a change to a store stand: packs, then segments, then the root that names them.

The protocol, and the argument for it, are in ``docs/commit-protocol.md``. In short: a writer bases
itself on root ``n`` and may rely only on packs that are live in ``n``; it publishes root ``m + 1``
if everything that it relied on is still there in ``m``, under names that the fence has not passed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct

from casnap.errors import FencedError, StorageFullError
from casnap.format.codec import Codec
from casnap.format.digest import Digest, digest_of
from casnap.format.records import (
    ID_SIZE,
    INLINE_METADATA_BYTES,
    NodeRef,
    PackId,
    Place,
    Root,
    Row,
    Segment,
    SegmentRef,
    decode_segment,
    encode,
    encode_segment,
    segment_key,
)
from casnap.runtime.buffers import shared_pool
from casnap.runtime.threads import Crew
from casnap.storage.index import View
from casnap.storage.objects import Objects
from casnap.storage.pack import CHUNKS, NODES, Choose, PackFiller, PackWriter, moved_place
from casnap.storage.pack_set import PackSet
from casnap.storage.relied_packs import PASSED, ReliedPacks
from casnap.storage.roots import following, put_root
from casnap.storage.segments import add_segment, write_segment
from casnap.storage.tree import DEEP, Shape, Tree, table_shape

Changes = Mapping[str, Row | None]
"""Rows of the table to set, or (None) to remove."""


class Handover(Struct, array_like=True):
    """What another rank has written, and relies on, for a root that this process puts.

    Attributes:
        relied: The packs that it relies on, their ids one behind the other.
        base: The root number that its ids were made under.
        new_bytes: Bytes of chunks and nodes that it added, as stored.
        records: Where what it wrote lies, as a sealed segment that nobody has written yet; empty
            where there is nothing, or so much that it wrote the segment itself.
        segments: The segments that it wrote.
        fenced: Where some of it is gone, why; a collector went past it, say.
    """

    relied: bytes
    base: int
    new_bytes: int
    records: bytes = b""
    segments: tuple[SegmentRef, ...] = ()
    fenced: str = ""


class Partners:
    """The other ranks of a take that one process commits for all.

    Args:
        handovers: What each of them has written.
        move: Has all of them give what they wrote new names, made under another root, and returns
            what they say after that.
        check: Raises if they have given up, and will not hear of a commit.
    """

    def __init__(
        self,
        handovers: Sequence[Handover] = (),
        move: Callable[[int], Sequence[Handover]] = lambda _: (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._move = move
        self.check = check
        self._look_at(handovers)

    def _look_at(self, handovers: Sequence[Handover]) -> None:
        self.base = min((h.base for h in handovers), default=1 << 62)
        self.new_bytes = sum(h.new_bytes for h in handovers)
        self.relied = {
            PackId(h.relied[at : at + ID_SIZE])
            for h in handovers
            for at in range(0, len(h.relied), ID_SIZE)
        }
        self.segments = tuple(ref for h in handovers for ref in h.segments)
        given = [decode_segment(h.records, "what a rank wrote") for h in handovers if h.records]
        self.packs = tuple(pack for segment in given for pack in segment.packs)
        self.records = [record for segment in given for record in segment.records]

    def follow(self, root: Root, packs: PackSet) -> None:
        """Have them move, if a root has a fence past their names, or lacks what they rely on.

        Args:
            root: The root.
            packs: The packs that it names.
        """
        if root.fence > self.base or not packs.issuperset(self.relied):
            self._look_at(self._move(root.seq))


_NOBODY = Partners()
# So many records, over all ranks, go into the one segment that the committing process writes.
_HANDED_OVER = 1 << 16


class Transaction:
    """One change to a store, from the root that it is based on to the root that it publishes.

    Args:
        objects: The store.
        crew: Whom the background threads belong to.
        codec: How new chunks are stored.

    Attributes:
        base: The index as the root sees it that this change is based on.
        commit: The id that tells the own root from others.
        may_stand: Whether a root may stand, now or later, that names what was written.

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
        self._relied = ReliedPacks(objects, self.base)
        self._claimed: set[Digest] = set()
        self._lock = threading.Lock()
        self.may_stand = False
        self._segment: SegmentRef | None = None
        self._written_under = seq
        self._partners = _NOBODY

    @property
    def new_bytes(self) -> int:
        """Bytes of chunks and nodes that were new, as stored."""
        nodes = sum(place.stored for _, place in self._fresh.values())
        return self._chunks.stored_bytes + nodes + self._partners.new_bytes

    def chunk_writer(self, ask: Choose | None = None) -> ChunkWriter:
        """Return what one thread stores chunks with.

        Args:
            ask: Asked which of those that the store lacks are to be written; by default all.
        """
        guess = self._chunks.codec == Codec.RAW
        return ChunkWriter(self, self._chunks.filler(), ask, guess=guess)

    def unknown(self, digests: list[Digest]) -> list[bool]:
        """Rely on what is there; claim, and tell, what nobody wrote yet."""
        new = []
        lacking = self._relied.rely(digests)
        with self._lock:
            for digest, lacks in zip(digests, lacking, strict=True):
                new.append(lacks and digest not in self._claimed)
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

    def publish(
        self,
        change: Callable[[Tree[Row], int], Changes],
        partners: Partners = _NOBODY,
        become: Callable[[Root], Root] = lambda root: root,
    ) -> Root:
        """Commit: write what is left, then put the root; on a lost race look again and repeat.

        Args:
            change: Says which rows to set or remove, given the table as it is now and the number
                of the root to be; raises to give up.
            partners: The other ranks, if this process commits for them too.
            become: Says what the new root differs in from the one before, beside what it holds.

        Raises:
            FencedError: What was relied on has been collected, or is gone.
        """
        self._partners = partners
        for filler in self._copies.values():
            filler.seal()
        self._chunks.finish()
        while True:
            root = self._objects.current(lambda newest: self._after(newest, change, become))
            if root is None:
                continue
            partners.check()
            # From here on a root may stand that names what was written.
            self.may_stand = True
            try:
                if put_root(self._objects.backend, root):
                    return root
            except StorageFullError:
                # Nothing can have been put.
                self.may_stand = False
                raise
            # The number is another's for ever.
            self.may_stand = False
            self._delete_segment()

    def _after(
        self,
        m: Root,
        change: Callable[[Tree[Row], int], Changes],
        become: Callable[[Root], Root],
    ) -> Root | None:
        """Return the root to put after ``m``, all that it names being written.

        None where another one is the newest by now, which has what ``m`` lacks.
        """
        latest = self._objects.index.view(m)
        relied = self._all_relied(m, latest)
        if relied is None:
            return None
        like = become(m)
        new_table = self._table(m, change, table_shape(like))
        self._node_filler.seal()
        self._nodes.finish()
        if m.fence > self._written_under:
            self._move(m.seq)
        return following(
            self._objects.backend.uri,
            like,
            self.commit,
            table=None if new_table is None else self.ref(new_table, m.table),
            segments=self._segments(latest),
            # What was condemned meanwhile, and is relied on, is rescued: whole packs, always.
            condemned={p: seq for p, seq in m.condemned.items() if p not in relied},
        )

    def _table(
        self, m: Root, change: Callable[[Tree[Row], int], Changes], shape: Shape
    ) -> Digest | None:
        """Write the table of the root after ``m``; return its digest."""
        table = self._objects.table(m)
        changes = change(table, m.seq + 1)
        if shape is not table_shape(m):
            changes = {**dict(table.items()), **changes}
            table = Tree(None, self._objects.node, Row, shape)
        if shape is DEEP:
            changes = {name: row and self._slim(row) for name, row in changes.items()}
        return table.edited(changes, self._put_table_node)

    def _slim(self, row: Row) -> Row:
        """Put large metadata into a node of their own, which is not written again with the leaf."""
        content = encode(row.metadata)
        if len(content) <= INLINE_METADATA_BYTES:
            return row
        node = self._put_table_node(content)
        return msgspec.structs.replace(row, metadata={}, metadata_node=node)

    def _all_relied(self, m: Root, latest: View) -> set[PackId] | None:
        """Return the packs that all ranks rely on; None where another root is the newest by now.

        Raises:
            FencedError: Something is nowhere any more.
        """
        try:
            self._relied.confirm(latest)
        except FencedError:
            if self._objects.newest() == m:
                raise
            return None
        self._partners.follow(m, latest.packs)
        # What is condemned is listed still, and comes back by this commit.
        relied = self._relied.packs | self._partners.relied
        if latest.packs.issuperset(relied):
            return relied
        if self._objects.newest() == m:
            raise FencedError(PASSED)
        return None

    def _move(self, seq: int) -> None:
        """Bring what was written under an older root than the fence to this side of it.

        Whatever a collector deletes by the old names, the new ones are safe from it.
        """
        try:
            moved = self._chunks.move(seq) | self._nodes.move(seq)
        except FileNotFoundError:
            raise FencedError(PASSED) from None
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
        theirs = self._partners
        packs = (*self._chunks.packs, *self._nodes.packs, *theirs.packs)
        if not packs:
            return (*latest.root.segments, *theirs.segments)
        segment = Segment(packs, [*self._chunks.records, *self._nodes.records, *theirs.records])
        self._delete_segment()
        segments = add_segment(self._objects, latest, segment, self._written_under)
        self._segment = segments[-1]
        self._keep_nodes()
        return (*segments, *theirs.segments)

    def _keep_nodes(self) -> None:
        self._objects.index.cache.keep_nodes([(d, node) for d, (node, _) in self._fresh.items()])

    # --- as one of several ranks ---

    def hand_over(self, world: int) -> Handover:
        """Write what is left, and say what another process needs to commit it.

        From here on a root may stand that names what was written, until :meth:`withdraw`.

        Args:
            world: How many ranks hand something over.

        Raises:
            FencedError: What it relied on is gone.
        """
        self._relied.confirm(self._objects.view())
        self._chunks.finish()
        self._node_filler.seal()
        self._nodes.finish()
        self._keep_nodes()
        handover = self._handover(world)
        self.may_stand = True
        return handover

    def _handover(self, world: int) -> Handover:
        handover = Handover(
            b"".join(sorted(self._relied.packs)), self._written_under, self.new_bytes
        )
        segment = Segment(
            (*self._chunks.packs, *self._nodes.packs),
            [*self._chunks.records, *self._nodes.records],
        )
        if len(segment.records) * world > _HANDED_OVER:
            self._delete_segment()
            self._segment = write_segment(self._objects, segment, self._written_under)
            handover.segments = (self._segment,)
        elif segment.packs:
            handover.records = encode_segment(segment)
        # Whoever commits knows only what it has written itself to be durable.
        self._objects.backend.sync()
        return handover

    def move(self, seq: int, world: int) -> Handover:
        """Give what was handed over new names, made under another root; say so anew.

        Raises:
            FencedError: It is gone.
        """
        self._relied.confirm(self._objects.view())
        if seq > self._written_under:
            self._move(seq)
        return self._handover(world)

    def withdraw(self) -> None:
        """Note that no root was put, nor will be, that names what was handed over."""
        self.may_stand = False

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
        if not self.may_stand:
            self._delete_segment()
            for packs in (self._chunks, self._nodes):
                packs.delete_packs()


class ChunkWriter:
    """Stores chunks from one thread: hashed where they lie, and copied only if new.

    While all that comes is new, as in a first take, chunks are copied first and hashed only once,
    in the pack.
    """

    def __init__(
        self, transaction: Transaction, filler: PackFiller, ask: Choose | None, *, guess: bool
    ) -> None:
        self._transaction = transaction
        self._ask = ask
        self._filler = filler
        self._guess = guess
        self._all_new = guess and not transaction.base.live

    def store(self, raws: list[memoryview]) -> list[Digest]:
        """Store those chunks that are in no live pack, and return the digests of all."""
        if self._all_new:
            return self._filler.add(raws, self._unknown)
        digests = [digest_of(raw) for raw in raws]
        new = self._unknown(digests, [len(raw) for raw in raws])
        fresh = [(d, raw) for d, raw, n in zip(digests, raws, new, strict=True) if n]
        self._filler.add_known(fresh)
        return digests

    def _unknown(self, digests: list[Digest], sizes: list[int]) -> list[bool]:
        new = self._transaction.unknown(digests)
        if self._ask is not None and any(new):
            asked = [i for i, n in enumerate(new) if n]
            yes = self._ask([digests[i] for i in asked], [sizes[i] for i in asked])
            for i, mine in zip(asked, yes, strict=True):
                new[i] = mine
        self._all_new = self._guess and all(new)
        return new

    def finish(self) -> None:
        """Hand over what is left."""
        self._filler.seal()
