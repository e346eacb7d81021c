"""Snapshots whose folders a loop deletes, as it rotates the checkpoints of an adapter.

A process knows the folders of the snapshots that it saved through DCP or a trainer, and of those
of earlier processes that it saw when it first saved beside them. A snapshot
whose folder is gone when the next save begins is forgotten then
(``docs/decisions/0060-rotated-folders.md``).

A checkpoint may also be a folder of several snapshots, which have the same names in each of them,
as Accelerate saves with FSDP. Then that folder is the one that goes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from casnap import Snapshot
from casnap.errors import CasnapError, shell_word
from casnap.format.names import folder_of
from casnap.format.records import Row
from casnap.integrations.folders.missing import judge_folders
from casnap.integrations.notices import is_notice
from casnap.runtime.fork import new_lock
from casnap.storage import Markers, Runs, Table, Verdict
from casnap.view import View, view_of

_log = logging.getLogger("casnap")
# One of these stands beside what an adapter has saved.
_NOTICES = (".metadata", "pytorch_model.bin")


class RunFolder:
    """The folder of a run, and the folders of its snapshots that this process knows.

    Args:
        view: The store.
        run: The full name of the folder.
        inner: How snapshots are called in the folders there; "" where each folder is a snapshot.
    """

    def __init__(self, view: View, run: str, inner: str = "") -> None:
        self._view = view
        self._prefix = f"{run}/" if run else ""
        self._inner = f"/{inner}" if inner else ""
        self._path = Path(view.repository.backend.folder or "", run)
        self._identity = _identity(self._path)
        # Their commits, by their full names.
        self._folders: dict[str, bytes] = {}
        # What is there, and is none of them under another name.
        self._others = self._entries()
        view.read(self._see)

    @property
    def is_same(self) -> bool:
        """Whether it is still at its path: no other disk is mounted there, and it was not moved.

        Some file systems give a folder another inode at will. Then the markers tell.
        """
        return _identity(self._path) == self._identity or any(
            self._commit_of(self._folder(name).name) == commit
            for name, commit in list(self._folders.items())
        )

    def note(self, name: str, commit: bytes) -> None:
        """Note that a snapshot has its folder."""
        self._folder(name).lstat()
        self._folders[name] = commit

    def deleted(self, table: Table) -> dict[str, Row]:
        """Return the snapshots whose folders were deleted, by their names."""
        entries = self._entries()
        present, gone = {name for name, _ in entries}, dict[str, Row]()
        for name, commit in list(self._folders.items()):
            if self._folder(name).name not in present and self._is_gone(name):
                row = table.get(name)
                if row is None or row.commit != commit:
                    # It was forgotten.
                    self._folders.pop(name, None)
                else:
                    gone[name] = row
        if gone:
            # Of a folder that was renamed, the inode may be another one, and the marker is not.
            commits = {entry: self._commit_of(entry[0]) for entry in entries - self._others}
            wanted = {row.commit for row in gone.values()}
            renamed = {entry: commit for entry, commit in commits.items() if commit in wanted}
            entries -= renamed.keys()
            gone = {n: row for n, row in gone.items() if row.commit not in renamed.values()}
        self._others = entries
        return gone

    def _entries(self) -> set[tuple[str, int]]:
        """Return the names and inodes of what is there.

        What has both as before is what it was.
        """
        with os.scandir(self._path) as entries:
            return {(entry.name, entry.inode()) for entry in entries}

    def _folder(self, name: str) -> Path:
        return self._path / name.removeprefix(self._prefix).removesuffix(self._inner)

    def _is_gone(self, name: str) -> bool:
        """Whether a folder that is not listed is not there: some file systems list late."""
        try:
            self._folder(name).lstat()
        except FileNotFoundError:
            return True
        return False

    def _commit_of(self, name: str) -> bytes | None:
        """Return the commit that the marker in a folder names, if there is one."""
        markers = Markers(self._view.repository)
        return markers.commit_in(f"{self._prefix}{name}{self._inner}")

    def _is_own(self, name: str) -> bool:
        folder = name.removeprefix(self._prefix)
        return folder.endswith(self._inner) and "/" not in folder.removesuffix(self._inner)

    def _see(self, table: Table) -> None:
        """Note the folders of what earlier processes have saved by adapters."""
        repository, run = self._view.repository, self._prefix.rstrip("/")
        for name, row in table.items_in(run):
            folder = self._folder(name)
            notices = (Path(f"{folder}{self._inner}", file) for file in _NOTICES)
            is_own = self._is_own(name) and self._commit_of(folder.name) == row.commit
            if is_own and any(map(is_notice, notices)):
                self.note(name, row.commit)
        if self._inner:
            return
        verdicts = judge_folders(repository, table, run)
        if count := sum(not verdict.kept for verdict in verdicts if self._is_own(verdict.name)):
            uri = repository.backend.uri
            text = (
                "%s: folders of snapshots (%d) were deleted before this process began to save; %s"
            )
            prune = f"`casnap prune {shell_word(uri)} --missing-folders` deletes these"
            _log.warning(text, uri, count, prune)


# Several threads may save at once.
_lock = new_lock()
_runs: dict[str, RunFolder] = {}
# The last few runs are kept: with FSDP, Accelerate makes a folder for each checkpoint.
_MOST_RUNS = 64
# Where more names than these are saved one level further down, folders there are no checkpoints.
_MOST_INNER = 8


def _run_folders(view: View, name: str) -> Iterator[RunFolder]:
    """Yield the folders that a save may rotate; none where snapshots have no folders.

    That is the one that a snapshot is saved in, and the one above that. What cannot be seen, such
    as a folder that is not made yet, is left out.
    """
    repository = view.repository
    if repository.backend.folder is None or not repository.marks:
        return
    folder, _, base_name = name.rpartition("/")
    places = [(folder, "")]
    above = folder_of(folder)
    with _lock:
        others = sum(key.startswith(_key(view, above, "")) for key in _runs)
    if folder and (_key(view, above, base_name) in _runs or others < _MOST_INNER):
        places.append((above, base_name))
    for run, inner in places:
        with suppress(OSError, CasnapError):
            yield _run_folder(view, run, inner)


def _run_folder(view: View, run: str, inner: str) -> RunFolder:
    key = _key(view, run, inner)
    known = _runs.get(key)
    seen = RunFolder(view, run, inner) if known is None or not known.is_same else known
    with _lock:
        # Another thread may have seen it meanwhile, and noted a snapshot there.
        current = _runs.pop(key, None)
        run_folder = seen if current is known or current is None else current
        _runs[key] = run_folder
        for old in list(_runs)[:-_MOST_RUNS]:
            del _runs[old]
    return run_folder


def _key(view: View, run: str, inner: str) -> str:
    return f"{view.repository.backend.identity} {run} /{inner}"


def forget(snapshot: Snapshot) -> bool:
    """Forget a snapshot that a trainer lets go, unless it is tagged, or not mirrored yet.

    If its folder goes too, a later save of this process looks again.

    Returns:
        Whether it is gone.
    """
    view, name = view_of(snapshot.store), snapshot.contents.name

    def find(table: Table) -> dict[str, Row]:
        row = table.get(name)
        return {name: row} if row is not None and row.commit == snapshot.row.commit else {}

    is_gone = _forget_unheld(view, find, view.free_later)
    if not is_gone:
        note_saved(view, name, snapshot.row.commit)
    return is_gone


def forget_deleted(view: View, name: str) -> None:
    """Forget the snapshots beside a new one whose folders were deleted.

    So they are collected while the new one is taken, and on a nearly full disk before that.
    """
    for folder in _run_folders(view, name):
        # What cannot be seen was not deleted.
        with suppress(OSError, CasnapError):
            _forget_unheld(view, folder.deleted, view.hooks.on_release)


def _forget_unheld(
    view: View,
    find: Callable[[Table], Mapping[str, Row]],
    on_release: Callable[[Sequence[Row]], None],
) -> bool:
    """Forget some snapshots, but for those that something holds; return whether none is left.

    Args:
        view: The store.
        find: Returns them, by name.
        on_release: Called with the rows of those that are forgotten.
    """

    def judge(table: Table) -> list[Verdict]:
        return [Verdict(name, row, tuple(row.holds)) for name, row in find(table).items()]

    # Most often there is none, and to look costs less than a change of the table.
    report = Runs(view.repository).prune_judged(judge, on_release, dry_run=True)
    if report.deleted:
        report = Runs(view.repository).prune_judged(judge, on_release)
    return not report.kept


def note_saved(view: View, name: str, commit: bytes) -> None:
    """Note that this process has saved a snapshot by an adapter."""
    for folder in _run_folders(view, name):
        with suppress(OSError, CasnapError):
            folder.note(name, commit)


def _identity(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_dev, info.st_ino
