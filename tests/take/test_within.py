"""A take within another call of the same thread is refused at once, or works."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import NewStore, Snapshot, StateDict, Store, release_memory
from casnap.errors import CasnapError
from casnap.runtime import buffers
from casnap.runtime.threads import cores
from casnap.take import staging
from tests.support.faults import CHUNK, app_state, assert_store, backend_faults, in_child, take

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


NESTED = "within another call of casnap"
HANDLED = threading.Event()
"""Set by a handler of SIGTERM when it begins."""


class Last:
    """A handler of SIGTERM that takes, and notes the result."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.refused: list[CasnapError] = []
        self.taken: list[Snapshot] = []
        signal.signal(signal.SIGTERM, self)

    def __call__(self, *_: object) -> None:
        HANDLED.set()
        step = 100 + len(self.taken)
        try:
            self.taken.append(take(self._store, step))
        except CasnapError as e:
            self.refused.append(e)


def terminate() -> None:
    """Send this process a SIGTERM, and wait until the main thread is in its handler."""
    HANDLED.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    HANDLED.wait(30)


class Terminated(StateDict):
    """A state that gets a SIGTERM while it is read."""

    def state_dict(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().state_dict()


def within(tmp_path: Path, work: Callable[[Store], object]) -> None:
    """Work in a child that gets a SIGTERM meanwhile; a take in the handler must be refused."""

    def child() -> None:
        store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
        take(store, 1)
        last = Last(store)
        work(store)
        assert last.refused, "no signal came"
        assert not last.taken
        assert "only set a flag" in str(last.refused[0])
        take(store, 3)
        steps = {s.metadata.user["step"] for s in store.snapshots()}
        assert_store(store.uri, steps)
        assert steps >= {1, 3}

    assert in_child(child) == 0


@pytest.mark.parametrize("verb", ["take", "async_take"])
def test_while_a_state_is_read(tmp_path: Path, verb: str) -> None:
    state = {"state": Terminated(app_state(2)["state"])}

    def work(store: Store) -> None:
        taken = getattr(store, verb)(state, "step_2", metadata={"step": 2})
        (taken.wait() if verb == "async_take" else taken)

    within(tmp_path, work)


def test_while_chunks_are_written(tmp_path: Path) -> None:
    def work(store: Store) -> None:
        with backend_faults(0, terminate, names=["write"]):
            take(store, 2)

    within(tmp_path, work)


def test_while_a_state_is_copied(tmp_path: Path) -> None:
    """The state exceeds the staging memory, so the call waits while parts are stored."""

    def work(store: Store) -> None:
        staging._BLOCK_BYTES = staging._block_pool.slot_bytes = staging.PIECE_BYTES
        blocks = 2 * cores() + 1
        big = {"state": StateDict(x=torch.ones(blocks * staging.PIECE_BYTES, dtype=torch.uint8))}
        told: list[int] = []

        def progress(_what: str, done: int, _total: int) -> None:
            told.append(done)
            if len(told) == 1:
                terminate()

        store.async_take(big, "big", max_staging_bytes=1, progress=progress).wait()
        store.delete("big")

    within(tmp_path, work)


@pytest.mark.parametrize("verb", ["restore", "read_object", "snapshots", "gc"])
def test_while_something_else_is_done(tmp_path: Path, verb: str) -> None:
    def work(store: Store) -> None:
        snapshot = store["step_1"]
        with backend_faults(0, terminate, names=["read", "read_into", "names"]):
            if verb == "restore":
                snapshot.restore(app_state(2))
            elif verb == "read_object":
                snapshot.read_object("state/weight")
            else:
                getattr(Store(store.uri), verb)()

    within(tmp_path, work)


def test_while_memory_is_given_back(tmp_path: Path) -> None:
    class Counted(list[Any]):
        def __len__(self) -> int:
            terminate()
            return super().__len__()

    def work(store: Store) -> None:
        pool = buffers.shared_pool(1)
        pool._free = Counted(pool._free)
        assert release_memory() > 0

    within(tmp_path, work)


def test_from_progress(tmp_path: Path) -> None:
    """``progress`` runs on a thread that works for the take."""
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))

    def progress(_what: str, done: int, _total: int) -> None:
        take(store, 100)

    with pytest.raises(CasnapError, match=NESTED):
        take(store, 1, progress=progress)
    pending = store.async_take(app_state(2), "step_2", metadata={"step": 2}, progress=progress)
    with pytest.raises(CasnapError, match=NESTED):
        pending.wait()
    with pytest.raises(CasnapError, match=NESTED):
        take(store, 3).restore(app_state(4), progress=progress)
    assert_store(store.uri, {3})


def test_from_a_state_dict(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))

    class Nested(StateDict):
        def state_dict(self) -> dict[str, Any]:
            take(store, 100)
            return super().state_dict()

    for verb in (store.take, store.async_take):
        with pytest.raises(CasnapError, match=NESTED):
            verb({"state": Nested(x=1)}, "step")
    take(store, 1)
    assert_store(store.uri, {1})


def test_a_state_may_be_read_from_another_snapshot(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    first = take(store, 1)

    class Copied(StateDict):
        def state_dict(self) -> dict[str, Any]:
            return first.get_state_dict_for_key("state")

    store.take({"state": Copied()}, "step_2")
    assert store["step_2"].read_object("state/step") == 1


def test_while_a_pending_take_is_waited_for(tmp_path: Path) -> None:
    """``wait()`` holds nothing, so the handler's take works and comes after the pending one."""

    def child() -> None:
        store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
        last = Last(store)
        with backend_faults(0, terminate, names=["write"]):
            store.async_take(app_state(1), "step_1", metadata={"step": 1}).wait()
        assert not last.refused
        assert [s.name for s in store.snapshots()] == ["step_1", "step_100"]
        assert_store(store.uri, {1, 100})

    assert in_child(child) == 0
