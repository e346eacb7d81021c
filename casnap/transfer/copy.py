"""Copy snapshots into another store.

A snapshot is copied in parts. Each part is one commit to the destination, as a take is: it relies
on chunks that the destination has, and writes those that it lacks. Until the snapshot is complete,
the root refers to the chunks of its parts (``unfinished.py``), so that no collector deletes them.
The last part writes the nodes of the tree and the row of the snapshot, and removes that reference.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from casnap.errors import FencedError, SnapshotNotFoundError
from casnap.runtime.progress import Progress
from casnap.storage import (
    Contents,
    Repository,
    Table,
    again,
)
from casnap.transfer.copy_jobs import CopyJob, CopyOptions, CopyReport
from casnap.transfer.snapshot_copy import SnapshotCopy, placement_in
from casnap.transfer.source_tree import SourceTree
from casnap.transfer.tally import Tally

_log = logging.getLogger("casnap")
# The most nodes that a copy remembers of the snapshots that it has copied before.
_MOST_VISITED = 1 << 19
# A copy gives up once a fence or a full disk has stopped it this many times.
_TRIES = 5


def copy_snapshots(
    source: Repository,
    destination: Repository | None,
    snapshots: Sequence[CopyJob],
    options: CopyOptions | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy snapshots into another store, in the order of their commits.

    A snapshot that the destination has already, with the same name and commit id, is not copied
    again.

    Args:
        source: The store to read from.
        destination: The store to write to; None for a dry run into a store that is to be made.
        snapshots: The snapshots to copy.
        options: The options of the copy.
        progress: Called with "copying", the bytes that were sent or found present, and the total.

    Raises:
        SnapshotExistsError: The destination has another snapshot of some name. Nothing was sent.
        SnapshotNotFoundError: A snapshot was deleted from the source meanwhile.
        DamagedError: A chunk or node of the source cannot be read. Snapshots that were copied
            before it stay.
        UnsupportedFormatError: Only a newer casnap can copy some snapshots. All others were copied.
        FencedError: A collector deleted chunks that the copy needed, again and again.
        StoreError: A store failed.
    """
    started = time.monotonic()
    copy = _Copier(source, destination, options or CopyOptions(), progress)
    copy.run(sorted(snapshots, key=lambda job: (job.row.seq, job.name)))
    copy.report.seconds = time.monotonic() - started
    return copy.report


class _Copier:
    """Copies several snapshots, one after the other.

    Attributes:
        report: The report so far.
    """

    def __init__(
        self,
        source: Repository,
        destination: Repository | None,
        options: CopyOptions,
        progress: Progress | None,
    ) -> None:
        self._source = source
        self._destination = destination
        self._options = options
        self._tally = Tally(progress)
        self.report = self._tally.report
        self.report.dry_run = options.dry_run
        # The nodes that this has visited, by key; and the copied snapshot that each belongs to.
        self._visited: set[bytes] = set()
        self._owners: dict[bytes, CopyJob] = {}

    def run(self, snapshots: Sequence[CopyJob]) -> None:
        """Copy all of the snapshots."""
        absent = self._absent(snapshots)
        todo = [job for job in absent if not job.row.unknown_features]
        self._tally.bytes.total = sum(job.row.stats.logical_bytes for job in todo)
        for job in todo:
            with self._tally.dealing_with(job.row.stats.logical_bytes):
                self._copy(job)
        for job in absent:
            # Now that all others are copied, raise for a snapshot that only a newer casnap can
            # copy.
            Contents(self._source, job.name, job.row).check_features()

    def _absent(self, snapshots: Sequence[CopyJob]) -> list[CopyJob]:
        """Return the snapshots that the destination lacks.

        Raises:
            SnapshotExistsError: The destination has another snapshot of some name.
        """
        store = self._destination
        if store is None:
            return list(snapshots)
        store.check_writable("copy snapshots into", dry_run=self._options.dry_run)

        def look(table: Table, seq: int) -> list[bool]:
            placements = (placement_in(table, job, store.backend, seq) for job in snapshots)
            return [placement is None for placement in placements]

        presence = store.read_at_newest(
            lambda root: look(store.table(root), root.seq + 1), store.recent
        )
        pairs = list(zip(snapshots, presence, strict=True))
        self.report.present += [job.new_name for job, is_there in pairs if is_there]
        return [job for job, is_there in pairs if not is_there]

    def _copy(self, job: CopyJob) -> None:
        try:
            with Contents(self._source, job.name, job.row).reading():
                if self._destination is None or self._options.dry_run:
                    self._try(job)
                else:
                    self._copy_to(self._destination, job)
        except SnapshotNotFoundError as e:
            if not self._options.skip_gone:
                raise
            _log.warning("%s", e)
            self._forget()
            self.report.gone.append(job.name)

    def _copy_to(self, destination: Repository, job: CopyJob) -> None:
        def start_over() -> bool:
            self._forget()
            return True

        hooks = self._options.hooks
        try:
            again(
                destination,
                lambda: self._try(job),
                f"{job.new_name}: the copy",
                tries=_TRIES,
                on_full=lambda error: hooks.on_full(error, lambda: job.row.stats.logical_bytes),
                start_over=start_over,
            )
        except FencedError as e:
            raise FencedError(
                f"{job.new_name} is not copied: collectors without grace deleted what it relied "
                f"on, {_TRIES} times; copy again, and give `casnap gc` a --grace"
            ) from e

    def _try(self, job: CopyJob) -> None:
        if len(self._visited) > _MOST_VISITED:
            self._forget()
        contents = Contents(self._source, job.name, job.row)
        tree = SourceTree(contents, self._visited, self._owners)
        snapshot_copy = SnapshotCopy(self._source, job, tree, self._options, self._tally)
        if self._options.dry_run:
            snapshot_copy.look(self._destination)
        else:
            assert self._destination is not None
            if not snapshot_copy.copy(self._destination):
                # Another process has copied it meanwhile.
                self._forget()
                self.report.present.append(job.new_name)
                return
        self._owners.update(dict.fromkeys(tree.nodes, job))
        self.report.copied.append(job.new_name)

    def _forget(self) -> None:
        self._visited.clear()
        self._owners.clear()
