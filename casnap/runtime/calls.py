"""Which call of casnap a thread is in.

A signal handler runs on the main thread, between any two steps of the program. If the main thread
is in a call of casnap, it holds locks and buffers, and a handler that waited for these would wait
for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from casnap.errors import NestedTakeError
from casnap.runtime.fork import PerProcess

MIRROR = "a mirror"
"""The call of threads that copy to a mirror in the background. They must not hold up others."""

P = ParamSpec("P")
R = TypeVar("R")


class _Here(threading.local):
    call = ""


_here = PerProcess(_Here)


def current() -> str:
    """Return the call that this thread is in, or works for; empty if none."""
    return _here.value.call


def work_for(call: str) -> None:
    """Note that this thread works for a call."""
    _here.value.call = call


def named(call: str, *, is_take: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Name a function, so that a thread knows that it is in this call.

    Args:
        call: The name of the call, for messages.
        is_take: Whether it is a take, which cannot begin within any call.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call_it(*args: P.args, **kwargs: P.kwargs) -> R:
            outer = _here.value.call
            if is_take and outer:
                raise NestedTakeError(
                    f"{call} cannot begin within {outer} of the same thread, so nothing was "
                    "taken. In a signal handler, only set a flag; look at it in the training "
                    "loop, and take there. A state_dict(), load_state_dict() or progress= must "
                    "not take"
                )
            # No context manager: an interrupt while it ends could leave the mark for ever.
            try:
                _here.value.call = outer or call
                return function(*args, **kwargs)
            finally:
                _here.value.call = outer

        return call_it

    return decorate
