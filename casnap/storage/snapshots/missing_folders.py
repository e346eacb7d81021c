"""Snapshots whose folders were deleted by another program.

A snapshot on a disk has a folder of its own, with a marker in it. A snapshot is missing if its
folder is gone, and the marker of another snapshot of its run stands: so the run had markers.
"""

from __future__ import annotations

from casnap.backends.base import Backend
from casnap.errors import StoreError
from casnap.format.records import Row
from casnap.runtime.typing import override
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.marker_files import listing_of
from casnap.storage.snapshots.pruning import OnRelease, PruneChange, prune
from casnap.storage.snapshots.retention import PruneReport, Verdict
from casnap.storage.snapshots.runs import folders_of, in_commit_order, was_taken_here
from casnap.storage.snapshots.table import Table


def check_has_folders(backend: Backend) -> None:
    """Check that a store is in a folder of this machine.

    Raises:
        StoreError: The store is not in a folder of this machine.
    """
    if backend.folder is None:
        raise StoreError(
            f"{backend.uri} is not in a folder of this machine, so its snapshots have no folders "
            "whose deletion could be seen; use delete(), or a retention"
        )


class MissingFoldersChange(PruneChange):
    """The change of a table that removes the snapshots whose folders were deleted.

    Args:
        store: The store.
        folder: Where the runs are; "" for the whole store.

    Raises:
        StoreError: The store is not in a folder of this machine.
    """

    def __init__(self, store: Repository, folder: str) -> None:
        super().__init__()
        check_has_folders(store.backend)
        self._store = store
        self._folder = folder

    @override
    def judge(self, table: Table) -> list[Verdict]:
        """Return the verdicts on the snapshots of a table."""
        rows = in_commit_order(table.items_in(self._folder))
        reasons: dict[str, str] = {}
        for folder, snapshots in folders_of(rows):
            by_base_name = {name.rpartition("/")[2]: row for name, row in snapshots}
            for base_name, reason in self._judge_folder(folder, by_base_name).items():
                reasons[f"{folder}/{base_name}".lstrip("/")] = reason
        return [Verdict(n, row, tuple(filter(None, [reasons[n]]))) for n, row in rows]

    def _judge_folder(self, run: str, rows: dict[str, Row]) -> dict[str, str]:
        """Return why each snapshot of a run is kept, by the name of its folder; "" if it is not."""
        listing = listing_of(self._store.backend, run)
        if listing is None:
            return dict.fromkeys(rows, "the folder of its run is gone")
        if rows.keys() <= listing.names:
            return dict.fromkeys(rows, "its folder stands")
        standing = listing.markers()
        had_markers = any(row.commit in standing for row in rows.values())
        return {
            base_name: "its folder stands"
            if base_name in listing.names
            else self._reason_to_keep(row, standing, had_markers=had_markers)
            for base_name, row in rows.items()
        }

    def _reason_to_keep(self, row: Row, standing: set[bytes], *, had_markers: bool) -> str:
        """Return why a snapshot is kept though its folder is gone; "" if it is not."""
        if holds := row.holds:
            return holds[0]
        if row.commit in standing:
            return "its folder was renamed"
        if not had_markers:
            return "no snapshot of its run has its folder"
        if not was_taken_here(self._store, row):
            return "copied from another store"
        return ""


def prune_missing_folders(
    store: Repository, folder: str, on_release: OnRelease, *, dry_run: bool = False
) -> PruneReport:
    """Delete the snapshots in a folder whose own folders were deleted, in one commit.

    Args:
        store: The store.
        folder: Where the runs are; "" for the whole store.
        on_release: As it says.
        dry_run: Only report what would be deleted.

    Raises:
        StoreError: The store is not in a folder of this machine.
    """
    report = prune(store, MissingFoldersChange(store, folder), dry_run=dry_run)
    if not dry_run:
        on_release([verdict.row for verdict in report.deleted])
    return report
