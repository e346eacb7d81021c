"""The maintenance of a store: imports, pruning, collection, checks, comparisons."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casnap.opened.open_store import OpenStore
from casnap.runtime.environment import local_path
from casnap.runtime.nesting import refuse_nested_take
from casnap.runtime.progress import Progress
from casnap.snapshot import Snapshot
from casnap.storage.config import RECORD
from casnap.storage.folders import MissingFolders
from casnap.storage.mirrored import detach
from casnap.storage.objects import Objects
from casnap.storage.retention import Judging, PruneReport, Pruning, Retention, prune
from casnap.storage.settings import change_settings, codec_named, codec_settings, settings_of

if TYPE_CHECKING:
    from casnap.files.report import ImportReport
    from casnap.maintenance.check import CheckReport
    from casnap.maintenance.diff import Diff
    from casnap.maintenance.gc import GcReport
    from casnap.maintenance.repair import RepairReport
    from casnap.maintenance.usage import Usage


class Upkeep(ABC):
    """The half of :class:`casnap.Store` that looks after a store."""

    @property
    @abstractmethod
    def opened(self) -> OpenStore:
        """The open store."""

    @property
    @abstractmethod
    def objects(self) -> Objects:
        """Its objects."""

    @abstractmethod
    def make(self) -> Upkeep:
        """Make the store, if there is none."""

    @abstractmethod
    def full_name(self, name: str) -> str:
        """Return the full name of a snapshot."""

    @abstractmethod
    def __getitem__(self, name: str) -> Snapshot:
        """Return a snapshot by name."""

    @abstractmethod
    def snapshots(self, prefix: str | None = None) -> list[Snapshot]:
        """Return all snapshots, or those below a prefix, in the order of their commits."""

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
            source: A safetensors file, the index or the folder of its shards, a file of
                ``torch.save``, or a folder of ``torch.distributed.checkpoint`` or TorchSnapshot.
            name: The snapshot's name.
            key: The key of the snapshot to import under. By default ``model``; but a dict of
                ``torch.save`` that holds more than tensors, and folders, keep keys of their own.
            rank: For a TorchSnapshot folder of many ranks: the rank whose state to import.
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
        full = self.full_name(name)
        where = (lambda: (self.make().opened, name)) if not dry_run else None
        how = {"overwrite": overwrite, "progress": progress}
        return import_snapshot(
            source, full, where, how, key=key, rank=rank, metadata=dict(metadata or {})
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
        """
        return self._pruned(
            Pruning(self.objects, retention, self.opened.folder(prefix)), dry_run=dry_run
        )

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
        missing = MissingFolders(self.objects, self.opened.folder(prefix))
        return self._pruned(missing, dry_run=dry_run)

    def _pruned(self, judging: Judging, *, dry_run: bool) -> PruneReport:
        verdicts = self.opened.read(judging.judge) if dry_run else prune(self.objects, judging)
        own = [replace(v, name=self.opened.inner_name(v.name)) for v in verdicts]
        return PruneReport(own, dry_run)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the whole store: ``codec`` is how new chunks are stored."""
        settings = settings_of(self.objects.newest())
        settings.pop(RECORD, None)
        return settings

    def configure(self, *, codec: str | None = None, mirror: str | None = None) -> bool:
        """Change settings of the whole store; return whether anything changed.

        Takes that begin after that obey them, in all processes. What is stored stays as it is.

        Args:
            codec: How new chunks are stored: "raw", or "zstd" where that makes them smaller.
            mirror: "none" forgets which store is the mirror, and which snapshots it lacks. The next
                ``Store(..., mirror=)`` may name another one. Without that, one mirror is the only.

        Raises:
            ValueError: There is no such codec, or ``mirror`` is another word.
        """
        if mirror not in (None, "none"):
            raise ValueError(f"mirror can only be 'none', which forgets it; got {mirror!r:.80}")
        new = {} if codec is None else codec_settings(codec_named(codec))
        self.make()
        changed = False
        if codec is not None:
            changed = change_settings(self.objects, lambda settings: {**settings, **new})
        if mirror is not None:
            changed |= detach(self.objects)
        return changed

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

        Takes, deletes and other collectors may run at the same time, even with wrong clocks. The
        collector always works on the whole store, not only on this view.

        Args:
            grace: How long to keep unreferenced data, in seconds (0: delete it now). For so long,
                a deleted snapshot can still be read, and a running take can still rely on the data.
                After that the reader gets an error, and the take begins again.
            repack: Copy the rest out of packs of which less than this share is needed (0: never).
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

        seconds = grace.total_seconds() if isinstance(grace, timedelta) else grace
        options = GcOptions(grace=seconds, repack=repack, dry_run=dry_run, exclusive=exclusive)
        return collect(self.objects, options, progress)

    def diff(self, a: str, b: str) -> Diff:
        """Return what differs between two snapshots. Only subtrees that differ are read."""
        from casnap.maintenance.diff import diff

        return diff(self[a].contents, self[b].contents)

    def usage(self, prefix: str | None = None) -> list[Usage]:
        """Return the logical, stored and unique bytes of each snapshot, in the order of commits."""
        from casnap.maintenance.usage import usage

        return usage([s.contents for s in self.snapshots(prefix)], self.objects)

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
            self.opened.row(name)
            full = self.opened.full_name(name)
        return check(
            self.objects, data=data, sample=sample, seed=seed, name=full, progress=progress
        )

    def repair(
        self,
        *,
        sources: Sequence[str | os.PathLike[str] | Upkeep] = (),
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
        places = [s.objects.backend if isinstance(s, Upkeep) else s for s in sources]
        return repair(self.objects, sources=places, progress=progress, dry_run=dry_run)


def import_snapshot(
    source: str | os.PathLike[str],
    name: str,
    where: Callable[[], tuple[OpenStore, str]] | None,
    options: Mapping[str, Any],
    *,
    key: str | None = None,
    rank: int | None = None,
    metadata: dict[str, Any],
) -> ImportReport:
    """Import files as a snapshot. :meth:`Upkeep.import_file` describes the rest.

    Args:
        source: The files.
        name: The snapshot's name, for the report.
        where: Opens the store, and returns the name there, once it is known that the files can be
            imported; None for a dry run.
        options: Further options of the take.
        key: As there.
        rank: As there.
        metadata: As there.
    """
    from casnap.files.importing import import_files
    from casnap.ranks.comm import SingleProcess
    from casnap.take.options import TakeOptions

    def take(leaves: Any, kept: dict[str, Any]) -> int:
        assert where is not None
        opened, inner = where()
        how = TakeOptions(metadata=kept, **options)
        return opened.take_asked(SingleProcess(), lambda: leaves, inner, how).row.stats.new_bytes

    return import_files(
        Path(local_path(source)),
        name,
        take if where else None,
        key=key,
        rank=rank,
        metadata=metadata,
    )
