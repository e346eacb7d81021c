"""Takes, collectors and readers that stand still while a collector deletes what they use.

A process is stopped by a signal at one call after the other; while it stands still the snapshots
that it relies on are deleted, and collected.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pytest

from casnap import NewStore, Store
from casnap.errors import CasnapError, DamagedError, FencedError, SnapshotNotFoundError
from tests.support.faults import (
    CHUNK,
    Calls,
    app_state,
    assert_holds,
    assert_no_orphans,
    backend_faults,
    held,
    littered_store,
    memory_folder,
    start,
    stop,
    system_faults,
    take,
    wait,
    while_stopped,
)
from tests.support.sweep import sweep
from tests.support.verbs import run_state, run_store, whole

pytestmark = pytest.mark.sweep

REFUSED = 3
READS = ["read", "read_into", "size", "names"]
# How often a collection of the littered store writes to it.
WRITES = 5
Act = Callable[[Path], object]
Check = Callable[[Path, int], object]
Faults = Callable[..., AbstractContextManager[Calls]]
Report = Callable[[str, object], None]


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def pair(memory: Path) -> Path:
    """Return a store of two snapshots."""
    store = Store(memory / "pair", create=NewStore(chunk_size=CHUNK))
    take(store, 0)
    take(store, 1)
    return memory / "pair"


@pytest.fixture(scope="module")
def littered(memory: Path) -> Path:
    """Return a store with garbage of every kind."""
    return littered_store(memory / "littered")


def fresh(base: Path) -> Path:
    copy = base.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(base, copy)
    return copy


def stalls(
    base: Path,
    work: Act,
    meanwhile: Act,
    check: Check,
    faults: Faults,
    end: signal.Signals = signal.SIGCONT,
    times: int = 2,
) -> int:
    """Do some work on copies of a store, stopped at each of its calls in turn; return how many."""
    for k in sweep(times):
        copy = fresh(base)
        cache = mkdtemp(dir=base.parent)

        def with_cold_cache(copy: Path = copy, cache: str = cache) -> None:
            # What is not cached has to be read, and may be gone.
            os.environ["CASNAP_CACHE_DIR"] = cache
            work(copy)

        stopped, ended = while_stopped(
            with_cold_cache, faults(k, stop), partial(meanwhile, copy), end
        )
        shutil.rmtree(cache)
        if not stopped:
            assert ended == 0
            return k
        check(copy, ended)
    raise AssertionError


def refusing(work: Act, *errors: type[CasnapError]) -> Act:
    """Return some work that ends its process with a status of its own for some errors."""

    def refused(path: Path) -> None:
        try:
            work(path)
        except errors:
            os._exit(REFUSED)

    return refused


def note(record: Report, name: str, count: int, least: int = 6) -> None:
    record("cases", count)
    print(f"{name}: stopped at {count} calls")
    assert count >= least


# --- takes ------------------------------------------------------------------------------------


def again(path: Path) -> None:
    """Take the state of step 1 again: the take relies on all the packs of a snapshot."""
    Store(path).take(app_state(1), "again", metadata={"step": 1})


def new_async(path: Path) -> None:
    Store(path).async_take(app_state(2), "again", metadata={"step": 2}).wait()


def delete_all(path: Path) -> None:
    store = Store(path)
    store.delete("step_0")
    store.delete("step_1")


def collect_all(path: Path) -> None:
    delete_all(path)
    for _ in range(2):
        Store(path).gc(grace=0)


def collect_one(path: Path) -> None:
    """Leave what the deleted snapshot shared with another, in a pack that is mostly dead."""
    Store(path).delete("step_0")
    for _ in range(2):
        Store(path).gc(grace=0, repack=0.9)


def condemn_all(path: Path) -> None:
    delete_all(path)
    Store(path).gc(grace=3600)


def condemn_then_collect(path: Path) -> None:
    condemn_all(path)
    take(path, 5)
    Store(path).gc(grace=0)


TAKES = [again, new_async]
STALLS = [collect_all, collect_one, condemn_all, condemn_then_collect]
# What a session does that a collector passes at any call: tests/storage/test_session.py.
QUICK = [(again, condemn_all), (new_async, condemn_then_collect)]
PAIRS = [
    pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow, pytest.mark.timeout(600)])
    for pair in itertools.product(TAKES, STALLS)
]


def check_take(path: Path, ended: int) -> None:
    steps = held(path)
    if ended == REFUSED:
        assert "again" not in steps
    else:
        assert ended == 0
        assert steps["again"] in (1, 2)
    take(path, 20)
    Store(path).gc(grace=0)
    assert_no_orphans(path)
    assert held(path) == steps | {"step_20": 20}


@pytest.mark.parametrize(("work", "meanwhile"), PAIRS)
def test_a_take_that_stands_still(
    pair: Path, work: Act, meanwhile: Act, record_property: Report
) -> None:
    # A state that is not there any more cannot be hashed again.
    act = refusing(work, FencedError) if work is new_async else work
    count = stalls(pair, act, meanwhile, check_take, backend_faults)
    note(record_property, f"{work.__name__}, {meanwhile.__name__}", count)


# --- collectors -------------------------------------------------------------------------------


def collect(path: Path) -> None:
    Store(path).gc(grace=0, repack=0.9)


def collect_with_grace(path: Path) -> None:
    Store(path).gc(grace=3600, repack=0.9)


def take_and_collect(path: Path) -> None:
    """Take what only garbage holds, then new things; let another collector finish; delete."""
    take(path, 0)
    take(path, 20)
    collect(path)
    take(path, 2)
    Store(path).delete("step_3")


def take_garbage(path: Path) -> None:
    """Take what only garbage holds."""
    take(path, 0)
    take(path, 2)


def check_collector(left: set[int], path: Path, ended: int) -> None:
    assert ended == 0
    steps = {f"step_{step}": step for step in left}
    assert held(path) == steps
    take(path, 30)
    collect(path)
    assert_no_orphans(path)
    assert held(path) == steps | {"step_30": 30}


@pytest.mark.parametrize("meanwhile", [take_and_collect, take_garbage])
@pytest.mark.parametrize(
    ("work", "faults"),
    [
        (collect, partial(backend_faults, names=["write", "put_if_absent"])),
        *(
            pytest.param(work, faults, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])
            for work, faults in ((collect, backend_faults), (collect_with_grace, system_faults))
        ),
    ],
    ids=["writing", "backend", "system"],
)
def test_a_collector_that_stands_still(
    littered: Path, work: Act, meanwhile: Act, faults: Faults, record_property: Report
) -> None:
    left = {0, 2, 4, 20} if meanwhile is take_and_collect else {0, 2, 3, 4}
    count = stalls(littered, work, meanwhile, partial(check_collector, left), faults)
    note(record_property, f"{work.__name__}, {meanwhile.__name__}", count, WRITES)


def test_a_take_and_a_collector_that_stand_still(littered: Path, record_property: Report) -> None:
    """Both, while another collector comes by; then the collector goes on first."""
    taker: list[int] = []

    def stopping(path: Path) -> None:
        with backend_faults(0, stop, ["put_if_absent"]):
            Store(path).take(app_state(3), "again", metadata={"step": 3})

    def meanwhile(path: Path) -> None:
        taker.append(start(partial(stopping, path)))
        assert os.WIFSTOPPED(os.waitpid(taker[-1], os.WUNTRACED)[1])
        Store(path).delete("step_3")
        collect(path)

    def check(path: Path, ended: int) -> None:
        os.kill(taker[-1], signal.SIGCONT)
        assert wait(taker[-1]) == 0
        assert ended == 0
        assert held(path) == {"again": 3, "step_4": 4}
        collect(path)
        assert_no_orphans(path)
        assert held(path) == {"again": 3, "step_4": 4}

    faults = partial(backend_faults, names=["write", "put_if_absent"])
    count = stalls(littered, collect, meanwhile, check, faults)
    note(record_property, "a collector and a take", count, WRITES)


# --- what recodes -------------------------------------------------------------------------------


def recode(path: Path) -> None:
    Store(path).gc(grace=0, recode_after=1)


def undercut(path: Path) -> None:
    """Do what undercuts chains: delete, take anew, take what is old, and collect twice."""
    store = Store(path)
    for step in (0, 2, 4):
        store.delete(f"run/{step}")
    recode(path)
    store.take(run_state(2), "run/again-2", metadata={"step": 2})
    store.delete("run/1")
    store.gc(grace=0, recode_after=0, repack=1.0)
    store.take(run_state(0), "run/again-0", metadata={"step": 0})
    Store(path).copy(
        "run/5", to=Store(path.with_name("there"), create=NewStore(chunk_size=CHUNK)).make()
    )


@pytest.mark.parametrize(
    "end", [signal.SIGCONT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_recoding_that_stands_still(
    memory: Path, end: signal.Signals, record_property: Report
) -> None:
    """Then it goes on, or is killed there."""
    kept = {"run/3": 3, "run/5": 5, "run/again-2": 2, "run/again-0": 0, "step_4": 4}

    def check(path: Path, ended: int) -> None:
        assert ended == (0 if end == signal.SIGCONT else -end)
        assert whole(path) == kept
        for repack in (0.5, 1.0):
            Store(path).gc(grace=0, repack=repack)
            assert whole(path) == kept
        assert whole(path.with_name("there")) == {"run/5": 5}
        shutil.rmtree(path.with_name("there"))

    base = run_store(memory / f"run-{end}")
    count = stalls(base, recode, undercut, check, backend_faults, end, times=32)
    note(record_property, "recode, undercut", count)


# --- readers ----------------------------------------------------------------------------------


def read(path: Path) -> None:
    assert_holds(Store(path)["step_1"], 1)


def condemn_all_twice(path: Path) -> None:
    condemn_all(path)
    take(path, 5)
    Store(path).gc(grace=3600)


@pytest.mark.parametrize(
    ("meanwhile", "errors"),
    [
        # What it reads comes to lie elsewhere.
        pytest.param(collect_one, (), id="repacked"),
        # It is there to be read, if the snapshot was found at all.
        pytest.param(condemn_all_twice, (SnapshotNotFoundError,), id="condemned"),
        pytest.param(collect_all, (SnapshotNotFoundError, DamagedError), id="gone"),
    ],
)
def test_a_reader_that_stands_still(
    pair: Path, meanwhile: Act, errors: tuple[type[CasnapError]], record_property: Report
) -> None:
    ends: list[int] = []
    faults = partial(backend_faults, names=READS)
    count = stalls(
        pair, refusing(read, *errors), meanwhile, lambda _, ended: ends.append(ended), faults
    )
    assert set(ends) <= {0, REFUSED}
    # Once it was found, it is read to the end, unless nothing is left of it.
    assert ends == sorted(ends, reverse=True) or DamagedError in errors
    note(record_property, f"read, {meanwhile.__name__}", count)
