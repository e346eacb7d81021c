"""The index of a store: the places of every chunk and node, according to the segments of a root.

A cache on this host (``index_cache.py``) keeps the records of segments. A cached record stays true,
but a reader of a root uses it only if a segment of this root lists the record's pack.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import lmdb

from casnap.backends.base import Backend
from casnap.backends.local_files import EXHAUSTED
from casnap.errors import DamagedError
from casnap.format.codec import KNOWN_CODECS
from casnap.format.digest import Digest, digest_of
from casnap.format.records import (
    PackId,
    Place,
    Record,
    Root,
    SealedSegment,
    Segment,
    SegmentId,
    SegmentRef,
    decode_segment,
    max_segment_bytes,
    pack_key,
    segment_counts,
    segment_key,
)
from casnap.runtime.fork import new_lock
from casnap.runtime.threads import mapped
from casnap.runtime.typing import override
from casnap.storage.commit_log.roots import newest_root
from casnap.storage.lookup.index_cache import IndexCache, LmdbCache, MemoryCache, open_cache
from casnap.storage.lookup.pack_lengths import PackLengths, RememberedLengths

_log = logging.getLogger("casnap")
T = TypeVar("T")
# A cache is made anew once it has this many bytes, and this many more for each record of the store.
# Usual caches take some 220 bytes a record, tree nodes included.
_CACHE_BYTES, _BYTES_A_RECORD = 1 << 30, 1024
# A cache of more bytes than the first number is also made anew once it has more records than the
# second number times the records of the store.
_SMALL_CACHE_BYTES, _MOST_TIMES = 4 << 20, 4
# The most records of the segments that are read at the same time; a record has 61 bytes.
_TOGETHER_RECORDS = 1 << 20
_LAST_SMALL = b"last small segment"


def packs_in(cache: IndexCache, ref: SegmentRef) -> frozenset[PackId] | None:
    """Return the packs that a segment lists, from a cache; None if the cache lacks the segment."""
    ident = SegmentId(ref.id)
    listed = cache.listed.get(ident)
    if listed is None and (packs := cache.packs_of(ident)) is not None:
        listed = frozenset(packs)
    return listed


# The places that this process found damaged, by the name of the cache. They outlive the cache.
_damaged: defaultdict[str, set[Record]] = defaultdict(set)


class PackSet:
    """The union of several sets of packs, without a few packs.

    A store may have very many packs, and each commit adds few. So all views of an index share these
    sets. Making a view or looking up a pack takes no longer in a store with more packs.
    """

    __slots__ = ("_parts", "_without")

    def __init__(
        self, parts: Iterable[frozenset[PackId]], without: Collection[PackId | bytes] = ()
    ) -> None:
        # The largest set first, since most packs are in it.
        self._parts = sorted(parts, key=len, reverse=True)
        self._without = frozenset(without)

    def __contains__(self, pack: object) -> bool:
        return pack not in self._without and any(pack in part for part in self._parts)

    def __iter__(self) -> Iterator[PackId]:
        return iter(frozenset[PackId]().union(*self._parts) - self._without)

    def __bool__(self) -> bool:
        return any(pack not in self._without for part in self._parts for pack in part)

    @property
    def at_most(self) -> int:
        """An upper bound on the number of packs. A pack counts once for each set that has it."""
        return sum(map(len, self._parts))

    def issuperset(self, packs: Iterable[PackId]) -> bool:
        """Whether all of some packs are in this set."""
        return all(pack in self for pack in packs)

    def lacking(self, packs: Iterable[PackId]) -> set[PackId]:
        """Return the given packs that are not in this set."""
        return {pack for pack in packs if pack not in self}

    def without(self, packs: Collection[PackId | bytes]) -> PackSet:
        """Return this set without some packs."""
        return PackSet(self._parts, self._without.union(packs))


@dataclass(frozen=True)
class IndexView:
    """The index according to one root, which need not be the newest one.

    Attributes:
        root: The root.
        segments: For each segment of the root, the packs that it lists.
        packs: All packs of these segments, which readers may use.
        live: The packs of ``packs`` that are not condemned, which takes may rely on.
        cache: A cache that has all segments of the root.
    """

    root: Root
    segments: dict[SegmentId, frozenset[PackId]]
    packs: PackSet
    live: PackSet
    cache: IndexCache


class Index:
    """The index of a store, which finds the places of chunks and nodes by their digests.

    Args:
        backend: The backend of the store.
        store_id: The id of the store.

    Attributes:
        pack_lengths: The actual lengths of the store's packs.
    """

    def __init__(self, backend: Backend, store_id: str) -> None:
        self._backend = backend
        self._store_id = store_id
        # The name of the cache: the store's id, and its place.
        self._name = ""
        self._cache: IndexCache | None = None
        self.pack_lengths = PackLengths(backend)
        self._replacing = new_lock()
        self._looked_at_size = False

    @property
    def cache(self) -> IndexCache:
        """This host's cache of the store. It is opened at first use."""
        cache = self._cache
        if cache is None or (isinstance(cache, LmdbCache) and not cache.usable()):
            if not self._name:
                self._look_where_it_is()
            cache = self._cache = open_cache(self._name, self._backend.uri)
        return cache

    def _look_where_it_is(self) -> None:
        """Forget the open cache if another store may lie at the URI now.

        That is so if the backend's identity, such as the inode of the folder, has changed.
        """
        place = digest_of(os.fsencode(self._backend.identity)).hex()[:32]
        name = f"{self._store_id}-{place}"
        if name != self._name:
            self._name, self._cache, self._looked_at_size = name, None, False

    def view(self, root: Root) -> IndexView:
        """Return the index according to a root. Segments that are not cached are read, and cached.

        Raises:
            DamagedError: A segment is missing or damaged.
            BackendError: The store is gone, or cannot be read.
        """
        self._look_where_it_is()

        def learn(cache: IndexCache) -> dict[SegmentId, frozenset[PackId]]:
            segments = self._learn_once(cache, root)
            self._shed(cache, root)
            return segments

        cache, segments = self._ask(self.cache, root, learn)
        packs = PackSet(segments.values())
        return IndexView(root, segments, packs, packs.without(root.condemned.keys()), cache)

    def refresh(self, root: Root) -> IndexView:
        """Delete the cache, which may be wrong, and make a new one; return the view of a root."""
        with self._replacing:
            if isinstance(self._cache, LmdbCache):
                self._cache.delete()
            self._cache = None
        return self.view(root)

    def _shed(self, cache: IndexCache, root: Root) -> None:
        """Delete a cache if it is too large because most of its records are of collected packs.

        Single records cannot be deleted from a cache. Views that have the deleted cache open can go
        on using it; the next view makes a new cache.
        """
        if not isinstance(cache, LmdbCache):
            return
        records = sum(ref.count for ref in root.segments)
        # A cache may stay large because its nodes are large, so the size counts only once.
        most = math.inf if self._looked_at_size else _CACHE_BYTES + _BYTES_A_RECORD * records
        self._looked_at_size = True
        size = cache.nbytes()
        is_stale = size > _SMALL_CACHE_BYTES and cache.count() > _MOST_TIMES * records
        if size > most or is_stale:
            _log.info("the cache %s has outgrown its store, and is made anew", cache.folder)
            with self._replacing:
                cache.delete()
                if self._cache is cache:
                    self._cache = None

    def _learn_once(self, cache: IndexCache, root: Root) -> dict[SegmentId, frozenset[PackId]]:
        """Cache all segments of a root; return the packs that each lists.

        On a remote store, the other processes of this host wait meanwhile, and then find the
        segments in the cache.
        """
        return self._learn_all(cache, root)

    def _learn_all(self, cache: IndexCache, root: Root) -> dict[SegmentId, frozenset[PackId]]:
        """Cache all segments of a root; return the packs that each lists."""
        packs = self.learn(cache, root.segments)
        # The next view uses this list, since it differs in few segments.
        cache.listed = packs
        return packs

    def learn(
        self, cache: IndexCache, segments: Collection[SegmentRef]
    ) -> dict[SegmentId, frozenset[PackId]]:
        """Read the segments that a cache lacks, and cache them.

        Returns:
            For each segment, the packs that it lists.
        """
        packs = {SegmentId(ref.id): packs_in(cache, ref) for ref in segments}
        uncached = [ref for ref in segments if packs[SegmentId(ref.id)] is None]
        while uncached:
            for ref, sealed in self._read_some(uncached):
                content = decode_segment(*sealed)
                self.keep_small(SegmentId(ref.id), sealed[0])
                cache.learn(SegmentId(ref.id), content.packs, content.records)
                packs[SegmentId(ref.id)] = frozenset(content.packs)
        return {ident: listed or frozenset() for ident, listed in packs.items()}

    def knows(self, root: Root) -> bool:
        """Whether this host has cached all segments of a root."""
        cache = self.cache
        return all(packs_in(cache, ref) is not None for ref in root.segments)

    def _read_some(self, segments: list[SegmentRef]) -> list[tuple[SegmentRef, tuple[bytes, str]]]:
        """Take the first segments off a list, and read them; on a remote store, several at a time.

        Returns:
            For each segment, its reference, its sealed bytes, and its name for messages.
        """
        refs = [segments.pop(0)]
        while segments and len(refs) < self._backend.in_flight:
            if sum(ref.weight for ref in refs) + segments[0].weight > _TOGETHER_RECORDS:
                break
            refs.append(segments.pop(0))
        return list(mapped(self.sealed, refs, len(refs)))

    def _ask(
        self, cache: IndexCache, root: Root, ask: Callable[[IndexCache], T]
    ) -> tuple[IndexCache, T]:
        """Call a function with a cache; if the cache fails, with a new one.

        Args:
            cache: The cache.
            root: The root whose segments the cache must have.
            ask: The function.

        Returns:
            The cache that worked, and the result of the function.
        """
        try:
            return cache, ask(cache)
        except (lmdb.Error, OSError) as e:
            if not isinstance(cache, LmdbCache) or isinstance(e, TimeoutError):
                raise
            if cache.is_deleted():
                # Another thread or process has deleted it, for example since it was too large.
                return self._ask(self._reopen(cache), root, partial(self._learn_and_ask, root, ask))
            _log.warning("the cache %s failed (%s); the index is kept in memory", cache.folder, e)
            # A lack of file descriptors or memory, or a busy cache, is no damage.
            if isinstance(e, lmdb.Error) or e.errno not in EXHAUSTED | {errno.EWOULDBLOCK}:
                cache.delete()
        cache = self._replace(cache, root)
        return cache, ask(cache)

    def _learn_and_ask(self, root: Root, ask: Callable[[IndexCache], T], cache: IndexCache) -> T:
        self._learn_all(cache, root)
        return ask(cache)

    def _reopen(self, deleted: IndexCache) -> IndexCache:
        """Return the cache that replaces a deleted one. It may have no segments yet."""
        with self._replacing:
            if self._cache is deleted:
                self._cache = None
        return self.cache

    def _replace(self, failed: IndexCache, root: Root) -> IndexCache:
        """Return a cache in memory, in place of a failed one. It has all segments of a root."""
        with self._replacing:
            if self._cache is failed or self._cache is None:
                fresh: IndexCache = MemoryCache()
            else:
                fresh = self._cache
            self._learn_all(fresh, root)
            # Set it only now: other threads rely on finding all segments in it.
            self._cache = fresh
            return fresh

    def segment(self, ref: SegmentRef) -> Segment:
        """Read and decode a segment from the store.

        Raises:
            DamagedError: The segment is missing or damaged.
        """
        return decode_segment(*self.sealed(ref))

    def sealed(self, ref: SegmentRef) -> tuple[bytes, str]:
        """Read a segment from the store, without decoding it.

        Returns:
            The sealed bytes of the segment, and its name for messages.

        Raises:
            DamagedError: The segment is missing, or has other counts of records and deltas than the
                root says.
        """
        key = segment_key(ref.id)
        name = self._backend.where(key)
        data = self._read_named(key, ref)
        if data is None:
            raise _missing_error(name)
        counts = segment_counts(data)
        if counts != (ref.count, ref.deltas):
            raise DamagedError(
                f"the index segment {name} has {counts[0]} records, {counts[1]} of them of deltas, "
                f"not {ref.count} and {ref.deltas}; see `casnap check`"
            )
        return data, name

    def _read_named(self, key: str, ref: SegmentRef) -> bytes | None:
        """Read the bytes of a segment that a root names; return None if it is missing.

        If this host may not see the segment yet, the call waits for it, as long as the newest root
        names it.
        """
        try:
            return self._backend.read(key, max_segment_bytes(ref))
        except FileNotFoundError:
            if not self._appears(key, ref):
                return None
        # A client may show the name of a deleted file, so the file may still be missing.
        with suppress(FileNotFoundError):
            return self._backend.read(key, max_segment_bytes(ref))
        return None

    def _appears(self, key: str, ref: SegmentRef) -> bool:
        # If only an older root names the segment, a collector may have deleted it.
        return self._backend.appears(key, lambda: ref in newest_root(self._backend).segments)

    def pack_appears(self, pack: bytes, still: Callable[[], object]) -> bool:
        """Wait for a pack that must exist, but seems absent; return whether it has appeared.

        See :meth:`casnap.backends.base.Backend.appears`.
        """
        return self._backend.appears(pack_key(pack), still)

    def check_there(self, root: Root) -> None:
        """Check that all segments of a root exist.

        Segments in this host's cache are not looked for.

        Raises:
            DamagedError: A segment is missing.
        """
        refs = root.segments
        _, known = self._ask(self.cache, root, lambda cache: [packs_in(cache, r) for r in refs])
        for ref, packs in zip(refs, known, strict=True):
            key = segment_key(SegmentId(ref.id))
            if packs is not None or self._backend.size_if_there(key) is not None:
                continue
            if not self._appears(key, ref):
                raise _missing_error(self._backend.where(key))

    def bases_in(self, ref: SegmentRef) -> Iterator[bytes]:
        """Yield the digest of the base of each delta in a segment.

        A segment without deltas is not read.

        Raises:
            DamagedError: The segment is missing or damaged.
        """
        return SealedSegment(*self.sealed(ref)).bases() if ref.deltas else iter(())

    def keep_small(self, ident: SegmentId, sealed: bytes) -> None:
        """Cache the sealed bytes of a small segment of a remote store.

        The next commit merges this segment into its own, and so need not read it from the store.
        Only the last such segment is cached. For a store on a disk, this does nothing.
        """

    def sealed_or_kept(self, ref: SegmentRef) -> tuple[bytes, str]:
        """Return the same as :meth:`sealed`, from this host's cache if the cache has it."""
        return self.sealed(ref)

    def find(
        self, view: IndexView, digests: list[Digest], *, only_live: bool = False
    ) -> list[Place | None]:
        """Return, for each digest, a place where it can be read, or None.

        Args:
            view: The index according to a root.
            digests: The digests to find.
            only_live: Whether to return only places that a take may rely on. These exclude three
                sorts: places in condemned packs, which will be deleted; places that are known to be
                damaged; and places with unknown codecs, which a snapshot may need only if its row
                says so.
        """
        packs = view.live if only_live else view.packs
        if not packs:
            return [None] * len(digests)
        places = self._ask(view.cache, view.root, lambda cache: cache.place(digests, packs))[1]
        damaged = _damaged[self._name]
        for i, digest in enumerate(digests) if only_live and damaged else ():
            if (digest, places[i]) in damaged:
                others = [p for p in self.find_all(view, digest) if p.pack in packs]
                places[i] = next((p for p in others if (digest, p) not in damaged), None)
        if only_live:
            return [p if p is None or p.codec in KNOWN_CODECS else None for p in places]
        return places

    def find_all(self, view: IndexView, digest: Digest) -> list[Place]:
        """Return all places of a digest in the packs of a view."""
        places = self._ask(view.cache, view.root, lambda cache: cache.places(digest))[1]
        return [place for place in places if place.pack in view.packs]

    def find_newest(self, view: IndexView, digests: list[Digest]) -> list[Place | None]:
        """Return, for each digest, its place in the newest live pack, or None.

        A collector may be about to condemn older packs.
        """
        all_places = [self.find_all(view, digest) for digest in digests]
        live = [[p for p in places if p.pack in view.live] for places in all_places]
        return [max(places, key=lambda p: p.pack, default=None) for places in live]

    def note_damaged(self, records: Iterable[Record]) -> None:
        """Note damaged places. From now on, takes of this process do not rely on them."""
        _damaged[self._name].update(records)


def _missing_error(name: str) -> DamagedError:
    return DamagedError(f"the index segment {name} is missing; see `casnap check`")


class RemoteIndex(Index):
    """The index of a remote store. Each host reads each segment once."""

    def __init__(self, backend: Backend, store_id: str) -> None:
        super().__init__(backend, store_id)
        self.pack_lengths = RememberedLengths(backend)

    @override
    def _learn_once(self, cache: IndexCache, root: Root) -> dict[SegmentId, frozenset[PackId]]:
        if all(packs_in(cache, ref) is not None for ref in root.segments):
            return self._learn_all(cache, root)
        with cache.learning():
            return self._learn_all(cache, root)

    @override
    def keep_small(self, ident: SegmentId, sealed: bytes) -> None:
        if sum(segment_counts(sealed)) <= self._backend.costs.small_records:
            self.cache.keep_notes({_LAST_SMALL: ident + sealed})

    @override
    def sealed_or_kept(self, ref: SegmentRef) -> tuple[bytes, str]:
        note = self.cache.note(_LAST_SMALL) or b""
        ident, data = note[: len(ref.id)], note[len(ref.id) :]
        if ident == ref.id and segment_counts(data) == (ref.count, ref.deltas):
            return data, f"the cached segment {ref.id.hex()}"
        return self.sealed(ref)
