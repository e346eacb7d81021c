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
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

import casnap.restore.restore
import casnap.take.take  # noqa: F401 - before any fork: another user may not read the sources
from casnap import NewStore, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.format.records import pack_key, segment_key
from casnap.runtime.buffers import SLOTS, shared_pool
from casnap.storage.reading.repository import Repository
from casnap.take import staging

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
        store = Store(store, create=NewStore(chunk_size=CHUNK))
    snapshot: Snapshot
    snapshot = store.take(app_state(step), f"step_{step}", metadata={"step": step}, **options)
    return snapshot


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
    """Return the files in a folder; with ``under``, those of a store, as keys."""
    top = f"{folder}/casnap-store/" if under else f"{folder}/"
    # A walk by pathlib takes three times as long.
    return {
        f"{place}/{name}".replace("//", "/")[len(top) :]
        for place, _, names in os.walk(top + under)
        for name in names
    }


def assert_no_orphans(path: Path | str) -> None:
    """Check that a store has just the packs and segments that its newest root names."""
    view = Repository(LocalBackend(Path(path))).view()
    packs, named = files(path, "packs"), set(map(pack_key, view.packs))
    # A low fence says that a collection has waited for a take; a thread may write, or delete.
    assert packs == named, (
        f"left over: {packs - named}; not there: {named - packs}; root {view.root.seq}, fence "
        f"{view.root.fence}, threads {[thread.name for thread in threading.enumerate()]}"
    )
    assert files(path, "index") == set(map(segment_key, view.segments))
    assert files(path, "tmp") == set()


def assert_packs_are_there(path: Path | str) -> None:
    """Check that a store has the packs and segments that its newest root names, condemned too."""
    view = Repository(LocalBackend(Path(path))).view()
    assert files(path, "packs") >= set(map(pack_key, view.packs))
    assert files(path, "index") >= set(map(segment_key, view.segments))


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Make a folder in memory where that can be had: for hundreds of takes and collections."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def content_of(folder: Path) -> dict[Path, bytes]:
    """Return the bytes of each file in and below a folder."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Check that nothing in a folder changes meanwhile."""
    before = content_of(folder)
    yield
    assert content_of(folder) == before


def assert_given_back() -> None:
    """Check that no call holds memory of a pool, and that no thread of casnap works on."""
    for pool in (shared_pool(CHUNK + (64 << 10)), staging._block_pool):
        assert len(pool._free) == pool._made
        assert pool is staging._block_pool or pool._made <= SLOTS
    # Python never forgets a thread whose start was interrupted.
    # A daemon serves the connections of the whole process.
    left = [t for t in threading.enumerate() if t.name.startswith("casnap") and not t.daemon]
    assert not [t for t in left if t.is_alive()]


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
        if _is_within_casnap():
            # It is to be another process, whose calls are not within one of this process.
            ended: list[object] = []
            thread = threading.Thread(target=lambda: ended.append(work()))
            thread.start()
            thread.join()
            status = 1 - len(ended)
        else:
            work()
            status = 0
    except BaseException:  # noqa: BLE001 - told by the exit status
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _is_within_casnap() -> bool:
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None))
    return any(module.startswith("casnap.") for module in modules)


def wait(pid: int) -> int:
    """Return how a child ended: its exit status, or less than 0 the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(work: Callable[[], object]) -> int:
    return wait(start(work))


def while_stopped(
    work: Callable[[], object],
    calls: AbstractContextManager[Calls],
    meanwhile: Callable[[], object],
    end: signal.Signals = signal.SIGCONT,
) -> tuple[bool, int]:
    """Do some work in a child that stops itself at a call (see :func:`stop`), then let it go on.

    Args:
        work: What the child does.
        calls: Makes it stop.
        meanwhile: What is done while it stands still.
        end: What it gets then; SIGKILL if it is not to go on.

    Returns:
        Whether it stopped at all, and how it ended.
    """

    def stopping() -> None:
        with calls:
            work()

    pid = start(stopping)
    status = os.waitpid(pid, os.WUNTRACED)[1]
    if not os.WIFSTOPPED(status):
        return False, os.waitstatus_to_exitcode(status)
    try:
        meanwhile()
    finally:
        os.kill(pid, end)
        ended = wait(pid)
    return True, ended


# --- faults -----------------------------------------------------------------------------------

WRITING_CALLS = [
    "write",
    "put_if_absent",
    "copy",
    "sync",
    "delete",
    "tidy",
    "mark",
    "unmark",
    "keep_copy",
]
BACKEND_CALLS = [*WRITING_CALLS, "read", "read_into", "size", "names"]
SYSTEM_CALLS = ["open", "pwrite", "fsync", "link", "mkdir", "unlink", "chmod", "fchmod", "rmdir"]
FILLING_CALLS = ["open", "pwrite", "fsync", "link", "mkdir"]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop this process here. By `os.kill`, the thread that calls could go on for a little."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def interrupt() -> None:
    raise KeyboardInterrupt


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def elsewhere(work: Callable[..., object]) -> Callable[..., None]:
    """Do some work on a thread that works for no call, as another process would; wait for it."""

    def do(*args: object) -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(work, *args).result()

    return do


class Calls:
    """Counts calls, and strikes at one of them.

    Args:
        strike_at: Which call, from 0; None for none.
        strike: What is done at it; it may raise, or never return.
        lasting: Whether to strike at all calls from there on.
        after: Whether to strike right after the call.
        counts: Whether to count a call at all, asked in the thread that makes it.
    """

    def __init__(
        self,
        strike_at: int | None,
        strike: Callable[[], object],
        *,
        lasting: bool = False,
        after: bool = False,
        counts: Callable[[], bool] = lambda: True,
    ) -> None:
        self.count = 0
        self._strike_at = strike_at
        self._strike = strike
        self._lasting = lasting
        self._after = after
        self._counts = counts
        self._lock = threading.Lock()

    @property
    def struck(self) -> bool:
        return self._strike_at is not None and self.count > self._strike_at

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._counts():
                return real(*args, **kwargs)
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
    **options: Any,
) -> Iterator[Calls]:
    """Count the calls of some functions of a class or module, and strike at one of them."""
    calls = Calls(strike_at, strike, **options)
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


# --- stores -----------------------------------------------------------------------------------


def littered_store(path: Path) -> Path:
    """Make a store of steps 3 and 4 with garbage of every kind, and return its path.

    It has condemned packs, a pack that is mostly dead, and packs that no snapshot needs. Takes that
    were killed have left packs, a segment without a root, and a temporary file.
    """
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    for step in range(5):
        take(store, step)
    store.delete("step_0")
    store.delete("step_1")
    assert store.gc(grace=3600, repack=0).condemned_packs > 0
    store.delete("step_2")

    def killed_by(call: AbstractContextManager[Calls]) -> None:
        with call:
            take(path, 90)

    for call in (backend_faults(0, names=["put_if_absent"]), system_faults(0, names=["link"])):
        assert in_child(partial(killed_by, call)) == -signal.SIGKILL
    return path


def held(path: Path | str) -> dict[str, int]:
    """Return the names and steps of all snapshots of a store, each of which must be whole."""
    found = {s.name: s for s in Store(path, create=False).snapshots()}
    for snapshot in found.values():
        assert_holds(snapshot, snapshot.metadata.user["step"])
    return {name: snapshot.metadata.user["step"] for name, snapshot in found.items()}
