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
from pathlib import Path

from casnap.backends.base import translated
from casnap.errors import BackendError
from casnap.runtime.threads import mapped

# How many folders are synced at once.
_AT_ONCE = 4
# How often a sync of each folder has failed in this process.
_failures: Counter[Path] = Counter()
_failing = threading.Lock()


class NewNames:
    """Names of files and folders that are to be durable when :meth:`sync` returns.

    Args:
        anew: Replaces a file by a new one with the same bytes.
    """

    def __init__(self, anew: Callable[[Path], None]) -> None:
        self._anew = anew
        # Name → how often a sync of its folder had failed before the name was there.
        self._pending: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._syncing = threading.Lock()

    def failures(self, path: Path) -> int:
        """Return how often a sync of a name's folder has failed; pass that to :meth:`add`."""
        return _failures_of(path.parent)

    def add(self, path: Path, failures: int = 0) -> None:
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

    def _sync_folder(self, names: tuple[Path, dict[Path, int]]) -> None:
        folder, noted = names
        with translated(str(folder)):
            before = _failures_of(folder)
            doubtful = [path for path, failures in noted.items() if failures < before]
            with self._made_anew(folder, doubtful):
                sync_folder(folder)
            if _failures_of(folder) != before:
                raise BackendError(f"{folder}: another thread failed to make it durable")

    @contextmanager
    def _made_anew(self, folder: Path, paths: Iterable[Path]) -> Iterator[None]:
        """Make a folder dirty again, with the names that a failed sync was to write."""
        fresh = None
        for path in paths:
            with suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode):
                    self._anew(path)
                elif fresh is None:
                    # A folder cannot be made anew, so the folder that holds it is changed.
                    fresh = folder / f".casnap-{os.urandom(12).hex()}"
                    fresh.touch(0o600)
        try:
            yield
        finally:
            if fresh is not None:
                fresh.unlink(missing_ok=True)


def _failures_of(folder: Path) -> int:
    with _failing:
        return _failures.get(folder, 0)


def _folder(path: Path) -> Path:
    return path.parent


def _by_folder(path: Path) -> tuple[Path, Path]:
    return path.parent, path


def sync_folder(folder: Path) -> None:
    """Sync a folder; count failures."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError:
        with _failing:
            _failures[folder] += 1
        raise
    finally:
        os.close(fd)
