"""The keys, and on a disk the folder, that the probes of one process use at a place."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from casnap.backends import Backend
from casnap.runtime.descriptors import Descriptor, opened


class Site:
    """The keys that one process may use at a place, and the time left for its probes.

    Args:
        backend: A backend for the place. Nothing but the probes uses it.
        seconds: How many seconds all probes together may take.

    Attributes:
        backend: The backend of the place.
        end: When all probes must be over, by the monotonic clock.
        me: A random id of this process. It keeps its keys apart from those of other processes.
        key: The prefix of the keys of this process.
    """

    def __init__(self, backend: Backend, seconds: float) -> None:
        self.backend = backend
        self.end = time.monotonic() + seconds
        self.me = os.urandom(6).hex()
        self.key = f"work-{self.me}"

    @property
    def left(self) -> float:
        """How many seconds are left for the probes, at least 0."""
        return max(0.0, self.end - time.monotonic())

    def tries(self, most: int, seconds: float) -> Iterator[int]:
        """Yield numbers from 0, one for each repetition of a step, until the time is over.

        Args:
            most: The most numbers to yield; the first one always comes.
            seconds: How many seconds all repetitions may take.
        """
        end = min(time.monotonic() + seconds, self.end)
        for number in range(most):
            if number and time.monotonic() > end:
                return
            yield number

    @property
    def folder(self) -> Path:
        """The folder of this process."""
        return Path(self.backend.where(self.key))

    def path(self, name: str) -> Path:
        """Return the path of a file in the folder."""
        return self.folder / name

    def make(self, name: str) -> Path:
        """Make an empty file in the folder; return its path."""
        path = self.path(name)
        path.touch(0o600)
        return path

    def opened(self, name: str) -> Descriptor:
        """Open a file in the folder, to append to it; make it if it is missing."""
        flags = os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        return opened(self.path(name), flags, 0o600)
