"""Open files and folders that an interrupt cannot leave open.

A Ctrl-C comes between any two instructions of Python. It may come between the call that returns a
number and the ``try`` that closes it, and then the file stays open. Within a ``__del__`` the
interrupt would be lost. So C code alone hands the number to its owner, and the owner closes it
without any Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import starmap
from select import epoll
from typing import Any


class Descriptor:
    """An open file or folder. It is closed at the latest when nothing refers to it any more.

    A ``with`` block gets its number, and closes it at the end.

    Args:
        call: Opens the file or folder, and returns its number; a negative number if it failed. It
            must be a function of C, with its arguments bound by ``partial``.
    """

    def __init__(self, call: Callable[[], int]) -> None:
        numbers = filter((-1).__lt__, starmap(call, ((),)))
        # epoll is the one type of Python that owns any number: others want a file, or a socket.
        self._owner = next(map(epoll.fromfd, numbers), None)

    @property
    def fd(self) -> int:
        """The number; negative if the file is closed or was not opened."""
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
    """Open a file or folder as :func:`os.open` does. A child does not inherit it across an exec.

    Args:
        path: The path; or the name in ``folder``.
        flags: The flags of :func:`os.open`.
        mode: The mode of a new file, less the umask.
        folder: The number of an open folder that ``path`` is relative to.

    Raises:
        OSError: The file or folder cannot be opened.
    """
    return Descriptor(partial(os.open, path, flags, mode, dir_fd=folder))
