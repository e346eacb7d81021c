"""Making the names of files durable, even after a failed sync of their folder.

After a failed sync the system may drop data that it could not write. The next sync then succeeds,
and proves nothing. So the data of a failed sync are written anew before the next one.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby

from casnap.backends.base import translated
from casnap.backends.door import create_file, opened, stat_at, unlink
from casnap.errors import BackendError
from casnap.runtime.threads import mapped

# How many folders are synced at once.
_AT_ONCE = 4
# How often a sync of each folder has failed in this process.
_failures: Counter[str] = Counter()
_failing = threading.Lock()


class NewNames:
    """Names of files and folders that are to be durable when :meth:`sync` returns.

    Args:
        anew: Replaces a file by a new one with the same bytes.
    """

    def __init__(self, anew: Callable[[str], None]) -> None:
        self._anew = anew
        # Name → how often a sync of its folder had failed before the name was there.
        self._pending: dict[str, int] = {}
        self._lock = threading.Lock()
        self._syncing = threading.Lock()

    def failures(self, path: str) -> int:
        """Return how often a sync of a name's folder has failed; pass that to :meth:`add`."""
        return _failures_of(_folder(path))

    def add(self, path: str, failures: int = 0) -> None:
        """Note a name.

        Args:
            path: The name.
            failures: What :meth:`failures` returned before the name was made; 0 if that is not
                known.
        """
        with self._lock:
            self._pending[path] = min(failures, self._pending.get(path, failures))

    def sync(self) -> None:
        """Make the noted names durable. Those that fail are written anew by the next call."""
        # One at a time: a thread must not return while another one still syncs its names.
        with self._syncing:
            with self._lock:
                pending, self._pending = self._pending, {}
            noted = {
                folder: {path: pending[path] for path in paths}
                for folder, paths in groupby(sorted(pending, key=_by_folder), _folder)
            }
            try:
                # Several at once take hardly longer than one: the disk is flushed once for all.
                for _ in mapped(self._sync_folder, noted.items(), min(len(noted), _AT_ONCE)):
                    pass
            except BaseException:
                for path, failures in pending.items():
                    self.add(path, failures)
                raise

    def _sync_folder(self, names: tuple[str, dict[str, int]]) -> None:
        folder, noted = names
        with translated(folder):
            before = _failures_of(folder)
            doubtful = [path for path, failures in noted.items() if failures < before]
            with self._made_anew(folder, doubtful):
                sync_folder(folder)
            if _failures_of(folder) != before:
                raise BackendError(f"{folder}: another thread failed to make it durable")

    @contextmanager
    def _made_anew(self, folder: str, paths: Iterable[str]) -> Iterator[None]:
        """Make a folder dirty again, with the names that a failed sync was to write."""
        fresh = None
        for path in paths:
            with suppress(FileNotFoundError):
                if stat.S_ISREG(stat_at(path).st_mode):
                    self._anew(path)
                elif fresh is None:
                    # A folder cannot be made anew, so the folder that holds it is changed.
                    name = f".casnap-{os.urandom(12).hex()}"
                    fresh = f"{folder}/{name}"
                    with opened(folder) as fd:
                        os.close(create_file(name, fd, 0o600))
        try:
            yield
        finally:
            if fresh is not None:
                unlink(fresh)


def _failures_of(folder: str) -> int:
    with _failing:
        return _failures.get(folder, 0)


def _folder(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _by_folder(path: str) -> tuple[str, str]:
    return _folder(path), path


def sync_folder(folder: str) -> None:
    """Sync a folder; count failures."""
    with opened(folder, listed=True) as fd:
        try:
            os.fsync(fd)
        except OSError:
            with _failing:
                _failures[folder] += 1
            raise
