"""Snapshots whose folders were deleted, as trainers forget their checkpoints.

A snapshot on a disk has a folder of its own, with a marker in it. A snapshot is missing if its
folder is gone, and the marker of another snapshot of its run stands: so the run had markers.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from casnap.backends.base import Backend
from casnap.backends.safe_paths import folder_at
from casnap.backends.system_errors import is_of_the_place, translated
from casnap.errors import BackendError, DamagedError, StoreError, UnavailableError
from casnap.format.names import MARKER, STORE_FOLDER, folder_of
from casnap.format.records import Row
from casnap.runtime.typing import override
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.holds import holds_of
from casnap.storage.snapshots.retention import PruneChange, Verdict
from casnap.storage.snapshots.runs import folders_of, in_commit_order, was_taken_here
from casnap.storage.snapshots.table import Table, commit_in, snapshots_in

_OWN = {STORE_FOLDER}
_MOST_NAMES = 10_000


class _Listing(NamedTuple):
    """The names in the folder of a run."""

    backend: Backend
    run: str
    names: frozenset[str]

    def commit_of(self, name: str) -> bytes | None:
        """Return the commit that the marker in a folder here names, as :func:`marked_commit`."""
        return marked_commit(self.backend, "/".join(part for part in (self.run, name) if part))

    def markers(self) -> set[bytes]:
        """Return the commits that the markers in all folders here name."""
        commits = map(self.commit_of, self.names)
        return {commit for commit in commits if commit is not None}


def marked_commit(backend: Backend, folder: str) -> bytes | None:
    """Return the commit that the marker in a folder of a store names; None if there is no marker.

    Raises:
        BackendError: It cannot be looked at.
    """
    try:
        return commit_in(backend.read_marker(f"{folder}/{MARKER}"))
    except (FileNotFoundError, DamagedError):
        return None
    except BackendError as e:
        if is_of_the_place(e):
            raise
        return None


def check_has_folders(backend: Backend) -> Path:
    """Return the folder of a store.

    Raises:
        StoreError: The store is not in a folder of this machine.
    """
    if backend.folder is None:
        raise StoreError(
            f"{backend.uri} is not in a folder of this machine, so its snapshots have no folders "
            "whose deletion could be seen; use delete(), or a retention"
        )
    return backend.folder


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
        self._store = store
        self._base = check_has_folders(store.backend)
        self._folder = folder

    @override
    def judge(self, table: Table) -> list[Verdict]:
        """Return the verdicts on the snapshots of a table."""
        rows = in_commit_order(snapshots_in(table, self._folder))
        reasons: dict[str, str] = {}
        for folder, snapshots in folders_of(rows):
            by_base_name = {name.rpartition("/")[2]: row for name, row in snapshots}
            for base_name, reason in self._judge_folder(folder, by_base_name).items():
                reasons[f"{folder}/{base_name}".lstrip("/")] = reason
        return [Verdict(n, row, tuple(filter(None, [reasons[n]]))) for n, row in rows]

    def _judge_folder(self, run: str, rows: dict[str, Row]) -> dict[str, str]:
        """Return why each snapshot of a run is kept, by the name of its folder; "" if it is not."""
        listing = _listed(self._store.backend, f"{self._base}/{run}".rstrip("/"), run)
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
        if holds := holds_of(row):
            return holds[0]
        if row.commit in standing:
            return "its folder was renamed"
        if not had_markers:
            return "no snapshot of its run has its folder"
        if not was_taken_here(self._store, row):
            return "copied from another store"
        return ""


def _listed(backend: Backend, path: str, run: str) -> _Listing | None:
    """List the folder of a run; return None if there is none."""
    with translated(path):
        try:
            with folder_at(path, listed=True) as fd:
                names = os.listdir(fd)
        except (FileNotFoundError, NotADirectoryError):
            return None
    return _Listing(backend, run, frozenset(names))


def unknown_markers(store: Repository) -> dict[str, bytes]:
    """Return the markers that name a commit which no snapshot has; nothing for a remote store.

    A marker is written after its commit, and removed with its snapshot. So such a one is of a
    commit whose root is lost, or of a folder that a user has copied from elsewhere.

    Returns:
        The commit by the name of the snapshot's folder. Looked at are the folders of all runs that
        have a snapshot, and those right in the store's folder; but none with very many names, and
        none that is a link.
    """
    backend = store.backend
    if backend.folder is None:
        return {}
    rows = dict(snapshots_in(store.table(store.newest())))
    base = check_has_folders(backend)
    top = _listed(backend, str(base), "")
    runs = set(map(folder_of, rows)) | {""} | (top.names if top else set())
    markers: dict[str, bytes] = {}
    for run in sorted(runs - _OWN):
        try:
            listing = _listed(backend, str(base / run), run)
        except UnavailableError:
            raise
        except BackendError:
            continue
        if listing is None or len(listing.names) > _MOST_NAMES:
            continue
        for name in sorted(listing.names):
            commit = None
            # Who may write could put a folder there that nobody else can look into.
            with suppress(BackendError):
                commit = listing.commit_of(name)
            if commit is not None:
                markers[f"{run}/{name}".strip("/")] = commit
    # A take may have committed meanwhile.
    commits = {row.commit for _, row in snapshots_in(store.table(store.newest()))}
    return {name: commit for name, commit in markers.items() if commit not in commits}
