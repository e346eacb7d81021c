"""A store: many snapshots at one URI, which share their chunks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from casnap.backends import Backend
from casnap.errors import SnapshotNotFoundError
from casnap.format.codec import Codec
from casnap.format.names import check_name
from casnap.format.records import DEFAULT_CHUNK_SIZE, Row
from casnap.opened import Found, OpenStore, open_store
from casnap.runtime import calls
from casnap.runtime.progress import Progress, told_what
from casnap.snapshot import PendingSnapshot, Snapshot
from casnap.storage.location import Location, locate_store
from casnap.storage.retention import PruneReport, Pruning, Retention, prune
from casnap.storage.settings import change_settings, codec_named, codec_settings, settings_of
from casnap.storage.table import change_table, editing, tagged, unmark, untagged, upgrade

if TYPE_CHECKING:
    from casnap.maintenance.check import CheckReport
    from casnap.maintenance.diff import Diff
    from casnap.maintenance.gc import GcReport
    from casnap.maintenance.repair import RepairReport
    from casnap.maintenance.usage import Usage
    from casnap.state.stateful import Stateful


class Store:
    """Many snapshots at one place. Each chunk is stored once.

    Args:
        uri: A folder, ``s3://bucket/run1``, ``gs://bucket/run1``, another URI of fsspec's,
            ``memory://name``, or a :class:`casnap.backends.Backend`. A folder below an existing
            store opens a view of that store, and so does ``s3://bucket/ckpts//run1``. The full
            names of all snapshots in the view begin with the rest of the path.
        create: Make the store if there is none.
        chunk_size: For a new store: bytes, a power of two from 64 KiB to 64 MiB.
        codec: For a new store: how new chunks are stored, "raw" or "zstd" (where that makes them
            smaller). :meth:`configure` changes it.
        compress: Deprecated. ``True`` is ``codec="zstd"`` for a new store; in an existing one it
            holds for the takes of this object.
        storage_options: How to reach a remote store: what s3fs, gcsfs or another file system of
            fsspec takes, such as ``{"endpoint_url": ...}``. It is neither stored nor shown.
        exclusive: You make sure that no other process writes to this store. This is asked
            only where the server cannot keep two writers apart (no put-if-absent).
        markers: Put ``<name>/casnap-snapshot.json`` for each snapshot, so that ``ls``,
            ``os.path.exists`` and ``fsspec`` see the snapshot; remove it with the snapshot. On a
            remote store each is one request.

    Raises:
        NotAStoreError: There is no store, and ``create`` is False.
        UnsupportedFormatError: A newer casnap made the store.
        StoreError: A store cannot be made at this place, or cannot be reached.
        ValueError: ``storage_options`` were given for a store on this machine; there is no such
            codec.
    """

    @calls.named("Store()")
    def __init__(
        self,
        uri: str | os.PathLike[str] | Backend | OpenStore,
        *,
        create: bool = True,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        codec: str | None = None,
        compress: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
        exclusive: bool = False,
        markers: bool = True,
    ) -> None:
        if not isinstance(uri, OpenStore):
            pinned = None if compress is None else _pinned(codec, compress=compress)
            chosen = codec_named(codec) if codec is not None else pinned
            uri = open_store(
                _located(uri, storage_options),
                create=create,
                chunk_size=chunk_size,
                codec=chosen or Codec.RAW,
                exclusive=exclusive,
            )
            uri.codec = None if uri.is_new else pinned
            uri.objects.marks = markers
        self.opened = uri
        uri.note_store(self)
        self.objects = uri.objects
        self.prefix = uri.prefix

    # --- properties ---

    @property
    def uri(self) -> str:
        """The URI of the store, and the prefix of this view."""
        return self.opened.uri

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
        return dict(self.objects.backend.requests)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process open the store anew; the pickle holds the storage options."""
        return type(self), (self.opened,)

    def full_name(self, name: str) -> str:
        """Return the full name of a snapshot: the prefix of this view, then the name.

        Raises:
            InvalidNameError: The name cannot be used.
        """
        return self.opened.full_name(name)

    def outer_name(self, name: str) -> str:
        """Return the full name for a name that is known to be valid."""
        return self.opened.outer_name(name)

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
        """Take a snapshot. :meth:`Snapshot.take` describes the arguments."""
        from casnap.ranks.comm import join
        from casnap.take.options import TakeOptions

        options = TakeOptions(
            metadata=metadata,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            progress=told_what(progress),
            retention=retention,
            replicated=replicated,
            per_rank=per_rank,
        )
        comm = join(pg, timeout, f"the take of {self.full_name(name)!r}")
        return Snapshot(self.opened.take(comm, app_state, name, options), pg)

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
        """Take a snapshot in the background, as :meth:`Snapshot.async_take` does."""
        from casnap.ranks.comm import join
        from casnap.take.options import TakeOptions

        options = TakeOptions(
            metadata=metadata,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            max_staging_bytes=max_staging_bytes,
            progress=told_what(progress),
            retention=retention,
            replicated=replicated,
            per_rank=per_rank,
        )
        comm = join(pg, timeout, f"the async_take of {self.full_name(name)!r}")
        pending = self.opened.async_take(comm, app_state, name, options)
        return PendingSnapshot(self.opened, pending, check_name(name), pg)

    def row(self, name: str) -> Row:
        """Return the row that the store's table has for a snapshot.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
        """
        return self.opened.row(name)

    def _folder(self, prefix: str | None) -> str:
        return "/".join(p for p in (self.prefix, (prefix or "").strip("/")) if p)

    def __getitem__(self, name: str) -> Snapshot:
        """Return a snapshot by name, or raise :class:`SnapshotNotFoundError`."""
        return Snapshot(Found(self.opened, check_name(name), self.row(name)))

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        try:
            self.row(name)
        except SnapshotNotFoundError:
            return False
        return True

    @calls.named("snapshots()")
    def snapshots(self, prefix: str | None = None) -> list[Snapshot]:
        """Return all snapshots, or those below a prefix, in the order of their commits."""
        folder = self._folder(prefix)
        opened = self.opened
        rows = opened.read(lambda table: list(table.below(f"{folder}/" if folder else "")))
        found = [Snapshot(Found(opened, opened.inner_name(name), row)) for name, row in rows]
        return sorted(found, key=lambda s: s.seq)

    def latest(self, prefix: str | None = None) -> Snapshot | None:
        """Return the snapshot that was committed last, or None if there is no snapshot."""
        return max(self.snapshots(prefix), key=lambda s: s.seq, default=None)

    @calls.named("delete()")
    def delete(self, name: str, *, commit_id: str | None = None) -> None:
        """Forget a snapshot, tagged or not. Garbage collection frees its bytes.

        Args:
            name: The snapshot's name.
            commit_id: Forget the snapshot only if it has this commit id.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name and commit id.
        """
        full = self._edit(name, commit_id, lambda _: None)
        unmark(self.objects, [full])

    @calls.named("prune()")
    def prune(
        self, retention: Retention, *, prefix: str | None = None, dry_run: bool = False
    ) -> PruneReport:
        """Forget the snapshots that no rule keeps, all in one commit.

        The rules are applied to each run, that is each folder of snapshots, on its own. They are
        applied to the table that the commit changes, so they see what other processes have tagged,
        taken or replaced in the meantime. Garbage collection frees the bytes.

        Args:
            retention: The rules.
            prefix: Prune only the runs in and below this folder.
            dry_run: Only report what would be forgotten.

        Returns:
            For each snapshot whether it is kept, and by which rules.
        """
        pruning = Pruning(self.objects, retention, self._folder(prefix))
        verdicts = self.opened.read(pruning.judge) if dry_run else prune(self.objects, pruning)
        own = [replace(v, name=self.opened.inner_name(v.name)) for v in verdicts]
        return PruneReport(own, dry_run)

    @calls.named("tag()")
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

    @calls.named("untag()")
    def untag(self, name: str, *tags: str) -> None:
        """Remove tags from a snapshot. A tag that it does not have is ignored.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
        """
        self._edit(name, None, lambda row: untagged(row, tags))

    def _edit(self, name: str, commit_id: str | None, edit: Callable[[Row], Row | None]) -> str:
        """Edit a snapshot's row, or remove it where ``edit`` returns None; return its full name."""
        full = self.full_name(name)
        if commit_id is None:
            commit_id = self.row(name).commit.hex()
        change_table(self.objects, editing(full, commit_id, edit, self.objects.backend.uri))
        return full

    @calls.named("upgrade()")
    def upgrade(self) -> bool:
        """Bring the store to the newest format, in one commit; return whether it was older.

        Without this, the store keeps the format that it was made with. The newest format keeps
        takes fast and small however many snapshots there are. A version of casnap that does not
        know the format refuses the store from then on.
        """
        return upgrade(self.objects)

    @property
    def format(self) -> int:
        """The number of the store's format."""
        return self.objects.newest().format

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the whole store: ``codec`` is how new chunks are stored."""
        return settings_of(self.objects.newest())

    @calls.named("configure()")
    def configure(self, *, codec: str | None = None) -> bool:
        """Change settings of the whole store, in one commit; return whether anything changed.

        Takes that begin after that obey them, in all processes. What is stored stays as it is.

        Args:
            codec: How new chunks are stored: "raw", or "zstd" where that makes them smaller.

        Raises:
            ValueError: There is no such codec.
            StoreError: The store is of format 1, which has no settings; :meth:`upgrade` it.
        """
        settings = {} if codec is None else codec_settings(codec_named(codec))
        return change_settings(self.objects, settings)

    @calls.named("gc()")
    def gc(
        self,
        *,
        grace: float | timedelta = 86400.0,
        repack: float = 0.5,
        dry_run: bool = False,
        exclusive: bool = False,
        progress: Progress | None = None,
    ) -> GcReport:
        """Collect garbage: delete the data that no snapshot needs.

        Takes, deletes and other collectors may run at the same time, whatever their clocks say. The
        collector always works on the whole store, not only on this view.

        Args:
            grace: How long to keep unreferenced data, in seconds (0: delete it now). For so long,
                a deleted snapshot can still be read, and a running take can still rely on the data.
                After that the reader gets an error, and the take begins again.
            repack: Copy the rest out of packs of which less than this share is needed (0: never).
            dry_run: Only report what would be done.
            exclusive: You make sure that no other process writes to this store. This is asked
                only where the store's backend cannot keep two writers apart.
            progress: Called now and then: what is being done, how much is done, how much there is.

        Raises:
            StoreError: The store cannot be written to, or not safely.
            DamagedError: An object could not be read; nothing was deleted.
            ValueError: An argument is out of range.
        """
        from casnap.maintenance.gc import GcOptions, collect

        seconds = grace.total_seconds() if isinstance(grace, timedelta) else grace
        return collect(self.objects, GcOptions(seconds, repack, dry_run, exclusive), progress)

    @calls.named("diff()")
    def diff(self, a: str, b: str) -> Diff:
        """Return what differs between two snapshots. Only subtrees that differ are read."""
        from casnap.maintenance.diff import diff

        return diff(self[a].contents, self[b].contents)

    @calls.named("usage()")
    def usage(self, prefix: str | None = None) -> list[Usage]:
        """Return the logical, stored and unique bytes of each snapshot, in the order of commits."""
        from casnap.maintenance.usage import usage

        return usage([s.contents for s in self.snapshots(prefix)], self.objects)

    @calls.named("check()")
    def check(
        self,
        *,
        data: bool = False,
        sample: float | None = None,
        seed: int | None = None,
        progress: Progress | None = None,
    ) -> CheckReport:
        """Check that nothing in the store is missing or damaged. Nothing is changed.

        The whole store is checked, not only this view.

        Args:
            data: Read and verify every chunk, at each of its places.
            sample: Read and verify a random share of the chunks, up to 1.
            seed: Chooses the share. By default it is another share each time.
            progress: Called now and then: what is being done, how much is done, how much there is.

        Returns:
            All damages, and the parts of snapshots that each one hurts.
        """
        from casnap.maintenance.check import check

        return check(self.objects, data=data, sample=sample, seed=seed, progress=progress)

    @calls.named("repair()")
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
            sources: Other casnap stores (open, or a path or URI), and files or folders of tensors:
                ``.safetensors``, ``.npy``, and files of ``torch.save``.
            progress: Called now and then: what is being done, how much is done, how much there is.
            dry_run: Change nothing; only report what would be done.

        Raises:
            DamagedError: The newest root cannot be read.
        """
        from casnap.maintenance.repair import repair

        if isinstance(sources, str | os.PathLike):
            raise TypeError(f"sources is a list, such as [{str(sources)!r}]; got one alone")
        places = [s.objects.backend if isinstance(s, Store) else s for s in sources]
        return repair(self.objects, sources=places, progress=progress, dry_run=dry_run)


def _pinned(codec: str | None, *, compress: bool) -> Codec:
    """Return the codec that ``compress=`` of old means, and warn of it."""
    if codec is not None:
        raise ValueError("codec= and compress= mean the same; give codec= alone")
    warnings.warn(
        "compress= is deprecated: how chunks are stored is a setting of the store; Store(uri, "
        'codec="zstd") makes one that compresses, configure(codec="zstd") changes one',
        DeprecationWarning,
        stacklevel=4,
    )
    return Codec.ZSTD if compress else Codec.RAW


def _located(
    uri: str | os.PathLike[str] | Backend, storage_options: Mapping[str, Any] | None
) -> Location:
    if not isinstance(uri, Backend):
        return locate_store(uri, storage_options)
    if storage_options:
        raise ValueError("a backend knows how it is reached; give storage_options to its maker")
    # A backend without a store is noticed when the store's record is read.
    return Location(uri, "", True)


OpenStore.store_class = Store
