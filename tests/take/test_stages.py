"""Pipeline stages: ranks whose models and optimizers have different keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from casnap import Snapshot, StateDict
from casnap.errors import EntryNotFoundError, MismatchError, StateError
from tests.support.ranks import Worlds
from tests.support.sharded import Training, stepped

LAYERS = 8
WIDTH = 130


def stage_of(size: int, stages: int) -> tuple[int, DeviceMesh]:
    """Return the stage of this rank, and the mesh of the ranks of that stage."""
    ranks = torch.arange(size).reshape(stages, -1)
    meshes = [DeviceMesh("cpu", row) for row in ranks]
    stage = dist.get_rank() // ranks.shape[1]
    return stage, meshes[stage]


class Stage(nn.Module):
    """Some layers of a model, under their names in the whole model; sharded by FSDP2."""

    _layer = nn.Linear

    def __init__(self, stages: int, value: float) -> None:
        super().__init__()
        stage, mesh = stage_of(dist.get_world_size(), stages)
        per_stage = LAYERS // stages
        self.layers = nn.ModuleDict(
            {
                str(i): self._layer(WIDTH, WIDTH)
                for i in range(stage * per_stage, (stage + 1) * per_stage)
            }
        )
        for i, layer in self.layers.items():
            for number, parameter in enumerate(layer.parameters()):
                nn.init.constant_(parameter, value + int(i) + number / 2)
        fully_shard(self, mesh=mesh)


def adam(module: nn.Module, value: float) -> torch.optim.Optimizer:
    optimizer = stepped(module)
    for name, parameter in module.named_parameters():
        for key, moment in optimizer.state[parameter].items():
            moment.fill_(value + len(key) + int(name.split(".")[1]))
    return optimizer


def training(stages: int, value: float) -> Training:
    model = Stage(stages, value)
    return Training(model, adam(model, value))


def values_of(state: Any, path: str = "") -> dict[str, float]:
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= values_of(value, f"{path}{key}/")
        elif isinstance(value, DTensor):
            found[f"{path}{key}"] = value.to_local().unique().item()
    return found


def take(path: str, stages: int) -> None:
    Snapshot.take(path, {"model": Stage(stages, 1.0), "train": training(stages, 1.0)})


def restore_as_before(path: str, stages: int) -> int:
    """Restore all; return the bytes that came."""
    model, train, seen = Stage(stages, 9.0), training(stages, 9.0), [0]
    state = {"model": model, "train": train}
    report = Snapshot(path).restore(state, progress=lambda _what, _done, total: seen.append(total))
    assert not report
    assert values_of(model.state_dict()) == values_of(Stage(stages, 1.0).state_dict())
    assert values_of(train.state_dict()) == values_of(training(stages, 1.0).state_dict())
    return max(seen)


def test_stages_get_their_own_back_and_nothing_else(world: Worlds, tmp_path: Path) -> None:
    path, stages = str(tmp_path / "store/s"), 4
    world(4).run(take, path, stages)
    total = Snapshot(path).stats.logical_bytes
    for nbytes in world(4).run(restore_as_before, path, stages):
        assert nbytes < total / 3.9
    whole = Snapshot(path).read_object("model/layers.7.weight")
    assert whole.unique().tolist() == [8.0]


def test_the_stages_are_one_file_of_tensors(two_stages: str, tmp_path: Path) -> None:
    """Each rank has its own dict, but each name is that of one tensor."""
    snapshot = Snapshot(two_stages)
    snapshot.export(tmp_path / "m.safetensors", path="model")
    assert len(load_file(tmp_path / "m.safetensors")) == 2 * LAYERS
    told = "'model' for ranks 0, 1, 2 and 3, each its own; say which: '0/model', '1/model'"
    with pytest.raises(EntryNotFoundError, match=told):
        snapshot.export(tmp_path / "m.pt", path="model")
    with pytest.raises(EntryNotFoundError, match=told):
        snapshot.get_state_dict_for_key("model")


def restore_model(path: str, stages: int) -> None:
    model = Stage(stages, 9.0)
    assert not Snapshot(path).restore({"model": model})
    assert values_of(model.state_dict()) == values_of(Stage(stages, 1.0).state_dict())


@pytest.fixture(scope="module")
def two_stages(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a snapshot of four ranks in two stages."""
    path = str(tmp_path_factory.mktemp("stages") / "store/s")
    world(4).run(take, path, 2)
    return path


@pytest.mark.parametrize(("size", "stages"), [(4, 1), (2, 2)])
def test_a_module_may_be_cut_into_other_stages(
    world: Worlds, two_stages: str, size: int, stages: int
) -> None:
    world(size).run(restore_model, two_stages, stages)


class Told(nn.Linear):
    """Notes which version the items are of that it loads."""

    version: Any = None

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        self.version = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *args)


class ToldStage(Stage):
    _layer = Told


def take_versions(path: str) -> None:
    stage = ToldStage(2, 1.0)
    for name, layer in stage.layers.items():
        layer._version = 10 + int(name)
    Snapshot.take(path, {"model": stage})


def restore_versions(path: str, stages: int) -> None:
    stage = ToldStage(stages, 9.0)
    Snapshot(path).restore({"model": stage})
    assert {n: layer.version for n, layer in stage.layers.items()} == {
        name: 10 + int(name) for name in stage.layers
    }


def test_stages_find_the_versions_that_other_stages_have_taken(
    world: Worlds, tmp_path: Path
) -> None:
    path = str(tmp_path / "store/s")
    world(4).run(take_versions, path)
    for stages in (2, 1, 4):
        world(4).run(restore_versions, path, stages)


def restore_too_much(path: str) -> str:
    model = Stage(2, 9.0)
    model.register_buffer("more", torch.zeros(3))
    with pytest.raises(MismatchError) as caught:
        Snapshot(path).restore({"model": model})
    assert values_of(model.state_dict()) == values_of(Stage(2, 9.0).state_dict())
    return str(caught.value)


def test_what_no_stage_had_is_named(world: Worlds, two_stages: str) -> None:
    for said in world(6).run(restore_too_much, two_stages):
        assert "model/more" in said or "model is kept for ranks 0, 1, 2 and 3 alone" in said


def take_by_number(path: str) -> str:
    model = Stage(2, 1.0)
    with pytest.raises(StateError) as caught:
        Snapshot.take(path, {"optim": adam(model, 1.0)})
    return str(caught.value)


def test_two_tensors_of_one_path_are_refused(world: Worlds, tmp_path: Path) -> None:
    for said in world(4).run(take_by_number, str(tmp_path / "store/s")):
        assert "one tensor on the ranks [0, 1], and another on the ranks [2, 3]" in said
        assert "get_optimizer_state_dict() of" in said


def take_replicas(path: str) -> None:
    """Take a tensor that each pair of ranks shards for itself."""
    _, mesh = stage_of(4, 2)
    whole = torch.arange(50_000.0)
    Snapshot.take(path, {"state": StateDict(x=distribute_tensor(whole, mesh, [Shard(0)]))})
    given = StateDict(x=distribute_tensor(torch.zeros(50_000), mesh, [Shard(0)]))
    Snapshot(path).restore({"state": given})
    assert torch.equal(given["x"].full_tensor(), whole)


def test_replicas_on_meshes_of_their_own_are_one_tensor(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "store/s")
    world(4).run(take_replicas, path)
    assert Snapshot(path).contents.manifest.shared.keys() == {"state"}
    assert torch.equal(Snapshot(path).read_object("state/x"), torch.arange(50_000.0))
