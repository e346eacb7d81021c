"""Reading and writing the bytes of files of this machine."""

from __future__ import annotations

import errno
import os

from casnap.backends.base import check_length
from casnap.backends.local.safe_paths import OpenFolder, open_file
from casnap.backends.local.system_errors import translated
from casnap.runtime.buffers import PAGE, address_of
from casnap.runtime.descriptors import opened

_DIRECT = getattr(os, "O_DIRECT", 0)
# Below this, going through the page cache costs less than going around it.
_DIRECT_WRITE_BYTES = 256 << 10


def write_at(fd: int, view: memoryview, offset: int) -> None:
    """Write to a file; the whole pages of a large aligned view go around the page cache."""
    position = 0
    if _DIRECT and len(view) >= _DIRECT_WRITE_BYTES and not view.readonly:
        position = _write_direct(fd, view, offset)
    write_cached(fd, view[position:], offset + position)


def write_cached(fd: int, view: memoryview, offset: int) -> None:
    """Write to a file through the page cache, for a file that is read soon."""
    position = 0
    while position < len(view):
        position += os.pwrite(fd, view[position:], offset + position)


def _write_direct(fd: int, view: memoryview, offset: int) -> int:
    """Write the whole pages of an aligned view around the page cache; return how many bytes."""
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
        path: Its real path.
        most: How many bytes it may have.
        base: An open folder above it, to begin there.

    Raises:
        DamagedError: The file is longer than ``most``.
    """
    with translated(path):
        file, info = open_file(path, base)
        with file as fd:
            check_length(path, info.st_size, most)
            return _read_all(fd, info.st_size), info


def _read_all(fd: int, nbytes: int) -> bytes:
    """Read a file of ``nbytes`` bytes; less if it was cut off since its length was looked up."""
    content = b""
    while len(content) < nbytes and (piece := os.read(fd, nbytes - len(content))):
        # A read of a local file returns all of it.
        content = content + piece if content else piece
    return content


def read_run(fd: int, target: memoryview, offset: int) -> int:
    """Fill a buffer from a file; return how many bytes there were."""
    nbytes = 0
    while nbytes < len(target):
        n = os.preadv(fd, [target[nbytes:]], offset + nbytes)
        if n == 0:
            break
        nbytes += n
    return nbytes


def is_cached(fd: int, offset: int) -> bool:
    """Whether a byte can be read without the disk, as far as the system says."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, getattr(os, "RWF_NOWAIT", 0)) == 1
    except OSError:
        return False
