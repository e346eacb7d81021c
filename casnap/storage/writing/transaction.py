"""Preparing a change of a store: storing new chunks and nodes, relying on those that are there.

The process then publishes the change itself (``commit.py``), or hands its part over to the rank
that publishes one root for all (``rank_parts.py``).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from casnap.errors import FencedError
from casnap.format.codec import Codec
from casnap.format.digest import Digest, digest_of
from casnap.format.records import NodeRef, Root, SegmentRef, segment_key
from casnap.runtime.threads import Crew
from casnap.storage.lookup.index import View
from casnap.storage.packs.pack import Raw, SelectNew
from casnap.storage.reading.repository import Repository
from casnap.storage.writing.new_packs import NewPacks
from casnap.storage.writing.reused_packs import COLLECTED, ReusedPacks


class Transaction:
    """The part of one process in a change: the packs it writes, and the packs it relies on.

    Args:
        store: The store.
        crew: The crew of the background threads.
        codec: How new chunks are stored.
        before: How many requests the backend had made when the change began.
        base_root: The root that rank 0 has just read for all ranks; by default a recent one.
        puts_root: Whether this process is to put the root, so that it has to know whether the place
            keeps writers apart.

    Attributes:
        store: The store.
        base: The index as the root sees it that this change is based on.
        commit_id: The commit id of the root to be put.
        reused: The packs of earlier commits that it relies on.
        new_packs: The packs that it writes.
        renew_announcement: To be called now and then while the change goes on.
        may_be_referenced: Whether a root may stand, now or later, that names the new packs. If not,
            :meth:`close` deletes them.
        segments: The segments that were written of the new packs.

    Raises:
        UnsupportedFormatError: The store uses a feature that its writers have to know.
    """

    def __init__(
        self,
        store: Repository,
        crew: Crew,
        codec: Codec = Codec.RAW,
        before: Mapping[str, int] | None = None,
        base_root: Root | None = None,
        *,
        puts_root: bool = True,
    ) -> None:
        self._before = Counter(store.backend.requests if before is None else before)
        based_on = base_root or store.recent()
        store.check_writable("write to", based_on, dry_run=not puts_root)
        # Before the base is read, so that no collector frees in between what the base names. In an
        # object store, rank 0 announces the change of all ranks.
        with ExitStack() as announcement:
            self.renew_announcement: Callable[[], None] = lambda: None
            if puts_root or not store.backend.costly_requests:
                self.renew_announcement = announcement.enter_context(
                    store.backend.announced(based_on.seq, at_once=store.announces_at_once)
                )
            self.base: View = store.recent_view(base_root)
            self._announcement = announcement.pop_all()
        self.store = store
        self.commit_id = os.urandom(16)
        self.reused = ReusedPacks(store, self.base)
        self.new_packs = NewPacks(store, self.base.root.seq, crew, codec)
        self.may_be_referenced = False
        self._codec = codec
        self.segments: list[SegmentRef] = []

    @property
    def requests(self) -> Counter[str]:
        """How many requests the change has made so far, by kind."""
        return Counter(self.store.backend.requests) - self._before

    def chunk_writer(self, divide_new: SelectNew | None = None) -> ChunkWriter:
        """Return what one thread stores chunks with.

        Args:
            divide_new: Returns which of the chunks that the store lacks this rank is to write; None
                for all.
        """
        # To compress a known chunk takes longer than to hash it twice, so then it is never guessed.
        guess = not self.base.live if self._codec == Codec.RAW else None
        return ChunkWriter(self, divide_new, all_new=guess)

    def reserve_new(self, digests: list[Digest]) -> list[bool]:
        """Rely on digests in live packs; return which of the others the caller is to write."""
        self.renew_announcement()
        is_new = [place is None for place in self.reused.reuse(digests)]
        return self.new_packs.claim(digests, is_new)

    def put_node(self, node: bytes) -> Digest:
        """Store a tree node, or a list of digests, if it is new."""
        digest = digest_of(node)
        if self.reserve_new([digest])[0]:
            self.new_packs.add_node(digest, node)
        return digest

    def put_table_node(self, node: bytes) -> Digest:
        """Store a node of the table, even a known one: the table follows the newest root."""
        digest = digest_of(node)
        if self.new_packs.claim([digest], [True])[0]:
            self.new_packs.add_node(digest, node)
        return digest

    def ref(self, digest: Digest, earlier: NodeRef | None = None) -> NodeRef:
        """Return a node with a hint to its place."""
        if earlier is not None and earlier.digest == digest:
            return earlier
        if digest in self.new_packs.nodes:
            return NodeRef(digest, self.new_packs.nodes[digest][1])
        return NodeRef(digest, self.store.index.find(self.base, [digest])[0])

    def cache_nodes(self) -> None:
        """Keep the new nodes in the cache of this host, and the lengths of the new packs."""
        nodes = [(digest, node) for digest, (node, _) in self.new_packs.nodes.items()]
        self.store.index.cache.keep_nodes(nodes)
        self.store.index.pack_lengths.note(self.new_packs.lengths)

    def move(self, seq: int) -> None:
        """Give the new packs ids that were made under another root, past a fence.

        Raises:
            FencedError: A collector has deleted one.
        """
        try:
            self.new_packs.move(seq)
        except FileNotFoundError:
            raise FencedError(COLLECTED) from None

    def delete_segments(self) -> None:
        """Delete the segments of a failed try to commit."""
        segments, self.segments = self.segments, []
        for segment in segments:
            self.store.backend.delete(segment_key(segment.id))

    def close(self) -> None:
        """Give memory back, and delete the new packs unless a root may name them."""
        with self._announcement:
            self.new_packs.close()
            if not self.may_be_referenced:
                self.delete_segments()
                self.new_packs.delete()


class ChunkWriter:
    """Stores chunks from one thread. It hashes them where they lie, and copies only new ones.

    While all chunks are new, as in a first take, it copies them first and hashes them only once, in
    the pack.

    Args:
        transaction: Where it stores them.
        divide_new: Returns which of the chunks that the store lacks this rank is to write; None for
            all.
        all_new: Whether to begin with the guess that all chunks are new; None to never guess so.
    """

    def __init__(
        self, transaction: Transaction, divide_new: SelectNew | None, *, all_new: bool | None
    ) -> None:
        self._transaction = transaction
        self._filler = transaction.new_packs.filler()
        self._divide_new = divide_new
        self._all_new = all_new

    def store(self, raws: Sequence[Raw]) -> list[Digest]:
        """Store those chunks that are in no live pack; return the digests of all."""
        if self._all_new:
            return self._filler.add(raws, self._select_new)
        digests = [digest_of(raw) for raw in raws]
        is_new = self._select_new(digests, [len(raw) for raw in raws])
        self._filler.add_known([(d, r) for d, r, n in zip(digests, raws, is_new, strict=True) if n])
        return digests

    def _select_new(self, digests: list[Digest], sizes: list[int]) -> list[bool]:
        is_new = self._transaction.reserve_new(digests)
        if self._divide_new is not None and any(is_new):
            lacking = [i for i, is_new in enumerate(is_new) if is_new]
            share = self._divide_new([digests[i] for i in lacking], [sizes[i] for i in lacking])
            for i, is_mine in zip(lacking, share, strict=True):
                is_new[i] = is_mine
        if self._all_new is not None:
            self._all_new = all(is_new)
        return is_new

    def finish(self) -> None:
        """Have the last pack written."""
        self._filler.seal()
