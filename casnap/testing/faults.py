"""A backend that fails as it is told: what fails (a :class:`Fault`), and how (an act).

An **act** is a function that stands between a caller and one call of the backend. It gets the
:class:`Call`, and may do it (``call.go()``), not do it, do it twice, do it with other arguments,
raise before or after it, and answer what it likes. Any function of one argument will do as well::

    backend = FaultyBackend(MemoryBackend("name"))
    store = casnap.Store(backend)
    # The next root is put, but the answer is lost.
    with backend.during(Fault(lose_answer(), "put_if_absent", "roots/*")) as (fault,):
        store.take(state, "step_1")
    assert fault.struck == 1

============================  ==================================================================
what happens                  act
============================  ==================================================================
a call fails                  ``fail(StorageFullError)``
it is done, the answer lost   ``lose_answer()``
it is done in part            ``tear(100)``, ``tear(100, in_place=True)``
it takes long                 ``delay(0.1)``, or a ``Gate()`` that the test opens
others come first             ``hold(3)``, ``before(something)``
it is done twice              ``repeat()``
bytes change, or miss         ``flip(bit)``, ``short(nbytes)``, ``alter(function)``
listings are old              ``stale()``
the process dies              ``crash()``, ``after(crash())``; ``before(kill)`` for a real one
the machine dies              ``crash(losing_unsynced=True)``
============================  ==================================================================
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias, TypeVar

from casnap.backends.base import Backend
from casnap.errors import BackendError

T = TypeVar("T")
_GATE_SECONDS = 60.0


@dataclass(frozen=True)
class Call:
    """One call of a backend, on its way.

    Attributes:
        backend: The faulty backend.
        name: The method: ``"write"``, ``"read"``, …
        key: The key or folder; empty for ``sync`` and ``tidy``.
        arguments: What follows the key.
        go: Does the call and returns its answer; with these arguments instead, if some are given.
    """

    backend: FaultyBackend
    name: str
    key: str
    arguments: tuple[Any, ...]
    go: Callable[..., Any]

    def __str__(self) -> str:
        """Name it, for messages."""
        return f"{self.name}({self.key})"


Act: TypeAlias = Callable[[Call], object]
"""What is done in place of a call; what it returns is the answer."""

Raised: TypeAlias = Callable[[str], BaseException]
"""Makes the error to raise from a message: a class, mostly."""


class Crash(BaseException):
    """The process is dead, as far as the backend can tell: nothing that it does happens."""


@dataclass
class Fault:
    """An act, and the calls that it strikes at.

    Args:
        act: What is done in their place.
        calls: The name of the methods, or several names; empty for all.
        keys: A pattern for the key as ``fnmatch`` has it; ``*`` stands for any run of characters,
            slashes too. For ``copy`` either key may match.
        skip: How many of these calls pass before it strikes.
        times: How many it strikes at; None for all from there on.
        chance: How likely it strikes at each of them.
        seed: Makes that chance repeatable.

    Attributes:
        struck: How often it has struck.
    """

    act: Act
    calls: str | Collection[str] = ()
    keys: str = "*"
    skip: int = 0
    times: int | None = 1
    chance: float = 1.0
    seed: int = 0
    struck: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._names = {self.calls} if isinstance(self.calls, str) else set(self.calls)
        self._random = random.Random(self.seed)
        self._left_to_skip = self.skip
        self._lock = threading.Lock()

    def strikes(self, name: str, keys: Collection[str]) -> bool:
        """Whether it strikes at this call, which counts."""
        if self._names and name not in self._names:
            return False
        if not any(fnmatchcase(key, self.keys) for key in keys):
            return False
        with self._lock:
            if self._left_to_skip:
                self._left_to_skip -= 1
                return False
            if self.times is not None and self.struck >= self.times:
                return False
            if self.chance < 1 and self._random.random() >= self.chance:
                return False
            self.struck += 1
            return True


@dataclass(eq=False)
class _Held:
    """Something to be done, after so many calls or before the next sync."""

    do: Callable[[], object]
    calls: int | None


class FaultyBackend(Backend):
    """Another backend, but for faults. Without any it is as good as that one.

    Where several faults strike at one call, the first one's act goes around the others'.

    Args:
        inner: The backend that does the work.
        faults: What goes wrong.

    Attributes:
        faults: What goes wrong from here on; may be changed at any time.
        log: Name and key of each call that came, in order.
    """

    def __init__(self, inner: Backend, *faults: Fault) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.faults: list[Fault] = list(faults)
        self.log: list[tuple[str, str]] = []
        self._dead = False
        # How to take back what a crash of the machine may take back, oldest first.
        self._unsynced: list[tuple[str, Callable[[], None]]] = []
        self._held: list[_Held] = []
        self._lock = threading.Lock()

    def make(self) -> None:
        """Make the place itself, without faults."""
        self.inner.make()

    @property
    def identity(self) -> str:
        """That of the inner backend."""
        return self.inner.identity

    @contextmanager
    def during(self, *faults: Fault) -> Iterator[tuple[Fault, ...]]:
        """Have more faults for a while."""
        self.faults += faults
        try:
            yield faults
        finally:
            self.faults = [fault for fault in self.faults if fault not in faults]

    def crash(self, *, losing_unsynced: bool | Callable[[str], bool] = False) -> None:
        """Let the process die: all further calls raise :class:`Crash`, those under way too.

        What survived is at the inner backend.

        Args:
            losing_unsynced: Whether the machine dies too, so that changes are lost that no
                ``sync`` followed; a function of the key says which.
        """
        self._dead = True
        with self._lock:
            unsynced, self._unsynced, self._held = self._unsynced, [], []
        for key, undo in reversed(unsynced):
            if losing_unsynced(key) if callable(losing_unsynced) else losing_unsynced:
                undo()

    def write(self, key: str, content: memoryview | bytes) -> None:
        """Write, but for faults."""
        self._call("write", self._creating(self.inner.write), key, content)

    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Put if absent, but for faults."""
        return self._call("put_if_absent", self._creating(self.inner.put_if_absent), key, content)

    def sync(self, *keys: str) -> None:
        """Make durable what was written, but for faults."""
        self._call("sync", lambda _: self._sync(*keys), "")

    def read(self, key: str) -> bytes:
        """Read, but for faults."""
        return self._call("read", self.inner.read, key)

    def read_into(self, key: str, offset: int, target: memoryview, *, bulk: bool = False) -> int:
        """Read a part, but for faults."""
        return self._call(
            "read_into", partial(self.inner.read_into, bulk=bulk), key, offset, target
        )

    def size(self, key: str) -> int:
        """Return a length, but for faults."""
        return self._call("size", self.inner.size, key)

    def names(self, folder: str) -> list[str]:
        """List, but for faults."""
        return self._call("names", self.inner.names, folder)

    def copy(self, key: str, to: str) -> None:
        """Copy, but for faults."""
        self._call("copy", self._copy, key, to)

    def delete(self, key: str) -> None:
        """Delete, but for faults."""
        self._call("delete", self._delete, key)

    def tidy(self, min_age: float) -> int:
        """Tidy, but for faults."""
        return self._call("tidy", lambda _, age: self.inner.tidy(age), "", min_age)

    def mark(self, key: str, content: bytes | None) -> None:
        """Put or remove a marker, but for faults."""
        self._call("mark", self.inner.mark, key, content)

    def _call(self, name: str, do: Callable[..., T], key: str, *arguments: Any) -> T:
        self.log.append((name, key))
        self._check_alive()
        keys = (key, *arguments) if name == "copy" else (key,)
        acts = [fault.act for fault in list(self.faults) if fault.strikes(name, keys)]
        answer: T = self._through(acts, name, partial(self._do, do), key, arguments)
        self._pass_held()
        return answer

    def _through(
        self, acts: list[Act], name: str, do: Callable[..., Any], key: str, arguments: Any
    ) -> Any:
        if not acts:
            return do(key, *arguments)

        def go(*others: Any) -> Any:
            return self._through(acts[1:], name, do, key, others or arguments)

        return acts[0](Call(self, name, key, arguments, go))

    def _do(self, do: Callable[..., T], key: str, *arguments: Any) -> T:
        # Again: others may have crashed while an act had this call wait.
        self._check_alive()
        return do(key, *arguments)

    def _check_alive(self) -> None:
        if self._dead:
            raise Crash("this backend has crashed; go on with the one that it wraps")

    def _creating(self, create: Callable[[str, Any], T]) -> Callable[[str, Any], T]:
        def do(key: str, content: Any) -> T:
            answer = create(key, content)
            if answer is not False:
                self._note(key, partial(self.inner.delete, key))
            return answer

        return do

    def _copy(self, key: str, to: str) -> None:
        self.inner.copy(key, to)
        self._note(to, partial(self.inner.delete, to))

    def _delete(self, key: str) -> None:
        with suppress(FileNotFoundError):
            content = self.inner.read(key)
            self._note(key, lambda: self.inner.write(key, content))
        self.inner.delete(key)

    def _note(self, key: str, undo: Callable[[], None]) -> None:
        with self._lock:
            self._unsynced.append((key, undo))

    def _sync(self, *keys: str) -> None:
        self._pass_held(everything=True)
        with self._lock:
            covered = len(self._unsynced)
        self.inner.sync(*keys)
        with self._lock:
            del self._unsynced[:covered]

    def hold_back(self, do: Callable[[], object], calls: int | None) -> None:
        """Do something after so many calls, or before the next ``sync``, or not if we crash."""
        with self._lock:
            # The call that is held back passes here too.
            self._held.append(_Held(do, None if calls is None else calls + 1))

    def _pass_held(self, *, everything: bool = False) -> None:
        """Count one call, and do what was held back until now."""
        with self._lock:
            for held in self._held:
                held.calls = None if held.calls is None else held.calls - 1
            due = [held for held in self._held if everything or held.calls == 0]
            self._held = [held for held in self._held if held not in due]
        for held in due:
            held.do()


def before(do: Callable[[], object]) -> Act:
    """Do something else first; if that raises, the call is not done."""

    def act(call: Call) -> object:
        do()
        return call.go()

    return act


def after(act_then: Act) -> Act:
    """Do the call, then the act, whose own ``go`` does nothing but end as the call did."""

    def act(call: Call) -> object:
        done: Future[object] = Future()
        try:
            done.set_result(call.go())
        except Exception as e:  # noqa: BLE001 - raised again where the act goes on
            done.set_exception(e)
        return act_then(replace(call, go=lambda *_: done.result()))

    return act


def fail(error: Raised = BackendError) -> Act:
    """Raise, and do not do the call."""

    def act(call: Call) -> object:
        raise error(f"{call} failed, on purpose")

    return act


def lose_answer(error: Raised = BackendError) -> Act:
    """Do the call, then raise: the caller cannot know whether it was done."""
    return after(fail(error))


def crash(*, losing_unsynced: bool | Callable[[str], bool] = False) -> Act:
    """Crash at the call, which is not done; see :meth:`FaultyBackend.crash`."""

    def act(call: Call) -> object:
        call.backend.crash(losing_unsynced=losing_unsynced)
        raise Crash(f"crashed at {call}")

    return act


def repeat(times: int = 2) -> Act:
    """Do the call several times, as a client that retries would; the last answer counts."""

    def act(call: Call) -> object:
        for _ in range(times - 1):
            call.go()
        return call.go()

    return act


def delay(seconds: float) -> Act:
    """Wait, then do the call."""
    return before(partial(time.sleep, seconds))


class Gate:
    """An act: calls wait here until the test opens it.

    Attributes:
        reached: Is set when the first call has come.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def open(self) -> None:
        """Let all calls pass."""
        self._opened.set()

    def __call__(self, call: Call) -> object:
        """Wait, then do the call."""
        self.reached.set()
        if not self._opened.wait(_GATE_SECONDS):
            raise TimeoutError(f"{call} waited {_GATE_SECONDS} s for a gate that nobody opened")
        return call.go()


def hold(calls: int | None = None) -> Act:
    """Answer at once, and do the call later: after so many others, at the latest before a sync.

    Only for calls without an answer: ``write``, ``copy``, ``delete`` and ``mark``.
    """

    def act(call: Call) -> object:
        if call.name not in ("write", "copy", "delete", "mark"):
            raise TypeError(f"{call} has an answer, which cannot be known before it is done")
        # The caller may use its buffer again.
        kept = [bytes(a) if isinstance(a, memoryview) else a for a in call.arguments]
        call.backend.hold_back(partial(call.go, *kept), calls)
        return None

    return act


def alter(change: Callable[[bytes], bytes]) -> Act:
    """Change the bytes on their way: those written by a writing call, those read by a reading one.

    The function returns no more bytes than it is given.
    """

    def act(call: Call) -> object:
        if call.name in ("write", "put_if_absent"):
            return call.go(change(bytes(call.arguments[0])))
        if call.name == "read":
            return change(call.go())
        if call.name != "read_into":
            raise TypeError(f"{call} moves no bytes that could be changed")
        target, n = call.arguments[1], call.go()
        changed = change(bytes(target[:n]))
        # What is not told of must not be right by chance.
        target[:n] = changed + bytes(n - len(changed))
        return len(changed)

    return act


def short(nbytes: int) -> Act:
    """Move only the first bytes, and do not tell: a short read, or a write that lies."""
    return alter(lambda content: content[:nbytes])


def flip(bit: int = 0) -> Act:
    """Flip one bit, counted from the first and around the end."""

    def flipped(content: bytes) -> bytes:
        changed, at = bytearray(content), bit % (8 * len(content) or 1)
        if content:
            changed[at // 8] ^= 1 << at % 8
        return bytes(changed)

    return alter(flipped)


def tear(nbytes: int, error: Raised = BackendError, *, in_place: bool = False) -> Act:
    """Write only the first bytes, then raise.

    Args:
        nbytes: How many.
        error: What to raise.
        in_place: Whether they stand under the key itself, as only a backend that breaks its word
            leaves them. Else they are left in a temporary place, and the object is absent.
    """

    def act(call: Call) -> object:
        if call.name not in ("write", "put_if_absent"):
            raise TypeError(f"{call} writes no object that could be torn")
        part = bytes(call.arguments[0][:nbytes])
        if in_place:
            call.go(part)
        else:
            call.backend.inner.write(f"tmp/{os.urandom(12).hex()}", part)
        raise error(f"{call} broke off after {nbytes} bytes, on purpose")

    return act


def stale() -> Act:
    """List each folder as it was when it was listed first through this act."""
    seen: dict[str, list[str]] = {}

    def act(call: Call) -> object:
        if call.name != "names":
            raise TypeError(f"{call} lists nothing")
        if call.key not in seen:
            answer: Any = call.go()
            seen[call.key] = list(answer)
        return list(seen[call.key])

    return act
