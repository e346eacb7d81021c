"""Locks on files in ``tmp/`` of a local store. They show which writers are alive.

When a process dies, the kernel frees its locks. A writer locks its temporary file. A take locks an
empty file, which announces the take: the file's name contains the root that the take is based on.
An announcement of a suspended process (SIGSTOP) does not count, because the process may never go
on. If it does go on, its take starts again.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from casnap.backends.announcement import NOTE, NOTE_LASTS
from casnap.backends.base import TEMPORARY
from casnap.backends.late_names import is_left_open
from casnap.backends.local_files.locking import lock, open_to_lock
from casnap.backends.local_files.safe_paths import unlink_at
from casnap.backends.local_files.system_errors import translated
from casnap.errors import PLACE_ERRORS
from casnap.runtime.descriptors import Descriptor
from casnap.runtime.fork import locked_file

_ANNOUNCEMENT = re.compile("take-([0-9a-f]{12})-[0-9a-f]{12}")
_ATTEMPTS = 3
_DAY = 86400.0


@contextmanager
def announced_in(
    folder: int, path: str, base: int, create: Callable[[str], Descriptor]
) -> Iterator[Callable[[], None]]:
    """Announce a take during a ``with`` block, as :meth:`casnap.backends.Backend.announced` says.

    Args:
        folder: The open folder ``tmp/``.
        path: The path of this folder.
        base: The number of the root that the take is based on.
        create: Creates a file in this folder, and returns it open.
    """
    name = f"take-{base:012x}-{os.urandom(6).hex()}"
    with translated(f"{path}/{name}"):
        file = _create_locked(name, folder, create)
    is_ours = True
    try:
        with locked_file(file) as is_open:
            try:
                yield lambda: None
            finally:
                # A forked child leaves the file alone: the take is its parent's.
                is_ours = is_open()
    finally:
        # Only now that the file is closed: a client keeps a file that is deleted while it is open.
        if is_ours:
            with suppress(OSError):
                unlink_at(name, folder)


def _create_locked(name: str, folder: int, create: Callable[[str], Descriptor]) -> Descriptor:
    """Create a file that is locked from the moment that it has its name; return it open.

    Args:
        name: The name.
        folder: The open folder ``tmp/``.
        create: Creates a file in this folder, and returns it open.

    Raises:
        FileNotFoundError: At each attempt, a collector has deleted the file before it had its name.
    """
    for _ in range(_ATTEMPTS):
        temporary, is_named = os.urandom(12).hex(), False
        try:
            file = create(temporary)
            # A collector may have locked the file before this writer, or deleted it.
            if lock(file.fd) is not False:
                with suppress(FileNotFoundError):
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                    is_named = True
                    return file
            file.close()
        finally:
            # A full disk may have no room for the new name.
            if not is_named:
                unlink_at(temporary, folder)
    raise FileNotFoundError(errno.ENOENT, "collectors delete what announces a take", name)


def bases_announced_in(folder: int, max_age: float) -> list[int]:
    """Return the numbers of the roots that takes under way are based on; delete dead announcements.

    Args:
        folder: The open folder ``tmp/``.
        max_age: How old an announcement may be to count, in seconds.
    """
    bases: list[int] = []
    for name in os.listdir(folder):
        match = _ANNOUNCEMENT.fullmatch(name)
        if match is not None and _look_at(name, folder, lease=max_age).age < max_age:
            bases.append(int(match[1], 16))
    return bases


def unlink_abandoned(folder: int, min_age: float) -> int:
    """Delete the files that dead writers and takes have left; return how many bytes this freed.

    Args:
        folder: The open folder ``tmp/``.
        min_age: How many seconds old a file must be to be deleted. A writer creates its file a
            moment before it locks the file.
    """
    freed = 0
    for name in os.listdir(folder):
        if TEMPORARY.fullmatch(name):
            freed += _look_at(name, folder, min_age=min_age).freed
        elif _ANNOUNCEMENT.fullmatch(name):
            _look_at(name, folder, lease=_DAY)
        elif NOTE.fullmatch(name):
            freed += _look_at(name, folder, min_age=max(min_age, NOTE_LASTS)).freed
        elif is_left_open(name):
            freed += _unlink_left_open(name, folder)
    return freed


def _unlink_left_open(name: str, folder: int) -> int:
    """Delete, after a day, what a client has kept of a deleted file; return the bytes freed.

    A client of a network file system renames a file that is deleted while it is open. The client
    deletes the renamed file once no process has it open; some clients of FUSE never do. This
    function does not open the file, since the client would keep it again.
    """
    with suppress(OSError):
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(info.st_mode) and time.time() - info.st_mtime > _DAY:
            unlink_at(name, folder)
            return info.st_size if info.st_nlink == 1 else 0
    return 0


class _Look(NamedTuple):
    """The result of :func:`_look_at`.

    Attributes:
        age: The age of the file in seconds, if its writer may be alive; otherwise infinite.
        freed: How many bytes were freed by deleting the file.
    """

    age: float = float("inf")
    freed: int = 0


def _look_at(name: str, folder: int, *, min_age: float = 0.0, lease: float = 0.0) -> _Look:
    """Delete a file if its writer is dead.

    A file of another user stays: this process may not be able to lock it, or to delete it from a
    sticky folder.

    Args:
        name: The name of the file.
        folder: The open folder ``tmp/``.
        min_age: A file that is younger than this many seconds stays, whether it is locked or not.
        lease: If the file system has no locks, a file that is younger than this many seconds counts
            as locked.
    """
    try:
        file = open_to_lock(name, folder)
    except (OSError, *PLACE_ERRORS):
        return _Look()
    with file as fd:
        info = os.fstat(fd)
        # If its time is in the future, only the lock counts.
        age = time.time() - info.st_mtime
        if 0 <= age < min_age:
            return _Look(age)
        is_free = lock(fd)
        if is_free is False and _is_held_by_stopped(info):
            return _Look()
        if is_free is False or (is_free is None and 0 <= age < lease):
            return _Look(age)
        try:
            unlink_at(name, folder)
        except OSError:
            return _Look()
        # If the file has a second name, it was linked into place, and unlinking frees nothing.
        return _Look(freed=info.st_size if info.st_nlink == 1 else 0)


def _is_held_by_stopped(info: os.stat_result) -> bool:
    """Whether a process of this host holds the lock of a file, and is suspended by a signal.

    Args:
        info: The status of the file.
    """
    device = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}"
    try:
        locks = [line.split() for line in Path("/proc/locks").read_text("ascii").splitlines()]
        pid = next(each[4] for each in locks if each[5] == f"{device}:{info.st_ino}")
        # The name of the program is in brackets, and may hold any characters.
        stat_line = Path(f"/proc/{pid}/stat").read_bytes()
        return stat_line.rpartition(b")")[2].split()[0] == b"T"
    except (OSError, ValueError, LookupError, StopIteration):
        return False
