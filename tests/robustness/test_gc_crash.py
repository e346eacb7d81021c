"""A process that dies at any moment costs no snapshot; the collector finds what it left."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from casnap import Retention, Store
from tests.support.faults import (
    BACKEND_CALLS,
    WRITING_CALLS,
    app_state,
    assert_holds,
    assert_no_orphans,
    backend_faults,
    files,
    held,
    in_child,
    kill,
    littered_store,
    memory_folder,
    system_faults,
    take,
)
from tests.support.sweep import sweep

pytestmark = pytest.mark.sweep

Act = Callable[[Path], object]
Report = Callable[[str, object], None]

KILLED = -signal.SIGKILL
BEFORE = {"step_3": 3, "step_4": 4}


@dataclass(frozen=True)
class Work:
    """Something that is done to the littered store, and the snapshots that it holds then."""

    do: Act
    after: dict[str, int]


def overwrite(path: Path) -> None:
    Store(path).take(app_state(7), "step_3", metadata={"step": 7}, overwrite=True)


def async_take(path: Path) -> None:
    Store(path).async_take(app_state(9), "step_9", metadata={"step": 9}).wait()


WORKS = {
    "take": Work(lambda path: take(path, 9), BEFORE | {"step_9": 9}),
    # It has the content of a snapshot that was deleted, which no longer may be relied on.
    "take-again": Work(lambda path: take(path, 0), BEFORE | {"step_0": 0}),
    "async-take": Work(async_take, BEFORE | {"step_9": 9}),
    "overwrite": Work(overwrite, BEFORE | {"step_3": 7}),
    "delete": Work(lambda path: Store(path).delete("step_3"), {"step_4": 4}),
    "prune": Work(lambda path: Store(path).prune(Retention(keep_last=1)), {"step_4": 4}),
    "gc": Work(lambda path: Store(path).gc(grace=0, repack=0.9), BEFORE),
    "gc-without-repack": Work(lambda path: Store(path).gc(grace=0, repack=0), BEFORE),
    "gc-with-grace": Work(lambda path: Store(path).gc(grace=3600, repack=0.9), BEFORE),
}
EACH_WORK = pytest.mark.parametrize("name", WORKS)
# What is before a call is after the last one, as far as a store can tell.
EACH_SIDE = pytest.mark.parametrize(
    "after",
    [pytest.param(False, id="before", marks=pytest.mark.slow), pytest.param(True, id="after")],
)


@pytest.fixture(scope="module")
def littered() -> Iterator[Path]:
    """Return a store with garbage of every kind; each case works on a copy."""
    with memory_folder() as folder:
        yield littered_store(folder / "littered")


def fresh(littered: Path) -> Path:
    copy = littered.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(littered, copy)
    return copy


def assert_recovers(work: Work, path: Path) -> None:
    """Check that all is whole, that work goes on without repair, and that nothing is left over."""
    found = held(path)
    assert found in (BEFORE, work.after)
    take(path, 20)
    Store(path).gc(grace=0, repack=0.9)
    assert_no_orphans(path)
    assert held(path) == found | {"step_20": 20}


def crashes(base: Path, do: Act, check: Act, faults: Callable[..., Any], **options: Any) -> int:
    """Do some work on copies of a store, killed at each of its calls in turn; return how many."""
    for k in sweep(times=2):
        copy = fresh(base)

        def crashing(k: int = k, copy: Path = copy) -> None:
            with faults(k, kill, **options):
                do(copy)

        status = in_child(crashing)
        check(copy)
        if status == 0:
            return k
        assert status == KILLED
    raise AssertionError


def note(record: Report, name: str, count: int) -> None:
    record("cases", count)
    print(f"{name}: {count} crashes")
    assert count > 5


@EACH_SIDE
@pytest.mark.parametrize("name", [name for name in WORKS if name != "gc-without-repack"])
def test_killed_at_a_call_that_writes(
    littered: Path, name: str, after: bool, record_property: Report
) -> None:
    """Before any other call, a store is what it was after the last one that writes."""
    work = WORKS[name]
    check = partial(assert_recovers, work)
    count = crashes(littered, work.do, check, backend_faults, names=WRITING_CALLS, after=after)
    note(record_property, f"{name}, {after=}", count)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@EACH_SIDE
@EACH_WORK
@pytest.mark.parametrize("faults", [backend_faults, system_faults], ids=["backend", "system"])
def test_killed_at_any_call(
    littered: Path, name: str, faults: Callable[..., Any], after: bool, record_property: Report
) -> None:
    work = WORKS[name]
    count = crashes(littered, work.do, partial(assert_recovers, work), faults, after=after)
    note(record_property, f"{name}, {faults.__name__}, {after=}", count)


@pytest.fixture(scope="module")
def unindexed(littered: Path) -> Path:
    """Return a littered store that has lost its index."""
    path = littered.with_name("unindexed")
    shutil.copytree(littered, path)
    shutil.rmtree(path / "casnap-store/index")
    return path


def repair(path: Path) -> None:
    assert Store(path).repair().ok


def assert_repairable(path: Path) -> None:
    repair(path)
    assert_recovers(WORKS["gc"], path)


@EACH_SIDE
def test_a_repair_killed_at_a_call_that_writes(
    unindexed: Path, after: bool, record_property: Report
) -> None:
    count = crashes(
        unindexed, repair, assert_repairable, backend_faults, names=WRITING_CALLS, after=after
    )
    note(record_property, f"repair, {after=}", count)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@EACH_SIDE
@pytest.mark.parametrize("faults", [backend_faults, system_faults], ids=["backend", "system"])
def test_a_repair_killed_at_any_call(
    unindexed: Path, faults: Callable[..., Any], after: bool, record_property: Report
) -> None:
    count = crashes(unindexed, repair, assert_repairable, faults, after=after)
    note(record_property, f"repair, {faults.__name__}, {after=}", count)


def test_a_collector_killed_again_and_again(littered: Path) -> None:
    """Each run gets one call further than the last, on what that one left."""
    path = fresh(littered)
    for k in itertools.count():

        def crashing(k: int = k) -> None:
            with backend_faults(k, kill, WRITING_CALLS):
                Store(path).gc(grace=0, repack=0.9)

        if in_child(crashing) == 0:
            break
        assert held(path) == BEFORE
    assert_recovers(WORKS["gc"], path)


# --- caches that are older than the collection ------------------------------------------------


def with_cache(folder: Path, work: Callable[[], object]) -> Callable[[], None]:
    """Return some work, to be done in a child, with the index cached in a folder of its own."""

    def with_that_cache() -> None:
        os.environ["CASNAP_CACHE_DIR"] = str(folder)
        work()

    return with_that_cache


@pytest.fixture(scope="module")
def filled_cache(littered: Path) -> Path:
    """Return a cache that knows all that lies in the littered store."""
    folder = littered.with_name("filled-cache")
    assert in_child(with_cache(folder, lambda: held(littered))) == 0
    assert list(folder.rglob("data.mdb"))
    return folder


def take_garbage(path: Path) -> None:
    """Take what no snapshot holds any more: what was condemned, collected, never committed."""
    for step in (0, 1, 2, 90):
        take(path, step)


def assert_stored_anew(path: Path, cache: Path, filled_cache: Path) -> None:
    """Check that what was collected is stored again, whatever a cache says of it."""
    shutil.copytree(filled_cache, cache, dirs_exist_ok=True)
    assert in_child(with_cache(cache, lambda: take_garbage(path))) == 0
    every = BEFORE | {f"step_{step}": step for step in (0, 1, 2, 90)}

    def check() -> None:
        assert held(path) == every
        Store(path).gc(grace=0)
        assert_no_orphans(path)
        assert held(path) == every

    # What is read comes from the store, since this cache is empty.
    shutil.rmtree(cache)
    assert in_child(with_cache(cache, check)) == 0
    shutil.rmtree(cache)


@pytest.mark.parametrize(
    ("repack", "names"),
    [
        (0.9, ["put_if_absent", "delete"]),
        pytest.param(0.9, BACKEND_CALLS, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
        pytest.param(0, BACKEND_CALLS, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
    ids=["deleting", "any-call", "any-call-without-repack"],
)
def test_a_take_with_a_cache_from_before_a_collection_that_was_killed(
    littered: Path, filled_cache: Path, repack: float, names: list[str], record_property: Report
) -> None:
    def check(path: Path) -> None:
        assert_stored_anew(path, littered.with_name("stale-cache"), filled_cache)

    def collect(path: Path) -> None:
        Store(path).gc(grace=0, repack=repack)

    count = crashes(littered, collect, check, backend_faults, names=names)
    note(record_property, "gc, then a take with a stale cache", count)


def test_a_cache_that_is_put_back(littered: Path, filled_cache: Path) -> None:
    """The cache of a host that was itself restored from a backup, say."""
    path, cache = fresh(littered), littered.with_name("put-back-cache")
    shutil.copytree(filled_cache, cache)

    def collect() -> None:
        assert Store(path).gc(grace=0, repack=0.9).deleted_packs > 0
        assert held(path) == BEFORE

    assert in_child(with_cache(cache, collect)) == 0
    shutil.rmtree(cache)
    assert_stored_anew(path, cache, filled_cache)


def test_a_store_that_is_open_while_others_collect(littered: Path) -> None:
    path = fresh(littered)
    store = Store(path)
    assert held(path) == BEFORE

    def collect() -> None:
        for name in BEFORE:
            Store(path).delete(name)
        Store(path).gc(grace=0)
        assert files(path, "packs") == set()

    for step in (3, 4, 0):
        assert in_child(collect) == 0
        take(store, step)
        assert_holds(store[f"step_{step}"], step)
        store.take(app_state(4), "step_4", metadata={"step": 4}, overwrite=True)
        store.take(app_state(3), "step_3", metadata={"step": 3}, overwrite=True)
        assert in_child(lambda: held(path)) == 0
