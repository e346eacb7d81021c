"""Chunks and nodes by digest: finding them, reading them, proving them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count, islice
from typing import NamedTuple, TypeVar

from casnap.backends import Backend
from casnap.errors import (
    BackendError,
    CasnapError,
    DamagedError,
    ExhaustedError,
)
from casnap.format.codec import decompress
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of
from casnap.format.records import (
    MAX_NODE_BYTES,
    Place,
    Record,
    Root,
    Row,
    pack_key,
)
from casnap.runtime.buffers import PAGE, SLOTS, Slot, shared_pool
from casnap.runtime.threads import Crew, Shared, cores
from casnap.storage.config import read_config
from casnap.storage.index import Index, View
from casnap.storage.pack_runs import Run, coalesced, is_possible
from casnap.storage.roots import check_writable, newest_root
from casnap.storage.tree import Tree, table_shape

V = TypeVar("V")

_log = logging.getLogger("casnap")
_WINDOW = 1 << 15
# So often is something read of a newer root, where a collector went past the one before.
_LOOKS = 10
_READ_BYTES = 16 << 20
_BULK_BYTES = 64 << 20
_SMALL_BYTES = 1 << 20
_NODES_BYTES = 32 << 20
_NOWHERE = "is in no pack of the index"
_MISSING, UNREADABLE = "its pack is missing", "its pack cannot be read"
_CUT_OFF, _IMPOSSIBLE = "its pack is cut off", "has an impossible place in the index"
# Files that are gone or too short a take sees by itself; and what cannot be read may be whole.
_NO_DAMAGED_BYTES = (_NOWHERE, _MISSING, UNREADABLE, _CUT_OFF)

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


class _Failed(NamedTuple):
    """A chunk that could not be read: why, and at which places."""

    want: Want
    why: str
    places: list[tuple[Place, str]]


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
        features = (*self.config.write_features, *self.newest().write_features)
        check_writable(self.backend.uri, features, doing)

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
        cached = self.index.cache.node(digest)
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
        missing = [digest for digest in digests if self.index.cache.node(digest) is None]
        places = self.index.find(self.view(), missing) if missing else []
        while missing:
            found: dict[Digest, bytes] = {}
            nbytes = 0
            while missing and nbytes < _NODES_BYTES:
                found[missing.pop()] = b""
                place = places.pop()
                nbytes += place.raw if place is not None else 0
            self.fetch([Want(d, -1, partial(_keep_copy, found, d), "") for d in found])
            self.index.cache.keep_nodes(list(found.items()))

    def table(self, root: Root) -> Tree[Row]:
        """Return the table of snapshots that a root has."""
        top = None if root.table is None else Digest(root.table.digest)
        if root.table is not None and top is not None:
            self.node(top, root.table.hint)
        return Tree(top, self.node, Row, table_shape(root))

    def _keep(self, digest: Digest, node: bytes) -> bytes:
        self.index.cache.keep_nodes([(digest, node)])
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
            BackendError: Some could not be read, and may be whole.
        """
        view = self.view()
        pending = iter(wants)
        failed: list[_Failed] = []
        while window := list(islice(pending, _WINDOW)):
            view, bad = self._fetch_window(view, window, how, ask_store=not failed)
            failed += bad
        if failed:
            self.index.distrust(view, _damaged_records(failed))
            raise _error(self.backend.uri, failed)

    def _fetch_window(
        self, view: View, window: list[Want], how: ReadOptions, *, ask_store: bool
    ) -> tuple[View, list[_Failed]]:
        """Read some chunks; return the view that was the last, and what is in no place of it."""
        failed = self._fetch(view, window, how)
        while failed and self.newest() != view.root:
            # A collector may have moved things. Where it did, they have other places by now; those
            # that failed and that the newest root still names are damaged.
            view = self.view()
            moved = [f.want for f in failed if self._has_moved(view, f)]
            if not moved:
                break
            failed = [f for f in failed if not self._has_moved(view, f)]
            failed += self._fetch(view, moved, how)
        if failed and ask_store:
            # What we know of places may be wrong: ask the store itself, once.
            digests = [f.want.digest for f in failed]
            view = self.index.refresh(view, self.newest(), digests)
            failed = self._fetch(view, [f.want for f in failed], how)
        return view, failed

    def _has_moved(self, view: View, failed: _Failed) -> bool:
        tried = {place for place, _ in failed.places}
        return not tried.issuperset(self.index.find_all(view, failed.want.digest))

    def _fetch(self, view: View, wants: list[Want], how: ReadOptions) -> list[_Failed]:
        by_digest: dict[Digest, list[Want]] = {}
        for want in wants:
            by_digest.setdefault(want.digest, []).append(want)
        failed: list[_Failed] = []
        found: list[tuple[Place, list[Want]]] = []
        bad: list[tuple[Place, list[Want], str]] = []
        places = self.index.find(view, list(by_digest))
        for same, place in zip(by_digest.values(), places, strict=True):
            if place is None:
                failed += [_Failed(w, _NOWHERE, []) for w in same]
            elif not _plausible(place, same[0], self.config.chunk_size):
                bad.append((place, same, _IMPOSSIBLE))
            else:
                found.append((place, same))
        bad += self.read_places(found, how)
        self._trust_again(view, found, bad)
        for place, same, why in bad:
            failed += self._fetch_elsewhere(view, place, same, why)
        return failed

    def _fetch_elsewhere(
        self, view: View, place: Place, wants: list[Want], why: str
    ) -> list[_Failed]:
        """Read a chunk at its other places, until one is whole."""
        tried = [(place, why)]
        for other in self.index.find_all(view, wants[0].digest):
            if other != place:
                reason = self._why_not(other, wants)
                if reason is None:
                    return []
                tried.append((other, reason))
        return [_Failed(w, f"{why} (pack {place.pack.hex()})", tried) for w in wants]

    def _trust_again(
        self,
        view: View,
        read: list[tuple[Place, list[Want]]],
        bad: list[tuple[Place, list[Want], str]],
    ) -> None:
        """Forget that places were damaged that are whole again, out of a backup perhaps."""
        noted = self.index.distrusted(view, [wants[0].digest for _, wants in read])
        if noted:
            noted -= {(wants[0].digest, place) for place, wants, _ in bad}
            self.index.trust(view, noted & {(wants[0].digest, place) for place, wants in read})

    def read_places(
        self, found: list[tuple[Place, list[Want]]], how: ReadOptions = DEFAULT_READ
    ) -> list[tuple[Place, list[Want], str]]:
        """Read the chunks at these places; return those that could not be proven, and why."""
        total = sum(place.stored for place, _ in found)
        largest = max((place.stored for place, _ in found), default=0)
        share = max(_SMALL_BYTES, total // _readers())
        unit = min(_READ_BYTES, share, _READ_BYTES if how.budget is None else how.budget)
        reads = list(coalesced(found, max(largest + 2 * PAGE, unit)))
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
        self, read: Run[list[Want]], buffer: memoryview, *, bulk: bool = False
    ) -> list[tuple[Place, list[Want], str]]:
        target = buffer[: -(-(read.stop - read.start) // PAGE) * PAGE]
        try:
            n = self.backend.read_into(pack_key(read.pack), read.start, target, bulk=bulk)
        except FileNotFoundError:
            return [(place, wants, _MISSING) for place, wants in read.chunks]
        except ExhaustedError:
            raise
        except BackendError as e:
            return [(place, wants, f"{UNREADABLE}: {e}") for place, wants in read.chunks]
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
        return self._why_not(place, [Want(digest, -1, lambda raw: None, "")]) is None

    def _why_not(self, place: Place, wants: list[Want]) -> str | None:
        """Hand a chunk over from this place, or return why it cannot be."""
        if not _plausible(place, wants[0], self.config.chunk_size):
            return _IMPOSSIBLE
        buffer = memoryview(bytearray(place.stored + 2 * PAGE))
        start = place.offset // PAGE * PAGE
        read = Run(place.pack, start, place.offset + place.stored, [(place, wants)])
        return next((why for _, _, why in self._read_run(read, buffer)), None)


def _keep_copy(found: dict[Digest, bytes], digest: Digest, raw: memoryview) -> None:
    found[digest] = bytes(raw)


def _plausible(place: Place, want: Want, chunk_size: int) -> bool:
    """Whether a place can be what is wanted, before memory is taken for it."""
    limit = chunk_size if want.nbytes >= 0 else MAX_NODE_BYTES
    return (want.nbytes in (-1, place.raw)) and is_possible(place, max(limit, 1 << 16))


def _proven(digest: Digest, place: Place, stored: memoryview) -> memoryview:
    """Return the raw bytes of what was read, if they have this digest."""
    if len(stored) != place.stored:
        raise DamagedError(_CUT_OFF)
    raw = decompress(place.codec, stored, place.raw)
    if len(raw) != place.raw or digest_of(raw) != digest:
        raise DamagedError("its bytes differ from what was written")
    return raw


def _damaged_records(failed: list[_Failed]) -> list[Record]:
    return [
        (f.want.digest, place)
        for f in failed
        for place, why in f.places
        if not why.startswith(_NO_DAMAGED_BYTES)
    ]


def _error(uri: str, failed: list[_Failed]) -> CasnapError:
    wants = [f.want for f in failed]
    paths = tuple(sorted({w.path for w in wants if w.path}))
    lines = [f"chunk {f.want.digest.hex()} {f.why}" for f in failed[:3]]
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    hurt = f"; hurt: {', '.join(paths[:10])}{' …' if len(paths) > 10 else ''}" if paths else ""
    message = f"{uri}: {'; '.join(lines)}{more}{hurt}"
    if all(any(why.startswith(UNREADABLE) for _, why in f.places) for f in failed):
        return BackendError(f"{message}. It may be whole: make it readable, then try again")
    return DamagedError(f"{message}{take_again(uri)}", paths)


def take_again(uri: str) -> str:
    """Return what a message of damaged chunks ends in: advice for those who read a snapshot."""
    return (
        f". `casnap check {uri}` says what is hurt; where they are at hand, to take the same bytes "
        "again on this host stores them anew"
    )
