"""``dcp.save`` and ``dcp.load`` of several ranks through casnap."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from casnap import NewStore, Store
from casnap.integrations.dcp import CasnapReader, CasnapWriter
from tests.support import bitwise
from tests.support.ranks import RankDied, Worlds
from tests.support.sharded import LAYOUTS, Training, assert_same, expected, full_state, training

CHUNK = 64 << 10
WORLDS = {1: ("plain",), 2: ("fsdp2",), 4: LAYOUTS}


def save(folder: str, layouts: tuple[str, ...]) -> list[int]:
    """Save a training state in some layouts, by DCP and natively; return the new bytes of each."""
    store, new = Store(folder), []
    for layout in layouts:
        given, name = training(layout, 1), f"{layout} on {dist.get_world_size()}"
        writer = CasnapWriter(store)
        dcp.save({"train": given, "epoch": 3}, checkpoint_id=name, storage_writer=writer)
        assert writer.snapshot is not None
        native = store.take({"train": given}, f"native {name}")
        new += [writer.snapshot.stats.new_bytes, native.stats.new_bytes]
    return new


def load(folder: str, layout: str, sources: list[str]) -> None:
    """Load each source into a layout, by DCP from what both saved, and natively."""
    store, given = Store(folder), training(layout, 2)
    for source in sources:
        for name in (source, f"native {source}"):
            spoil(given)
            dcp.load({"train": given}, checkpoint_id=name, storage_reader=CasnapReader(store))
            assert_same(full_state(given.state_dict()), expected(1))
        spoil(given)
        store[source].restore({"train": given})
        assert_same(full_state(given.state_dict()), expected(1))


def spoil(given: Training) -> None:
    moments = [t for state in given.optimizer.state.values() for t in state.values()]
    with torch.no_grad():
        for tensor in (*given.model.parameters(), *given.model.buffers(), *moments):
            tensor.fill_(-1.0)


@pytest.fixture(scope="module")
def saved(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Return a function that returns a store in which worlds of up to a size have saved."""
    folder = str(tmp_path_factory.mktemp("dcp") / "store")
    Store(folder, create=NewStore(chunk_size=CHUNK)).make()
    done: set[int] = set()

    def saved(most: int) -> str:
        for size in (size for size in WORLDS if size <= most and size not in done):
            new = world(size).run(save, folder, WORLDS[size])[0]
            # A native take, and all layouts, have the chunks of the first save; only the specs of
            # containers are others.
            assert all(nbytes < 16 << 10 for nbytes in (new[1:] if size == 1 else new)), new
            done.add(size)
        return folder

    return saved


@pytest.mark.parametrize(
    ("size", "most"),
    [(2, 2), *(pytest.param(n, 4, marks=pytest.mark.slow) for n in WORLDS)],
)
def test_what_was_saved_on_some_ranks_is_loaded_on_others(
    world: Worlds, saved: Callable[[int], str], size: int, most: int
) -> None:
    sources = [f"{layout} on {n}" for n in WORLDS if n <= most for layout in WORLDS[n]]
    for layout in WORLDS[size]:
        world(size).run(load, saved(most), layout, sources)


# --- how DCP may be called --------------------------------------------------------------------


def save_by_rank(folder: str) -> None:
    """Save dicts whose keys are numbers of ranks, and one whose key is another on each rank."""
    rank = dist.get_rank()
    state = {
        "loaders": {rank: {"seen": torch.tensor(rank)}},
        "rest": {
            "both": {7: torch.ones(2)},
            "odd": {str(rank): {5 if rank else "5": torch.ones(2)}},
            "hashed": {None: torch.ones(2), (1, "x"): {str(rank): torch.ones(2)}},
            "text first": {0.5 if rank else "0.5": {str(rank): torch.ones(2)}},
            "float first": {"0.5" if rank else 0.5: {str(rank): torch.ones(2)}},
        },
    }
    dcp.save(state, storage_writer=CasnapWriter(f"{folder}/a"))
    again: dict[str, Any] = {
        "rest": {"hashed": {None: torch.zeros(2), (1, "x"): {str(rank): torch.zeros(2)}}}
    }
    dcp.load(again, storage_reader=CasnapReader(f"{folder}/a"))
    bitwise.assert_same(again["rest"]["hashed"], state["rest"]["hashed"])


def test_keys_of_ranks_keep_their_types(world: Worlds, tmp_path: Path) -> None:
    world(2).run(save_by_rank, str(tmp_path))
    snapshot = Store(tmp_path)["a"]
    loaders = snapshot.get_state_dict_for_key("loaders")
    assert {rank: loader["seen"].item() for rank, loader in loaders.items()} == {0: 0, 1: 1}
    rest = snapshot.get_state_dict_for_key("rest")
    assert [*rest["both"]] == [7]
    assert {key: [*value] for key, value in rest["odd"].items()} == {"0": ["5"], "1": [5]}
    one = torch.ones(2)
    assert rest["hashed"].keys() == {None, (1, "x")}
    bitwise.assert_same(rest["hashed"][1, "x"], {"0": one, "1": one})
    # DCP gives both one name; the key that is no str counts.
    bitwise.assert_same(rest["text first"], {0.5: {"0": one, "1": one}})
    bitwise.assert_same(rest["float first"], {0.5: {"0": one, "1": one}})


def sharded(step: int, **extra: Any) -> dict[str, Any]:
    """Return a state with a DTensor of 100,003 rows, which no number of ranks divides."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(100_003.0).reshape(-1, 1) + step
    return {"w": distribute_tensor(rows, mesh, [Shard(0)]), "step": step, **extra}


def is_sharded(state: dict[str, Any], step: int) -> bool:
    wanted = sharded(step)["w"].to_local()
    return torch.equal(state["w"].to_local(), wanted) and state["step"] == step


def save_in_background(store: Store, kind: AsyncCheckpointerType) -> None:
    """Save with a stager of the user's, then with the writer's; the state changes once staged."""
    stager, state = DefaultStager(StagingOptions(False, False, False, False)), sharded(0)
    for step in range(3):
        pending: Any = dcp.async_save(
            {**state, "step": step},
            checkpoint_id=f"{kind.value} {step}",
            storage_writer=CasnapWriter(store),
            async_checkpointer_type=kind,
            async_stager=stager if step == 0 else None,
        )
        # What a process is to save, DCP hands over in the background.
        if kind is AsyncCheckpointerType.PROCESS:
            pending.result()
        state["w"].to_local().add_(1)
        pending.result()
    stager.close()


def save_in_a_process(folder: str) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    save_in_background(Store(folder), AsyncCheckpointerType.PROCESS)


def save_in_all_ways(folder: str) -> None:
    store, rank = Store(folder), dist.get_rank()
    save_in_background(store, AsyncCheckpointerType.THREAD)
    for step in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save_one(store, f"cached {step}", sharded(step), planner=planner)
    # Each rank has values that the others lack, as the stages of a pipeline have.
    stage = {"stages": {f"{rank}": {"bias": torch.full((3,), float(rank)), "rank": rank}}}
    save_one(store, "stages", {"model": stage, "shared": torch.ones(5)})
    # Ranks that save alone, and a group that is not the world.
    save_one(store, f"alone {rank}", {"rank": rank}, no_dist=True)
    group = dist.new_group([1])
    if rank == 1:
        save_one(store, "group", {"rank": rank}, process_group=group)
    SavePlanner._cached_save_plan.clear()


def save_in_a_group(folder: str) -> None:
    """Save and load on the first and the last of three ranks, each with a part of a tensor."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    mesh = DeviceMesh.from_group(group, "cpu")
    rows = torch.arange(101.0).reshape(-1, 1)
    state = {"w": distribute_tensor(rows, mesh, [Shard(0)])}
    dcp.save(state, storage_writer=CasnapWriter(Path(folder, "a")), process_group=group)
    wanted = state["w"].to_local().clone()
    state["w"].to_local().zero_()
    dcp.load(state, storage_reader=CasnapReader(Path(folder, "a")), process_group=group)
    assert torch.equal(state["w"].to_local(), wanted)


@pytest.mark.slow
def test_a_group_that_is_not_the_world(world: Worlds, tmp_path: Path) -> None:
    Store(tmp_path).make()
    world(3).run(save_in_a_group, str(tmp_path))
    snapshot = Store(tmp_path)["a"]
    assert snapshot.world_size == 2
    assert torch.equal(snapshot.read_object("w").flatten(), torch.arange(101.0))


def save_one(store: Store, name: str, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, checkpoint_id=name, storage_writer=CasnapWriter(store), **options)


def load_in_all_ways(folder: str) -> None:
    store, rank = Store(folder), dist.get_rank()
    sources = {
        "thread 0": 0,
        "thread 1": 1,
        "thread 2": 2,
        "cached 0": 0,
        "cached 1": 1,
        "cached 2": 2,
    }
    for name, step in sources.items():
        state = sharded(7)
        reader = CasnapReader(store, read_once=step != 1)
        dcp.load(state, checkpoint_id=name, storage_reader=reader)
        assert is_sharded(state, step), name
    # A rank that loads by itself, with a plain tensor.
    if rank == 1:
        plain = {"w": torch.zeros(100_003, 1)}
        reader = CasnapReader(store)
        dcp.load(plain, checkpoint_id="thread 1", storage_reader=reader, no_dist=True)
        assert torch.equal(plain["w"], torch.arange(1.0, 100_004.0).reshape(-1, 1))


def test_ways_to_save_and_load(world: Worlds, tmp_path: Path) -> None:
    store = Store(tmp_path)
    world(2).run(save_in_all_ways, str(tmp_path))
    world(2).run(load_in_all_ways, str(tmp_path))
    model = store["stages"].get_state_dict_for_key("model")
    assert [model["stages"][f"{rank}"]["rank"] for rank in (0, 1)] == [0, 1]
    assert torch.equal(model["stages"]["1"]["bias"], torch.ones(3))
    assert [store[name].read_object("rank") for name in ("alone 0", "alone 1", "group")] == [
        0,
        1,
        1,
    ]
    assert store["group"].world_size == store["alone 1"].world_size == 1
    assert store["thread 1"].world_size == 2
    assert not store.check(data=True).damages


@pytest.mark.slow
def test_async_saves_in_processes(world: Worlds, tmp_path: Path) -> None:
    store = Store(tmp_path)
    with world(2).fresh() as ranks:
        ranks.run(save_in_a_process, str(tmp_path))
    for step in range(3):
        snapshot = store[f"process {step}"]
        assert snapshot.world_size == 2
        assert torch.equal(snapshot.read_object("w").flatten(), torch.arange(100_003.0) + step)
        assert snapshot.read_object("step") == step


def save_and_count(folder: str) -> list[int]:
    """Save a state, again as it is, and with a few rows changed; return the new bytes."""
    state, new = sharded(0), []
    for step in range(3):
        writer = CasnapWriter(Path(folder, f"{step}"))
        dcp.save(state, storage_writer=writer)
        assert writer.snapshot is not None
        new.append(writer.snapshot.stats.new_bytes)
        if step == 1 and dist.get_rank() == 1:
            state["w"].to_local()[-1] = -1
    return new


def test_a_second_save_writes_only_what_changed(world: Worlds, tmp_path: Path) -> None:
    Store(tmp_path, create=NewStore(chunk_size=CHUNK)).make()
    first, second, third = world(2).run(save_and_count, str(tmp_path))[0]
    assert first >= 400_012
    assert second == 0
    assert 0 < third <= CHUNK


# --- failures ---------------------------------------------------------------------------------


class Failing(DefaultSavePlanner):
    """Fails, or kills its rank, when the take of that rank has begun."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1 and write_item.index.fqn == "w":
            if self._how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the disk of this rank is gone")
        return super().resolve_data(write_item)


def save_badly(folder: str, how: str) -> None:
    writer = CasnapWriter(Path(folder, "a"), timeout=60)
    dcp.save(sharded(0), storage_writer=writer)
    dcp.save(sharded(5), storage_writer=writer, planner=Failing(how))


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_save_that_fails_leaves_the_one_before(world: Worlds, tmp_path: Path, how: str) -> None:
    store = Store(tmp_path)
    with world(2).fresh() as ranks:
        outcomes = ranks.run(save_badly, str(tmp_path), how, expect_errors=True, group_timeout=60)
    if how == "kill":
        assert isinstance(outcomes[1], RankDied)
        assert isinstance(outcomes[0], Exception)  # of DCP, which the dead rank does not answer
    else:
        for outcome in outcomes:
            assert "CheckpointException" in str(outcome)
            assert "the disk of this rank is gone" in str(outcome)
    assert [snapshot.name for snapshot in store.snapshots()] == ["a"]
    whole = store["a"].read_object("w")
    assert torch.equal(whole, torch.arange(100_003.0).reshape(-1, 1))
    assert not store.check(data=True).damages


def load_into_odd_shards(folder: str) -> None:
    local = torch.zeros(4, 2)
    mesh = init_device_mesh("cpu", (2,))
    odd = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    dcp.load({"x": odd}, storage_reader=CasnapReader(Path(folder, "a")))


def test_shards_that_dcp_takes_for_others_are_not_filled(world: Worlds, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"x": torch.ones(8, 2)}, storage_writer=CasnapWriter(tmp_path / "a"))
    for outcome in world(2).run(load_into_odd_shards, str(tmp_path), expect_errors=True):
        assert "redistribute it to Shard or Replicate" in str(outcome)
