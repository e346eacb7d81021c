"""The pauses between the tries of a task that keeps failing. Each pause is longer than the last."""

from __future__ import annotations

import logging
import random
import time

_log = logging.getLogger("casnap")
_random = random.SystemRandom()
# The first and the longest pause after a failure, in seconds.
_FIRST, _LONGEST = 1.0, 60.0


class Backoff:
    """Counts the failures in a row of a repeated task, and says how long to wait after each.

    The pause doubles with each failure, from 1 s up to 60 s. A random part shortens it by up to
    half.

    Args:
        task: The name of the task, for log messages.

    Attributes:
        error: The error of the last try; None if the last try succeeded.
        since: When the task began to fail, in seconds since the epoch; None if the last try
            succeeded.
    """

    def __init__(self, task: str) -> None:
        self.error: BaseException | None = None
        self.since: float | None = None
        self._task = task
        self._failures = 0
        self._next = 0.0

    def note_failure(self, error: BaseException) -> None:
        """Note that a try failed. The first failure in a row is logged as a warning."""
        if self.since is None:
            self.since = time.time()
            _log.warning("%s fails, and is tried again: %.1000s", self._task, error)
        else:
            _log.info("%s fails still: %.1000s", self._task, error)
        self.error = error
        # A random part keeps many hosts from trying again together.
        delay = min(_LONGEST, _FIRST * 2 ** min(self._failures, 10))
        self._failures += 1
        self._next = time.monotonic() + delay * _random.uniform(0.5, 1.0)

    def note_success(self) -> None:
        """Note that a try succeeded. The next pause is short again."""
        if self.since is not None:
            _log.warning("%s works again", self._task)
        self.error, self.since = None, None
        self._failures, self._next = 0, 0.0

    def hurry(self) -> None:
        """Let the next try begin at once."""
        self._next = 0.0

    @property
    def failing_for(self) -> float:
        """For how many seconds the task has been failing; 0 if the last try succeeded."""
        return 0.0 if self.since is None else time.time() - self.since

    @property
    def delay(self) -> float:
        """How many seconds remain until the next try; 0 if the try is due."""
        return max(0.0, self._next - time.monotonic())
