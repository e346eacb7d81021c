"""Takes in the background of a process: each stores once the one before it has ended."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

from casnap.errors import StateError
from casnap.runtime.handlers import says_no_thread
from casnap.runtime.threads import NO_THREADS, Worker
from casnap.take.publish import Taken

# One take at a time begins in a process, and one stores: so pending takes keep their order, and
# share their buffers. The lock covers what the caller's thread does; ``_line`` tells the rest. One
# lock for both would pass from thread to thread, and an interrupt could lose it.
turn = threading.Lock()
# Between two looks whether a take has ended, in seconds.
_LOOK = 0.02
# The takes that were started, in the order of their calls; replaced, never changed.
_line: tuple[PendingTake, ...] = ()


def _free_turn_after_fork() -> None:
    global turn, _line
    turn, _line = threading.Lock(), ()
    _unstored.clear()


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
        name: The name of the snapshot.
        finish: Does the rest of the take.
    """

    def __init__(self, name: str, finish: Callable[[], Taken]) -> None:
        self.name = name
        self.error_seen = False
        self._finish: Callable[[], Taken] | None = finish
        self._taken: Taken | None = None
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
            StateError: No thread can be started.
        """
        global _line
        with self._lock:
            if self._thread is not None:
                return
            thread, before = Worker(self._run, "casnap-async-take"), _under_way()
            try:
                self._thread = thread
                self._before = before[-1] if before else None
                _line = (*before, self)
                _unstored.add(self)
                thread.start()
            except BaseException as e:
                # If it does not run yet, it must not run at all.
                if thread.give_up():
                    _line, self._thread = before, None
                    _unstored.discard(self)
                if isinstance(e, RuntimeError) and says_no_thread(e):
                    raise StateError(NO_THREADS) from e
                raise

    def _run(self) -> None:
        """Do the rest of the take."""
        try:
            assert self._finish is not None
            if self._before is not None:
                # Its own handle says what became of it.
                self._before.wait_for_end()
            self._taken = self._finish()
            _unstored.discard(self)
        except BaseException as e:  # noqa: BLE001 - raised by wait
            self._error = e
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

    def wait(self) -> Taken:
        """Wait for the end; return the result, or raise the error."""
        self.wait_for_end()
        if self._error is not None:
            self.error_seen = True
            raise self._error
        if self._taken is None:
            raise StateError(
                f"the take of {self.name!r} goes on in the process that began it; wait for it "
                "there, not in a fork"
            )
        return self._taken


_unstored: set[PendingTake] = set()


@atexit.register
def _warn_of_unseen_errors() -> None:
    for pending in list(_unstored):
        if not pending.error_seen:
            # Logging may be torn down by now, and this must be seen.
            print(
                f"casnap: WARNING: the snapshot {pending.name!r} was NOT stored, and "
                f"wait() was not called: {type(pending._error).__name__}: {pending._error}",
                file=sys.stderr,
            )
