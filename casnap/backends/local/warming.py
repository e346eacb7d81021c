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
from pathlib import Path

from casnap.backends.local_files.safe_paths import open_file
from casnap.errors import PLACE_ERRORS
from casnap.runtime.machine import available_bytes

# Files below this are written through the page cache.
_LEAST_BYTES = 256 << 10
_PIECE_BYTES = 4 << 20
# A disk that needs longer for a piece is busy. The thread then gives up.
_MOST_SECONDS = 2.5
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
            with suppress(OSError, *PLACE_ERRORS), Path(os.devnull).open("wb") as null:
                file, _ = open_file(path)
                with file as fd:
                    for offset in range(0, nbytes, _PIECE_BYTES):
                        if self._turn is not turn or available_bytes() < _SPARE * left:
                            return
                        began = time.monotonic()
                        # Nothing is copied. Linux reads ahead in large pages, as for any reader.
                        os.sendfile(null.fileno(), fd, offset, _PIECE_BYTES)
                        if time.monotonic() - began > _MOST_SECONDS:
                            return
                        left -= _PIECE_BYTES
