"""The callback by which long operations report their progress."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called from time to time, from any thread: with the phase, how much is done, and the total."""


def told_what(progress: Callable[..., None] | None) -> Progress | None:
    """Return a callback of three arguments for one of three, or of two.

    The callbacks of takes and restores used to have two arguments: how much is done, and the total.
    Such a callback still works, with a warning.
    """
    if progress is None or not _wants_two(progress):
        return progress
    warnings.warn(
        "a progress= with two arguments is deprecated; it is called with three: the phase, how "
        "much is done, and the total",
        DeprecationWarning,
        stacklevel=4,  # the caller of the public method, which `calls.named` wraps
    )
    return lambda _, done, total: progress(done, total)


def _wants_two(progress: Callable[..., None]) -> bool:
    try:
        parameters = inspect.signature(progress).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters) == 2
