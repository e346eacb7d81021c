"""The callback by which long operations report their progress."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called from time to time, from any thread, with the phase, the amount done, and the total."""


class ProgressCounter:
    """Counts the amount done, from any thread, and reports it.

    Args:
        progress: Called with the phase, the amount done (at most the total), and the total; None
            reports nothing.
        phase: The name of the phase, for users.
        total: The amount to do.

    Attributes:
        total: The amount to do. It may be raised.
        done: The amount done so far.
    """

    def __init__(self, progress: Progress | None, phase: str, total: int = 0) -> None:
        self._progress = progress
        self._phase = phase
        self._lock = threading.Lock()
        self.total = total
        self.done = 0

    def add(self, amount: int) -> None:
        """Add to the amount done, and report it."""
        with self._lock:
            self.done += amount
            if self._progress is not None:
                self._progress(self._phase, min(self.done, self.total), self.total)
