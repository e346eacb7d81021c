"""torchtitan's CheckpointManager saves and loads through casnap.

Its Trainer needs a GPU. So its own containers of optimizers, schedulers and data loaders are driven
here by a loop of ours, on ranks that are processes of gloo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from casnap import Snapshot, Store
from casnap.errors import DamagedError, WitnessError
from casnap.integrations.folders import prune_missing_folders
from tests.support import disk
from tests.support.bitwise import assert_same
from tests.support.exports import assert_exports
from tests.support.faults import in_child, kill
from tests.support.heard import warnings_heard
from tests.support.launched import launched
from tests.support.pages import run_examples
from tests.support.trainer_contract import TrainerContract

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

GUIDES = Path(__file__).parents[3] / "docs/guides"
FROZEN = 4096 * 64 * 4


class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
    """A data set that knows where it is, as torchtitan's do."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield torch.arange(8) * 31 + self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


class Progress:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.step = int(state_dict["step"])


def built(
    folder: Path,
    *,
    sharded: bool = False,
    plain: bool = False,
    dense: bool = False,
    **settings: Any,
) -> Any:
    """Return a manager, and what it keeps.

    Args:
        folder: Where it saves.
        sharded: Whether the model is sharded.
        plain: Whether it is torchtitan's own manager, on a store of casnap's.
        dense: Whether every byte of the state changes with each step.
        settings: Those of the manager.
    """
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        OptimizersContainer,
        ParamGroupConfig,
    )

    from casnap.integrations.dcp import install
    from casnap.integrations.torchtitan import CasnapCheckpointManager

    if plain:
        install(folder / "checkpoint", dcp_files=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(4096, 64).requires_grad_(requires_grad=False), torch.nn.Linear(64, 8)
    )
    if dense:
        model = disk.dense()
    if sharded:
        fully_shard(model)
    optimizers = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})
        ],
        implementation="for-loop",
    ).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=8
    )
    loader = ParallelAwareDataloader(Numbers(), dp_rank=0, dp_world_size=1, batch_size=2)
    progress = Progress()
    kind = CheckpointManager if plain else CasnapCheckpointManager
    often = {"interval": 2, "keep_latest_k": 2, "last_save_model_only": False}
    config = kind.Config(enable=True, **(often | settings))
    manager = config.build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(folder),
    )
    return manager, model, optimizers, schedulers, loader, progress


def train(
    folder: Path, end: Path, kill_at: int | None = None, *, fault: str = "", **how: Any
) -> None:
    from torch.distributed.tensor import DTensor

    manager, model, optimizers, schedulers, loader, progress = built(folder, **how)
    manager.load()
    if fault == "moments":
        for optimizer in optimizers:
            optimizer.state.clear()
    elif fault == "loader":
        loader.dataset.load_state_dict = lambda _: None
    batches = iter(loader)
    while progress.step < 8:
        model(next(batches)).square().mean().backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        progress.step += 1
        if progress.step == kill_at:
            manager.maybe_wait_for_saving()
            kill()
        manager.save(progress.step, last_step=progress.step == 8)
    manager.maybe_wait_for_saving()
    manager.close()
    state = {**model.state_dict(), **optimizers.state_dict()}
    full = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in state.items()
    }
    if dist.get_rank() == 0:
        torch.save(full, end)


def in_world(size: int, work: Callable[[], object]) -> list[int]:
    """Do some work on ranks of gloo; return how they ended."""

    def joined() -> None:
        dist.init_process_group("cpu:gloo")
        work()
        dist.destroy_process_group()

    return launched(size, joined)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


class TestManager(TrainerContract):
    ranks = 1
    ways = ("disabled", "async")
    kill_at = 5
    store = "checkpoint"
    # The last step is saved without a purge, as torchtitan does it.
    kept = ("step-4", "step-6", "step-8")
    least_bytes = FROZEN
    most_new_bytes = FROZEN // 10
    name = "step-2"
    other = CheckpointException
    damaged = (DamagedError, CheckpointException)

    def work(self, work: Callable[[], object]) -> list[int]:
        return in_world(1, work)

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        end = folder.with_name(f"end-{os.getpid()}")
        train(folder, end, kill_at, async_mode=way or "disabled")
        state: dict[str, Any] = load(end)
        return state

    def load(self, folder: Path) -> object:
        manager, *_ = built(folder)
        manager.load()
        manager.close()
        return None

    def check_last(self, snapshot: Snapshot, end: dict[str, Any], folder: Path) -> None:
        assert snapshot.metadata.user == {"step": 8}
        weight = snapshot.read_object("1.weight")
        assert torch.equal(weight, end["1.weight"])
        assert_exports(snapshot, folder, "1.weight", {"1.weight": weight})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert in_world(1, lambda: train(folder, folder / "end")) == [0]
    return folder


def test_another_number_of_ranks_goes_on(uninterrupted: Path, tmp_path: Path) -> None:
    """Two ranks with FSDP2 begin, and a single one without it goes on."""
    end = tmp_path / "end"
    begin = lambda: train(tmp_path, end, kill_at=5, sharded=True)  # noqa: E731
    assert in_world(2, begin) == [-9, -9]
    assert in_world(1, lambda: train(tmp_path, end)) == [0]
    for key, value in load(uninterrupted / "end").items():
        torch.testing.assert_close(load(end)[key], value)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_that_is_killed_proves_itself(tmp_path: Path, mode: str) -> None:
    end = tmp_path / "end"

    def go(kill_at: int | None = None, **how: Any) -> None:
        how = {"sharded": True, "witness_steps": 2, "interval": 3, "async_mode": mode} | how
        with warnings_heard() as texts:
            try:
                train(tmp_path, end, kill_at, **how)
            except WitnessError as e:
                texts.append(f"raised: {e}")
        said = [text for text in texts if "step-3+" in text]
        (tmp_path / f"said-{dist.get_rank()}").write_text("".join(said))

    for _ in range(2):
        assert in_world(2, lambda: go(6)) == [-9, -9]
        assert "witness/step-3+2" in Store(tmp_path / "checkpoint")
    for fault in ("moments", "loader"):
        assert in_world(2, lambda f=fault: go(fault=f, on_mismatch="raise")) == [0, 0]  # type: ignore[misc]
        for rank in (0, 1):
            text = (tmp_path / f"said-{rank}").read_text()
            assert text.startswith("raised: step-3+1: ")
            assert f"{fault}: " in text
    assert in_world(2, go) == [0, 0]
    assert (tmp_path / "said-0").read_text() == ""


def test_a_folder_below_the_home_folder(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is taken there is found there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    end = tmp_path / "end"
    assert in_world(1, lambda: train(Path("~/run"), end, 5)) == [-9]
    begun = Store("~/run/checkpoint", create=False)["step-4"].commit_id
    assert in_world(1, lambda: train(Path("~/run"), end)) == [0]
    assert_same(load(end), load(uninterrupted / "end"))
    assert Store(tmp_path / "run/checkpoint")["step-4"].commit_id == begun


def test_goes_on_from_the_checkpoints_of_torchtitan(uninterrupted: Path, tmp_path: Path) -> None:
    from torchtitan.components.checkpointer import CheckpointManager

    from casnap.integrations.torchtitan import CasnapCheckpointManager

    def plain() -> None:
        CasnapCheckpointManager.dcp_save = CheckpointManager.dcp_save
        train(tmp_path, tmp_path / "end", kill_at=5)

    assert in_world(1, plain) == [-9]
    assert (tmp_path / "checkpoint/step-4/.metadata").exists()
    assert in_world(1, lambda: train(tmp_path, tmp_path / "end")) == [0]
    assert_same(load(tmp_path / "end"), load(uninterrupted / "end"))
    assert not (tmp_path / "checkpoint/step-2").exists()


def test_torchtitans_own_manager_on_a_store(uninterrupted: Path, tmp_path: Path) -> None:
    """It finds the last step by the files of DCP's names."""
    end = tmp_path / "end"
    assert in_world(1, lambda: train(tmp_path, end, 5, plain=True)) == [-9]
    store = Store(tmp_path / "checkpoint", create=False)
    begun = store["step-4"]
    assert begun.stats.new_bytes < FROZEN // 10
    assert in_world(1, lambda: train(tmp_path, end, plain=True)) == [0]
    assert_same(load(end), load(uninterrupted / "end"))
    # A thread may delete the folder of a step after the next save has begun.
    prune_missing_folders(store)
    assert [s.name for s in store.snapshots()] == ["step-4", "step-6", "step-8"]


def save_often(folder: Path, *, plain: bool) -> None:
    manager, model, optimizers, _, _, progress = built(folder, dense=True, plain=plain, interval=1)
    manager.load()
    for step in range(1, disk.SAVES + 1):
        model(torch.randn(8, disk.WIDTH)).square().mean().backward()
        optimizers.step()
        optimizers.zero_grad()
        progress.step = step
        manager.save(step)
        while len(list((folder / "checkpoint").glob("step-*"))) > 2:
            time.sleep(0.01)  # a thread deletes them
    manager.close()


@pytest.mark.parametrize("plain", [False, True])
def test_a_disk_holds_what_torchtitan_keeps_and_one_state(tmp_path: Path, plain: bool) -> None:
    """With its own manager also the one whose folder went last, until the next save."""
    save = lambda folder: save_often(folder, plain=plain)  # noqa: E731
    assert in_world(1, lambda: disk.assert_bounded(tmp_path, save, kept=2 + plain)) == [0]


# torchtitan brings along what the other two need: torchdata, wandb and TensorBoard.
@pytest.mark.parametrize("name", ["torchtitan", "data", "trackers"])
def test_the_guide_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = GUIDES / f"{name}.md"
    assert in_child(lambda: run_examples(page, tmp_path / "work", monkeypatch)) == 0


# --- the data loader of torchdata, which torchtitan uses ----------------------------------------


def shuffled(seed: int, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(seed)
    data = torch.arange(40)
    return StatefulDataLoader(data, 4, shuffle=True, generator=generator, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_goes_on(tmp_path: Path, workers: int) -> None:
    loader, store = shuffled(1, workers), Store(tmp_path / "store")
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    store.take({"loader": loader}, "taken")
    store.async_take({"loader": loader}, "taken later").wait()
    rest = [batch.tolist() for batch in batches]
    for name in ("taken", "taken later"):
        new, begun = shuffled(2, workers), shuffled(3, workers)
        next(iter(begun))
        for other in (new, begun):
            store[name].restore({"loader": other})
            assert [batch.tolist() for batch in other] == rest
