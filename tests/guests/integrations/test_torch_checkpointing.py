"""torch_checkpointing's manager, with snapshots in place of its files."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import Retention, Snapshot, Store
from casnap.errors import (
    MismatchError,
    SnapshotExistsError,
    StateError,
    StorageFullError,
    UnsupportedTypeError,
)
from tests.support.bitwise import assert_same
from tests.support.faults import disk_full, kill, system_faults
from tests.support.pages import run_examples
from tests.support.ranks import Worlds
from tests.support.trainer_contract import TrainerContract
from tests.support.versioned import versioned

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

GUIDE = Path(__file__).parents[3] / "docs/guides/torch-checkpointing.md"
BASE = 1024 * 256 * 4


def manager(how: str, **settings: Any) -> Any:
    from casnap.integrations.torch_checkpointing import CasnapCheckpointManager

    config = getattr(CasnapCheckpointManager.Config, f"with_{how}_save")()
    for name, value in settings.items():
        setattr(config, name, value)
    return config.build()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model with a frozen base, and its optimizer, after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024, bias=False), torch.nn.Linear(1024, 2))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()


def items(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


# --- what is saved is what is loaded ----------------------------------------------------------


@pytest.mark.parametrize("how", ["sync", "async"])
def test_tensors_are_filled_in_place(tmp_path: Path, how: str) -> None:
    checkpoints, (model, optimizer) = manager(how), trained()
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    saving = checkpoints.save(str(tmp_path / "step_1"), items(model, optimizer, 7))
    with checkpoints.lock(), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if how == "async":
        assert saving.result().name == "step_1"
    else:
        assert saving is None
    assert Snapshot(tmp_path / "step_1").metadata.user == {"step": 7}
    template = {"model": model.state_dict(), "optimizer": None, "step": 0}
    loaded = checkpoints.load(str(tmp_path / "step_1"), into=template, strict=True)
    assert_same(dict(model.state_dict()), wanted)
    assert loaded["model"] is template["model"]
    assert loaded["step"] == 7
    torch.optim.AdamW(model[1].parameters()).load_state_dict(loaded["optimizer"])
    checkpoints.close()


def test_what_is_loaded_whole_keeps_the_versions_of_modules(tmp_path: Path) -> None:
    checkpoints, model, path = manager("sync"), versioned(), str(tmp_path / "a")
    checkpoints.save(path, {"model": model.state_dict(), "deep": [{"m": model.state_dict()}]})
    for map_location in (None, "cpu"):
        into = {"model": None, "deep": None}
        loaded = checkpoints.load(path, into=into, map_location=map_location)
        for state in (loaded["model"], loaded["deep"][0]["m"]):
            fresh = versioned()
            fresh.load_state_dict(state)
            assert_same(fresh.state_dict(), model.state_dict())


def test_a_part_is_loaded(tmp_path: Path) -> None:
    checkpoints, (model, optimizer) = manager("sync"), trained()
    path = str(tmp_path / "step_1")
    checkpoints.save(path, items(model, optimizer, 7) | {"tensor": torch.arange(4)})
    bias, tensor = torch.zeros(2), torch.zeros(4, dtype=torch.int64)
    into = {"model": {"1.bias": bias, "none": 5}, "tensor": tensor}
    loaded = checkpoints.load(path, into=into)
    assert torch.equal(bias, model[1].bias)
    assert loaded["tensor"] is tensor
    assert_same(tensor, torch.arange(4))
    assert loaded["model"].keys() == {"1.bias", "none"}
    with pytest.raises(RuntimeError, match="lacks model::none"):
        checkpoints.load(path, into=into, strict=True)
    with pytest.raises(FileNotFoundError, match="has nothing of other for rank 0; it has model"):
        checkpoints.load(path, into={"other": None})
    with pytest.raises(FileNotFoundError, match="has nothing of other for rank 0; it has model"):
        checkpoints.load(path, into={"other": 5})
    with pytest.raises(
        MismatchError, match=r"nothing was loaded: model/1\.bias: \(3,\) here, \(2,\)"
    ):
        checkpoints.load(path, into={"model": {"1.bias": torch.zeros(3)}})
    with pytest.raises(FileNotFoundError, match="step_2"):
        checkpoints.load(str(tmp_path / "step_2"), into={"model": None})


def test_what_does_not_fit_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    checkpoints, path = manager("sync"), str(tmp_path / "a")
    state = {"w": torch.ones(2), "one": torch.ones(1), "step": 3, "list": [torch.ones(2), 5]}
    checkpoints.save(path, {"model": state, "other": {"t": torch.ones(4)}, "name": "x"})
    for key, value, text in (
        ("one", torch.zeros(5), r"model/one: \(5,\) here, \(1,\) in the snapshot"),
        ("one", 1.5, r"model/one: float here, a tensor in the snapshot"),
        ("one", {"a": 1}, r"model/one: dict here, a tensor in the snapshot"),
        (
            "step",
            torch.zeros(()),
            r"model/step: a tensor here, a value of kind int in the snapshot",
        ),
        ("list", [torch.zeros(3), 0], r"model/list/0: \(3,\) here, \(2,\) in the snapshot"),
        (
            "one",
            torch.zeros(1, device="meta"),
            r"model/one: on the meta device here; call to_empty\(device=...\) first",
        ),
    ):
        model = {"w": torch.zeros(2), key: value}
        into = {"other": {"t": torch.zeros(4)}, "model": model, "name": None}
        for strict in (False, True):
            with pytest.raises(MismatchError, match=f"nothing was loaded: {text}$"):
                checkpoints.load(path, into=into, strict=strict)
        assert not model["w"].any()
        assert not into["other"]["t"].any()  # type: ignore[index]


def test_a_fresh_optimizer_is_no_template(tmp_path: Path) -> None:
    checkpoints, (model, optimizer) = manager("sync"), trained()
    path = str(tmp_path / "a")
    checkpoints.save(path, items(model, optimizer, 1))
    fresh = torch.optim.AdamW(model[1].parameters())
    with pytest.raises(RuntimeError, match=r"values of optimizer/state, which into= has empty"):
        checkpoints.load(path, into={"optimizer": fresh.state_dict()}, strict=True)
    loaded = checkpoints.load(path, into={"optimizer": None}, strict=True)
    fresh.load_state_dict(loaded["optimizer"])
    assert_same(fresh.state_dict(), optimizer.state_dict())
    # What the snapshot has empty, too, is all of it.
    checkpoints.save(path, {"optimizer": torch.optim.AdamW(model[1].parameters()).state_dict()})
    checkpoints.load(path, into={"optimizer": fresh.state_dict() | {"state": {}}}, strict=True)


def test_the_items_of_the_configuration(tmp_path: Path) -> None:
    from torch_checkpointing import ItemSpec

    specs = {"model": ItemSpec(), "step": ItemSpec(required=False)}
    checkpoints, (model, optimizer) = manager("sync", items=specs, default=None), trained()
    with pytest.raises(KeyError, match="optimizer"):
        checkpoints.save(str(tmp_path / "a"), items(model, optimizer, 7))
    with pytest.raises(KeyError, match="model"):
        checkpoints.save(str(tmp_path / "a"), {"step": 7})
    checkpoints.save(str(tmp_path / "a"), {"model": model.state_dict(), "step": 7})
    loaded = checkpoints.load(str(tmp_path / "a"), map_location="cpu")
    assert_same(dict(loaded["model"]), dict(model.state_dict()))
    assert loaded["step"] == 7
    with pytest.raises(ValueError, match="into="):
        manager("sync").load(str(tmp_path / "a"))


def test_checkpoints_of_its_own_are_loaded(tmp_path: Path) -> None:
    from torch_checkpointing import CheckpointManager

    model, optimizer = trained()
    CheckpointManager(CheckpointManager.Config.with_sync_save()).save(
        str(tmp_path / "step_1"), items(model, optimizer, 7)
    )
    checkpoints = manager("async")
    loaded = checkpoints.load(str(tmp_path / "step_1"), into={"model": None, "step": 0})
    assert_same(dict(loaded["model"]), dict(model.state_dict()))
    assert loaded["step"] == 7
    checkpoints.close()


def test_a_checkpoint_of_its_own_is_not_saved_over(tmp_path: Path) -> None:
    from torch_checkpointing import CheckpointManager

    (model, optimizer), path = trained(), str(tmp_path / "step_1")
    own = CheckpointManager(CheckpointManager.Config.with_sync_save())
    own.save(path, items(model, optimizer, 7))
    for how in ("sync", "async"):
        with pytest.raises(SnapshotExistsError, match=r"a checkpoint of torch_checkpointing, and"):
            manager(how).save(path, items(model, optimizer, 8))
    assert Store(tmp_path).latest() is None
    # It is in the way of its own name alone; and a snapshot is replaced.
    for step in (8, 9):
        manager("sync").save(str(tmp_path / "step_2"), {"step": step})
    assert manager("sync").load(path, into={"step": 0})["step"] == 7
    assert manager("sync").load(str(tmp_path / "step_2"), into={"step": 0})["step"] == 9
    # If it was saved later, as where somebody has deleted the folder, none of the two is loaded.
    shutil.rmtree(tmp_path / "step_2")
    own.save(str(tmp_path / "step_2"), {"step": 10})
    with pytest.raises(StateError, match=r"step_2 holds a snapshot .* torch_checkpointing has"):
        manager("sync").load(str(tmp_path / "step_2"), into={"step": 0})
    Store(tmp_path).delete("step_2")
    assert manager("sync").load(str(tmp_path / "step_2"), into={"step": 0})["step"] == 10


# --- what casnap is for -----------------------------------------------------------------------


class TestManager(TrainerContract):
    kill_at = 5
    kept = tuple(f"step_{number}" for number in range(4, 9))
    least_bytes = BASE
    most_new_bytes = BASE // 10
    name = "step_1"
    nothing = FileNotFoundError
    other = FileNotFoundError

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        model, optimizer = trained()
        checkpoints, start = manager("async", retention=Retention(keep_last=5)), 0
        if (last := Store(folder).latest()) is not None:
            into = {"model": model.state_dict(), "optimizer": None, "step": 0, "random": None}
            loaded = checkpoints.load(last.path, into=into)
            optimizer.load_state_dict(loaded["optimizer"])
            torch.set_rng_state(loaded["random"])
            start = loaded["step"]
        for number in range(start + 1, 9):
            step(model, optimizer)
            state = items(model, optimizer, number) | {"random": torch.get_rng_state()}
            checkpoints.save(str(folder / f"step_{number}"), state)
            if number == kill_at:
                kill()
        checkpoints.close()
        return items(model, optimizer, 8)

    def load(self, folder: Path) -> object:
        last = (self.names(folder) if (folder / "casnap-store").exists() else ["step_1"])[-1]
        return manager("sync").load(str(folder / last), into={"model": None, "step": 0})


# --- ranks ------------------------------------------------------------------------------------


def save_sharded(path: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.arange(40.0).reshape(10, 4)
    checkpoints = manager("async")
    checkpoints.save(
        path,
        {
            "model": {"w": distribute_tensor(weight, mesh, [Shard(0)])},
            "own": dist.get_rank(),
            "both": 1,
        },
    )
    checkpoints.close()


def load_sharded(path: str) -> tuple[bool, Any, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.zeros(10, 4), mesh, [Shard(1)])
    checkpoints = manager("sync")
    loaded = checkpoints.load(path, into={"model": {"w": weight}, "both": 0}, strict=True)
    is_equal = torch.equal(weight.full_tensor(), torch.arange(40.0).reshape(10, 4))
    own = checkpoints.load(path, into={"own": None})["own"] if dist.get_rank() < 2 else None
    return is_equal and loaded["model"]["w"] is weight, loaded["both"], own


def test_ranks_load_in_another_sharding(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "step_1")
    world(2).run(save_sharded, path)
    assert world(3).run(load_sharded, path) == [(True, 1, 0), (True, 1, 1), (True, 1, None)]
    whole = {"w": torch.zeros(10, 4)}
    manager("sync").load(path, into={"model": whole})
    assert torch.equal(whole["w"], torch.arange(40.0).reshape(10, 4))


def save_its_own(path: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.arange(40.0).reshape(10, 4), mesh, [Shard(0)])
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    own = CheckpointManager(config)
    own.save(path, {"model": {"w": weight}, "step": 7})
    own.close()


def test_its_folders_are_imported(world: Worlds, tmp_path: Path) -> None:
    """Of one process and of two ranks; a manager of casnap's goes on from the snapshot."""
    from torch_checkpointing import CheckpointManager

    store = Store(tmp_path / "store")
    world(2).run(save_its_own, str(tmp_path / "own_2"))
    store.import_file(tmp_path / "own_2", "sharded")
    weight = store["sharded"].read_object("model/w")
    assert torch.equal(weight, torch.arange(40.0).reshape(10, 4))

    model, optimizer = trained()
    own = CheckpointManager(CheckpointManager.Config.with_sync_save())
    own.save(str(tmp_path / "own_1"), items(model, optimizer, 7))
    report = store.import_file(tmp_path / "own_1", "step_7")
    assert (report.format, report.keys) == ("torch_checkpointing", ["model", "optimizer", "step"])
    into = {"model": None, "optimizer": None, "step": 0}
    loaded = manager("sync").load(store.path_of("step_7"), into=into, strict=True)
    assert_same(dict(loaded["model"]), dict(model.state_dict()))
    assert_same(loaded["optimizer"], optimizer.state_dict())
    assert loaded["step"] == 7


# --- what goes wrong --------------------------------------------------------------------------


def test_what_is_refused(tmp_path: Path) -> None:
    from torch_checkpointing import ItemSpec
    from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo

    layout = ItemSpec(layout=LayoutInfo("step.json", JsonSerialization()))
    with pytest.raises(StateError, match=r"no layout= of an ItemSpec.*Leave that out"):
        manager("sync", items={"step": layout})
    with pytest.raises(StateError, match="no finalize_callback"):
        manager("sync", finalize_callback=print)
    checkpoints = manager("sync")
    checkpoints.save(str(tmp_path / "a"), {"step": 1})
    with pytest.raises(TypeError, match="map_location="):
        checkpoints.load(str(tmp_path / "a"), into={"step": None}, map_location={"cuda:0": "cpu"})
    checkpoints.close()
    checkpoints.close()
    for verb in (lambda: checkpoints.save("b", {}), lambda: checkpoints.load("a")):
        with pytest.raises(RuntimeError, match="closed"):
            verb()


class Own:
    pass


def test_saves_that_fail(tmp_path: Path) -> None:
    checkpoints, path = manager("async"), str(tmp_path / "a")
    with pytest.raises(UnsupportedTypeError, match="allow_pickle=True"):
        checkpoints.save(path, {"value": Own()})
    checkpoints.save(path, {"value": 1}).result()
    Store(tmp_path).tag("a", "kept")
    with pytest.raises(SnapshotExistsError, match="kept"):
        checkpoints.save(path, {"value": 2})
    # In the background: the next call says it, and so does the last one.
    state = {"value": torch.arange(100_000)}
    for last in (lambda: checkpoints.save(path, {}), checkpoints.close):
        with system_faults(0, disk_full, ["write", "writev", "pwrite"], lasting=True):
            saving = checkpoints.save(str(tmp_path / "b"), state)
            with pytest.raises(StorageFullError, match="no space left"):
                saving.result()
        with pytest.raises(StorageFullError, match="no space left"):
            last()
    assert [s.name for s in Store(tmp_path).snapshots()] == ["a"]
    assert Snapshot(path).read_object("value") == 1


def test_values_that_need_pickle(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints = manager("sync", allow_pickle=True)
        checkpoints.save(str(tmp_path / "a"), {"value": {"own": Own()}})
        loaded = checkpoints.load(str(tmp_path / "a"), into={"value": None})
    assert isinstance(loaded["value"]["own"], Own)


def test_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_examples(GUIDE, tmp_path / "work", monkeypatch)
