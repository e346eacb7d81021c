"""Lock local files, without waiting for another process."""

from __future__ import annotations

import errno
import fcntl
import os

from casnap.backends.local_files.safe_paths import check_regular
from casnap.runtime.descriptors import Descriptor, opened


def lock(fd: int) -> bool | None:
    """Try to lock an open file, without waiting.

    Returns:
        Whether this process has the lock now; None if the file system has no locks, or refuses one
        for this file.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return False if e.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def open_to_lock(name: str, folder: int, make: int | None = None) -> Descriptor:
    """Open a regular file in order to lock it. Links are not followed, and the call does not wait.

    Args:
        name: The name of the file.
        folder: The open folder of the file.
        make: The mode with which to create the file if it is missing; None not to create it.

    Raises:
        BackendError: The name does not belong to a regular file.
        OSError: The file cannot be opened.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    flags |= 0 if make is None else os.O_CREAT
    try:
        # On NFS, only a file that is open for writing can be locked.
        file = opened(name, os.O_RDWR | flags, make or 0, folder)
    except OSError:
        file = opened(name, os.O_RDONLY | flags, make or 0, folder)
    try:
        check_regular(os.fstat(file.fd), name)
    except BaseException:
        file.close()
        raise
    return file
