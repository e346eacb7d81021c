"""The event loop that runs all requests of this process to servers, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from casnap.errors import UnavailableError
from casnap.runtime.fork import in_child, never_free, new_lock
from casnap.runtime.threads import start_thread
from casnap.runtime.typing import override

T = TypeVar("T")
_Close: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
# How long the end of the process waits for connections to close, in seconds.
_CLOSING = 1.0


class EventLoop:
    """An event loop on a thread of its own, which starts at first use.

    The loop of fsspec cannot be used: it loses its helper threads once the interpreter begins to
    exit. Then it cannot resolve host names, but a pending take must still finish.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self._begin()
        in_child(self._leave_loop)

    def _begin(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[_Close] = set()

    def _leave_loop(self) -> None:
        # A child shares the selector of the parent. A connection that is freed in the child would
        # be taken out of the selector, and the parent would wait for ever.
        never_free(self._loop, *self._open)
        self._begin()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                loop.set_default_executor(_Threads())
                thread = threading.Thread(target=loop.run_forever, name="casnap-io", daemon=True)
                try:
                    start_thread(thread.start)
                except UnavailableError:
                    loop.close()
                    raise
                self._loop = loop
            return self._loop

    def run(self, work: Coroutine[Any, Any, T], meanwhile: Callable[[], None] | None = None) -> T:
        """Run a coroutine on the loop, wait for its end, and return its result.

        An interrupt cancels the coroutine. It is raised once the coroutine has ended, since until
        then the coroutine may write into the caller's buffers.

        Args:
            work: The coroutine.
            meanwhile: Called in this thread while the coroutine runs. If it raises an error, this
                has the effect of an interrupt.
        """
        try:
            loop = self._running()
        except UnavailableError:
            work.close()
            raise
        end = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(loop.create_task(work))
            tasks[0].add_done_callback(lambda _: end.set())

        loop.call_soon_threadsafe(start)
        try:
            if meanwhile is not None:
                meanwhile()
            end.wait()
        except BaseException:
            loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            while not end.is_set():
                # A second interrupt does not leave earlier either.
                with suppress(KeyboardInterrupt):
                    end.wait()
            if not tasks[0].cancelled():
                tasks[0].exception()
            raise
        return tasks[0].result()

    def close_with(self, owner: object, close: _Close) -> None:
        """Close connections when their owner is freed, or when the process ends.

        Args:
            owner: The object that uses the connections. ``close`` must not refer to it.
            close: Closes the connections; it runs on the loop.
        """
        self._open.add(close)
        weakref.finalize(owner, self._close, close)

    def _close(self, close: _Close) -> None:
        # Without the lock: the cyclic collector may call this at any place.
        loop = self._loop
        if loop is None or close not in self._open:
            return
        self._open.discard(close)
        closing = asyncio.run_coroutine_threadsafe(close(), loop)
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is loop:
                return
        with suppress(Exception):
            closing.result(_CLOSING)


class _Threads(ThreadPoolExecutor):
    """An executor that starts a thread for each call, even while the process exits.

    The thread pool of the base class refuses work while the process exits.
    """

    @override
    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as e:  # noqa: BLE001 - raised to the caller
                future.set_exception(e)

        start_thread(threading.Thread(target=work, name="casnap-io-call", daemon=True).start)
        return future


event_loop = EventLoop()
"""The loop of this process; a forked child has its own."""
