"""The collection in the background is killed, stands still or fails at any call, beside others.

Its process takes meanwhile. In the same store another run takes in the background, `cron` collects
without grace, copies come and go, and a reader restores the newest snapshot.
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

from casnap import Retention, Store
from casnap.errors import SnapshotExistsError, SnapshotNotFoundError
from casnap.maintenance import automatic
from casnap.runtime.threads import works_in_background
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
OTHERS = ("another run", "cron", "copies in", "copies out", "a reader")
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


def take_some(path: Path, run: str, count: int, **options: object) -> None:
    store = Store(path, chunk_size=CHUNK, **options)  # type: ignore[arg-type]
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


def copy_in(path: Path, number: int) -> None:
    """Copy a snapshot that shares half of its chunks with the others, and delete it."""
    Store(path.with_name("elsewhere")).copy("0", to=path, rename=f"copies/{number}")
    assert_holds(Store(path)[f"copies/{number}"], 0)
    Store(path).delete(f"copies/{number}")


def copy_out(path: Path) -> None:
    newest, there = Store(path).latest(prefix="run"), path.with_name("there")
    assert newest is not None
    with suppress(SnapshotNotFoundError, SnapshotExistsError):
        Store(path).copy(newest.name, to=there)
    assert_whole(there)
    Store(there).prune(KEEP)


def read(path: Path) -> None:
    with suppress(SnapshotNotFoundError):
        newest = Store(path).latest(prefix="run")
        assert newest is not None
        assert_holds(newest, newest.metadata.user["step"])


def work_of(other: str, path: Path) -> Callable[[int], object]:
    return {
        "another run": lambda _: take_some(path, "other", 1),
        "cron": lambda _: Store(path).gc(grace=0),
        "copies in": lambda number: copy_in(path, number),
        "copies out": lambda _: copy_out(path),
        "a reader": lambda _: read(path),
    }[other]


@contextmanager
def beside(others: tuple[str, ...], path: Path) -> Iterator[None]:
    """Let others work in a store meanwhile; none of them may fail."""

    def work(other: str) -> None:
        for number in itertools.count():
            work_of(other, path)(number)
            time.sleep(0.01)

    pids = {other: start(partial(work, other)) for other in others}
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


def strike_at(
    folder: Path, others: tuple[str, ...], calls: range, faults: str, *, mirrored: bool = False
) -> None:
    """Strike at some calls of the collection, by turns: kill, or let the process stand still."""
    path = folder / "run"
    options = {"mirror": folder / "mirror", "mirror_retention": KEEP} if mirrored else {}
    Store(folder / "elsewhere", chunk_size=CHUNK).take(app_state(0), "0", metadata={"step": 0})
    take_some(path, "run", 3)
    wait_for_collectors()
    killed = 0
    with beside(others, path):
        for number, call in enumerate(calls):
            strike = stop if number % 3 == 2 else kill
            at = FAULTS[faults](call, strike, counts=works_in_background, after=bool(number % 2))

            def takes(at: AbstractContextManager[Calls] = at) -> None:
                with at:
                    take_some(path, "run", 6, **options)

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
    for there in (folder / "there", folder / "mirror"):
        assert not there.exists() or Store(there).check(data=True).ok


def test_struck_beside_others(tmp_path: Path) -> None:
    strike_at(tmp_path, ("another run", "cron"), range(0, 180, 36), "backend")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mirrored", [False, True], ids=["", "mirrored"])
@pytest.mark.parametrize("faults", FAULTS)
def test_struck_beside_all_others(faults: str, mirrored: bool) -> None:
    calls = range(0, 400, 3) if faults == "backend" else range(0, 1500, 11)
    with memory_folder() as folder:
        strike_at(folder, OTHERS, calls, faults, mirrored=mirrored)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EIO, False), (errno.EMFILE, True)],
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
