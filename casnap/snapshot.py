"""A snapshot: take, restore and read, under TorchSnapshot's names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import field
from msgspec.structs import asdict, astuple

from casnap.errors import CasnapError, NotAStoreError, SnapshotNotFoundError
from casnap.format.names import check_name
from casnap.format.records import Stats
from casnap.opened.finding import find, find_together
from casnap.opened.open_store import Found, OpenStore
from casnap.reading import EntriesByPath, Reading
from casnap.runtime.environment import local_path
from casnap.runtime.nesting import refuse_nested_take
from casnap.runtime.progress import Progress
from casnap.runtime.threads import collector_paused
from casnap.storage.contents import Contents
from casnap.version import __version__

if TYPE_CHECKING:
    import torch

    from casnap.files.report import ExportReport
    from casnap.restore.renaming import Rename
    from casnap.restore.report import RestoreReport
    from casnap.state.stateful import Stateful
    from casnap.storage.retention import Retention
    from casnap.store import Store
    from casnap.take.pending import PendingTake


def _check_no_file(path: str | os.PathLike[str], cause: CasnapError) -> None:
    """Check that the path of a snapshot that was not found is not that of a file.

    Raises:
        CasnapError: It is; the error is of the type of ``cause``, and says how to import the file.
    """
    text = os.fspath(path)
    if "://" not in text and Path(local_path(text)).is_file():
        raise type(cause)(
            f"{text} is a file, not a snapshot in a store; `casnap import {text} STORE/NAME` makes "
            "one of a file of safetensors or torch.save"
        ) from cause


class SnapshotMetadata:
    """A snapshot's manifest and metadata.

    Attributes:
        version: The version of casnap that reads the snapshot.
        world_size: The number of ranks that took the snapshot.
        user: The ``metadata=`` of the take.
    """

    def __init__(self, snapshot: Snapshot, version: str) -> None:
        self._snapshot = snapshot
        self.version = version
        self.world_size = snapshot.world_size
        with snapshot.contents.reading():
            self.user: dict[str, Any] = dict(snapshot.contents.metadata)

    @property
    def manifest(self) -> EntriesByPath:
        """All entries by path, as :meth:`Snapshot.get_manifest` returns them."""
        return self._snapshot.get_manifest()

    def __repr__(self) -> str:
        return (
            f"SnapshotMetadata(version={self.version!r}, world_size={self.world_size}, "
            f"user={self.user!r})"
        )


class TakeStats(Stats, frozen=True, array_like=True):
    """Figures of a take.

    Attributes:
        requests: How many requests it made, by kind, on all ranks. Only the take itself tells: this
            is empty for a snapshot that was looked up, and for a store on this machine.
    """

    requests: dict[str, int] = field(default_factory=dict)


class Snapshot(Reading):
    """One immutable, named checkpoint in a store.

    The object stays with the snapshot that it opened. If another snapshot is taken under the same
    name later, this object does not change.

    Args:
        path: The path or URI of the store, then the name of the snapshot.
        pg: The process group whose ranks restore together. By default this is the whole world, or
            this process alone.
        storage_options: How to reach a remote store, as :class:`casnap.Store` takes them.
        store: A store or its URI. ``path`` is then the name in this store.
        cache_bytes: For a remote store: how many bytes of chunks this host keeps, as
            :class:`casnap.Store` takes it.

    Raises:
        SnapshotNotFoundError: There is no snapshot of this name.
        NotAStoreError: There is no store above the path.
    """

    @collector_paused()
    def __init__(
        self,
        path: str | os.PathLike[str] | Found,
        pg: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        store: Store | str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        if isinstance(path, Found):
            found = path
        else:
            try:
                opened, name = find(
                    path, storage_options, store, create=False, cache_bytes=cache_bytes
                )
                found = Found(opened, check_name(name), opened.row(name))
            except (NotAStoreError, SnapshotNotFoundError) as e:
                if store is None:
                    _check_no_file(path, e)
                raise
        self._opened, self.name, self.row, requests = found
        self._requests = dict(requests)
        self._store = self._opened.store
        self.pg = pg
        self.contents = Contents(self._opened.objects, self._opened.outer_name(self.name), self.row)

    # --- taking ---

    @classmethod
    def take(
        cls,
        path: str | os.PathLike[str],
        app_state: Mapping[str, Stateful],
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        store: Store | str | os.PathLike[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        progress: Progress | None = None,
        retention: Retention | None = None,
        per_rank: Sequence[str] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
    ) -> Snapshot:
        """Take a snapshot; return when it is durable.

        With ``torch.distributed``, all ranks call this together and take one snapshot. Each byte is
        stored once, however many ranks hold it. A value is *global* if it is sharded, declared as
        replicated, or equal on all ranks: it can be restored on any number of ranks. Every other
        value belongs to its rank.

        Args:
            path: The path of the store, then the name of the snapshot. The nearest store above the
                path is used. If there is none, the parent folder becomes a store. Of a URI, such as
                ``s3://bucket/run1/step_100``, the parent is the store. All ranks use the absolute
                path of rank 0.
            app_state: Key → module, optimizer, :class:`StateDict`, … ; the same keys on all ranks.
            pg: The process group whose ranks take the snapshot together. By default this is the
                whole world, or this process alone.
            replicated: Globs (``*`` crosses ``/``) of paths like ``model/**`` that are equal on
                all ranks, so that each rank hashes and writes only a part. Samples are compared
                first; values that differ are refused. The parameters of DDP modules need no glob.
            storage_options: How to reach a remote store, as :class:`casnap.Store` takes them.
                Each rank uses its own.
            store: A store or its URI. ``path`` is then the name in this store.
            metadata: Anything that JSON can hold, up to 64 KiB, kept with the snapshot. The
                metadata of rank 0 count.
            overwrite: Replace a snapshot of this name, unless it has a tag.
            allow_pickle: Store values that have no safe encoding by pickle. To restore them,
                ``allow_pickle=True`` is needed again.
            progress: Called as ``progress(phase, done, total)``, in bytes, from any thread.
            retention: After the commit, forget the snapshots of the same folder that these rules
                do not keep, but never this one. If that fails, a warning is logged.
            per_rank: Globs of paths whose values belong to their rank even if they are equal: the
                state of a data loader, for example. :class:`RNGState` needs no glob.
            threads: How many threads of this process may hash, and how many may copy, or write to
                a disk, so that as many cores are left to others. By default one a core (up to
                eight) hashes, and up to three write.
            timeout: Seconds that a rank waits for another before all ranks raise; 600 by default.

        Raises:
            StateError: A value of the state cannot be taken, or the ranks contradict each other.
            SnapshotError: The name cannot be used.
            StoreError: The store cannot be used; nothing was committed.
            RankError: Another rank failed, died or did not answer in time.
        """
        from casnap.ranks.joining import join
        from casnap.state.stateful import check_order
        from casnap.take.options import TakeOptions

        refuse_nested_take()
        check_order("Snapshot.take(path, app_state)", app_state, path)
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
        comm = join(pg, timeout, f"the take of {os.fspath(path)!r}")
        opened, name = find_together(path, storage_options, store, comm)
        return Snapshot(opened.take(comm, app_state, name, options), pg)

    @classmethod
    def async_take(
        cls,
        path: str | os.PathLike[str],
        app_state: Mapping[str, Stateful],
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        store: Store | str | os.PathLike[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        max_staging_bytes: int | None = None,
        max_pending: int = 1,
        progress: Progress | None = None,
        retention: Retention | None = None,
        per_rank: Sequence[str] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
    ) -> PendingSnapshot:
        """Take a snapshot of the state as it is now; return once the state may change.

        The take goes on in the background. :meth:`PendingSnapshot.wait` ends it, and raises its
        error. An error is also logged at once; if no ``wait()`` has raised it, the next take of the
        store does, on all ranks, and does not begin. The arguments are those of :meth:`take`, and
        two more.

        ``max_staging_bytes`` bounds the memory for the copies of all pending takes together, which
        is kept for the next take; at least a few blocks of 64 MiB are used. If the states are
        larger, this blocks until enough of them has been stored.

        ``max_pending``, the same on all ranks, is how many takes may be pending, with this one.
        While there are as many, this blocks. Each is stored, and committed, once the one before it
        has ended; if one fails, the others go on. A name that a pending take has is then refused
        not here, but by :meth:`PendingSnapshot.wait`.
        """
        from casnap.ranks.joining import join
        from casnap.state.stateful import check_order
        from casnap.take.options import TakeOptions

        refuse_nested_take()
        check_order("Snapshot.async_take(path, app_state)", app_state, path)
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
        comm = join(pg, timeout, f"the async_take of {os.fspath(path)!r}")
        opened, name = find_together(path, storage_options, store, comm)
        pending = opened.async_take(comm, app_state, name, options)
        return PendingSnapshot(opened, pending, check_name(name), pg)

    # --- restoring ---

    def restore(
        self,
        app_state: Mapping[str, Stateful],
        strict: bool = True,
        *,
        allow_pickle: bool = False,
        rename: Rename | None = None,
        progress: Progress | None = None,
        read_once: bool | None = None,
        timeout: float | None = None,
    ) -> RestoreReport:
        """Restore an app state, or some of its keys, in place where that is possible.

        A tensor is filled in place where the state holds a tensor of the same path and shape
        (another dtype is cast). Then each value's ``load_state_dict`` gets the state that was
        taken. With ``torch.distributed``, all ranks call this together; their number and their
        sharding may differ from those of the take. A value that belongs to one rank is restored
        only by that rank.

        Args:
            app_state: The values to restore, by key.
            strict: If modules, optimizers or dicts differ from the snapshot, raise before anything
                is written. Otherwise restore what fits.
            allow_pickle: Unpickle values that were taken with ``allow_pickle=True``. Use this only
                for a store that you trust as you trust code.
            rename: The key in ``app_state`` for each key of the snapshot: a mapping, or a function
                that returns None for keys to leave out. Keys that a mapping lacks stay. It is the
                same on all ranks. Messages have the keys of the snapshot.
            progress: Called as ``progress(phase, done, total)``, in bytes, from any thread.
            read_once: Read each stored byte on one rank, which passes it on to the others (True),
                or have each rank read for itself (False). By default, ranks that all see the store
                through one page cache do this if they can share memory and it saves 96 MiB of
                reading or more; otherwise each reads for itself. All other ranks read once.
            timeout: Seconds that a rank waits for another before all ranks raise; 600 by default.

        Returns:
            What was not restored, or has no counterpart in the snapshot.

        Raises:
            MismatchError: State and snapshot differ. The error lists all differences. Or a
                ``load_state_dict`` raised an error; this one names the key, and what was restored
                before.
            DamagedError: Stored bytes are missing or damaged.
            SnapshotNotFoundError: The snapshot was deleted, and its bytes were collected.
            RankError: Another rank failed, died or did not answer in time.
        """
        from casnap.ranks.joining import join
        from casnap.restore.restore import RestoreOptions, restore

        options = RestoreOptions(
            strict=strict,
            allow_pickle=allow_pickle,
            progress=progress,
            read_once=read_once,
            rename=rename,
        )
        comm = join(self.pg, timeout, f"the restore of {self.name!r}")
        with comm, self.contents.reading():
            return restore(self.contents, app_state, options, comm)

    def export(
        self,
        out: str | os.PathLike[str],
        *,
        path: str | None = None,
        format: str | None = None,
        max_shard_size: int | None = None,
        tensors_only: bool = False,
        tied: Sequence[str] | torch.nn.Module = (),
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ExportReport:
        """Write the snapshot, or a part of it, to files of another format, verified and whole.

        Args:
            out: The file to make; with ``max_shard_size``, or for ``dcp``, the folder.
            path: What to export: ``model``. Tensors are named by the keys below, joined by dots.
            format: ``safetensors``, ``torch`` (one file of ``torch.save``) or ``dcp``. By default,
                the suffix of ``out`` decides: ``.pt``, ``.pth``, ``.bin`` and ``.ckpt`` are for
                ``torch``, ``.dcp`` is for ``dcp``, all others are for ``safetensors``.
            max_shard_size: Bytes of tensors in each file, of safetensors with an index, at most.
            tensors_only: Leave out what safetensors cannot hold: values, sparse tensors, …
            tied: Names of tensors to store only under another name, whose bytes they have; or the
                module, if ``path`` is where its state is: each of its parameters is stored once,
                under its first name.
            dry_run: Only report what would be written.
            progress: Called as ``progress(phase, done, total)``, in bytes.

        Raises:
            TargetExistsError: There is something at ``out``.
            FileFormatError: The format cannot hold what is there; the error lists it. Or the suffix
                of ``out`` means another format.
            EntryNotFoundError: There is no such path.
            DamagedError: Stored bytes are missing or damaged.
        """
        from casnap.files.exporting import export
        from casnap.files.report import ExportOptions, format_of, tied_names

        names = tied_names(tied)
        how = ExportOptions(
            path=path,
            format=format_of(out, format),
            max_shard_size=max_shard_size,
            tensors_only=tensors_only,
            tied=names,
            dry_run=dry_run,
        )
        with self.contents.reading():
            return export(self.contents, Path(local_path(out)), how, progress)

    # --- properties ---

    @property
    def store(self) -> Store:
        """The store that holds the snapshot."""
        return self._store

    @property
    def path(self) -> str:
        """The URI of the store, then the name of the snapshot."""
        return self._opened.path_of(self.name)

    @property
    def metadata(self) -> SnapshotMetadata:
        """The version, the world size, the manifest and the user's own metadata."""
        return SnapshotMetadata(self, __version__)

    @property
    def commit_id(self) -> str:
        """The id of the commit: 32 hex digits. Every snapshot has another one."""
        return self.row.commit.hex()

    @property
    def seq(self) -> int:
        """The number of the root that the take committed."""
        return self.row.seq

    @property
    def time(self) -> float:
        """The time of the commit: seconds since the epoch, by the writer's clock."""
        return self.row.time

    @property
    def world_size(self) -> int:
        """The number of ranks that took the snapshot."""
        return self.row.world_size

    @property
    def stats(self) -> TakeStats:
        """The logical bytes, new bytes, entries, seconds and requests of the take."""
        return TakeStats(**asdict(self.row.stats), requests=self.requests)

    @property
    def requests(self) -> dict[str, int]:
        """How many requests the take made, by kind, on all ranks.

        Empty for a store on this machine, and for a snapshot that was looked up.
        """
        return dict(self._requests)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that users gave the snapshot."""
        return self.row.user_tags

    def __repr__(self) -> str:
        return f"Snapshot({self.path!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process open the store anew; process groups stay in their process."""
        return type(self), (Found(self._opened, self.name, self.row, self._requests),)


class PendingSnapshot:
    """A snapshot that is being stored in the background."""

    def __init__(self, store: OpenStore, take: PendingTake, name: str, pg: Any = None) -> None:
        self._opened = store
        # Kept for the snapshot, which is to have the same Store.
        self._store = store.store
        self._pg = pg
        self._take = take
        self._name = name

    @property
    def path(self) -> str:
        """The path that the snapshot will have."""
        return self._opened.path_of(self._name)

    def done(self) -> bool:
        """Whether the take has ended, with success or with an error."""
        return self._take.done()

    def wait(self) -> Snapshot:
        """Wait until the snapshot is durable, and return it.

        Raises:
            CasnapError: The take failed; nothing was committed. Or this snapshot is durable, but an
                earlier take of the store failed, and no call has raised that yet: call again.
        """
        taken = self._take.wait()
        return Snapshot(Found(self._opened, self._name, *astuple(taken)), self._pg)
