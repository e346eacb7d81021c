"""Tasks that a forked child does before it runs anything else.

A child must not use locks that the parent held, nor the parent's threads, connections, open files
and handlers. Each module registers here a function that drops or renews its own locks, threads and
so on. The child calls all these functions first. Only ``format/decoding.py``, which imports nothing
from casnap, registers its locks itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import MethodType
from typing import Any, Generic, TypeVar
from weakref import WeakSet, ref

from casnap.runtime.descriptors import Descriptor

T = TypeVar("T")
F = TypeVar("F", bound=Callable[[], object])

# The functions that a child calls, in this order.
_calls: list[Callable[[], object]] = []
_locks: WeakSet[Any] = WeakSet()
# Open files that are locked.
_files: set[Descriptor] = set()
# The signals of this process, one entry for each handler.
_signals: list[int] = []


class _Masks(threading.local):
    """The signal masks that a thread had before its forks; the last belongs to the innermost fork.

    There is more than one mask if a signal handler interrupts a fork, and forks too.
    """

    def __init__(self) -> None:
        self.before: list[set[int]] = []


_masks = _Masks()


class _Method:
    """A call of a method. It is removed from ``_calls`` once the object of the method is gone.

    A ``WeakMethod`` would print an error when the process exits.
    """

    def __init__(self, method: MethodType) -> None:
        self._function = method.__func__
        calls = _calls  # at the exit of the process, the module's name may be gone
        self._owner = ref(method.__self__, lambda _: calls.remove(self))

    def __call__(self) -> None:
        if (owner := self._owner()) is not None:
            self._function(owner)


def in_child(call: F) -> F:
    """Have a function called in each forked child, before anything else runs there.

    Args:
        call: The function. A method is called as long as its object exists; this registration does
            not keep the object alive.
    """
    _calls.append(_Method(call) if isinstance(call, MethodType) else call)
    return call


def never_free(*objects: object) -> None:
    """Keep objects of the parent alive in a forked child until the child exits.

    To free such an object, the child would wait for threads that it does not have, or would change
    what it shares with the parent.
    """
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def new_lock() -> threading.Lock:
    """Return a lock that is free in a forked child, even if a thread of the parent held it."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def new_rlock() -> threading.RLock:
    """Return a lock like :func:`new_lock` that its holder can acquire again."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def cached_property(make: Callable[[Any], T]) -> functools.cached_property[T]:
    """Return a property that keeps its value; two threads may compute it at the same time.

    Before Python 3.12, a cached property has one lock for all objects of its class. While one
    thread computes the value for one object, the threads of all other objects would wait, and a
    forked child might wait for ever. So this lock is left out.
    """
    made = functools.cached_property(make)
    if hasattr(made, "lock"):
        made.lock = nullcontext()
    return made


class PerProcess(Generic[T]):
    """A value that each forked child makes again for itself.

    Args:
        make: Makes the value.

    Attributes:
        value: The value of this process.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        self.value = self._make()


@contextmanager
def locked_file(file: Descriptor) -> Iterator[Callable[[], bool]]:
    """At the end of a block, close a file on which this process holds a lock. This frees the lock.

    The system keeps the lock until all processes have closed the file. So each forked child closes
    the file at once.

    Args:
        file: The open file.

    Yields:
        A function that returns whether this process still has the file open. It returns False in a
        child that was forked during the block.
    """
    try:
        _files.add(file)
        yield lambda: file in _files
    finally:
        if file in _files:
            _files.remove(file)
            # Closing is not enough: a child that is just being forked has the file open too.
            with file as fd, suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)


def add_signal(number: int) -> None:
    """Note a signal that this process handles, but that terminates its forked children.

    The signal is blocked during a fork. Otherwise a new child would for a moment still have the
    parent's handler, which would swallow a signal that is meant to terminate the child.
    """
    _signals.append(number)


def remove_signal(number: int) -> None:
    """Undo one call of :func:`add_signal`."""
    _signals.remove(number)


def _hold_signals() -> None:
    if _signals:
        # Note the mask before blocking: a handler that runs between the two may raise an error.
        _masks.before.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        signal.pthread_sigmask(signal.SIG_BLOCK, _signals)


def _let_signals_through() -> None:
    if _masks.before:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before.pop())


def _begin_in_child() -> None:
    with ExitStack() as stack:
        # The stack calls the last callback first, so add them in reverse. It calls all of them,
        # even if one raises an error.
        stack.callback(_let_signals_through)
        for call in reversed(_calls[:]):
            stack.callback(call)
        while _files:
            _files.pop().close()
        for lock in _locks:
            lock._at_fork_reinit()


os.register_at_fork(
    before=_hold_signals,
    after_in_parent=_let_signals_through,
    after_in_child=_begin_in_child,
)
