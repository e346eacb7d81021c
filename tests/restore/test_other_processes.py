"""Snapshots read in other processes: in forks, and in the workers of a data loader."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from casnap import Snapshot, StateDict, Store
from casnap.errors import NotAStoreError
from tests.support.faults import in_child
from tests.support.servers import SECRET, Bucket

ROWS = torch.arange(60_000, dtype=torch.float32).reshape(20, 3000)
# No time-out is waited for where a worker hangs: the test fails.
_SECONDS = 120


class Rows(Dataset[torch.Tensor]):
    """The rows of a tensor of a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i: int) -> torch.Tensor:
        row: torch.Tensor = self._snapshot.read_object("data/rows", index=i)
        return row


def load(snapshot: Snapshot, start: str) -> torch.Tensor:
    """Read all rows by two workers of a data loader."""
    loader: DataLoader[torch.Tensor] = DataLoader(
        Rows(snapshot),
        batch_size=5,
        num_workers=2,
        multiprocessing_context=start,
        timeout=_SECONDS,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.cat(list(loader))


def state(plus: int = 0) -> dict[str, StateDict]:
    return {"data": StateDict(rows=ROWS + plus)}


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(tmp_path / "store").make()
    bucket: Bucket = request.getfixturevalue("bucket")
    return Store(f"{bucket.uri}/store", storage_options=bucket.storage_options).make()


def test_forks_of_a_process_that_has_read(store: Store) -> None:
    """Also a fork while a take is pending, a take in a fork, and the parent afterwards."""
    snapshot = store.take(state(), "a")
    assert torch.equal(snapshot.read_object("data/rows"), ROWS)
    pending = store.async_take({"big": StateDict(x=torch.randn(1 << 20))}, "b")
    assert torch.equal(load(snapshot, "fork"), ROWS)

    def take() -> None:
        store.take(state(1), "c")
        assert torch.equal(store["a"].read_object("data/rows"), ROWS)

    assert in_child(take) == 0
    assert pending.wait().read_object("big/x").shape == (1 << 20,)
    assert torch.equal(store["c"].read_object("data/rows"), ROWS + 1)


def test_handles_go_to_other_processes(store: Store, request: pytest.FixtureRequest) -> None:
    view = Store(f"{store.uri}/run", storage_options=options(store, request)).make()
    snapshot = view.take(state(), "a")
    for handle in (store, view, snapshot):
        there = pickle.loads(pickle.dumps(handle))
        assert repr(there) == repr(handle)
        assert SECRET not in repr(vars(handle))
    there = pickle.loads(pickle.dumps(snapshot))
    assert there.commit_id == snapshot.commit_id
    assert torch.equal(there.read_object("data/rows"), ROWS)
    assert pickle.loads(pickle.dumps(view)).take(state(1), "b").path == f"{store.uri}/run/b"


def options(store: Store, request: pytest.FixtureRequest) -> dict[str, Any] | None:
    if not store._view.repository.backend.costly_requests:
        return None
    bucket: Bucket = request.getfixturevalue("bucket")
    return bucket.storage_options


def test_a_store_in_memory_stays_in_its_process() -> None:
    with pytest.raises(TypeError, match="memory of this process"):
        pickle.dumps(Store("memory://stays"))


def test_a_handle_of_a_store_that_is_gone(tmp_path: Path) -> None:
    sent = pickle.dumps(Store(tmp_path / "store").make())
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(NotAStoreError):
        pickle.loads(sent)


@pytest.mark.servers
def test_workers_that_are_started_anew(store: Store) -> None:
    """Each imports torch, which takes seconds."""
    snapshot = store.take(state(), "a")
    assert torch.equal(load(snapshot, "spawn"), ROWS)
