"""The check that a take does not begin within another call of casnap.

A signal handler runs on the main thread, between any two steps of the program. If the main thread
is in a call of casnap, it holds locks and buffers. A take in the handler that waited for these
would wait for ever. So would a take in a ``state_dict()`` or in a ``progress=``.
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
    """Check, in a function of casnap, that casnap itself has not called it, however indirectly.

    The stack of the thread shows it. The stack of a thread that casnap started begins in casnap.

    Args:
        advice: More advice for the message.

    Raises:
        CasnapError: Another call of casnap has led to this one.
    """
    if _is_within_call(sys._getframe(1).f_back):
        raise CasnapError(
            "a take cannot begin within another call of casnap in the same thread, so nothing "
            "was taken. In a signal handler, only set a flag; look at it in the training "
            "loop, and take there. A state_dict(), load_state_dict() or progress= must not take"
            + advice
        )


def is_within_call() -> bool:
    """Whether another call of casnap has led to the function that asks, however indirectly."""
    return _is_within_call(sys._getframe(1).f_back)


def _is_within_call(frame: FrameType | None) -> bool:
    while frame is not None:
        if _holds_something(frame):
            return True
        frame = frame.f_back
    return False


def _holds_something(frame: FrameType) -> bool:
    """Whether a frame is of a function of casnap that may hold locks or buffers of a take."""
    module: str = frame.f_globals.get("__name__", "")
    package, _, submodule = module.partition(".")
    if package != "casnap" or submodule.startswith(_OUTSIDE) or module in _WAITING:
        return False
    return (module, frame.f_code.co_name) not in _HOLD_NOTHING
