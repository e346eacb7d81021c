"""Chunks and nodes by digest: find, read and verify them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from itertools import count, islice
from typing import NamedTuple, TypeVar

from casnap.backends import Backend
from casnap.errors import (
    BackendError,
    CasnapError,
    DamagedError,
    UnavailableError,
)
from casnap.format.codec import decompress
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of
from casnap.format.records import (
    MAX_NODE_BYTES,
    Place,
    Record,
    Root,
    Row,
    StoreConfig,
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
# How often to read again from a newer root, after a collector has changed the store.
_LOOKS = 10
_READ_BYTES = 16 << 20
_BULK_BYTES = 64 << 20
_SMALL_BYTES = 1 << 20
_NODES_BYTES = 32 << 20

Sink = Callable[[memoryview], None]
"""Called with the verified bytes of a chunk, from any thread. It must copy what it keeps."""


class Want(NamedTuple):
    """A chunk to read: its digest, its raw length, its sink, and the path that needs it."""

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
        readers: The most threads, each with a buffer of the pool. Lower it if the sinks take
            buffers too. 0: the calling thread reads, into a buffer of its own.
    """

    budget: int | None = None
    prepare: Callable[[Slot], None] | None = None
    readers: int = SLOTS


DEFAULT_READ = ReadOptions()
# For one chunk: the caller may hold buffers of the pool, and must not wait for another one.
_WITHOUT_POOL = ReadOptions(readers=0)


class Reason(Enum):
    """Why a chunk cannot be read. The values are texts for messages."""

    NOWHERE = "it is in no pack of the index"
    MISSING = "its pack is missing"
    UNREADABLE = "its pack cannot be read"
    CUT_OFF = "its pack is cut off"
    IMPOSSIBLE = "the index gives it an impossible place"
    CHANGED = "its bytes differ from what was written"


# Places to distrust. A take notices by itself if a file is gone or too short, and a file that
# cannot be read may be whole.
_DISTRUSTED = (Reason.IMPOSSIBLE, Reason.CHANGED)


class Why(NamedTuple):
    """Why a chunk cannot be read, with the words of the backend or the decoder, if any."""

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


class Unread(NamedTuple):
    """A place where a chunk could not be read, the wants for that chunk, and why it failed."""

    place: Place
    wants: list[Want]
    why: Why


def _readers() -> int:
    """Return how many threads read: some wait for the disk while all cores verify."""
    return min(cores() + 2, SLOTS)


class _Failed(NamedTuple):
    """A chunk that could not be read, and the places that were tried."""

    want: Want
    tried: list[Unread]

    def __str__(self) -> str:
        """Return which chunk it is, and why the first place failed."""
        why = Reason.NOWHERE.value
        if self.tried:
            why = f"{self.tried[0].why} (pack {self.tried[0].place.pack.hex()})"
        return f"chunk {self.want.digest.hex()}: {why}"


class Objects:
    """Everything under one store's URI, below the level of snapshots.

    Args:
        backend: Where the objects live.
        opened: The same store, if it is open already; its config and index are used here too.
    """

    def __init__(self, backend: Backend, opened: Objects | None = None) -> None:
        self.backend = backend
        self.config: StoreConfig = opened.config if opened else read_config(backend)
        self.index: Index = opened.index if opened else Index(backend, self.config.store_id)
        self._newest: Root | None = None

    def check_writable(self, doing: str, root: Root | None = None) -> None:
        """Check that this version may write to the store.

        Args:
            doing: What the caller is about to do, for the message.
            root: The root that it stands on; by default the newest one.

        Raises:
            UnsupportedFormatError: The store uses a feature that this version cannot write.
        """
        root = root or self.newest()
        features = (*self.config.write_features, *root.write_features)
        check_writable(self.backend.uri, features, doing)

    def newest(self) -> Root:
        """Return the newest root, which says what the store holds."""
        self._newest = newest_root(self.backend, self._newest)
        return self._newest

    def current(self, read: Callable[[Root], V], first: Root | None = None) -> V:
        """Read from the newest root; read again if a collector has changed the store meanwhile.

        Args:
            read: Reads from the store, given the root.
            first: A root to begin with, which some rank has just read.

        Raises:
            DamagedError: The store is damaged; no collector has moved anything meanwhile.
        """
        for look in count(1):
            root = first if look == 1 and first is not None else self.newest()
            try:
                return read(root)
            except DamagedError:
                newer = self.newest()
                # If segments were only added, nothing was moved.
                if look == _LOOKS or set(root.segments) <= set(newer.segments):
                    raise
        raise AssertionError

    def view(self, first: Root | None = None) -> View:
        """Return the view of the index at the newest root, or at one that was just read."""
        return self.current(self.index.view, first)

    # --- nodes ---

    def node(self, digest: Digest, hint: Place | None = None) -> bytes:
        """Return a tree node, verified: from the cache, by the hint, or through the index.

        Raises:
            DamagedError: The node has no whole place.
        """
        if len(digest) != DIGEST_SIZE:
            raise DamagedError(
                f"{self.backend.uri}: {digest.hex()[:80]!r} is not the digest of a node"
            )
        cached = self.index.cache.node(digest)
        if cached is not None:
            return cached
        found: list[bytes] = []
        want = Want(digest, -1, lambda raw: found.append(bytes(raw)), "")
        if hint is not None and self.read_places([(hint, [want])], _WITHOUT_POOL):
            _log.debug("the hint to node %s is stale", digest.hex())
        if not found:
            self.fetch([want])
        self.index.cache.keep_nodes([(digest, found[0])])
        return found[0]

    def cache_nodes(self, digests: list[Digest]) -> None:
        """Read nodes that are not cached yet, together, for later calls of :meth:`node`.

        Raises:
            DamagedError: Some nodes have no whole place.
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

    # --- chunks ---

    def fetch(self, wants: Iterable[Want], how: ReadOptions = DEFAULT_READ) -> None:
        """Read chunks, verify each against its digest, and hand them to their sinks.

        Equal chunks are read once. Neighbours in a pack are read together.

        Args:
            wants: The chunks to read; ``nbytes`` is -1 if the length is not known.
            how: Bounds and preparation of the buffers.

        Raises:
            DamagedError: Some chunks have no whole place. All others were handed over.
            BackendError: Some chunks could not be read, and may be whole.
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
        """Read some chunks; return the newest view that was used, and the chunks that failed."""
        failed = self._fetch(view, window, how)
        while failed and self.newest() != view.root:
            # A collector may have moved chunks. Those that have other places now are read there;
            # those that the newest root still places where they failed are damaged.
            view = self.view()
            moved = [f.want for f in failed if self._has_moved(view, f)]
            if not moved:
                break
            failed = [f for f in failed if not self._has_moved(view, f)]
            failed += self._fetch(view, moved, how)
        if failed and ask_store:
            # The cached places may be wrong: read the index anew from the store, once.
            digests = [f.want.digest for f in failed]
            view = self.index.refresh(view, self.newest(), digests)
            failed = self._fetch(view, [f.want for f in failed], how)
        return view, failed

    def _has_moved(self, view: View, failed: _Failed) -> bool:
        tried = {unread.place for unread in failed.tried}
        return not tried.issuperset(self.index.find_all(view, failed.want.digest))

    def _fetch(self, view: View, wants: list[Want], how: ReadOptions) -> list[_Failed]:
        by_digest: dict[Digest, list[Want]] = {}
        for want in wants:
            by_digest.setdefault(want.digest, []).append(want)
        failed: list[_Failed] = []
        found: list[tuple[Place, list[Want]]] = []
        places = self.index.find(view, list(by_digest))
        for same, place in zip(by_digest.values(), places, strict=True):
            if place is None:
                failed += [_Failed(w, []) for w in same]
            else:
                found.append((place, same))
        bad = self.read_places(found, how)
        self._trust_again(view, found, bad)
        for unread in bad:
            failed += self._fetch_elsewhere(view, unread)
        return failed

    def _fetch_elsewhere(self, view: View, unread: Unread) -> list[_Failed]:
        """Read a chunk at its other places until one is whole."""
        tried = [unread]
        for place in self.index.find_all(view, unread.wants[0].digest):
            if place != unread.place:
                bad = self.read_places([(place, unread.wants)], _WITHOUT_POOL)
                if not bad:
                    return []
                tried += bad
        return [_Failed(want, tried) for want in unread.wants]

    def _trust_again(
        self, view: View, read: list[tuple[Place, list[Want]]], bad: list[Unread]
    ) -> None:
        """Trust places again that were damaged and are whole now, from a backup perhaps."""
        noted = self.index.distrusted(view, [wants[0].digest for _, wants in read])
        if noted:
            noted -= {(unread.wants[0].digest, unread.place) for unread in bad}
            self.index.trust(view, noted & {(wants[0].digest, place) for place, wants in read})

    def read_places(
        self, places: list[tuple[Place, list[Want]]], how: ReadOptions = DEFAULT_READ
    ) -> list[Unread]:
        """Read the chunks at these places; return the places that failed, and why."""
        found, failed = [], []
        for place, wants in places:
            if _plausible(place, wants[0], self.config.chunk_size):
                found.append((place, wants))
            else:
                failed.append(Unread(place, wants, Why(Reason.IMPOSSIBLE)))
        total = sum(place.stored for place, _ in found)
        largest = max((place.stored for place, _ in found), default=0)
        share = max(_SMALL_BYTES, total // _readers())
        unit = min(_READ_BYTES, share, _READ_BYTES if how.budget is None else how.budget)
        reads = list(coalesced(found, max(largest + 2 * PAGE, unit)))
        most = max((read.stop - read.start for read in reads), default=0) + PAGE
        if total <= _SMALL_BYTES or how.readers == 0:
            buffer = memoryview(bytearray(most))
            return failed + [bad for read in reads for bad in self._read_run(read, buffer)]
        affordable = SLOTS if how.budget is None else max(1, how.budget // most)
        threads = min(len(reads), _readers(), affordable, how.readers)
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
    ) -> list[Unread]:
        target = buffer[: -(-(read.stop - read.start) // PAGE) * PAGE]
        try:
            [n] = self.backend.read_into(pack_key(read.pack), [(read.start, target)], bulk=bulk)
        except FileNotFoundError:
            return [Unread(*chunk, Why(Reason.MISSING)) for chunk in read.chunks]
        except UnavailableError:
            raise
        except BackendError as e:
            return [Unread(*chunk, Why(Reason.UNREADABLE, str(e))) for chunk in read.chunks]
        failed = []
        for place, wants in read.chunks:
            start = place.offset - read.start
            stored = target[start : min(start + place.stored, n)]
            raw = _proven(wants[0].digest, place, stored)
            if isinstance(raw, Why):
                failed.append(Unread(place, wants, raw))
                continue
            for want in wants:
                want.sink(raw)
        return failed

    def holds(self, place: Place, digest: Digest) -> bool:
        """Whether a chunk or node can be read and verified at this place."""
        want = Want(digest, -1, lambda raw: None, "")
        return not self.read_places([(place, [want])], _WITHOUT_POOL)


def _keep_copy(found: dict[Digest, bytes], digest: Digest, raw: memoryview) -> None:
    found[digest] = bytes(raw)


def _plausible(place: Place, want: Want, chunk_size: int) -> bool:
    """Whether a place fits the wanted length. Checked before memory is taken for it."""
    limit = chunk_size if want.nbytes >= 0 else MAX_NODE_BYTES
    return (want.nbytes in (-1, place.raw)) and is_possible(place, max(limit, 1 << 16))


def _proven(digest: Digest, place: Place, stored: memoryview) -> memoryview | Why:
    """Return the raw bytes if they have this digest, else why not."""
    if len(stored) != place.stored:
        return Why(Reason.CUT_OFF)
    try:
        raw = decompress(place.codec, stored, place.raw)
    except DamagedError as e:
        return Why(Reason.CHANGED, str(e))
    intact = len(raw) == place.raw and digest_of(raw) == digest
    return raw if intact else Why(Reason.CHANGED)


def _damaged_records(failed: list[_Failed]) -> list[Record]:
    return [
        (f.want.digest, unread.place)
        for f in failed
        for unread in f.tried
        if unread.why.reason in _DISTRUSTED
    ]


def _error(uri: str, failed: list[_Failed]) -> CasnapError:
    wants = [f.want for f in failed]
    paths = tuple(sorted({w.path for w in wants if w.path}))
    lines = map(str, failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    hurt = f"; hurt: {', '.join(paths[:10])}{' …' if len(paths) > 10 else ''}" if paths else ""
    message = f"{uri}: {'; '.join(lines)}{more}{hurt}"
    if all(any(u.why.reason is Reason.UNREADABLE for u in f.tried) for f in failed):
        return BackendError(f"{message}. The data may be whole: make it readable, then try again")
    advice = (
        f"`casnap check {uri}` says what is hurt; if you still have the data, take the same bytes "
        "again on this host to store them anew"
    )
    return DamagedError(message, paths, advice)
