"""A file system that is full: a clear error, nothing is lost, and deleting brings space back."""

from __future__ import annotations

import errno
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

from casnap import NewStore, Retention, Snapshot, StateDict, Store
from casnap.errors import DamagedError, StorageFullError
from tests.support.faults import (
    CHUNK,
    app_state,
    assert_holds,
    assert_no_orphans,
    assert_store,
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
from tests.support.mounts import fill, tmpfs

PAGE = 4096
Take = Callable[..., Any]


def async_take(store: Store, *args: Any, **options: Any) -> Snapshot:
    return store.async_take(*args, **options).wait()


BOTH = pytest.mark.parametrize("how", [Store.take, async_take], ids=["take", "async_take"])


def free(disk: Path) -> int:
    return os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize


# --- takes ------------------------------------------------------------------------------------


@BOTH
def test_a_disk_that_is_full(tmp_path: Path, how: Take) -> None:
    with tmpfs(tmp_path / "disk", "40m") as disk:
        store = Store(disk / "store")
        take(store, 0)
        before, there = free(disk), files(disk / "store")
        large = {"s": StateDict(x=torch.arange(16 << 20))}
        with pytest.raises(StorageFullError, match="earlier snapshots are whole") as e:
            how(store, large, "large")
        assert isinstance(e.value.__cause__, OSError)
        assert e.value.__cause__.errno == errno.ENOSPC
        assert before - free(disk) < 64 << 10
        assert files(disk / "store") == there
        assert_store(store.uri, {0})
        how(store, app_state(1), "step_1", metadata={"step": 1})
        assert_store(store.uri, {0, 1})


def storage_full() -> None:
    raise StorageFullError("no space left, on purpose")


def test_a_failed_take_does_not_forget_what_was_found_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    take(store, 0)
    before = files(tmp_path / "store")
    snapshot = store.take({"s": StateDict(x=torch.arange(99_999))}, "x")
    for path in (tmp_path / "store" / key for key in files(tmp_path / "store") - before):
        if path.stat().st_size > 99_999:
            path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DamagedError):
        snapshot.read_object("s/x")
    again = {"s": StateDict(x=torch.arange(99_999))}
    with backend_faults(0, storage_full, ["put_if_absent"]), pytest.raises(StorageFullError):
        store.take(again, "y")
    assert torch.equal(store.take(again, "y").read_object("s/x"), torch.arange(99_999))
    assert torch.equal(snapshot.read_object("s/x"), torch.arange(99_999))
    assert_holds(store["step_0"], 0)


# --- collections ------------------------------------------------------------------------------


def values(first: int, count: int) -> torch.Tensor:
    """Return numbers of which no other ``first`` has any, four bytes each."""
    return torch.arange(first << 20, (first << 20) + count, dtype=torch.int32)


def large(step: int) -> dict[str, StateDict]:
    """Return a state of half a megabyte that no other step shares any of."""
    return {"s": StateDict(x=values(step, 1 << 17))}


def garbage(disk: Path) -> Path:
    """Return a store with half a megabyte of garbage, and as much to become some."""
    store = Store(disk / "store", create=NewStore(chunk_size=CHUNK))
    take(store, 0)
    for step in range(3):
        store.take(large(step), f"large_{step}")
    store.delete("large_0")
    return disk / "store"


def left(path: Path) -> set[str]:
    return {s.name for s in Store(path).snapshots()}


@pytest.mark.usefixtures("collected_by_hand")
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


def test_garbage_is_freed_though_copies_do_not_fit(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "6m") as disk:
        store = Store(disk / "store", create=NewStore(chunk_size=CHUNK))
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


def test_what_a_killed_take_left_is_freed_first(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "4m") as disk:
        path = garbage(disk)

        def killed() -> None:
            with system_faults(0, kill, ["link"]):
                Store(path).take(large(5), "large_5")

        assert in_child(killed) == -signal.SIGKILL
        assert files(path, "tmp")
        fill(disk)
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


# --- the disk of the cache ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def littered() -> Iterator[Path]:
    """Return a store with garbage of every kind."""
    with memory_folder() as folder:
        yield littered_store(folder / "littered")


@pytest.mark.parametrize("pages", [0, 4])
@pytest.mark.usefixtures("collected_by_hand")
def test_a_full_disk_under_the_cache(
    littered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    copy = Path(shutil.copytree(littered, tmp_path / "copy"))
    many = {"s": StateDict({f"key {i}": i for i in range(3000)})}
    with tmpfs(tmp_path / "disk", "1m") as disk:
        monkeypatch.setenv("CASNAP_CACHE_DIR", str(disk / "cache"))
        (disk / "cache").mkdir()
        fill(disk, leave=pages * PAGE)

        def work() -> None:
            Store(copy).take(many, "many")
            assert Store(copy)["many"].read_object("s/key 7") == 7
            Store(copy).delete("many")
            assert Store(copy).gc(grace=0, repack=0.9).deleted_packs > 0
            assert_no_orphans(copy)
            take(copy, 0)
            Store(copy).prune(Retention(keep_last=2))
            Store(copy).gc(grace=0)
            assert_no_orphans(copy)
            assert held(copy) == {"step_0": 0, "step_4": 4}

        assert in_child(work) == 0
    assert held(copy) == {"step_0": 0, "step_4": 4}


@pytest.mark.parametrize("call", ["rename", "fchmod"])
def test_an_announcement_that_finds_no_space_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It is made under another name, which it keeps if a full disk has no room for its own."""

    def find_no_space(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Store(tmp_path, create=NewStore(chunk_size=CHUNK))
    take(store, 0)
    # So the mode of each new file is set.
    tmp_path.joinpath("casnap-store").chmod(0o770)
    before = files(tmp_path, "tmp")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, find_no_space)
        with pytest.raises(StorageFullError):
            store.tag("step_0", "x")
    assert files(tmp_path, "tmp") == before
    store.tag("step_0", "x")
