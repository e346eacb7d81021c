"""Locks that all processes of a host share. Each is a file, locked by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from casnap.runtime.descriptors import opened
from casnap.runtime.fork import locked_file

_POLL = 0.002


class BusyError(OSError):
    """Another process has held a lock for longer than the caller wanted to wait."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EWOULDBLOCK, message)

    def __str__(self) -> str:
        """Return the message without the errno."""
        return str(self.strerror)


@contextmanager
def locked(path: Path, patience: float) -> Iterator[None]:
    """Hold a lock that all processes of this host respect, for a block of code.

    Args:
        path: The file to lock; it is created if it does not exist.
        patience: How many seconds to wait for the lock.

    Raises:
        BusyError: Another process has held the lock for that long.
    """
    file = opened(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + patience
    with locked_file(file):
        while not _try_lock(file.fd):
            if time.monotonic() >= end:
                raise BusyError(f"another process has held {path.name!r} for {patience:g} s")
            time.sleep(_POLL)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
