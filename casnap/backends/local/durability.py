"""Making the names of files durable, even after a failed sync of their folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from casnap.backends.local.safe_paths import folder_at
from casnap.backends.local.system_errors import translated
from casnap.runtime.fork import new_lock
from casnap.runtime.threads import mapped

# The most folders that are synced at once.
_AT_ONCE = 4
doubtful: set[tuple[str, str]] = set()
"""Folders whose last sync has failed in this process, each with the identity of its store."""


class NewNames:
    """Names of files and folders that are to be durable when :meth:`sync` returns.

    Args:
        identity: Returns the identity of the store that they are for; "" while it is being made.
    """

    def __init__(self, identity: Callable[[], str]) -> None:
        self._identity = identity
        self._folders: set[str] = set()
        self._lock = new_lock()
        self._syncing = new_lock()

    def add(self, path: str) -> None:
        """Note a name."""
        with self._lock:
            self._folders.add(path.rpartition("/")[0] or "/")

    def sync(self) -> None:
        """Make the noted names durable. If that fails, the next call tries them again."""
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
        """Whether the last sync of a folder for this store has failed in this process."""
        return bool(doubtful) and not doubtful.isdisjoint(_doubts(folder, self._identity()))


def sync_folder(folder: str, identity: Callable[[], str] = str) -> None:
    """Sync a folder, also if the sync before has failed.

    After a failed sync the system may take the folder for written. The next sync then succeeds, and
    proves nothing, unless the folder has changed. So the folder's time is changed first. (A new
    name would change it too, but would stay there if the process is killed.)

    Args:
        folder: The folder.
        identity: Returns the identity of the store that it is synced for; "" if there is none.
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


def _doubts(folder: str, identity: str) -> set[tuple[str, str]]:
    # A sync that failed while the store was being made leaves doubts after that too.
    return {("", folder), (identity, folder)}
