"""An open store, by digests and roots: find, read and verify its chunks and nodes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import chain, count, islice
from typing import NamedTuple, TypeVar

from casnap.backends import Backend
from casnap.backends.system_errors import gone_error
from casnap.errors import (
    BackendError,
    CasnapError,
    DamagedError,
    NotAStoreError,
    UnsupportedFormatError,
)
from casnap.format.codec import Codec
from casnap.format.digest import DIGEST_SIZE, Digest
from casnap.format.names import is_row_name
from casnap.format.records import (
    CONFIG_KEY,
    PackId,
    Place,
    Root,
    Row,
    StoreConfig,
    decode_row,
)
from casnap.format.tree import TABLE_FANOUT, Tree
from casnap.runtime.threads import cores
from casnap.storage.log.config import config_in, read_config
from casnap.storage.log.put_if_absent import check_put_if_absent
from casnap.storage.log.roots import check_writable, last_listed, newest_root
from casnap.storage.log.same_store import check_same_store, id_in
from casnap.storage.lookup.index import Index, View
from casnap.storage.lookup.index_cache import preferred
from casnap.storage.lookup.remembered_root import RememberedRoot
from casnap.storage.packs.chunk_reads import (
    DEFAULT_READ,
    WITHOUT_POOL,
    FailedRead,
    Fill,
    Located,
    ReadOptions,
    Reason,
    Want,
    fill_from,
    read_places,
)
from casnap.storage.reading.chunk_cache import ChunkCache
from casnap.storage.reading.delta_reads import DeltaReader
from casnap.storage.reading.node_hints import KnownHints, read_node_pack

V = TypeVar("V")

_log = logging.getLogger("casnap")
_DELTA = int(Codec.DELTA)
# The places of so many chunks are held at a time.
_WINDOW = 1 << 14
# So many chunks are looked for in a remote index without reading it whole, if it is large.
_FEW = 64
# How often to read again from a newer root, after a collector has changed the store.
_TRIES = 10
# How many seconds a remote root counts as standing, and as recent enough to begin with.
_STANDS, _RECENT = 60.0, 10.0
_NODES_BYTES = 32 << 20
_MAY_BE_WHOLE = {Reason.UNREADABLE, Reason.UNSUPPORTED}


class _Failed(NamedTuple):
    """A chunk that could not be read, and the places that were tried."""

    want: Want
    attempts: list[FailedRead]

    def __str__(self) -> str:
        """Return which chunk it is, and why the first place failed."""
        reason = Reason.NOWHERE.value
        if self.attempts:
            reason = f"{self.attempts[0].failure} (pack {self.attempts[0].place.pack.hex()})"
        return f"chunk {self.want.digest.hex()}: {reason}"


class Repository:
    """A store at one URI that is open: its newest root, its index, its nodes and chunks.

    Args:
        backend: Where the objects live.
        shared_with: This store, if it is open already; its config and index are used here too.
        config: Its record, if that was read already.
        marks: Whether snapshots get markers, files for people.

    Attributes:
        chunk_cache: Where chunks are kept that :meth:`fetch` reads; None for nowhere.
        announces_at_once: Whether collectors are to see also short changes; set once one of them
            was faster than a change of this process.
    """

    def __init__(
        self,
        backend: Backend,
        shared_with: Repository | None = None,
        config: StoreConfig | None = None,
        *,
        marks: bool = True,
    ) -> None:
        self.backend = backend
        self.config: StoreConfig = (
            shared_with.config if shared_with else config or read_config(backend)
        )
        self.index: Index = (
            shared_with.index if shared_with else Index(backend, self.config.store_id)
        )
        if shared_with is None:
            backend.belong(partial(check_same_store, store_id=self.config.store_id))
        self.marks = marks
        self.chunk_cache: ChunkCache | None = None
        self.announces_at_once = False
        self._last_seen = RememberedRoot(backend)
        self._hints = KnownHints()
        self._newest: Root | None = None
        # When that root was last read or put, and when it was last the newest, by
        # `time.monotonic`.
        self._seen_at = self._newest_at = -math.inf
        self._looked_ahead = False

    @classmethod
    def at(cls, backend: Backend, *, look_ahead: bool = False, marks: bool = True) -> Repository:
        """Open a remote store; with one request if this host has seen it before.

        Args:
            backend: The place.
            look_ahead: Look for the newest root at once, for the next use, which then need not
                look.
            marks: Whether snapshots get markers.

        Raises:
            NotAStoreError: There is no store, or its creation was cut off.
        """
        remembered = RememberedRoot(backend).look(look_ahead=look_ahead)
        if remembered is None:
            root = _try(newest_root if look_ahead else last_listed, backend)
            copy = config_in(root) if isinstance(root, Root) else None
            config = copy or read_config(backend)
        else:
            config, root = remembered
        store = cls(backend, config=config, marks=marks)
        if isinstance(root, NotAStoreError):
            raise root
        # A damaged root is for the first use to report.
        if isinstance(root, Root):
            store.note_newest(root)
            store._looked_ahead = look_ahead
            if remembered is not None and not look_ahead:
                # This host may not have looked for long.
                store._newest_at = -math.inf
        return store

    def check_writable(
        self, doing: str, root: Root | None = None, *, dry_run: bool = False
    ) -> None:
        """Check that this version may write to the store, and that its place keeps writers apart.

        Args:
            doing: What the caller is about to do, for the message.
            root: The root that it stands on; by default a recent one.
            dry_run: Whether the caller will put no root.

        Raises:
            UnsupportedFormatError: The store uses a feature that this version cannot write.
            StoreError: The place does not honour put-if-absent, or is only to be read.
        """
        if not dry_run:
            self.backend.check_changes()
        root = root or self.recent()
        check_writable(self.backend.uri, root.write_features, doing)
        if not dry_run:
            check_put_if_absent(self.backend, self.config)

    def newest(self) -> Root:
        """Return the newest root, which says what the store holds.

        Raises:
            StoreError: Another store has come to this place, or the store is gone.
        """
        # Roots are never removed, so a remote one is not read again each time. It is now and then,
        # for the store may have been rolled back.
        newest, looked_ahead = self._newest, self._looked_ahead
        self._looked_ahead = False
        if newest is not None and looked_ahead and self._within(_RECENT, self._newest_at):
            return newest
        stands = self._within(_STANDS, self._seen_at)
        try:
            root = newest_root(self.backend, newest, stands=stands)
        except NotAStoreError as e:
            # Its record was there when it was opened.
            if self.backend.size_if_there(CONFIG_KEY) is None:
                raise gone_error(self.backend.uri) from e
            raise
        if root is not newest and id_in(root) not in (None, self.config.store_id):
            check_same_store(self.backend, self.config.store_id)
        if root is not newest or not stands:
            self.note_newest(root)
        self._newest_at = time.monotonic()
        return root

    def recent(self) -> Root:
        """Return the newest root, or on a remote store one that was the newest a moment ago.

        This does where an older root is as safe: to begin a change, and to read, since what is not
        found is looked for in newer roots.
        """
        newest = self._newest
        if newest is None or not self._within(_RECENT, self._newest_at):
            return self.newest()
        self._looked_ahead = False
        return newest

    def _within(self, seconds: float, since: float) -> bool:
        return self.backend.costly_requests and time.monotonic() - since < seconds

    def note_newest(self, root: Root) -> None:
        """Note a root that this process has just read, or put, as the newest one."""
        self._newest, self._looked_ahead = root, False
        self._seen_at = self._newest_at = time.monotonic()
        self._last_seen.keep(self.config, root)

    def observe_root(self, root: Root) -> None:
        """Note a root that another rank has just read, unless a newer one is known here."""
        if self._newest is None or root.seq >= self._newest.seq:
            self.note_newest(root)

    def read_at_newest(
        self, read: Callable[[Root], V], first_root: Callable[[], Root] | None = None
    ) -> V:
        """Read from the newest root; read again if a collector has changed the store meanwhile.

        Args:
            read: Reads from the store, given the root.
            first_root: Returns the root to begin with, by default the newest.

        Raises:
            DamagedError: The store is damaged; no collector has moved anything meanwhile.
        """
        for attempt in count(1):
            root = (first_root or self.newest)() if attempt == 1 else self.newest()
            try:
                return read(root)
            except DamagedError:
                newer = self.newest()
                # If segments were only added, nothing was moved.
                if attempt == _TRIES or set(root.segments) <= set(newer.segments):
                    raise
        raise AssertionError

    def view(self) -> View:
        """Return the view of the index at the newest root."""
        return self.read_at_newest(self.index.view)

    def recent_view(self, base_root: Root | None = None) -> View:
        """Return the view of the index at a recent root: as :meth:`recent` returns it, or told."""
        return self.read_at_newest(self.index.view, lambda: base_root or self.recent())

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
        cache = self.index.cache
        cached = cache.node(digest)
        if cached is not None:
            self._hints.use(digest)
            return cached
        if self.backend.costly_requests:
            hint = hint or self._hints.find(cache, digest)
        if self.backend.costly_requests and hint is not None:
            node_pack = read_node_pack(self.backend, hint)
            cache.keep_nodes(node_pack.nodes.items())
            self._hints.keep(cache, hint.pack, node_pack)
            if (node := node_pack.nodes.get(digest)) is not None:
                return node
            if node_pack.is_gone:
                hint = None
        copies: list[bytes] = []
        want = Want(digest, -1, lambda raw: copies.append(bytes(raw)), "")
        if hint is not None and self.read_places([(hint, [want])], WITHOUT_POOL):
            _log.debug("the hint to node %s is stale", digest.hex())
        if not copies:
            self.fetch([want])
        self.index.cache.keep_nodes([(digest, copies[0])])
        return copies[0]

    def cache_nodes(self, digests: list[Digest]) -> None:
        """Read nodes that are not cached yet, together, for later calls of :meth:`node`.

        Raises:
            DamagedError: Some nodes have no whole place.
        """
        uncached = [digest for digest in digests if self.index.cache.node(digest) is None]
        places = self.index.find(self.recent_view(), uncached) if uncached else []
        while uncached:
            group: dict[Digest, bytes] = {}
            nbytes = 0
            while uncached and nbytes < _NODES_BYTES:
                group[uncached.pop()] = b""
                place = places.pop()
                nbytes += place.raw_size if place is not None else 0
            self.fetch([Want(d, -1, partial(_keep_copy, group, d), "") for d in group])
            self.index.cache.keep_nodes(list(group.items()))

    def table(self, root: Root) -> Tree[Row]:
        """Return the table of snapshots that a root has."""
        top = None if root.table is None else Digest(root.table.digest)
        if root.table is not None and top is not None:
            self.node(top, root.table.hint)
        return Tree(top, self.node, Row, TABLE_FANOUT, is_row_name, decode_row)

    # --- chunks ---

    def fetch(self, wants: Iterable[Want], options: ReadOptions = DEFAULT_READ) -> None:
        """Read chunks, verify each against its digest, and hand them to their sinks.

        Equal chunks are read once. Neighbours in a pack are read together.

        Args:
            wants: The chunks to read; ``nbytes`` is -1 if the length is not known.
            options: Bounds and preparation of the buffers.

        Raises:
            DamagedError: Some chunks have no whole place. All others were handed over.
            BackendError: Some chunks could not be read, and may be whole.
        """
        pending = iter(wants)
        few = list(islice(pending, _FEW + 1))
        if not few:
            return
        if self.backend.costly_requests and len(few) <= _FEW:
            few = self._read_without_index(few, options)
            if not few:
                return
        pending = chain(few, pending)
        view = self.recent_view()
        failed: list[_Failed] = []
        while window := list(islice(pending, _WINDOW)):
            view, bad = self._read_window(view, window, options, ask_store=not failed)
            failed += bad
        if failed:
            attempts = [unread for f in failed for unread in f.attempts]
            # A take notices by itself if a file is gone or too short, and a file that cannot be
            # read may be whole.
            self.index.note_damaged(
                (unread.wants[0].digest, unread.place)
                for unread in attempts
                if unread.failure.reason in (Reason.IMPOSSIBLE, Reason.CHANGED)
            )
            self.index.pack_lengths.forget([PackId(unread.place.pack) for unread in attempts])
            raise _error(self.backend.uri, failed)

    def _read_without_index(self, wants: list[Want], options: ReadOptions) -> list[Want]:
        """Read a few chunks by hints and parts of the index; return those that remain."""
        by_digest = _by_digest(wants)
        root = self.recent()
        for find in (partial(self._find_by_hints, root), partial(self.index.find_few, root)):
            places = find(list(by_digest))
            wanted_places = [(p, w) for p, w in zip(places, by_digest.values(), strict=True) if p]
            bad = {unread.wants[0].digest for unread in self._read_located(wanted_places, options)}
            by_digest = {
                d: s
                for (d, s), p in zip(by_digest.items(), places, strict=True)
                if p is None or d in bad
            }
            if not by_digest:
                return []
        return [want for want in wants if want.digest in by_digest]

    def _find_by_hints(self, root: Root, digests: list[Digest]) -> list[Place | None]:
        """Return the hinted places of some chunks; nothing if the index is known."""
        if self.index.knows(root):
            return [None] * len(digests)
        return [self._hints.find(self.index.cache, digest) for digest in digests]

    def _read_window(
        self, view: View, window: list[Want], options: ReadOptions, *, ask_store: bool
    ) -> tuple[View, list[_Failed]]:
        """Read some chunks; return the newest view that was used, and the chunks that failed."""
        failed = self._read_indexed(view, window, options)
        while failed and self.newest() != view.root:
            # A collector may have moved chunks. Those that have other places now are read there;
            # those that the newest root still places where they failed are damaged.
            view = self.view()
            moved_wants = [f.want for f in failed if self._has_moved(view, f)]
            if not moved_wants:
                break
            failed = [f for f in failed if not self._has_moved(view, f)]
            failed += self._read_indexed(view, moved_wants, options)
        if failed and ask_store:
            # The cached places may be wrong: read the index anew from the store, once.
            view = self.index.refresh(self.newest())
            failed = self._read_indexed(view, [f.want for f in failed], options)
        return view, failed

    def _has_moved(self, view: View, failed: _Failed) -> bool:
        if any(unread.place.codec == Codec.DELTA for unread in failed.attempts):
            # A base of it may have.
            return True
        attempts = {unread.place for unread in failed.attempts}
        return not attempts.issuperset(self.index.find_all(view, failed.want.digest))

    def _read_indexed(self, view: View, wants: list[Want], options: ReadOptions) -> list[_Failed]:
        """Read chunks where a view of the index has them; return those that failed everywhere."""
        by_digest = _by_digest(wants)
        failed: list[_Failed] = []
        wanted_places: list[Located] = []
        places = self.index.find(view, list(by_digest))
        for equal, place in zip(by_digest.values(), places, strict=True):
            if place is None:
                failed += [_Failed(w, []) for w in equal]
            else:
                wanted_places.append((place, equal))
        for unread in self._read_located(wanted_places, options):
            failed += self._read_other_places(view, unread)
        return failed

    def _read_other_places(self, view: View, unread: FailedRead) -> list[_Failed]:
        """Read a chunk at its other places until one is whole; return it if none is."""
        attempts = [unread]
        for place in self.index.find_all(view, unread.wants[0].digest):
            if place != unread.place:
                bad = self._read_located([(place, unread.wants)], WITHOUT_POOL)
                if not bad:
                    return []
                attempts += bad
        return [_Failed(want, attempts) for want in unread.wants]

    def _read_located(self, wanted_places: list[Located], options: ReadOptions) -> list[FailedRead]:
        """Read chunks from the cache, the others from the store; return those that failed there."""
        # Only of nodes the length is not known, and the host keeps those elsewhere.
        if self.chunk_cache is not None and all(wants[0].nbytes >= 0 for _, wants in wanted_places):
            deltas = [each for each in wanted_places if each[0].codec == _DELTA]
            others = [each for each in wanted_places if each[0].codec != _DELTA]
            wanted_places = self.chunk_cache.read(others, self.config.chunk_size, options)
            options = options._replace(keep=self.chunk_cache.keep)
            # What is cached of deltas is proven by their results alone. It may be wrong.
            failed = self._read_deltas(deltas, options, self.chunk_cache)
            wanted_places += [(unread.place, unread.wants) for unread in failed]
        return self.read_places(wanted_places, options)

    def read_places(
        self, places: list[Located], options: ReadOptions = DEFAULT_READ
    ) -> list[FailedRead]:
        """Read the chunks at these places in the store; return those that failed, and why."""
        deltas = [each for each in places if each[0].codec == _DELTA]
        others = [each for each in places if each[0].codec != _DELTA]
        failures = read_places(self.backend, self.config.chunk_size, others, options)
        return failures + self._read_deltas(deltas, options, None)

    def _read_deltas(
        self, deltas: list[Located], options: ReadOptions, chunk_cache: ChunkCache | None
    ) -> list[FailedRead]:
        """Read chunks at places of deltas, with what a cache has; return those that failed."""
        if not deltas:
            return []
        chunk_size = self.config.chunk_size
        link_options = WITHOUT_POOL._replace(keep=options.keep)

        def read_links(links: list[Located]) -> list[FailedRead]:
            if chunk_cache is not None:
                links = chunk_cache.read(links, chunk_size, WITHOUT_POOL)
            return read_places(self.backend, chunk_size, links, link_options)

        # One view for all: if a collector moves a base meanwhile, the caller reads again.
        view = cache(self.recent_view)
        reader = DeltaReader(
            read_links,
            partial(self._find_bases, view),
            lambda digest: self.places_of_base(digest, view),
            options.base,
        )
        one_by_one = options.budget is not None or options.readers == 0
        at_once = self.backend.in_flight if self.backend.costly_requests else cores()
        return reader.read(deltas, 1 if one_by_one else at_once)

    def _find_bases(self, view: Callable[[], View], digests: list[Digest]) -> list[Place | None]:
        """Return where the bases of some deltas lie, or None for each that is nowhere."""
        if self.backend.costly_requests and not self.index.knows(root := self.recent()):
            places = self.index.find_few(root, digests)
            if all(places):
                return places
        return [preferred(self.places_of_base(digest, view)) for digest in digests]

    def places_of_base(self, digest: Digest, view: Callable[[], View]) -> list[Place]:
        """Return all places of the base of a delta, as a view has them."""
        return self.index.find_all(view(), digest)

    def read_at(self, place: Place, digest: Digest, known: Mapping[Digest, bytes]) -> bytes | None:
        """Return a chunk or node if it can be read and verified at this place.

        Args:
            place: The place.
            digest: What lies there.
            known: Some chunks, on which it may stand as a delta.
        """

        def find_base(base: Digest) -> Fill | None:
            return partial(fill_from, known[base]) if base in known else None

        raws: dict[Digest, bytes] = {}
        want = Want(digest, -1, partial(_keep_copy, raws, digest), "")
        self.read_places([(place, [want])], WITHOUT_POOL._replace(base=find_base))
        return raws.get(digest)


def _try(look: Callable[[Backend], Root], backend: Backend) -> Root | CasnapError:
    """Look for a root; return the error if there is none, or it is damaged."""
    try:
        return look(backend)
    except (NotAStoreError, DamagedError) as e:
        return e


def _by_digest(wants: Iterable[Want]) -> dict[Digest, list[Want]]:
    """Return the wants for each chunk: equal chunks are read once."""
    by_digest: dict[Digest, list[Want]] = {}
    for want in wants:
        by_digest.setdefault(want.digest, []).append(want)
    return by_digest


def _keep_copy(copies: dict[Digest, bytes], digest: Digest, raw: memoryview) -> None:
    copies[digest] = bytes(raw)


def _error(uri: str, failed: list[_Failed]) -> CasnapError:
    wants = [f.want for f in failed]
    paths = tuple(sorted({w.path for w in wants if w.path}))
    lines = map(str, failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    hurt = f"; hurt: {', '.join(paths[:10])}{' …' if len(paths) > 10 else ''}" if paths else ""
    if any(w.target is not None for w in wants):
        hurt += "; these tensors may hold unverified bytes, so do not use them"
    message = f"{uri}: {'; '.join(lines)}{more}{hurt}"
    reasons = [{u.failure.reason for u in f.attempts} for f in failed]
    if all(Reason.UNREADABLE in each for each in reasons):
        return BackendError(f"{message}. The data may be whole: make it readable, then try again")
    if all(not each.isdisjoint(_MAY_BE_WHOLE) for each in reasons):
        return UnsupportedFormatError(f"{message}. The data may be whole: update casnap")
    advice = (
        f"`casnap check {uri}` says what is hurt; if you still have the data, take the same bytes "
        "again in this process, or after `casnap repair` in any, to store them anew"
    )
    return DamagedError(message, paths, advice)
