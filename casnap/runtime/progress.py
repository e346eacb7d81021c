"""The callback by which long operations report their progress, and bars that show it."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

from casnap.runtime.environment import is_other_rank

Progress = Callable[[str, int, int], None]
"""Called from time to time, from any thread, with the phase, the amount done, and the total."""
ProgressOption: TypeAlias = Progress | bool | None
"""How a user watches an operation: by a callback; by bars (True); or not at all."""

PATIENCE = 0.5
"""Seconds that work may take before a progress bar appears."""
_OF_BYTES = {"copying", "reading", "storing", "writing"}


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


# --- bars -------------------------------------------------------------------------------------


def callback_of(progress: ProgressOption) -> Progress | None:
    """Return the callback for what a user gives as ``progress=``.

    Of the ranks of a world, the first one shows bars.

    Raises:
        TypeError: It is no callback, and not True.
    """
    if progress is None or progress is False:
        return None
    if progress is True:
        return ProgressBars() if can_show_bars() and not is_other_rank() else None
    if not callable(progress):
        raise TypeError(
            f"progress is True, or a function that is called with the phase, what is done and the "
            f"total; got {progress!r:.80}"
        )
    return progress


def can_show_bars() -> bool:
    """Whether standard error is a terminal or a notebook."""
    return sys.stderr.isatty() or _is_notebook()


def _is_notebook() -> bool:
    return type(sys.stderr).__module__.startswith("ipykernel.")


class ProgressBars:
    """Shows a bar for each phase that is not done within :data:`PATIENCE`.

    Args:
        note: Returns what stands beside the bar.
        leave: Whether bars stay on the screen once their phase is done.
    """

    def __init__(self, note: Callable[[], str] = str, *, leave: bool = True) -> None:
        self._note = note
        self._leave = leave
        self._lock = threading.Lock()
        self._phase = ""
        self._bar: Any = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show how much of a phase is done."""
        with self._lock:
            if self._bar is None or phase != self._phase:
                self._close()
                self._phase, self._bar = phase, self._new_bar(phase, total)
            self._bar.total = total
            self._bar.set_postfix_str(self._note(), refresh=False)
            self._bar.update(done - self._bar.n)
            if done >= total:
                self._close()

    def close(self) -> None:
        """End the bar that is shown."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def _new_bar(self, phase: str, total: int) -> Any:
        with warnings.catch_warnings():
            # In a notebook without ipywidgets, its bars are of text.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm

        is_of_bytes = phase in _OF_BYTES
        return tqdm(
            desc=phase,
            total=total,
            unit="B" if is_of_bytes else "",
            unit_scale=is_of_bytes,
            delay=PATIENCE,
            leave=self._leave,
            dynamic_ncols=True,
        )
