"""Memory of one rank that other ranks of its host can read and write, so that they need no socket.

The memory has a file descriptor but no path (``memfd_create``). So the size of /dev/shm does not
matter, and no file is left behind however a process ends. Another process opens the memory as
``/proc/<pid>/fd/<n>``. This link shows the random name of the memory. The name proves that the link
leads to the right memory: another host or container may have the same pid and descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from casnap.runtime.descriptors import Descriptor, opened


class Address(msgspec.Struct, array_like=True, frozen=True):
    """The address by which other processes of the host find shared memory.

    An address with the name "" stands for no memory.

    Attributes:
        pid: The process that has the memory open.
        descriptor: The file descriptor in that process.
        name: The random name of the memory.
        nbytes: The length of the memory.
    """

    pid: int = 0
    descriptor: int = -1
    name: str = ""
    nbytes: int = 0


class OwnMemory:
    """Memory of this process that other processes of its host may read and write.

    Args:
        nbytes: The length of the memory.

    Attributes:
        address: The address by which other processes find the memory until
            :meth:`close_descriptor`.
        view: The memory, writable.

    Raises:
        OSError: The system does not offer such memory, or does not have enough.
    """

    def __init__(self, nbytes: int) -> None:
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "only Linux has memfd_create")
        name = f"casnap-{os.urandom(12).hex()}"
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._file = Descriptor(partial(os.memfd_create, name, flags))
        fd = self._file.fd
        os.ftruncate(fd, nbytes)
        # If the memory were cut short, the system would kill every process that reads it.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(fd, nbytes)
        self.address = Address(os.getpid(), fd, name, nbytes)
        self.view = memoryview(self._map)

    def close_descriptor(self) -> None:
        """Prevent further processes from finding the memory.

        A process that has mapped the memory keeps it.
        """
        self._file.close()

    def forget(self) -> int:
        """Give the memory's pages back to the system; return the number of bytes.

        The content of the memory is lost.
        """
        with suppress(OSError, ValueError):
            self._map.madvise(mmap.MADV_REMOVE)
            return len(self._map)
        return 0


def mapped(address: Address) -> memoryview | None:
    """Map the shared memory of another process; return a writable view of it.

    Returns:
        The view; None if this process cannot find the memory.
    """
    if not address.name or sys.platform != "linux":
        return None
    path = Path(f"/proc/{address.pid}/fd/{address.descriptor}")
    try:
        # Look at the link first: opening another file, such as a device, could have an effect.
        if str(path.readlink()) != f"/memfd:{address.name} (deleted)":
            return None
        with opened(path, os.O_RDWR | os.O_CLOEXEC) as fd:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(fd).st_size != address.nbytes:
                return None
            # It must be writable even to be read: only then large copies release the GIL.
            return memoryview(mmap.mmap(fd, address.nbytes))
    except (OSError, ValueError):
        return None


class SharedMemory(NamedTuple):
    """The memory that ranks share, as seen by one of them.

    Attributes:
        nbytes: The number of bytes that each rank was asked to give.
        own_memory: The memory of this rank; empty if no other rank can find it.
        theirs: For each rank, its memory; None if this rank cannot find it.
        readers: For each rank, whether it can find the memory of this rank.
        by_all: Whether every rank can find the memory of every other rank.
    """

    nbytes: int
    own_memory: memoryview
    theirs: list[memoryview | None]
    readers: list[bool]
    by_all: bool = False


def not_shared(nbytes: int, size: int) -> SharedMemory:
    """Return the ``SharedMemory`` of ranks that share no memory.

    Args:
        nbytes: The number of bytes that each rank was asked to give.
        size: The number of ranks.
    """
    return SharedMemory(nbytes, memoryview(b""), [None] * size, [False] * size)


class Ring:
    """Allocates runs of bytes in a memory, as a ring buffer: it only returns their offsets.

    Callers free the runs in about the order in which they took them.

    Args:
        nbytes: The length of the memory.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._taken: deque[int] = deque()
        self._freed: set[int] = set()
        self._end = 0

    def take(self, nbytes: int) -> int | None:
        """Take a free run of ``nbytes`` bytes; return its offset, or None if there is none."""
        start = 0  # an unused memory begins at 0 again, where its pages are already there
        if self._taken:
            start, oldest = self._end, self._taken[0]
            if start > oldest and start + nbytes > self._nbytes:
                start = 0
            # No run may end where the oldest begins: a full ring would look like an empty one.
            if start <= oldest <= start + nbytes:
                return None
        if start + nbytes > self._nbytes:
            return None
        self._taken.append(start)
        self._end = start + nbytes
        return start

    def free(self, start: int) -> None:
        """Free the run that begins at the offset ``start``."""
        self._freed.add(start)
        while self._taken and self._taken[0] in self._freed:
            self._freed.remove(self._taken.popleft())
