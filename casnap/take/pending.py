"""Takes in the background of a process: each stores once the one before it has ended."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from casnap.errors import StateError, retold
from casnap.runtime.threads import Worker
from casnap.take.commit import TakeResult

_log = logging.getLogger("casnap")
# One take at a time begins in a process, and one stores: so pending takes keep their order, and
# share their buffers. The lock covers what the caller's thread does; ``_line`` tells the rest. One
# lock for both would pass from thread to thread, and an interrupt could lose it.
turn = threading.Lock()
# Between two looks whether a take has ended, in seconds.
_LOOK = 0.02
# The takes that were started, in the order of their calls; replaced, never changed.
_line: tuple[PendingTake, ...] = ()
# How many takes stood in line so far.
_count = 0
# The takes that are not stored, and whose error the caller has not got, in the order of the calls.
_unseen: dict[PendingTake, None] = {}


def _free_turn_after_fork() -> None:
    global turn, _line
    turn, _line = threading.Lock(), ()
    _unseen.clear()


def _under_way() -> tuple[PendingTake, ...]:
    return tuple(take for take in _line if not take.done())


def wait_for_room(most: int) -> None:
    """Wait until at most this many takes are pending."""
    while len(line := _under_way()) > most:
        line[0].wait_for_end()


def wait_for_last(timeout: float | None = None) -> bool:
    """Wait for all takes in the background, successful or not; return whether all have ended.

    Args:
        timeout: How many seconds to wait at most.
    """
    if timeout is None:
        wait_for_room(0)
    else:
        until = time.monotonic() + timeout
        while _under_way() and time.monotonic() < until:
            time.sleep(_LOOK)
    return not _under_way()


def under_way() -> bool:
    """Return whether this process is taking a snapshot, in the background or not."""
    return turn.locked() or bool(_under_way())


os.register_at_fork(after_in_child=_free_turn_after_fork)


class PendingTake:
    """A take in a background thread; the interpreter waits for it before it exits.

    Args:
        store: The id of the store.
        name: The name of the snapshot.
        finish: Does the rest of the take.

    Attributes:
        number: Its place among all takes of this process that stood in line, from 1 on.
        error_seen: Whether the caller has got its error, or gets it from the call that began it.
    """

    def __init__(self, store: str, name: str, finish: Callable[[], TakeResult]) -> None:
        self.store = store
        self.name = name
        self.number = 0
        self.error_seen = False
        self._finish: Callable[[], TakeResult] | None = finish
        self._taken: TakeResult | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._thread: Worker | None = None
        self._before: PendingTake | None = None

    @property
    def started(self) -> bool:
        """Whether the thread has been started."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread, unless it has been started. It first waits for the takes before it.

        Raises:
            UnavailableError: No thread can be started.
        """
        global _line, _count
        with self._lock:
            if self._thread is not None:
                return
            thread, before = Worker(self._run, "casnap-async-take"), _under_way()
            try:
                self._thread = thread
                self._before = before[-1] if before else None
                _line = (*before, self)
                _count += 1
                self.number = _count
                _unseen[self] = None
                thread.start()
            except BaseException:
                # If it does not run yet, it must not run at all.
                if thread.give_up():
                    _line, self._thread = before, None
                    _count -= 1
                    _unseen.pop(self, None)
                raise

    def _run(self) -> None:
        """Do the rest of the take."""
        try:
            assert self._finish is not None
            if self._before is not None:
                # Its own handle says what became of it.
                self._before.wait_for_end()
            self._taken = self._finish()
            _unseen.pop(self, None)
        except BaseException as e:  # noqa: BLE001 - raised by wait, or by the next take
            self._error = e
            if not self.error_seen:
                _log.error("%s", self.what_failed)
        finally:
            # These refer to descriptions of states, which need not live as long as this object.
            self._finish = self._before = None

    def done(self) -> bool:
        """Whether the take has ended, well or not."""
        return self._thread is not None and self._thread.ended

    def wait_for_end(self) -> None:
        """Wait for the end, good or bad."""
        assert self._thread is not None
        self._thread.wait()

    @property
    def error(self) -> BaseException | None:
        """The error that it has ended with; None if there is none yet."""
        return self._error

    @property
    def what_failed(self) -> str:
        """What to tell of its error."""
        error = self._error
        return f"the snapshot {self.name!r} was NOT stored: {type(error).__name__}: {error}"

    def note_seen(self) -> None:
        """Note that the caller has got its error."""
        self.error_seen = True
        _unseen.pop(self, None)

    def wait(self) -> TakeResult:
        """Wait for the end; return the result, or raise the error.

        Raises:
            CasnapError: This take failed. Or an earlier one of the same store failed, and no call
                has raised that yet; this one is stored then, and another call returns the result.
        """
        self.wait_for_end()
        if self._error is not None:
            self.note_seen()
            raise self._error
        if self._taken is None:
            raise StateError(
                f"the take of {self.name!r} goes on in the process that began it; wait for it "
                "there, not in a fork"
            )
        _raise_unseen(self.store, self.number, f"{self.name!r} is stored")
        return self._taken


def raise_unseen(store: str, name: str, max_pending: int, *, alone: bool) -> None:
    """Raise the errors of earlier takes of a store, if no call has raised them yet.

    On many ranks, all do this alike: a take that may still be pending on another rank is left out.

    Args:
        store: The id of the store.
        name: The name of the take that is about to begin.
        max_pending: How many takes may be pending, together with that one.
        alone: Whether this process takes alone, so that each take that has ended counts.

    Raises:
        CasnapError: Such a take failed.
    """
    last = _count if alone else _count - (max_pending - 1)
    _raise_unseen(store, last, f"the take of {name!r} has not begun: call again for it")


def _raise_unseen(store: str, last: int, so: str) -> None:
    failed = [
        take
        for take in list(_unseen)
        if take.store == store and take.number <= last and take.error and not take.error_seen
    ]
    if _held_back or not failed:
        return
    for take in failed:
        take.note_seen()
    error = failed[0].error
    text = f"earlier, {'; and '.join(take.what_failed for take in failed)} ({so})"
    assert error is not None
    raise retold(error, text) from error


@contextmanager
def held_back() -> Iterator[None]:
    """Have no error of an earlier take raised meanwhile: what is taken now may be the last."""
    global _held_back
    _held_back = True
    try:
        yield
    finally:
        _held_back = False


_held_back = False


@atexit.register
def _warn_of_unseen_errors() -> None:
    for pending in list(_unseen):
        if not pending.error_seen:
            # Logging may be torn down by now, and this must be seen.
            print(
                f"casnap: WARNING: {pending.what_failed} (no wait() and no later take raised this)",
                file=sys.stderr,
            )
