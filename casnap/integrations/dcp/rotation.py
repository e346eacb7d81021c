"""Snapshots whose folders a loop of ``dcp.save`` deletes, as it rotates its checkpoints.

A process knows the folders of the snapshots that it saved through DCP, and of those of earlier
processes that it saw when it first saved beside them. A snapshot whose folder is gone when the next
save begins is forgotten in the root of that save (``docs/decisions/0060-rotated-folders.md``).
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from casnap.errors import CasnapError
from casnap.format.names import MARKER
from casnap.integrations.notices import is_notice
from casnap.storage.catalog.missing_folders import MissingFoldersChange
from casnap.storage.catalog.table import Table, commit_in
from casnap.store import Store

_log = logging.getLogger("casnap")


class RunFolder:
    """The folder of a run, and the folders of its snapshots that this process knows.

    Args:
        store: The store.
        run: The full name of the folder.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._prefix = f"{run}/" if run else ""
        self._path = Path(store.open_store.backend.folder or "", run)
        self._identity = _identity(self._path)
        # Their commits and inodes, by their full names.
        self._folders: dict[str, tuple[bytes, int]] = {}
        store.read(self._see)

    @property
    def is_same(self) -> bool:
        """Whether it is still at its path: no other disk is mounted there, and it was not moved."""
        return _identity(self._path) == self._identity

    def note(self, name: str, commit: bytes) -> None:
        """Note that a snapshot has its folder."""
        self._folders[name] = commit, self._folder(name).stat().st_ino

    def deleted(self, table: Table) -> dict[str, bytes]:
        """Return the commits of the snapshots whose folders were deleted, by their names."""
        with os.scandir(self._path) as entries:
            names = {entry.inode(): entry.name for entry in entries}
        present, deleted = set(names.values()), {}
        for name, (commit, inode) in list(self._folders.items()):
            if self._folder(name).name not in present and self._is_gone(name):
                row = table.get(name)
                if row is None or row.commit != commit:
                    # It was forgotten.
                    del self._folders[name]
                elif inode not in names or self._commit_of(names[inode]) != commit:
                    deleted[name] = commit
        return deleted

    def _folder(self, name: str) -> Path:
        return self._path / name.removeprefix(self._prefix)

    def _is_gone(self, name: str) -> bool:
        """Whether a folder that is not listed is not there: some file systems list late."""
        try:
            self._folder(name).lstat()
        except FileNotFoundError:
            return True
        return False

    def _commit_of(self, name: str) -> bytes | None:
        """Return the commit that the marker in a folder names, if there is one."""
        with suppress(OSError, CasnapError):
            key = f"{self._prefix}{name}/{MARKER}"
            return commit_in(self._store.open_store.backend.read_marker(key))
        return None

    def _see(self, table: Table) -> None:
        """Note the folders of what earlier processes have saved by DCP."""
        open_store = self._store.open_store
        verdicts = MissingFoldersChange(open_store, self._prefix.rstrip("/")).judge(table)
        own_verdicts = [v for v in verdicts if "/" not in v.name.removeprefix(self._prefix)]
        for name, commit in ((v.name, v.row.commit) for v in own_verdicts):
            folder = self._folder(name)
            if self._commit_of(folder.name) == commit and is_notice(folder / ".metadata"):
                self.note(name, commit)
        if count := sum(not verdict.kept for verdict in own_verdicts):
            uri = open_store.backend.uri
            text = (
                "%s: folders of snapshots (%d) were deleted before this process began to save; %s"
            )
            _log.warning(text, uri, count, f"`casnap prune {uri} --missing-folders` forgets these")


_runs: dict[str, RunFolder] = {}


def _run_folder(store: Store, name: str) -> RunFolder | None:
    """Return the folder that a snapshot is saved in; None where snapshots have no folders."""
    open_store, run = store.open_store, name.rpartition("/")[0]
    if open_store.backend.folder is None or not open_store.marks:
        return None
    key = f"{open_store.backend.identity} {run}"
    if key not in _runs or not _runs[key].is_same:
        _runs[key] = RunFolder(store, run)
    return _runs[key]


def deleted_folders(store: Store, name: str) -> dict[str, bytes]:
    """Return the commits of the snapshots beside a new one whose folders were deleted, by name."""
    # What cannot be seen was not deleted.
    with suppress(OSError, CasnapError):
        folder = _run_folder(store, name)
        return {} if folder is None else store.read(folder.deleted)
    return {}


def note_saved(store: Store, name: str, commit: bytes) -> None:
    """Note that this process has saved a snapshot by DCP."""
    with suppress(OSError, CasnapError):
        folder = _run_folder(store, name)
        if folder is not None:
            folder.note(name, commit)


def _identity(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_dev, info.st_ino
