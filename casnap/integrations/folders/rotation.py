"""Delete snapshots whose folders a training loop has deleted, as it rotates its checkpoints.

A process knows the folders of the snapshots that it saved through DCP or a trainer. It also knows
the folders of earlier processes' snapshots that it found in the same parent folder at its first
save there. When the next save begins, it deletes each snapshot whose known folder is gone
(``docs/decisions/0060-rotated-folders.md``).

A checkpoint may also be a folder of several snapshots, with the same names in each checkpoint, as
Accelerate saves with FSDP. The loop deletes the folder of such a checkpoint.
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
# Each snapshot that was saved by DCP or a trainer has one of these files beside it.
_NOTICES = (".metadata", "pytorch_model.bin")


class RunFolder:
    """The folder of a run, and the folders of its snapshots that this process knows.

    Args:
        view: The store.
        run: The full name of the folder.
        inner: The name of a snapshot inside each folder of the run; "" if each folder is a
            snapshot itself.
    """

    def __init__(self, view: View, run: str, inner: str = "") -> None:
        self._view = view
        self._prefix = f"{run}/" if run else ""
        self._inner = f"/{inner}" if inner else ""
        self._path = Path(view.repository.backend.folder or "", run)
        self._identity = _identity(self._path)
        # The commits of the known snapshots, by full name.
        self._folders: dict[str, bytes] = {}
        # Entries that were there at first: none of them is a snapshot's folder under a new name.
        self._others = self._entries()
        view.read(self._see)

    @property
    def is_same(self) -> bool:
        """Whether the path still leads to this folder, and not to another one or to a mounted disk.

        Some file systems change a folder's inode. If so, the markers in the folder decide.
        """
        return _identity(self._path) == self._identity or any(
            self._commit_of(self._folder(name).name) == commit
            for name, commit in list(self._folders.items())
        )

    def note(self, name: str, commit: bytes) -> None:
        """Remember that a snapshot has a folder of its own.

        Args:
            name: The full name of the snapshot.
            commit: Its commit id.
        """
        self._folder(name).lstat()
        self._folders[name] = commit

    def deleted(self, table: Table) -> dict[str, Row]:
        """Return the known snapshots whose folders were deleted, by full name."""
        entries = self._entries()
        present, gone = {name for name, _ in entries}, dict[str, Row]()
        for name, commit in list(self._folders.items()):
            if self._folder(name).name not in present and self._is_gone(name):
                row = table.get(name)
                if row is None or row.commit != commit:
                    # The snapshot was deleted, or another process has taken its name again.
                    self._folders.pop(name, None)
                else:
                    gone[name] = row
        if gone:
            # A renamed folder keeps its marker, though its inode may change.
            commits = {entry: self._commit_of(entry[0]) for entry in entries - self._others}
            wanted = {row.commit for row in gone.values()}
            renamed = {entry: commit for entry, commit in commits.items() if commit in wanted}
            entries -= renamed.keys()
            gone = {n: row for n, row in gone.items() if row.commit not in renamed.values()}
        self._others = entries
        return gone

    def _entries(self) -> set[tuple[str, int]]:
        """Return the name and the inode of each file and folder in the folder.

        If both are the same later, it is the same file or folder.
        """
        with os.scandir(self._path) as entries:
            return {(entry.name, entry.inode()) for entry in entries}

    def _folder(self, name: str) -> Path:
        return self._path / name.removeprefix(self._prefix).removesuffix(self._inner)

    def _is_gone(self, name: str) -> bool:
        """Whether a folder that a listing lacks is really gone: some file systems list late."""
        try:
            self._folder(name).lstat()
        except FileNotFoundError:
            return True
        return False

    def _commit_of(self, name: str) -> bytes | None:
        """Return the commit id in the marker of a folder; None if it has no marker."""
        markers = Markers(self._view.repository)
        return markers.commit_in(f"{self._prefix}{name}{self._inner}")

    def _is_own(self, name: str) -> bool:
        folder = name.removeprefix(self._prefix)
        return folder.endswith(self._inner) and "/" not in folder.removesuffix(self._inner)

    def _see(self, table: Table) -> None:
        """Learn which folders belong to snapshots that earlier processes have saved.

        They have saved through DCP, or by a trainer. Snapshots whose folders are gone already stay;
        a warning counts them.
        """
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


# Guards the runs: several threads may save at once.
_lock = new_lock()
_runs: dict[str, RunFolder] = {}
# How many of the last runs are remembered: with FSDP, each checkpoint of Accelerate is a folder.
_MOST_RUNS = 64
# If snapshots of more names than this lie one level down, the folders there are no checkpoints.
_MOST_INNER = 8


def _run_folders(view: View, name: str) -> Iterator[RunFolder]:
    """Yield the folders in which a training loop may delete old checkpoints when it saves ``name``.

    These are the folder of the snapshot, and the folder above that. Nothing is yielded if snapshots
    have no folders on a disk. A folder that cannot be listed, or does not exist yet, is left out.
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
        # Another thread may have put the run in meanwhile, and remembered a snapshot in it.
        current = _runs.pop(key, None)
        run_folder = seen if current is known or current is None else current
        _runs[key] = run_folder
        for old in list(_runs)[:-_MOST_RUNS]:
            del _runs[old]
    return run_folder


def _key(view: View, run: str, inner: str) -> str:
    return f"{view.repository.backend.identity} {run} /{inner}"


def forget(snapshot: Snapshot) -> bool:
    """Delete a snapshot that a trainer no longer wants, unless it must stay.

    A snapshot must stay if it is tagged or not mirrored yet, or if all later ones of its run have
    NaN.

    If the snapshot has to stay now, but its folder is deleted, a later save of this process deletes
    it.

    Returns:
        Whether the snapshot is gone.
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
    """Before a save, delete the snapshots beside the new one whose folders were deleted.

    So their bytes are collected during the new take, and on a nearly full disk before it.

    Args:
        view: The store.
        name: The name of the new snapshot.
    """
    for folder in _run_folders(view, name):
        # A folder that cannot be looked at does not count as deleted.
        with suppress(OSError, CasnapError):
            _forget_unheld(view, folder.deleted, view.hooks.on_release)


def _forget_unheld(
    view: View,
    find: Callable[[Table], Mapping[str, Row]],
    on_release: Callable[[Sequence[Row]], None],
) -> bool:
    """Delete some snapshots, except those that must stay, such as those that a mirror still lacks.

    Args:
        view: The store.
        find: Given the table, returns the snapshots by name.
        on_release: Called with the rows of the deleted snapshots.

    Returns:
        Whether all of them are gone.
    """

    def judge(table: Table) -> list[Verdict]:
        found = find(table)
        holds = Runs.holds(table, found)
        return [Verdict(name, row, tuple(holds[name])) for name, row in found.items()]

    # A dry run first: most often there is nothing to delete, and a look is cheaper than a commit.
    report = Runs(view.repository).prune_judged(judge, on_release, dry_run=True)
    if report.deleted:
        report = Runs(view.repository).prune_judged(judge, on_release)
    return not report.kept


def note_saved(view: View, name: str, commit: bytes) -> None:
    """Remember that this process has saved a snapshot by DCP or a trainer."""
    for folder in _run_folders(view, name):
        with suppress(OSError, CasnapError):
            folder.note(name, commit)


def _identity(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_dev, info.st_ino
