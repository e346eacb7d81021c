"""Retries of requests: when and how long requests are repeated.

No other module repeats requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from casnap.backends.remote.client import Transfer, TransientError
from casnap.errors import UnavailableError

T = TypeVar("T")
# A line that is slower, in bytes a second, counts as broken.
_SLOWEST = 256 << 10
# How long this process may take to handle bytes that have come, in seconds.
_TAKING = 0.1
# How long an operation may fail before the user is warned, and between two warnings, in seconds.
_PATIENCE = 10.0

_log = logging.getLogger("casnap")
# Not the functions of the module ``random``: they change the state that the user has seeded.
_random = random.SystemRandom()
# When the user was last warned.
_warned_at = -math.inf


@dataclass(frozen=True)
class Retries:
    """How long and how often a remote backend tries requests; all times in seconds.

    Attributes:
        attempts: The most attempts of one request. By default only the time is limited, because it
            is a matter of chance how many refused connections fit into a second.
        deadline: How long one operation may take with all its attempts. Each 256 KiB that are sent
            or received add a second.
        silence: How long an attempt may go on while no byte is sent or received.
        connect: How long an attempt may take to make a connection.
        first_contact: How long to try to reach a server that has never answered this process. After
            an operation has failed, the next operation gets only this time too, so that cleaning up
            does not take a whole deadline again.
        first_delay: The longest wait before the second attempt. It doubles before each further
            attempt. The wait is random, so that many hosts do not return at the same time.
        longest_delay: The longest wait before any attempt.
    """

    attempts: float = math.inf
    deadline: float = 120.0
    silence: float = 15.0
    connect: float = 5.0
    first_contact: float = 8.0
    first_delay: float = 0.2
    longest_delay: float = 10.0


class Operation:
    """One operation of the backend, such as to read an object, with all its attempts.

    Args:
        action: The operation and its object in words, for messages.
        retries: How long and how often to try.
        answered: Whether the server has ever answered this process.
        failing: Whether the backend's last operation failed.
    """

    def __init__(
        self, action: str, retries: Retries, *, answered: bool = True, failing: bool = False
    ) -> None:
        self._action = action
        self._retries = retries
        self._began = time.monotonic()
        self._attempts = 0
        self._delay = retries.first_delay
        self._until = self._began + (retries.first_contact if failing else retries.deadline)
        self._furthest = 0
        self._reached = answered

    async def pause(self, error: TransientError) -> None:
        """Wait after a failed attempt, before the next one.

        Args:
            error: The error of the failed attempt.

        Raises:
            UnavailableError: No attempt, or no time, is left.
        """
        self._attempts += 1
        self._reached |= error.reached
        until = self._limit()
        delay = self.next_delay(error)
        is_last = self._attempts >= self._retries.attempts or (error.hopeless and not self._reached)
        if is_last or time.monotonic() + delay > until:
            seconds = time.monotonic() - self._began
            times = f"{self._attempts} attempt{'s' * (self._attempts > 1)}"
            raise UnavailableError(
                f"cannot {self._action}: {times} in {seconds:.1f} s; the last one failed: {error}",
                reason="unreachable",
            ) from error
        self._warn(error)
        await asyncio.sleep(delay)

    def next_delay(self, error: TransientError) -> float:
        """Return the seconds until the next attempt: at random, up to a growing bound."""
        longest = min(self._delay * (4 if error.busy else 1), self._retries.longest_delay)
        self._delay = min(2 * self._delay, self._retries.longest_delay)
        return _random.uniform(0, longest)

    def _warn(self, error: TransientError) -> None:
        """Log a warning that the operation still fails, if there was none in the last seconds.

        If several operations fail, only one of them warns.
        """
        global _warned_at
        now = time.monotonic()
        if now - max(self._began, _warned_at) >= _PATIENCE:
            _warned_at = now
            _log.warning("still trying to %s: %s", self._action, error)

    def _limit(self) -> float:
        """Return the time at which to give up, by the monotonic clock.

        The time is earlier if the server has never answered this process.
        """
        if self._reached:
            return self._until
        return min(self._until, self._began + self._retries.first_contact)

    async def watched(self, request: Coroutine[Any, Any, T], transfer: Transfer) -> T:
        """Run a request; cancel it if no byte moves for too long, or the operation's time is over.

        Args:
            request: The request.
            transfer: The body that the request sends or receives.

        Raises:
            TransientError: The request was cancelled.
        """
        task = asyncio.ensure_future(request)
        nbytes, since = transfer.nbytes, time.monotonic()
        try:
            while True:
                silent = since + self._retries.silence
                wait = min(silent, self._limit()) - time.monotonic()
                await asyncio.wait({task}, timeout=max(0.0, wait))
                # Bytes that came while this process was busy are taken first.
                await asyncio.wait({task}, timeout=_TAKING)
                if task.done():
                    return task.result()
                now = time.monotonic()
                if transfer.nbytes != nbytes:
                    # There is a connection, or no byte would have moved.
                    self._reached = True
                    nbytes, since = transfer.nbytes, now
                    self._until += max(0, nbytes - self._furthest) / _SLOWEST
                    self._furthest = max(nbytes, self._furthest)
                elif now >= silent:
                    silence = f"no byte moved for {self._retries.silence:g} s"
                    # A port that takes connections, but sends nothing, has not answered.
                    raise TransientError(silence, reached=self._reached)
                if now >= self._limit():
                    answered = "there was no more time" if self._reached else "no answer"
                    raise TransientError(answered, reached=self._reached)
        finally:
            await cancel_and_wait(task)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks that still run, and wait until all tasks have ended.

    The tasks may write into buffers that are used for something else afterwards. So this function
    waits to the end even if it is cancelled itself.
    """
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as e:
            cancelled = e
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if cancelled is not None:
        raise cancelled
