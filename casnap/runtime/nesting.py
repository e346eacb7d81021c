"""The checks that a take does not wait for ever for another call of casnap.

A signal handler runs on the main thread, between any two steps of the program. If the handler
interrupts a call of casnap, that call holds locks and buffers. A take in the handler would wait for
them for ever. The same holds for a take in a ``state_dict()`` or in a ``progress=`` callback. All
these are refused at once. If such a function waits for a take of another thread, nothing shows
that, so the other take gives up after a time.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from casnap.errors import CasnapError
from casnap.runtime.fork import in_child

# Folders and modules that call the library as a user does.
_OUTSIDE = ("integrations", "cli", "testing", "preemption")
# Modules and functions that only wait, and hold nothing.
_WAITING = ("casnap.take.pending", "casnap.runtime.threads")
_HOLD_NOTHING = {("casnap.pending", "wait"), ("casnap.serving.follower", "__exit__")}
# The functions of the user that casnap is calling: the number of the call → what it calls.
_running: dict[int, str] = {}
_numbers = itertools.count()
in_child(_running.clear)
PATIENCE = 600
"""About how many seconds one call of a user's function may hold up a take in another thread."""


def refuse_nested_take(advice: str = "") -> None:
    """Refuse a take that begins within another call of casnap in the same thread.

    A function of casnap calls this first. The check looks for casnap in the stack of its callers.

    Args:
        advice: More advice for the error message.

    Raises:
        CasnapError: A function of casnap is among the callers.
    """
    if _is_within_call(sys._getframe(1).f_back):
        raise CasnapError(
            "a take cannot begin within another call of casnap in the same thread, so nothing "
            "was taken. In a signal handler, only set a flag; look at it in the training "
            "loop, and take there. A state_dict(), load_state_dict() or progress= must not take"
            + advice
        )


def is_within_call() -> bool:
    """Whether the function that calls this one runs, directly or not, in another call of casnap."""
    return _is_within_call(sys._getframe(1).f_back)


def _is_within_call(frame: FrameType | None) -> bool:
    while frame is not None:
        if _holds_something(frame):
            return True
        frame = frame.f_back
    return False


def _holds_something(frame: FrameType) -> bool:
    """Whether a stack frame belongs to a function of casnap that may hold locks or buffers."""
    module: str = frame.f_globals.get("__name__", "")
    package, _, submodule = module.partition(".")
    if package != "casnap" or submodule.startswith(_OUTSIDE) or module in _WAITING:
        return False
    return (module, frame.f_code.co_name) not in _HOLD_NOTHING


@contextmanager
def calling(function: str) -> Iterator[None]:
    """Note that casnap calls a function of the user, and that a take may have to wait for its end.

    Args:
        function: What it is, for an error message.
    """
    number = next(_numbers)
    _running[number] = function
    try:
        yield
    finally:
        _running.pop(number, None)


class Patience:
    """Bounds the wait of a take for another one, which may itself wait for this one.

    That is so if the other take calls a function of the user, and this function waits for this
    take. Without such a function, a take may wait as long as it has to.
    """

    def __init__(self) -> None:
        self._number, self._looks = -1, 0

    def look(self) -> None:
        """Look whether to go on waiting. Call this about once a second.

        Raises:
            CasnapError: One and the same call of a function has run for too long.
        """
        # Seconds are not measured, since the whole process may have been stopped.
        number = min(_running, default=-1)
        self._looks = self._looks + 1 if number == self._number else 0
        self._number = number
        function = _running.get(number)
        if function is not None and self._looks >= PATIENCE:
            raise CasnapError(
                f"another take of this process has been in one call of {function} for "
                f"{PATIENCE:,} seconds, so this call no longer waits for it. If that function "
                "waits for this take, neither can end: a state_dict() or progress= must not take, "
                "and must not wait for a take of another thread"
            )
