"""A store: many snapshots at one URI, which share their chunks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from casnap.backends import Backend
from casnap.errors import (
    BackendError,
    MirrorError,
    NotAStoreError,
    SnapshotNotFoundError,
    StoreError,
)
from casnap.format.names import check_name, name_text
from casnap.format.records import CONFIG_KEY, DEFAULT_CHUNK_SIZE, Row
from casnap.maintenance.missing_folders import MissingFoldersChange
from casnap.mirror.notes import (
    detach_mirror,
    is_newer_here,
    notes_of_renamed,
)
from casnap.runtime.environment import given_path, local_path, threads_asked
from casnap.runtime.nesting import refuse_nested_take
from casnap.runtime.progress import Progress
from casnap.runtime.units import (
    Duration,
    Size,
    bytes_if_given,
    count_if_given,
    seconds_if_given,
    seconds_of,
)
from casnap.storage.log.settings import (
    CODEC,
    check_codec,
    gc_settings,
    settings_of,
)
from casnap.storage.places.creation import chunk_size_of
from casnap.storage.places.location import Location, Use, has_object
from casnap.storage.places.other_formats import hint_in
from casnap.storage.places.uris import joined, name_below
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.markers import unmark
from casnap.storage.snapshots.opening import locate, open_at
from casnap.storage.snapshots.published import SETTING as PUBLISHED
from casnap.storage.snapshots.published import (
    TagMove,
    check_movable,
    publish_tag,
    tag_moves,
    tagged_row,
)
from casnap.storage.snapshots.retention import (
    PruneChange,
    PruneReport,
    Retention,
    RetentionChange,
    check_retention,
    prune,
    unmark_pruned,
)
from casnap.storage.snapshots.rewinding import all_rewound_error, rewind
from casnap.storage.snapshots.runs import in_commit_order
from casnap.storage.snapshots.table import (
    Table,
    change_settings,
    change_table,
    row_edit,
    row_of,
    snapshots_in,
    with_tags,
    without_tags,
)
from casnap.storage.snapshots.thinning import all_thinned_error, check_keys, check_rules, thin
from casnap.storage.writing.hooks import CommitHooks

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from casnap.files.file_reports import ImportReport
    from casnap.maintenance.check import CheckReport
    from casnap.maintenance.diff import Diff
    from casnap.maintenance.gc import GcReport
    from casnap.maintenance.repair import RepairReport
    from casnap.maintenance.usage import Usage
    from casnap.mirror.mirror import Mirror
    from casnap.mirror.status import MirrorOptions
    from casnap.ranks.comm import Comm
    from casnap.serving.options import FollowEvent, PullOptions, PullReport
    from casnap.serving.pull import Source
    from casnap.snapshot import PendingSnapshot, Snapshot
    from casnap.state.stateful import AppState
    from casnap.take.attempts import OnError
    from casnap.take.capture import StateSource
    from casnap.take.options import AsyncTakeArguments, TakeArguments, TakeOptions
    from casnap.take.rank_commit import TakeResult
    from casnap.transfer.copy_jobs import CopyReport

_log = logging.getLogger("casnap")
V = TypeVar("V")
_FOR_MODULES = {
    *("begin_take", "folder", "full_name", "hooks", "inner_name", "is_new"),
    *("local_name", "open_store", "outer_name", "read", "row", "take_from"),
}


class Store:
    """Many snapshots at one place. Each chunk is stored once.

    Args:
        uri: A folder, ``s3://bucket/run1``, ``gs://bucket/run1``, another URI of fsspec's,
            ``memory://name``, or a :class:`casnap.backends.Backend`. A folder below an existing
            store opens a view of that store, and so does ``s3://bucket/ckpts//run1``. The full
            names of all snapshots in the view begin with the rest of the path.
        create: If there is no store, make one with the first take, import or copy to it, or with
            :meth:`make`. Reading makes none: where there is no store, there is no snapshot. With
            ``mirror``, the store is made at once. Until it is made, a path below it does not lead
            to it: call :meth:`make` before ``Snapshot.take`` of a path, or pass it ``store=``.
        chunk_size: For a new store: a power of two from 64 KiB to 64 MiB, such as ``"4MiB"``.
        codec: For a new store: how chunks are stored. With "auto", the default, takes store them as
            they are; on a disk, :meth:`gc` makes what older snapshots hold smaller, and mirrors,
            and copies into a bucket, get deltas. With "zstd", takes compress, and both others
            hold anywhere. "raw": nothing is ever compressed. :meth:`configure` changes it.
        storage_options: How to reach a remote store: what s3fs, gcsfs or another file system of
            fsspec takes, such as ``{"endpoint_url": ...}``. It is neither stored nor shown.
        exclusive: You make sure that no other process writes to this store. This is asked
            only where the server cannot keep two writers apart (no put-if-absent).
        markers: Put ``<name>/casnap-snapshot.json`` for each snapshot, so that ``ls``,
            ``os.path.exists`` and ``fsspec`` see the snapshot; remove it with the snapshot. On a
            remote store each is one request.
        mirror: The path or URI of another store that gets each snapshot, in the background. It is
            made if there is none. A mirror that fails never fails a take, or makes it wait.
            See ``docs/object-stores.md``.
        mirror_options: How the mirror is reached, like ``storage_options``.
        mirror_retention: Which snapshots to keep at the mirror; by default all.
        cache_bytes: For a remote store: keep the chunks that are read on a disk of this host, up to
            so many bytes for all stores together, such as ``"50GB"``, so that they are fetched
            once. 0: no cache. By default ``CASNAP_CACHE_BYTES`` of the environment counts; without
            it there is no cache.
        threads: How many threads of each step of a take may run, unless the take itself says; see
            :meth:`Snapshot.take`. By default ``CASNAP_THREADS`` of the environment counts.

    Raises:
        NotAStoreError: There is no store, and ``create`` is False.
        UnsupportedFormatError: A newer casnap made the store.
        StoreError: A store cannot be made at this place, or cannot be reached; or the folder of the
            cache is another user's, or on a network file system.
        ValueError: ``storage_options`` or ``cache_bytes`` were given for a store on this machine,
            or options of a mirror without ``mirror``; or the codec is unknown.
        MirrorError: The mirror is the wrong store, or the store has another one.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Backend,
        *,
        create: bool = True,
        chunk_size: Size = DEFAULT_CHUNK_SIZE,
        codec: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        exclusive: bool = False,
        markers: bool = True,
        mirror: str | os.PathLike[str] | Backend | None = None,
        mirror_options: Mapping[str, Any] | None = None,
        mirror_retention: Retention | None = None,
        cache_bytes: Size | None = None,
        threads: int | None = None,
    ) -> None:
        threads = count_if_given("threads", threads)
        place = locate(uri, storage_options, Use(may_take=create))
        opening = partial(
            open_at,
            chunk_size=chunk_size_of(chunk_size),
            codec=None if codec is None else check_codec(codec),
            exclusive=exclusive,
            cache_bytes=bytes_if_given("cache_bytes", cache_bytes, least=0),
            markers=markers,
        )
        self._begin(
            place.backend if isinstance(uri, Backend) else given_path(uri),
            place,
            opening,
            create,
            threads or threads_asked(),
            _mirror_options(mirror, mirror_options, mirror_retention),
        )
        if mirror is not None and create:
            self._open(place, create=True)
        else:
            self._look()

    # --- the store, which may not be there yet ---

    def _begin(
        self,
        uri: str | Backend,
        place: Location,
        opening: partial[tuple[Repository, bool]],
        create: bool,
        threads: int | None,
        mirror_options: MirrorOptions | None,
    ) -> None:
        """Note what the constructor was given. No store is open yet."""
        self._uri = uri
        self._place = place
        self._opening = opening
        self._create = create
        self._threads = threads
        self._mirror_options = mirror_options
        self._open_store: Repository | None = None
        self._mirror: Mirror | None = None
        self.is_new = False

    def _open(self, place: Location, *, create: bool, start_mirror: bool = True) -> Repository:
        """Open the store, or make it."""
        open_store, self.is_new = self._opening(place, create=create)
        options = self._mirror_options
        mirror = None if options is None else _mirror_of(open_store, place.name, options)
        self._open_store, self._mirror = open_store, mirror
        self._place = place._replace(exists=True)
        if mirror is not None and start_mirror:
            mirror.start()
        return open_store

    def _locate(self) -> Location:
        """Return where the store is, or would be; a remote one is not asked for that."""
        if self._open_store is not None or self._place.backend.costly_requests:
            return self._place
        # One above may have been made.
        place = locate(self._uri, None, Use(may_take=self._create))
        return place._replace(exists=place.exists and has_object(place.backend, CONFIG_KEY))

    def _look(self) -> Repository | None:
        """Open the store; return None if there is none yet, and it may be made."""
        if self._open_store is None:
            place = self._locate()
            if not self._create or place.exists:
                # If the making of the store was cut off, this finishes it.
                self._open(place, create=self._create)
            elif place.backend.costly_requests:
                with suppress(NotAStoreError):
                    self._open(place, create=False)
        return self._open_store

    def _at_mirror(self) -> Store | None:
        """Return the store at the mirror, open; None if there is no mirror.

        Raises:
            StoreError: It cannot be used, or not be reached just now.
        """
        # A store that is still to be made has no mirror: with one, it is made at once.
        if self._mirror is None:
            return None
        destination = self._mirror.destination()
        return store_of(destination.store, destination.prefix)

    def _folder(self, prefix: str | None) -> Path | None:
        """Return the folder of this machine that snapshots are, or would be, marked in."""
        place = self._locate()
        folder = place.backend.folder
        return None if folder is None else folder / self.folder(prefix)

    def make(self) -> Store:
        """Make the store now, if there is none; return this object.

        A take does so by itself. A run that calls this when it starts learns at once if no store
        can be made at its place.

        Raises:
            StoreError: A store cannot be made at this place, or the one that the path leads to is
                another user's.
        """
        place = self._locate()
        place.backend.check_changes()
        if self._open_store is None:
            self._open(place, create=self._create)
        return self

    @property
    def open_store(self) -> Repository:
        """The open store, for the modules that do the work.

        Raises:
            NotAStoreError: There is none yet.
        """
        # If there is none, opening it says so.
        return self._look() or self._open(self._locate(), create=False)

    def whole(self) -> Store:
        """Return the whole store that this is a view of."""
        return store_of(self.open_store, threads=self._threads) if self.prefix else self

    # --- properties ---

    @property
    def uri(self) -> str:
        """The URI of the store, and the prefix of this view."""
        place = self._locate()
        return joined(place.backend.uri, place.name, is_view=True)

    @property
    def prefix(self) -> str:
        """The beginning of the full names of all snapshots in this view; empty for a store."""
        return self._locate().name

    @property
    def id(self) -> str:
        """The id of the store: 32 hex digits. Every store has another one."""
        return self.open_store.config.store_id

    @property
    def chunk_size(self) -> int:
        """The size of the largest chunks, in bytes."""
        return self.open_store.config.chunk_size

    @property
    def requests(self) -> dict[str, int]:
        """How many requests this object has made, by kind; empty for a store on this machine."""
        return dict(self._locate().backend.requests)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def __dir__(self) -> list[str]:
        """Leave out, for completion, what is for casnap's own modules."""
        return [name for name in super().__dir__() if name not in _FOR_MODULES]

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process open the store anew; the pickle holds the storage options."""
        opening = self._opening
        if self._open_store is not None:
            cache = self._open_store.chunk_cache
            opening = partial(opening, cache_bytes=0 if cache is None else cache.nbytes)
        is_open = self._open_store is not None
        beginning = (self._uri, self._place, opening, self._create, self._threads)
        return _unpickled, ((*beginning, self._mirror_options), is_open)

    # --- names ---

    def full_name(self, name: str) -> str:
        """Return the full name of a snapshot: the prefix of this view, then the name.

        Raises:
            InvalidNameError: The name cannot be used.
        """
        return check_name(self.outer_name(self.local_name(name)))

    def local_name(self, name: str) -> str:
        """Return the name in this view that a name means, or the path or URI of a snapshot in it.

        Raises:
            InvalidNameError: The name cannot be used, or is a path that leads elsewhere.
        """
        return check_name(self._without_path(name))

    def _without_path(self, name: object) -> str:
        text = name_text(name)
        place = self._locate()
        given = self._uri if isinstance(self._uri, str) else place.backend.uri
        return name_below(text, given, joined(place.backend.uri, place.name, is_view=True))

    def outer_name(self, name: str) -> str:
        """Return the full name for a name that is known to be valid."""
        prefix = self.prefix
        return f"{prefix}/{name}" if prefix else name

    def inner_name(self, full: str) -> str:
        """Return a full name without the prefix of this view, which it begins with."""
        return full[len(self.prefix) + 1 :] if self.prefix else full

    def folder(self, prefix: str | None) -> str:
        """Return the full name of a folder of this view; "" for the whole store.

        Raises:
            InvalidNameError: No snapshot can be below a folder of this name.
        """
        inner = self._without_path("" if prefix is None else prefix)
        return self.outer_name(check_name(inner)) if inner.strip("/") else self.prefix

    def path_of(self, name: str) -> str:
        """Return the path or URI of a snapshot."""
        return joined(self.uri, name)

    # --- snapshots ---

    @overload
    def take(
        self,
        app_state: AppState,
        name: str,
        *,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[TakeArguments],
    ) -> Snapshot: ...

    @overload
    def take(
        self,
        app_state: AppState,
        name: str,
        *,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        on_error: OnError,
        **options: Unpack[TakeArguments],
    ) -> Snapshot | None: ...

    def take(
        self,
        app_state: AppState,
        name: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        progress: Progress | None = None,
        retention: Retention | None = None,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        per_rank: Sequence[str] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
        on_error: OnError = "raise",
    ) -> Snapshot | None:
        """Take a snapshot. :meth:`Snapshot.take` describes the arguments, and what it returns."""
        from casnap.ranks.joining import join
        from casnap.state.stateful import check_order
        from casnap.take.attempts import Attempt
        from casnap.take.capture import LiveState
        from casnap.take.options import TakeOptions

        refuse_nested_take()
        check_order("store.take(app_state, name)", app_state, name)
        name = self.local_name(name)
        options = TakeOptions(
            metadata=metadata,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            progress=progress,
            retention=retention,
            replicated=replicated,
            per_rank=per_rank,
            threads=threads,
            attempt=Attempt(self.path_of(name), on_error),
        )
        comm = join(pg, timeout, f"the take of {self.full_name(name)!r}")

        def take() -> Snapshot:
            with comm.reporting_errors():
                self.make()
            return self.take_from(comm, lambda: LiveState(app_state), name, options, pg)

        return options.attempt.run(take, lambda _: None)

    @overload
    def async_take(
        self,
        app_state: AppState,
        name: str,
        *,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[AsyncTakeArguments],
    ) -> PendingSnapshot: ...

    @overload
    def async_take(
        self,
        app_state: AppState,
        name: str,
        *,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        on_error: OnError,
        **options: Unpack[AsyncTakeArguments],
    ) -> PendingSnapshot[Snapshot | None]: ...

    def async_take(
        self,
        app_state: AppState,
        name: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        max_staging_bytes: Size | None = None,
        max_pending: int = 1,
        progress: Progress | None = None,
        retention: Retention | None = None,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        per_rank: Sequence[str] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
        on_error: OnError = "raise",
    ) -> PendingSnapshot[Snapshot | None]:
        """Take a snapshot in the background, as :meth:`Snapshot.async_take` does."""
        from casnap.ranks.joining import join
        from casnap.snapshot import PendingSnapshot
        from casnap.state.stateful import check_order
        from casnap.take.attempts import Attempt
        from casnap.take.capture import LiveState
        from casnap.take.options import TakeOptions

        refuse_nested_take()
        check_order("store.async_take(app_state, name)", app_state, name)
        name = self.local_name(name)
        options = TakeOptions(
            metadata=metadata,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            max_staging_bytes=bytes_if_given("max_staging_bytes", max_staging_bytes, least=0),
            max_pending=max_pending,
            progress=progress,
            retention=retention,
            replicated=replicated,
            per_rank=per_rank,
            threads=threads,
            attempt=Attempt(self.path_of(name), on_error),
        )
        comm = join(pg, timeout, f"the async_take of {self.full_name(name)!r}")

        def begin() -> PendingSnapshot:
            with comm.reporting_errors():
                self.make()
            return self.begin_take(comm, LiveState(app_state), name, options, pg)

        return options.attempt.run(begin, partial(PendingSnapshot.not_begun, self.path_of(name)))

    def take_from(
        self,
        comm: Comm,
        source: Callable[[], StateSource],
        name: str,
        options: TakeOptions,
        pg: Any = None,
    ) -> Snapshot:
        """Take a snapshot together with other ranks, for :meth:`take` and integrations.

        Args:
            comm: The ranks. At the end, this leaves them.
            source: Returns the state of this rank.
            name: The snapshot's name.
            options: How to take it.
            pg: The process group of the snapshot that is returned.
        """
        from casnap.snapshot import Snapshot
        from casnap.take.take import take

        with comm:
            full = self.full_name(name)
            options = self._with_settings(options)
            result = take(self.open_store, full, source(), options, comm)
        return Snapshot.of(
            self, self.local_name(name), result.row, pg, result.requests, result.freed_bytes
        )

    def begin_take(
        self,
        comm: Comm,
        source: StateSource,
        name: str,
        options: TakeOptions,
        pg: Any = None,
    ) -> PendingSnapshot:
        """Begin a take together with other ranks, for :meth:`async_take` and integrations.

        Args:
            comm: The ranks. At its end, the take leaves them.
            source: The state of this rank.
            name: The snapshot's name.
            options: How to take it.
            pg: The process group of the snapshot that :meth:`PendingSnapshot.wait` returns.
        """
        from casnap.snapshot import PendingSnapshot, Snapshot
        from casnap.take.take import async_take

        full = self.full_name(name)
        options = self._with_settings(options)
        pending = async_take(self.open_store, full, source, options, comm)

        def stored(result: TakeResult) -> Snapshot:
            measured = result.requests, result.freed_bytes
            return Snapshot.of(self, self.local_name(name), result.row, pg, *measured)

        return PendingSnapshot(self.path_of(name), pending, stored)

    def _with_settings(self, options: TakeOptions) -> TakeOptions:
        """Add the settings of the store to the options of a take."""
        return replace(options, hooks=self.hooks, threads=options.threads or self._threads)

    @property
    def hooks(self) -> CommitHooks:
        """What goes with each commit to the open store: for its mirror, and for its disk."""
        hooks = _disk_hooks(self.open_store)
        if self._mirror is None:
            return hooks
        return replace(hooks, notes=self._mirror.notes, on_commit=self._mirror.wake)

    def row(self, name: str) -> Row:
        """Return the row that the store's table has for a snapshot.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
        """
        name = self.local_name(name)
        full = self.full_name(name)
        if self._look() is None:
            raise SnapshotNotFoundError(
                f"there is no snapshot {name!r}: {self.uri} is not a store yet; the "
                "first take to it makes one"
            )

        return self.read(lambda table: row_of(table, full, self.open_store.backend))

    def read(self, look: Callable[[Table], V]) -> V:
        """Call a function with the newest table, and return its result."""
        open_store = self.open_store
        return open_store.read_at_newest(lambda root: look(open_store.table(root)))

    def __getitem__(self, name: str) -> Snapshot:
        """Return a snapshot by name, or raise :class:`SnapshotNotFoundError`.

        One that this store does not have is looked for at its mirror.
        """
        from casnap.snapshot import Snapshot

        name = self.local_name(name)
        try:
            return Snapshot.of(self, name, self.row(name))
        except SnapshotNotFoundError:
            mirror_store = self._at_mirror()
            if mirror_store is None:
                raise
        seq = mirror_store.open_store.newest().seq
        snapshot = Snapshot.of(mirror_store, name, mirror_store.row(name))
        self._note_returned(snapshot, seq)
        return snapshot

    def _note_returned(self, snapshot: Snapshot, seq: int) -> None:
        """Note that a snapshot of the mirror is returned: what is taken here then follows it.

        Args:
            snapshot: It.
            seq: The number of the newest root of the mirror before it was looked up.
        """
        if self._mirror is not None:
            self._mirror.note_returned(snapshot.name, max(seq, snapshot.row.seq))

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str | os.PathLike):
            return False
        try:
            self.row(name_text(name))
        except SnapshotNotFoundError:
            return False
        return True

    def snapshots(self, prefix: str | None = None) -> list[Snapshot]:
        """Return all snapshots, or those below a prefix, in the order of their commits."""
        from casnap.snapshot import Snapshot

        folder = self.folder(prefix)
        if self._look() is None:
            return []
        rows = self.read(lambda table: list(snapshots_in(table, folder)))
        return [
            Snapshot.of(self, self.inner_name(name), row) for name, row in in_commit_order(rows)
        ]

    def latest(self, prefix: str | None = None, *, thinned: bool = False) -> Snapshot | None:
        """Return the snapshot that was committed last, or None if there is no snapshot.

        Those that were thinned are passed over, since nothing can resume from them; and those that
        their run went back from (:meth:`rewind`). If only such ones are left, that is an error.

        If there is none, but a checkpoint of another form right in that folder, a warning is
        logged that says so.

        With a mirror, the last ones of both sides are compared. If this store holds the last one of
        the mirror too, or continues the run that it is of, its own last one is the newest. If
        another store has continued the run since, that one's is. Between two runs, the time that
        the takes noted decides. If the mirror cannot be reached, this store's last one is
        returned, with a warning.

        Args:
            prefix: Only below this folder.
            thinned: Return a thinned one too, for its weights.

        Raises:
            StoreError: This store has no snapshot, and its mirror cannot be reached.
            SnapshotError: All snapshots were thinned, or their runs went back from them.
        """
        newest, last = self._newest(prefix, thinned=thinned)
        if newest is None and last is not None:
            raise (all_rewound_error if last.row.is_rewound else all_thinned_error)(last.path)
        if newest is None:
            folder = self._folder(prefix)
            if folder is not None and (hint := hint_in(folder)):
                _log.warning("%s", hint)
        return newest

    def _newest(
        self, prefix: str | None, *, thinned: bool
    ) -> tuple[Snapshot | None, Snapshot | None]:
        """Return the snapshot to resume from, and the last one, of whatever kind: of one look."""
        snapshots = self.snapshots(prefix)
        last = snapshots[-1] if snapshots else None
        snapshots = [s for s in snapshots if thinned or not s.row.is_thinned]
        newest = next((s for s in reversed(snapshots) if not s.row.is_rewound), None)
        try:
            mirror_store = self._at_mirror()
            if mirror_store is None:
                return newest, last
            seq = mirror_store.open_store.newest().seq
            mirrored, last_mirrored = mirror_store._newest(prefix, thinned=thinned)
        except StoreError as e:
            if newest is None:
                raise
            _log.warning("%s is the newest snapshot here; its mirror fails: %s", newest.name, e)
            return newest, last
        last = last or last_mirrored
        if mirrored is None:
            return newest, last
        return self._newer(newest, mirrored, snapshots, mirror_store, seq), last

    def _newer(
        self,
        newest: Snapshot | None,
        mirrored: Snapshot,
        snapshots: list[Snapshot],
        mirror_store: Store,
        seq: int,
    ) -> Snapshot | None:
        """Return which is newer: the newest snapshot here, or that of the mirror.

        Args:
            newest: The newest one here, if there is one.
            mirrored: The newest one there.
            snapshots: Those of here, without those that were thinned.
            mirror_store: The mirror.
            seq: The number of its newest root before that was looked up.
        """
        is_known = any(s.commit_id == mirrored.commit_id for s in snapshots)
        if newest is not None and not is_known:
            named_row = (newest.name, newest.row)
            if is_newer_here(
                self.open_store, mirror_store.id, named_row, (mirrored.name, mirrored.row)
            ):
                return newest
        self._note_returned(mirrored, seq)
        return newest if is_known else mirrored

    def rewind(self, name: str) -> Snapshot:
        """Have a run go back to an earlier snapshot, and return that: restore it, and go on.

        The snapshots right in its folder that were committed after it are moved aside, in one
        commit: ``step_200`` is called ``rewound-57/step_200`` from then on, where 57 is the number
        of that commit. So :meth:`latest` returns the snapshot of this name, and the names are free
        to be taken again. What was moved aside keeps its bytes, commit id and tags, until a
        retention lets it go, as the oldest of its run; to go on from it after all, call this with
        its new name. A mirror follows. Where nothing was committed after the snapshot, nothing is
        changed.

        Takes of this process that are pending are waited for, and count. End other processes that
        write this run first: what they commit later is of the run. On many ranks, rank 0 calls
        this, or all do.

        Args:
            name: The snapshot's name.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name, at least not in this store: to
                go back at its mirror, open that as a store.
            SnapshotExistsError: A name that is needed is taken.
        """
        from casnap.snapshot import Snapshot
        from casnap.take.pending import wait_for_last

        wait_for_last()
        self.row(name)
        notes = partial(notes_of_renamed, uri=self.open_store.backend.uri)
        rewound = rewind(self.open_store, self.full_name(name), notes)
        if rewound.moved:
            self.hooks.on_commit()
            _log.info(
                "%s: %d snapshots that are later than %s are moved aside: %.500s",
                self.uri,
                len(rewound.moved),
                rewound.name,
                ", ".join(rewound.moved.values()),
            )
        return Snapshot.of(self, self.inner_name(rewound.name), rewound.row)

    @property
    def mirror(self) -> Mirror | None:
        """The mirror: its ``status()``, and ``stop()``. None if there is none."""
        return self._mirror

    def wait_mirrored(self, timeout: float | None = None) -> None:
        """Wait until the mirror holds all snapshots that were committed, or are being stored.

        Any process that has the store open can wait, not only the one that copies.

        Args:
            timeout: How many seconds to wait at most; None for as long as it takes.

        Raises:
            MirrorError: The time is over, or some cannot be mirrored. It names them and the cause.
        """
        from casnap.take.pending import wait_for_last

        timeout = seconds_if_given("timeout", timeout)
        mirror = self.mirror
        if mirror is None:
            raise MirrorError(f"{self.uri} was opened without mirror=")
        until = None if timeout is None else time.monotonic() + timeout
        if not wait_for_last(timeout):
            raise MirrorError(f"{self.uri}: a take is still pending after {timeout:g} s")
        seconds = None if until is None else max(0.0, until - time.monotonic())
        mirror.wait(seconds, timeout)

    def delete(self, name: str, *, commit_id: str | None = None) -> None:
        """Forget a snapshot, tagged or not. Garbage collection frees its bytes.

        Args:
            name: The snapshot's name.
            commit_id: Forget the snapshot only if it has this commit id.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name and commit id.
        """
        row = self.row(name)
        commit_id = row.commit.hex() if commit_id is None else commit_id
        unmark(self.open_store, dict([self._edit(name, commit_id, lambda _: None)]))
        self._free_later([row])

    def _free_later(self, rows: Sequence[Row]) -> None:
        """Have the bytes of snapshots that were let go freed, on a nearly full disk at once."""
        hooks = self.hooks
        hooks.on_release(rows)
        nbytes = max((row.stats.logical_bytes for row in rows), default=0)
        # They are deleted, whatever happens here.
        with suppress(BackendError):
            free = self.open_store.backend.free_bytes()
            if free is not None and free <= nbytes:
                hooks.make_room(lambda: nbytes)

    def tag(self, name: str, *tags: str) -> None:
        """Give a snapshot tags. A snapshot with a tag is neither pruned nor overwritten.

        Args:
            name: The snapshot's name.
            tags: 1 to 100 characters each, without white space, not beginning with ``-`` or ``#``.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
            InvalidNameError: A tag is not valid.
            SnapshotError: The snapshot would have more than 100 tags; or another snapshot has a tag
                that was published.
        """
        full, uri = self.full_name(name), self.open_store.backend.uri
        self.open_store.read_at_newest(
            lambda root: check_movable(root, self.open_store.table(root), full, tags, uri)
        )
        self._edit(name, None, lambda row: with_tags(row, tags))

    def untag(self, name: str, *tags: str) -> None:
        """Remove tags from a snapshot. A tag that it does not have is ignored.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
        """
        self._edit(name, None, lambda row: without_tags(row, tags))

    def publish(self, tag: str, snapshot: str | Snapshot) -> None:
        """Move a tag to a snapshot, from whichever has it, in one commit.

        From then on the tag is *published*: one snapshot of the whole store has it, and
        :meth:`tag` gives it to no other. Who follows it sees the old snapshot or the new one. Name
        it like ``run1/stable`` to have one for each run. The snapshot that had it is no longer
        protected by it: give it another tag if you may want to move back.

        Args:
            tag: As for :meth:`tag`.
            snapshot: The snapshot, or its name.

        Raises:
            SnapshotNotFoundError: There is no such snapshot.
            InvalidNameError: The tag is not valid.
            SnapshotError: The snapshot has 100 tags, or the store 100 published ones.
        """
        from casnap.snapshot import Snapshot

        name, commit_id = (
            (snapshot.name, snapshot.commit_id)
            if isinstance(snapshot, Snapshot)
            else (snapshot, self.row(snapshot).commit.hex())
        )
        publish_tag(self.open_store, tag, self.full_name(name), commit_id)

    def tagged(self, tag: str) -> Snapshot:
        """Return the snapshot that has a tag. If the tag was published, that is one look-up.

        Raises:
            SnapshotNotFoundError: No snapshot of this store or view has it.
            SnapshotError: Several have it, and it was never published.
        """
        from casnap.snapshot import Snapshot

        store, folder = self.open_store, self.folder(None)
        name, row = store.read_at_newest(lambda root: tagged_row(store, root, tag, folder))
        return Snapshot.of(self, self.inner_name(name), row)

    def tag_moves(self, tag: str, limit: int | None = None) -> list[TagMove]:
        """Return the moves of a published tag, the newest first: to what, from what, when, by whom.

        Args:
            tag: The tag.
            limit: How many to return at most. Each is read from a root of its own.
        """
        return list(islice(tag_moves(self.open_store, tag), limit))

    def _edit(
        self, name: str, commit_id: str | None, edit: Callable[[Row], Row | None]
    ) -> tuple[str, bytes]:
        """Edit a snapshot's row, or remove it where ``edit`` returns None.

        Returns:
            Its full name, and its commit id.
        """
        full = self.full_name(name)
        if commit_id is None:
            commit_id = self.row(name).commit.hex()
        change_table(self.open_store, row_edit(full, commit_id, edit, self.open_store.backend.uri))
        return full, bytes.fromhex(commit_id)

    def copy(
        self,
        name: str | None = None,
        *,
        to: Store | str | os.PathLike[str] | Backend,
        rename: str | None = None,
        dry_run: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        exclusive: bool = False,
        progress: Progress | None = None,
    ) -> CopyReport:
        """Copy snapshots into another store. Only chunks that it lacks are sent.

        Snapshots keep their metadata, tags, times and commit ids; one of the same name and commit
        id that is there already is not copied again. After an interruption, a repeat resumes the
        copy. Both stores may be used, and collected, meanwhile.

        Args:
            name: A snapshot, or a folder of them; None for all snapshots of this store or view.
            to: The other store. If there is none at a path or URI, it is made, with chunks of the
                same size as here.
            rename: What the snapshot, or the folder, is called there; for all snapshots, a folder
                that they go into.
            dry_run: Only report what would be sent.
            storage_options: How to reach ``to``, if that is the URI of a remote store.
            exclusive: You make sure that no other process writes to that store.
            progress: Called as ``progress(phase, done, total)``, in bytes.

        Returns:
            Which snapshots were copied, and how much was sent and was there already.

        Raises:
            SnapshotNotFoundError: There is no such snapshot; or it was deleted meanwhile.
            SnapshotExistsError: A name is taken there by another snapshot. Nothing was sent.
            StoreError: It is the same store, or one with chunks of another size, or one of the
                stores cannot be used.
            DamagedError: Something in this store cannot be read.
        """
        from casnap.transfer.copy import copy_snapshots
        from casnap.transfer.copy_jobs import CopyOptions
        from casnap.transfer.copy_selection import check_pair, choose

        inner = None if name is None else self.local_name(name)
        selection = choose(self.open_store, self.prefix, inner, rename)
        if isinstance(to, Store):
            if storage_options:
                raise ValueError(f"{to.uri} is open already; give storage_options to Store(...)")
        else:
            size = self.chunk_size
            to = Store(to, chunk_size=size, storage_options=storage_options, exclusive=exclusive)
        open_store = to._look() if dry_run else to.make().open_store
        if open_store is not None:
            check_pair(self.open_store, open_store)
            selection = [c._replace(new_name=to.full_name(c.new_name)) for c in selection]
        is_folder = len(selection) > 1
        hooks = CommitHooks() if open_store is None else to.hooks
        options = CopyOptions(dry_run=dry_run, skip_gone=is_folder, hooks=hooks)
        return copy_snapshots(self.open_store, open_store, selection, options, progress)

    # --- folders for inference ---

    def pull(
        self,
        folder: str | os.PathLike[str],
        name: str | None = None,
        *,
        options: PullOptions | None = None,
        progress: Progress | None = None,
    ) -> PullReport:
        """Bring a folder of safetensors to the newest snapshot, for engines.

        The folder is a link to one whole version, beside it in ``<folder>.versions``. Files that
        have not changed are hard links of the version before; what has changed is made from that
        version's bytes and the new chunks. All that is written is verified, then the link is
        replaced at once. See ``docs/guides/serving.md``.

        Args:
            folder: The folder, which is not there yet, or was made by a pull.
            name: A snapshot, or a folder of them; None for all snapshots of this store or view.
            options: Which snapshot, and how its folder looks:
                a :class:`casnap.serving.PullOptions`.
            progress: Called as ``progress(phase, done, total)``, in bytes.

        Returns:
            Which version is current, and what had to be done for that.

        Raises:
            SnapshotNotFoundError: There is no such snapshot; or it was deleted meanwhile.
            FileFormatError: Something else stands at the folder, it is another user's, or the
                snapshot holds no tensors.
            StorageFullError: The disk is full. The folder stays at the version before.
            BackendError: The folder cannot be written or looked at for another reason. It stays.
            FileNotFoundError: There is no folder to put it in.
            CasnapError: Another process pulls into this folder.
            DamagedError: Stored bytes are missing or damaged.
        """
        from casnap.serving.options import PullOptions
        from casnap.serving.pull import pull

        out = Path(local_path(folder))
        return pull(self._pull_source(name), out, options or PullOptions(), progress)

    def follow(
        self,
        folder: str | os.PathLike[str],
        name: str | None = None,
        *,
        options: PullOptions | None = None,
        interval: Duration = 5.0,
        on_version: Callable[[Path, list[str]], object] | None = None,
        progress: Progress | None = None,
    ) -> Iterator[FollowEvent]:
        """Pull each new version as it is committed, for ever; yield what happens.

        Any number of missed versions is one step. What fails is logged, and tried again.

        Args:
            folder: As in :meth:`pull`.
            name: As there.
            options: As there.
            interval: How often to look for a new version: seconds, or such as ``"30s"``.
            on_version: Called after each switch with the folder of the version, without links, and
                the names of the tensors that have changed since the last call. If it raises an
                error, it is called again later, then for the version that is current by then.
            progress: As there.

        Raises:
            CasnapError: It cannot begin; or another process follows into this folder.
            FileNotFoundError: There is no folder to put it in.
        """
        from casnap.serving.following import Following
        from casnap.serving.options import PullOptions

        out = Path(local_path(folder))
        following = Following(
            lambda: self._pull_source(name),
            out,
            options or PullOptions(),
            seconds_of("interval", interval),
            on_version,
            progress,
        )
        return following.events()

    def _pull_source(self, name: str | None) -> Source:
        from casnap.serving.pull import Source

        return Source(self.open_store, self.folder(None if name is None else self.local_name(name)))

    # --- maintenance ---

    def import_file(
        self,
        source: str | os.PathLike[str],
        name: str,
        *,
        key: str | None = None,
        rank: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ImportReport:
        """Import files of another format as a snapshot, in one commit. No code of a file is run.

        Chunks that the store has are not stored again, whether a take or an import brought them.
        The files are mapped, not read into memory; do not cut them off meanwhile. With
        ``torch.distributed``, one rank alone calls this.

        Args:
            source: A file of safetensors or ``torch.save``; the folder, the index or any one of the
                shards of a model; or a folder of ``torch.distributed.checkpoint``, TorchSnapshot or
                torch_checkpointing. A folder of weights brings its small files along, below the
                key ``files``.
            name: The snapshot's name.
            key: The key of the snapshot to import under. By default ``model``; but a dict of
                ``torch.save`` that holds more than tensors, and folders, keep keys of their own.
            rank: For a folder of TorchSnapshot or torch_checkpointing, of many ranks: the rank
                whose state to import.
            metadata: Kept with the snapshot, beside the ``__metadata__`` of safetensors.
            overwrite: Replace a snapshot of this name, unless it has a tag.
            dry_run: Only report what would be imported.
            progress: Called as ``progress(phase, done, total)``, in bytes.

        Returns:
            What was found, and how much of it was new.

        Raises:
            FileFormatError: The files are malformed, need pickle, or are in no known format.
            SnapshotExistsError: The name is taken.
            StoreError: The store cannot be used; nothing was committed.
        """
        refuse_nested_take()
        name = self.local_name(name)
        full = self.full_name(name)
        find = (lambda: (self.make(), name)) if not dry_run else None
        options = {"overwrite": overwrite, "progress": progress}
        return import_snapshot(
            source, full, find, options, key=key, rank=rank, metadata=dict(metadata or {})
        )

    def prune(
        self, retention: Retention, *, prefix: str | None = None, dry_run: bool = False
    ) -> PruneReport:
        """Forget the snapshots that no rule keeps, all in one commit.

        The rules are applied to each run, that is each folder of snapshots, on its own. They are
        applied to the table that the commit changes, so they see the tags, takes and overwrites of
        other processes in the meantime. Garbage collection frees the bytes.

        Args:
            retention: The rules.
            prefix: Prune only the runs in and below this folder.
            dry_run: Only report what would be forgotten.

        Returns:
            For each snapshot whether it is kept, and by which rules.

        Raises:
            EntryNotFoundError: No snapshot has, or had, a key that a pattern of ``thin`` matches.
        """
        check_retention(retention)
        judging = RetentionChange(self.open_store, retention, self.folder(prefix))
        if retention.thin is None:
            return self._prune(judging, dry_run=dry_run)
        self._check_keys(retention.thin, prefix)
        thinned = self._thin(retention.thin, prefix, judging, dry_run=dry_run)
        if not dry_run:
            unmark_pruned(self.open_store, judging)
        return replace(self._prune_report(judging, dry_run=dry_run), thinned=thinned)

    def thin(
        self, rules: Mapping[str, int], *, prefix: str | None = None, dry_run: bool = False
    ) -> dict[str, tuple[str, ...]]:
        """Have older snapshots lose what only a resume needs, all in one commit.

        A thinned snapshot keeps its name, commit id, metadata and tags, and all other keys. It can
        be read, exported and copied, and says what it lost. Garbage collection frees the bytes.
        Tagged snapshots stay whole, and so do those that a mirror still lacks.

        Args:
            rules: Of each pattern of whole keys of the app state, how many of the newest snapshots
                of each run keep them: ``{"optim/**": 2}``. ``*`` in it stands for anything.
            prefix: Only runs in and below this folder.
            dry_run: Only report what would be lost.

        Returns:
            The keys that were lost, by the name of the snapshot.

        Raises:
            ValueError: The rules make no sense.
            EntryNotFoundError: No snapshot has, or had, a key that a pattern matches.
        """
        self._check_keys(rules, prefix)
        return self._thin(rules, prefix, None, dry_run=dry_run)

    def _check_keys(self, rules: Mapping[str, int], prefix: str | None) -> None:
        """Check the rules of a thinning, and that its patterns match keys in a folder."""
        rows = self.read(lambda table: list(snapshots_in(table, self.folder(prefix))))
        check_keys(self.open_store, rows, check_rules(rules))

    def _thin(
        self,
        rules: Mapping[str, int],
        prefix: str | None,
        judging: PruneChange | None,
        *,
        dry_run: bool,
    ) -> dict[str, tuple[str, ...]]:
        """Thin runs, and prune them in the same commit if there is a judge."""
        thinned = thin(self.open_store, rules, self.folder(prefix), judging, dry_run=dry_run)
        if thinned and not dry_run:
            self._free_later([each.before for each in thinned.values()])
        return {self.inner_name(name): each.keys for name, each in thinned.items()}

    def prune_missing_folders(
        self, *, prefix: str | None = None, dry_run: bool = False
    ) -> PruneReport:
        """Forget the snapshots whose folders were deleted, as trainers do; all in one commit.

        A snapshot on a disk has a folder with a marker, ``<name>/casnap-snapshot.json``. One whose
        folder is gone is forgotten. Kept are those that are tagged, copied from another store, or
        not mirrored yet; those whose folder was renamed within the folder of the run; and all of a
        run if no marker of its snapshots stands there any more. Snapshots that were taken without
        markers, and a backup that was restored without them, look deleted: look at a dry run first.

        Args:
            prefix: Only the runs in and below this folder.
            dry_run: Only report what would be forgotten.

        Returns:
            For each snapshot whether it is kept, and why.

        Raises:
            StoreError: The store is not in a folder of this machine.
        """
        change = MissingFoldersChange(self.open_store, self.folder(prefix))
        return self._prune(change, dry_run=dry_run)

    def _prune(self, judging: PruneChange, *, dry_run: bool) -> PruneReport:
        if dry_run:
            self.read(lambda table: judging(table, 0))
        else:
            prune(self.open_store, judging)
        return self._prune_report(judging, dry_run=dry_run)

    def _prune_report(self, judging: PruneChange, *, dry_run: bool) -> PruneReport:
        """Report what was pruned, and have its bytes freed."""
        verdicts = judging.verdicts
        if not dry_run:
            self._free_later([verdict.row for verdict in verdicts if not verdict.kept])
        local_verdicts = [replace(v, name=self.inner_name(v.name)) for v in verdicts]
        return PruneReport(local_verdicts, dry_run)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the whole store, as :meth:`configure` changes them."""
        settings = settings_of(self.open_store.newest())
        settings.pop(PUBLISHED, None)
        return settings

    def configure(
        self,
        *,
        codec: str | None = None,
        mirror: str | None = None,
        gc: Duration | None = None,
    ) -> bool:
        """Change settings of the whole store; return whether anything changed.

        Takes that begin after that obey them, in all processes. What is stored stays as it is.

        Args:
            codec: How chunks are stored: "auto", "raw" or "zstd"; see :class:`Store`.
            mirror: "none" forgets which store is the mirror, and which snapshots it lacks. The next
                ``Store(..., mirror=)`` may name another one. Without that, one mirror is the only.
            gc: "auto", the default, has each process that lets snapshots go collect their garbage
                in the background. "off" leaves that to :meth:`gc`. A time, such as "12h", is as
                "auto", and the grace of all collections that are not given another one.

        Raises:
            ValueError: There is no such codec, or ``mirror`` or ``gc`` is something else.
        """
        if mirror not in (None, "none"):
            raise ValueError(f"mirror can only be 'none', which forgets it; got {mirror!r:.80}")
        new_settings = {} if codec is None else {CODEC: check_codec(codec)}
        new_settings |= {} if gc is None else gc_settings(gc)
        self.make()
        changed = False
        if new_settings:
            changed = change_settings(
                self.open_store, lambda settings: {**settings, **new_settings}
            )
        if mirror is not None:
            changed |= detach_mirror(self.open_store)
        return changed

    def gc(
        self,
        *,
        grace: Duration | None = None,
        repack: float = 0.5,
        recode_after: int | None = 3,
        dry_run: bool = False,
        exclusive: bool = False,
        progress: Progress | None = None,
    ) -> GcReport:
        """Collect garbage: delete the data that no snapshot needs.

        Takes, deletes and other collectors may run at the same time, even with wrong clocks. The
        collector always works on the whole store, not only on this view.

        Args:
            grace: How long to keep unreferenced data, such as ``"12h"``, a ``timedelta``, or
                seconds (0: delete it now). For so long, a deleted snapshot can still be read, and a
                running take can still rely on the data. After that the reader gets an error, and
                the take begins again. By default what the store is set to (see :meth:`configure`),
                else 24 hours.
            repack: Copy the rest out of packs of which less than this share is needed (0: never).
            recode_after: Store what all but so many of the newest snapshots of each folder hold as
                how it differs from the snapshot before, or compressed, where that is smaller;
                unless the codec of the store is "raw". None: not now.
            dry_run: Only report what would be done.
            exclusive: You make sure that no other process writes to this store. This is asked
                only where the store's backend cannot keep two writers apart.
            progress: Called as ``progress(phase, done, total)``.

        Raises:
            StoreError: The store cannot be written to, or not safely.
            DamagedError: An object could not be read; nothing was deleted.
            ValueError: An argument is out of range.
        """
        from casnap.maintenance.gc import GcOptions, collect

        options = GcOptions(
            grace=seconds_if_given("grace", grace),
            repack=repack,
            dry_run=dry_run,
            exclusive=exclusive,
            recode_after=recode_after,
        )
        return collect(self.open_store, options, progress)

    def diff(self, a: str, b: str) -> Diff:
        """Return what differs between two snapshots. Only subtrees that differ are read."""
        from casnap.maintenance.diff import diff

        return diff(self[a].contents, self[b].contents)

    def usage(self, prefix: str | None = None) -> list[Usage]:
        """Return the logical, stored and unique bytes of each snapshot, in the order of commits."""
        from casnap.maintenance.usage import usage

        return usage([s.contents for s in self.snapshots(prefix)], self.open_store)

    def check(
        self,
        *,
        data: bool = False,
        sample: float | None = None,
        seed: int | None = None,
        name: str | None = None,
        progress: Progress | None = None,
    ) -> CheckReport:
        """Check that nothing in the store is missing or damaged. Nothing is changed.

        The whole store is checked, not only this view; or with a name, what one snapshot needs.

        Args:
            data: Read and verify every chunk, at each of its places.
            sample: Read and verify a random share of the chunks, up to 1.
            seed: Chooses the share. By default it is another share each time.
            name: The snapshot to check alone.
            progress: Called as ``progress(phase, done, total)``.

        Returns:
            All damages, and the parts of snapshots that each one hurts.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
        """
        from casnap.maintenance.check import check

        full = None
        if name is not None:
            self.row(name)
            full = self.full_name(name)
        return check(
            self.open_store, data=data, sample=sample, seed=seed, name=full, progress=progress
        )

    def repair(
        self,
        *,
        sources: Sequence[str | os.PathLike[str] | Store] = (),
        progress: Progress | None = None,
        dry_run: bool = False,
    ) -> RepairReport:
        """Save what can be saved of a damaged store.

        Lost parts of the index are built again from the packs. Undamaged chunks are copied out of
        damaged packs. A chunk without an undamaged copy is looked for in the sources. If no source
        has it, it is recorded as lost, and the next take of the same bytes stores it again. The
        whole store is repaired, not only this view.

        Args:
            sources: Other casnap stores: open, or a path or URI.
            progress: Called as ``progress(phase, done, total)``.
            dry_run: Change nothing; only report what would be done.

        Raises:
            DamagedError: The newest root cannot be read.
        """
        from casnap.maintenance.repair import repair

        if isinstance(sources, str | os.PathLike):
            raise TypeError(f"sources is a list, such as [{str(sources)!r}]; got one alone")
        places = [s.open_store.backend if isinstance(s, Store) else given_path(s) for s in sources]
        return repair(self.open_store, sources=places, progress=progress, dry_run=dry_run)


def store_of(
    open_store: Repository, prefix: str = "", *, is_new: bool = False, threads: int | None = None
) -> Store:
    """Return a Store that is open, or a view of the snapshots below a prefix."""
    store = Store.__new__(Store)
    place = Location(open_store.backend, prefix, exists=True)
    opening = partial(open_at, markers=open_store.marks)
    store._begin(open_store.backend, place, opening, False, threads or threads_asked(), None)
    store._open_store, store.is_new = open_store, is_new
    return store


def _unpickled(beginning: tuple[Any, ...], is_open: bool) -> Store:
    store = Store.__new__(Store)
    store._begin(*beginning)
    if is_open:
        # The mirror is not started: a worker that only reads has no use for it; a take starts it.
        store._open(store._place, create=False, start_mirror=False)
    return store


def _disk_hooks(open_store: Repository) -> CommitHooks:
    """Return what keeps the garbage of a store small."""
    from casnap.maintenance.automatic import automatic_collector

    collector = automatic_collector(open_store)
    return CommitHooks(
        make_room=partial(collector.make_room, open_store),
        on_full=partial(collector.meet_full_disk, open_store),
        on_release=partial(collector.note, open_store),
        count_freed=collector.count_freed,
    )


def _mirror_options(
    mirror: str | os.PathLike[str] | Backend | None,
    options: Mapping[str, Any] | None,
    retention: Retention | None,
) -> MirrorOptions | None:
    """Return the user's options for the mirror; None without a mirror."""
    if mirror is None:
        if options is not None or retention is not None:
            raise ValueError("mirror_options= and mirror_retention= need mirror=, the other store")
        return None
    if retention is not None:
        check_retention(retention)
    from casnap.mirror.status import MirrorOptions

    place = mirror if isinstance(mirror, Backend) else given_path(mirror)
    return MirrorOptions(place, options, retention)


def _mirror_of(open_store: Repository, prefix: str, options: MirrorOptions) -> Mirror:
    from casnap.mirror.mirror import Mirror
    from casnap.take.pending import under_way

    return Mirror(open_store, prefix, options, hooks_of=_disk_hooks, is_taking=under_way)


def import_snapshot(
    source: str | os.PathLike[str],
    name: str,
    find: Callable[[], tuple[Store, str]] | None,
    options: Mapping[str, Any],
    *,
    key: str | None = None,
    rank: int | None = None,
    metadata: dict[str, Any],
) -> ImportReport:
    """Import files as a snapshot. :meth:`Store.import_file` describes the rest.

    Args:
        source: The files.
        name: The snapshot's name, for the report.
        find: Opens the store, and returns the name there, once it is known that the files can be
            imported; None for a dry run.
        options: Further options of the take.
        key: As there.
        rank: As there.
        metadata: As there.
    """
    from casnap.files.importing import import_files
    from casnap.ranks.comm import SingleProcess
    from casnap.take.options import TakeOptions

    def take(leaves: Any, all_metadata: dict[str, Any]) -> int:
        assert find is not None
        store, inner = find()
        options_of_take = TakeOptions(metadata=all_metadata, **options)
        snapshot = store.take_from(SingleProcess(), lambda: leaves, inner, options_of_take)
        return snapshot.stats.new_bytes

    return import_files(
        Path(local_path(source)),
        name,
        take if find else None,
        key=key,
        rank=rank,
        metadata=metadata,
    )
