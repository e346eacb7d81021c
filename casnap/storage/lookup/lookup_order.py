"""In which order the places of chunks and nodes are tried: one ladder, the cheapest rung first.

A read of chunks goes down the ladder until all are read. On a disk, the rungs are:

1. **The hint** that a root or a row has for a node; chunks have none.
2. **The index** of this host, according to a recent root.
3. **Other places** that this index has, for chunks that were not whole at the first one.
4. **Newer roots**, as long as there are any, since a collector may have moved chunks. The chunks
   that are left are looked for in the index of a newer root, then at their other places in this
   index.
5. **A new index**, read from the store, since this host's cache of the index may be wrong. If this
   host may not see a new pack yet, it first waits for the pack.

In a bucket, two more rungs come after the first one. They avoid reading an index that this host has
not cached, as long as at most 64 chunks are left:

- **Hints** to chunks, in the packs of nodes that were read lately (``node_hints.py``).
- **Ranges** of large segments (``segment_search.py``).

So in a bucket a chunk is looked for by hints, in ranges, in the index, at other places, at newer
roots, in a new index. Hints and ranges may be wrong: a failure at such a place is no damage, and
the chunk is looked for further down. At each place, the read cache is asked before the pack
(``reading/chunk_cache.py``). The base of a delta is looked for in ranges, then in the index. The
newest root is remembered (``newest_root.py``). In a bucket, a node is first looked for by reading
its whole pack.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, Protocol, TypeAlias

from casnap.backends.base import Backend
from casnap.format.codec import Codec
from casnap.format.digest import Digest
from casnap.format.records import Place, StoreConfig
from casnap.runtime.typing import override
from casnap.storage.lookup.index import Index, IndexView, RemoteIndex
from casnap.storage.lookup.newest_root import NewestRoot, RememberedRoot
from casnap.storage.lookup.node_hints import KnownHints, read_node_pack
from casnap.storage.packs.chunk_reads import FailedRead, Located, Reason, Want

_log = logging.getLogger("casnap")
_DELTA = int(Codec.DELTA)


class Step(NamedTuple):
    """Places to try next, as a rung of the ladder yields them.

    Attributes:
        places: The places, each with the ``Want`` objects for its chunk.
        is_alone: Whether there is only one chunk, which is then read without a buffer of the pool.
        counts: Whether the places are from the index, so that a failed read there means damage.
    """

    places: list[Located]
    is_alone: bool = False
    counts: bool = True


class Lost(NamedTuple):
    """A chunk that could not be read at any place.

    Attributes:
        want: A want for the chunk.
        attempts: The failed reads of the chunk at places from the index.
    """

    want: Want
    attempts: list[FailedRead]


class Left:
    """The chunks that a read of many chunks has not read yet.

    Args:
        hints: The hinted places of some of the chunks.

    Attributes:
        hints: The hinted places of some of the chunks.
        wants: For each chunk its ``Want`` objects. A chunk that is wanted several times is read
            once.
        attempts: For each chunk the failed reads at places from the index.
        lost: The chunks that could not be read at any place.
        view: The view of the index that was used last; None before the first one.
    """

    def __init__(self, hints: Mapping[Digest, Place]) -> None:
        self.hints = hints
        self.wants: dict[Digest, list[Want]] = {}
        self.attempts: dict[Digest, list[FailedRead]] = {}
        self.lost: list[Lost] = []
        self.view: IndexView | None = None

    def __bool__(self) -> bool:
        return bool(self.wants)

    def add(self, wants: Iterable[Want]) -> None:
        """Add the chunks that some callers want."""
        for want in wants:
            self.wants.setdefault(want.digest, []).append(want)

    def at(self, digests: Iterable[Digest], places: Iterable[Place | None]) -> list[Located]:
        """Pair chunks with places: return each place with the ``Want`` objects for its chunk.

        Args:
            digests: The digests of the chunks.
            places: A place for each, or None. Chunks without a place are left out.
        """
        each = zip(digests, places, strict=True)
        return [(place, self.wants[digest]) for digest, place in each if place is not None]

    def note(self, step: Step, failures: list[FailedRead]) -> None:
        """Note the outcome of a step: all its chunks were read, except for some failures.

        Args:
            step: The step.
            failures: The failed reads.
        """
        failed = {unread.wants[0].digest: unread for unread in failures}
        for _, wants in step.places:
            digest = wants[0].digest
            if digest not in failed:
                del self.wants[digest]
            elif step.counts:
                self.attempts.setdefault(digest, []).append(failed[digest])

    def give_up(self) -> None:
        """Add the chunks that are still unread to ``lost``, and look for them no longer."""
        for digest, wants in self.wants.items():
            self.lost += [Lost(want, self.attempts.get(digest, [])) for want in wants]
        self.wants, self.attempts = {}, {}


Rung: TypeAlias = Callable[[Left], Iterator[Step]]
"""Yields places to try for the chunks that are left. After each step, fewer may be left."""


class Bases(NamedTuple):
    """Finds the bases of deltas for one read of chunks, in the index of a single root.

    Attributes:
        find: Returns, for each digest, a place or None. It prefers a place where the chunk is not
            stored as a delta.
        find_all: Returns all places of a digest.
    """

    find: Callable[[list[Digest]], list[Place | None]]
    find_all: Callable[[Digest], list[Place]]


class Lookup(Protocol):
    """Finds the chunks and nodes of one store.

    The kind of lookup is chosen when the store is opened.

    Attributes:
        newest: The newest root.
        index: The index.
    """

    newest: NewestRoot
    index: Index

    def rungs(self) -> Sequence[Rung]:
        """Return the rungs of the ladder, in the order in which they are tried."""

    def node(self, digest: Digest, hint: Place | None) -> tuple[bytes | None, Place | None]:
        """Look for a node in this host's cache, or read the whole pack that may hold it.

        Args:
            digest: The digest of the node.
            hint: The place that a root or row gives for the node, or None.

        Returns:
            The bytes of the node, or None if it was not found; and the place to try first on the
            ladder, or None.
        """

    def bases(self) -> Bases:
        """Return a finder of the bases of deltas."""

    def note_damage(self, attempts: Iterable[FailedRead]) -> None:
        """Note failed reads at places from the index."""


def lookup_at(backend: Backend, config: StoreConfig, newest: NewestRoot | None = None) -> Lookup:
    """Return the lookup for the store at a place.

    Args:
        backend: The backend of the place.
        config: The store's ``casnap.json``.
        newest: The newest root of the store, if it was looked for before.
    """
    if backend.costly_requests:
        newest = newest or RememberedRoot(backend, config)
        return RemoteLookup(backend, newest, RemoteIndex(backend, config.store_id))
    return LocalLookup(newest or NewestRoot(backend, config), Index(backend, config.store_id))


class LocalLookup:
    """The lookup on a disk.

    Args:
        newest: The newest root.
        index: The index.
    """

    def __init__(self, newest: NewestRoot, index: Index) -> None:
        self.newest = newest
        self.index = index

    def rungs(self) -> Sequence[Rung]:
        """Return the rungs of the ladder, in the order in which they are tried."""
        return (
            self._hinted,
            self._indexed,
            self._in_other_places,
            self._at_newer_roots,
            self._by_new_index,
        )

    def node(self, digest: Digest, hint: Place | None) -> tuple[bytes | None, Place | None]:
        """Return the node if this host has cached it, and the given hint."""
        return self.index.cache.node(digest), hint

    def bases(self) -> Bases:
        """Return a finder of bases, which looks in the index according to one recent root."""
        # One view serves all: if a collector moves a base meanwhile, the caller reads again.
        view = cache(self._recent_view)
        return Bases(
            lambda digests: self.index.find(view(), digests) if digests else [],
            lambda digest: self.index.find_all(view(), digest),
        )

    def note_damage(self, attempts: Iterable[FailedRead]) -> None:
        """Note failed reads at places from the index."""
        attempts = list(attempts)
        # Only these reasons mean damage to takes. They notice a missing or short file themselves,
        # and a file that cannot be read may be whole.
        self.index.note_damaged(
            (unread.wants[0].digest, unread.place)
            for unread in attempts
            if unread.failure.reason in (Reason.IMPOSSIBLE, Reason.CHANGED)
        )
        self.index.pack_lengths.forget([unread.place.pack for unread in attempts])

    def _recent_view(self) -> IndexView:
        return self.newest.read(self.index.view, self.newest.recent)

    # --- the rungs ---

    def _hinted(self, left: Left) -> Iterator[Step]:
        for digest in [digest for digest in left.wants if digest in left.hints]:
            yield Step([(left.hints[digest], left.wants[digest])], is_alone=True, counts=False)
            if digest in left.wants:
                _log.debug("the hint to node %s is stale", digest.hex())

    def _indexed(self, left: Left) -> Iterator[Step]:
        left.view = left.view or self._recent_view()
        yield from self._index_at(left.view, left, list(left.wants))

    def _in_other_places(self, left: Left) -> Iterator[Step]:
        assert left.view is not None
        yield from self._others_at(left.view, left, list(left.attempts))

    def _at_newer_roots(self, left: Left) -> Iterator[Step]:
        assert left.view is not None
        while left and self.newest.look() != left.view.root:
            view = left.view = self.newest.read(self.index.view)
            # A chunk that the newest root has at the failed places alone is damaged, not moved.
            moved = [digest for digest in left.wants if self._has_moved(view, left, digest)]
            if not moved:
                return
            yield from self._again_at(view, left, moved)

    def _by_new_index(self, left: Left) -> Iterator[Step]:
        # If a chunk was lost before, the index was made anew then.
        if not left.lost:
            self._wait_for_packs(left)
            left.view = self.index.refresh(self.newest.look())
            yield from self._again_at(left.view, left, list(left.wants))

    def _wait_for_packs(self, left: Left) -> None:
        """Wait until this host sees one of the missing packs. It then sees all of them."""
        tried = (attempt for attempts in left.attempts.values() for attempt in attempts)
        missing = {a.place.pack for a in tried if a.failure.reason is Reason.MISSING}
        if missing:
            root = self.newest.look()
            self.index.pack_appears(min(missing), lambda: self.newest.look() == root)

    def _again_at(self, view: IndexView, left: Left, digests: list[Digest]) -> Iterator[Step]:
        for digest in digests:
            left.attempts.pop(digest, None)
        yield from self._index_at(view, left, digests)
        yield from self._others_at(view, left, digests)

    def _index_at(self, view: IndexView, left: Left, digests: list[Digest]) -> Iterator[Step]:
        yield Step(left.at(digests, self.index.find(view, digests)))

    def _others_at(self, view: IndexView, left: Left, digests: list[Digest]) -> Iterator[Step]:
        for digest in digests:
            attempts = left.attempts.get(digest)
            if not attempts:
                # The index has no place for it.
                continue
            first = attempts[0].place
            for place in self.index.find_all(view, digest):
                if digest in left.wants and place != first:
                    yield Step([(place, left.wants[digest])], is_alone=True)

    def _has_moved(self, view: IndexView, left: Left, digest: Digest) -> bool:
        attempts = left.attempts.get(digest, [])
        if any(unread.place.codec == _DELTA for unread in attempts):
            # One of its bases may have moved.
            return True
        places = {unread.place for unread in attempts}
        return not places.issuperset(self.index.find_all(view, digest))


class RemoteLookup(LocalLookup):
    """The lookup in a bucket, or at another remote place.

    Args:
        backend: The backend of the place.
        newest: The newest root.
        index: The index.
    """

    def __init__(self, backend: Backend, newest: NewestRoot, index: RemoteIndex) -> None:
        super().__init__(newest, index)
        self._backend, self._costs = backend, backend.costs
        from casnap.storage.lookup.segment_search import SegmentRanges

        self._hints = KnownHints()
        self._ranges = SegmentRanges(backend, index)

    @override
    def rungs(self) -> Sequence[Rung]:
        return (
            self._hinted,
            self._in_hints,
            self._in_ranges,
            self._indexed,
            self._in_other_places,
            self._at_newer_roots,
            self._by_new_index,
        )

    @override
    def node(self, digest: Digest, hint: Place | None) -> tuple[bytes | None, Place | None]:
        cache = self.index.cache
        cached = cache.node(digest)
        if cached is not None:
            self._hints.use(digest)
            return cached, None
        hint = hint or self._hints.find(cache, digest)
        if hint is None:
            return None, None
        node_pack = read_node_pack(self._backend, hint)
        cache.keep_nodes(node_pack.nodes.items())
        self._hints.keep(cache, hint.pack, node_pack)
        return node_pack.nodes.get(digest), None if node_pack.is_gone else hint

    @override
    def bases(self) -> Bases:
        indexed = super().bases()

        def find(digests: list[Digest]) -> list[Place | None]:
            root = self.newest.recent()
            if not self.index.knows(root):
                places = self._ranges.find(root, digests)
                if all(places):
                    return places
            return indexed.find(digests)

        return Bases(find, indexed.find_all)

    def _in_hints(self, left: Left) -> Iterator[Step]:
        if self._spares_index(left):
            cache, digests = self.index.cache, list(left.wants)
            places = (self._hints.find(cache, digest) for digest in digests)
            yield Step(left.at(digests, places), counts=False)

    def _in_ranges(self, left: Left) -> Iterator[Step]:
        if self._spares_index(left):
            digests = list(left.wants)
            places = self._ranges.find(self.newest.recent(), digests)
            yield Step(left.at(digests, places), counts=False)

    def _spares_index(self, left: Left) -> bool:
        """Whether the index was not read yet, and few enough chunks are left to do without it."""
        is_few = left.view is None and sum(map(len, left.wants.values())) <= self._costs.few
        return is_few and not self.index.knows(self.newest.recent())
