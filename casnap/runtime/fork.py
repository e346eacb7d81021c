"""What a forked child must not inherit: held locks, threads, connections, open files, handlers.

All of it is listed here, and undone in the child before anything else runs there. Only
``format/decoding.py``, which imports nothing of casnap, looks after itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import MethodType
from typing import Any, Generic, TypeVar
from weakref import WeakSet, ref

from casnap.runtime.descriptors import Descriptor

T = TypeVar("T")
F = TypeVar("F", bound=Callable[[], object])

# What is called in a child, in this order.
_calls: list[Callable[[], object]] = []
_locks: WeakSet[Any] = WeakSet()
# Open files that are locked.
_files: set[Descriptor] = set()
# The signals of this process, one entry for each handler.
_signals: list[int] = []


class _Masks(threading.local):
    """The masks of a thread that forks: several, if the handler of another signal forks too."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []


_masks = _Masks()


class _Method:
    """A method that ends with its object.

    No WeakMethod: at the exit of the process that prints an error.
    """

    def __init__(self, method: MethodType) -> None:
        self._function = method.__func__
        calls = _calls  # at the exit of the process the name may be gone
        self._owner = ref(method.__self__, lambda _: calls.remove(self))

    def __call__(self) -> None:
        if (owner := self._owner()) is not None:
            self._function(owner)


def in_child(call: F) -> F:
    """Have a function called in each forked child, before anything else runs there.

    Args:
        call: The function. If it is a method, that ends with its object.
    """
    _calls.append(_Method(call) if isinstance(call, MethodType) else call)
    return call


def never_free(*objects: object) -> None:
    """Keep objects of the parent in a child that must not even free them.

    That could wait for threads that the child has not, or change what it shares with the parent.
    """
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def new_lock() -> threading.Lock:
    """Return a lock that is free in a forked child, also if a thread of the parent held it."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def new_rlock() -> threading.RLock:
    """Return such a lock that its thread can take again."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def cached_property(make: Callable[[Any], T]) -> functools.cached_property[T]:
    """Return a property that is made once. Before Python 3.12, all objects share its lock."""
    made = functools.cached_property(make)
    if (lock := getattr(made, "lock", None)) is not None:
        _locks.add(lock)
    return made


class PerProcess(Generic[T]):
    """A value that a forked child makes anew.

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
    """Close a file at the end of a block, which frees its lock. A forked child closes it at once.

    A lock lasts until the last process has closed the file.

    Args:
        file: The open file.

    Yields:
        What returns whether this process has it open: not a child that was forked in the block.
    """
    try:
        _files.add(file)
        yield lambda: file in _files
    finally:
        if file in _files:
            _files.remove(file)
            # To close it is not enough: a child that is just being forked has it open too.
            with file as fd, suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)


def add_signal(number: int) -> None:
    """Note a signal for which this process, but no child of it, has got a handler.

    While it forks, the signal waits. Else a child that is terminated at once would lose it to the
    handler of its parent, which it still has.
    """
    _signals.append(number)


def remove_signal(number: int) -> None:
    """Take back one :func:`add_signal`."""
    _signals.remove(number)


def _hold_signals() -> None:
    if _signals:
        # Noted before they are blocked: a handler that comes then may raise an error.
        _masks.before.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        signal.pthread_sigmask(signal.SIG_BLOCK, _signals)


def _let_signals_through() -> None:
    if _masks.before:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before.pop())


def _begin_in_child() -> None:
    with ExitStack() as stack:
        # Backwards, since the last one is called first. An error of one does not stop the others.
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
