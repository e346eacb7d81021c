"""Which call of casnap a thread is in the middle of.

A signal handler runs on the main thread, between any two steps of what that thread does. So it may
find it within a call, with locks and buffers in its hands: to wait for those would be for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from casnap.errors import NestedTakeError
from casnap.runtime.fork import PerProcess

P = ParamSpec("P")
R = TypeVar("R")


class _Here(threading.local):
    call = ""


_here = PerProcess(_Here)


def current() -> str:
    """Return the call that this thread is within, or works for; empty if none."""
    return _here.value.call


def work_for(call: str) -> None:
    """Note that this thread works for a call."""
    _here.value.call = call


def named(call: str, *, is_take: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have threads know that they are within a function, or work for it.

    Args:
        call: What it is called in messages.
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
            # No context manager: an interrupt on its way out could leave the mark for ever.
            try:
                _here.value.call = outer or call
                return function(*args, **kwargs)
            finally:
                _here.value.call = outer

        return call_it

    return decorate
