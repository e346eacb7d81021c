"""How long work tells what it is doing."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called now and then, from any thread: what is being done, how much is done, how much there is."""


def told_what(progress: Callable[..., None] | None) -> Progress | None:
    """Return a callback that is told what is being done, also for one that is told only how much.

    Callbacks of takes and restores had two arguments once: they go on to work, with a warning that
    names the line that called the method (decorated by ``calls.named``) that calls this.
    """
    if progress is None or not _wants_two(progress):
        return progress
    warnings.warn(
        "progress= with two arguments will not work any more: it is called with three, what is "
        "being done, how much is done and how much there is",
        DeprecationWarning,
        stacklevel=4,
    )
    return lambda _, done, total: progress(done, total)


def _wants_two(progress: Callable[..., None]) -> bool:
    try:
        parameters = inspect.signature(progress).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters) == 2
