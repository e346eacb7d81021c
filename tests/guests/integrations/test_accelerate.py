"""An Accelerator's state is saved and loaded through casnap, as its users know it."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import Snapshot, StateDict, Store
from casnap.errors import SnapshotExistsError, SnapshotNotFoundError, StateError
from tests.support.accelerate_fsdp import has_fsdp2
from tests.support.accelerated import FROZEN, prepared
from tests.support.bitwise import assert_same
from tests.support.dcp_saves import files_of_dcp
from tests.support.faults import in_child
from tests.support.launched import kill_all, launched
from tests.support.pages import run_examples
from tests.support.trainer_contract import RunContract, TrainerContract

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

GUIDE = Path(__file__).parents[3] / "docs/guides/accelerate.md"


@pytest.fixture(autouse=True)
def _no_state_of_before() -> None:
    """Forget what tests of another library found out: children of this process are ranks here."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def train(
    project: Path,
    end: Path,
    *,
    resume: bool = False,
    kill_at: int | None = None,
    kill_in_save: int | None = None,
    fsdp: bool = False,
) -> None:
    import accelerate

    from casnap.integrations.accelerate import load_state, save_state
    from casnap.integrations.dcp import install

    how = (2, "SHARDED_STATE_DICT") if fsdp else None
    accelerator, progress, model, optimizer, (scheduler, loader) = prepared(project, fsdp=how)
    save, load = partial(save_state, accelerator), partial(load_state, accelerator)
    if fsdp:
        install(project)
        save, load = accelerator.save_state, accelerator.load_state
    torch.manual_seed(1)
    if resume:
        load()
        # Its own load_state leaves the next name to the user.
        accelerator.project_configuration.iteration = progress["epoch"]
    while progress["epoch"] < 4:
        for (batch,) in loader:
            if progress["epoch"] == kill_at:
                kill_all()
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        progress["epoch"] += 1
        if progress["epoch"] == kill_in_save:
            # The model is saved by then.
            accelerate.accelerator.save_fsdp_optimizer = lambda *_: kill_all()
        save()
    torch.save({"model": full(model.state_dict()), "optim": full(optimizer.state_dict())}, end)


def full(state: Any) -> Any:
    """Return a state with whole tensors in place of sharded ones."""
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def trained(folder: Path, kill_at: int | None = None) -> dict[str, Any]:
    """Go on from the last checkpoint, if there is one; return the state at the end."""
    end = folder.with_name(f"end-{os.getpid()}")
    train(folder, end, resume=(folder / "checkpoints").exists(), kill_at=kill_at)
    state: dict[str, Any] = torch.load(end, weights_only=True)
    return state


class TestAccelerator(TrainerContract):
    kill_at = 2
    store = "checkpoints"
    kept = ("checkpoint_2", "checkpoint_3")
    least_bytes = FROZEN
    most_new_bytes = FROZEN // 10
    name = "checkpoint_2"
    nothing = SnapshotNotFoundError

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        return trained(folder, kill_at)

    def load(self, folder: Path) -> object:
        from casnap.integrations.accelerate import load_state

        load_state(prepared(folder)[0])
        return None


class TestTwoProcesses(RunContract):
    """The wrapper of DDP is no part of what is stored."""

    ranks = 2
    kill_at = 2
    store = "checkpoints"
    kept = TestAccelerator.kept
    least_bytes = FROZEN
    most_new_bytes = FROZEN // 10

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        return trained(folder, kill_at)

    def check_last(self, snapshot: Snapshot, end: dict[str, Any], folder: Path) -> None:
        assert "0.weight" in snapshot.read_object("model")


def test_other_weights_beside_a_snapshot_are_refused(tmp_path: Path) -> None:
    def go() -> None:
        from casnap.integrations.accelerate import load_state, save_state

        accelerator, _, model, _, _ = prepared(tmp_path)
        folder = Path(save_state(accelerator).path)
        # As users do who want weights that anything opens.
        accelerator.save_model(model, folder)
        load_state(accelerator, folder)
        with torch.no_grad():
            model[0].weight.add_(1)
        accelerator.save_model(model, folder)
        with pytest.raises(StateError, match=r"model[.]safetensors: these are not the weights of"):
            load_state(accelerator, folder)

    assert in_child(go) == 0


def test_fsdp_resumes_bit_exact_through_the_redirect(tmp_path: Path) -> None:
    if not has_fsdp2():
        pytest.skip("this Accelerate has no FSDP2")

    def go(name: str, **arguments: Any) -> None:
        train(tmp_path / name, tmp_path / f"{name}-{os.environ['RANK']}", fsdp=True, **arguments)

    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    assert launched(2, lambda: go("whole")) == [0, 0]
    assert launched(2, lambda: go("run", kill_in_save=3)) == [-9, -9]
    assert sorted(p.name for p in checkpoints.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    # Accelerate's own files say nothing of what is whole; it would not save under this name again.
    store = Store(run, create=False)
    assert "checkpoints/checkpoint_2/pytorch_model_fsdp_0" in store
    assert "checkpoints/checkpoint_2/optimizer_0" not in store
    shutil.rmtree(checkpoints / "checkpoint_2")
    assert launched(2, lambda: go("run", resume=True)) == [0, 0]
    for rank in range(2):
        ends = [torch.load(tmp_path / f"{n}-{rank}", weights_only=True) for n in ("run", "whole")]
        assert_same(ends[0], ends[1])

    snapshots = store.snapshots("checkpoints")
    assert {s.world_size for s in snapshots} == {2}
    assert files_of_dcp(run) == []
    # What total_limit removed while a process saved is forgotten; what went before is not.
    assert {s.name.split("/")[1][-1] for s in snapshots} == {"0", "2", "3"}
    for snapshot in snapshots:
        if not Path(snapshot.path).exists():
            store.delete(snapshot.name)
    last = [f"checkpoints/checkpoint_{i}" for i in (2, 3)]
    parts = ("pytorch_model_fsdp_0", "optimizer_0")
    assert [s.name for s in store.snapshots()] == [f"{c}/{part}" for c in last for part in parts]
    for snapshot in store.snapshots():
        assert snapshot.stats.new_bytes < FROZEN // 10
    model = store[f"{last[1]}/{parts[0]}"]
    assert model.stats.logical_bytes > FROZEN
    assert_same(model.read_object("model"), dict(ends[0]["model"]))
    assert launched(3, lambda: load_and_merge(run, tmp_path)) == [0, 0, 0]


def load_and_merge(run: Path, ends: Path) -> None:
    """Load on another number of ranks; then have Accelerate merge the weights into one file."""
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    from casnap.integrations.dcp import install

    accelerator, progress, model, optimizer, _ = prepared(run, fsdp=(2, "SHARDED_STATE_DICT"))
    install(run)
    accelerator.load_state()
    assert progress["epoch"] == 4
    end = torch.load(ends / "whole-0", weights_only=True)
    assert_same(full(model.state_dict()), end["model"])
    assert_same(full(optimizer.state_dict()), end["optim"])
    merge_fsdp_weights(run / "checkpoints/checkpoint_3/pytorch_model_fsdp_0", ends / "merged")
    merged = load_file(ends / "merged/model.safetensors")
    assert_same(dict(sorted(merged.items())), dict(sorted(end["model"].items())))


def test_names_hooks_and_folders_of_its_own(tmp_path: Path) -> None:
    from casnap.integrations.accelerate import load_state, save_state

    def work() -> None:
        accelerator, progress, model, *_ = prepared(tmp_path / "run")
        accelerator.project_configuration.automatic_checkpoint_naming = False
        before = {key: value.clone() for key, value in model.state_dict().items()}
        accelerator.save_state(str(tmp_path / "plain"))
        progress["epoch"] = 3
        first = save_state(accelerator, tmp_path / "ours")
        again = save_state(accelerator, tmp_path / "ours")
        assert first.commit_id != again.commit_id
        assert again.stats.new_bytes < 20_000  # random states and what is no tensor
        for folder in ("plain", "ours"):
            model[2].weight.data.zero_()
            progress["epoch"] = -1
            load_state(accelerator, tmp_path / folder)
            assert_same(dict(model.state_dict()), before)
            assert progress["epoch"] == (0 if folder == "plain" else 3)

        # As for an adapter: a hook saves the model itself.
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
        accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
        without = save_state(accelerator, tmp_path / "hooked")
        assert without.stats.logical_bytes < FROZEN
        load_state(accelerator, tmp_path / "hooked")

    assert in_child(work) == 0


def test_the_limit_removes_what_hooks_put_there(tmp_path: Path) -> None:
    """As Accelerate does it. What is tagged stays, and so does what a link leads to."""
    from casnap.integrations.accelerate import save_state

    def save_adapter(models: list[Any], weights: list[Any], folder: str) -> None:
        (Path(folder) / "unet").mkdir(parents=True)
        (Path(folder) / "unet/config.json").write_text("{}")

    def work() -> None:
        accelerator, *_ = prepared(tmp_path / "run")
        accelerator.register_save_state_pre_hook(save_adapter)
        folder = tmp_path / "run/checkpoints"
        for number in range(5):
            snapshot = save_state(accelerator)
            if number == 1:
                snapshot.store.tag("checkpoint_1", "best")
        assert [s.name for s in Store(folder).snapshots()] == [
            "checkpoint_1", "checkpoint_3", "checkpoint_4",
        ]  # fmt: skip
        kept = sorted(path.name for path in folder.glob("checkpoint_*"))
        assert kept == ["checkpoint_1", "checkpoint_3", "checkpoint_4"]
        (folder / "checkpoint_3").rename(tmp_path / "elsewhere")
        (folder / "checkpoint_3").symlink_to(tmp_path / "elsewhere")
        save_state(accelerator)
        assert (tmp_path / "elsewhere/unet/config.json").read_text() == "{}"

    assert in_child(work) == 0


def test_goes_on_from_checkpoints_of_its_own(tmp_path: Path) -> None:
    from casnap.integrations.accelerate import load_state, save_state

    def work() -> None:
        accelerator, progress, model, *_ = prepared(tmp_path / "run", limit=1)
        for epoch in (1, 2):
            progress["epoch"] = epoch
            accelerator.project_configuration.total_limit = None
            accelerator.save_state()
        accelerator.project_configuration.total_limit = 1
        before = {key: value.clone() for key, value in model.state_dict().items()}

        accelerator.project_configuration.iteration = 0
        folder = tmp_path / "run/checkpoints"
        files = sorted(path.name for path in (folder / "checkpoint_0").iterdir())
        for output in (None, folder / "checkpoint_0"):
            accelerator.project_configuration.automatic_checkpoint_naming = output is None
            with pytest.raises(SnapshotExistsError, match="the Accelerator itself has written"):
                save_state(accelerator, output)
        assert sorted(path.name for path in (folder / "checkpoint_0").iterdir()) == files
        accelerator.project_configuration.automatic_checkpoint_naming = True

        model[2].weight.data.zero_()
        progress["epoch"] = -1
        load_state(accelerator)
        assert progress["epoch"] == 2
        assert_same(dict(model.state_dict()), before)
        for epoch in (3, 4):
            progress["epoch"] = epoch
            save_state(accelerator)
        # total_limit is for snapshots.
        assert sorted(p.name for p in folder.glob("checkpoint_*")) == [
            "checkpoint_0", "checkpoint_1", "checkpoint_3",
        ]  # fmt: skip
        progress["epoch"] = -1
        load_state(accelerator)
        assert progress["epoch"] == 4
        (folder / "checkpoint_7").mkdir()  # a save of its own that was killed
        (folder / "checkpoint_7/model.safetensors").touch()
        load_state(accelerator)
        assert accelerator.project_configuration.iteration == 4
        with pytest.raises(SnapshotNotFoundError, match=r"no checkpoint at .*checkpoint_7"):
            load_state(accelerator, folder / "checkpoint_7")

    assert in_child(work) == 0


def test_folders_that_the_user_deletes_are_forgotten(tmp_path: Path) -> None:
    """As scripts of diffusers do, before each save; also in a run that goes on with another."""

    def run(first: int, last: int) -> None:
        from accelerate import Accelerator

        from casnap.integrations.accelerate import save_state

        accelerator, folder = Accelerator(cpu=True), tmp_path / "run"
        accelerator.prepare(torch.nn.Linear(9, 9))
        for step in range(first, last):
            steps = sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
            for path in steps[: max(0, len(steps) - 1)]:
                shutil.rmtree(path)
            save_state(accelerator, folder / f"checkpoint-{step}")
            names = [s.name for s in Store(folder).snapshots()]
            # What a process deletes before it first saves, it has not seen: it only warns of that.
            left = [2] if first else []
            kept = [*left, *range(max(0, step - 1), step + 1)]
            assert names == [f"checkpoint-{n}" for n in kept]

    assert in_child(lambda: run(0, 4)) == 0
    assert in_child(lambda: run(4, 7)) == 0


def test_a_save_that_was_killed_before_its_folder_was_there(tmp_path: Path) -> None:
    def run(epoch: int, *, resumes: bool) -> None:
        from casnap.integrations.accelerate import load_state, save_state

        accelerator, progress, *_ = prepared(tmp_path / "run", None)
        if resumes:
            load_state(accelerator)
            assert progress["epoch"] == 0
        for progress["epoch"] in range(epoch, epoch + 2):
            save_state(accelerator)

    folder = tmp_path / "run/checkpoints"
    assert in_child(lambda: run(0, resumes=False)) == 0
    shutil.rmtree(folder / "checkpoint_1")
    assert in_child(lambda: run(5, resumes=True)) == 0
    epochs = {s.name: s.read_object("custom_0/epoch") for s in Store(folder).snapshots()}
    assert epochs == {"checkpoint_0": 0, "checkpoint_1": 5, "checkpoint_2": 6}


def test_what_is_refused(tmp_path: Path) -> None:
    from accelerate.utils import DistributedType

    from casnap.integrations.accelerate import load_state, save_state

    def work() -> None:
        accelerator, *_ = prepared(tmp_path / "run")
        with pytest.raises(SnapshotNotFoundError, match="no checkpoint"):
            load_state(accelerator)
        save_state(accelerator)
        accelerator.project_configuration.iteration = 0
        with pytest.raises(SnapshotExistsError, match="checkpoint_0"):
            save_state(accelerator)
        accelerator.register_for_checkpointing(StateDict(more=1))
        with pytest.raises(StateError, match="lacks custom_1"):
            load_state(accelerator)
        with pytest.raises(SnapshotNotFoundError, match="no checkpoint at"):
            load_state(accelerator, tmp_path / "nowhere")
        accelerator.state.distributed_type = DistributedType.MEGATRON_LM
        for refused in (save_state, load_state):
            with pytest.raises(StateError, match="do not support MEGATRON_LM"):
                refused(accelerator)

    assert in_child(work) == 0


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_child(lambda: run_examples(GUIDE, tmp_path / "work", monkeypatch)) == 0
