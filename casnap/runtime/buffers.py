"""Page-aligned host memory that is used again and again.

Memory that the kernel has just provided is slow to fill: the kernel zeroes each page first, and
that takes several times as long as the copy. So a process keeps its slots until it exits.

There are two sorts of slots. Packs are filled in the slots of a bounded pool. These slots have huge
pages, because the disk writes from huge pages faster. The copies of a state that ``async_take``
makes lie in slots of ordinary pages. With huge pages, a first ``async_take`` took three times as
long: the kernel chose memory that the virtual machine had never touched.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from casnap.errors import UnavailableError
from casnap.runtime.fork import in_child, new_lock
from casnap.runtime.threads import Crew, run_shielded, works_in_background

PAGE = 4096
SLOT_BYTES = 48 << 20
SLOTS, BACKGROUND_SLOTS = 6, 5


def whole_pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Slot:
    """A buffer of page-aligned anonymous memory.

    Args:
        nbytes: The size of the buffer.
        huge: Whether to ask the kernel for huge pages.

    Attributes:
        view: The memory, writable.
        unpin: Unregisters the memory from a GPU's driver; None if the memory is not registered.
        is_used: Whether the slot was used before, so that the kernel has provided its pages.

    Raises:
        UnavailableError: There is no memory for the buffer.
    """

    __slots__ = ("_memory", "is_used", "unpin", "view")

    def __init__(self, nbytes: int, *, huge: bool = False) -> None:
        # Private: after a fork, parent and child must not write into each other's slots.
        try:
            self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise UnavailableError(
                f"there is no memory for a buffer of {nbytes:,} bytes: {e}. Other processes of "
                "this host, or a bound of this one (`ulimit -v`), leave too little",
                reason="exhausted",
            ) from e
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            # Some kernels have no huge pages.
            with suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)
        self.unpin: Callable[[], object] | None = None
        self.is_used = False


_all_pools: list[Pool] = []
_givers: list[Callable[[], int]] = []


class Pool:
    """A set of slots of one size. The slot that was released last is handed out first.

    Args:
        slot_bytes: The bytes of each slot.
        limit: The most slots; None for no bound. Only the slots of a bounded pool have huge pages.
    """

    def __init__(self, slot_bytes: int, limit: int | None) -> None:
        self.slot_bytes = slot_bytes
        self.limit = limit
        self._begin()
        # In a child, the parent's threads still use the slots and may hold the lock: begin anew.
        in_child(self._begin)
        _all_pools.append(self)

    def _begin(self) -> None:
        self._made = 0
        self._free: list[Slot] = []
        self._changed = threading.Condition()

    def acquire(self, *, wait: bool = True) -> Slot | None:
        """Return a free slot, or a new one if the limit allows it.

        Args:
            wait: Whether to wait for a slot while all are in use; without waiting, the call returns
                None.
        """
        with self._changed:
            while not self._free:
                if self.limit is None or self._made < self.limit:
                    slot = Slot(self.slot_bytes, huge=self.limit is not None)
                    self._made += 1
                    return slot
                if not wait:
                    return None
                self._changed.wait()
            return self._free.pop()

    def take(self) -> Slot:
        """Return a slot; if all are in use, wait until one is released."""
        slot = self.acquire()
        assert slot is not None
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back to the pool."""
        slot.is_used = True
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    @contextmanager
    def lease(self) -> Iterator[Slot]:
        """Take a slot for a block of code. The block must not wait for a second slot."""
        slot = self.take()
        try:
            yield slot
        finally:
            self.release(slot)

    def shrink(self) -> int:
        """Give the memory of the free slots back to the system; return the number of bytes."""
        nbytes = 0
        while True:
            with self._changed:
                if not self._free:
                    return nbytes
                # Unpin the slot before it leaves the pool, so that an error loses no pinned slot.
                if (unpin := self._free[-1].unpin) is not None:
                    unpin()
                self._free.pop()
                self._made -= 1
            nbytes += self.slot_bytes


_pools: dict[tuple[int, int], Pool] = {}
_lock = new_lock()


def shared_pool(at_least: int) -> Pool:
    """Return the process's pool whose slots hold at least ``at_least`` bytes each.

    Threads in the background get a different pool from other threads.
    """
    # Each size keeps its slots, so there are few sizes.
    nbytes = SLOT_BYTES if at_least <= SLOT_BYTES else 1 << (at_least - 1).bit_length()
    # Work in the background may hold its slots while a connection is dead: takes must not wait.
    slots = BACKGROUND_SLOTS if works_in_background() else SLOTS
    with _lock:
        if (nbytes, slots) not in _pools:
            _pools[nbytes, slots] = Pool(nbytes, slots)
        return _pools[nbytes, slots]


def release_memory() -> int:
    """Give back the memory that casnap keeps for the next take or restore.

    After an ``async_take``, casnap keeps as much memory as the state takes, since copying to fresh
    memory takes several times as long as copying to used memory. Memory in use stays, such as the
    copies of a pending take. This function may be called at any time.

    Returns:
        How many bytes were given back. It is an upper bound: pages that were never touched took no
        memory.

    Raises:
        UnavailableError: No thread can be started.
    """

    def release_all(_: Crew) -> int:
        pools = sum(pool.shrink() for pool in list(_all_pools))
        return pools + sum(give_back() for give_back in _givers)

    # Here an interrupt could leave a pool's lock held, or a slot counted that is gone.
    return run_shielded(release_all)


def on_release(give_back: Callable[[], int]) -> None:
    """Register a function that :func:`release_memory` calls.

    Args:
        give_back: Gives memory back to the system; returns the number of bytes.
    """
    _givers.append(give_back)


# All addresses of the process as one view. To cut it takes a tenth of the time of a new array of
# ctypes, which needs a class for each length.
_memory = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")


def view_at(address: int, nbytes: int) -> memoryview:
    """Return a writable view of the bytes at an address. The caller must keep this memory alive."""
    return _memory[address : address + nbytes]


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a writable view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
# Linux has these since 5.14.
_POPULATE_READ, _POPULATE_WRITE = 22, 23


def can_write(address: int) -> bool:
    """Whether this process may write to the page at an address; True if the system cannot tell.

    The check does not change what the page contains.
    """
    refused = _populate(address, _POPULATE_WRITE)
    if refused == errno.EINVAL:
        # An older system refuses the question about reading, too.
        return _populate(address, _POPULATE_READ) != 0
    return refused != errno.EFAULT


def _populate(address: int, advice: int) -> int:
    """Ask the kernel to provide the page at an address; return the errno, or 0 for success.

    Args:
        address: Any address in the page.
        advice: For which access: ``_POPULATE_READ`` or ``_POPULATE_WRITE``.
    """
    if _libc is None:
        return 0
    page = ctypes.c_void_p(address // mmap.PAGESIZE * mmap.PAGESIZE)
    return ctypes.get_errno() if _libc.madvise(page, ctypes.c_size_t(1), advice) else 0


# The flag of fallocate that leaves the length of the file as it is.
_KEEP_SIZE = 1


def reserve_space(fd: int, nbytes: int) -> bool:
    """Reserve space on the disk for the first ``nbytes`` of a file; return whether that worked.

    The length of the file stays as it is.
    """
    if _libc is None or not nbytes:
        return False
    return not _libc.fallocate64(fd, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(nbytes))


def copy(target: memoryview, source: memoryview | bytes) -> None:
    """Copy all bytes of ``source`` to the beginning of ``target``.

    If ``source`` is a writable view of 32 KiB or more, the copy releases the GIL.
    """
    n = len(source)
    if n < 32 << 10 or not isinstance(source, memoryview) or source.readonly:
        target[:n] = source
    else:
        ctypes.memmove(address_of(target), address_of(source), n)


def fill_from(raw: memoryview | bytes, memory: memoryview) -> bool:
    """Copy ``raw`` into ``memory``; if their lengths differ, copy nothing and return False."""
    if len(raw) != len(memory):
        return False
    memory[:] = raw
    return True
