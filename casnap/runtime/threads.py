"""Threads that work together. The first error stops all of them, and the caller raises it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Generic, TypeVar

from casnap.errors import UnavailableError
from casnap.runtime.typing import override

T = TypeVar("T")
U = TypeVar("U")
_NO_THREADS = (
    "no more threads can be started: the process exits, or a limit is reached (ulimit -u, "
    "pids.max of its control group, memory)"
)


def start_thread(start: Callable[[], None]) -> None:
    """Start a thread.

    Args:
        start: The ``start`` method of the thread.

    Raises:
        UnavailableError: The system starts no more threads.
        KeyboardInterrupt: The user pressed Ctrl-C. The thread may run all the same. Python may have
            reported the interrupt as a RuntimeError about a lock; the interrupt is raised instead.
    """
    try:
        start()
    except RuntimeError as e:
        if "new thread" in str(e):
            raise UnavailableError(_NO_THREADS, reason="exhausted") from e
        if isinstance(e.__context__, KeyboardInterrupt):
            raise e.__context__ from None
        raise


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Worker(threading.Thread):
    """A thread for which :meth:`wait` can be called again after an interrupt.

    Before Python 3.13, an interrupted ``join`` makes a running thread count as ended.

    Args:
        work: The function that the thread runs.
        name: The name of the thread.
        in_background: Whether the thread does work for which takes must not wait, such as a
            collection. Every thread that it starts is in the background too.
    """

    def __init__(
        self, work: Callable[[], None], name: str = "casnap", *, in_background: bool = False
    ) -> None:
        # Not a daemon, so that the interpreter waits for the end of the thread.
        super().__init__(target=work, name=name, daemon=False)
        self.in_background = in_background or works_in_background()
        self._fate = threading.Lock()
        self._has_ended = False
        self._running = threading.Lock()
        self._running.acquire()

    @override
    def start(self) -> None:
        """Start the thread.

        Raises:
            UnavailableError: The system starts no more threads.
        """
        start_thread(super().start)

    @override
    def run(self) -> None:
        if not self._fate.acquire(blocking=False):
            return
        try:
            super().run()
        finally:
            self._has_ended = True
            self._running.release()

    @property
    def ended(self) -> bool:
        """Whether the thread is not running.

        This is so before its start, after its end, and in a child that was forked while it ran.
        """
        return self._has_ended or not self.is_alive()

    def give_up(self) -> bool:
        """Prevent the thread from running its work; return False if the work has already begun.

        Call this after an interrupted ``start``: the thread may then begin at once, later or never.
        """
        return self._fate.acquire(blocking=False)

    def wait(self) -> None:
        """Wait for the end of the thread.

        After an interrupt the call can be repeated. A signal handler may call it too.
        """
        while not self.ended:
            # Not an Event: a signal handler could find its lock held by its own thread.
            if self._running.acquire(timeout=1):
                self._running.release()
        # The thread says that its work is done a little before it ends. An interrupted join does no
        # harm now.
        if self.is_alive():
            self.join()


def works_in_background() -> bool:
    """Whether the current thread is a :class:`Worker` in the background."""
    thread = threading.current_thread()
    return isinstance(thread, Worker) and thread.in_background


@contextmanager
def python_gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector: it would slow down a block that makes many objects."""
    running = gc.isenabled()
    try:
        # Within the try: an interrupt between the two would leave the collector off for good.
        gc.disable()
        yield
    finally:
        if running:
            gc.enable()


class Crew:
    """A set of threads that work together. The end of a ``with`` block waits for them.

    An executor of ``concurrent.futures`` would refuse work once the interpreter begins to exit, but
    a pending take must still finish then.

    Args:
        limit: The most threads for one piece of work that needs processor cores; None for no bound.
            Work that mostly waits ignores the limit.

    Attributes:
        limit: The most threads for one piece of work that needs processor cores; None for no bound.
        error: The first error; None if no thread failed.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._threads: list[Worker] = []
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether a thread has failed. The other threads should then stop."""
        return self.error is not None

    def fail(self, error: BaseException) -> None:
        """Note an error, unless an earlier one was noted. :meth:`join` raises the noted error."""
        with self._lock:
            self.error = self.error or error

    def limited(self, count: int) -> int:
        """Return ``count``, or the limit if ``count`` is greater."""
        return count if self.limit is None else min(count, self.limit)

    def start(self, work: Callable[[], None], count: int = 1) -> list[Worker]:
        """Start ``count`` new threads, each of which calls ``work``.

        Raises:
            UnavailableError: The system started fewer threads. The threads of this call have ended.
        """
        started: list[Worker] = []
        for _ in range(count):
            thread = Worker(lambda: self._guarded(work))
            self._threads.append(thread)
            try:
                thread.start()
            except BaseException as e:
                if thread.give_up():
                    self._threads.remove(thread)
                self.fail(e)
                for thread_started in started:
                    thread_started.wait()
                raise
            started.append(thread)
        return started

    def run(self, work: Callable[[], None], count: int = 1) -> None:
        """Call ``work`` on ``count`` new threads, wait for them, and raise the first error."""
        self.join(self.start(work, count))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:  # noqa: BLE001 - raised again by join
            self.fail(e)

    def join(self, threads: Iterable[Worker] | None = None) -> None:
        """Wait for threads, then raise the crew's first error.

        An interrupt while waiting is noted as an error of the crew. The call still waits until the
        threads have ended.

        Args:
            threads: The threads to wait for; None for all threads of the crew.
        """
        for thread in list(self._threads if threads is None else threads):
            waiting = True
            while waiting:
                try:
                    thread.wait()
                    waiting = False
                except BaseException as e:  # noqa: BLE001 - raised below
                    self.fail(e)
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        try:
            self.join()
        except BaseException as e:
            if e is not error:
                raise


def run_shielded(work: Callable[[Crew], T], limit: int | None = None) -> T:
    """Do work on a new thread, where no Ctrl-C can interrupt it, and return its result.

    Only the main thread gets interrupts. While it waits, an interrupt is noted as an error of the
    crew. The work should then stop and clean up. After that, the interrupt is raised.

    Args:
        work: The work. Its argument is the crew, on which it may start more threads. It should stop
            once the crew has failed.
        limit: The ``limit`` of the crew.
    """
    results: list[T] = []
    with Crew(limit) as crew:
        crew.run(lambda: results.append(work(crew)))
    return results[0]


def run_both(work: Callable[[], T], other_work: Callable[[], U]) -> tuple[T, U]:
    """Call one function in this thread and another one on a new thread; return both results."""
    results: list[U] = []
    with Crew() as crew:
        started = crew.start(lambda: results.append(other_work()))
        result = work()
        crew.join(started)
    return result, results[0]


def mapped(call: Callable[[T], U], items: Iterable[T], at_once: int) -> Iterator[tuple[T, U]]:
    """Yield each item, in order, with the result of a function for it.

    Args:
        call: The function. Its first error is raised, and ends the iteration.
        items: The items.
        at_once: How many threads call the function. If there are several, items are taken in groups
            of ``8 * at_once``, and a group is yielded once the function has returned for all its
            items.
    """
    if at_once == 1:
        yield from ((item, call(item)) for item in items)
        return
    pending = iter(items)
    while window := list(islice(pending, 8 * at_once)):
        results: dict[int, U] = {}

        def work(todo: SharedItems[tuple[int, T]], results: dict[int, U] = results) -> None:
            for i, item in todo:
                results[i] = call(item)

        with Crew() as crew:
            crew.run(partial(work, SharedItems(enumerate(window), crew)), min(at_once, len(window)))
        yield from ((item, results[i]) for i, item in enumerate(window))


class SharedItems(Generic[T]):
    """An iterable that several threads of a crew share: each item goes to one of them.

    It ends once the items are used up, or the crew has failed.
    """

    def __init__(self, items: Iterable[T], crew: Crew) -> None:
        self._items = iter(items)
        self._crew = crew
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._lock:
                if self._crew.failed:
                    return
                try:
                    item = next(self._items)
                except StopIteration:
                    return
            yield item
