"""How often each node and chunk is referred to, so that a collection need not count all again.

A process that collects again and again keeps these counts in memory. For a newer root it reads the
nodes of the table and of the trees that are new, and counts their references. Then it subtracts the
references of the nodes that are gone. So a collection costs as much as has changed, not as much as
is kept. A node never changes, since its name is its digest. So the counts for a table are the same,
however the table came about.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby, pairwise

from casnap.format.entries import MAX_LIST_DEPTH
from casnap.format.records import PackId, Root, SegmentId
from casnap.runtime.progress import Progress
from casnap.storage.lookup.chains import NewBases
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.references import (
    DATA,
    MANIFEST,
    TABLE,
    TREE,
    digest_in,
    is_node,
    references,
    tops_of,
)

_KINDS = (TABLE, MANIFEST, TREE, DATA, *(bytes([n + 1]) for n in range(MAX_LIST_DEPTH)))
_TOGETHER = 64
# How many digests are sorted at a time, which takes about 160 MB.
_PART = 4 << 20


class ReferenceCounts:
    """How many references there are to each node and chunk, as of one root.

    Attributes:
        is_known: Whether a collection has counted. If not, the counts are empty.
        dead: Digests whose count has become 0 since the last collection. A count may have risen
            again. A collection that has dealt with a digest removes it from this set.
        segments: The segments that the last collection has dealt with → their packs.
        live_bytes: The stored bytes of all needed chunks and nodes, when all were last counted.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all counts."""
        self.is_known = False
        self.live_bytes = 0
        self.dead: set[bytes] = set()
        self.segments: Mapping[SegmentId, frozenset[PackId]] = {}
        self._tops: frozenset[bytes] = frozenset()
        self._nodes: Counter[bytes] = Counter()
        self._tally = _Tally()
        self._bases = NewBases()

    def note(self, node: bytes, children: Iterable[bytes]) -> None:
        """Count the references of a node. It is called once for each node of a root.

        Args:
            node: The reference to the node.
            children: The references in the node, to nodes and chunks.
        """
        self._tally.note([digest_in(node), *(c for c in children if not is_node(c))])
        self._nodes.update(c for c in children if is_node(c))

    def complete(self, store: Repository, root: Root, live_bytes: int) -> None:
        """Finish the first count, after :meth:`note` was called for each node of a root.

        Args:
            store: The store.
            root: The root.
            live_bytes: The stored bytes that the root needs.
        """
        self._tally.sort()
        self.live_bytes = live_bytes
        self._tops = frozenset(tops_of(root))
        self._nodes.update(self._tops)
        self._count_bases(store, root)
        self.is_known = True

    def advance(self, store: Repository, root: Root, progress: Progress) -> set[bytes]:
        """Bring the counts up to a newer root.

        Args:
            store: The store.
            root: The root.
            progress: Called from time to time; an error that it raises ends the call.

        Returns:
            The digests to which references were added.

        Raises:
            DamagedError: A node cannot be read. The counts are cleared then.
        """
        tops = frozenset(tops_of(root))
        try:
            new = self._count_bases(store, root)
            new |= self._count_what_came(store, tops - self._tops, progress)
            self._discount_what_went(store, self._tops - tops, progress)
            self._tops = tops
        except BaseException:
            # Only a part is counted.
            self.clear()
            raise
        return new

    def needed_of(self, digests: Collection[bytes]) -> set[bytes]:
        """Return which of some digests have a count above 0.

        Two digests that begin with the same eight bytes share a count.
        """
        counts = self._tally.change(digests)
        return {digest for digest, count in zip(digests, counts, strict=True) if count}

    def names_node(self, digest: bytes) -> bool:
        """Whether a digest names a tree node, and not a chunk of data."""
        return any(kind + digest in self._nodes for kind in _KINDS)

    def _count_what_came(
        self, store: Repository, tops: Iterable[bytes], progress: Progress
    ) -> set[bytes]:
        new: set[bytes] = set()
        pending = list(tops)
        while pending:
            progress("marking", 0, len(pending))
            group = []
            for node in pending[-_TOGETHER:]:
                self._nodes[node] += 1
                if self._nodes[node] == 1:
                    group.append(node)
            del pending[-_TOGETHER:]
            store.cache_nodes([digest_in(node) for node in group if node[:1] != DATA])
            for node in group:
                children = references(store.node, node)
                pending += [child for child in children if is_node(child)]
                came = [digest_in(node), *(c for c in children if not is_node(c))]
                self._tally.change(came, 1)
                # Whatever their counts were before: they may be counts of digests that begin alike.
                new.update(came)
        return new

    def _discount_what_went(
        self, store: Repository, tops: Iterable[bytes], progress: Progress
    ) -> None:
        pending = list(tops)
        while pending:
            progress("marking", 0, len(pending))
            node = pending.pop()
            self._nodes[node] -= 1
            if self._nodes[node]:
                continue
            del self._nodes[node]
            children = references(store.node, node)
            pending += [child for child in children if is_node(child)]
            went = [digest_in(node), *(c for c in children if not is_node(c))]
            counts = self._tally.change(went, -1)
            self.dead.update(d for d, count in zip(went, counts, strict=True) if not count)

    def _count_bases(self, store: Repository, root: Root) -> set[bytes]:
        """Count the bases of the deltas in new segments; return these bases.

        The counts of bases are never lowered.
        """
        new = self._bases.of(root, store.index)
        self._tally.change(new, 1)
        return new


class _Tally:
    """Counts for many digests, found by the first eight bytes of each digest.

    A digest and its count take 12 bytes. Two digests that begin with the same eight bytes share a
    count. So the collector may keep a chunk that nobody needs, but never takes a needed chunk for
    garbage.
    """

    def __init__(self) -> None:
        self._unsorted = array("Q")
        self._beginnings = array("Q")
        self._counts = array("I")
        # The counts of digests that came after sort().
        self._more: dict[int, int] = {}

    def note(self, digests: Iterable[bytes]) -> None:
        """Add one to the count of each digest. This is allowed only before :meth:`sort`."""
        self._unsorted.extend([int.from_bytes(digest[:8], "big") for digest in digests])

    def sort(self) -> None:
        """Sort the noted digests, so that :meth:`change` can find them.

        It works in parts, to bound memory.
        """
        parts = 1 + len(self._unsorted) // _PART
        bounds = [(part << 64) // parts for part in range(parts + 1)]
        for low, end in pairwise(bounds):
            part = (b for b in self._unsorted if low <= b < end)
            for beginning, run in groupby(sorted(part)):
                self._beginnings.append(beginning)
                self._counts.append(sum(1 for _ in run))
        self._unsorted = array("Q")

    def change(self, digests: Collection[bytes], by: int = 0) -> list[int]:
        """Add a number to the counts of some digests; return the new counts.

        It takes many digests at once, because this method takes most of the time of a collection.

        Args:
            digests: The digests.
            by: The number to add, which may be negative.
        """
        beginnings, counts, more = self._beginnings, self._counts, self._more
        changed: list[int] = []
        for digest in digests:
            beginning = int.from_bytes(digest[:8], "big")
            i = bisect_left(beginnings, beginning)
            if i < len(beginnings) and beginnings[i] == beginning:
                counts[i] += by
                changed.append(counts[i])
                continue
            count = more.get(beginning, 0) + by
            changed.append(count)
            if count:
                more[beginning] = count
            else:
                more.pop(beginning, None)
        return changed
