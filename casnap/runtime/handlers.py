"""Exceptions that signal handlers raise, told from those of the calls that they interrupt."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType

# What Python says where no thread can be started.
_NO_THREAD = ("can't start new thread", "can't create new thread")


def of_handler(error: BaseException) -> bool:
    """Whether a signal handler has raised an error, as far as that can be told.

    A handler may raise anything, and casnap's own code takes some types of errors for those of a
    file or a connection. An OSError without a number comes from no call of the system: alarms that
    end what takes too long raise TimeoutError so.
    """
    if isinstance(error, OSError):
        return error.errno is None
    handlers = _handlers()
    tb = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code in handlers:
            return True
        tb = tb.tb_next
    return False


def _handlers() -> set[CodeType]:
    """Return the code of the signal handlers of this process."""
    found = set[CodeType]()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if isinstance(handler, partial):
            handler = handler.func
        # A function, a method, or an object that can be called.
        for called in (handler, type(handler).__call__ if callable(handler) else None):
            code = getattr(called, "__code__", None)
            if isinstance(code, CodeType):
                found.add(code)
    return found


def pass_on(error: BaseException) -> None:
    """Raise an error again that a signal handler has raised; it must not be hidden or changed."""
    if of_handler(error):
        raise error


@contextmanager
def system_errors_ignored() -> Iterator[None]:
    """As ``suppress(OSError)``, for a block of code; what a handler raises is raised."""
    try:
        yield
    except OSError as e:
        pass_on(e)


def says_no_thread(error: RuntimeError) -> bool:
    """Whether an error says that no thread can be started."""
    return str(error).startswith(_NO_THREAD)
