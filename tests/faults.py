"""Breaking things on purpose: faults at chosen calls, children that die, states to compare."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import casnap.restore
import casnap.take  # noqa: F401 - imported before any fork, whose user may not read the sources
from casnap import Snapshot, StateDict, Store
from casnap.backends import LocalBackend

CHUNK = 64 << 10
KEY = "state"

# --- states -----------------------------------------------------------------------------------


def content(step: int) -> dict[str, Any]:
    """Return what a state holds at a step: half of it never changes."""
    return {
        "frozen": torch.arange(40_000, dtype=torch.float32),
        "weight": torch.arange(20_000, dtype=torch.float32) * (step + 1),
        "bias": torch.full((16,), float(step)),
        "step": step,
        "notes": [f"step {step}", {"nested": step}, "x" * 100],
    }


def app_state(step: int) -> dict[str, StateDict]:
    return {KEY: StateDict(content(step))}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def assert_holds(snapshot: Snapshot, step: int) -> None:
    """Restore a snapshot over other values, in place, and compare it with what was taken."""
    state = app_state(step + 1)
    tensor = state[KEY]["weight"]
    snapshot.restore(state)
    assert_equal(state[KEY].data, content(step))
    assert state[KEY]["weight"] is tensor


def take(store: Store | str | Path, step: int, **options: Any) -> Snapshot:
    """Take the state of a step, under the name of that step."""
    if not isinstance(store, Store):
        store = Store(store, chunk_size=CHUNK)
    return store.take(app_state(step), f"step_{step}", metadata={"step": step}, **options)


def assert_store(path: Path | str, steps: set[int], maybe: int | None = None) -> set[int]:
    """Check that a store holds the snapshots of exactly these steps, each whole.

    Args:
        path: The store.
        steps: What it must hold.
        maybe: A step that it may hold, whole.

    Returns:
        The steps that it holds.
    """
    found = {s.metadata.user["step"]: s for s in Store(path, create=False).snapshots()}
    assert set(found) - {maybe} == steps - {maybe}
    for step, snapshot in found.items():
        assert snapshot.name == f"step_{step}"
        assert_holds(snapshot, step)
    return set(found)


def files(folder: Path | str, under: str = "") -> set[str]:
    """Return the files of a store, as keys."""
    top = Path(folder)
    return {str(p.relative_to(top)) for p in (top / under).rglob("*") if p.is_file()}


# --- children ---------------------------------------------------------------------------------


def start(work: Callable[[], object]) -> int:
    """Run some work in a fork of this process, which ends with it; return its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    status = 1
    faulthandler.disable()
    try:
        # The threads of OpenMP did not come along.
        torch.set_num_threads(1)
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - told by the exit status
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def wait(pid: int) -> int:
    """Return how a child ended: its exit status, or less than 0 the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(work: Callable[[], object]) -> int:
    return wait(start(work))


# --- faults -----------------------------------------------------------------------------------

BACKEND_CALLS = ["write", "put_if_absent", "sync", "read", "read_into", "names", "delete", "mark"]
WRITING_CALLS = ["write", "put_if_absent", "sync", "delete", "mark"]
SYSTEM_CALLS = ["open", "pwrite", "fsync", "link", "mkdir", "unlink", "chmod", "fchmod", "rmdir"]
FILLING_CALLS = ["open", "pwrite", "fsync", "link", "mkdir"]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Calls:
    """Counts calls, and strikes at one of them.

    Args:
        strike_at: Which call, from 0; None for none.
        strike: What is done at it; it may raise, or never return.
        lasting: Whether to strike at all calls from there on.
    """

    def __init__(
        self,
        strike_at: int | None,
        strike: Callable[[], object],
        *,
        lasting: bool = False,
        after: bool = False,
    ) -> None:
        self.count = 0
        self._strike_at = strike_at
        self._strike = strike
        self._lasting = lasting
        self._after = after
        self._lock = threading.Lock()

    @property
    def struck(self) -> bool:
        return self._strike_at is not None and self.count > self._strike_at

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                number, self.count = self.count, self.count + 1
            hit = self._strike_at is not None and (
                number >= self._strike_at if self._lasting else number == self._strike_at
            )
            if hit and not self._after:
                self._strike()
            try:
                return real(*args, **kwargs)
            finally:
                if hit and self._after:
                    self._strike()

        return call


@contextmanager
def faults(
    where: Any,
    names: list[str],
    strike_at: int | None = None,
    strike: Callable[[], object] = kill,
    *,
    lasting: bool = False,
    after: bool = False,
) -> Iterator[Calls]:
    """Count the calls of some functions of a class or module, and strike at one of them."""
    calls = Calls(strike_at, strike, lasting=lasting, after=after)
    patches = [mock.patch.object(where, n, calls.wrap(getattr(where, n))) for n in names]
    for patch in patches:
        patch.start()
    try:
        yield calls
    finally:
        for patch in patches:
            patch.stop()


def backend_faults(
    strike_at: int | None = None,
    strike: Callable[[], object] = kill,
    names: list[str] = BACKEND_CALLS,
    **options: Any,
) -> AbstractContextManager[Calls]:
    """Strike at a call of the local backend, or right after it."""
    return faults(LocalBackend, names, strike_at, strike, **options)


def system_faults(
    strike_at: int | None = None,
    strike: Callable[[], object] = kill,
    names: list[str] = SYSTEM_CALLS,
    **options: Any,
) -> AbstractContextManager[Calls]:
    """Strike at a call of the operating system, made by any thread."""
    return faults(os, names, strike_at, strike, **options)
