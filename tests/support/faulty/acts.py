"""The acts of a :class:`~tests.support.faulty.Fault`: what is done in place of a call of a backend.

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
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from casnap.errors import BackendError
from tests.support.faulty.backend import Act, Call, Crash

Raised: TypeAlias = Callable[[str], BaseException]
"""Makes the error to raise from a message: a class, mostly."""
_GATE_SECONDS = 60.0


def before(do: Callable[[], object]) -> Act:
    """Do something else first; if that raises, the call is not done."""

    def act(call: Call) -> object:
        do()
        return call.go()

    return act


def after(act_then: Act) -> Act:
    """Do the call, then the act. The act's ``go`` only returns or raises what the call did."""

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
    """Do the call several times, like a client that retries; the last answer counts."""

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
        reached: Is set when the first call comes.
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
            raise TimeoutError(f"{call} waited {_GATE_SECONDS} s for a gate that was never opened")
        return call.go()


def hold(calls: int | None = None) -> Act:
    """Return at once, and do the call later: after other calls, at the latest before a sync.

    Only for calls without an answer: ``write``, ``copy``, ``delete``, ``mark`` and ``keep_copy``.
    """

    def act(call: Call) -> object:
        if call.name not in ("write", "copy", "delete", "mark", "keep_copy"):
            raise TypeError(f"{call} has an answer, which cannot be known before it is done")
        # A copy, since the caller may use its buffer again.
        kept = [bytes(a) if isinstance(a, memoryview) else a for a in call.arguments]
        call.backend.hold_back(partial(call.go, *kept), calls)
        return None

    return act


def alter(change: Callable[[bytes], bytes]) -> Act:
    """Change the bytes that a call writes or reads.

    The function must not return more bytes than it is given.
    """

    def act(call: Call) -> object:
        if call.name in ("write", "put_if_absent"):
            return call.go(change(bytes(call.arguments[0])))
        if call.name == "read":
            return change(call.go())
        if call.name != "read_into":
            raise TypeError(f"{call} moves no bytes that could be changed")
        targets, lengths = [target for _, target in call.arguments[0]], call.go()
        content = b"".join(target[:n] for target, n in zip(targets, lengths, strict=True))
        changed, left = change(content), []
        for target, n in zip(targets, lengths, strict=True):
            part, changed = changed[:n], changed[n:]
            # The rest of the buffer must not be right by chance.
            target[:n] = part + bytes(n - len(part))
            left.append(len(part))
        return left

    return act


def short(nbytes: int) -> Act:
    """Read or write only the first bytes, without an error."""
    return alter(lambda content: content[:nbytes])


def flip(bit: int = 0) -> Act:
    """Flip one bit. It is counted from the first, modulo the length."""

    def flipped(content: bytes) -> bytes:
        changed, at = bytearray(content), bit % (8 * len(content) or 1)
        if content:
            changed[at // 8] ^= 1 << at % 8
        return bytes(changed)

    return alter(flipped)


def tear(nbytes: int, error: Raised = BackendError, *, in_place: bool = False) -> Act:
    """Write only the first bytes, then raise.

    Args:
        nbytes: How many bytes.
        error: The error to raise.
        in_place: Whether to write them under the key itself, which no correct backend does. Else
            they are left in a temporary place, and the object is absent.
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
    """List each folder as it was when this act first listed it."""
    seen: dict[str, list[str]] = {}

    def act(call: Call) -> object:
        if call.name != "names":
            raise TypeError(f"{call} lists nothing")
        if call.key not in seen:
            answer: Any = call.go()
            seen[call.key] = list(answer)
        return list(seen[call.key])

    return act
