"""A store: many snapshots at one URI, which share their chunks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casnap.backends import Backend
from casnap.errors import MirrorError, NotAStoreError, SnapshotNotFoundError, StoreError
from casnap.format.codec import Codec
from casnap.format.names import check_name
from casnap.format.records import CONFIG_KEY, DEFAULT_CHUNK_SIZE, Row
from casnap.opened.open_store import (
    Found,
    OpenStore,
    StoreOptions,
    located,
    open_or_make,
    open_store,
)
from casnap.runtime.environment import threads_asked
from casnap.runtime.nesting import refuse_nested_take
from casnap.runtime.progress import Progress
from casnap.runtime.threads import check_count
from casnap.snapshot import PendingSnapshot, Snapshot
from casnap.storage.creation import check_chunk_size
from casnap.storage.foreign import hint_in
from casnap.storage.location import Location, holds
from casnap.storage.mirrored import in_order
from casnap.storage.objects import Objects
from casnap.storage.retention import Retention, check_retention
from casnap.storage.settings import codec_named
from casnap.storage.table import change_table, editing, snapshots_in, tagged, unmark, untagged
from casnap.storage.uris import joined
from casnap.upkeep import Upkeep

if TYPE_CHECKING:
    from casnap.state.stateful import Stateful
    from casnap.transfer.mirror import Mirror
    from casnap.transfer.mirror_report import MirrorOptions
    from casnap.transfer.report import CopyReport

_log = logging.getLogger("casnap")


class Store(Upkeep):
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
        chunk_size: For a new store: bytes, a power of two from 64 KiB to 64 MiB.
        codec: For a new store: how new chunks are stored, "raw" or "zstd" (where that makes them
            smaller). :meth:`configure` changes it.
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
            so many bytes for all stores together, so that they are fetched once. 0: no cache. By
            default ``CASNAP_CACHE_BYTES`` of the environment counts; without it there is no cache.
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
        uri: str | os.PathLike[str] | Backend | OpenStore,
        *,
        create: bool = True,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        codec: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        exclusive: bool = False,
        markers: bool = True,
        mirror: str | os.PathLike[str] | Backend | None = None,
        mirror_options: Mapping[str, Any] | None = None,
        mirror_retention: Retention | None = None,
        cache_bytes: int | None = None,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            check_count("threads", threads)
        self._opened: OpenStore | None = None
        self._create = create
        if isinstance(uri, OpenStore):
            self._note(uri)
            return
        how = _mirror_options(mirror, mirror_options, mirror_retention)
        chosen = Codec.RAW if codec is None else codec_named(codec)
        place = self._place = located(uri, storage_options)
        self._uri = place.backend if isinstance(uri, Backend) else str(uri)
        options = StoreOptions(
            markers=markers,
            threads=threads or threads_asked(),
            mirror=how,
        )
        self._open = partial(
            open_store,
            chunk_size=chunk_size,
            codec=chosen,
            exclusive=exclusive,
            cache_bytes=cache_bytes,
            options=options,
        )
        if how is not None and create:
            self._note(self._open(place, create=True))
        elif self._look() is None:
            check_chunk_size(chunk_size)

    # --- the store, which may not be there yet ---

    def _note(self, opened: OpenStore) -> OpenStore:
        self._opened = opened
        opened.note_store(self)
        if opened.mirror is not None:
            opened.mirror.start()
        return opened

    def _locate(self) -> Location:
        """Return where the store is now: one above may have been made."""
        if self._place.backend.is_remote:
            return self._place  # no other one is looked for
        place = located(self._uri, None)
        return place._replace(exists=place.exists and holds(place.backend, CONFIG_KEY))

    def _look(self) -> OpenStore | None:
        """Return the open store; None if there is none yet, and it may be made."""
        if self._opened is None:
            place = self._locate()
            if not self._create or (place.exists and not place.backend.is_remote):
                # If the making of the store was cut off, this finishes it.
                self._note(self._open(place, create=self._create))
            elif place.backend.is_remote:
                with suppress(NotAStoreError):
                    self._note(self._open(place, create=False))
        return self._opened

    def _at_mirror(self) -> OpenStore | None:
        # A store that is still to be made has no mirror: with one, it is made at once.
        return None if self._opened is None else self._opened.at_mirror()

    def _where(self) -> Location:
        """Return where the store is, or would be; a remote one is not asked for that."""
        if self._opened is None:
            return self._locate()
        return Location(self._opened.objects.backend, self._opened.prefix, exists=True)

    def _folder(self, prefix: str | None) -> Path | None:
        """Return the folder of this machine that snapshots are, or would be, marked in."""
        place = self._where()
        folder = place.backend.folder
        return None if folder is None else folder / place.name / (prefix or "").strip("/")

    def make(self) -> Store:
        """Make the store now, if there is none; return this object.

        A take does so by itself. A run that calls this when it starts learns at once if no store
        can be made at its place.

        Raises:
            StoreError: A store cannot be made at this place.
        """
        if self._opened is None:
            self._note(self._open(self._locate(), create=self._create))
        return self

    @property
    def opened(self) -> OpenStore:
        """The open store.

        Raises:
            NotAStoreError: There is none yet.
        """
        # If there is none, opening it says so.
        return self._look() or self._note(self._open(self._locate(), create=False))

    @property
    def objects(self) -> Objects:
        """The objects of the open store."""
        return self.opened.objects

    # --- properties ---

    @property
    def uri(self) -> str:
        """The URI of the store, and the prefix of this view."""
        place = self._where()
        return joined(place.backend.uri, place.name, is_view=True)

    @property
    def prefix(self) -> str:
        """The beginning of the full names of all snapshots in this view; empty for a store."""
        return self._where().name

    @property
    def id(self) -> str:
        """The id of the store: 32 hex digits. Every store has another one."""
        return self.objects.config.store_id

    @property
    def chunk_size(self) -> int:
        """The size of the largest chunks, in bytes."""
        return self.objects.config.chunk_size

    @property
    def requests(self) -> dict[str, int]:
        """How many requests this object has made, by kind; empty for a store on this machine."""
        return dict(self._where().backend.requests)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process open the store anew; the pickle holds the storage options."""
        if self._opened is None:
            return _store_to_make, (self._uri, self._place, self._open)
        return type(self), (self.opened,)

    def full_name(self, name: str) -> str:
        """Return the full name of a snapshot: the prefix of this view, then the name.

        Raises:
            InvalidNameError: The name cannot be used.
        """
        return check_name(self.outer_name(check_name(name)))

    def outer_name(self, name: str) -> str:
        """Return the full name for a name that is known to be valid."""
        prefix = self.prefix
        return f"{prefix}/{name}" if prefix else name

    # --- snapshots ---

    def take(
        self,
        app_state: Mapping[str, Stateful],
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
    ) -> Snapshot:
        """Take a snapshot. :meth:`Snapshot.take` describes the arguments."""
        from casnap.ranks.joining import join
        from casnap.state.stateful import check_order
        from casnap.take.options import TakeOptions

        refuse_nested_take()
        check_order("store.take(app_state, name)", app_state, name)
        options = TakeOptions(
            metadata=metadata,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            progress=progress,
            retention=retention,
            replicated=replicated,
            per_rank=per_rank,
            threads=threads,
        )
        comm = join(pg, timeout, f"the take of {self.full_name(name)!r}")
        with comm.reporting_errors():
            opened = self.make().opened
        return Snapshot(opened.take(comm, app_state, name, options), pg)

    def async_take(
        self,
        app_state: Mapping[str, Stateful],
        name: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        max_staging_bytes: int | None = None,
        max_pending: int = 1,
        progress: Progress | None = None,
        retention: Retention | None = None,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        per_rank: Sequence[str] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
    ) -> PendingSnapshot:
        """Take a snapshot in the background, as :meth:`Snapshot.async_take` does."""
        from casnap.ranks.joining import join
        from casnap.state.stateful import check_order
        from casnap.take.options import TakeOptions

        refuse_nested_take()
        check_order("store.async_take(app_state, name)", app_state, name)
        options = TakeOptions(
            metadata=metadata,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            max_staging_bytes=max_staging_bytes,
            max_pending=max_pending,
            progress=progress,
            retention=retention,
            replicated=replicated,
            per_rank=per_rank,
            threads=threads,
        )
        comm = join(pg, timeout, f"the async_take of {self.full_name(name)!r}")
        with comm.reporting_errors():
            opened = self.make().opened
        pending = opened.async_take(comm, app_state, name, options)
        return PendingSnapshot(opened, pending, check_name(name), pg)

    def row(self, name: str) -> Row:
        """Return the row that the store's table has for a snapshot.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
        """
        opened = self._look()
        if opened is None:
            raise SnapshotNotFoundError(
                f"there is no snapshot {check_name(name)!r}: {self.uri} is not a store yet; the "
                "first take to it makes one"
            )
        return opened.row(name)

    def __getitem__(self, name: str) -> Snapshot:
        """Return a snapshot by name, or raise :class:`SnapshotNotFoundError`.

        One that this store does not have is looked for at its mirror.
        """
        try:
            row = self.row(name)
            return Snapshot(Found(self.opened, check_name(name), row))
        except SnapshotNotFoundError:
            there = self._at_mirror()
            if there is None:
                raise
        return Snapshot(Found(there, check_name(name), there.row(name)))

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        try:
            self.row(name)
        except SnapshotNotFoundError:
            return False
        return True

    def snapshots(self, prefix: str | None = None) -> list[Snapshot]:
        """Return all snapshots, or those below a prefix, in the order of their commits."""
        opened = self._look()
        if opened is None:
            return []
        folder = opened.folder(prefix)
        rows = opened.read(lambda table: list(snapshots_in(table, folder)))
        named = [(opened.inner_name(name), row) for name, row in in_order(rows)]
        return [Snapshot(Found(opened, name, row)) for name, row in named]

    def latest(self, prefix: str | None = None) -> Snapshot | None:
        """Return the snapshot that was committed last, or None if there is no snapshot.

        If there is none, but a checkpoint of another form right in that folder, a warning is
        logged that says so.

        With a mirror, the last ones of both sides are compared. If this store holds the last one of
        the mirror too, its own last one is the newest; otherwise the time that the takes noted
        decides. If the mirror cannot be reached, this store's last one is returned, with a warning.

        Raises:
            StoreError: This store has no snapshot, and its mirror cannot be reached.
        """
        own = self.snapshots(prefix)
        newest = own[-1] if own else None
        try:
            there = self._at_mirror()
            other = None if there is None else Store(there).latest(prefix)
        except StoreError as e:
            if newest is None:
                raise
            _log.warning("%s is the newest snapshot here; its mirror fails: %s", newest.name, e)
            return newest
        if newest is None and other is None:
            folder = self._folder(prefix)
            if folder is not None and (hint := hint_in(folder)):
                _log.warning("%s", hint)
        if newest is None or other is None:
            return newest or other
        is_known = any(s.commit_id == other.commit_id for s in own)
        return newest if is_known or newest.time >= other.time else other

    @property
    def mirror(self) -> Mirror | None:
        """The mirror: its ``status()``, and ``stop()``. None if there is none."""
        return None if self._opened is None else self._opened.mirror

    def wait_mirrored(self, timeout: float | None = None) -> None:
        """Wait until the mirror holds all snapshots that were committed, or are being stored.

        Any process that has the store open can wait, not only the one that copies.

        Args:
            timeout: How many seconds to wait at most; None for as long as it takes.

        Raises:
            MirrorError: The time is over, or some cannot be mirrored. It names them and the cause.
        """
        from casnap.take.pending import wait_for_last

        mirror = self.mirror
        if mirror is None:
            raise MirrorError(f"{self.uri} was opened without mirror=")
        until = None if timeout is None else time.monotonic() + timeout
        if not wait_for_last(timeout):
            raise MirrorError(f"{self.uri}: a take is still pending after {timeout:g} s")
        left = None if until is None else max(0.0, until - time.monotonic())
        mirror.wait(left, timeout)

    def delete(self, name: str, *, commit_id: str | None = None) -> None:
        """Forget a snapshot, tagged or not. Garbage collection frees its bytes.

        Args:
            name: The snapshot's name.
            commit_id: Forget the snapshot only if it has this commit id.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name and commit id.
        """
        unmark(self.objects, dict([self._edit(name, commit_id, lambda _: None)]))

    def tag(self, name: str, *tags: str) -> None:
        """Give a snapshot tags. A snapshot with a tag is neither pruned nor overwritten.

        Args:
            name: The snapshot's name.
            tags: 1 to 100 characters each, without white space, not beginning with ``-`` or ``#``.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
            InvalidNameError: A tag is not valid.
            SnapshotError: The snapshot would have more than 100 tags.
        """
        self._edit(name, None, lambda row: tagged(row, tags))

    def untag(self, name: str, *tags: str) -> None:
        """Remove tags from a snapshot. A tag that it does not have is ignored.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
        """
        self._edit(name, None, lambda row: untagged(row, tags))

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
        change_table(self.objects, editing(full, commit_id, edit, self.objects.backend.uri))
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
        from casnap.transfer.report import CopyOptions
        from casnap.transfer.selection import check_pair, choose

        chosen = choose(self.objects, self.prefix, name, rename)
        there: OpenStore | None
        if not isinstance(to, Store):
            place = located(to, storage_options)
            size = self.chunk_size
            there = open_or_make(place, chunk_size=size, exclusive=exclusive, dry_run=dry_run)
        elif storage_options:
            raise ValueError(f"{to.uri} is open already; give storage_options to Store(...)")
        else:
            there = to._look() if dry_run else to.make().opened
        if there is not None:
            check_pair(self.objects, there.objects)
            chosen = [c._replace(target=there.full_name(c.target)) for c in chosen]
        objects, on_commit = (there.objects, there.on_commit) if there is not None else (None, None)
        options = CopyOptions(dry_run=dry_run, skip_gone=len(chosen) > 1, on_commit=on_commit)
        return copy_snapshots(self.objects, objects, chosen, options, progress)


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
    from casnap.transfer.mirror_report import MirrorOptions

    return MirrorOptions(mirror, options, retention)


def _store_to_make(uri: str | Backend, place: Location, open_place: partial[OpenStore]) -> Store:
    store = Store.__new__(Store)
    store._opened, store._create = None, True
    store._uri, store._place, store._open = uri, place, open_place
    return store


OpenStore.store_class = Store
