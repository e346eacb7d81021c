"""A backend that fails on demand: a :class:`Fault` says which calls fail, an act says how.

An **act** is a function that stands between a caller and one call of the backend. It gets the
:class:`Call`, and may do it (``call.go()``), not do it, do it twice, do it with other arguments,
raise before or after it, and return any answer. ``acts.py`` has the usual ones; any function of one
argument will do as well::

    backend = FaultyBackend(MemoryBackend("name"))
    store = casnap.Store(backend)
    # The next root is put, but the answer is lost.
    with backend.during(Fault(lose_answer(), "put_if_absent", "roots/*")) as (fault,):
        store.take(state, "step_1")
    assert fault.struck == 1
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias, TypeVar

from casnap.backends.base import MAX_WHOLE_BYTES, Backend, Target
from casnap.errors import CasnapError
from casnap.runtime.typing import override

T = TypeVar("T")


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


Act: TypeAlias = Callable[[Any], object]
"""What is done in place of a call. It gets the call, and returns the answer."""


class Crash(BaseException):
    """The process counts as dead: none of its later calls has an effect."""


@dataclass
class Fault:
    """An act, and the calls that it strikes at.

    Args:
        act: What is done in place of such a call.
        calls: The name of the method, or several names; empty for all.
        keys: A pattern for the key, for ``fnmatch``: ``*`` stands for any run of characters, also
            slashes. For ``copy`` either key may match.
        skip: How many of these calls pass first.
        times: How many calls it strikes at; None for all.
        chance: The probability that it strikes at such a call.
        seed: The seed for that chance.

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
        """Count a call; return whether the fault strikes at it."""
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
    """A call that is held back, for so many calls or until the next sync."""

    do: Callable[[], object]
    calls: int | None


class FaultyBackend(Backend):
    """A backend that works like the one that it wraps, except for faults.

    If several faults strike at one call, the first one's act goes around the others'.

    Args:
        inner: The backend that does the work.
        faults: What goes wrong.

    Attributes:
        faults: What goes wrong from here on; may be changed at any time.
        log: Name and key of each call, in order.
    """

    def __init__(self, inner: Backend, *faults: Fault) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.costly_requests = inner.costly_requests
        self.has_page_cache = inner.has_page_cache
        self.syncs_folders = inner.syncs_folders
        self.needs_probe = inner.needs_probe
        self.in_flight = inner.in_flight
        self.max_chunk_bytes = inner.max_chunk_bytes
        self.keeps_copies = inner.keeps_copies
        self.folder = inner.folder
        self.name_lag = inner.name_lag
        self.faults: list[Fault] = list(faults)
        self.log: list[tuple[str, str]] = []
        self._dead = False
        # How to undo the changes that a crash of the machine may undo, oldest first.
        self._unsynced: list[tuple[str, Callable[[], None]]] = []
        self._held: list[_Held] = []
        self._lock = threading.Lock()

    @override
    def make(self) -> None:
        self.inner.make()

    @property
    @override
    def identity(self) -> str:
        return self.inner.identity

    @property
    @override
    def requests(self) -> Mapping[str, int]:
        return self.inner.requests

    @property
    @override
    def endpoint(self) -> str:
        return self.inner.endpoint

    @property
    @override
    def versioning(self) -> str:
        return self.inner.versioning

    @property
    @override
    def can_put_if_absent(self) -> bool:
        return self.inner.can_put_if_absent

    @override
    def check_changes(self) -> None:
        self.inner.check_changes()

    @override
    def is_put(self, key: str) -> bool:
        return self.inner.is_put(key)

    @override
    def taken_up(self, folder: str) -> int:
        return self.inner.taken_up(folder)

    @override
    def belong(self, check: Callable[[Backend], None]) -> None:
        self.inner.belong(check)

    @override
    @contextmanager
    def announced(self, base: int, *, at_once: bool = False) -> Iterator[Callable[[], None]]:
        with self.inner.announced(base, at_once=at_once) as renew:
            yield renew

    @override
    def announced_bases(self, max_age: float) -> list[int]:
        return self.inner.announced_bases(max_age)

    @override
    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    @override
    def is_object(self) -> bool:
        return self._call("is_object", lambda _: self.inner.is_object(), "")

    @override
    def bucket_warnings(self) -> list[str]:
        return self._call("bucket_warnings", lambda _: self.inner.bucket_warnings(), "")

    @contextmanager
    def during(self, *faults: Fault) -> Iterator[tuple[Fault, ...]]:
        """Have more faults within a ``with`` block."""
        self.faults += faults
        try:
            yield faults
        finally:
            self.faults = [fault for fault in self.faults if fault not in faults]

    def crash(self, *, losing_unsynced: bool | Callable[[str], bool] = False) -> None:
        """Let the process die: all further calls raise :class:`Crash`, and those under way too.

        The inner backend has what survived.

        Args:
            losing_unsynced: Whether the machine dies too, so that changes without a later ``sync``
                are lost. A function of the key says which changes.
        """
        self._dead = True
        with self._lock:
            unsynced, self._unsynced, self._held = self._unsynced, [], []
        for key, undo in reversed(unsynced):
            if losing_unsynced(key) if callable(losing_unsynced) else losing_unsynced:
                undo()

    @override
    def write(self, key: str, content: memoryview | bytes) -> None:
        self._call("write", self._creating(self.inner.write), key, content)

    @override
    def put_if_absent(self, key: str, content: bytes) -> bool:
        return self._call("put_if_absent", self._creating(self.inner.put_if_absent), key, content)

    @override
    def sync(self, *keys: str) -> None:
        self._call("sync", lambda _: self._sync(*keys), "")

    @override
    def read(self, key: str, most: int = MAX_WHOLE_BYTES) -> bytes:
        return self._call("read", self.inner.read, key, most)

    @override
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        return self._call("read_into", self.inner.read_into, key, targets)

    @override
    def will_read(self, key: str, runs: Sequence[tuple[int, int]]) -> None:
        # A hint: it has no answer, and a fault strikes at the read that follows.
        self.inner.will_read(key, runs)

    @override
    def warm(self, lengths: Mapping[str, int]) -> None:
        # The same.
        self.inner.warm(lengths)

    @override
    def size(self, key: str) -> int:
        return self._call("size", self.inner.size, key)

    @override
    def names(self, folder: str) -> list[str]:
        return self._call("names", self.inner.names, folder)

    @override
    def copy(self, key: str, to: str) -> None:
        self._call("copy", self._copy, key, to)

    @override
    def delete(self, key: str) -> None:
        self._call("delete", self._delete, key)

    @override
    def tidy(self, min_age: float) -> int:
        return self._call("tidy", lambda _, age: self.inner.tidy(age), "", min_age)

    @override
    def where(self, key: str) -> str:
        return self.inner.where(key)

    @override
    def mark(self, key: str, content: bytes) -> None:
        self._call("mark", self.inner.mark, key, content)

    @override
    def read_marker(self, key: str) -> bytes:
        return self._call("read_marker", self.inner.read_marker, key)

    @override
    def unmark(
        self, keys: Iterable[str], is_stale: Callable[[str, bytes], bool]
    ) -> dict[str, CasnapError]:
        every = [*keys]
        first = every[0] if every else ""
        return self._call("unmark", lambda _: self.inner.unmark(every, is_stale), first)

    @override
    def keep_copy(self, key: str, content: bytes | None) -> None:
        self._call("keep_copy", self.inner.keep_copy, key, content)

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
        # Again: the backend may have crashed while an act let this call wait.
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
        """Do something after so many calls or before the next ``sync``; never after a crash."""
        with self._lock:
            # One more, since the call that is held back is counted too.
            self._held.append(_Held(do, None if calls is None else calls + 1))

    def _pass_held(self, *, everything: bool = False) -> None:
        """Count one call, and do what is due."""
        with self._lock:
            for held in self._held:
                held.calls = None if held.calls is None else held.calls - 1
            due = [held for held in self._held if everything or held.calls == 0]
            self._held = [held for held in self._held if held not in due]
        for held in due:
            held.do()
