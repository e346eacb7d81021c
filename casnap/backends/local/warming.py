"""Read new packs into the page cache, since readers often want the newest snapshot.

Takes write around the page cache. Without this module, the first restore after a take would have to
read the disk.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from casnap.backends.local_files.safe_paths import open_file
from casnap.errors import PLACE_ERRORS
from casnap.runtime.machine import available_bytes

# Files below this are written through the page cache.
_LEAST_BYTES = 256 << 10
# Linux shortens a longer advice to what one request to the disk may have.
_ADVICE_BYTES = 256 << 10
# Up to two of these windows are read ahead. More would make the reads of a training wait.
_WINDOW_BYTES = 8 << 20
# A disk that needs longer for a window is busy. The thread then gives up.
_PAUSE, _LOOKS = 0.002, 2500
# The memory that must be available, as a multiple of the bytes to read.
_SPARE = 2


class Warmer:
    """Reads new files into the page cache, by one thread that no one waits for."""

    def __init__(self) -> None:
        # A thread goes on as long as this is the object that it was started with.
        self._turn = object()

    def start(self, lengths: Mapping[str, int]) -> None:
        """Begin to read files on a new thread. The thread of an earlier call ends.

        The new thread ends early if the available memory is less than twice what is left to read,
        or if the disk is busy.

        Args:
            lengths: The path of each file → its length in bytes.
        """
        self._turn = turn = object()
        large = {path: nbytes for path, nbytes in lengths.items() if nbytes >= _LEAST_BYTES}
        if large:
            # If the system starts no more threads, the next reader reads the disk.
            with suppress(RuntimeError):
                thread = threading.Thread(
                    target=self._read, args=(turn, large), name="casnap-warm", daemon=True
                )
                thread.start()

    def _read(self, turn: object, lengths: Mapping[str, int]) -> None:
        left = sum(lengths.values())
        for path, nbytes in lengths.items():
            # A file that is gone, or another file by now, needs no warmth.
            with suppress(OSError, *PLACE_ERRORS):
                file, _ = open_file(path)
                with file as fd:
                    begun = 0
                    for offset in range(0, nbytes, _WINDOW_BYTES):
                        if self._turn is not turn or available_bytes() < _SPARE * left:
                            return
                        begun = _advise(fd, begun, min(offset + 2 * _WINDOW_BYTES, nbytes))
                        if not _has_arrived(fd, min(offset + _WINDOW_BYTES, nbytes)):
                            return
                        left -= _WINDOW_BYTES


def _advise(fd: int, start: int, stop: int) -> int:
    """Have the system begin to read a part of a file; return ``stop``."""
    for offset in range(start, stop, _ADVICE_BYTES):
        os.posix_fadvise(fd, offset, min(_ADVICE_BYTES, stop - offset), os.POSIX_FADV_WILLNEED)
    return stop


def _has_arrived(fd: int, stop: int) -> bool:
    """Wait until the page cache has the file's bytes before ``stop``; False if it takes long.

    Raises:
        OSError: The file system cannot tell, for example one in memory.
    """
    # Not the last byte: the last page of a file was written through the page cache.
    last = (stop - 1) // _ADVICE_BYTES * _ADVICE_BYTES
    for _ in range(_LOOKS):
        try:
            os.preadv(fd, [bytearray(1)], last, os.RWF_NOWAIT)
        except BlockingIOError:
            time.sleep(_PAUSE)
        else:
            return True
    return False
