"""Collecting on a full disk, which is where one does: no snapshot is hurt, and space comes free."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import Retention, StateDict, Store
from casnap.errors import BackendError, StorageFullError
from tests.support.faults import (
    CHUNK,
    assert_holds,
    assert_no_orphans,
    assert_store,
    backend_faults,
    disk_full,
    files,
    held,
    in_child,
    kill,
    littered_store,
    memory_folder,
    system_faults,
    take,
)
from tests.support.mounts import tmpfs
from tests.support.sweep import sweep

pytestmark = pytest.mark.sweep

BEFORE = {"step_3": 3, "step_4": 4}
KILLED = -signal.SIGKILL
PAGE = 4096
Act = Callable[[Path], object]
Report = Callable[[str, object], None]


@pytest.fixture(scope="module")
def littered() -> Iterator[Path]:
    """Return a store with garbage of every kind."""
    with memory_folder() as folder:
        yield littered_store(folder / "littered")


def storage_full() -> None:
    raise StorageFullError("no space left, on purpose")


def full_at_the_backend(k: int, *, lasting: bool) -> Any:
    names = ["write", "put_if_absent", "copy", "sync"]
    return backend_faults(k, storage_full, names, lasting=lasting)


def full_at_the_system(k: int, *, lasting: bool) -> Any:
    # What is only read is opened, too.
    return system_faults(k, disk_full, ["pwrite", "fsync", "link", "mkdir"], lasting=lasting)


WORKS = {
    "gc": (lambda path: Store(path).gc(grace=0, repack=0.9), BEFORE),
    "gc-with-grace": (lambda path: Store(path).gc(grace=3600, repack=0.9), BEFORE),
    "prune": (lambda path: Store(path).prune(Retention(keep_last=1)), {"step_4": 4}),
    "take": (lambda path: take(path, 0), BEFORE | {"step_0": 0}),
}


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize(
    ("full", "lasting"),
    [
        pytest.param(full_at_the_backend, False, id="backend-once"),
        pytest.param(full_at_the_backend, True, id="backend-lasting"),
        pytest.param(full_at_the_system, False, id="system-once", marks=pytest.mark.slow),
        pytest.param(full_at_the_system, True, id="system-lasting", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_is_full_at_any_call(
    littered: Path, name: str, lasting: bool, full: Callable[..., Any], record_property: Report
) -> None:
    (work, after), copy, failures = WORKS[name], littered.with_name("copy"), 0
    for k in sweep():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(littered, copy)
        with full(k, lasting=lasting) as calls:
            try:
                work(copy)
            except BackendError:
                failures += 1
                assert calls.struck
        found = held(copy)
        assert found in (BEFORE, after)
        Store(copy).gc(grace=0)
        assert_no_orphans(copy)
        assert held(copy) == found
        if not calls.struck:
            break
    record_property("cases", k)
    print(f"{name}, {full.__name__}, {lasting=}: {k} calls, {failures} failures")
    assert failures > 0


# --- a file system that is full ----------------------------------------------------------------


def free(disk: Path) -> int:
    return os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize


def fill(disk: Path, leave: int = 0) -> None:
    """Fill a disk but for some bytes."""
    with (disk / "fill").open("ab", buffering=0) as f:
        with suppress(OSError):
            while True:
                f.write(bytes(PAGE))
        f.truncate(f.tell() - leave)


def values(first: int, count: int) -> torch.Tensor:
    """Return numbers of which no other ``first`` has any, four bytes each."""
    return torch.arange(first << 20, (first << 20) + count, dtype=torch.int32)


def large(step: int) -> dict[str, StateDict]:
    """Return a state of half a megabyte that no other step shares any of."""
    return {"s": StateDict(x=values(step, 1 << 17))}


def garbage(disk: Path) -> Path:
    """Return a store with half a megabyte of garbage, and as much to become some."""
    store = Store(disk / "store", chunk_size=CHUNK)
    take(store, 0)
    for step in range(3):
        store.take(large(step), f"large_{step}")
    store.delete("large_0")
    return disk / "store"


def left(path: Path) -> set[str]:
    return {s.name for s in Store(path).snapshots()}


def assert_whole(path: Path) -> None:
    store = Store(path)
    assert_holds(store["step_0"], 0)
    for name in left(path) - {"step_0"}:
        step = int(name.removeprefix("large_"))
        assert torch.equal(store[name].read_object("s/x"), large(step)["s"]["x"])


def test_a_full_disk_can_be_emptied(tmp_path: Path) -> None:
    """What it takes: four pages for a delete; three more to collect, and three to copy."""
    with tmpfs(tmp_path / "disk", "4m") as disk:
        path = garbage(disk)
        fill(disk, leave=10 * PAGE)
        Store(path).delete("large_1")
        assert Store(path).gc(grace=0).freed_bytes > 1_000_000
        assert free(disk) > 900_000
        assert_no_orphans(path)
        assert left(path) == {"step_0", "large_2"}
        take(path, 1)
        Store(path).delete("large_2")
        Store(path).gc(grace=0)
        assert_store(path, {0, 1})


@pytest.mark.parametrize("pages", range(6))
def test_what_fails_for_want_of_space_leaves_nothing(tmp_path: Path, pages: int) -> None:
    """Else each attempt would take some of what is left, until not even a delete fits."""
    with tmpfs(tmp_path / "disk", "4m") as disk:
        path = garbage(disk)
        fill(disk, leave=pages * PAGE)
        for work in (lambda s: s.delete("large_1"), lambda s: s.gc(grace=0)):
            for _ in range(3):
                roots, there = files(path, "roots"), files(path, "index") | files(path, "packs")
                try:
                    work(Store(path))
                    break
                except StorageFullError:
                    assert_whole(path)
                # What was committed on the way is progress.
                if files(path, "roots") == roots:
                    assert files(path, "index") | files(path, "packs") == there
        (disk / "fill").unlink()
        found = left(path)
        assert found - {"large_1"} == {"step_0", "large_2"}
        Store(path).gc(grace=0)
        assert_no_orphans(path)
        assert left(path) == found


def test_garbage_is_freed_though_copies_do_not_fit(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "6m") as disk:
        store = Store(disk / "store", chunk_size=CHUNK)
        kept = values(10, 1 << 17)
        store.take({"s": StateDict(kept=kept, gone=values(11, 1 << 18))}, "both")
        store.take({"s": StateDict(kept=kept)}, "kept")
        store.take(large(0), "large")
        store.delete("both")
        store.delete("large")
        fill(disk, leave=200_000)
        # Half a megabyte would have to be copied; there is room once what is wholly dead is gone.
        assert store.gc(grace=0).freed_bytes > 2_000_000
        assert_no_orphans(store.uri)
        assert torch.equal(store["kept"].read_object("s/kept"), kept)


@pytest.mark.parametrize("pages", [0, 1])
def test_what_a_killed_take_left_is_freed_first(tmp_path: Path, pages: int) -> None:
    with tmpfs(tmp_path / "disk", "4m") as disk:
        path = garbage(disk)

        def killed() -> None:
            with system_faults(0, kill, ["link"]):
                Store(path).take(large(5), "large_5")

        assert in_child(killed) == KILLED
        assert files(path, "tmp")
        fill(disk, leave=pages * PAGE)
        assert Store(path).gc(grace=0).freed_bytes > 1_000_000
        assert_no_orphans(path)
        assert left(path) == {"step_0", "large_1", "large_2"}
        Store(path).delete("large_1")


def test_no_inodes_left(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "4m,nr_inodes=200") as disk:
        path = garbage(disk)
        with suppress(OSError):
            for i in itertools.count():
                (disk / str(i)).touch()
        for work in (lambda s: s.delete("large_1"), lambda s: s.gc(grace=0)):
            with pytest.raises(StorageFullError, match="earlier snapshots are whole"):
                work(Store(path))
        for i in range(16):
            (disk / str(i)).unlink()
        Store(path).delete("large_1")
        assert Store(path).gc(grace=0).freed_bytes > 1_000_000
        assert_no_orphans(path)
        assert left(path) == {"step_0", "large_2"}


@pytest.mark.parametrize("pages", [0, 1, 2, 4, 8, 16, 32])
def test_a_full_disk_under_the_cache(
    littered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    copy = littered.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(littered, copy)
    with tmpfs(tmp_path / "disk", "1m") as disk:
        monkeypatch.setenv("CASNAP_CACHE_DIR", str(disk / "cache"))
        (disk / "cache").mkdir()
        fill(disk, leave=pages * PAGE)

        def work() -> None:
            assert Store(copy).gc(grace=0, repack=0.9).deleted_packs > 0
            assert_no_orphans(copy)
            take(copy, 0)
            Store(copy).prune(Retention(keep_last=2))
            Store(copy).gc(grace=0)
            assert_no_orphans(copy)
            assert held(copy) == {"step_0": 0, "step_4": 4}

        assert in_child(work) == 0
    assert held(copy) == {"step_0": 0, "step_4": 4}
