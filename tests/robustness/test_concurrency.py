"""Several processes and threads that use one store at once, without a word between them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from casnap import NewStore, Store
from casnap.errors import CasnapError, SnapshotExistsError
from casnap.storage.commit_log.roots import COPIES
from tests.support.faults import (
    CHUNK,
    app_state,
    assert_holds,
    assert_store,
    backend_faults,
    files,
    start,
    take,
    wait,
)


def at_once(*works: Callable[[], object]) -> None:
    """Run each of these in a process of its own, all at once; all must end well."""
    assert [wait(pid) for pid in [start(work) for work in works]] == [0] * len(works)


def on_threads(*works: Callable[[], object]) -> list[BaseException]:
    """Run each of these on a thread of its own, all at once; return what they raised."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as e:  # noqa: BLE001 - returned
            raised.append(e)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def takes(path: Path, first: int, count: int) -> Callable[[], None]:
    def work() -> None:
        for step in range(first, first + count):
            take(path, step)

    return work


def test_processes_that_make_one_store_at_once(tmp_path: Path) -> None:
    for i in range(2):
        path = tmp_path / f"store{i}"
        at_once(*[takes(path, first, 1) for first in range(4)])
        assert_store(path, {0, 1, 2, 3})


def test_processes_that_take_at_once(tmp_path: Path) -> None:
    path, processes, each = tmp_path / "store", 4, 6
    at_once(*[takes(path, n * each, each) for n in range(processes)])
    store = Store(path)
    assert_store(path, set(range(processes * each)))
    snapshots = store.snapshots()
    assert [s.seq for s in snapshots] == list(range(1, processes * each + 1))
    for n in range(processes):
        own = [s.metadata.user["step"] for s in snapshots]
        own = [step for step in own if step // each == n]
        assert own == sorted(own)


def test_processes_that_take_one_name(tmp_path: Path) -> None:
    """One of them gets it; the others hear of it, and leave nothing behind."""
    path = tmp_path / "store"
    take(path, 0)

    def work() -> None:
        try:
            Store(path).take(app_state(1), "step_1", metadata={"step": 1})
        except SnapshotExistsError:
            return
        with (tmp_path / "winners").open("a") as f:
            f.write("1")

    at_once(work, work, work, work)
    assert (tmp_path / "winners").read_text() == "1"
    assert_store(path, {0, 1})


@pytest.mark.usefixtures("collected_by_hand")
def test_processes_that_overwrite_one_name(tmp_path: Path) -> None:
    path = tmp_path / "store"

    def overwrite(step: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(5):
                store = Store(path, create=NewStore(chunk_size=CHUNK))
                store.take(app_state(step), "latest", metadata={"step": step}, overwrite=True)

        return work

    at_once(*map(overwrite, range(3)))
    (snapshot,) = Store(path).snapshots()
    assert snapshot.seq == 15
    assert_holds(snapshot, snapshot.metadata.user["step"])


def test_processes_that_take_delete_and_read(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for step in range(8):
        take(path, step)

    def delete() -> None:
        for step in range(6):
            Store(path).delete(f"step_{step}")

    def read() -> None:
        store = Store(path)
        for _ in range(12):
            for step in (6, 7):
                assert_holds(store[f"step_{step}"], step)
            latest = store.latest()
            assert latest is not None
            assert_holds(latest, latest.metadata.user["step"])

    at_once(takes(path, 100, 6), takes(path, 200, 6), delete, read)
    assert_store(path, {6, 7, *range(100, 106), *range(200, 206)})


def test_threads_that_take_through_one_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))

    def work(step: int) -> Callable[[], None]:
        def async_then_sync() -> None:
            pending = store.async_take(app_state(step), f"step_{step}", metadata={"step": step})
            take(store, step + 1)
            pending.wait()

        return async_then_sync

    assert on_threads(*[work(step) for step in (0, 10, 20, 30)]) == []
    assert_store(store.uri, {0, 1, 10, 11, 20, 21, 30, 31})


@pytest.mark.usefixtures("collected_by_hand")
def test_a_failed_take_does_not_disturb_others(tmp_path: Path) -> None:
    """A thread that fails gives all back: its packs, its memory, its turn."""
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    take(store, 0)
    before = files(store.uri)

    def fail() -> None:
        raise CasnapError("on purpose")

    for _ in range(6):
        with backend_faults(0, fail, names=["write"]), pytest.raises(CasnapError, match="purpose"):
            take(store, 1)
        store.async_take(app_state(1), "step_1").wait()
        with backend_faults(0, fail, names=["write"]):
            pending = store.async_take(app_state(2), "step_2", overwrite=True)
            with pytest.raises(CasnapError, match="purpose"):
                pending.wait()
        store.delete("step_1")
    assert_store(store.uri, {0})
    assert {key for key in before if COPIES not in key} <= files(store.uri)


# --- merging ----------------------------------------------------------------------------------


def test_segments_stay_few(tmp_path: Path, cache_dir: Path) -> None:
    """Small segments are merged as they come, and every snapshot can still be read."""
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    most = 0
    for step in range(50):
        take(store, step)
        most = max(most, len(store._view.repository.newest().segments))
    assert most <= 20
    assert_store(store.uri, set(range(50)))
    # So can a process that has no cache, from the segments alone.
    live = store._view.repository.newest().segments
    assert sum(ref.count for ref in live) >= 50
    for name in files(store.uri, "index"):
        if name.removeprefix("index/") not in {ref.id.hex() for ref in live}:
            (Path(store.uri) / "casnap-store" / name).unlink()
    shutil.rmtree(cache_dir)
    assert_store(store.uri, set(range(50)))


def test_processes_that_merge_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for step in range(6):
        take(path, step)
    at_once(*[takes(path, 100 * n, 8) for n in range(1, 4)])
    steps = {*range(6), *(100 * n + i for n in range(1, 4) for i in range(8))}
    assert_store(path, steps)
    assert len(Store(path)._view.repository.newest().segments) <= 22
