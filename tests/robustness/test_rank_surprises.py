"""What users of several ranks try, and what once went wrong without a word."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import StateError, StoreError
from casnap.format.records import pack_key
from tests.support.damaged import record_of
from tests.support.faults import CHUNK, assert_given_back
from tests.support.faulty import Fault, FaultyBackend, before


def take_ddp_over_halves(path: str) -> list[float]:
    half = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    module = torch.nn.Linear(600, 600)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0 + half)
    ddp = torch.nn.parallel.DistributedDataParallel(module, process_group=groups[half])
    snapshot = Snapshot.take(path, {"model": ddp})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    snapshot.restore({"model": ddp})
    return module.weight.detach().unique().tolist()


def test_ddp_modules_of_some_ranks_are_not_those_of_all(world, tmp_path):
    assert world(4).run(take_ddp_over_halves, str(tmp_path / "x")) == [[1.0], [1.0], [2.0], [2.0]]


def take_containers_that_differ(path: str) -> dict[str, Any]:
    rank = dist.get_rank()
    state = StateDict(
        common=torch.arange(100.0),
        names={"a": 1, f"only{rank}": torch.full((100,), float(rank))},
        several=[torch.ones(100)] * (rank + 1),
        number=5,
    )
    snapshot = Snapshot.take(path, {"a": state}, replicated=["**"])
    restored = StateDict()
    snapshot.restore({"a": restored})
    return {
        "names": sorted(restored["names"]),
        "several": len(restored["several"]),
        "number": restored["number"],
        "common": restored["common"].sum().item(),
    }


def test_containers_that_are_said_to_be_equal_may_differ(world, tmp_path):
    for rank, got in enumerate(world(2).run(take_containers_that_differ, str(tmp_path / "x"))):
        assert got == {
            "names": ["a", f"only{rank}"],
            "several": rank + 1,
            "number": 5,
            "common": 4950.0,
        }


def take_on_another_default_device(path: str) -> bool:
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            x = torch.arange(1000.0)
            restored = StateDict(x=torch.zeros(1000))
        Snapshot.take(path, {"a": StateDict(x=x)}).restore({"a": restored})
        return torch.equal(restored["x"], x)
    finally:
        torch.set_default_device(None)


def test_the_default_device_of_torch_does_not_matter(world, tmp_path):
    assert world(2).run(take_on_another_default_device, str(tmp_path / "x")) == [True, True]


def restore_by_the_group_that_took(path: str) -> bool | None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    snapshot = Snapshot.take(path, {"a": StateDict(x=torch.arange(10.0))}, pg=group)
    pending = Snapshot.async_take(f"{path}-2", {"a": StateDict(x=torch.arange(10.0))}, pg=group)
    for taken in (snapshot, pending.wait()):
        taken.restore({"a": StateDict(x=torch.zeros(10))})
    return taken.pg is group


def test_a_snapshot_is_restored_by_the_group_that_took_it(world, tmp_path):
    assert world(3).run(restore_by_the_group_that_took, str(tmp_path / "x")) == [None, True, True]


def take_into_a_copy(folder: str) -> None:
    rank = dist.get_rank()
    store = Store(f"{folder}/{'copy' if rank else 'store'}")
    store.take({"a": StateDict(x=torch.full((50_000,), float(rank)))}, "s")


def test_ranks_that_write_to_a_copy_of_the_store_are_told_so(world, tmp_path):
    Store(tmp_path / "store").make()
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    for outcome in world(2).run(take_into_a_copy, str(tmp_path), expect_errors=True):
        assert isinstance(outcome, StoreError)
        assert "all ranks must see one storage" in str(outcome)
    for name in ("store", "copy"):
        store = Store(tmp_path / name)
        assert store.snapshots() == []
        assert not [
            path for path in (tmp_path / name / "casnap-store/packs").rglob("*") if path.is_file()
        ]


def of_rank(rank: int) -> torch.Tensor:
    return torch.arange(CHUNK // 4, dtype=torch.int32) + 1000 * rank


def lose_a_pack(path: str, hurt: int, background: bool) -> None:
    """Take what is there already, while a rank's pack is deleted, before it looks at it."""
    rank = dist.get_rank()
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    state = {"a": StateDict(x=of_rank(rank))}
    store.take(state, "base")
    if rank == hurt:
        key = pack_key(record_of(Path(path), of_rank(rank))[1].pack)
        pack = Path(path, "casnap-store", key)
        fault = Fault(before(pack.unlink), "size", key)
        store = Store(FaultyBackend(LocalBackend(Path(path)), fault))
    if background:
        store.async_take(state, "again").wait()
    else:
        store.take(state, "again")


@pytest.mark.parametrize("hurt", [0, 1])
@pytest.mark.parametrize("background", [False, True])
def test_a_rank_finds_a_pack_gone(world, tmp_path, hurt, background):
    world(2).run(lose_a_pack, str(tmp_path / "x"), hurt, background)
    store = Store(tmp_path / "x")
    for rank in range(2):
        assert torch.equal(store["again"].read_object(f"{rank}/a/x"), of_rank(rank))


def restore_in_disagreement(path: str) -> None:
    snapshot = Snapshot.take(path, {"a": StateDict(x=torch.ones(1000))})
    snapshot.restore({"a": StateDict(x=torch.zeros(1000))}, read_once=dist.get_rank() == 0)


def take_by_a_mesh(path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    Snapshot.take(path, {"a": StateDict(x=1)}, pg=mesh)


def test_arguments_that_cannot_be_meant_are_explained(world, tmp_path):
    for outcome in world(2).run(restore_in_disagreement, str(tmp_path / "x"), expect_errors=True):
        assert isinstance(outcome, StateError)
        assert "read_once=" in str(outcome)
    for outcome in world(2).run(take_by_a_mesh, str(tmp_path / "y"), expect_errors=True):
        assert isinstance(outcome, StateError)
        assert "mesh.get_group()" in str(outcome)


def take_from_folders_of_their_own(folder: str) -> str:
    mine, before = Path(folder, f"rank{dist.get_rank()}"), Path.cwd()
    mine.mkdir()
    os.chdir(mine)
    try:
        return Snapshot.take("ckpts/x", {"a": StateDict(x=1)}).path
    finally:
        os.chdir(before)


def test_a_relative_path_is_that_of_rank_0(world, tmp_path):
    paths = world(2).run(take_from_folders_of_their_own, str(tmp_path))
    assert paths == [str(tmp_path / "rank0/ckpts/x")] * 2


def fail_often(folder: str) -> tuple[int, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, store = dist.get_rank(), Store(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {
        f"w{i}": distribute_tensor(torch.randn(701, 300), mesh, [Shard(0)], src_data_rank=None)
        for i in range(30)
    }
    state = {"a": StateDict(tensors, own=torch.randn(4_000_000) + rank)}
    for i in range(8):
        calls = []

        def progress(*call: object, calls: list[object] = calls, at: int = i) -> None:
            calls.append(call)
            if rank == 1 and len(calls) == 1 + at % 5:
                raise ValueError("mine")

        with suppress(Exception):
            store.async_take(state, f"s{i}", max_staging_bytes=1, progress=progress).wait()
        dist.barrier()
    store.async_take(state, "good", max_staging_bytes=1, timeout=60).wait()
    assert_given_back()


def test_memory_comes_back_after_failures(world, tmp_path):
    # A pool of which slots are lost makes a later take wait for ever.
    world(2).run(fail_often, str(tmp_path / "s"))
