"""A local folder that is held open, and changes to the names in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from casnap.backends.local_files.file_io import write_cached
from casnap.backends.local_files.locking import lock, open_to_lock
from casnap.backends.local_files.owners import Owners, new_file_in
from casnap.backends.local_files.safe_paths import OpenFolder, create_file, folder_at, unlink_at
from casnap.runtime.descriptors import Descriptor
from casnap.runtime.fork import locked_file


class HeldFolder:
    """A folder that is held open. Names in it are reached by its file descriptor.

    Another user may replace any folder of the path by a link or another folder. The methods still
    work in the folder that was opened. They raise the errors of the system.

    Args:
        path: The real path of the folder.
        within: An open folder above it, from which the path is resolved.

    Attributes:
        path: The path by which the folder was opened.

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
        """The file descriptor of the folder, for ``dir_fd=``; negative once it is closed."""
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
        """Return the names in the folder, unsorted; with ``matches``, only those it accepts."""
        return [name for name in os.listdir(self.fd) if matches is None or matches(name)]

    def status(self, name: str | None = None) -> os.stat_result:
        """Return the status of a name, without following a link; None means the folder."""
        if name is None:
            return os.fstat(self.fd)
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def create(self, name: str, mode: int) -> Descriptor:
        """Create a file; return it open for writing."""
        return create_file(name, self.fd, mode)

    def put(self, name: str, content: bytes, mode: int) -> None:
        """Write a file durably. Other processes see all of it or, until then, the earlier file."""
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
        """Rename a file or folder. A file that has the new name is replaced."""
        os.rename(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Delete a file or link. If the name does not exist, do nothing."""
        unlink_at(name, self.fd)

    def sync(self) -> None:
        """Make the names in the folder durable."""
        os.fsync(self.fd)

    # --- whose it is, and who has it alone ---

    def owners(self) -> Owners:
        """Return whose files count as this user's in this folder.

        To find out, the method creates a file in the folder, and deletes it.
        """
        return Owners.by(new_file_in(self.fd, f".{os.urandom(6).hex()}.partial"))

    @contextmanager
    def file_to_lock(self, name: str, mode: int) -> Iterator[int]:
        """Open a regular file for a ``with`` block. The end of the block frees its lock.

        A child that is forked in the block closes the file at once.

        Args:
            name: The name of the file, which is created if it is missing.
            mode: The mode of a new file.

        Yields:
            The file descriptor, to pass to :meth:`lock`.

        Raises:
            BackendError: The name does not belong to a regular file.
        """
        file = open_to_lock(name, self.fd, mode)
        with locked_file(file):
            yield file.fd

    @staticmethod
    def lock(file: int) -> bool | None:
        """Try to lock an open file, without waiting.

        Returns:
            Whether this process has the lock now; None if the file system has no locks, or refuses
            one for this file.
        """
        return lock(file)
