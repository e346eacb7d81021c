"""New packs are in the page cache soon after a take, if there is memory for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import casnap
from casnap.backends.local import warming
from casnap.backends.local_files.file_io import is_cached

_STEP = 64 << 10
_NBYTES = 24 << 20


@pytest.fixture
def store(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[casnap.Store]:
    """A store on a disk around whose page cache takes write."""
    monkeypatch.setenv("CASNAP_WARM", "off")
    probe = casnap.Store(disk_path / "probe")
    probe.take(_state(0), "a")
    if _share_cached(probe) > 0.1:
        pytest.skip("this file system writes through the page cache")
    monkeypatch.delenv("CASNAP_WARM")
    yield casnap.Store(disk_path / "ckpts")
    _wait_for_the_thread()


def test_a_restore_after_a_take_reads_from_memory(store: casnap.Store) -> None:
    store.take(_state(1), "a")
    _wait_for_the_thread()
    assert _share_cached(store) == 1.0
    filled = _state(2)
    report = store["a"].restore(filled)
    assert report.disk_bytes is not None
    assert report.disk_bytes < _NBYTES // 10
    assert torch.equal(filled["m"]["t"], _state(1)["m"]["t"])


def test_the_packs_of_an_async_take_are_read_too(store: casnap.Store) -> None:
    store.async_take(_state(1), "a").wait()
    _wait_for_the_thread()
    assert _share_cached(store) == 1.0


def test_a_restore_says_that_it_read_the_disk(
    store: casnap.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASNAP_WARM", "off")
    store.take(_state(1), "a")
    report = store["a"].restore(_state(2))
    assert report.disk_bytes is not None
    assert report.disk_bytes > _NBYTES // 2


def test_nothing_is_read_where_memory_is_short(
    store: casnap.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "available_bytes", lambda: _NBYTES)
    store.take(_state(1), "a")
    _wait_for_the_thread()
    cached = _cached(store)
    assert "".join(cached.values()).count("1") < _NBYTES // _STEP // 10, cached


def test_the_next_take_stops_the_reading(
    store: casnap.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = threading.Semaphore(0)
    go_on = threading.Event()

    def look() -> int:
        looks.release()
        go_on.wait()
        return 1 << 60

    monkeypatch.setattr(warming, "available_bytes", look)
    store.take(_state(1), "a")
    looks.acquire()
    try:
        # Nothing new to read, so no thread follows the first one.
        store.take(_state(1), "b")
    finally:
        go_on.set()
    _wait_for_the_thread()
    # The first window took one look; a second one would have made another.
    assert not looks.acquire(blocking=False)


def test_files_that_are_deleted_meanwhile_are_passed_over(
    store: casnap.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = threading.Event()
    go_on = threading.Event()

    def look() -> int:
        reached.set()
        go_on.wait()
        return 1 << 60

    monkeypatch.setattr(warming, "available_bytes", look)
    store.take(_state(1), "a")
    reached.wait()
    for pack in _packs(store):
        pack.unlink()
    go_on.set()
    _wait_for_the_thread()


def test_a_forked_child_takes_and_ends(store: casnap.Store) -> None:
    store.take(_state(1), "a")
    child = os.fork()
    if not child:
        try:
            store.take(_state(2), "b")
        finally:
            os._exit(0 if store["b"].name == "b" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [each.name for each in store.snapshots()] == ["a", "b"]


def _state(seed: int) -> dict[str, casnap.StateDict]:
    values = torch.rand(_NBYTES // 4, generator=torch.Generator().manual_seed(seed))
    return {"m": casnap.StateDict(t=values)}


def _packs(store: casnap.Store) -> list[Path]:
    packs = Path(str(store.uri), "casnap-store", "packs").rglob("*")
    return [p for p in packs if p.is_file()]


def _cached(store: casnap.Store) -> dict[str, str]:
    """Return, for each pack, a 1 for each step that the page cache has, and a 0 for others."""
    found = {}
    for pack in _packs(store):
        with pack.open("rb") as file:
            steps = range(0, pack.stat().st_size, _STEP)
            found[pack.name] = "".join(str(int(is_cached(file.fileno(), at))) for at in steps)
    return found


def _share_cached(store: casnap.Store) -> float:
    steps = "".join(_cached(store).values())
    return steps.count("1") / len(steps)


def _wait_for_the_thread() -> None:
    while any(thread.name == "casnap-warm" for thread in threading.enumerate()):
        time.sleep(0.01)
