"""All that a store does, in buckets of servers that run on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from casnap import Snapshot, StateDict, Store
from tests.support.faults import KEY, app_state, assert_holds, content, take
from tests.support.object_stores import assert_bucket, assert_no_orphans_in, store_in
from tests.support.ranks import World
from tests.support.servers import Bucket, Server

SERVERS = [
    "seaweedfs",
    pytest.param("moto", marks=pytest.mark.servers),
    pytest.param("rclone", marks=pytest.mark.servers),
    pytest.param("gcs", marks=pytest.mark.servers),
]


@pytest.fixture
def bucket(request: pytest.FixtureRequest, server_of: Callable[[str], Server]) -> Iterator[Bucket]:
    with server_of(request.param).bucket() as bucket:
        yield bucket


@pytest.mark.parametrize("bucket", SERVERS, indirect=True)
@pytest.mark.usefixtures("cache_dir")
def test_a_run(bucket: Bucket) -> None:
    """Take, take the same again, take in the background, restore, read, delete, collect."""
    store = store_in(bucket)
    take(store, 0)
    before = store.requests
    again = store.take(app_state(0), "again")
    made = {k: n - before.get(k, 0) for k, n in store.requests.items() if n > before.get(k, 0)}
    assert sum(made.values()) <= 8, made
    assert again.stats.requests == again.requests == made
    assert store["again"].stats.requests == {}
    state = app_state(1)
    pending = store.async_take(state, "step_1", metadata={"step": 1})
    state[KEY].data["weight"].zero_()
    assert_holds(pending.wait(), 1)
    assert torch.equal(store["step_0"].read_object(f"{KEY}/weight"), content(0)["weight"])
    store.delete("again")
    store.delete("step_0")
    report = store.gc(grace=0)
    assert report.deleted_packs > 0
    assert_no_orphans_in(store)
    assert store._view.repository.backend.names("tmp") == []
    assert_bucket(bucket, {1})


@pytest.mark.servers
@pytest.mark.parametrize("bucket", ["seaweedfs", "moto", "rclone", "gcs"], indirect=True)
@pytest.mark.usefixtures("cache_dir")
def test_damage_is_found_and_repaired(bucket: Bucket) -> None:
    store = store_in(bucket)
    for step in range(2):
        take(store, step)
    backend = store._view.repository.backend
    sizes = backend.sizes("packs")
    lost = max(sizes, key=lambda key: sizes[key])
    backend.delete(lost)
    store = store_in(bucket)
    report = store.check(data=True)
    assert not report.ok
    store.repair()
    take(store, 2)
    # The repair notes what is lost, and the next take of the same bytes stores it again.
    for step in range(2):
        store.take(app_state(step), f"step_{step}", metadata={"step": step}, overwrite=True)
    store.gc(grace=0)
    assert_bucket(bucket, {0, 1, 2})


# --- ranks ------------------------------------------------------------------------------------


def _ranks_take_and_restore(bucket: Bucket) -> dict[str, int]:
    rank = dist.get_rank()
    store = store_in(bucket)

    def state(step: int) -> dict[str, StateDict]:
        own = torch.arange(30_000) + step * 1000 + rank
        return {KEY: StateDict({"own": own, "step": step})}

    store.take(state(1), "step_1")
    pending = store.async_take(state(2), "step_2")
    pending.wait()
    for step in (1, 2):
        found = state(7)
        Snapshot(f"{store.uri}/step_{step}", storage_options=bucket.storage_options).restore(found)
        assert torch.equal(found[KEY].data["own"], state(step)[KEY].data["own"])
        assert found[KEY].data["step"] == step
    return store.requests


@pytest.mark.servers
@pytest.mark.parametrize("bucket", ["seaweedfs", "moto", "rclone", "gcs"], indirect=True)
@pytest.mark.usefixtures("cache_dir")
def test_ranks(bucket: Bucket, world: Callable[[int], World]) -> None:
    world(3).run(_ranks_take_and_restore, bucket)
    store = store_in(bucket)
    assert [s.name for s in store.snapshots()] == ["step_1", "step_2"]
    assert store.check(data=True).ok
    assert isinstance(store, Store)
