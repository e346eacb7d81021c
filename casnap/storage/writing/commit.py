"""Publishing a change: packs, then the segment, then the root that names them.

The protocol, and the argument for it, are in ``docs/commit-protocol.md``. In short: a writer bases
itself on root ``n`` and relies only on packs that are live in ``n``. It publishes root ``m + 1`` if
all that it relied on is still there in ``m``, and no fence has passed the packs that it wrote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from casnap.errors import FencedError, StorageFullError
from casnap.format.digest import Digest
from casnap.format.hints import named_in, names_nodes
from casnap.format.names import is_deep
from casnap.format.records import (
    INLINE_METADATA_BYTES,
    PackId,
    Root,
    Row,
    Segment,
    SegmentRef,
    encode,
    serves_below,
    serving_below,
)
from casnap.format.tree import Tree
from casnap.storage.log.roots import next_root, put_root
from casnap.storage.lookup.index import View
from casnap.storage.writing.rank_parts import OtherRanks
from casnap.storage.writing.reused_packs import COLLECTED
from casnap.storage.writing.segments import add_segment
from casnap.storage.writing.transaction import Transaction

# About so many bytes of lists of the table stand in the hints of a commit.
_UPPER_BYTES = 16 << 10

Change = Callable[[Tree[Row], int], Mapping[str, Row | None]]
"""Given the table and the number of the next root, returns the rows to set, and None for each to
remove. It raises to give up."""


def publish(
    transaction: Transaction,
    change: Change,
    others: OtherRanks | None = None,
    update_root: Callable[[Root], Root] = lambda root: root,
) -> Root:
    """Finish the packs, then write the segment and put the root; repeat if its number is taken.

    Args:
        transaction: The transaction of this process.
        change: The change of the table.
        others: The other ranks, if this process commits for them too.
        update_root: Given the root before, returns it with the fields that the next one is to have.

    Raises:
        FencedError: Something that the transaction relied on was collected, or is gone.
    """
    others = others or OtherRanks()
    transaction.new_packs.finish_chunks()
    publication = _Publication(transaction, change, others, update_root)
    store = transaction.store
    # If another commit was put meanwhile, the number is taken.
    newest = store.recent
    while True:
        root = store.read_at_newest(publication.prepare_next_root, newest)
        newest = store.newest
        if root is None:
            continue
        others.check()
        transaction.may_be_referenced = True
        try:
            if put_root(transaction.store.backend, root):
                store.note_newest(root)
                return root
        except StorageFullError:
            # Nothing can have been put.
            transaction.may_be_referenced = False
            raise
        # The number is another commit's for ever.
        transaction.may_be_referenced = False
        transaction.delete_segments()


@dataclass
class _Publication:
    """The tries to put the next root; the fields are the arguments of :func:`publish`."""

    transaction: Transaction
    change: Change
    others: OtherRanks
    update_root: Callable[[Root], Root]
    names: list[str] = field(default_factory=list)

    def prepare_next_root(self, m: Root) -> Root | None:
        """Write everything that the root after ``m`` names, and return that root.

        Returns:
            None if ``m`` lacks a pack relied on, but a newer root was put meanwhile: look again.

        Raises:
            FencedError: A pack relied on is gone, and ``m`` is still the newest root.
        """
        latest = self.transaction.store.index.view(m)
        reused = self._all_reused(m, latest)
        if reused is None:
            return None
        new_table = self._write_table(m)
        like = self._serving_all(self.update_root(m))
        if self.transaction.store.backend.costly_requests:
            find = partial(self.transaction.store.index.find, latest)
            self.transaction.new_packs.finish(find, self._upper_lists(new_table))
        else:
            self.transaction.new_packs.finish()
        if m.fence > self.transaction.new_packs.base:
            self.transaction.move(m.seq)
        table = None if new_table is None else self.transaction.ref(new_table, m.table)
        return next_root(
            self.transaction.store.backend.uri,
            like,
            self.transaction.commit_id,
            table=table,
            segments=self._write_segment(latest),
            # A pack that was condemned meanwhile, and is relied on, is rescued, as a whole.
            condemned={p: seq for p, seq in m.condemned.items() if p not in reused},
        )

    def _all_reused(self, m: Root, latest: View) -> set[PackId] | None:
        """Return the packs that all ranks rely on; None if a root newer than ``m`` was put.

        Raises:
            FencedError: One of these packs is gone.
        """
        reused = self.transaction.reused
        try:
            reused.confirm(latest)
        except FencedError:
            if self.transaction.store.newest() == m:
                raise
            return None
        self.others.move_past_fence(m, latest.packs)
        # Condemned packs are still listed; this commit rescues them.
        packs = reused.packs | self.others.reused
        if latest.packs.issuperset(packs):
            return packs
        if self.transaction.store.newest() == m:
            raise FencedError(COLLECTED)
        return None

    def _write_table(self, m: Root) -> Digest | None:
        """Write the table of the root after ``m``; return its digest."""
        table = self.transaction.store.table(m)
        changes = self.change(table, m.seq + 1)
        self.names = [name for name, row in changes.items() if row is not None]
        slim = {name: row and self._slim(row) for name, row in changes.items()}
        return table.edit(slim, self.transaction.put_table_node)

    def _serving_all(self, root: Root) -> Root:
        """Return a root that serves the names that this commit sets: by them it is meant to."""
        if serves_below(root) or not any(map(is_deep, self.names)):
            return root
        return msgspec.structs.replace(root, settings=serving_below(root.settings))

    def _upper_lists(self, top: Digest | None) -> list[bytes]:
        """Return the upper lists of the table that this commit does not write, from the top down.

        Many commits wrote them. A reader with the hints of the last one needs one request
        for all. Only what this host has cached is among them.
        """
        new_nodes, cache = self.transaction.new_packs.nodes, self.transaction.store.index.cache
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
        """Put large metadata into a node of their own, which is not written again with the leaf."""
        content = encode(row.metadata)
        if len(content) <= INLINE_METADATA_BYTES:
            return row
        node = self.transaction.put_table_node(content)
        return msgspec.structs.replace(row, metadata={}, metadata_node=node)

    def _write_segment(self, latest: View) -> tuple[SegmentRef, ...]:
        """Write the segment of all new packs; return the segments of the next root."""
        own_segment, others = self.transaction.new_packs.segment(), self.others
        packs = (*own_segment.packs, *others.packs)
        if not packs:
            return (*latest.root.segments, *others.segments)
        segment = Segment(packs, [*own_segment.records, *others.records])
        self.transaction.delete_segments()
        segments = add_segment(
            self.transaction.store, latest, segment, self.transaction.new_packs.base
        )
        self.transaction.segments = [s for s in segments if s not in latest.root.segments]
        self.transaction.cache_nodes()
        return (*segments, *others.segments)
