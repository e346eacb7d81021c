"""Chunks and nodes by digest: finding them, reading them, proving them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import NamedTuple, TypeVar

import msgspec

from casnap.backends import Backend
from casnap.buffers import PAGE, SLOTS, Slot, shared_pool
from casnap.codec import decompress
from casnap.digest import DIGEST_SIZE, Digest, digest_of
from casnap.errors import BackendError, DamagedError, NotAStoreError, UnsupportedFormatError
from casnap.format import (
    CONFIG_KEY,
    FORMAT,
    ID_SIZE,
    KNOWN_FEATURES,
    MAX_CHUNK_SIZE,
    MAX_NODE_BYTES,
    MIN_CHUNK_SIZE,
    NodeRef,
    Place,
    Root,
    StoreConfig,
    id_from_name,
    pack_key,
)
from casnap.index import Index, View
from casnap.manifest import Tree
from casnap.pipeline import Crew, Shared, cores
from casnap.roots import newest_root

V = TypeVar("V")

_log = logging.getLogger("casnap")
_WINDOW = 1 << 15
# So often is something read of a newer root, where a collector went past the one before.
_LOOKS = 10
_GAP = 64 << 10
_READ_BYTES = 16 << 20
_BULK_BYTES = 64 << 20
_SMALL_BYTES = 1 << 20
_NODES_BYTES = 32 << 20
_MAX_OFFSET = 1 << 62
_NOWHERE = "is in no pack of the index"

Sink = Callable[[memoryview], None]
"""Takes the verified bytes of a chunk; called from any thread, must copy what it keeps."""


class Want(NamedTuple):
    """A chunk to be read: its digest, its raw length, where it goes, and whom it is for."""

    digest: Digest
    nbytes: int
    sink: Sink
    path: str


class ReadOptions(NamedTuple):
    """How to read chunks.

    Attributes:
        budget: The most bytes of buffers; at least one chunk is always read. None for no bound
            but that of the pool.
        prepare: Called with each buffer from the pool before it is used.
        readers: The most threads, each with a buffer of the pool: fewer than there are, where the
            sinks take buffers too.
    """

    budget: int | None = None
    prepare: Callable[[Slot], None] | None = None
    readers: int = SLOTS


DEFAULT_READ = ReadOptions()


def _readers() -> int:
    """Return how many threads read: some wait for the disk while all cores verify."""
    return min(cores() + 2, SLOTS)


@dataclass
class _Read:
    """One run of a pack that is read at once, and the chunks in it."""

    pack: bytes
    start: int
    stop: int
    chunks: list[tuple[Place, list[Want]]]


class Objects:
    """Everything under one store's URI, below the level of snapshots.

    Args:
        backend: Where the objects live.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.config = read_config(backend)
        self.index = Index(backend, self.config.store_id)
        self._newest: Root | None = None

    def check_writable(self, doing: str) -> None:
        """Check that this version may write to the store.

        Args:
            doing: What is to be done, for the message.

        Raises:
            UnsupportedFormatError: The store uses a feature that its writers have to know.
        """
        unknown = self.config.unknown_to_writers()
        if unknown:
            raise UnsupportedFormatError(
                f"to {doing} {self.backend.uri} needs features that this casnap lacks: "
                f"{', '.join(sorted(unknown))}; update casnap"
            )

    def newest(self) -> Root:
        """Return the newest root, which says what the store holds."""
        self._newest = newest_root(self.backend, self._newest)
        return self._newest

    def current(self, read: Callable[[Root], V]) -> V:
        """Read something of the newest root; again, where a collector went past that root.

        Args:
            read: Given the root, reads from the store.

        Raises:
            DamagedError: What was to be read is damaged, and nothing was moved meanwhile.
        """
        for look in count(1):
            root = self.newest()
            try:
                return read(root)
            except DamagedError:
                newer = self.newest()
                # Where segments were only added, all that there was is there.
                if look == _LOOKS or set(root.segments) <= set(newer.segments):
                    raise
        raise AssertionError

    def view(self) -> View:
        """Return the index as the newest root sees it."""
        return self.current(self.index.view)

    # --- nodes ---

    def node(self, digest: Digest, hint: Place | None = None) -> bytes:
        """Return a tree node, verified: from the cache, by the hint, or through the index.

        Raises:
            DamagedError: It is nowhere, or nowhere whole.
        """
        if len(digest) != DIGEST_SIZE:
            raise DamagedError(f"{self.backend.uri}: {digest.hex()[:80]!r} is no digest of a node")
        cached = self.index.node(digest)
        if cached is not None:
            return cached
        if hint is not None:
            try:
                return self._keep(digest, self._read_place(digest, hint))
            except (DamagedError, BackendError):
                _log.debug("the hint to node %s is stale", digest.hex())
        found: list[bytes] = []
        self.fetch([Want(digest, -1, lambda raw: found.append(bytes(raw)), "")])
        return self._keep(digest, found[0])

    def cache_nodes(self, digests: list[Digest]) -> None:
        """Read together those nodes that are not cached, so that :meth:`node` finds them there.

        Raises:
            DamagedError: Some are nowhere whole.
        """
        missing = [digest for digest in digests if self.index.node(digest) is None]
        places = self.index.find(self.view(), missing) if missing else []
        while missing:
            found: dict[Digest, bytes] = {}
            nbytes = 0
            while missing and nbytes < _NODES_BYTES:
                found[missing.pop()] = b""
                place = places.pop()
                nbytes += place.raw if place is not None else 0
            self.fetch([Want(d, -1, partial(_keep_copy, found, d), "") for d in found])
            self.index.keep_nodes(list(found.items()))

    def tree(self, ref: NodeRef | None, value_type: type[V]) -> Tree[V]:
        """Return the tree of a reference; an empty one for None."""
        if ref is None:
            return Tree(None, self.node, value_type)
        self.node(Digest(ref.digest), ref.hint)
        return Tree(Digest(ref.digest), self.node, value_type)

    def _keep(self, digest: Digest, node: bytes) -> bytes:
        self.index.keep_nodes([(digest, node)])
        return node

    def _read_place(self, digest: Digest, place: Place) -> bytes:
        if not is_possible(place, MAX_NODE_BYTES):
            raise DamagedError(f"the hint to node {digest.hex()} is no place in a pack")
        stored = memoryview(bytearray(place.stored))
        try:
            n = self.backend.read_into(pack_key(place.pack), place.offset, stored)
        except FileNotFoundError:
            raise DamagedError(f"pack {place.pack.hex()} is missing") from None
        return bytes(_proven(digest, place, stored[:n]))

    # --- chunks ---

    def fetch(self, wants: Iterable[Want], how: ReadOptions = DEFAULT_READ) -> None:
        """Read chunks, prove each against its digest, and hand them to their sinks.

        Equal chunks are read once; neighbours in a pack are read together.

        Args:
            wants: What to read; ``nbytes`` -1 where the length is not known.
            how: Bounds and preparation of the buffers.

        Raises:
            DamagedError: Some chunks are missing or damaged, everywhere; all others were handed
                over.
        """
        view = self.view()
        pending = iter(wants)
        damaged: list[tuple[Want, str]] = []
        while window := list(islice(pending, _WINDOW)):
            failed = self._fetch(view, window, how)
            while failed and self.newest() != view.root:
                # A collector may have moved things; as long as it does, we look again.
                view = self.view()
                failed = self._fetch(view, [w for w, _ in failed], how)
            if failed and not damaged:
                # What we know of places may be wrong: ask the store itself, once.
                view = self.index.refreshed(view, self.newest())
                failed = self._fetch(view, [w for w, _ in failed], how)
            damaged += failed
        if damaged:
            # What lies nowhere will be stored anew in any case.
            self.index.distrusted.update(w.digest for w, why in damaged if why != _NOWHERE)
            raise _damaged(self.backend.uri, damaged)

    def _fetch(self, view: View, wants: list[Want], how: ReadOptions) -> list[tuple[Want, str]]:
        by_digest: dict[Digest, list[Want]] = {}
        for want in wants:
            by_digest.setdefault(want.digest, []).append(want)
        failed: list[tuple[Want, str]] = []
        found: list[tuple[Place, list[Want]]] = []
        places = self.index.find(view, list(by_digest))
        for same, place in zip(by_digest.values(), places, strict=True):
            if place is None:
                failed += [(w, _NOWHERE) for w in same]
            elif not _plausible(place, same[0], self.config.chunk_size):
                failed += [(w, "has an impossible place in the index") for w in same]
            else:
                found.append((place, same))
        for place, same, why in self.read_places(found, how):
            others = [
                p
                for p in self.index.find_all(view, same[0].digest)
                if p != place and _plausible(p, same[0], self.config.chunk_size)
            ]
            if not any(self._read_one(p, same) for p in others):
                failed += [(w, f"{why} (pack {place.pack.hex()})") for w in same]
        return failed

    def read_places(
        self, found: list[tuple[Place, list[Want]]], how: ReadOptions = DEFAULT_READ
    ) -> list[tuple[Place, list[Want], str]]:
        """Read the chunks at these places; return those that could not be proven, and why."""
        total = sum(place.stored for place, _ in found)
        largest = max((place.stored for place, _ in found), default=0)
        share = max(_SMALL_BYTES, total // _readers())
        unit = min(_READ_BYTES, share, _READ_BYTES if how.budget is None else how.budget)
        reads = list(_coalesced(found, max(largest + 2 * PAGE, unit)))
        most = max((read.stop - read.start for read in reads), default=0) + PAGE
        if total <= _SMALL_BYTES:
            buffer = memoryview(bytearray(most))
            return [bad for read in reads for bad in self._read_run(read, buffer)]
        affordable = SLOTS if how.budget is None else max(1, how.budget // most)
        threads = min(len(reads), _readers(), affordable, how.readers)
        failed: list[tuple[Place, list[Want], str]] = []
        with Crew() as crew:
            source = Shared(reads, crew)
            pool = shared_pool(max(most, self.config.chunk_size + (64 << 10)))

            def work() -> None:
                with pool.lease() as slot:
                    if how.prepare is not None:
                        how.prepare(slot)
                    for read in source:
                        failed.extend(self._read_run(read, slot.view, bulk=total >= _BULK_BYTES))

            crew.run(work, threads)
        return failed

    def _read_run(
        self, read: _Read, buffer: memoryview, *, bulk: bool = False
    ) -> list[tuple[Place, list[Want], str]]:
        target = buffer[: -(-(read.stop - read.start) // PAGE) * PAGE]
        try:
            n = self.backend.read_into(pack_key(read.pack), read.start, target, bulk=bulk)
        except FileNotFoundError:
            return [(place, wants, "its pack is missing") for place, wants in read.chunks]
        except BackendError as e:
            return [(place, wants, f"its pack cannot be read: {e}") for place, wants in read.chunks]
        failed = []
        for place, wants in read.chunks:
            start = place.offset - read.start
            stored = target[start : min(start + place.stored, n)]
            try:
                raw = _proven(wants[0].digest, place, stored)
            except DamagedError as e:
                failed.append((place, wants, str(e)))
                continue
            for want in wants:
                want.sink(raw)
        return failed

    def holds(self, place: Place, digest: Digest) -> bool:
        """Whether a chunk or node can be read, and proven, at this very place."""
        want = Want(digest, -1, lambda raw: None, "")
        return _plausible(place, want, self.config.chunk_size) and self._read_one(place, [want])

    def _read_one(self, place: Place, wants: list[Want]) -> bool:
        """Whether a chunk could be handed over from this place."""
        buffer = memoryview(bytearray(place.stored + 2 * PAGE))
        start = place.offset // PAGE * PAGE
        read = _Read(place.pack, start, place.offset + place.stored, [(place, wants)])
        return not self._read_run(read, buffer)


def _keep_copy(found: dict[Digest, bytes], digest: Digest, raw: memoryview) -> None:
    found[digest] = bytes(raw)


def _coalesced(found: list[tuple[Place, list[Want]]], most: int) -> Iterator[_Read]:
    """Join places that are neighbours in a pack into reads of at most ``most`` bytes."""
    read: _Read | None = None
    for place, wants in sorted(found, key=lambda f: (f[0].pack, f[0].offset)):
        stop = place.offset + place.stored
        if (
            read is not None
            and read.pack == place.pack
            and place.offset - read.stop <= _GAP
            and stop - read.start <= most - PAGE
        ):
            read.stop = max(read.stop, stop)
            read.chunks.append((place, wants))
            continue
        if read is not None:
            yield read
        # From a page on, so that the backend may read around the page cache.
        read = _Read(place.pack, place.offset // PAGE * PAGE, stop, [(place, wants)])
    if read is not None:
        yield read


def _plausible(place: Place, want: Want, chunk_size: int) -> bool:
    """Whether a place can be what is wanted, before memory is taken for it."""
    limit = chunk_size if want.nbytes >= 0 else MAX_NODE_BYTES
    return (want.nbytes in (-1, place.raw)) and is_possible(place, max(limit, 1 << 16))


def is_possible(place: Place, limit: int = MAX_NODE_BYTES) -> bool:
    """Whether anything can lie at a place, before memory is taken for it."""
    sizes_fit = 0 <= place.stored <= limit and 0 <= place.raw <= limit
    return sizes_fit and 0 <= place.offset < _MAX_OFFSET and len(place.pack) == ID_SIZE


def _proven(digest: Digest, place: Place, stored: memoryview) -> memoryview:
    """Return the raw bytes of what was read, if they have this digest."""
    if len(stored) != place.stored:
        raise DamagedError("its pack is cut off")
    raw = decompress(place.codec, stored, place.raw)
    if len(raw) != place.raw or digest_of(raw) != digest:
        raise DamagedError("its bytes differ from what was written")
    return raw


def _damaged(uri: str, failed: list[tuple[Want, str]]) -> DamagedError:
    paths = tuple(sorted({w.path for w, _ in failed if w.path}))
    lines = [f"chunk {w.digest.hex()} {why}" for w, why in failed[:3]]
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    hurt = f"; hurt: {', '.join(paths[:10])}{' …' if len(paths) > 10 else ''}" if paths else ""
    return DamagedError(f"{uri}: {'; '.join(lines)}{more}{hurt}{take_again(uri)}", paths)


def take_again(uri: str) -> str:
    """Return what a message of damaged chunks ends in: advice for those who read a snapshot."""
    return (
        f". `casnap check {uri}` says what is hurt; where they are at hand, to take the same bytes "
        "again in this process stores them anew"
    )


def headless(uri: str) -> DamagedError:
    """Return the error for a place that has the roots of a store, but no record of it."""
    return DamagedError(
        f"{uri} is a damaged store: it has roots, but {CONFIG_KEY} is missing or no readable file. "
        "Restore that file from a backup"
    )


def read_config(backend: Backend) -> StoreConfig:
    """Read what kind of store this is.

    Raises:
        NotAStoreError: There is none.
        UnsupportedFormatError: A newer version wrote it.
        DamagedError: ``casnap.json`` is no such record, or missing where roots are.
    """
    where = f"{backend.uri}/{CONFIG_KEY}"
    try:
        raw = backend.read(CONFIG_KEY)
    except (FileNotFoundError, BackendError):
        if backend.names("roots/0"):
            raise headless(backend.uri) from None
        raise NotAStoreError(
            f"{backend.uri} is not a casnap store; make one with `casnap init {backend.uri}` or "
            "Store(...), or check the path"
        ) from None
    try:
        version = msgspec.json.decode(raw, type=dict).get("format", 0)
        if isinstance(version, int) and version > FORMAT:
            raise UnsupportedFormatError(
                f"{where} is of format {version}, this casnap reads up to {FORMAT}; update casnap"
            )
        config = msgspec.json.decode(raw, type=StoreConfig)
    except (msgspec.DecodeError, RecursionError, ValueError) as e:
        raise DamagedError(f"{where} is damaged: {e}; restore it from a backup") from e
    unknown = set(config.read_features) - KNOWN_FEATURES
    if unknown:
        raise UnsupportedFormatError(
            f"{where} needs features that this casnap lacks: {', '.join(sorted(unknown))}; "
            "update casnap"
        )
    size = config.chunk_size
    if (
        not MIN_CHUNK_SIZE <= size <= MAX_CHUNK_SIZE
        or size & (size - 1)
        or id_from_name(config.store_id) is None  # it names a folder of the cache
    ):
        raise DamagedError(f"{where} is damaged: chunk size {size}, id {config.store_id!r}")
    return config
