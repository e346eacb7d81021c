"""A gate that lets many forwards in together, or one copy alone.

The gate counts each entrance as a *visit* of its own, rather than threads or tasks: one thread of a
pool may begin a generator and another one end it, and coroutines of one thread overlap. The gate
uses the thread and the context of a visit only to find a caller who would wait for itself.

A KeyboardInterrupt may come before the first and after the last line of each call. In a ``with``
block of the ``Condition`` it could leave the lock taken, so the methods use the lock directly. A
visit is counted as ended before anything else is called. An interrupt may also lose the wake-up of
a waiting thread, so each such thread looks at the count every second.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar

from casnap.errors import CasnapError
from casnap.runtime.fork import new_rlock

# After how many seconds a waiting thread looks again: an interrupt may have lost its wake-up.
_LOOK = 1.0


class Stopped(Exception):  # noqa: N818 - no failure
    """The gate was stopped while :meth:`Gate.alone` waited."""


class _Visit:
    """A visit to a gate: one forward, or one copy.

    Attributes:
        gate: The gate; None once the visit is over.
        thread: The thread that entered. Another one may leave.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate: Gate | None = gate
        self.thread = threading.get_ident()


_visits: ContextVar[frozenset[_Visit]] = ContextVar("casnap_visits", default=frozenset())
"""The visits, to any gate, that this context runs within."""


class Gate:
    """Lets many visits in at once, or one alone.

    A visit that waits to be alone gets in before all that come later.

    Attributes:
        is_stopped: Whether :meth:`stop` was called.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler may take it in the thread that holds it.
        self._lock = new_rlock()
        self._changed = threading.Condition(self._lock)
        self._inside: set[_Visit] = set()
        self._alone: _Visit | None = None
        self._coroutines: list[asyncio.Future[None]] = []
        self.is_stopped = False

    @property
    def is_inside(self) -> bool:
        """Whether the caller is inside.

        If so, the caller would wait for itself if it waited until all visits are over.
        """
        if self._has_context:
            return True
        with self._lock:
            return self._has_thread

    @property
    def _has_context(self) -> bool:
        return any(visit.gate is self for visit in _visits.get())

    @property
    def _has_thread(self) -> bool:
        thread, alone = threading.get_ident(), self._alone
        if alone is not None and alone.thread == thread:
            return True
        return any(visit.thread == thread for visit in tuple(self._inside))

    # --- together ---

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Run a ``with`` block inside the gate. Other forwards may be inside, too.

        This waits for a copy that waits or runs, unless this thread or caller is inside already.
        """
        visit = _Visit(self)
        try:
            with self._lock:
                # Asked under the lock: the visit that this runs within could end meanwhile.
                self._wait_for(lambda: self._alone is None or self._has_context or self._has_thread)
                self._inside.add(visit)
            _enter_context(visit)
            yield
        finally:
            visit.gate = None
            self._inside.discard(visit)
            self._wake()

    @asynccontextmanager
    async def shared_async(self) -> AsyncIterator[None]:
        """Do as :meth:`shared`, but while this waits, the thread's other coroutines go on."""
        visit = _Visit(self)
        try:
            while True:
                with self._lock:
                    if self._alone is None or self._has_context:
                        self._inside.add(visit)
                        break
                    opened = asyncio.get_running_loop().create_future()
                    self._coroutines.append(opened)
                await opened
            _enter_context(visit)
            yield
        finally:
            visit.gate = None
            self._inside.discard(visit)
            self._wake()

    # --- alone ---

    @contextmanager
    def alone(
        self, timeout: float | None = None, *, unless_stopped: bool = False
    ) -> Iterator[None]:
        """Run a ``with`` block while no forward is inside: let none in, wait until all have left.

        Args:
            timeout: How many seconds to wait for others to leave; None: as long as it takes.
            unless_stopped: Whether to give up if the gate is stopped.

        Raises:
            CasnapError: The others did not leave in time. The gate lets forwards in again.
            Stopped: The gate was stopped.
        """
        visit = _Visit(self)

        def gives_up() -> bool:
            return unless_stopped and self.is_stopped

        try:
            with self._lock:
                self._wait_for(lambda: self._alone is None or gives_up())
                if not gives_up():
                    self._alone = visit
                    self._wait_for(lambda: not self._inside or gives_up(), timeout)
                if gives_up():
                    raise Stopped
                if self._inside:
                    raise CasnapError(
                        f"a version has waited for {timeout:g} s for forwards to leave applied(), "
                        "and can only be copied when none is in; those that came meanwhile go on. "
                        "Leave applied() after each forward, or pass a longer timeout="
                    )
            _enter_context(visit)
            yield
        finally:
            visit.gate = None
            if self._alone is visit:
                self._alone = None
                self._wake()
                self._wake_coroutines()

    def _wake_coroutines(self) -> None:
        with self._lock:
            opened, self._coroutines = self._coroutines, []
        for future in opened:
            with suppress(RuntimeError):  # its loop is closed
                future.get_loop().call_soon_threadsafe(_go_on, future)

    # --- the end ---

    def stop(self) -> None:
        """Stop the gate: end :meth:`sleep`, and each :meth:`alone` with ``unless_stopped``."""
        self.is_stopped = True
        self._wake()

    def sleep(self, seconds: float) -> bool:
        """Sleep until the time is over or the gate is stopped; return whether it is stopped."""
        with self._lock:
            return self._wait_for(lambda: self.is_stopped, seconds)

    # --- waiting, and waking ---

    def _wait_for(self, is_so: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``is_so()`` is true; return False if the time is over first.

        The caller holds the lock.

        Args:
            is_so: Called from time to time, and whenever a visit begins or ends.
            timeout: How many seconds to wait; None: as long as it takes.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not is_so():
            seconds = _LOOK if until is None else min(_LOOK, until - time.monotonic())
            if seconds <= 0:
                return False
            self._changed.wait(seconds)
        return True

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify_all()


def _enter_context(visit: _Visit) -> None:
    # The token is not kept for a reset: the visit may end in another context.
    _visits.set(frozenset(each for each in _visits.get() if each.gate is not None) | {visit})


def _go_on(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
