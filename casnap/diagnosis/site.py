"""Where probes work: keys of their own at the place, and there a folder, if it is on a disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from casnap.backends import Backend
from casnap.runtime.descriptors import Descriptor, opened


class Site:
    """What one process writes at the place that it tries, and how much time is left for that.

    Args:
        backend: The place, for nothing but this.
        seconds: How long all probes together may take.

    Attributes:
        backend: The same.
        end: When all probes are to be over, by the monotonic clock.
        me: What tells this process from others that do the same there.
        key: What the keys of its own work begin with.
    """

    def __init__(self, backend: Backend, seconds: float) -> None:
        self.backend = backend
        self.end = time.monotonic() + seconds
        self.me = os.urandom(6).hex()
        self.key = f"work-{self.me}"

    @property
    def left(self) -> float:
        """How many seconds are left; 0 if none are."""
        return max(0.0, self.end - time.monotonic())

    def tries(self, most: int, seconds: float) -> Iterator[int]:
        """Yield numbers for what is done several times: at least one, and none once time is over.

        Args:
            most: How many at most.
            seconds: How long that may take.
        """
        end = min(time.monotonic() + seconds, self.end)
        for number in range(most):
            if number and time.monotonic() > end:
                return
            yield number

    @property
    def folder(self) -> Path:
        """The folder of its own work."""
        return Path(self.backend.where(self.key))

    def path(self, name: str) -> Path:
        """Return the path of a file there."""
        return self.folder / name

    def make(self, name: str) -> Path:
        """Make an empty file there."""
        path = self.path(name)
        path.touch(0o600)
        return path

    def opened(self, name: str) -> Descriptor:
        """Open a file there, at its end; make it if it is missing."""
        flags = os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        return opened(self.path(name), flags, 0o600)
