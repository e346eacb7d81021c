"""The root of a take is put, or perhaps put, and then something fails: nobody says it is not there.

The same take again is content, whatever became of the first one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import SnapshotExistsError, UnclearCommitError
from tests.support.faulty import Act, Call, Fault, FaultyBackend, fail, lose_answer
from tests.support.heard import warnings_heard
from tests.support.ranks import Worlds


def state(number: int) -> dict[str, Any]:
    return {"s": StateDict(x=torch.full((1000,), float(number)), number=number)}


def then(*faults: Fault, act: Act = lambda call: call.go()) -> Act:
    """Do a call, as ``act`` does it; from then on there are these faults."""

    def put(call: Call) -> object:
        call.backend.faults += faults
        return act(call)

    return put


UNCLEAR: dict[str, Callable[[], Act]] = {
    "its sync fails": lambda: then(Fault(fail(), "sync")),
    "no answer, and it cannot be read": lambda: then(
        Fault(fail(), "read", "roots/*", times=2), act=lose_answer()
    ),
}


def unclear(backend: FaultyBackend, how: str) -> None:
    """Have the next root be put, without its writer learning whether it lasts."""
    backend.faults.append(Fault(UNCLEAR[how](), "put_if_absent", "roots/*"))


def store_at(folder: Path | str) -> tuple[FaultyBackend, Store]:
    backend = FaultyBackend(LocalBackend(Path(folder)))
    return backend, Store(backend, create=NewStore(chunk_size=64 << 10)).make()


@pytest.mark.parametrize("how", UNCLEAR)
@pytest.mark.parametrize("in_background", [False, True])
def test_a_loop_that_goes_on(
    tmp_path: Path, how: str, in_background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backend, store = store_at(tmp_path)

    def take(number: int) -> Snapshot | None:
        if in_background:
            return store.try_async_take(state(number), "step_1").wait()
        return store.try_take(state(number), "step_1")

    unclear(backend, how)
    with caplog.at_level(logging.WARNING, "casnap"):
        snapshot = take(1)
    assert snapshot is None
    [text] = caplog.messages
    assert "NOT stored" not in text
    assert f"it is not known whether the snapshot {store.uri}/step_1 is stored; the run" in text
    assert "UnclearCommitError: " in text
    assert store["step_1"].read_object("s/number") == 1
    snapshot = take(2)
    assert snapshot is not None
    assert store["step_1"].commit_id == snapshot.commit_id
    assert snapshot.read_object("s/number") == 2
    assert snapshot.read_object("s/x").tolist() == [2.0] * 1000
    with pytest.raises(SnapshotExistsError):
        take(3)


@pytest.mark.parametrize("how", UNCLEAR)
def test_a_program_that_tries_again(tmp_path: Path, how: str) -> None:
    backend, store = store_at(tmp_path)
    unclear(backend, how)
    with pytest.raises(UnclearCommitError):
        store.take(state(1), "step_1")
    # Another store of this process, as Snapshot.take(path) opens one for each take.
    again = Snapshot.take(tmp_path / "step_1", state(1))
    assert [s.commit_id for s in store.snapshots()] == [again.commit_id]


def test_an_interrupt_after_the_commit(tmp_path: Path) -> None:
    """A cell of a notebook that was interrupted late can be run again."""
    backend, store = store_at(tmp_path)
    backend.faults.append(Fault(fail(KeyboardInterrupt), "mark"))
    with pytest.raises(KeyboardInterrupt):
        store.take(state(1), "step_1")
    assert "step_1" in store
    assert store.take(state(1), "step_1").commit_id == store["step_1"].commit_id


def test_what_another_process_took_meanwhile_stays(tmp_path: Path) -> None:
    backend, store = store_at(tmp_path)
    unclear(backend, "its sync fails")
    assert store.try_take(state(1), "step_1") is None
    store.delete("step_1")
    other = Store(tmp_path).take(state(7), "step_1")
    with pytest.raises(SnapshotExistsError):
        store.try_take(state(1), "step_1")
    assert store["step_1"].commit_id == other.commit_id


def test_a_tag_protects_it(tmp_path: Path) -> None:
    """Who tagged it has seen that it is there."""
    backend, store = store_at(tmp_path)
    unclear(backend, "its sync fails")
    assert store.try_take(state(1), "step_1") is None
    store.tag("step_1", "best")
    with pytest.raises(SnapshotExistsError, match="tagged"):
        store.try_take(state(1), "step_1")


def loop_of_a_rank(folder: str) -> tuple[list[bool], list[str]]:
    backend, store = store_at(folder)
    stored: list[bool] = []
    with warnings_heard() as texts:
        for _ in range(2):
            if dist.get_rank() == 0 and not stored:
                unclear(backend, "its sync fails")
            live = {"s": StateDict(x=torch.rand(100_000), rank=dist.get_rank())}
            stored.append(store.try_take(live, "step_1") is not None)
    return stored, texts


def test_all_ranks_are_told_the_same(tmp_path: Path, world: Worlds) -> None:
    Store(tmp_path, create=NewStore(chunk_size=64 << 10)).make()
    for stored, texts in world(2).run(loop_of_a_rank, str(tmp_path)):
        assert stored == [False, True]
        assert "it is not known whether the snapshot" in texts[0]
        assert "is stored; 1 before it failed" in texts[1]
    [snapshot] = Store(tmp_path).snapshots()
    assert [snapshot.read_object(f"{rank}/s/rank") for rank in range(2)] == [0, 1]
