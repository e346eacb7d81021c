"""Open the files of a local store by their real paths, never through a link.

Anybody who can write to a store's folder could put a link, a pipe or an endless file there. So no
function here follows a link, at any part of a path. Only regular files are opened, and opening one
never waits. If the kernel has ``openat2`` (Linux 5.6), it resolves a path in one step. Otherwise
the path is walked folder by folder. In both cases, a folder that is renamed meanwhile does not lead
outside.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from casnap.errors import BackendError
from casnap.runtime.descriptors import Descriptor, opened

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# The same number on every architecture. Python has no function for it.
_OPENAT2 = 437
_AT_FDCWD = -100
_NO_SYMLINKS = 0x04


class _OpenHow(ctypes.Structure):
    """The C struct ``open_how``, an argument of ``openat2``."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


class OpenFolder(NamedTuple):
    """The file descriptor of an open folder, and the path by which it was opened."""

    fd: int
    path: str


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_char_p,
    ctypes.POINTER(_OpenHow),
    ctypes.c_size_t,
)
_syscall.restype = ctypes.c_long


def _open(path: str, flags: int, base: OpenFolder | None = None) -> Descriptor:
    """Open a file or folder by its real path.

    Args:
        path: The path.
        flags: The flags of :func:`os.open`.
        base: An open folder above the path, from which the path is resolved, even if the folder was
            moved since.

    Raises:
        BackendError: A part of the path is a link.
        OSError: The path cannot be opened.
    """
    at, way = (_AT_FDCWD, path) if base is None else (base.fd, path[len(base.path) + 1 :] or ".")
    try:
        return _open_at_once(way, flags, at) if has_openat2() else _walk(way, flags, at)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENOTDIR):
            _check_no_link(path, e)
        raise


@cache
def _open_how(flags: int) -> _OpenHow:
    return _OpenHow(flags, 0, _NO_SYMLINKS)


def _open_at_once(path: str, flags: int, at: int = _AT_FDCWD) -> Descriptor:
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise ValueError("embedded null byte")
    call = partial(_syscall, _OPENAT2, at, raw, _open_how(flags), ctypes.sizeof(_OpenHow))
    while True:
        opened_at_once = Descriptor(call)
        if opened_at_once.fd >= 0:
            return opened_at_once
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)


@cache
def has_openat2() -> bool:
    """Whether the kernel offers ``openat2``. Some sandboxes forbid this call."""
    try:
        _open_at_once("/", _FOLDER).close()
    except OSError:
        return False
    return True


def _walk(path: str, flags: int, at: int) -> Descriptor:
    *folders, name = path.strip("/").split("/")
    folder = opened("/", _FOLDER) if at == _AT_FDCWD else Descriptor(partial(os.dup, at))
    for each in folders:
        with folder as fd:
            folder = opened(each, _FOLDER | os.O_NOFOLLOW, folder=fd)
    with folder as fd:
        last = opened(name or ".", flags | os.O_NOFOLLOW, folder=fd)
    if flags & os.O_PATH and stat.S_ISLNK(os.fstat(last.fd).st_mode):
        # O_PATH opens even a link itself.
        last.close()
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return last


def _check_no_link(path: str, cause: OSError) -> None:
    for place in (Path(path), *Path(path).parents):
        if place.is_symlink():
            raise BackendError(
                f"{place} is a link, and casnap follows none in a store that is open. If the store "
                "was moved, open it anew. To have a store on another disk, move all of it there, "
                "then put a link in place of its whole folder, or `mount --bind` it there"
            ) from cause


def open_file(path: str, base: OpenFolder | None = None) -> tuple[Descriptor, os.stat_result]:
    """Open a regular file for reading.

    Args:
        path: The real path of the file.
        base: An open folder above the file, from which the path is resolved.

    Returns:
        The open file, and its status.

    Raises:
        BackendError: There is no regular file at the path, or a part of the path is a link.
        OSError: The file cannot be opened.
    """
    try:
        file = _open(path, os.O_RDONLY | _FILE, base)
    except OSError as e:
        if e.errno == errno.ENXIO:
            raise BackendError(f"{path} is a socket or a device, not a file") from None
        raise
    try:
        info = os.fstat(file.fd)
        check_regular(info, path)
    except BaseException:
        file.close()
        raise
    return file, info


def check_regular(info: os.stat_result, path: str) -> None:
    """Check, by the status of a path, that a regular file is there.

    Args:
        info: The status.
        path: The path, for the message.

    Raises:
        BackendError: Something else is there, such as a folder.
    """
    if stat.S_ISDIR(info.st_mode):
        raise BackendError(f"{path} is a folder, not a file")
    if not stat.S_ISREG(info.st_mode):
        raise BackendError(f"{path} is a pipe, a link or a device, not a file")


def stat_at(path: str) -> os.stat_result:
    """Return the status of a file or folder, given its real path.

    Raises:
        BackendError: A part of the path is a link.
        OSError: Nothing is at the path, or the path cannot be looked at.
    """
    with _open(path, os.O_PATH | os.O_CLOEXEC) as fd:
        return os.fstat(fd)


def folder_at(folder: str, *, listed: bool = False, base: OpenFolder | None = None) -> Descriptor:
    """Open a folder. Names in it can then be reached by ``dir_fd``.

    Args:
        folder: The real path of the folder.
        listed: Whether the caller also lists, syncs or changes the folder itself. This needs the
            right to read it.
        base: An open folder above it, from which the path is resolved.

    Raises:
        BackendError: A part of the path is a link.
        OSError: The folder cannot be opened.
    """
    return _open(folder, _LISTED if listed else _FOLDER, base)


@contextmanager
def parent_of(path: str, base: OpenFolder | None = None) -> Iterator[tuple[int, str]]:
    """Open the parent folder of a path for a ``with`` block, as :func:`folder_at` does.

    Yields:
        The file descriptor of the folder, and the last part of the path.
    """
    folder, _, name = path.rpartition("/")
    with folder_at(folder or "/", base=base) as fd:
        yield fd, name


def create_file(name: str, folder: int, mode: int) -> Descriptor:
    """Create a file in an open folder; return it open for writing. The name must be free."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    return opened(name, flags, mode, folder)


def unlink(path: str, base: OpenFolder | None = None) -> None:
    """Delete a file or link, given its real path. If nothing is at the path, do nothing."""
    with suppress(FileNotFoundError), parent_of(path, base) as (folder, name):
        os.unlink(name, dir_fd=folder)


def unlink_at(name: str, folder: int) -> None:
    """Delete a file or link in an open folder. If the name does not exist, do nothing."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def link_at(name: str, folder: int, to: str, new_folder: int) -> None:
    """Give a file a second name by a hard link.

    Args:
        name: The name that the file has.
        folder: The open folder of this name.
        to: The second name.
        new_folder: The open folder of the second name.
    """
    os.link(name, to, src_dir_fd=folder, dst_dir_fd=new_folder, follow_symlinks=False)
