"""An open store: its roots, and its nodes and chunks, which are found by digest and verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from casnap.backends import Backend
from casnap.errors import (
    BackendError,
    CasnapError,
    DamagedError,
    UnsupportedFormatError,
    shell_word,
)
from casnap.format.codec import Codec
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of
from casnap.format.records import (
    NodeRef,
    PackId,
    Place,
    Root,
    Row,
    SealedSegment,
    SegmentRef,
    StoreConfig,
)
from casnap.runtime.buffers import fill_from
from casnap.runtime.threads import cores, mapped
from casnap.storage.commit_log.config import read_config
from casnap.storage.commit_log.roots import check_writable, read_root, roots_before
from casnap.storage.commit_log.settings import Settings
from casnap.storage.lookup.index import Index, IndexView
from casnap.storage.lookup.lookup_order import Left, Lookup, Lost, lookup_at
from casnap.storage.lookup.newest_root import RememberedRoot
from casnap.storage.lookup.older_roots import FilesThere, OlderRoot
from casnap.storage.packs.chunk_reads import (
    DEFAULT_READ,
    WITHOUT_POOL,
    FailedRead,
    Fill,
    Located,
    ReadOptions,
    Reason,
    Want,
    read_places,
)
from casnap.storage.reading.chunk_cache import ChunkCache
from casnap.storage.reading.table import Table

V = TypeVar("V")

# The most older roots to look at, to find a whole one.
_MOST_ROOTS = 1000
_DELTA = int(Codec.DELTA)
# How many chunks a fetch looks for at a time.
_WINDOW = 1 << 14
_NODES_BYTES = 32 << 20
_MAY_BE_WHOLE = {Reason.UNREADABLE, Reason.UNSUPPORTED}


class Repository:
    """An open store: its newest root, its index, its nodes and chunks.

    Args:
        backend: The backend of the store.
        config: The store's ``casnap.json``, if it was read before.
        lookup: Finds chunks and nodes; by default the usual lookup for this place.
        marks: Whether to put a marker, a file for people, for each snapshot.

    Attributes:
        backend: The backend of the store.
        config: The store's ``casnap.json``.
        lookup: Finds chunks and nodes.
        marks: Whether to put a marker, a file for people, for each snapshot.
        chunk_cache: The read cache that :meth:`fetch` uses; None for none.
        announces_at_once: Whether even short changes announce themselves to collectors. It is set
            once a collector has made a change of this process start again.
    """

    def __init__(
        self,
        backend: Backend,
        config: StoreConfig | None = None,
        lookup: Lookup | None = None,
        *,
        marks: bool = True,
    ) -> None:
        self.backend = backend
        self.config: StoreConfig = config or read_config(backend)
        self.lookup = lookup or lookup_at(backend, self.config)
        self.marks = marks
        self.chunk_cache: ChunkCache | None = None
        self.announces_at_once = False

    @classmethod
    def at(cls, backend: Backend, *, look_ahead: bool = False, marks: bool = True) -> Repository:
        """Open a remote store. If this host has seen the store before, this takes one round trip.

        Args:
            backend: The backend of the place.
            look_ahead: Whether to read the newest root now, instead of at its first use.
            marks: Whether to put a marker, a file for people, for each snapshot.

        Raises:
            NotAStoreError: There is no store, or its creation was cut off.
        """
        config, newest = RememberedRoot.at(backend, look_ahead=look_ahead)
        return cls(backend, config, lookup_at(backend, config, newest), marks=marks)

    @property
    def index(self) -> Index:
        """The index: the places of every chunk and node."""
        return self.lookup.index

    def check_writable(
        self, doing: str, root: Root | None = None, *, dry_run: bool = False
    ) -> None:
        """Check that this version may write to the store, and that its place honours put-if-absent.

        Args:
            doing: What the caller is about to do, in words, for the message.
            root: The root that the change begins from; by default a recent one.
            dry_run: Whether the caller only plans the change. Then only the version is checked.

        Raises:
            UnsupportedFormatError: The store uses a feature that this version cannot write.
            StoreError: The place does not honour put-if-absent, or this user may only read the
                store.
        """
        if not dry_run:
            self.backend.check_changes()
        root = root or self.recent()
        check_writable(self.backend.uri, root.write_features, doing)
        if not dry_run:
            self.check_put_if_absent()

    def check_put_if_absent(self) -> None:
        """Check that two writers cannot overwrite each other's roots at the place of the store.

        Raises:
            StoreError: The place does not honour put-if-absent, and the user does not vouch that no
                other process writes.
        """
        from casnap.storage.commit_log.put_if_absent_probe import check_put_if_absent

        check_put_if_absent(self.backend, self.config)

    def settings(self, root: Root) -> Settings:
        """Return the store's settings according to a root."""
        return Settings(root, self.backend)

    def newest(self) -> Root:
        """Return the newest root, which says what the store holds.

        Raises:
            StoreError: Another store has taken this place, or the store is gone.
        """
        return self.lookup.newest.look()

    def recent(self) -> Root:
        """Return the newest root; on a remote store perhaps one that was newest some seconds ago.

        Such a root is recent enough to begin a change, or to read from: if a read fails, newer
        roots are tried.
        """
        return self.lookup.newest.recent()

    def note_newest(self, root: Root) -> None:
        """Note a root that this process has just read or put, and which is the newest one."""
        self.lookup.newest.note(root)

    def observe_root(self, root: Root) -> None:
        """Note a root that another rank has just read.

        If this process knows a newer one, do nothing.
        """
        self.lookup.newest.observe(root)

    def has_taken(self, row: Row) -> bool:
        """Whether a snapshot was taken in this store.

        It is False for a copy of another snapshot.
        """
        return not row.origin[0] and self._has_committed(row.seq, row)

    def has_taken_origin_of(self, row: Row) -> bool:
        """Whether a snapshot of another store is a copy of a snapshot that was taken in this store.

        The row of the copy names a root number and a commit id. Roots are never removed, and commit
        ids are random. So if the root of this store with that number has that commit id, this store
        has taken the original. This also holds if a store was copied as a whole, and both stores go
        on taking snapshots.
        """
        store_id, seq = row.origin
        return store_id == self.config.store_id and seq >= 0 and self._has_committed(seq, row)

    def _has_committed(self, seq: int, row: Row) -> bool:
        try:
            return read_root(self.backend, seq).commit == row.commit
        except (FileNotFoundError, DamagedError):
            return False

    def read_at_newest(
        self, read: Callable[[Root], V], first_root: Callable[[], Root] | None = None
    ) -> V:
        """Read from the newest root.

        If a collector moves data meanwhile, read again from a newer root.

        Args:
            read: Reads from the store, given a root.
            first_root: Returns the root to begin with; by default the newest.

        Returns:
            The result of ``read``.

        Raises:
            DamagedError: The read failed, though no collector moved data: the store is damaged.
        """
        return self.lookup.newest.read(read, first_root)

    def view(self) -> IndexView:
        """Return the index according to the newest root."""
        return self.read_at_newest(self.index.view)

    def view_at(self, root: Root) -> IndexView:
        """Return the index according to a root.

        Only a function that :meth:`read_at_newest` calls with this root may call this.
        """
        return self.index.view(root)

    def recent_view(self, base_root: Root | None = None) -> IndexView:
        """Return the index according to a root; by default to a recent one."""
        return self.read_at_newest(self.index.view, lambda: base_root or self.recent())

    def read_table(
        self, look: Callable[[Table], V], note: Callable[[Root], object] = lambda _: None
    ) -> V:
        """Call a function with the table of the newest root, and return its result.

        On a disk, this first checks that all segments exist, since reading a snapshot needs them.
        On a remote store, a segment is looked for only when it is needed.

        Args:
            look: The function.
            note: Called with each root whose table is read.

        Raises:
            DamagedError: A part of the table, or a segment, is missing or damaged.
        """

        def read(root: Root) -> V:
            note(root)
            if self.backend.costs.free_looks:
                self.index.check_there(root)
            return look(self.table(root))

        return self.read_at_newest(read)

    def as_of_whole_root(self) -> Repository | None:
        """Return the store as of an older root, for reading, if the newest root is not whole.

        A root is whole if all files that it names exist. The newest whole root with snapshots is
        taken: a run that sees an empty store would begin from the start.

        Returns:
            The store; None if the newest root is whole, or if no older root with snapshots is
            whole.
        """
        newest = self.newest()
        before = islice(roots_before(self.backend, newest.seq), _MOST_ROOTS)
        older_roots = (root for root in before if root.segments)
        # Without an older root, spare the listing of all packs.
        first = next(older_roots, None)
        if first is None:
            return None
        files = FilesThere(self.backend, self.index)
        # A file that cannot be looked at, such as a link, is not missing: no root stands in then.
        with suppress(DamagedError, BackendError):
            lacked = files.lacking(newest)
            if lacked is not None:
                roots = chain([first], older_roots)
                stores = (self._as_of(newest, lacked, root, files) for root in roots)
                return next((store for store in stores if store is not None), None)
        return None

    def _as_of(self, newest: Root, lacked: str, root: Root, files: FilesThere) -> Repository | None:
        """Return the store as of an older root; None if the root is not whole, or is empty.

        Args:
            newest: The newest root, for which the older root stands in.
            lacked: The key of a file that the newest root names, and that is missing or too short.
            root: The older root.
            files: Tells which files exist.
        """
        older = OlderRoot(self.backend, self.config, newest, lacked, root)
        lookup = lookup_at(self.backend, self.config, older)
        store = Repository(self.backend, self.config, lookup, marks=self.marks)
        store.chunk_cache = self.chunk_cache
        with suppress(DamagedError):
            if files.lacking(root) is None and list(store.table(root).items_in()):
                return store
        return None

    # --- packs ---

    def segment(self, ref: SegmentRef) -> SealedSegment:
        """Return a segment of the index, from this host's cache or from the store.

        Raises:
            DamagedError: The segment is missing or damaged.
        """
        return SealedSegment(*self.index.sealed_or_kept(ref))

    def has_to_list_packs(self) -> bool:
        """Whether this process knows no pack's length yet. One rank may then list them for all."""
        return self.index.pack_lengths.has_to_list()

    def list_packs_for(self, ranks: int, total: int) -> dict[PackId, int]:
        """List the packs for many ranks, unless it takes fewer requests if each rank looks itself.

        Args:
            ranks: How many ranks will look at packs.
            total: About how many packs the store has.

        Returns:
            The length of each pack; empty if each rank should look for itself.
        """
        return self.index.pack_lengths.listed_for(ranks, total)

    def note_packs(self, lengths: Mapping[PackId, int]) -> None:
        """Note the lengths of packs that another rank has listed."""
        self.index.pack_lengths.note(lengths)

    # --- nodes ---

    def node(self, digest: Digest, hint: Place | None = None) -> bytes:
        """Return a verified tree node, from this host's cache or from the store.

        Args:
            digest: The digest of the node.
            hint: The place where the node may be, or None.

        Raises:
            DamagedError: The node is missing, or damaged wherever it lies.
        """
        if len(digest) != DIGEST_SIZE:
            raise DamagedError(
                f"{self.backend.uri}: {digest.hex()[:80]!r} is not the digest of a node"
            )
        node, hint = self.lookup.node(digest, hint)
        if node is not None:
            return node
        copies: dict[Digest, bytes] = {}
        want = Want(digest, -1, partial(_keep_copy, copies, digest), "")
        self.fetch([want], hints=None if hint is None else {digest: hint})
        self.index.cache.keep_nodes(copies.items())
        return copies[digest]

    def cache_nodes(self, digests: list[Digest], hints: Iterable[NodeRef] = ()) -> None:
        """Read the nodes that are not cached, and cache them, for later calls of :meth:`node`.

        Args:
            digests: The digests of the nodes.
            hints: Some of these nodes, with the places where they may be. In a bucket, the packs of
                nodes there are read whole, many at a time.

        Raises:
            DamagedError: Some nodes are missing, or damaged wherever they lie. All others are
                cached.
        """
        error: DamagedError | None = None
        if self.backend.costs.waiting:
            of_packs = {ref.hint.pack: ref for ref in hints if ref.hint is not None}.values()
            for _ in mapped(self._look_at, of_packs, self.backend.in_flight):
                pass
        uncached = self.index.cache.lacking(digests)
        places = self.find(uncached) if uncached else []
        while uncached:
            group: dict[Digest, bytes] = {}
            nbytes = 0
            while uncached and nbytes < _NODES_BYTES:
                group[uncached.pop()] = b""
                place = places.pop()
                nbytes += place.raw_size if place is not None else 0
            try:
                self.fetch([Want(d, -1, partial(_keep_copy, group, d), "") for d in group])
            except DamagedError as e:
                error = e
            self.index.cache.keep_nodes([each for each in group.items() if each[1]])
        if error is not None:
            raise error

    def _look_at(self, ref: NodeRef) -> None:
        self.lookup.node(Digest(ref.digest), ref.hint)

    def cached_node(self, digest: Digest) -> bytes | None:
        """Return a node from this host's cache; None if the cache lacks it."""
        return self.index.cache.node(digest)

    @property
    def cache_identity(self) -> bytes:
        """Bytes that identify this host's and user's cache of nodes: no other cache has them."""
        return self.index.cache.identity

    def keep_nodes(self, nodes: Iterable[bytes]) -> None:
        """Cache nodes that another rank has read, given their bytes."""
        self.index.cache.keep_nodes([(digest_of(node), node) for node in nodes])

    def table(self, root: Root) -> Table:
        """Return the table of snapshots of a root."""
        top = None if root.table is None else Digest(root.table.digest)
        if root.table is not None and top is not None:
            self.node(top, root.table.hint)
        return Table(top, self.node, self._cache_rows)

    def _cache_rows(self, digests: list[Digest]) -> None:
        """Cache nodes of the table.

        In a bucket, their packs are read whole: these have the manifests of the rows, too.
        """
        uncached = self.index.cache.lacking(digests)
        if not uncached:
            return
        packs = self.find(uncached) if self.backend.costs.waiting else []
        hints = (NodeRef(d, place) for d, place in zip(uncached, packs, strict=False))
        self.cache_nodes(uncached, hints)

    # --- chunks ---

    def find(self, digests: list[Digest], view: IndexView | None = None) -> list[Place | None]:
        """Return, for each chunk, a place from the index, or None.

        Args:
            digests: The digests of the chunks.
            view: The index according to a root; by default to a recent one.
        """
        return self.index.find(view or self.recent_view(), digests)

    def fetch(
        self,
        wants: Iterable[Want],
        options: ReadOptions = DEFAULT_READ,
        hints: Mapping[Digest, Place] | None = None,
    ) -> None:
        """Read chunks, verify each against its digest, and pass them to their sinks.

        A chunk that is wanted several times is read once. Chunks near each other in a pack are read
        together. :mod:`casnap.storage.lookup.lookup_order` has the order in which places are tried.

        Args:
            wants: The chunks to read; ``nbytes`` is -1 if the length is not known.
            options: How to read.
            hints: Places where some of the chunks may be.

        Raises:
            DamagedError: Some chunks are missing, or damaged wherever they lie. All other chunks
                were passed to their sinks.
            BackendError: Some chunks could not be read, and may be whole.
            UnavailableError: Nothing can be read now. Not all chunks were tried.
        """
        pending, left = iter(wants), Left(hints or {})
        while window := list(islice(pending, _WINDOW)):
            left.add(window)
            for rung in self.lookup.rungs():
                for step in rung(left):
                    how = WITHOUT_POOL if step.is_alone else options
                    left.note(step, self._read_located(step.places, how))
                if not left:
                    break
            left.give_up()
        if left.lost:
            self.lookup.note_damage(unread for _, attempts in left.lost for unread in attempts)
            raise _error(self.backend.uri, left.lost)

    def _read_located(self, wanted_places: list[Located], options: ReadOptions) -> list[FailedRead]:
        """Read chunks from the read cache, or else from the store; return the failed reads."""
        # Only nodes have no known length, and this host caches nodes elsewhere.
        if self.chunk_cache is not None and all(wants[0].nbytes >= 0 for _, wants in wanted_places):
            deltas = [each for each in wanted_places if each[0].codec == _DELTA]
            others = [each for each in wanted_places if each[0].codec != _DELTA]
            # The cache keeps only what was verified on the host.
            options = options._replace(settle=None)
            wanted_places = self.chunk_cache.read(others, self.config.chunk_size, options)
            options = options._replace(keep=self.chunk_cache.keep)
            # A cached delta may be wrong, since only the chunk that results is verified. Then read
            # all of its chain from the store.
            failed = self._read_deltas(deltas, options, self.chunk_cache)
            wanted_places += [(unread.place, unread.wants) for unread in failed]
        return self.read_places(wanted_places, options)

    def read_places(
        self, places: list[Located], options: ReadOptions = DEFAULT_READ
    ) -> list[FailedRead]:
        """Read chunks at places in the store; return the failed reads."""
        deltas = [each for each in places if each[0].codec == _DELTA]
        others = [each for each in places if each[0].codec != _DELTA]
        failures = read_places(self.backend, self.config.chunk_size, others, options)
        return failures + self._read_deltas(deltas, options, None)

    def _read_deltas(
        self, deltas: list[Located], options: ReadOptions, chunk_cache: ChunkCache | None
    ) -> list[FailedRead]:
        """Read chunks at places of deltas; return the failed reads.

        Args:
            deltas: The places, each with the ``Want`` objects for its chunk.
            options: How to read.
            chunk_cache: The read cache to ask first; None for none.
        """
        if not deltas:
            return []
        from casnap.storage.reading.delta_reads import DeltaReader

        chunk_size = self.config.chunk_size
        link_options = WITHOUT_POOL._replace(keep=options.keep)

        def read_links(links: list[Located]) -> list[FailedRead]:
            if chunk_cache is not None:
                links = chunk_cache.read(links, chunk_size, WITHOUT_POOL)
            return read_places(self.backend, chunk_size, links, link_options)

        reader = DeltaReader(read_links, self.lookup.bases(), options.base)
        one_by_one = options.budget is not None or options.readers == 0
        at_once = self.backend.in_flight if self.backend.costs.waiting else cores()
        return reader.read(deltas, 1 if one_by_one else at_once)

    def read_at(self, place: Place, digest: Digest, known: Mapping[Digest, bytes]) -> bytes | None:
        """Read and verify a chunk or node at one place; return None if it is not whole there.

        Args:
            place: The place.
            digest: The digest of the chunk or node.
            known: Chunks that the caller has, by digest. If the chunk is stored as a delta of one
                of them, its base need not be read.
        """

        def find_base(base: Digest) -> Fill | None:
            return partial(fill_from, known[base]) if base in known else None

        raws: dict[Digest, bytes] = {}
        want = Want(digest, -1, partial(_keep_copy, raws, digest), "")
        self.read_places([(place, [want])], WITHOUT_POOL._replace(base=find_base))
        return raws.get(digest)


def _keep_copy(copies: dict[Digest, bytes], digest: Digest, raw: memoryview) -> None:
    copies[digest] = bytes(raw)


def _why(lost: Lost) -> str:
    """Return a line for a message: which chunk is lost, and why the first read of it failed."""
    reason = Reason.NOWHERE.value
    if lost.attempts:
        reason = f"{lost.attempts[0].failure} (pack {lost.attempts[0].place.pack.hex()})"
    return f"chunk {lost.want.digest.hex()}: {reason}"


def _error(uri: str, failed: list[Lost]) -> CasnapError:
    wants = [f.want for f in failed]
    paths = tuple(sorted({w.path for w in wants if w.path}))
    lines = map(_why, failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    hurt = f"; hurt: {', '.join(paths[:10])}{' …' if len(paths) > 10 else ''}" if paths else ""
    if any(w.target is not None or w.on_device is not None for w in wants):
        hurt += "; these tensors may hold unverified bytes, so do not use them"
    message = f"{uri}: {'; '.join(lines)}{more}{hurt}"
    reasons = [{u.failure.reason for u in f.attempts} for f in failed]
    if all(Reason.UNREADABLE in each for each in reasons):
        return BackendError(f"{message}. The data may be whole: make it readable, then try again")
    if all(not each.isdisjoint(_MAY_BE_WHOLE) for each in reasons):
        return UnsupportedFormatError(f"{message}. The data may be whole: update casnap")
    advice = (
        f"`casnap check {shell_word(uri)}` says what is hurt; if you still have the data, take the "
        "same bytes again to store them anew: in this process, or after `casnap repair` in any "
        "process"
    )
    return DamagedError(message, paths, advice)
