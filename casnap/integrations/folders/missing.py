"""Find snapshots whose folders were deleted by another program.

A snapshot on a disk has a folder of its own, with a marker in it. It counts as deleted if its
folder is gone while another snapshot of its run still has a marker, which proves that the run had
markers.
"""

from __future__ import annotations

from pathlib import Path

from casnap import PruneReport, Store
from casnap.backends import Backend
from casnap.backends.local_files import HeldFolder, translated
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
    """Return a verdict on each snapshot of some runs: whether its own folder still exists.

    Args:
        store: The store.
        table: Its table.
        folder: Judge the runs in and below this folder; "" for the whole store.

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
        for name, reason in _judge_run(store, table, run, rows).items()
    ]


def _judge_run(store: Repository, table: Table, run: str, rows: dict[str, Row]) -> dict[str, str]:
    """Return for each snapshot, by its full name, why it is kept; "" if it counts as deleted.

    Args:
        store: The store.
        table: Its table.
        run: The full name of the run's folder.
        rows: The snapshots of the run, by full name.
    """
    listed = _names_in(store.backend, run)
    if listed is None:
        return dict.fromkeys(rows, "the folder of its run is gone")
    if rows.keys() <= listed:
        return dict.fromkeys(rows, "its folder stands")
    markers = Markers(store)
    holds = Runs.holds(table, rows)
    standing = {markers.commit_in(name) for name in listed}
    had_markers = any(row.commit in standing for row in rows.values())

    def reason(name: str, row: Row) -> str:
        if name in listed:
            return "its folder stands"
        if holds[name]:
            return holds[name][0]
        if row.commit in standing:
            return "its folder was renamed"
        if not had_markers:
            return "no snapshot of its run has its folder"
        if not store.has_taken(row):
            return "copied from another store"
        return ""

    return {name: reason(name, row) for name, row in rows.items()}


def _names_in(backend: Backend, run: str) -> set[str] | None:
    """Return the full name of each file and folder in a run's folder; None without that folder."""
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
    """Delete, in one commit, the snapshots whose folders a trainer or a person has deleted.

    A snapshot on a disk has a folder with a marker, ``<name>/casnap-snapshot.json``. If the folder
    is gone, this deletes the snapshot. It keeps snapshots that are tagged, copied from another
    store, or not mirrored yet; snapshots whose folder was renamed within the folder of the run; and
    all snapshots of a run in which no marker is left. Do a dry run first if some snapshots of a run
    never had a marker, as after a restore from a backup: they look deleted.

    Args:
        store: The store.
        prefix: Judge only the runs in and below this folder.
        dry_run: Only report what would be deleted.

    Returns:
        For each snapshot, whether it is kept, and why.

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
