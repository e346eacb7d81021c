"""Where probes work: keys of their own at the place, and there a folder, if it is on a disk."""

from __future__ import annotations

import os
from pathlib import Path

from casnap.backends import Backend
from casnap.runtime.descriptors import Descriptor, opened


class Site:
    """What one process writes at the place that it tries.

    Args:
        backend: The place, for nothing but this.

    Attributes:
        backend: The same.
        me: What tells this process from others that do the same there.
        key: What the keys of its own work begin with.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.me = os.urandom(6).hex()
        self.key = f"work-{self.me}"

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
