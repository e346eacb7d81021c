"""Threads that work together: the first error stops them all and is raised to the caller."""

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
NO_THREADS = (
    "no more threads can be started: the process exits, or a limit is reached (ulimit -u, "
    "pids.max of its control group, memory)"
)


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Worker(threading.Thread):
    """A thread whose end can be waited for again after an interrupt.

    Before Python 3.13, after an interrupted ``join`` the thread counts as ended while it runs on.

    Args:
        work: What to do.
        name: Its name.
        in_background: Whether it must not hold up others, such as one that collects garbage; so do
            the threads that such a thread makes.
    """

    def __init__(
        self, work: Callable[[], None], name: str = "casnap", *, in_background: bool = False
    ) -> None:
        # Not a daemon, so the interpreter waits for its end.
        super().__init__(target=work, name=name, daemon=False)
        self.in_background = in_background or works_in_background()
        self._fate = threading.Lock()
        self._has_ended = False
        self._running = threading.Lock()
        self._running.acquire()

    @override
    def start(self) -> None:
        """Start it.

        Raises:
            UnavailableError: No thread can be started.
        """
        try:
            super().start()
        except RuntimeError as e:
            raise UnavailableError(NO_THREADS, reason="exhausted") from e

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
        """Whether its work is not being done: no longer, not yet, or not in this forked child."""
        return self._has_ended or not self.is_alive()

    def give_up(self) -> bool:
        """Have it do no work, unless it has begun; return whether it will do none.

        For where its start was interrupted: then it may run at once, later or never.
        """
        return self._fate.acquire(blocking=False)

    def wait(self) -> None:
        """Wait until it has ended. May be interrupted and repeated, also in a signal handler."""
        while not self.ended:
            # Not an Event: a signal handler could find its lock held by its own thread.
            if self._running.acquire(timeout=1):
                self._running.release()
        # It says that it has ended a little before it has. Now an interrupted join does no harm.
        if self.is_alive():
            self.join()


def works_in_background() -> bool:
    """Whether this thread does work in the background, which must not hold up takes."""
    thread = threading.current_thread()
    return isinstance(thread, Worker) and thread.in_background


@contextmanager
def python_gc_paused() -> Iterator[None]:
    """Pause Python's cycle collector, which would visit many new objects again and again."""
    running = gc.isenabled()
    try:
        # Inside of the try: an interrupt before it would leave the collector off for good.
        gc.disable()
        yield
    finally:
        if running:
            gc.enable()


class Crew:
    """A set of threads, joined at the end of a ``with`` block.

    No executor: that refuses work once the interpreter begins to exit, and a pending take must
    still finish then.

    Args:
        limit: How many threads may do the same work at once; None for as many as that work wants.
            Work that needs a core keeps to it; work that only waits need not.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._threads: list[Worker] = []
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether a thread failed, so that the others should stop."""
        return self.error is not None

    def fail(self, error: BaseException) -> None:
        """Note an error. The first one is raised."""
        with self._lock:
            self.error = self.error or error

    def limited(self, count: int) -> int:
        """Return how many threads may do some work that wants ``count`` of them."""
        return count if self.limit is None else min(count, self.limit)

    def start(self, work: Callable[[], None], count: int = 1) -> list[Worker]:
        """Run ``work`` on ``count`` new threads.

        Raises:
            UnavailableError: So many cannot be started; those that were have ended.
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
        """Run ``work`` on ``count`` new threads, and wait for them."""
        self.join(self.start(work, count))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:  # noqa: BLE001 - raised again by join
            self.fail(e)

    def join(self, threads: Iterable[Worker] | None = None) -> None:
        """Wait for all threads, or for some of them, and raise the first error.

        An interrupt stops the threads, and is raised when they have ended.
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
    """Do some work on another thread, where no interrupt disturbs it, and return its result.

    Interrupts only come to the main thread. There they make the crew fail. Then the work stops and
    cleans up, and the interrupt is raised.

    Args:
        work: The work, given a crew.
        limit: That of the crew.
    """
    results: list[T] = []
    with Crew(limit) as crew:
        crew.run(lambda: results.append(work(crew)))
    return results[0]


def run_both(work: Callable[[], T], other_work: Callable[[], U]) -> tuple[T, U]:
    """Call one function in this thread, and another one on a thread meanwhile."""
    results: list[U] = []
    with Crew() as crew:
        started = crew.start(lambda: results.append(other_work()))
        result = work()
        crew.join(started)
    return result, results[0]


def mapped(call: Callable[[T], U], items: Iterable[T], at_once: int) -> Iterator[tuple[T, U]]:
    """Yield each item, in order, with what a function returns for it.

    Args:
        call: The function; what it raises is raised here, and ends this.
        items: The items.
        at_once: How many calls run at once, some of them ahead; 1 for none ahead.
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
    """An iterable that the threads of a crew share. It ends when one of them fails."""

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
