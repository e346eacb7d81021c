"""File descriptors that an interrupt cannot leave open.

A Ctrl-C can come between any two instructions of Python. If it comes after the call that opens a
file and before the ``try`` whose ``finally`` closes the file, the file stays open. A ``__del__``
does not help: Python swallows an interrupt in it. So here C code passes a new descriptor to the
object that owns it, and C code closes the descriptor when the owner is freed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import starmap
from select import epoll
from typing import Any


class Descriptor:
    """An open file or folder, closed at the latest when the last reference to this object is gone.

    A ``with`` block gets the file descriptor; the end of the block closes it.

    Args:
        call: Opens the file or folder, and returns the file descriptor, or a negative number for a
            failure. It must be a C function whose arguments ``partial`` has bound.
    """

    def __init__(self, call: Callable[[], int]) -> None:
        numbers = filter((-1).__lt__, starmap(call, ((),)))
        # epoll is the one type of Python that owns any number: others want a file, or a socket.
        self._owner = next(map(epoll.fromfd, numbers), None)

    @property
    def fd(self) -> int:
        """The file descriptor; -1 if the file is closed or was not opened."""
        return -1 if self._owner is None or self._owner.closed else self._owner.fileno()

    def close(self) -> None:
        """Close the file or folder; a second call does nothing."""
        if self._owner is not None:
            self._owner.close()

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *error: object) -> None:
        self.close()


def opened(path: Any, flags: int, mode: int = 0o777, folder: int | None = None) -> Descriptor:
    """Open a file or folder as :func:`os.open` does. An exec closes it.

    Args:
        path: The path, relative to ``folder`` if that is given.
        flags: The flags of :func:`os.open`.
        mode: The mode of a new file, less the umask.
        folder: The file descriptor of an open folder; None for the current folder.

    Raises:
        OSError: The file or folder cannot be opened.
    """
    return Descriptor(partial(os.open, path, flags, mode, dir_fd=folder))
