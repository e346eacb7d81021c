"""Snapshots whose folders were deleted by another program.

A snapshot on a disk has a folder of its own, with a marker in it. A snapshot is missing if its
folder is gone, and the marker of another snapshot of its run stands: so the run had markers.
"""

from __future__ import annotations

from pathlib import Path

from casnap import PruneReport, Store
from casnap.backends import Backend
from casnap.backends.local import HeldFolder, translated
from casnap.errors import StoreError
from casnap.format.names import folder_of
from casnap.format.records import Row
from casnap.storage import Markers, Repository, Runs, Table, Verdict
from casnap.view import view_of


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


def judge_folders(store: Repository, table: Table, folder: str) -> list[Verdict]:
    """Return the verdicts on the snapshots in a folder, by whether their own folders stand.

    Args:
        store: The store.
        table: Its table.
        folder: Where the runs are; "" for the whole store.

    Raises:
        StoreError: The store is not in a folder of this machine.
    """
    check_has_folders(store.backend)
    runs: dict[str, dict[str, Row]] = {}
    for name, row in table.items_in(folder):
        runs.setdefault(folder_of(name), {})[name] = row
    return [
        Verdict(name, rows[name], (reason,) if reason else ())
        for run, rows in runs.items()
        for name, reason in _judge_run(store, run, rows).items()
    ]


def _judge_run(store: Repository, run: str, rows: dict[str, Row]) -> dict[str, str]:
    """Return why each snapshot of a run is kept, by its name; "" if it is not."""
    listed = _names_in(store.backend, run)
    if listed is None:
        return dict.fromkeys(rows, "the folder of its run is gone")
    if rows.keys() <= listed:
        return dict.fromkeys(rows, "its folder stands")
    markers = Markers(store)
    standing = {markers.commit_in(name) for name in listed}
    had_markers = any(row.commit in standing for row in rows.values())

    def reason(name: str, row: Row) -> str:
        if name in listed:
            return "its folder stands"
        if holds := row.holds:
            return holds[0]
        if row.commit in standing:
            return "its folder was renamed"
        if not had_markers:
            return "no snapshot of its run has its folder"
        if not store.has_taken(row):
            return "copied from another store"
        return ""

    return {name: reason(name, row) for name, row in rows.items()}


def _names_in(backend: Backend, run: str) -> set[str] | None:
    """Return the full names of what is in the folder of a run; None if there is no folder."""
    path = str(Path(backend.folder or "", run))
    prefix = f"{run}/" if run else ""
    with translated(path):
        try:
            with HeldFolder(path) as folder:
                names = folder.names()
        except (FileNotFoundError, NotADirectoryError):
            return None
    return {f"{prefix}{name}" for name in names}


def prune_missing_folders(
    store: Store, *, prefix: str | None = None, dry_run: bool = False
) -> PruneReport:
    """Delete the snapshots whose folders were deleted, as trainers do; all in one commit.

    A snapshot on a disk has a folder with a marker, ``<name>/casnap-snapshot.json``. One whose
    folder is gone is deleted. Kept are those that are tagged, copied from another store, or
    not mirrored yet; those whose folder was renamed within the folder of the run; and all of a
    run if no marker of its snapshots stands there any more. Snapshots that were taken without
    markers, and a backup that was restored without them, look deleted: look at a dry run first.

    Args:
        store: The store.
        prefix: Only the runs in and below this folder.
        dry_run: Only report what would be deleted.

    Returns:
        For each snapshot whether it is kept, and why.

    Raises:
        StoreError: The store is not in a folder of this machine.
    """
    view = view_of(store)
    repository, folder = view.repository, view.folder(prefix)
    report = Runs(repository).prune_judged(
        lambda table: judge_folders(repository, table, folder),
        view.free_later,
        dry_run=dry_run,
    )
    return view.named_here(report)
