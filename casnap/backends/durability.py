"""Making the names of files durable, even after a failed sync of their folder."""

from __future__ import annotations

import os

from casnap.backends.safe_paths import create_file, folder_at
from casnap.backends.system_errors import translated
from casnap.runtime.fork import new_lock
from casnap.runtime.threads import mapped

# How many folders are synced at once.
_AT_ONCE = 4
doubtful: set[str] = set()
"""Folders whose last sync has failed in this process."""


class NewNames:
    """Names of files and folders that are to be durable when :meth:`sync` returns."""

    def __init__(self) -> None:
        self._folders: set[str] = set()
        self._lock = new_lock()
        self._syncing = new_lock()

    def add(self, path: str) -> None:
        """Note a name."""
        with self._lock:
            self._folders.add(path.rpartition("/")[0] or "/")

    def sync(self) -> None:
        """Make the noted names durable. If that fails, the next call tries them again."""
        # One at a time: a thread must not return while another one still syncs its names.
        with self._syncing:
            with self._lock:
                folders, self._folders = self._folders, set()
            try:
                # Several at once take hardly longer than one: the disk is flushed once for all.
                # Folders further up come first: what is below them needs them.
                for _ in mapped(sync_folder, sorted(folders), min(len(folders), _AT_ONCE)):
                    pass
            except BaseException:
                with self._lock:
                    self._folders |= folders
                raise


def sync_folder(folder: str) -> None:
    """Sync a folder, also if the sync before has failed.

    After a failed sync the system may take the folder for written. The next sync then succeeds,
    and proves nothing, unless the folder has changed.
    """
    with translated(folder), folder_at(folder, listed=True) as fd:
        change = f".casnap-{os.urandom(12).hex()}" if folder in doubtful else ""
        if change:
            os.close(create_file(change, fd, 0o600))
        try:
            os.fsync(fd)
        except OSError:
            doubtful.add(folder)
            raise
        finally:
            if change:
                os.unlink(change, dir_fd=fd)
        doubtful.discard(folder)
