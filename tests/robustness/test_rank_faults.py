"""One rank raises, dies or hangs, in each phase of each operation: what the others see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import casnap.storage.writing.session
from casnap import NewStore, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from tests.support.faults import CHUNK, assert_no_orphans, memory_folder
from tests.support.faulty import Call, Fault, FaultyBackend, fail
from tests.support.rank_cases import RANKS, Case, Place
from tests.support.rank_faults import (
    CAUSES,
    PHASES,
    SILENT,
    SLACK,
    all_results,
    run_case,
    saw,
    take_base,
)
from tests.support.ranks import World
from tests.support.yard import Seen, Yard, watch

pytestmark = pytest.mark.sampled

Worlds = Callable[[int], World]
TIMEOUT = 3.0
"""Seconds until a silent rank is given up; a whole one may be slow on a busy machine."""
LONG = 60.0
"""For faults that are noticed at once."""


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def base(world: Worlds, memory: Path) -> Path:
    """Return a store with one snapshot, taken by many ranks."""
    world(RANKS).run(take_base, str(memory / "base"))
    return memory / "base"


def call(phase: str, number: int = 0, how: str = "call") -> Place:
    return Place(how, phase, number)


TAKES = [
    # Before any rank has begun, and after all have ended.
    ("raise", 0, call("beginning a take")),
    ("kill", 0, Place("end")),
    ("raise", 1, Place("reading")),
    ("raise", 0, call("sharing out the work", 1)),
    ("kill", 1, call("sharing out the work", 1, how="inside")),
    # Parts of cells, questions, answers; hashing, writing.
    ("raise", 1, call("hashing and writing", 1)),
    ("kill", 0, call("hashing and writing", 2)),
    ("stop", 1, call("hashing and writing", 1, how="inside")),
    ("raise", 0, Place("progress", "", 1)),
    ("hang", 1, Place("progress")),
    ("raise", 1, Place("before", "write packs/*")),
    ("raise", 0, Place("after", "write packs/*", 1)),
    ("hang", 0, Place("before", "write packs/*")),
    ("raise", 0, call("assembling the manifest", 1)),
    ("kill", 1, call("assembling the manifest", 2)),
    # The commit id, what is handed over, and what rank 0 says of the root.
    ("raise", 1, call("committing", 0)),
    ("kill", 1, call("committing", 2)),
    ("raise", 0, call("committing", 2)),
    ("stop", 0, call("committing", 2)),
    ("raise", 1, Place("before", "sync")),
    ("kill", 1, Place("after", "sync")),
    ("raise", 0, Place("before", "put_if_absent roots/*")),
    ("raise", 0, Place("after", "put_if_absent roots/*")),
    ("kill", 0, Place("before", "put_if_absent roots/*")),
    ("kill", 0, Place("after", "put_if_absent roots/*")),
]
ASYNC_TAKES = [
    ("raise", 1, Place("reading")),
    ("raise", 0, call("hashing and writing", 1)),
    ("kill", 1, Place("before", "write packs/*")),
    ("stop", 0, call("assembling the manifest")),
    ("raise", 1, Place("before", "sync")),
    ("kill", 0, Place("before", "put_if_absent roots/*")),
]
RESTORES = [
    ("raise", 0, call("beginning a restore", 1)),
    ("kill", 1, call("beginning a restore")),
    ("raise", 1, Place("reading")),
    ("stop", 0, Place("reading")),
    ("raise", 1, call("reading", 2)),
    ("kill", 0, call("reading", 3, how="inside")),
    ("hang", 0, Place("before", "read_into")),
    ("raise", 0, Place("progress")),
    ("raise", 1, Place("loading")),
    ("kill", 0, Place("loading")),
    ("raise", 0, call("loading states")),
]
CASES = [
    Case(verb, place, kind, rank)
    for verb, some in (("take", TAKES), ("async_take", ASYNC_TAKES), ("restore", RESTORES))
    for kind, rank, place in some
]


@pytest.mark.parametrize(
    "case",
    # Every other one here; `make soak` has all places of all kinds.
    [
        pytest.param(case, marks=[pytest.mark.slow] * (i % 2), id=str(case))
        for i, case in enumerate(CASES)
    ],
)
def test_survivors_raise_in_time_and_nothing_is_lost(
    world: Worlds, base: Path, memory: Path, case: Case
) -> None:
    result = run_case(world, base, memory / "case", case, TIMEOUT if case.kind in SILENT else LONG)
    assert result.phase
    (seen,) = saw(case, result)
    if seen != "returned":
        assert "*r*" in seen


@pytest.mark.slow
@pytest.mark.parametrize("verb", PHASES)
@pytest.mark.parametrize("kind", CAUSES)
def test_all_places(world: Worlds, base: Path, memory: Path, verb: str, kind: str) -> None:
    phases = {
        result.phase
        for _, result in all_results(world, base, memory, 2.0, verbs=[verb], kinds=[kind])
    }
    assert phases == set(PHASES[verb]) or kind == "hang"


# --- in the background ------------------------------------------------------------------------


def state(step: int) -> dict[str, StateDict]:
    generator = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return {
        "equal": StateDict(x=torch.randn(90_000, generator=generator)),
        "mine": StateDict(x=torch.randn(50_000, generator=own), step=step),
    }


def assert_taken(snapshot: Snapshot, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    assert torch.equal(snapshot.read_object("0/equal/x"), torch.randn(90_000, generator=generator))
    for rank in range(snapshot.world_size):
        own = torch.Generator().manual_seed(100 * step + rank)
        found = snapshot.read_object(f"{rank}/mine/x")
        assert torch.equal(found, torch.randn(50_000, generator=own))


def fail_in_the_background(path: str) -> list[Seen]:
    """Have one rank's disk fail behind a first async take; the next call raises that everywhere."""
    backend = FaultyBackend(LocalBackend(Path(path)))
    store = Store(backend, create=NewStore(chunk_size=CHUNK))
    if dist.get_rank() == 1:
        backend.faults.append(Fault(fail(), "write", "packs/*"))
    first = store.async_take(state(1), "same")
    seen = [watch(lambda: store.async_take(state(2), "other"))]
    second = store.async_take(state(2), "other")
    seen += [watch(first.wait), watch(first.wait), watch(second.wait)]
    assert first.done()
    assert second.done()
    third = store.async_take(state(3), "same")
    seen.append(watch(third.wait))
    seen.append(watch(lambda: store.take(state(4), "last")))
    return [s._replace(value=None) for s in seen]


def test_a_failure_behind_reaches_all_who_wait(world: Worlds, tmp_path: Path) -> None:
    Store(tmp_path / "s", create=NewStore(chunk_size=CHUNK)).make()
    for rank, (call, first, once_more, *others) in enumerate(
        world(3).run(fail_in_the_background, str(tmp_path / "s"))
    ):
        assert call.error == first.error == once_more.error == "BackendError"
        assert "'same' was NOT stored" in call.text
        assert first.text == once_more.text
        assert ("rank 1: " in first.text) == (rank != 1)
        assert [seen.error for seen in others] == ["", "", ""]
    found = {s.name: s for s in Store(tmp_path / "s").snapshots()}
    assert list(found) == ["other", "same", "last"]
    for name, step in (("other", 2), ("same", 3), ("last", 4)):
        assert_taken(found[name], step)


# --- collectors -------------------------------------------------------------------------------


GONE = ("gone", "gone before rank 0 looks")
"""The collector has deleted the packs of all ranks."""


def take_while_collected(path: str, folder: str, verb: str, how: str, handed_over: int) -> Seen:
    """Take on ranks 0 to 2; once all is handed over, rank 3 raises the fence past all names.

    Args:
        path: The store.
        folder: Where ranks leave word.
        verb: What is done.
        how: ``moved``, if what was handed over is there still when it is moved; ``gone``, if
            it is not; ``one gone``, if only what rank 1 wrote is not.
        handed_over: How many records are handed over at most, rather than written.
    """
    yard, rank = Yard(folder), dist.get_rank()
    group = dist.new_group([0, 1, 2])
    backend = FaultyBackend(LocalBackend(Path(path)))
    store = Store(backend)
    if rank == 3:
        return collect(yard, store, backend, how)

    def own_packs(call: Call) -> object:
        yard.leave("packs", "\n".join(key for name, key in backend.log if name == "write"))
        return call.go()

    def have_collected(call: Call) -> object:
        yard.leave("handed over")
        yard.wait("collected" if how in GONE else "fenced")
        if how == "one gone":
            for key in yard.text("packs").splitlines():
                Path(path, "casnap-store", key).unlink()
        return call.go()

    if rank == 0 and how != "gone before rank 0 looks":
        backend.faults.append(Fault(have_collected, "put_if_absent", "roots/*"))
    if rank == 1 and how == "gone before rank 0 looks":
        backend.faults.append(Fault(have_collected, "sync"))
    if rank == 1 and how == "one gone":
        backend.faults.append(Fault(own_packs, "sync"))
    handover = casnap.storage.writing.session
    before, handover.MOST_RECORDS = handover.MOST_RECORDS, handed_over
    try:
        if verb == "take":
            seen = watch(lambda: store.take(state(1), "new", pg=group, timeout=60))
        else:
            pending = store.async_take(state(1), "new", pg=group, timeout=60)
            seen = watch(pending.wait)
    finally:
        handover.MOST_RECORDS = before
        yard.leave(f"over-{rank}")
    return seen._replace(value=[name for name, _ in backend.log].count("copy"))


def collect(yard: Yard, store: Store, backend: FaultyBackend, how: str) -> Seen:
    """Collect all that no root names, standing still before the first file is deleted."""

    def stand_still(call: Call) -> object:
        yard.leave("fenced")
        if how not in GONE:
            for rank in range(3):
                yard.wait(f"over-{rank}")
        return call.go()

    yard.wait("handed over")
    backend.faults.append(Fault(stand_still, "delete", times=None))
    # As where a file system has no locks: it sees no take under way.
    with mock.patch.object(LocalBackend, "announced_bases", return_value=[]):
        seen = watch(lambda: store.gc(grace=0))
    backend.faults.clear()
    yard.leave("collected")
    return seen._replace(value=None)


@pytest.mark.parametrize("handed_over", [0, 1 << 16])
@pytest.mark.parametrize("how", ["moved", "one gone", *GONE])
@pytest.mark.parametrize("verb", ["take", "async_take"])
def test_a_collector_goes_past_what_was_handed_over(
    world: Worlds, tmp_path: Path, verb: str, how: str, handed_over: int
) -> None:
    store = Store(tmp_path / "s", create=NewStore(chunk_size=CHUNK))
    store.take({"old": StateDict(x=torch.randn(50_000))}, "old")
    outcomes = world(4).run(
        take_while_collected, str(tmp_path / "s"), str(tmp_path / "yard"), verb, how, handed_over
    )
    # What is gone is taken again, all of it by all ranks: from the state, or from its copies.
    for seen in outcomes[:3]:
        assert seen.error == "", seen
        assert how != "moved" or seen.value > 0
    assert outcomes[3].error == ""
    assert [s.name for s in store.snapshots()] == ["old", "new"]
    assert_taken(store["new"], 1)
    store.gc(grace=0)
    assert_no_orphans(tmp_path / "s")
    assert store.check(data=True).ok


def hand_over_late(path: str, folder: str) -> Seen:
    """Rank 0 stands still before it puts the root, until all others have given up on it."""
    yard, rank = Yard(folder), dist.get_rank()
    backend = FaultyBackend(LocalBackend(Path(path)))
    store = Store(backend)

    def stand_still(call: Call) -> object:
        yard.wait("over-1")
        yard.wait("over-2")
        return call.go()

    if rank == 0:
        backend.faults.append(Fault(stand_still, "write", "index/*"))
    seen = watch(lambda: store.take(state(1), "new", timeout=TIMEOUT))
    yard.leave(f"over-{rank}")
    return seen._replace(value=None)


def test_a_rank_that_all_gave_up_on_commits_nothing(world: Worlds, tmp_path: Path) -> None:
    store = Store(tmp_path / "s", create=NewStore(chunk_size=CHUNK))
    outcomes = world(3).run(hand_over_late, str(tmp_path / "s"), str(tmp_path / "yard"))
    for seen in outcomes:
        assert seen.error == "RankError"
        assert seen.ranks == (0,)
        assert "rank 0 did not answer within" in seen.text
        assert seen.seconds < TIMEOUT + SLACK
    assert list(store.snapshots()) == []
