"""Make new files and their names durable, even after a sync of their folder has failed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from casnap.backends.local_files.safe_paths import folder_at
from casnap.backends.local_files.system_errors import translated
from casnap.runtime.fork import new_lock
from casnap.runtime.threads import mapped

# The most folders that are synced at once.
_AT_ONCE = 4
doubtful: set[tuple[str, str]] = set()
"""Folders whose last sync has failed in this process, each with the identity of its store."""


class NewNames:
    """The names of new files and folders that the next :meth:`sync` makes durable.

    Args:
        identity: Returns the identity of the store of these files; "" while the store is being
            made.
    """

    def __init__(self, identity: Callable[[], str]) -> None:
        self._identity = identity
        self._folders: set[str] = set()
        self._lock = new_lock()
        self._syncing = new_lock()

    def add(self, path: str) -> None:
        """Note the path of a new file or folder."""
        with self._lock:
            self._folders.add(path.rpartition("/")[0] or "/")

    def sync(self) -> None:
        """Sync the folders of the noted names. If that fails, the next call syncs them again."""
        # One call at a time: no thread may return while another one still syncs its names.
        with self._syncing:
            with self._lock:
                folders, self._folders = self._folders, set()
            try:
                # Several at once take hardly longer than one: the disk is flushed once for all.
                # Folders further up come first, since the names below them need them.
                sync = partial(sync_folder, identity=self._identity)
                for _ in mapped(sync, sorted(folders), min(len(folders), _AT_ONCE)):
                    pass
            except BaseException:
                with self._lock:
                    self._folders |= folders
                raise

    def is_doubtful(self, folder: str) -> bool:
        """Whether this process's last sync of a folder for this store failed."""
        return bool(doubtful) and not doubtful.isdisjoint(_doubts(folder, self._identity()))


def sync_folder(folder: str, identity: Callable[[], str] = str) -> None:
    """Sync a folder, in a way that works even after a failed sync.

    After a failed sync, the system may believe that the folder was written. The next sync then
    succeeds without writing anything, unless the folder has changed since. So this function first
    changes the time of such a folder. (A new name would be a change too, but it would stay if the
    process were killed.)

    Args:
        folder: The path of the folder.
        identity: Returns the identity of the store for which the folder is synced; "" if there is
            none.

    Raises:
        PlaceError: The folder cannot be synced.
    """
    with translated(folder), folder_at(folder, listed=True) as fd:
        doubts = doubtful & _doubts(folder, identity()) if doubtful else set()
        if doubts:
            os.utime(fd)
        try:
            os.fsync(fd)
        except OSError:
            doubtful.add((identity(), folder))
            raise
        doubtful.difference_update(doubts)


def put_whole(path: Path, content: bytes | Path) -> None:
    """Write a file so that it appears under its name whole and durable, or not at all.

    Args:
        path: The path of the file. A file that is already there is replaced.
        content: The bytes, or the path of a file to copy.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    # The temporary name has a suffix that no library reads.
    partial_path = path.with_name(f".{path.name}.{os.urandom(6).hex()}.partial")
    try:
        with partial_path.open("xb") as file:
            if isinstance(content, Path):
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)
    sync_folder(os.path.realpath(path.parent))


def _doubts(folder: str, identity: str) -> set[tuple[str, str]]:
    # A sync that failed while the store was being made leaves doubts after that too.
    return {("", folder), (identity, folder)}
