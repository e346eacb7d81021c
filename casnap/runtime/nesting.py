"""The check that a take does not begin within another call of casnap.

A signal handler runs on the main thread, between any two steps of the program. If the handler
interrupts a call of casnap, that call holds locks and buffers. A take in the handler would wait for
them for ever. The same holds for a take in a ``state_dict()`` or in a ``progress=`` callback.
"""

from __future__ import annotations

import sys
from types import FrameType

from casnap.errors import CasnapError

# Folders and modules that call the library as a user does.
_OUTSIDE = ("integrations", "cli", "testing", "preemption")
# Modules and functions that only wait, and hold nothing.
_WAITING = ("casnap.take.pending", "casnap.runtime.threads")
_HOLD_NOTHING = {("casnap.pending", "wait"), ("casnap.serving.follower", "__exit__")}


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
