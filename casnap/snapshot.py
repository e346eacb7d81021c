"""One snapshot: TorchSnapshot's names and meanings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from casnap.format.entries import Entry
from casnap.format.names import check_name
from casnap.format.records import Row, Stats
from casnap.runtime import calls
from casnap.storage.contents import Contents

if TYPE_CHECKING:
    from casnap.ranks.comm import Comm
    from casnap.restore.report import RestoreReport
    from casnap.restore.selection import Index
    from casnap.state.stateful import Stateful
    from casnap.storage.retention import Retention
    from casnap.store import Store
    from casnap.take.pending import PendingTake

Progress = Callable[[int, int], None]


class EntriesByPath(dict[str, Entry]):
    """All entries of a snapshot by path, ``<rank>/<key>/<path>``, and whose each of them is.

    What is global stands under each rank's prefix.

    Args:
        entries: The entries.
        own: The paths of those that belong to their rank.
    """

    def __init__(self, entries: Mapping[str, Entry], own: frozenset[str]) -> None:
        super().__init__(entries)
        self._own = own

    def is_global(self, path: str) -> bool:
        """Whether an entry is everyone's, to be restored on any number of ranks.

        Otherwise it belongs to the rank that its path begins with, and only that one restores it.

        Raises:
            KeyError: There is no such path.
        """
        if path not in self:
            raise KeyError(path)
        return path not in self._own


class SnapshotMetadata:
    """What is known of a snapshot beside its tensors.

    Attributes:
        version: The casnap version that reads it.
        world_size: The ranks that took it.
        user: What ``metadata=`` said when it was taken.
    """

    def __init__(self, snapshot: Snapshot, version: str) -> None:
        self._snapshot = snapshot
        self.version = version
        self.world_size = snapshot.world_size
        with snapshot.contents.reading():
            self.user: dict[str, Any] = dict(snapshot.contents.metadata)

    @property
    def manifest(self) -> EntriesByPath:
        """All entries by path, with ranks."""
        return self._snapshot.get_manifest()

    def __repr__(self) -> str:
        """Say what is known without reading the tree."""
        return (
            f"SnapshotMetadata(version={self.version!r}, world_size={self.world_size}, "
            f"user={self.user!r})"
        )


class Snapshot:
    """One immutable, named checkpoint in a store.

    A handle stays with the snapshot that it opened: one of the same name that is taken later is
    another snapshot.

    Args:
        path: Where it is: the path of a store, then its name.
        pg: The ranks that restore together; by default all of them, or this process alone.
        storage_options: For TorchSnapshot's users; must be empty in this version.
        store: The store, or its URI, that ``path`` is then a name in.

    Raises:
        SnapshotNotFoundError: There is none of this name.
        NotAStoreError: There is no store above the path.
    """

    @calls.named("Snapshot()")
    def __init__(
        self,
        path: str | os.PathLike[str],
        pg: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        store: Store | str | os.PathLike[str] | None = None,
    ) -> None:
        found, name = _store_and_name(path, storage_options, store, create=False)
        self._open(found, check_name(name), found.row(name), pg)

    @classmethod
    def _of(cls, store: Store, name: str, row: Row, pg: Any = None) -> Snapshot:
        snapshot = cls.__new__(cls)
        snapshot._open(store, name, row, pg)
        return snapshot

    def _open(self, store: Store, name: str, row: Row, pg: Any = None) -> None:
        self.pg = pg
        self.store = store
        self.name = name
        self.row = row
        self.contents = Contents(store.objects, store.outer_name(name), row)

    # --- taking ---

    @classmethod
    @calls.named("take()", is_take=True)
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
        timeout: float | None = None,
    ) -> Snapshot:
        """Take a snapshot; returns when it is durable.

        With ``torch.distributed`` all ranks call it, and one snapshot comes of it. Each byte is
        stored once, whoever holds it. What is sharded, declared as replicated or equal on all
        ranks is *global*, to be restored on any number of ranks; all else belongs to its rank.

        Args:
            path: Where to. The nearest store above is used; without one, the parent becomes one.
                Rank 0's absolute path is everyone's.
            app_state: Key → module, optimizer, :class:`StateDict`, … ; the same keys on all ranks.
            pg: The ranks that take part; by default all of them, or this process alone.
            replicated: Globs (``*`` crosses ``/``) of paths like ``model/**`` that are the same on
                all ranks: each rank hashes and writes a part. Samples are compared first; what
                differs is refused. Parameters of DDP modules are known to be.
            storage_options: Must be empty in this version.
            store: The store, or its URI, that ``path`` is then a name in.
            metadata: What JSON holds, up to 64 KiB, kept beside the snapshot; rank 0's.
            overwrite: Replace a snapshot of this name, unless it is tagged.
            allow_pickle: Store what has no safe encoding by pickle; to restore it then needs
                ``allow_pickle=True`` too.
            progress: Called with bytes done and bytes in all, now and then.
            retention: After the commit, forget those snapshots of the same folder that it does
                not keep; never this one. If that fails, a warning is logged.
            per_rank: Globs of paths that belong to their rank, even if they are equal: the state
                of a data loader, say. :class:`RNGState` always does.
            timeout: Seconds that one rank waits for another before all raise; 600 by default.

        Raises:
            StateError: Something in the state can't be taken, or ranks contradict each other.
            SnapshotError: The name can't be used.
            StoreError: The store can't be used; nothing was committed.
            RankError: Another rank failed, died or was not heard of.
        """
        from casnap.take.take import TakeOptions

        options = TakeOptions(
            metadata,
            overwrite,
            allow_pickle,
            None,
            progress,
            retention,
            replicated,
            per_rank,
        )
        comm, found, name = _joined(path, pg, storage_options, store, timeout, "take")
        return found._take(comm, app_state, name, options, pg)

    @classmethod
    @calls.named("async_take()", is_take=True)
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
        progress: Progress | None = None,
        retention: Retention | None = None,
        per_rank: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> PendingSnapshot:
        """Take a snapshot of the state as it is now; returns once the state may change.

        As :meth:`take`, but storing goes on in the background. The first error is raised by
        :meth:`PendingSnapshot.wait`.

        Args:
            path: As for :meth:`take`.
            app_state: As for :meth:`take`.
            pg: As for :meth:`take`.
            replicated: As for :meth:`take`.
            storage_options: As for :meth:`take`.
            store: As for :meth:`take`.
            metadata: As for :meth:`take`.
            overwrite: As for :meth:`take`.
            allow_pickle: As for :meth:`take`.
            max_staging_bytes: The most memory for the copy of the state, which is kept for the
                next take. What does not fit blocks until enough has been stored.
            progress: As for :meth:`take`.
            retention: As for :meth:`take`; done before :meth:`PendingSnapshot.wait` returns.
            per_rank: As for :meth:`take`.
            timeout: As for :meth:`take`.
        """
        from casnap.take.take import TakeOptions

        options = TakeOptions(
            metadata,
            overwrite,
            allow_pickle,
            max_staging_bytes,
            progress,
            retention,
            replicated,
            per_rank,
        )
        comm, found, name = _joined(path, pg, storage_options, store, timeout, "async_take")
        return found._async_take(comm, app_state, name, options, pg)

    # --- giving back ---

    @calls.named("restore()")
    def restore(
        self,
        app_state: Mapping[str, Stateful],
        strict: bool = True,
        *,
        allow_pickle: bool = False,
        progress: Progress | None = None,
        read_once: bool = True,
        timeout: float | None = None,
    ) -> RestoreReport:
        """Restore an app state, or some of its keys, in place where that is possible.

        Tensors are filled in place where the state holds one of the same path and shape (another
        dtype is cast); then each value's ``load_state_dict`` gets the state that was taken. With
        ``torch.distributed`` all ranks call it, as many as there are and sharded as they like.
        What belongs to one rank is restored by that rank alone.

        Args:
            app_state: What to restore.
            strict: Raise, before anything is written, if modules and snapshot differ. Otherwise
                restore what fits.
            allow_pickle: Unpickle what was taken with ``allow_pickle=True``: only for stores
                that you trust as you trust code.
            progress: Called with bytes done and bytes in all, now and then.
            read_once: Read each stored byte on one rank, which passes it on to those that need
                it. Otherwise all read for themselves: faster where storage is faster than the
                network.
            timeout: Seconds that one rank waits for another before all raise; 600 by default.

        Returns:
            What was left alone.

        Raises:
            MismatchError: Everything that differs, in one error.
            DamagedError: Stored bytes are missing or damaged.
            SnapshotNotFoundError: It was deleted, and collected meanwhile.
            RankError: Another rank failed, died or was not heard of.
        """
        from casnap.ranks.comm import join
        from casnap.restore.restore import RestoreOptions, restore

        options = RestoreOptions(strict, allow_pickle, progress, read_once)
        comm = join(self.pg, timeout, f"the restore of {self.name!r}")
        with comm, self.contents.reading():
            return restore(self.contents, app_state, options, comm)

    @calls.named("read_object()")
    def read_object(
        self,
        path: str,
        obj_out: Any = None,
        memory_budget_bytes: int | None = None,
        *,
        index: Index | None = None,
        allow_pickle: bool = False,
    ) -> Any:
        """Read one tensor or value, a part of a tensor, or everything below a container.

        Args:
            path: As :meth:`get_manifest` gives it, with or without the rank.
            obj_out: A tensor of the right shape to read into; another dtype is cast.
            memory_budget_bytes: The most bytes of buffers beside the result; at least one chunk.
            index: Ints, slices and ``...``, as in ``tensor[index]``; only what it touches is read.
            allow_pickle: As for :meth:`restore`.

        Raises:
            EntryNotFoundError: There is no such path; names the nearest.
            MismatchError: ``obj_out`` has another shape.
            DamagedError: Stored bytes are missing or damaged.
        """
        from casnap.restore.read_object import read_object

        with self.contents.reading():
            return read_object(
                self.contents, path, obj_out, memory_budget_bytes, index, allow_pickle=allow_pickle
            )

    @calls.named("get_manifest()")
    def get_manifest(self) -> EntriesByPath:
        """Return all entries by path, ``<rank>/<key>/<path>``: a dict that knows whose each is.

        ``get_manifest().is_global(path)`` says whether an entry is everyone's, or its rank's own.
        """
        contents = self.contents
        with contents.reading():
            ranks = list(contents.ranks())
            entries = {f"{r}/{path}": e for r in ranks for path, e in contents.entries(r)}
            own = frozenset(f"{r}/{path}" for r in ranks for path in contents.own_paths(r))
            return EntriesByPath(entries, own)

    def get_state_dict_for_key(self, key: str, *, allow_pickle: bool = False) -> dict[str, Any]:
        """Return the state that was taken under a key of the app state, in new memory.

        Raises:
            EntryNotFoundError: There is no such key.
        """
        from casnap.state.containers import segment_of

        state: dict[str, Any] = self.read_object(segment_of(key), allow_pickle=allow_pickle)
        return state

    # --- what is known ---

    @property
    def path(self) -> str:
        """Where it is: the store's URI and the name."""
        return f"{self.store.uri}/{self.name}"

    @property
    def metadata(self) -> SnapshotMetadata:
        """Version, world size, manifest and the user's own metadata."""
        from casnap import __version__

        return SnapshotMetadata(self, __version__)

    @property
    def commit_id(self) -> str:
        """What tells this snapshot from any other, 32 hex digits."""
        return self.row.commit.hex()

    @property
    def seq(self) -> int:
        """The number of the root that it was committed by."""
        return self.row.seq

    @property
    def time(self) -> float:
        """When it was committed: seconds since the epoch, by the writer's clock."""
        return self.row.time

    @property
    def world_size(self) -> int:
        """The ranks that took it."""
        return self.row.world_size

    @property
    def stats(self) -> Stats:
        """Logical bytes, new bytes, entries and seconds of the take."""
        return self.row.stats

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that it has."""
        return self.row.tags

    def __repr__(self) -> str:
        """Say where it is."""
        return f"Snapshot({self.path!r})"


class PendingSnapshot:
    """A snapshot that is being stored in the background."""

    def __init__(self, store: Store, take: PendingTake, name: str, pg: Any = None) -> None:
        self._store = store
        self._pg = pg
        self._take = take
        self._name = name

    @property
    def path(self) -> str:
        """Where it will be."""
        return f"{self._store.uri}/{self._name}"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._take.done()

    def wait(self) -> Snapshot:
        """Wait until it is durable, and return it.

        Raises:
            CasnapError: What went wrong; nothing was committed.
        """
        return Snapshot._of(self._store, self._name, self._take.wait(), self._pg)


def _store_and_name(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    store: Store | str | os.PathLike[str] | None,
    *,
    create: bool,
) -> tuple[Store, str]:
    from casnap.store import Store

    if storage_options:
        raise NotImplementedError("storage_options are not supported in this version")
    if store is None:
        return Store._for_snapshot(path, create=create)
    found = store if isinstance(store, Store) else Store(store, create=create)
    return found, os.fspath(path)


def _joined(
    path: str | os.PathLike[str],
    pg: Any,
    storage_options: Mapping[str, Any] | None,
    store: Store | str | os.PathLike[str] | None,
    timeout: float | None,
    verb: str,
) -> tuple[Comm, Store, str]:
    """Begin something with all ranks in the store that rank 0 finds, and makes if need be."""
    from casnap.ranks.comm import join
    from casnap.store import Store

    comm = join(pg, timeout, f"the {verb} of {os.fspath(path)!r}")
    with comm.telling():
        if comm.size == 1:
            return comm, *_store_and_name(path, storage_options, store, create=True)
        given = os.fspath(path)
        found, name = None, ""
        if comm.rank == 0:
            found, name = _store_and_name(path, storage_options, store, create=True)
            said = [given, found.objects.backend.uri, found.outer_name(name)]
            comm.broadcast(msgspec.msgpack.encode(said))
            return comm, found, name
        there, uri, full = msgspec.msgpack.decode(comm.broadcast(), type=tuple[str, str, str])
        comm.check_same("the path", given, there)
        return comm, Store(uri, create=False), full
