"""A bound on the threads of a take: no step of it runs on more."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable

import pytest
import torch

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import StoreError
from casnap.storage.packs import pack_writer
from casnap.take import hashing, staging

CORES = 4


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Return a store on a machine of many cores, where takes are of many small batches."""
    monkeypatch.setattr(hashing, "cores", lambda: CORES)
    monkeypatch.setattr(staging, "cores", lambda: CORES)
    monkeypatch.setattr(hashing, "PIECE_BYTES", 64 << 10)
    monkeypatch.setattr(pack_writer, "_FIRST_BYTES", 128 << 10)
    return Store(tmp_path / "store", create=NewStore(chunk_size=64 << 10)).make()


class Watch:
    """Notes which threads come by, and holds the first ones until so many are there at once."""

    def __init__(self, expected: int) -> None:
        self._barrier = threading.Barrier(expected)
        self._left = expected
        self._lock = threading.Lock()
        self.seen: set[int] = set()

    def __call__(self) -> None:
        with self._lock:
            self.seen.add(threading.get_ident())
            self._left -= 1
            waits = self._left >= 0
        if waits:
            self._barrier.wait(60)


def state() -> dict[str, StateDict]:
    return {"s": StateDict({f"x{i}": torch.randn(64 << 10) for i in range(16)})}


@pytest.fixture
def threads_of(monkeypatch):
    """Return what tells how many threads hash in a take, once so many have done so at once."""

    def threads_of(take: Callable[..., object], expected: int, **options: object) -> int:
        watch = Watch(expected)

        def note(batch):
            watch()
            staging.give_back(batch)

        with monkeypatch.context() as patch:
            patch.setattr(hashing, "give_back", note)
            take(state(), f"step_{id(watch)}", overwrite=True, **options)
        return len(watch.seen)

    return threads_of


def test_as_many_threads_hash_as_are_allowed(store, threads_of, monkeypatch):
    assert threads_of(store.take, CORES) == CORES
    assert threads_of(store.take, 2, threads=2) == 2
    later = lambda *a, **options: store.async_take(*a, **options).wait()  # noqa: E731
    assert threads_of(later, 1, threads=1) == 1

    bounded = Store(store.uri, threads=3).make()
    assert threads_of(bounded.take, 3) == 3
    assert threads_of(bounded.take, 1, threads=1) == 1
    monkeypatch.setenv("CASNAP_THREADS", "2")
    for again in (bounded, pickle.loads(pickle.dumps(bounded))):
        assert threads_of(again.take, 3) == 3
    assert threads_of(Store(store.uri).take, 2) == 2
    assert threads_of(lambda a, n, **k: Snapshot.take(f"{store.uri}/{n}", a, **k), 2) == 2


def test_one_thread_copies_and_one_writes(store, monkeypatch):
    monkeypatch.setattr(pack_writer, "_WRITERS", 4)
    writers, copiers = set[int](), set[int]()
    write, slot = store._view.repository.backend.write, staging.StagedCopies._slot

    def note_write(key, content):
        writers.add(threading.get_ident())
        return write(key, content)

    def note_copier(copies):
        copiers.add(threading.get_ident())
        return slot(copies)

    monkeypatch.setattr(store._view.repository.backend, "write", note_write)
    monkeypatch.setattr(staging.StagedCopies, "_slot", note_copier)
    snapshot = store.async_take(state(), "step", threads=1).wait()
    assert len(copiers) == 1
    # One for the packs of chunks, one for those of nodes, and the take itself for the segment.
    assert len(writers) <= 3
    assert snapshot.stats.new_bytes > 16 * (256 << 10)


@pytest.mark.parametrize("text", ["0", "two", "-1", "1.5"])
def test_a_variable_that_is_no_number(store, monkeypatch, text):
    monkeypatch.setenv("CASNAP_THREADS", text)
    with pytest.raises(StoreError, match="CASNAP_THREADS is"):
        Store(store.uri).make()
