"""Takes that go on in the background, one at a time in a process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

from casnap.errors import StateError
from casnap.format.records import Row
from casnap.runtime.threads import NO_THREADS, Worker

# One take at a time in a process: pending ones keep their order, and share their buffers.
# A lock around what a caller does, and the take that goes on after that: an interrupt could lose
# a lock that one thread hands to another.
turn = threading.Lock()
_last: PendingTake | None = None


def _free_turn_after_fork() -> None:
    global turn, _last
    turn, _last = threading.Lock(), None
    _pending.clear()


def wait_for_last() -> None:
    """Wait for the end, good or bad, of the take that goes on."""
    if _last is not None:
        _last.wait_for_end()


os.register_at_fork(after_in_child=_free_turn_after_fork)


class PendingTake:
    """A take that goes on in a thread, which the interpreter waits for before it exits.

    Args:
        name: The snapshot's name.
        finish: What is left to do.
    """

    def __init__(self, name: str, finish: Callable[[], Row]) -> None:
        self.name = name
        self.error_seen = False
        self._finish: Callable[[], Row] | None = finish
        self._row: Row | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._thread: Worker | None = None

    @property
    def started(self) -> bool:
        """Whether the thread was started."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread, unless it was; other takes wait for its end.

        Raises:
            StateError: No thread can be started.
        """
        global _last
        with self._lock:
            if self._thread is not None:
                return
            fate = threading.Lock()
            thread, before = Worker(lambda: self._run(fate), "casnap-async-take"), _last
            try:
                self._thread = thread
                _last = self
                _pending.add(self)
                thread.start()
            except BaseException as e:
                # An interrupt does not say whether the thread will run: unless it does by now, it
                # must not any more.
                if fate.acquire(blocking=False):
                    _last, self._thread = before, None
                    _pending.discard(self)
                if isinstance(e, RuntimeError):
                    raise StateError(NO_THREADS) from e
                raise

    def _run(self, fate: threading.Lock) -> None:
        """Do it, unless whoever acquired ``fate`` before has called it off."""
        if not fate.acquire(blocking=False):
            return
        try:
            assert self._finish is not None
            self._row = self._finish()
            _pending.discard(self)
        except BaseException as e:  # noqa: BLE001 - raised by wait
            self._error = e
        finally:
            # It holds the state's description, which would live as long as this.
            self._finish = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is not None and self._thread.ended

    def wait_for_end(self) -> None:
        """Wait for the end, good or bad."""
        assert self._thread is not None
        self._thread.wait()

    def wait(self) -> Row:
        """Wait for the end; return the row or raise what went wrong."""
        self.wait_for_end()
        if self._error is not None:
            self.error_seen = True
            raise self._error
        if self._row is None:
            raise StateError(
                f"the take of {self.name!r} goes on in the process that began it; wait for it "
                "there, not in a fork"
            )
        return self._row


_pending: set[PendingTake] = set()


@atexit.register
def _warn_of_unseen_errors() -> None:
    for pending in list(_pending):
        if not pending.error_seen:
            # Logging may be torn down by now, and this must be seen.
            print(
                f"casnap: WARNING: the snapshot {pending.name!r} was NOT stored, and nobody "
                f"called wait(): {type(pending._error).__name__}: {pending._error}",
                file=sys.stderr,
            )
