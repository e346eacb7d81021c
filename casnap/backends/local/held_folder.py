"""A folder of this machine that is held open, and changes to names in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from casnap.backends.local.file_io import write_cached
from casnap.backends.local.file_locks import lock, open_to_lock
from casnap.backends.local.owners import Owners, new_file_in
from casnap.backends.local.safe_paths import OpenFolder, create_file, folder_at, unlink_at
from casnap.runtime.descriptors import Descriptor
from casnap.runtime.fork import locked_file


class HeldFolder:
    """A folder that is held open; names in it are reached by its handle.

    Another user may put a link or another folder in the place of any folder of the path. All
    methods still work in this very folder. They raise the errors of the system.

    Args:
        path: The real path of the folder.
        within: A held folder above it, to begin there.

    Attributes:
        path: The path that led to the folder.

    Raises:
        BackendError: A part of the path is a link.
        OSError: The folder cannot be opened.
    """

    def __init__(self, path: str, within: HeldFolder | None = None) -> None:
        base = None if within is None else OpenFolder(within.fd, within.path)
        self.path: str = path
        self._opened = folder_at(path, listed=True, base=base)

    @property
    def fd(self) -> int:
        """The descriptor of the folder, for ``dir_fd=``; negative once the folder is closed."""
        return self._opened.fd

    def close(self) -> None:
        """Close the folder; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- names in it ---

    def names(self, matches: Callable[[str], object] | None = None) -> list[str]:
        """Return the names in the folder that match, in no order; all by default."""
        return [name for name in os.listdir(self.fd) if matches is None or matches(name)]

    def status(self, name: str | None = None) -> os.stat_result:
        """Return the status of a name, without following a link; by default of the folder."""
        if name is None:
            return os.fstat(self.fd)
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def create(self, name: str, mode: int) -> Descriptor:
        """Create a file; return it open to be written."""
        return create_file(name, self.fd, mode)

    def put(self, name: str, content: bytes, mode: int) -> None:
        """Put a file that appears whole under its name, or not at all; it is durable then."""
        partial = f"{name}.partial"
        self.unlink(partial)
        try:
            with self.create(partial, mode) as fd:
                write_cached(fd, memoryview(content), 0)
                os.fsync(fd)
                self.rename(partial, name)
        except OSError:
            self.unlink(partial)
            raise
        self.sync()

    def rename(self, name: str, to: str) -> None:
        """Rename a file or folder; a file that has the new name is replaced."""
        os.rename(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Remove a name that is no folder, if it is there."""
        unlink_at(name, self.fd)

    def sync(self) -> None:
        """Make the names in the folder durable."""
        os.fsync(self.fd)

    # --- whose it is, and who has it alone ---

    def owners(self) -> Owners:
        """Return who counts as this user here, by a new file that is made and removed."""
        return Owners.by(new_file_in(self.fd, f".{os.urandom(6).hex()}.partial"))

    @contextmanager
    def file_to_lock(self, name: str, mode: int) -> Iterator[int]:
        """Open a regular file for a ``with`` block, at whose end its lock is free again.

        A child that is forked in the block closes the file at once.

        Args:
            name: The name of the file, which is made if it is not there.
            mode: The mode of a new file.

        Yields:
            The open file, which :meth:`lock` locks.

        Raises:
            BackendError: The name is no regular file.
        """
        file = open_to_lock(name, self.fd, mode)
        with locked_file(file):
            yield file.fd

    @staticmethod
    def lock(file: int) -> bool | None:
        """Try to lock an open file.

        Returns:
            Whether it is locked; None if the file system has no locks, or none for this file.
        """
        return lock(file)
