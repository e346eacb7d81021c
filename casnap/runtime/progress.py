"""Callbacks that report the progress of long operations, and progress bars."""

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
"""How a user watches an operation: a callback; True for bars; None or False for nothing."""

PATIENCE = 0.5
"""Seconds that work may take before a progress bar appears."""
_OF_BYTES = {"copying", "reading", "storing", "writing"}


class ProgressCounter:
    """Counts how much of a phase is done, in any thread, and reports this to a callback.

    Args:
        progress: The callback. It gets the phase, the amount done (at most the total), and the
            total. None reports nothing.
        phase: The name of the phase, for users.
        total: The amount to do.

    Attributes:
        total: The amount to do. The owner of the counter may raise it.
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
    """Return the callback for the value that a user gave as ``progress=``; None to report nothing.

    For True, rank 0 shows progress bars if it has a terminal or a notebook; other ranks show none.

    Raises:
        TypeError: The value is neither a callback nor a bool nor None.
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
    """Whether this process writes its standard error to a terminal or a notebook."""
    return sys.stderr.isatty() or _is_notebook()


def _is_notebook() -> bool:
    return type(sys.stderr).__module__.startswith("ipykernel.")


class ProgressBars:
    """Shows a progress bar for each phase that takes longer than :data:`PATIENCE`.

    Args:
        note: Returns a text to show beside the bar.
        leave: Whether a bar stays on the screen once its phase is done.
    """

    def __init__(self, note: Callable[[], str] = str, *, leave: bool = True) -> None:
        self._note = note
        self._leave = leave
        self._lock = threading.Lock()
        self._phase = ""
        self._bar: Any = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show how much of a phase is done. It has the arguments of a ``Progress`` callback."""
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
        """Close the bar that is shown, if there is one."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def _new_bar(self, phase: str, total: int) -> Any:
        with warnings.catch_warnings():
            # tqdm warns in a notebook without ipywidgets, and then shows a bar of text.
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
