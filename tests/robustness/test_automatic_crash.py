"""The collection in the background is killed, stands still or fails at any call, beside others.

Its process takes meanwhile. In the same store another run takes in the background, and `cron`
collects without grace.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from casnap import NewStore, Retention, Store
from casnap.errors import SnapshotNotFoundError
from casnap.runtime.threads import works_in_background
from casnap.storage.collecting import automatic
from tests.support.faults import (
    BACKEND_CALLS,
    CHUNK,
    FILLING_CALLS,
    SYSTEM_CALLS,
    Calls,
    app_state,
    assert_holds,
    assert_no_orphans,
    backend_faults,
    in_child,
    kill,
    memory_folder,
    start,
    stop,
    system_faults,
)
from tests.support.garbage import wait_for_collectors
from tests.support.sweep import sweep

KEEP = Retention(keep_last=2)
KILLED = -signal.SIGKILL
FAULTS = {
    "backend": partial(backend_faults, names=BACKEND_CALLS),
    "system": partial(system_faults, names=[*SYSTEM_CALLS, "rename", "listdir", "scandir", "stat"]),
}


@pytest.fixture(autouse=True)
def turned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASNAP_GC", "auto")
    # These states cost no more processor time than a collection.
    monkeypatch.setattr(automatic, "SHARE", math.inf)
    monkeypatch.setattr(automatic, "_FAILURE_REST", 0.0)


def steps_of(path: Path, run: str) -> list[int]:
    return sorted(s.metadata.user["step"] for s in Store(path).snapshots(prefix=run))


def take_some(path: Path, run: str, count: int) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    first = max(steps_of(path, run), default=-1) + 1
    for step in range(first, first + count):
        of_step = (app_state(step), f"{run}/{step}")
        if step % 3:
            store.take(*of_step, metadata={"step": step}, retention=KEEP)
        else:
            store.async_take(*of_step, metadata={"step": step}, retention=KEEP).wait()


def assert_whole(path: Path) -> None:
    """Check each snapshot, unless it is let go meanwhile."""
    for snapshot in Store(path).snapshots():
        with suppress(SnapshotNotFoundError):
            assert_holds(snapshot, snapshot.metadata.user["step"])


# --- the others -------------------------------------------------------------------------------


OTHERS: dict[str, Callable[[Path], object]] = {
    "another run": lambda path: take_some(path, "other", 1),
    "cron": lambda path: Store(path).gc(grace=0),
}


@contextmanager
def beside(path: Path) -> Iterator[None]:
    """Let others work in a store meanwhile; none of them may fail."""

    def work(other: str) -> None:
        while True:
            OTHERS[other](path)
            time.sleep(0.01)

    pids = {other: start(partial(work, other)) for other in OTHERS}
    try:
        yield
        ended = [other for other, pid in pids.items() if os.waitpid(pid, os.WNOHANG) != (0, 0)]
        assert ended == []
    finally:
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


# --- the tests --------------------------------------------------------------------------------


def struck(work: Callable[[], object]) -> int:
    """Do some work in a child that may stop itself once; return how it ends."""
    pid = start(work)
    status = os.waitpid(pid, os.WUNTRACED)[1]
    if os.WIFSTOPPED(status):
        time.sleep(0.2)
        os.kill(pid, signal.SIGCONT)
        status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


def strike_at(folder: Path, calls: range, faults: str) -> None:
    """Strike at some calls of the collection, by turns: kill, or let the process stand still."""
    path = folder / "run"
    take_some(path, "run", 3)
    wait_for_collectors()
    killed = 0
    with beside(path):
        for number, call in enumerate(calls):
            strike = stop if number % 3 == 2 else kill
            at = FAULTS[faults](call, strike, counts=works_in_background, after=bool(number % 2))

            def takes(at: AbstractContextManager[Calls] = at) -> None:
                with at:
                    take_some(path, "run", 6)

            before = steps_of(path, "run")
            ended = struck(takes)
            killed += ended == KILLED
            assert ended in (KILLED, 0)
            assert steps_of(path, "run")[-1] >= before[-1]
            assert_whole(path)
    print(f"{killed} of {len(calls)} were killed")
    assert killed > len(calls) / 3
    assert Store(path).check(data=True).ok
    # Work goes on, and the disk holds what is kept, and what one cycle holds.
    for _ in range(2):
        assert in_child(lambda: (take_some(path, "run", 3), wait_for_collectors())) == 0
    stored = sum(f.stat().st_size for f in path.rglob("packs/*/*"))
    assert stored <= 4 * Store(path).gc(dry_run=True).live_bytes
    Store(path).gc(grace=0)
    assert_no_orphans(path)
    assert_whole(path)


def test_struck_beside_others(tmp_path: Path) -> None:
    strike_at(tmp_path, range(0, 180, 36), "backend")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("faults", FAULTS)
def test_struck_often_beside_others(faults: str) -> None:
    calls = range(0, 400, 3) if faults == "backend" else range(0, 1500, 11)
    with memory_folder() as folder:
        strike_at(folder, calls, faults)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.ENOSPC, True), (errno.EIO, False)],
)
def test_what_fails_in_a_collection_fails_no_take(tmp_path: Path, code: int, lasting: bool) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    path = tmp_path / "run"
    take_some(path, "run", 3)
    for call in itertools.takewhile(lambda call: call < 60, sweep(times=2)):
        wait_for_collectors()
        with system_faults(call, fail, FILLING_CALLS, lasting=lasting, counts=works_in_background):
            take_some(path, "run", 3)
            wait_for_collectors()
        assert_whole(path)
    take_some(path, "run", 1)
    wait_for_collectors()
    Store(path).gc(grace=0)
    assert_no_orphans(path)
    assert len(steps_of(path, "run")) == 2
