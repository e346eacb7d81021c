"""Open files and folders that an interrupt cannot leave open.

A Ctrl-C comes between two instructions of Python: also between the call that returns a number and
the ``try`` that closes it, and within a ``__del__``, where it would be lost. So C code alone hands
the number to its owner, and the owner closes it without any Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import starmap
from select import epoll
from typing import Any


class Descriptor:
    """An open file or folder; it is closed when nothing refers to it any more, if not before.

    In a ``with`` block it is its number.

    Args:
        call: Opens it, and returns its number; a negative one if that failed. A function of C,
            with its arguments bound by ``partial``.
    """

    def __init__(self, call: Callable[[], int]) -> None:
        numbers = filter((-1).__lt__, starmap(call, ((),)))
        # Of Python's types, this one owns any number: others want a file, or a socket.
        self._owner = next(map(epoll.fromfd, numbers), None)

    @property
    def fd(self) -> int:
        """Its number; negative if it is closed."""
        return -1 if self._owner is None or self._owner.closed else self._owner.fileno()

    def close(self) -> None:
        """Close it; a second call does nothing."""
        if self._owner is not None:
            self._owner.close()

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *error: object) -> None:
        self.close()


def opened(path: Any, flags: int, mode: int = 0o777, folder: int | None = None) -> Descriptor:
    """Open a file or folder as :func:`os.open` does; no child that is executed inherits it.

    Args:
        path: Its path, or its name in an open folder.
        flags: How to open it.
        mode: The mode of a new file, less the umask.
        folder: The open folder.

    Raises:
        OSError: It cannot be opened.
    """
    return Descriptor(partial(os.open, path, flags, mode, dir_fd=folder))
