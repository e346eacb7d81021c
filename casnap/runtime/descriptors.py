"""Open files and folders that an interrupt cannot leave open.

A Ctrl-C comes between two instructions of Python: also between the call that returns a number and
the ``try`` that closes it. So a number is never bare: C code alone puts it where its owner is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any


class Descriptor:
    """An open file or folder; it is closed when nothing refers to it any more, if not before.

    In a ``with`` block it is its number.

    Args:
        call: Opens it, and returns its number; a negative one if that failed. A function of C,
            with its arguments bound by ``partial``.
    """

    # If an interrupt comes before there is a list.
    _numbers: list[int | None] = []  # noqa: RUF012 - it stays empty

    def __init__(self, call: Callable[[], int]) -> None:
        self._numbers = [None]
        self._numbers.extend(starmap(call, ((),)))
        if self.fd < 0:
            self._numbers = []

    @property
    def fd(self) -> int:
        """Its number; negative if it is closed."""
        return self._numbers[-1] if self._numbers and self._numbers[-1] is not None else -1

    def close(self) -> None:
        """Close it; a second call does nothing."""
        if self._numbers:
            # Until None comes: no interrupt between taking the number and closing it.
            any(map(os.close, iter(self._numbers.pop, None)))

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
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
