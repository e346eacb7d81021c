"""Threads that cannot be started, memory that cannot be pinned: nothing that was held is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import UnavailableError, UnclearCommitError
from casnap.runtime.buffers import Pool
from casnap.runtime.threads import Worker, run_shielded
from casnap.storage import PutIfAbsent
from casnap.take import staging
from tests.support.faults import (
    CHUNK,
    app_state,
    assert_given_back,
    assert_holds,
    assert_store,
    faults,
    take,
)
from tests.support.unavailable import unavailable


def no_thread() -> None:
    raise RuntimeError("can't start new thread")


def async_take(store: Store, step: int) -> Snapshot:
    name, metadata = f"step_{step}", {"step": step}
    return store.async_take(app_state(step), name, metadata=metadata).wait()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)).make()
    take(store, 1)
    yield store
    assert_given_back()


def starts() -> list[tuple[int, bool]]:
    return [(k, lasting) for k in range(8) for lasting in (False, True)]


@pytest.mark.parametrize(("k", "lasting"), starts())
def test_a_thread_that_cannot_start(store: Store, k: int, lasting: bool) -> None:
    """The call says so; it has done nothing by halves, and the next one works."""

    def refused(call: Callable[[], object]) -> bool:
        with faults(threading.Thread, ["start"], k, no_thread, lasting=lasting) as starts:
            try:
                call()
            except UnclearCommitError:
                # The thread was to sync a root that stands already.
                return False
            except UnavailableError:
                assert starts.struck
                return True
            finally:
                assert_given_back()
        assert not starts.struck
        return False

    assert refused(lambda: take(store, 2)) != ("step_2" in store)
    assert refused(lambda: async_take(store, 3)) != ("step_3" in store)
    snapshot = store["step_1"]
    refused(lambda: assert_holds(snapshot, 1))
    assert refused(lambda: store.delete("step_1")) == ("step_1" in store)
    for call in (lambda: store.gc(grace=0), lambda: store.check(data=True), store.repair):
        refused(call)
    take(store, 4)
    async_take(store, 5)
    store.gc(grace=0)
    assert_store(store.uri, {int(s.name[5:]) for s in store.snapshots()})


@pytest.mark.parametrize("k", range(3))
def test_an_interrupt_inside_of_a_start_is_told_as_one(store: Store, k: int) -> None:
    """Then the lock of the condition that ``start`` waits for is given back twice."""

    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    with faults(threading.Thread, ["start"], k, interrupted), pytest.raises(KeyboardInterrupt):
        take(store, 2)
    assert_given_back()
    take(store, 3)
    assert_store(store.uri, {1, 3})


def test_threads_that_are_slow_to_end_have_ended_when_a_call_returns(store: Store) -> None:
    """A thread on a busy machine may stand between its last step and its end."""

    def wait_at_the_end(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is Worker.run.__code__:
            time.sleep(0.05)

    # Reported after the thread has said that its work is done.
    threading.setprofile(wait_at_the_end)
    try:
        take(store, 2)
        assert_given_back()
        async_take(store, 3)
        assert_given_back()
        with pytest.raises(ZeroDivisionError):
            run_shielded(lambda _: 1 // 0)
        assert_given_back()
    finally:
        threading.setprofile(None)


def test_async_takes_fail_and_then_work(store: Store) -> None:
    """The memory of each is found again: a bound on it would let the third one hang."""
    big = {"state": StateDict(x=torch.ones(100 << 20, dtype=torch.uint8))}
    for _ in range(3):
        calls = faults(threading.Thread, ["start"])
        with calls as counter:
            store.async_take(big, "counted", max_staging_bytes=1, overwrite=True).wait()
        assert counter.count > 2

        real = threading.Thread.start

        def refuse(thread: threading.Thread, real: Callable[..., None] = real) -> None:
            if thread.name == "casnap-async-take":
                no_thread()
            real(thread)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with unavailable("exhausted", match="no more threads"):
                store.async_take(big, "big", max_staging_bytes=1)
        assert_given_back()
    store.async_take(big, "big", max_staging_bytes=1).wait()
    store.delete("big")
    store.delete("counted")


def test_a_piece_that_cannot_be_given_back_keeps_no_other() -> None:
    pool = Pool(4096, 2)
    slots = [pool.take(), pool.take()]

    def fails() -> None:
        raise ZeroDivisionError("on purpose")

    pieces = [
        staging.Piece(0, 0, [1], slot.view, ready=fails, release=lambda s=slot: pool.release(s))
        for slot in slots
    ]
    with pytest.raises(ZeroDivisionError):
        staging.give_back(pieces)
    again = [pool.acquire(wait=False) for _ in slots]
    assert set(again) == set(slots)
    for slot in slots:
        pool.release(slot)


def test_a_slot_whose_copy_cannot_begin_goes_back() -> None:
    """There are four: if they were lost, the fifth copy would wait for ever."""
    source = torch.zeros(1, dtype=torch.uint8, device="meta")
    for _ in range(6):
        with pytest.raises(NotImplementedError):
            staging._from_device(staging.Piece(0, 0, [1], b"", on_device=source))


@pytest.mark.parametrize("k", range(3))
def test_a_race_for_which_a_thread_cannot_start(tmp_path: Path, k: int) -> None:
    """Those that have started do not wait for it for ever."""
    with (
        faults(threading.Thread, ["start"], k, no_thread),
        pytest.raises(UnavailableError, match="no more threads"),
    ):
        PutIfAbsent(LocalBackend(tmp_path)).has_one_winner(4, threads=4)
    assert_given_back()
    assert PutIfAbsent(LocalBackend(tmp_path)).has_one_winner(4, threads=4)
