"""Takes in the background of a process. Each one stores after the one before it has ended.

A take that a collector overtakes starts again from its copies
(``storage/writing/starting_over.py``). It cannot start again if a later take has got the memory of
some copies, or if the store has lost a chunk that stayed on a device (``device_asking.py``). Then
nothing is committed, and the take ends with an error.

An error in the background is logged at once. One of three calls raises it: the ``wait()`` of its
take, the next take of the store, or the ``wait()`` of a later take. If the process ends before any
of these, the error is printed at exit. An error after which the run goes on, as with
``try_async_take``, is only logged as a warning.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from casnap.errors import CasnapError, StateError, retold
from casnap.runtime.fork import in_child, new_lock
from casnap.runtime.threads import Worker
from casnap.take.options import Attempt, TakeOptions, what_failed

if TYPE_CHECKING:
    from casnap.take.commit import TakeResult

_log = logging.getLogger("casnap")
# In a process one take at a time begins, and one stores. So pending takes keep their order, and
# share their buffers. The caller's thread holds this lock while its take begins. The order of
# ``_takes`` says which take may store: an interrupt could lose a lock that passes between threads.
turn = new_lock()
# The seconds between two looks whether a take has ended.
_LOOK = 0.02
# The takes that are pending, or whose error the caller has not got, in the order of their calls.
# A take that has ended well may still be among them.
_takes: dict[PendingTake, None] = {}
# How many takes were started so far.
_count = 0
in_child(_takes.clear)


def _pending() -> list[PendingTake]:
    return [take for take in list(_takes) if not take.done()]


def wait_for_room(store_id: str, name: str, options: TakeOptions, *, is_alone: bool) -> None:
    """Wait until a take may begin, and raise the errors of earlier takes that no call has raised.

    A ``try_take`` raises none of these, since its caller would take them for errors of its own
    take.

    All ranks must raise the same errors in the same call. So with several ranks, the error of a
    take is raised only once the take has ended on all ranks.

    Args:
        store_id: The id of the store. Errors of its takes are raised.
        name: The name of the take that is about to begin.
        options: The options of that take.
        is_alone: Whether this process takes alone, without other ranks.

    Raises:
        CasnapError: An earlier take failed.
    """
    before = options.max_pending - 1
    _wait_for_others(before)
    if not options.attempt.goes_on:
        last_count = _count if is_alone else _count - before
        advice = f"the take of {name!r} has not begun: call again for it"
        _raise_unseen(store_id, last_count, advice)


def _wait_for_others(most: int) -> None:
    while len(pending := _pending()) > most:
        pending[0].wait_for_end()


def wait_for_last(timeout: float | None = None) -> bool:
    """Wait until all takes in the background have ended, successfully or not.

    Args:
        timeout: How many seconds to wait at most.

    Returns:
        Whether all have ended.
    """
    if timeout is None:
        _wait_for_others(0)
    else:
        until = time.monotonic() + timeout
        while _pending() and time.monotonic() < until:
            time.sleep(_LOOK)
    return not _pending()


def under_way() -> bool:
    """Return whether this process is taking a snapshot, in the background or not."""
    return turn.locked() or bool(_pending())


class PendingTake:
    """A take in a background thread; the interpreter waits for it before it exits.

    Args:
        store_id: The id of the store.
        name: The name of the snapshot.
        finish: Does the background part of the take.
        attempt: Decides whether the training goes on if the take fails.

    Attributes:
        number: The place of this take among all that this process has started, from 1 on.
        error: The error that the take has ended with; None if there is none yet.
        error_seen: Whether the caller has got the error already, or gets it from the call that
            began this take.
        tolerated: The error, if it is only logged and the run goes on; else None.
    """

    def __init__(
        self,
        store_id: str,
        name: str,
        finish: Callable[[], TakeResult],
        attempt: Attempt | None = None,
    ) -> None:
        self.store_id = store_id
        self.name = name
        self.number = 0
        self.error: BaseException | None = None
        self.error_seen = False
        self.tolerated: CasnapError | None = None
        self._attempt = attempt or Attempt()
        self._finish: Callable[[], TakeResult] | None = finish
        self._result: TakeResult | None = None
        self._lock = threading.Lock()
        self._thread: Worker | None = None
        self._before: PendingTake | None = None

    @classmethod
    def not_begun(cls, error: CasnapError) -> PendingTake:
        """Return a take that has ended with an error before its thread was started.

        Args:
            error: The error, raised in the call that was to begin the take.
        """

        def finish() -> TakeResult:
            raise error

        take = cls("", "", finish)
        take.error = take.tolerated = error
        take.error_seen = True
        return take

    @property
    def started(self) -> bool:
        """Whether the thread has been started."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread, unless it was started. The thread first waits for the previous take.

        Raises:
            UnavailableError: No thread can be started.
        """
        global _count
        with self._lock:
            if self._thread is not None:
                return
            thread, before = Worker(self._run, "casnap-async-take"), _pending()
            for take in list(_takes):
                if take.done() and (take.error is None or take.error_seen):
                    _takes.pop(take, None)
            try:
                self._thread = thread
                self._before = before[-1] if before else None
                _takes[self] = None
                _count += 1
                self.number = _count
                thread.start()
            except BaseException:
                # A thread that does not run yet must not run at all.
                if thread.give_up():
                    self._thread = None
                    _count -= 1
                    _takes.pop(self, None)
                raise

    def _run(self) -> None:
        """In the thread: wait for the previous take, store this one, keep its result or error."""
        try:
            assert self._finish is not None
            if self._before is not None:
                # If the take before fails, its own handle raises that.
                self._before.wait_for_end()
            self._result = self._finish()
        except BaseException as e:  # noqa: BLE001 - raised by wait, or by the next take
            if isinstance(e, CasnapError) and self._attempt.tolerates(e):
                self.tolerated, self.error_seen = e, True
            self.error = e
            if not self.error_seen:
                _log.error("%s", self.what_failed)
        else:
            self._attempt.note_stored(self._result.row)
        finally:
            # These refer to captured states, which need not live as long as this handle.
            self._finish = self._before = None

    def done(self) -> bool:
        """Whether the take has ended, successfully or not."""
        return self.error is not None if self._thread is None else self._thread.ended

    def wait_for_end(self) -> None:
        """Wait until the take has ended, successfully or not."""
        if self._thread is not None:
            self._thread.wait()

    @property
    def what_failed(self) -> str:
        """The message that says which take failed, and why."""
        error = self.error
        assert error is not None
        return f"{what_failed(repr(self.name), error)}: {type(error).__name__}: {error}"

    def note_seen(self) -> None:
        """Note that the caller has got the error of this take."""
        self.error_seen = True
        if self.done():
            # The traceback of an error keeps the captured state alive.
            _takes.pop(self, None)

    def wait(self) -> TakeResult:
        """Wait until the take has ended; return its result, or raise its error.

        Raises:
            CasnapError: This take failed. Or this take is stored, but an earlier one of the same
                store failed, and no call has raised that error yet. In that case a second call of
                this method returns the result.
        """
        result = self.wait_for_result()
        _raise_unseen(self.store_id, self.number, f"{self.name!r} is stored")
        return result

    def wait_for_result(self) -> TakeResult:
        """Wait until the take has ended; return its result, or raise its own error."""
        self.wait_for_end()
        if self.error is not None:
            self.note_seen()
            raise self.error
        if self._result is None:
            raise StateError(
                f"the take of {self.name!r} goes on in the process that began it; wait for it "
                "there, not in a fork"
            )
        return self._result


def _raise_unseen(store_id: str, last_count: int, so: str) -> None:
    failed = [
        take
        for take in list(_takes)
        if take.store_id == store_id
        and take.number <= last_count
        and take.error
        and not take.error_seen
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
    """Within this ``with`` block, raise no errors of earlier takes.

    The block takes the last snapshot before a process ends, and an old error must not prevent it.
    """
    global _held_back
    _held_back = True
    try:
        yield
    finally:
        _held_back = False


_held_back = False


@atexit.register
def _warn_of_unseen_errors() -> None:
    # Python waits for no thread that a handler at exit has begun.
    _wait_for_others(0)
    for pending in list(_takes):
        if pending.error is not None and not pending.error_seen:
            # Logging may be torn down by now, and the user must see this.
            print(
                f"casnap: WARNING: {pending.what_failed} (no wait() and no later take raised this)",
                file=sys.stderr,
            )
