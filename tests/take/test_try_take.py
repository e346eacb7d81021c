"""``try_take``: a fault of the storage is a warning, and the run goes on; no other error is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import (
    BackendError,
    CasnapError,
    DamagedError,
    FencedError,
    InvalidNameError,
    RankError,
    SnapshotExistsError,
    StateError,
    StorageFullError,
    StoreError,
    UnavailableError,
    UnsupportedTypeError,
)
from tests.support.gates import Gate
from tests.support.heard import warnings_heard
from tests.support.mounts import tmpfs
from tests.support.ranks import Worlds

MB = 1 << 20


def state(number: int, nbytes: int = MB) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {"s": StateDict(x=torch.rand(nbytes // 4, generator=generator), number=number)}


def sync(store: Store, *args: Any, **options: Any) -> Snapshot | None:
    return store.try_take(*args, **options)


def in_background(store: Store, *args: Any, **options: Any) -> Snapshot | None:
    pending = store.try_async_take(*args, **options)
    snapshot = pending.wait()
    assert pending.done()
    assert (pending.error is None) == (snapshot is not None)
    assert pending.path == store.path_of(args[1])
    return snapshot


HOW = pytest.mark.parametrize("how", [sync, in_background])


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what returns the warnings since it was called last; no error may be logged."""

    def since() -> list[str]:
        texts = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert all(r.levelno <= logging.WARNING for r in caplog.records)
        caplog.clear()
        return texts

    return since


def broken(store: Store, error: BaseException) -> Callable[[], None]:
    """Have all writes of a store fail; return what mends it."""
    backend = store._view.repository.backend
    gate = Gate(store, repeat(error))  # type: ignore[arg-type]
    gate.open.set()

    def mend() -> None:
        del backend.write

    return mend


@HOW
def test_a_loop_on_a_full_disk_goes_on(tmp_path: Path, how: Any, warnings: Any) -> None:
    with tmpfs(tmp_path / "disk", "12m") as disk:
        store = Store(disk / "run")
        assert how(store, state(0), "step_0") is not None
        assert warnings() == []
        full = disk / "full"
        with full.open("wb", buffering=0) as f, suppress(OSError):
            while True:
                f.write(bytes(64 << 10))
        for step in (1, 2):
            assert how(store, state(step), f"step_{step}") is None
            [text] = warnings()
            assert text.startswith(f"the snapshot {store.uri}/step_{step} was NOT stored; ")
            assert "the run goes on: StorageFullError: " in text
        full.unlink()
        snapshot = how(store, state(3), "step_3")
        [text] = warnings()
        assert f"{store.uri}/step_3 is stored; 2 before it failed since 20" in text
        assert "the last with StorageFullError: " in text
        how(store, state(4), "step_4")
        assert warnings() == []
        assert [s.name for s in store.snapshots()] == ["step_0", "step_3", "step_4"]
        assert snapshot.read_object("s/number") == 3


@HOW
@pytest.mark.parametrize(
    "error",
    [UnavailableError("away", "unreachable"), DamagedError("rotten"), FencedError("faster")],
    ids=lambda error: type(error).__name__,
)
def test_faults_of_the_storage(tmp_path: Path, how: Any, error: CasnapError, warnings: Any) -> None:
    store = Store(tmp_path / "run").make()
    mend = broken(store, error)
    assert how(store, state(1), "step_1") is None
    mend()
    [text] = warnings()
    assert f"step_1 was NOT stored; the run goes on: {type(error).__name__}" in text
    assert how(store, state(1), "step_1") is not None
    assert "1 before it failed" in warnings()[0]


def test_of_a_store_that_cannot_be_made(tmp_path: Path, warnings: Any) -> None:
    """The first take makes the store, so that is a part of it."""
    with tmpfs(tmp_path / "disk", "4m") as disk:
        full = disk / "full"
        with full.open("wb", buffering=0) as f, suppress(OSError):
            while True:
                f.write(bytes(4 << 10))
        store = Store(disk / "run")
        pending = store.try_async_take(state(1), "step_1")
        assert isinstance(pending.error, StorageFullError)
        assert pending.done()
        assert pending.wait() is None
        assert pending.path == str(disk / "run/step_1")
        assert store.try_take(state(2), "step_2") is None
        assert len(warnings()) == 2
        full.unlink()
        assert store.try_take(state(3), "step_3") is not None
        assert "2 before it failed" in warnings()[0]


@HOW
def test_errors_of_the_program_are_raised(tmp_path: Path, how: Any) -> None:
    store = Store(tmp_path / "run")
    with pytest.raises(UnsupportedTypeError):
        how(store, {"s": StateDict(x=object())}, "step_1")
    with pytest.raises(InvalidNameError):
        how(store, state(1), "a//b")
    how(store, state(1), "step_1")
    with pytest.raises(SnapshotExistsError):
        how(store, state(1), "step_1")


@pytest.mark.parametrize(
    ("how", "interrupt"), [(sync, KeyboardInterrupt), (in_background, SystemExit)]
)
def test_interrupts_are_raised(tmp_path: Path, how: Any, interrupt: Any) -> None:
    store = Store(tmp_path / "run").make()
    mend = broken(store, interrupt())
    with pytest.raises(interrupt):
        how(store, state(1), "step_1")
    mend()
    assert how(store, state(1), "step_1") is not None


@HOW
def test_an_error_that_is_to_be_raised_stays_so(tmp_path: Path, how: Any, warnings: Any) -> None:
    """A ``try_take`` neither swallows nor raises that of an earlier ``async_take``."""
    store = Store(tmp_path / "run").make()
    mend = broken(store, UnavailableError("away"))
    strict = store.async_take(state(1), "step_1")
    while not strict.done():
        pass
    mend()
    assert how(store, state(2), "step_2") is not None
    assert isinstance(strict.error, UnavailableError)
    with pytest.raises(UnavailableError, match="earlier, the snapshot 'step_1' was NOT stored"):
        store.take(state(3), "step_3")
    with pytest.raises(UnavailableError, match="away"):
        strict.wait()


# --- ranks --------------------------------------------------------------------------------------


def loop_of_a_rank(folder: str, how: Any, failing: int) -> tuple[list[bool], list[str]]:
    """Take three times; the storage of one rank fails in the second take, one that writes."""
    store = Store(folder, create=NewStore(chunk_size=64 << 10)).make()
    rank, stored = dist.get_rank(), list[bool]()
    with warnings_heard() as texts:
        for step in range(3):
            mend = None
            if rank == failing and step == 1:
                mend = broken(store, UnavailableError("away", "unreachable"))
            live = {"s": StateDict(x=torch.rand(MB), rank=rank)}
            stored.append(how(store, live, f"step_{step}") is not None)
            if mend is not None:
                mend()
    return stored, texts


@pytest.mark.parametrize(("how", "failing"), [(sync, 1), (in_background, 0)])
def test_ranks_agree(tmp_path: Path, world: Worlds, how: Any, failing: int) -> None:
    """Where the storage of one rank fails, each rank warns, and all go on."""
    folder = str(tmp_path / "run")
    results = world(2).run(loop_of_a_rank, folder, how, failing)
    for rank, (stored, texts) in enumerate(results):
        prefix = "" if rank == failing else f"rank {failing}: "
        assert stored == [True, False, True]
        assert f": UnavailableError: {prefix}away" in texts[0]
        assert [t.split(" ")[2] for t in texts] == [f"{folder}/step_1", f"{folder}/step_2"]
        assert "1 before it failed" in texts[1]
    assert [s.name for s in Store(folder).snapshots()] == ["step_0", "step_2"]


def interrupted_rank(folder: str) -> None:
    store = Store(folder, create=NewStore(chunk_size=64 << 10)).make()
    if dist.get_rank() == 1:
        broken(store, KeyboardInterrupt())
    live = {"s": StateDict(x=torch.rand(MB), rank=dist.get_rank())}
    store.try_take(live, "step_1")


def test_an_interrupt_on_one_rank_is_raised_on_all(tmp_path: Path, world: Worlds) -> None:
    outcomes = world(2).run(interrupted_rank, str(tmp_path / "run"), expect_errors=True)
    assert [type(outcome) for outcome in outcomes] == [RankError, KeyboardInterrupt]
    assert "rank 1 failed: KeyboardInterrupt" in str(outcomes[0])


@HOW
def test_a_place_where_no_store_can_be_made_is_an_error(
    tmp_path: Path, how: Callable[..., Any], warnings: Callable[[], list[str]]
) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file/store", "/proc/store"):
        with pytest.raises(StoreError):
            how(Store(place), state(1), "step_1")
    assert warnings() == []


class Reading(StateDict):
    """A state that reads from a storage of its own, which fails."""

    def state_dict(self) -> dict[str, Any]:
        raise BackendError("my own disk fails")


@HOW
def test_a_storage_of_the_users_own_is_not_that_of_the_take(
    store: Store, how: Callable[..., Any]
) -> None:
    with pytest.raises(StateError, match=r"state_dict\(\) of 'mine' raised BackendError: my own"):
        how(store, {**state(1), "mine": Reading()}, "step_1")


def other_verb_on_rank_1(path: str) -> str:
    store = Store(path)
    begin: Any = store.async_take if dist.get_rank() else store.try_async_take
    with pytest.raises((StateError, RankError)) as caught:
        begin(state(1), "step_1").wait()
    return str(caught.value)


def test_ranks_that_call_other_verbs_are_told_which(tmp_path: Path, world: Worlds) -> None:
    told = "the same on all ranks: try_take or try_async_take on rank 0, take or async_take on rank"
    for error in world(2).run(other_verb_on_rank_1, str(tmp_path)):
        assert told in error
