"""State that a forked child must not inherit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that a forked child makes anew: a lock, which another thread may hold at the fork.

    Args:
        make: Makes the value.

    Attributes:
        value: The value of this process.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self.value = self._make()
