"""Call ``on_version``, which must be a plain function: nobody would await a coroutine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import isawaitable, iscoroutine, iscoroutinefunction
from typing import Any


def check_plain(on_version: Callable[..., object] | None) -> None:
    """Check that a callback is a plain function.

    Raises:
        TypeError: The callback is a coroutine function, or cannot be called.
    """
    if on_version is None:
        return
    if not callable(on_version):
        raise TypeError(f"on_version= is a function; got {on_version!r:.80}")
    function: Any = on_version
    while isinstance(function, partial):
        function = function.func
    if iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__):
        raise _refusal(on_version)


def call_plain(on_version: Callable[..., object], *args: object) -> None:
    """Call a callback.

    Raises:
        TypeError: The callback has returned a coroutine, so its body has not run.
    """
    answer = on_version(*args)
    if isawaitable(answer):
        if iscoroutine(answer):
            answer.close()
        raise _refusal(on_version)


def _refusal(on_version: Callable[..., object]) -> TypeError:
    return TypeError(
        f"on_version= is {on_version!r:.80}, a coroutine function, which nobody would await: it is "
        "called in a thread. Pass a plain function; to run a coroutine in your event loop, have it "
        "call asyncio.run_coroutine_threadsafe(coroutine, loop).result()"
    )
