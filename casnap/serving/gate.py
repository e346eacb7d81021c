"""Who is in: many forwards together, or one copy alone.

Who is in is neither a thread nor a task: a generator is begun by one thread of a pool and ended by
another, and coroutines of one thread overlap. So each that enters is counted as an entry of its
own. Its thread and its context only tell who would wait for itself.

An interrupt may come at the beginning and after the end of each call. So the lock is taken itself,
not by the condition, which could lose it then; whoever leaves does so before it calls anything; and
who waits looks again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar

from casnap.errors import CasnapError
from casnap.extending import new_rlock

# After how many seconds who waits looks again, since an interrupt may have lost what wakes it.
_LOOK = 1.0


class Stopped(Exception):  # noqa: N818 - no failure
    """The gate was stopped, so nobody gets in alone who gives up then."""


class _Entry:
    """One who is in.

    Attributes:
        gate: The gate; None once it has left.
        thread: The thread that entered. Another one may leave.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate: Gate | None = gate
        self.thread = threading.get_ident()


_entries: ContextVar[frozenset[_Entry]] = ContextVar("casnap_entries", default=frozenset())
"""The entries, of any gate, that this code runs within."""


class Gate:
    """Lets many in at once, or one alone; who wants to be alone has the next turn.

    Attributes:
        is_stopped: Whether :meth:`stop` was called.
    """

    def __init__(self) -> None:
        # It can be taken again by a signal handler of the thread that has it.
        self._lock = new_rlock()
        self._changed = threading.Condition(self._lock)
        self._inside: set[_Entry] = set()
        self._alone: _Entry | None = None
        self._coroutines: list[asyncio.Future[None]] = []
        self.is_stopped = False

    @property
    def is_inside(self) -> bool:
        """Whether whoever waits here until all have left may wait for itself."""
        if self._has_context:
            return True
        with self._lock:
            return self._has_thread

    @property
    def _has_context(self) -> bool:
        return any(entry.gate is self for entry in _entries.get())

    @property
    def _has_thread(self) -> bool:
        thread, alone = threading.get_ident(), self._alone
        if alone is not None and alone.thread == thread:
            return True
        return any(entry.thread == thread for entry in tuple(self._inside))

    # --- together ---

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Be in, with others. Whoever would wait for itself does not wait."""
        entry = _Entry(self)
        try:
            with self._lock:
                # Asked under the lock: else what this runs within may leave meanwhile.
                self._wait_for(lambda: self._alone is None or self._has_context or self._has_thread)
                self._inside.add(entry)
            _enter_context(entry)
            yield
        finally:
            entry.gate = None
            self._inside.discard(entry)
            self._wake()

    @asynccontextmanager
    async def shared_async(self) -> AsyncIterator[None]:
        """Be in, with others; other coroutines of the thread go on while this one waits."""
        entry = _Entry(self)
        try:
            while True:
                with self._lock:
                    if self._alone is None or self._has_context:
                        self._inside.add(entry)
                        break
                    opened = asyncio.get_running_loop().create_future()
                    self._coroutines.append(opened)
                await opened
            _enter_context(entry)
            yield
        finally:
            entry.gate = None
            self._inside.discard(entry)
            self._wake()

    # --- alone ---

    @contextmanager
    def alone(
        self, timeout: float | None = None, *, unless_stopped: bool = False
    ) -> Iterator[None]:
        """Be in alone: wait until all have left, while nobody else gets in.

        Args:
            timeout: How many seconds to wait for that; None for as long as it takes.
            unless_stopped: Whether to give up if the gate is stopped.

        Raises:
            CasnapError: They did not leave in time. Others get in again.
            Stopped: The gate is stopped.
        """
        entry = _Entry(self)

        def gives_up() -> bool:
            return unless_stopped and self.is_stopped

        try:
            with self._lock:
                self._wait_for(lambda: self._alone is None or gives_up())
                if not gives_up():
                    self._alone = entry
                    self._wait_for(lambda: not self._inside or gives_up(), timeout)
                if gives_up():
                    raise Stopped
                if self._inside:
                    raise CasnapError(
                        f"a version has waited for {timeout:g} s for forwards to leave applied(), "
                        "and can only be copied when none is in; those that came meanwhile go on. "
                        "Leave applied() after each forward, or pass a longer timeout="
                    )
            _enter_context(entry)
            yield
        finally:
            entry.gate = None
            if self._alone is entry:
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
        """Wake who sleeps, and who gives up then."""
        self.is_stopped = True
        self._wake()

    def sleep(self, seconds: float) -> bool:
        """Wait; return whether the gate is stopped, which ends it."""
        with self._lock:
            return self._wait_for(lambda: self.is_stopped, seconds)

    # --- waiting, and waking ---

    def _wait_for(self, is_so: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait, with the lock, until something is so, or the time is over; return whether it is."""
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


def _enter_context(entry: _Entry) -> None:
    # No token of the variable is kept: who leaves may be in another context.
    _entries.set(frozenset(each for each in _entries.get() if each.gate is not None) | {entry})


def _go_on(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
