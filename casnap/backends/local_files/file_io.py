"""Reading and writing the bytes of local files."""

from __future__ import annotations

import errno
import os

from casnap.backends.local_files.safe_paths import OpenFolder, open_file
from casnap.backends.local_files.system_errors import translated
from casnap.format.records import check_length
from casnap.runtime.buffers import PAGE, address_of
from casnap.runtime.descriptors import opened

_DIRECT = getattr(os, "O_DIRECT", 0)
# Below this, going through the page cache costs less than going around it.
_DIRECT_WRITE_BYTES = 256 << 10


def write_at(fd: int, view: memoryview, offset: int) -> None:
    """Write a view to a file at an offset.

    The whole pages of a large aligned view go around the page cache, if the file system allows
    this.
    """
    position = 0
    if _DIRECT and len(view) >= _DIRECT_WRITE_BYTES and not view.readonly:
        position = _write_direct(fd, view, offset)
    write_cached(fd, view[position:], offset + position)


def write_cached(fd: int, view: memoryview, offset: int) -> None:
    """Write a view to a file at an offset, through the page cache.

    Use this for files that will soon be read.
    """
    position = 0
    while position < len(view):
        position += os.pwrite(fd, view[position:], offset + position)


def _write_direct(fd: int, view: memoryview, offset: int) -> int:
    """Write the whole pages of a view around the page cache; return the number of bytes written.

    The result is 0 if the view or the offset is not aligned, or the file system refuses such
    writes.
    """
    nbytes = len(view) // PAGE * PAGE
    if address_of(view) % PAGE or offset % PAGE:
        return 0
    try:
        # Opened once more, since other threads may write to the file too.
        around_cache = opened(f"/proc/self/fd/{fd}", os.O_WRONLY | _DIRECT | os.O_CLOEXEC)
    except OSError:
        return 0
    position = 0
    with around_cache as direct:
        try:
            while position < nbytes:
                position += os.pwrite(direct, view[position:nbytes], offset + position)
                if position % PAGE:
                    break
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
    return position


def read_file(path: str, most: int, base: OpenFolder | None = None) -> tuple[bytes, os.stat_result]:
    """Return the content of a whole file, and its status.

    Args:
        path: The real path of the file.
        most: The most bytes that the file may have.
        base: An open folder above the file, from which the path is resolved.

    Raises:
        DamagedError: The file is longer than ``most``.
    """
    with translated(path):
        file, info = open_file(path, base)
        with file as fd:
            check_length(path, info.st_size, most)
            return _read_all(fd, info.st_size), info


def _read_all(fd: int, nbytes: int) -> bytes:
    """Read ``nbytes`` bytes of a file; fewer if the file has become shorter meanwhile."""
    content = b""
    while len(content) < nbytes and (piece := os.read(fd, nbytes - len(content))):
        # A read of a local file returns all of it.
        content = content + piece if content else piece
    return content


def read_run(fd: int, target: memoryview, offset: int) -> int:
    """Read bytes of a file into a buffer; return how many were read before the file ended."""
    nbytes = 0
    while nbytes < len(target):
        n = os.preadv(fd, [target[nbytes:]], offset + nbytes)
        if n == 0:
            break
        nbytes += n
    return nbytes


def is_cached(fd: int, offset: int) -> bool:
    """Whether the page cache has a byte of a file. False if the system cannot tell."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, getattr(os, "RWF_NOWAIT", 0)) == 1
    except OSError:
        return False
