"""Everything at one URI: many snapshots that share their chunks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from casnap.errors import NotAStoreError, SnapshotNotFoundError, UnsupportedFormatError, nearest
from casnap.format.codec import Codec
from casnap.format.names import check_name
from casnap.format.records import DEFAULT_CHUNK_SIZE, Row
from casnap.runtime import calls
from casnap.snapshot import PendingSnapshot, Progress, Snapshot
from casnap.storage.location import Location, create_store, locate_snapshot, locate_store
from casnap.storage.objects import Objects
from casnap.storage.retention import PruneReport, Pruning, Retention, prune
from casnap.storage.table import Table, change_table, editing, tagged, unmark, untagged, upgrade

if TYPE_CHECKING:
    from casnap.maintenance.check import CheckReport
    from casnap.maintenance.diff import Diff
    from casnap.maintenance.gc import GcReport
    from casnap.maintenance.marks import Progress as Phases
    from casnap.maintenance.repair import RepairReport
    from casnap.maintenance.usage import Usage
    from casnap.ranks.comm import Comm
    from casnap.state.stateful import Stateful
    from casnap.take.take import TakeOptions

V = TypeVar("V")


class Store:
    """Many snapshots at one place, each chunk stored once.

    Args:
        uri: A folder (or ``memory://name``). Below an existing store this is a view of it whose
            names all begin with the rest of the path.
        create: Make the store if there is none.
        chunk_size: For a new store: bytes, a power of two from 64 KiB to 64 MiB.
        compress: Compress new chunks with zstd, where that makes them smaller. Of several ranks
            that take together, rank 0's choice is everyone's.
        storage_options: Must be empty in this version.

    Raises:
        NotAStoreError: There is none, and it was not to be created.
        UnsupportedFormatError: A newer casnap made it.
        StoreError: This is no place for a store.
    """

    @calls.named("Store()")
    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        create: bool = True,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        compress: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if storage_options:
            raise NotImplementedError("storage_options are not supported in this version")
        self._open(locate_store(uri), create=create, asked=True, chunk_size=chunk_size)
        self._codec = Codec.ZSTD if compress else Codec.RAW

    @classmethod
    def _for_snapshot(cls, path: str | os.PathLike[str], *, create: bool) -> tuple[Store, str]:
        found = locate_snapshot(path)
        store = cls.__new__(cls)
        store._codec = Codec.RAW
        store._open(found._replace(name=""), create=create, asked=False)
        return store, found.name

    def _open(
        self, found: Location, *, create: bool, asked: bool, chunk_size: int = DEFAULT_CHUNK_SIZE
    ) -> None:
        if sys.byteorder != "little":
            raise UnsupportedFormatError(
                f"{found.backend.uri} cannot be used on this machine: the bytes of tensors are "
                "little-endian, and this casnap does not swap them for a big-endian one"
            )
        if create and not found.name:
            # Where the store exists this finishes a creation that was cut off.
            create_store(found.backend, chunk_size=chunk_size, asked=asked)
        elif not found.exists:
            raise NotAStoreError(
                f"{found.backend.uri} is not a casnap store, nor is any folder above it; make one "
                f"with `casnap init {found.backend.uri}`, or check the path"
            )
        self.objects = Objects(found.backend)
        self.prefix = found.name

    # --- what it is ---

    @property
    def uri(self) -> str:
        """Where it is, with the prefix."""
        root = self.objects.backend.uri
        return f"{root}/{self.prefix}" if self.prefix else root

    @property
    def id(self) -> str:
        """What tells this store from others, 32 hex digits."""
        return self.objects.config.store_id

    @property
    def chunk_size(self) -> int:
        """The largest chunk, in bytes."""
        return self.objects.config.chunk_size

    def __repr__(self) -> str:
        """Say where it is."""
        return f"Store({self.uri!r})"

    def full_name(self, name: str) -> str:
        """Return a name as it stands in the table, with this view's prefix.

        Raises:
            InvalidNameError: The name cannot be used.
        """
        return check_name(self.outer_name(check_name(name)))

    def outer_name(self, name: str) -> str:
        """Return a name that was checked, or comes from the table, with this view's prefix."""
        return f"{self.prefix}/{name}" if self.prefix else name

    # --- snapshots ---

    @calls.named("take()", is_take=True)
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
        timeout: float | None = None,
    ) -> Snapshot:
        """Take a snapshot; see :meth:`Snapshot.take`."""
        from casnap.ranks.comm import join
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
        full = self.full_name(name)
        comm = join(pg, timeout, f"the take of {full!r}")
        return self._take(comm, app_state, name, options, pg)

    def _take(
        self,
        comm: Comm,
        app_state: Mapping[str, Stateful],
        name: str,
        options: TakeOptions,
        pg: Any,
    ) -> Snapshot:
        from casnap.take.take import take

        with comm:
            asked = replace(options, codec=self._codec)
            row = take(self.objects, self.full_name(name), app_state, asked, comm)
        return Snapshot._of(self, check_name(name), row, pg)

    @calls.named("async_take()", is_take=True)
    def async_take(
        self,
        app_state: Mapping[str, Stateful],
        name: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        max_staging_bytes: int | None = None,
        progress: Progress | None = None,
        retention: Retention | None = None,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        per_rank: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> PendingSnapshot:
        """Take a snapshot in the background; see :meth:`Snapshot.async_take`."""
        from casnap.ranks.comm import join
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
        full = self.full_name(name)
        comm = join(pg, timeout, f"the async_take of {full!r}")
        return self._async_take(comm, app_state, name, options, pg)

    def _async_take(
        self,
        comm: Comm,
        app_state: Mapping[str, Stateful],
        name: str,
        options: TakeOptions,
        pg: Any,
    ) -> PendingSnapshot:
        from casnap.take.take import async_take

        asked = replace(options, codec=self._codec)
        pending = async_take(self.objects, self.full_name(name), app_state, asked, comm)
        return PendingSnapshot(self, pending, check_name(name), pg)

    @calls.named("a look at the snapshots")
    def row(self, name: str) -> Row:
        """Return the table's row of a snapshot.

        Raises:
            SnapshotNotFoundError: There is none of this name.
        """
        full = self.full_name(name)

        def found(table: Table) -> Row:
            row = table.get(full)
            if row is None:
                hint = nearest(full, (name for name, _ in table.items()))
                raise SnapshotNotFoundError(
                    f"{self.objects.backend.uri} holds no snapshot {full!r}{hint}"
                )
            return row

        return self._read(found)

    def _read(self, read: Callable[[Table], V]) -> V:
        """Return what something makes of the table as it is now."""
        objects = self.objects
        return objects.current(lambda root: read(objects.table(root)))

    def _folder(self, prefix: str | None) -> str:
        return "/".join(p for p in (self.prefix, (prefix or "").strip("/")) if p)

    def _inner_name(self, full: str) -> str:
        """Return a name of the table that is below this view, as it is called here."""
        return full[len(self.prefix) + 1 :] if self.prefix else full

    def __getitem__(self, name: str) -> Snapshot:
        """Return a snapshot by name, or raise :class:`SnapshotNotFoundError`."""
        return Snapshot._of(self, check_name(name), self.row(name))

    def __contains__(self, name: object) -> bool:
        """Whether there is a snapshot of this name."""
        if not isinstance(name, str):
            return False
        try:
            self.row(name)
        except SnapshotNotFoundError:
            return False
        return True

    @calls.named("snapshots()")
    def snapshots(self, prefix: str | None = None) -> list[Snapshot]:
        """Return the snapshots, or those below a prefix, in the order of their commits."""
        folder = self._folder(prefix)
        rows = self._read(lambda table: list(table.below(f"{folder}/" if folder else "")))
        found = [Snapshot._of(self, self._inner_name(name), row) for name, row in rows]
        return sorted(found, key=lambda s: s.seq)

    def latest(self, prefix: str | None = None) -> Snapshot | None:
        """Return the snapshot that was committed last, or None where there is none."""
        return max(self.snapshots(prefix), key=lambda s: s.seq, default=None)

    @calls.named("delete()")
    def delete(self, name: str, *, commit_id: str | None = None) -> None:
        """Forget a snapshot, tagged or not; its bytes are freed by garbage collection.

        Args:
            name: The snapshot.
            commit_id: Forget it only if it is this one still; by default the one that has the name
                now.

        Raises:
            SnapshotNotFoundError: There is none of this name, or it is another one.
        """
        full = self._edit(name, commit_id, lambda _: None)
        unmark(self.objects, [full])

    @calls.named("prune()")
    def prune(
        self, retention: Retention, *, prefix: str | None = None, dry_run: bool = False
    ) -> PruneReport:
        """Forget the snapshots that no rule keeps, all in one commit.

        Each run, that is each folder of snapshots, is judged on its own. What is to be forgotten
        is decided on the table that the commit changes: what was tagged, taken or replaced in the
        meantime counts. The bytes are freed by garbage collection.

        Args:
            retention: The rules.
            prefix: Prune the runs in and below this folder alone.
            dry_run: Only say what would be forgotten.

        Returns:
            Each snapshot, whether it is kept, and by which rules.
        """
        pruning = Pruning(self.objects, retention, self._folder(prefix))
        verdicts = self._read(pruning.judge) if dry_run else prune(self.objects, pruning)
        own = [replace(v, name=self._inner_name(v.name)) for v in verdicts]
        return PruneReport(own, dry_run)

    @calls.named("tag()")
    def tag(self, name: str, *tags: str) -> None:
        """Give a snapshot tags: with any, it is neither pruned nor overwritten.

        Args:
            name: The snapshot.
            tags: 1 to 100 characters each, without white space, not beginning with ``-`` or ``#``.

        Raises:
            SnapshotNotFoundError: There is none of this name.
            InvalidNameError: One of them cannot be a tag.
            SnapshotError: It would have more than 100.
        """
        self._edit(name, None, lambda row: tagged(row, tags))

    @calls.named("untag()")
    def untag(self, name: str, *tags: str) -> None:
        """Take tags away from a snapshot, those that it has.

        Raises:
            SnapshotNotFoundError: There is none of this name.
        """
        self._edit(name, None, lambda row: untagged(row, tags))

    def _edit(self, name: str, commit_id: str | None, edit: Callable[[Row], Row | None]) -> str:
        """Edit or remove the row of a snapshot that has this commit, and return its full name."""
        full = self.full_name(name)
        if commit_id is None:
            commit_id = self.row(name).commit.hex()
        change_table(self.objects, editing(full, commit_id, edit, self.objects.backend.uri))
        return full

    @calls.named("upgrade()")
    def upgrade(self) -> bool:
        """Bring the store to the newest format, in one commit; return whether it was older.

        A store is read and written on in the format that it has. The newest one keeps takes quick
        and small however many snapshots there are. Versions of casnap that do not know it refuse
        the store from then on.
        """
        return upgrade(self.objects)

    @property
    def format(self) -> int:
        """The number of the format that the store has."""
        return self.objects.newest().format

    @calls.named("gc()")
    def gc(
        self,
        *,
        grace: float | timedelta = 86400.0,
        repack: float = 0.5,
        dry_run: bool = False,
        exclusive: bool = False,
        progress: Phases | None = None,
    ) -> GcReport:
        """Collect garbage: delete what no snapshot needs.

        Safe beside any number of takes, deletes and other collectors, whatever their clocks say,
        and beside readers within the grace. The store as a whole is collected, also where this is
        a view of it.

        Args:
            grace: Seconds for which what nobody needs is kept, so that readers of snapshots that
                were deleted, and takes that rely on it, may end. With 0 it goes at once: such a
                take begins again, such a reader gets an error.
            repack: Packs of which less than this share is needed are copied without the rest;
                0 for none.
            dry_run: Only say what would be done.
            exclusive: Nobody else writes to this store: says the user, where the place that it
                lies in cannot keep writers apart.
            progress: Told what is being done, how much of it is done, and how much there is.

        Raises:
            StoreError: The store cannot be written to, or not safely.
            DamagedError: Something could not be read; nothing was deleted.
            ValueError: A number makes no sense.
        """
        from casnap.maintenance.gc import GcOptions, collect

        seconds = grace.total_seconds() if isinstance(grace, timedelta) else grace
        return collect(self.objects, GcOptions(seconds, repack, dry_run, exclusive), progress)

    @calls.named("diff()")
    def diff(self, a: str, b: str) -> Diff:
        """Return what differs between two snapshots, reading only subtrees that do."""
        from casnap.maintenance.diff import diff

        return diff(self[a].contents, self[b].contents)

    @calls.named("usage()")
    def usage(self, prefix: str | None = None) -> list[Usage]:
        """Return logical, stored and unique bytes of each snapshot, in the order of commits."""
        from casnap.maintenance.usage import usage

        return usage([s.contents for s in self.snapshots(prefix)], self.objects)

    @calls.named("check()")
    def check(
        self,
        *,
        data: bool = False,
        sample: float | None = None,
        seed: int | None = None,
        progress: Phases | None = None,
    ) -> CheckReport:
        """Check that everything is there, and whole; nothing is changed.

        The store as a whole is checked, also where this is a view of it.

        Args:
            data: Read and verify every chunk, at each of its places.
            sample: Read and verify a random share of them, up to 1.
            seed: Chooses the share; by default another one each time.
            progress: Told what is being done, how much of it is done, and how much there is.

        Returns:
            All that is wrong, and which parts of which snapshots it hurts.
        """
        from casnap.maintenance.check import check

        return check(self.objects, data=data, sample=sample, seed=seed, progress=progress)

    @calls.named("repair()")
    def repair(
        self,
        *,
        sources: Sequence[str | os.PathLike[str]] = (),
        progress: Phases | None = None,
        dry_run: bool = False,
    ) -> RepairReport:
        """Save what can be saved of a damaged store, all of it where this is a view.

        Lost parts of the index are made anew from the packs, and what is whole in a damaged pack
        is copied out of it. What is nowhere whole is looked for in the sources, and noted as lost
        if it is in none: the next take of the same bytes stores them anew.

        Args:
            sources: Other casnap stores, and files or folders of tensors: ``.safetensors``,
                ``.npy``, and what ``torch.save`` wrote.
            progress: Told what is being done, how much of it is done, and how much there is.
            dry_run: Change nothing, and say what would be done.

        Raises:
            DamagedError: The newest root cannot be read.
        """
        from casnap.maintenance.repair import repair

        if isinstance(sources, str | os.PathLike):
            raise TypeError(f"sources is a list, such as [{str(sources)!r}]; got one alone")
        return repair(self.objects, sources=sources, progress=progress, dry_run=dry_run)
