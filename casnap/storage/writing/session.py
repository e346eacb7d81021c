"""Write to a store: new chunks and nodes, and the root that names them.

A session writes packs, and relies on packs of earlier commits. At its end it commits a change of
the table. If many ranks take together, the session of each other rank hands its packs over to the
rank that commits for all (``handovers.py``).

``docs/commit-protocol.md`` has the protocol, and the argument for it. In short: a writer begins
from root ``n``, and relies only on packs that are live in ``n``. When it commits, ``m`` is the
newest root. It puts root ``m + 1`` if ``m`` still names all packs that it relies on, and the fence
of ``m`` has not passed the packs that it has written.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType

import msgspec

from casnap.errors import FencedError, StorageFullError
from casnap.format.codec import Codec
from casnap.format.digest import Digest, digest_of
from casnap.format.hints import named_in, names_nodes
from casnap.format.names import is_deep
from casnap.format.records import (
    INLINE_METADATA_BYTES,
    NodeRef,
    PackId,
    Place,
    Root,
    Row,
    Segment,
    SegmentRef,
    encode,
    encode_segment,
    pack_key,
    segment_key,
    serves_below,
    serving_below,
)
from casnap.runtime.threads import Crew
from casnap.storage.commit_log.roots import next_root, put_root
from casnap.storage.lookup.index import IndexView
from casnap.storage.packs.pack_writer import Raw, SelectNew
from casnap.storage.reading.repository import Repository
from casnap.storage.reading.table import Table
from casnap.storage.writing.chunk_forms import Base, ChosenForm, ChunkForms
from casnap.storage.writing.copying import Report, copy_verified, one_at_a_time
from casnap.storage.writing.handovers import MOST_RECORDS, Handover, OtherRanks
from casnap.storage.writing.new_packs import NewPacks
from casnap.storage.writing.reliance import Reliance
from casnap.storage.writing.segments import (
    add_segment,
    weight_of,
    write_sealed,
    write_segments,
)
from casnap.storage.writing.starting_over import put_root_after

# About how many bytes of the table's lists the hints of a commit hold.
_UPPER_BYTES = 16 << 10

Change = Callable[[Table, int], Mapping[str, Row | None] | None]
"""A change to the table. It gets the table and the number of the next root, and returns the rows to
set, with None for each row to remove. It returns None if no root is to be put, and raises to give
up."""


class Session:
    """The work of one process on one change of a store: the packs that it writes, and the commit.

    A session commits once, or hands over to the rank that commits. At the end of a ``with`` block
    it gives its memory back. If no root can name its packs, it deletes them.

    Args:
        store: The store.
        crew: Starts the threads in the background; the first error of a thread stops all of them.
            By default the session makes its own.
        codec: The codec of new chunks.
        requests_before: How many requests the backend had made when the change began, by kind.
        base_root: The root that rank 0 has just read for all ranks; by default a recent one.
        earlier: A reliance that the caller began before the session. The session takes it over when
            it commits or hands over; until then the caller may go on using it.
        puts_root: Whether this process puts the root. If so, it checks that the place honours
            put-if-absent.
        copies: Whether the session copies chunks out of packs. In one process, sessions that do so
            wait for each other.
        dry_run: Whether the session only finds chunks that it could rely on, and writes nothing.

    Attributes:
        store: The store.
        base: The index according to the root that the change began from.
        commit_id: The commit id of the root to put.
        new_packs: The packs that the session writes.
        may_be_referenced: Whether a root may name the new packs, now or later.

    Raises:
        UnsupportedFormatError: The store uses a feature that this version cannot write.
        StoreError: The place does not honour put-if-absent, or this user may only read the store.
    """

    def __init__(
        self,
        store: Repository,
        crew: Crew | None = None,
        codec: Codec = Codec.RAW,
        requests_before: Mapping[str, int] | None = None,
        base_root: Root | None = None,
        earlier: Reliance | None = None,
        *,
        puts_root: bool = True,
        copies: bool = False,
        dry_run: bool = False,
    ) -> None:
        requests = store.backend.requests if requests_before is None else requests_before
        self._requests_before = Counter(requests)
        self.store = store
        self.commit_id = os.urandom(16)
        self.may_be_referenced = False
        self._codec = codec
        self._forms = ChunkForms(store.index)
        self._segments: list[SegmentRef] = []
        # Records that were too many for the segment of the committing rank.
        self._unlisted = Segment((), [])
        self._others = OtherRanks()
        with ExitStack() as stack:
            if copies:
                stack.enter_context(one_at_a_time())
            based_on = base_root or store.recent()
            store.check_writable("write to", based_on, dry_run=dry_run or not puts_root)
            self._crew = crew or stack.enter_context(Crew())
            # In an object store, rank 0 announces the change of all ranks.
            is_seen = not dry_run and (puts_root or not store.backend.costs.one_asks)
            reliance = Reliance(store, base_root, announced=based_on.seq if is_seen else None)
            stack.callback(reliance.end)
            self.base: IndexView = reliance.base
            self._reliance, self._earlier = reliance, earlier
            self._reliances = [each for each in (reliance, earlier) if each is not None]
            self.new_packs = NewPacks(store, self.base.root.seq, self._crew, codec)
            stack.callback(self._close)
            self._keeps_warm = not (copies or dry_run)
            if self._keeps_warm:
                # The disk is for the writes of this session now.
                store.backend.warm({})
            self._end = stack.pop_all()

    @property
    def requests(self) -> Counter[str]:
        """How many requests all ranks have made for this change so far, by kind."""
        return Counter(self.store.backend.requests) - self._requests_before + self._others.requests

    @property
    def new_bytes(self) -> int:
        """The stored bytes of the new chunks and nodes of all ranks."""
        return self.new_packs.stored_bytes + self._others.new_bytes

    def writer(self, select_share: SelectNew | None = None) -> ChunkWriter:
        """Return a new writer, by which one thread stores chunks.

        Args:
            select_share: Called with chunks that the store lacks; returns which of them this rank
                must write. With None, the rank writes all.
        """
        # Compressing a known chunk takes longer than hashing it twice. So a store that compresses
        # never guesses that all chunks are new.
        guess = not self.base.live if self._codec == Codec.RAW else None
        return ChunkWriter(self, select_share, all_new=guess)

    def rely_on(self, digests: list[Digest]) -> list[Place | None]:
        """Find chunks and nodes in live packs, so that this session need not store them.

        From now on the session *relies on* these packs: the commit checks that they still exist.

        Returns:
            For each digest a place, or None if no live pack holds it.
        """
        self.renew_announcement()
        return self._reliance.rely_on(digests)

    def renew_announcement(self) -> None:
        """Keep the change announced to collectors. Threads call this from time to time."""
        for reliance in self._reliances:
            reliance.renew()

    def _adopt(self) -> None:
        """Take over the earlier reliance. The caller must then confirm the reliance."""
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            self._reliance.adopt(earlier)

    def claim_new(self, digests: list[Digest]) -> list[bool]:
        """Return, for each digest, whether the calling thread must write its chunk or node.

        It must if no live pack holds the chunk or node, and no other thread has claimed it. The
        session relies on the chunks and nodes that live packs hold.
        """
        is_new = [place is None for place in self.rely_on(digests)]
        return self.new_packs.claim(digests, is_new)

    def put_node(self, node: bytes) -> Digest:
        """Store a tree node, or a list of digests, unless the store has it; return its digest."""
        digest = digest_of(node)
        if self.claim_new([digest])[0]:
            self.new_packs.add_node(digest, node)
        return digest

    def put_table_node(self, node: bytes) -> Digest:
        """Store a node of the table, even if the store has it already; return its digest.

        The table is derived from the newest root, and the session does not rely on that root's
        packs.
        """
        digest = digest_of(node)
        if self.new_packs.claim([digest], [True])[0]:
            self.new_packs.add_node(digest, node)
        return digest

    def ref(self, digest: Digest, earlier: NodeRef | None = None) -> NodeRef:
        """Return a reference to a node, with a hint to its place.

        Args:
            digest: The digest of the node.
            earlier: The reference in the root before, if any. If it refers to the same node, it is
                returned.
        """
        if earlier is not None and earlier.digest == digest:
            return earlier
        if digest in self.new_packs.nodes:
            return NodeRef(digest, self.new_packs.nodes[digest][1])
        return NodeRef(digest, self.store.index.find(self.base, [digest])[0])

    # --- chunks and nodes of other stores ---

    def use(self, codec: Codec) -> None:
        """Use another codec for chunks and tree nodes that are written from now on."""
        self._codec = codec
        self.new_packs.use(codec)

    def copy(self, source: Repository, digests: Iterable[Digest], report: Report) -> None:
        """Copy chunks of another store, verified, in the codec of this session.

        Args:
            source: The other store.
            digests: The digests of the chunks.
            report: Called with the digest and raw length of each chunk, from any thread.

        Raises:
            DamagedError: Some chunks are missing in the source, or damaged wherever they lie.
            PlaceError: Some chunks cannot be read, and may be whole.
        """

        def note(digest: Digest, nbytes: int) -> None:
            self._go_on()
            report(digest, nbytes)

        copy_verified(source, ((digest, False) for digest in digests), self.new_packs, note)

    def put_small(
        self,
        digests: Iterable[Digest],
        raws: Mapping[Digest, memoryview],
        bases: Mapping[Digest, Digest],
    ) -> None:
        """Store each chunk in the smallest form that readers can afford. Any thread may call this.

        Args:
            digests: The digests of the chunks.
            raws: The verified bytes of the chunks, and of the bases that could be read.
            bases: The digest of a chunk → the digest of a possible base. The session must rely on
                the bases already.
        """
        chains = self._forms.chains_below(self.base, raws.keys() & bases.values())
        for digest in digests:
            self._go_on()
            raw, like = raws[digest], bases.get(digest)
            base = Base(like, raws[like], chains[like]) if like in chains else None
            form = self._forms.choose(digest, raw, base) or ChosenForm(raw, Codec.RAW, None)
            self._forms.write(self.new_packs, digest, len(raw), form)

    def _go_on(self) -> None:
        """Keep the change announced; raise the error of a background thread if there is one."""
        if self._crew.error is not None:
            raise self._crew.error
        self.renew_announcement()

    def copy_nodes(self, source: Repository, digests: list[Digest]) -> int:
        """Copy nodes of another store, unless this session has written them; return how many."""
        source.cache_nodes(digests)
        claimed = self.new_packs.claim(digests, [True] * len(digests))
        new_digests = [digest for digest, is_new in zip(digests, claimed, strict=True) if is_new]
        for digest in new_digests:
            self.new_packs.add_node(digest, source.node(digest))
        return len(new_digests)

    # --- the end: a commit, or a handover to the rank that commits ---

    def include(
        self,
        gather: Callable[[int], Sequence[Handover]],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Include the packs of other ranks in the commit.

        Args:
            gather: Returns the handovers of the other ranks. Its argument is 0, or the number of a
                root: then ranks that wrote packs under an older root first give them new ids under
                this root.
            check: Raises if the other ranks have given up, and would not learn of a commit.

        Raises:
            FencedError: A pack that a rank wrote or relies on is gone.
            StorageFullError: A rank found the disk full.
            StoreError: A rank writes to another storage, such as a copy of the store.
        """
        self._others = OtherRanks(gather, check)
        self._others.check_written(self.store)

    def commit(
        self,
        change: Change,
        update_root: Callable[[Root], Root] = lambda root: root,
    ) -> Root | None:
        """Finish the packs, write the segment, and put the root.

        If the root's number is taken, try again.

        Args:
            change: The change to the table.
            update_root: Changes fields of the next root other than its table. It gets the newest
                root, and returns the changed copy.

        Returns:
            The root; None if the change returned None.

        Raises:
            FencedError: A pack that the session wrote or relies on was collected, or is gone.
        """
        self._adopt()
        next_after = partial(self._root_after, change, update_root)
        self.new_packs.finish_chunks()
        read = self.store.read_at_newest
        return put_root_after(
            self.store, lambda m: read(next_after, lambda: m), self._put, self.store.recent
        )

    def _put(self, root: Root) -> bool:
        """Put a root. Return False if another commit has taken its number."""
        self._others.check()
        self.may_be_referenced = True
        try:
            stands = put_root(self.store.backend, root)
        except StorageFullError:
            # This error means that no root was put.
            self.may_be_referenced = False
            raise
        if not stands:
            # Another commit has the number for ever, so no root names the packs yet.
            self.may_be_referenced = False
            self._delete_segments()
        return stands

    def _root_after(
        self, change: Change, update_root: Callable[[Root], Root], m: Root
    ) -> Root | None:
        """Write all files that the root after ``m`` will name, and return that root.

        If ``m`` lacks a pack that the session relies on, but there is a newer root, the newer root
        is used instead.

        Args:
            change: The change to the table.
            update_root: Returns ``m`` with fields other than its table changed.
            m: The newest root.

        Returns:
            The root; None if the change returned None.

        Raises:
            FencedError: A pack that the session wrote or relies on is gone.
        """
        latest = self.store.index.view(m)
        relied_on = self._packs_relied_on(m, latest)
        if relied_on is None:
            return self.store.read_at_newest(partial(self._root_after, change, update_root))
        table = self.store.table(m)
        changes = change(table, m.seq + 1)
        if changes is None:
            return None
        top = self._write_table(table, changes)
        like = _serving_all(update_root(m), changes)
        if self.store.backend.costs.writes_hints:
            find = partial(self.store.index.find, latest)
            self.new_packs.finish(find, self._upper_lists(top))
        else:
            self.new_packs.finish()
        if m.fence > self.new_packs.base_seq:
            self._move(m.seq)
        return next_root(
            self.store.backend.uri,
            like,
            self.commit_id,
            table=None if top is None else self.ref(top, m.table),
            segments=self._write_segment(latest),
            # A pack that the session relies on, and that was condemned meanwhile, is rescued.
            condemned={p: seq for p, seq in m.condemned.items() if p not in relied_on},
        )

    def _packs_relied_on(self, m: Root, latest: IndexView) -> set[PackId] | None:
        """Return the packs that all ranks rely on; None if there is a root newer than ``m``.

        Raises:
            FencedError: One of these packs is gone.
        """
        try:
            self._reliance.confirm(latest)
        except FencedError:
            if self.store.newest() == m:
                raise
            return None
        self._others.move_past_fence(m, latest.packs)
        # Condemned packs are still listed; this commit rescues them.
        packs = self._reliance.packs | self._others.relied_on
        if latest.packs.issuperset(packs):
            return packs
        if self.store.newest() == m:
            raise FencedError
        return None

    def _write_table(self, table: Table, changes: Mapping[str, Row | None]) -> Digest | None:
        """Write a changed table; return the digest of its top node, or None if it is empty."""
        slim = {name: row and self._slim(row) for name, row in changes.items()}
        return table.edit(slim, self.put_table_node)

    def _upper_lists(self, top: Digest | None) -> list[bytes]:
        """Return the upper lists of the table that earlier commits wrote, from the top down.

        These lists are in the packs of many commits. The hints of this commit contain copies of
        them, so that a reader needs one request for all. A list that this host has not cached is
        left out.

        Args:
            top: The digest of the table's top node.
        """
        new_nodes, cache = self.new_packs.nodes, self.store.index.cache
        todo = deque([] if top is None else [top])
        upper: list[bytes] = []
        nbytes = 0
        while todo and nbytes < _UPPER_BYTES:
            digest = todo.popleft()
            node = new_nodes[digest][0] if digest in new_nodes else cache.node(digest)
            if node is None or not names_nodes(node):
                continue
            if digest not in new_nodes:
                upper.append(node)
                nbytes += len(node)
            todo.extend(named_in(node))
        return upper

    def _slim(self, row: Row) -> Row:
        """Return a row without its metadata, if they are large; they are stored as a node instead.

        A leaf of the table has several rows. Large metadata in one row would be written again with
        each change to another row of the leaf.
        """
        content = encode(row.metadata)
        if len(content) <= INLINE_METADATA_BYTES:
            return row
        node = self.put_table_node(content)
        return msgspec.structs.replace(row, metadata={}, metadata_node=node)

    def _write_segment(self, latest: IndexView) -> tuple[SegmentRef, ...]:
        """Write the segment of all new packs; return the references to the next root's segments."""
        own_segment, others = self.new_packs.segment(), self._others
        packs = (*own_segment.packs, *others.packs)
        if not packs:
            return (*latest.root.segments, *others.segments)
        segment = Segment(packs, [*own_segment.records, *others.records])
        self._delete_segments()
        segments = add_segment(self.store, latest, segment, self.new_packs.base_seq)
        self._segments = [s for s in segments if s not in latest.root.segments]
        self._cache_nodes()
        return (*segments, *others.segments)

    def hand_over(self, world: int, seq: int = 0) -> Handover:
        """Finish the packs of this rank, and return what the rank that commits must know.

        From then on a root may name the packs, until :meth:`withdraw`.

        Args:
            world: How many ranks hand over.
            seq: 0, or the number of a root: then packs that were written under an older root first
                get new ids under this root.

        Returns:
            The handover. If a pack that this rank wrote or relies on is gone, or the disk is full,
            the handover says so. No root then names the packs of any rank, and all ranks delete
            theirs.
        """
        self._adopt()
        try:
            return self._finish(world, seq)
        except FencedError as e:
            return Handover(fenced=str(e))
        except StorageFullError as e:
            return Handover(full=str(e))

    def _finish(self, world: int, seq: int) -> Handover:
        store, packs = self.store, self.new_packs
        # The rank that commits compares the packs of all ranks with the newest root. So at a remote
        # place, this rank looks at that root only if it is asked to move its packs.
        compares_with_base = store.backend.costs.one_asks and not seq
        latest = self.base if compares_with_base else store.view()
        self._reliance.confirm(latest)
        if not self.may_be_referenced:
            find = partial(store.index.find, latest)
            packs.finish(find if store.backend.costs.writes_hints else None)
            self._cache_nodes()
        if seq > packs.base_seq:
            self._move(seq)
        handover = Handover(
            b"".join(sorted(self._reliance.packs)), packs.base_seq, packs.stored_bytes
        )
        segment = packs.segment()
        self._delete_segments()
        if len(segment.records) * world > MOST_RECORDS:
            self._unlisted = segment
            handover.weight = weight_of(segment)
        elif segment.packs:
            handover.records = encode_segment(segment)
        handover.sample = b"".join(segment.packs[:1])
        handover.place = digest_of(os.fsencode(store.backend.identity))[:8]
        # Sync here: the rank that commits can sync only its own files.
        store.backend.sync()
        handover.requests = dict(self.requests)
        # No root can name packs before a segment lists them.
        self.may_be_referenced = not handover.weight
        return handover

    @property
    def unlisted(self) -> bytes:
        """The sealed records of this rank that are in no segment yet; b"" if there are none."""
        return encode_segment(self._unlisted) if self._unlisted.packs else b""

    def list_unlisted(self, sealed: Sequence[bytes]) -> Handover:
        """Write a segment of the records of several ranks that no segment lists yet.

        Args:
            sealed: The :attr:`unlisted` records of this rank and of the ranks for which it writes;
                empty if another rank writes the segment.

        Returns:
            A handover of the segment.
        """
        own, self._unlisted = self._unlisted, Segment((), [])
        base = self.new_packs.base_seq
        try:
            if len(sealed) > 1:
                self._segments = [write_sealed(self.store, sealed, base)]
            elif sealed:
                self._segments = list(write_segments(self.store, own, base))
        except StorageFullError as e:
            return Handover(full=str(e))
        self.may_be_referenced = True
        return Handover(segments=tuple(self._segments), requests=dict(self.requests))

    def withdraw(self) -> None:
        """Note that no root will name the packs that this rank has handed over.

        The session deletes them.
        """
        self.may_be_referenced = False

    def _cache_nodes(self) -> None:
        """Cache the new nodes on this host, and note the lengths of the new packs."""
        nodes = [(digest, node) for digest, (node, _) in self.new_packs.nodes.items()]
        self.store.index.cache.keep_nodes(nodes)
        self.store.index.pack_lengths.note(self.new_packs.lengths)

    def _move(self, seq: int) -> None:
        """Give the new packs ids under a newer root, since a fence has passed them.

        Args:
            seq: The number of the newer root.

        Raises:
            FencedError: A collector has deleted a pack.
        """
        try:
            self.new_packs.move(seq)
        except FileNotFoundError:
            raise FencedError from None

    def _delete_segments(self) -> None:
        """Delete the segments that a failed try to commit has written."""
        segments, self._segments = self._segments, []
        for segment in segments:
            self.store.backend.delete(segment_key(segment.id))

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is not None:
            self._crew.fail(error)
        self._end.__exit__(kind, error, tb)
        # The function that gathers handovers may hold this session. A cycle would keep the store
        # open.
        self._others = OtherRanks()

    def _close(self) -> None:
        self.new_packs.close()
        if not self.may_be_referenced:
            self._delete_segments()
            self.new_packs.delete()
        elif self._keeps_warm:
            lengths = self.new_packs.lengths
            self.store.backend.warm({pack_key(pack): n for pack, n in lengths.items()})


def _serving_all(root: Root, changes: Mapping[str, Row | None]) -> Root:
    """Return the root, changed so that its store serves all paths if a commit needs that.

    A store that a path alone has made serves only names without a folder. Once a commit sets a name
    with a folder, the setting ``FOLDER_ONLY`` is dropped.
    """
    names = (name for name, row in changes.items() if row is not None)
    if serves_below(root) or not any(map(is_deep, names)):
        return root
    return msgspec.structs.replace(root, settings=serving_below(root.settings))


class ChunkWriter:
    """Stores chunks from one thread.

    It hashes chunks in the caller's memory, and copies the new ones.

    As long as all chunks are new, as in a first take, it copies each chunk first, and hashes only
    the copy. This saves hashing new chunks twice.

    Args:
        session: The session.
        select_share: Called with chunks that the store lacks; returns which of them this rank must
            write. With None, the rank writes all.
        all_new: Whether to expect at first that all chunks are new. With None, this is never
            expected.
    """

    def __init__(
        self, session: Session, select_share: SelectNew | None, *, all_new: bool | None
    ) -> None:
        self._session = session
        self._filler = session.new_packs.filler()
        self._select_share = select_share
        self._all_new = all_new

    def store(self, raws: Sequence[Raw]) -> list[Digest]:
        """Store the chunks that no live pack holds; return the digests of all chunks."""
        if self._all_new:
            return self._filler.add(raws, self._select_new)
        digests = [digest_of(raw) for raw in raws]
        is_new = self._select_new(digests, [len(raw) for raw in raws])
        self._filler.add_known([(d, r) for d, r, n in zip(digests, raws, is_new, strict=True) if n])
        return digests

    def _select_new(self, digests: list[Digest], sizes: list[int]) -> list[bool]:
        is_new = self._session.claim_new(digests)
        if self._select_share is not None and any(is_new):
            lacking = [i for i, is_new in enumerate(is_new) if is_new]
            share = self._select_share([digests[i] for i in lacking], [sizes[i] for i in lacking])
            for i, is_mine in zip(lacking, share, strict=True):
                is_new[i] = is_mine
        if self._all_new is not None:
            self._all_new = all(is_new)
        return is_new

    def finish(self) -> None:
        """Have the last pack written."""
        self._filler.seal()
