"""Collectors that are killed, and caches and open stores that are older than a collection."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from casnap import Store
from tests.support.faults import (
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
    take,
)

pytestmark = pytest.mark.sweep

BEFORE = {"step_3": 3, "step_4": 4}


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
    take(path, 20)
    Store(path).gc(grace=0, repack=0.9)
    assert_no_orphans(path)
    assert held(path) == BEFORE | {"step_20": 20}


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
