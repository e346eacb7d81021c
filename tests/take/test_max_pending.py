"""Several takes pending at once: each holds the state of its call, and commits in its turn."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from casnap import NewStore, StateDict, Store, on_preemption
from casnap.errors import BackendError, RankError, SnapshotExistsError, StateError
from casnap.ranks.group import Group
from casnap.runtime.buffers import Pool
from casnap.take import staging
from casnap.take.pending import PendingTake, wait_for_last
from tests.support.bitwise import assert_same
from tests.support.gates import Gate
from tests.support.remote import RemoteDouble

SIZE = 150_000


def begin(store, x, name, **options):
    """Begin a take of a tensor, then write over it."""
    pending = store.async_take({"s": StateDict(x=x)}, name, **{"max_pending": 2, **options})
    x.fill_(-1)
    return pending


def numbers(first=0):
    return torch.arange(first, first + SIZE)


def test_a_second_take_begins_while_the_first_is_pending(store):
    gate = Gate(store)
    pending = [begin(store, numbers(i), f"step_{i}") for i in range(2)]
    assert not any(p.done() for p in pending)
    third = threading.Thread(target=lambda: pending.append(begin(store, numbers(2), "step_2")))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    gate.open.set()
    third.join()
    snapshots = [p.wait() for p in pending]
    assert [s.name for s in store.snapshots()] == ["step_0", "step_1", "step_2"]
    assert [s.seq for s in snapshots] == sorted(s.seq for s in snapshots)
    for i, snapshot in enumerate(snapshots):
        assert_same(snapshot.read_object("0/s/x"), numbers(i))


def test_what_the_first_has_stored_is_not_stored_again(store):
    gate = Gate(store)
    first, second = [begin(store, numbers(), name) for name in ("a", "b")]
    gate.open.set()
    assert first.wait().stats.new_bytes > 8 * SIZE
    assert second.wait().stats.new_bytes < SIZE


def test_each_counts_its_own_requests(tmp_path):
    store = Store(RemoteDouble(str(tmp_path)), create=NewStore(chunk_size=64 << 10)).make()
    gate = Gate(store)
    pending = [begin(store, numbers(i), f"step_{i}") for i in range(2)]
    gate.open.set()
    counts = [sum(p.wait().requests.values()) for p in pending]
    alone = sum(begin(store, numbers(2), "alone").wait().requests.values())
    assert abs(counts[1] - alone) <= 2, (counts, alone)


@pytest.mark.parametrize("overwrite", [False, True])
def test_both_have_one_name(store, overwrite):
    gate = Gate(store)
    first, second = [begin(store, numbers(i), "a", overwrite=overwrite) for i in range(2)]
    gate.open.set()
    first.wait()
    if overwrite:
        second.wait()
    else:
        with pytest.raises(SnapshotExistsError):
            second.wait()
    assert_same(store["a"].read_object("0/s/x"), numbers(int(overwrite)))


def test_the_second_goes_on_if_the_first_fails(store):
    gate = Gate(store, [BackendError("on purpose")])
    first, second = [begin(store, numbers(i), name) for i, name in enumerate("ab")]
    gate.open.set()
    with pytest.raises(BackendError, match=r"'a' was NOT stored.*on purpose.*'b' is stored"):
        second.wait()
    assert_same(second.wait().read_object("0/s/x"), numbers(1))
    with pytest.raises(BackendError, match="on purpose"):
        first.wait()
    assert [s.name for s in store.snapshots()] == ["b"]


def test_takes_and_preemption_wait_for_all(store, tmp_path):
    mirrored = Store(store.uri, mirror=tmp_path / "mirror")
    gate = Gate(mirrored)
    with on_preemption(mirrored, {"s": StateDict(x=1)}, within=60) as preemption:
        for i in range(2):
            begin(mirrored, numbers(i), f"step_{i}")
        threading.Timer(0.1, gate.open.set).start()
        preemption._hear(15, None)
        assert preemption.step(7)
    begin(mirrored, numbers(), "more")
    mirrored.take({"s": StateDict(x=2)}, "last")
    names = ["step_0", "step_1", "preempted_7", "more", "last"]
    assert [s.name for s in mirrored.snapshots()] == names
    mirrored.wait_mirrored()
    assert [s.name for s in Store(tmp_path / "mirror").snapshots()] == names
    mirrored.mirror.stop()


def test_all_pending_takes_share_the_memory_for_copies(store, monkeypatch):
    """With a bound, the second take waits for memory; without, each has a copy of its state."""
    pool = Pool(256 << 10, None)
    monkeypatch.setattr(staging, "_block_pool", pool)
    monkeypatch.setattr(staging, "_BLOCK_BYTES", pool.slot_bytes)
    monkeypatch.setattr(staging, "PIECE_BYTES", 64 << 10)
    monkeypatch.setattr(staging, "cores", lambda: 1)
    nbytes = 8 * SIZE
    hashing = threading.Event()

    def two(seconds, **options):
        hashing.clear()
        options["progress"] = lambda *_: hashing.wait(60)
        pending = [begin(store, numbers(), "a", overwrite=True, **options)]
        second = threading.Thread(
            target=lambda: pending.append(begin(store, numbers(1), "b", overwrite=True, **options))
        )
        second.start()
        second.join(seconds)
        waits = second.is_alive()
        hashing.set()
        second.join()
        for i, take in enumerate(pending):
            assert_same(take.wait().read_object("0/s/x"), numbers(i))
        return waits

    assert two(0.2, max_staging_bytes=nbytes + nbytes // 2)
    assert pool._made * pool.slot_bytes <= nbytes + nbytes // 2
    assert not two(30)
    assert 2 * nbytes <= pool._made * pool.slot_bytes < 2 * nbytes + 3 * pool.slot_bytes


# --- many ranks -------------------------------------------------------------------------------


def overlapping(uri: str) -> list[int]:
    store, rank = Store(uri), dist.get_rank()
    before = store.take({"s": StateDict(x=numbers(rank))}, "before")
    gate = Gate(store)
    pending = [begin(store, numbers(10 * i + rank), f"step_{i}") for i in range(2)]
    # A restore that all ranks make together does not wait for the takes, nor they for it.
    target = StateDict(x=numbers(7))
    before.restore({"s": target}, read_once=True)
    assert_same(target["x"], numbers(rank))
    assert not any(p.done() for p in pending)
    # The first of them has nothing new: once a rank lets it go on, it may be done on all.
    dist.barrier()
    gate.open.set()
    pending.append(begin(store, numbers(20 + rank), "step_2"))
    pending.append(begin(store, numbers(30 + rank), "alone", max_pending=1))
    return [p.wait().seq for p in pending]


def failing(uri: str) -> list[str]:
    """Return what becomes of four takes: of the first on rank 1, and of two more."""
    store, rank = Store(uri), dist.get_rank()
    gate = Gate(store, [BackendError("on purpose")] if rank == 1 else [])
    pending = [begin(store, numbers(rank), "a"), begin(store, numbers(10 + rank), "b")]
    gate.open.set()
    ends = []
    for take in pending:
        try:
            ends.append(take.wait().name)
        except (BackendError, RankError) as e:
            ends.append(f"{type(e).__name__} {'on purpose' in str(e)}")

    class Failing(StateDict):
        def state_dict(self) -> dict[str, Any]:
            raise ZeroDivisionError("on purpose")

    pending = [begin(store, numbers(20 + rank), "c")]
    with pytest.raises((ZeroDivisionError, RankError), match="on purpose"):
        store.async_take({"s": (Failing if rank else StateDict)(x=1)}, "d", max_pending=2)
    copy = staging.StagedCopies._copy
    if rank == 1:
        staging.StagedCopies._copy = lambda *_: 1 // 0  # type: ignore[method-assign]
    try:
        begin(store, numbers(30 + rank), "e").wait()
    except (ZeroDivisionError, RankError) as e:
        ends.append(f"e {'zero' in str(e)}")
    finally:
        staging.StagedCopies._copy = copy  # type: ignore[method-assign]
    with pytest.raises(StateError, match="the option max_pending="):
        begin(store, numbers(), "f", max_pending=1 + rank)
    pending.append(begin(store, numbers(40 + rank), "g"))
    return [*ends, *(take.wait().name for take in pending)]


def failing_in_line(uri: str) -> list[str]:
    """Return what becomes of four takes, of which the third fails at its call on rank 1."""
    store, rank = Store(uri), dist.get_rank()
    gate = Gate(store)
    line = [begin(store, numbers(10 * i + rank), f"step_{i}", max_pending=4) for i in range(2)]
    if rank == 0:
        line.append(begin(store, numbers(20), "step_2", max_pending=4))
    else:
        with (
            mock.patch.object(staging.StagedCopies, "_copy", side_effect=ZeroDivisionError),
            pytest.raises(ZeroDivisionError),
        ):
            begin(store, numbers(21), "step_2", max_pending=4)
    line.append(begin(store, numbers(30 + rank), "step_3", max_pending=4))
    gate.open.set()
    ends = []
    for take in line:
        try:
            ends.append(take.wait().name)
        except RankError as e:
            ends.append(str(e))
    return ends


def never_waiting(uri: str) -> list[str]:
    """Return which calls raised what, in a loop without a wait; the first take fails on rank 1."""
    store, rank, ends = Store(uri), dist.get_rank(), []
    gate = Gate(store, [BackendError("on purpose")] if rank == 1 else [])
    gate.open.set()
    for i, most in enumerate((1, 1, 1, 2, 2, 2)):
        if i == 3 and rank == 0 and wait_for_last():
            gate.errors = iter([BackendError("on purpose")])
        try:
            begin(store, numbers(10 * i + rank), f"step_{i}", max_pending=most)
        except (BackendError, RankError) as e:
            ends.append(f"{i} {'NOT stored' in str(e)} {'on purpose' in str(e)}")
    store.take({"s": StateDict(x=1)}, "last")
    return ends


def skipping(uri: str) -> list[str]:
    """Return how two takes end on this rank, if the call of the first fails on rank 1, untold."""
    store, rank = Store(uri), dist.get_rank()
    line = []
    if rank == 0:
        line.append(begin(store, numbers(), "step_0", timeout=60))
    else:
        with (
            mock.patch.object(staging.StagedCopies, "_copy", side_effect=ZeroDivisionError),
            mock.patch.object(PendingTake, "start"),
            pytest.raises(ZeroDivisionError),
        ):
            begin(store, numbers(), "step_0", timeout=60)
    # That of rank 0 is the one that no other rank comes to.
    line.append(begin(store, numbers(10), "step_1", timeout=60 if rank else 3))
    ends = []
    for take in line:
        with pytest.raises((StateError, RankError)) as e:
            take.wait()
        ends.append(str(e.value))
    return ends


def dying(uri: str, takes: int, early: bool) -> list[str]:
    """Return how takes end on rank 0, if rank 1 dies while they are pending.

    Args:
        uri: The store.
        takes: How many there are.
        early: Whether it dies before the ranks have met in the background.
    """
    store, both = Store(uri), Path(uri, "casnap-store/tmp", "both pending")
    gate = Gate(store)
    if dist.get_rank() and early:
        Group.background = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign,return-value]
    pending = [begin(store, numbers(i), f"step_{i}") for i in range(takes)]
    if dist.get_rank():
        while not both.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    both.touch()
    gate.open.set()
    ends = []
    for take in pending:
        with pytest.raises(RankError) as e:
            take.wait()
        ends.append(str(e.value))
    return ends


def test_ranks_take_while_they_store(world, store):
    first, second = world(2).run(overlapping, store.uri)
    assert first == second == sorted(first)
    for i, name in enumerate(("step_0", "step_1", "step_2", "alone")):
        for rank in range(2):
            assert_same(store[name].read_object(f"{rank}/s/x"), numbers(10 * i + rank))


def test_ranks_stay_in_step_after_failures(world, store):
    ends = world(2).run(failing, store.uri)
    assert [e[1:] for e in ends] == [["b", "e True", "c", "g"]] * 2
    assert all(e[0].endswith("True") for e in ends)
    assert [s.name for s in store.snapshots()] == ["b", "c", "g"]


def test_ranks_raise_alike_what_no_wait_has_told(world, store):
    first, second = world(2).run(never_waiting, store.uri)
    assert first == second == ["1 True True", "5 True True"]
    assert [s.name for s in store.snapshots()] == ["step_2", "step_4", "last"]


def test_a_call_that_fails_waits_for_its_turn_to_tell(world, store):
    first, second = world(2).run(failing_in_line, store.uri)
    assert "ZeroDivisionError" in first.pop(2)
    assert first == second == ["step_0", "step_1", "step_3"]
    for i, name in enumerate(("step_0", "step_1", "", "step_3")):
        for rank in range(2 if name else 0):
            assert_same(store[name].read_object(f"{rank}/s/x"), numbers(10 * i + rank))


def test_different_takes_are_never_taken_for_one(world, store):
    """As where a second interrupt keeps a rank from telling that its call has failed."""
    first, second = world(2).run(skipping, store.uri)
    assert "rank 1 came to the async_take of 'step_1' meanwhile" in first[0]
    assert "rank 0 came to the async_take of 'step_0' meanwhile" in second[0]
    assert store.snapshots() == []


@pytest.mark.parametrize(("takes", "early"), [(2, False), (1, True)])
def test_a_rank_that_dies_ends_what_is_pending(world, store, takes, early):
    (told, _) = world(2).run(dying, store.uri, takes, early, expect_errors=True)
    assert all("rank 1 died" in text for text in told), told
    assert store.snapshots() == []
