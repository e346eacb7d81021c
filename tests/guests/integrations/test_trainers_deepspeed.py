"""Accelerate and Transformers with DeepSpeed: the engine, and all else, are one snapshot.

Without a GPU, Accelerate takes each rank of DeepSpeed for the only process. The tests put the
number and the count of processes into its state; all else is as on GPUs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import Snapshot, Store
from casnap.errors import StateError, WitnessError
from tests.support.bitwise import assert_same
from tests.support.deepspeed_on_cpus import import_deepspeed
from tests.support.exports import assert_exports
from tests.support.hf_trainer import Numbers
from tests.support.launched import kill_all, launched
from tests.support.trainer_contract import RunContract

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

BASE = 300 * 400


def on_ranks(size: int, work: Callable[[], object]) -> None:
    assert launched(size, work) == [0] * size


def rank() -> int:
    return torch.distributed.get_rank()


def whole(engine: Any) -> dict[str, Any]:
    """Return the weights, gathered by DeepSpeed."""
    import deepspeed

    state = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            state[name] = parameter.detach().clone()
    return state


def tell_ranks(state: Any) -> None:
    """Have Accelerate know of all ranks."""
    state.num_processes = torch.distributed.get_world_size()
    state.process_index = state.local_process_index = rank()


# --- Accelerate -------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Accelerated:
    """A run of Accelerate on CPU ranks, with a frozen base and a scheduler that is torch's."""

    def __init__(self, folder: Path, stage: int, seed: int = 0) -> None:
        import_deepspeed()
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
        }
        self.accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            project_config=ProjectConfiguration(
                str(folder), automatic_checkpoint_naming=True, total_limit=3
            ),
        )
        tell_ranks(self.accelerator.state)
        base, head = torch.nn.Linear(300, 400, bias=False), torch.nn.Linear(400, 7)
        base.requires_grad_(requires_grad=False)
        optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            torch.nn.Sequential(base, head), optimizer, scheduler
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        torch.manual_seed(7 + rank())

    def train(self) -> None:
        loss = self.model(torch.randn(2, 300, dtype=torch.bfloat16)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.counter.count += 1

    def state(self) -> dict[str, Any]:
        return {
            "weights": whole(self.model),
            "rate": self.scheduler.get_last_lr(),
            "count": self.counter.count,
            "random": torch.get_rng_state(),
        }


class TestAccelerate(RunContract):
    ranks = 2
    kill_at = 5
    store = "checkpoints"
    kept = ("checkpoint_3", "checkpoint_4", "checkpoint_5")
    least_bytes = most_new_bytes = BASE

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        from casnap.integrations.accelerate import load_state, save_state

        run = Accelerated(folder, 3)
        if (folder / "checkpoints").exists():
            load_state(run.accelerator)
        while run.counter.count < 6:
            run.train()
            if run.counter.count == kill_at:
                kill_all()
            save_state(run.accelerator)
        return run.state()

    def check_last(self, snapshot: Snapshot, end: dict[str, Any], folder: Path) -> None:
        def goes_on() -> None:
            from casnap.integrations.accelerate import load_state

            run = Accelerated(folder / "other", 1, seed=5)
            load_state(run.accelerator, snapshot.path)
            assert_same(whole(run.model), end["weights"])
            assert run.scheduler.get_last_lr() == end["rate"]

        on_ranks(1, goes_on)
        module = torch.nn.Sequential(torch.nn.Linear(300, 400, bias=False), torch.nn.Linear(400, 7))
        module.to(torch.bfloat16)
        snapshot.load_into(module, "model")
        assert_same(dict(module.state_dict()), end["weights"])
        assert_exports(snapshot, folder, "model", end["weights"])


def test_what_accelerate_refuses(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "plain", {"model": torch.nn.Linear(2, 2)})

    def work() -> None:
        from casnap.integrations.accelerate import load_state, save_state

        run = Accelerated(tmp_path, 2)
        with pytest.raises(StateError, match="lacks custom_0, scheduler"):
            load_state(run.accelerator, tmp_path / "plain")
        run.accelerator._models *= 2
        with pytest.raises(StateError, match="2 models are prepared; with DeepSpeed"):
            save_state(run.accelerator)

    on_ranks(2, work)


# --- Transformers -----------------------------------------------------------------------------


def trainer_of(folder: Path, stage: int, *, plain: bool = False, **arguments: Any) -> Any:
    import_deepspeed()
    import transformers

    from casnap.integrations.transformers import CasnapTrainerMixin

    class Ours(CasnapTrainerMixin, transformers.Trainer):
        pass

    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    settings = {"max_steps": 6, "save_steps": 1, "save_total_limit": 2} | arguments
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        deepspeed=config,
        per_device_train_batch_size=4,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    tell_ranks(args.distributed_state)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=4096, n_positions=8, n_embd=32, n_layer=1, n_head=2)
    )
    model.transformer.wte.requires_grad_(requires_grad=False)  # tied to the head, and frozen
    kind = transformers.Trainer if plain else Ours
    return kind(model=model, args=args, train_dataset=Numbers(48))


def trained(
    folder: Path, stage: int, kill_at: int | None = None, **settings: Any
) -> dict[str, Any]:
    import transformers

    class Striking(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == kill_at:
                kill_all()

    trainer = trainer_of(folder, stage, **settings)
    trainer.add_callback(Striking)
    trainer.train(
        resume_from_checkpoint=True if folder.exists() and any(folder.iterdir()) else None
    )
    state = whole(trainer.deepspeed)
    rate = trainer.lr_scheduler.get_last_lr()
    return {"model": state, "rate": rate, "step": trainer.state.global_step}


class TestTransformers(RunContract):
    ranks = 2
    kill_at = 4
    kept = ("checkpoint-5", "checkpoint-6")
    least_bytes = most_new_bytes = 4096 * 32 * 4

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        return trained(folder, 3, kill_at)

    def check_last(self, snapshot: Snapshot, end: dict[str, Any], folder: Path) -> None:
        weights = {n: end["model"][n] for n in end["model"] if n.startswith("transformer")}
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
        assert_exports(snapshot, folder, "model", weights)

        def goes_on() -> None:  # on another number of ranks, in another stage
            shutil.copytree(Path(snapshot.path).parent, folder / "other")
            assert trained(folder / "other", 1, max_steps=8)["step"] == 8

        on_ranks(1, goes_on)


def test_a_resume_proves_itself(tmp_path: Path) -> None:
    import transformers

    class Faulty(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **has: Any) -> None:
            has["optimizer"].param_groups[0]["lr"] *= 2

    def run(*callbacks: Any) -> None:
        trainer = trainer_of(tmp_path, 3, max_steps=5, save_steps=3)
        trainer.casnap_witness_steps, trainer.casnap_on_mismatch = 1, "raise"
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=any(tmp_path.glob("checkpoint-*")))

    class Striking(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                kill_all()

    def is_told() -> None:
        with pytest.raises(WitnessError, match=r"checkpoint-3\+1: .* weights: model/transformer"):
            run(Faulty)

    assert launched(2, lambda: run(Striking)) == [-9] * 2
    assert "witness/checkpoint-3+1" in Store(tmp_path)
    on_ranks(2, is_told)
    on_ranks(2, run)


def test_a_checkpoint_of_a_plain_trainer_stops_a_resume(tmp_path: Path) -> None:
    """With ZeRO-3, it has no file of weights by which it could be told."""
    steps = {"max_steps": 2, "save_steps": 2}

    def train() -> None:
        trainer_of(tmp_path, 3, **steps).train()

    def train_anew() -> None:
        shutil.rmtree(tmp_path / "checkpoint-2")
        trainer_of(tmp_path, 3, plain=True, **steps).train()

    def is_refused() -> None:
        trainer = trainer_of(tmp_path, 3, max_steps=3)
        with pytest.raises(StateError, match=r"checkpoint-2 holds a snapshot of .* that DeepSpeed"):
            trainer.train(resume_from_checkpoint=True)

    def is_loaded() -> None:
        Store(tmp_path).delete("checkpoint-2")
        trainer_of(tmp_path, 3, max_steps=3).train(resume_from_checkpoint=True)

    for work in (train, train_anew, is_refused, is_loaded):
        on_ranks(1, work)
    assert [snapshot.metadata.user["step"] for snapshot in Store(tmp_path).snapshots()] == [3]


def test_what_transformers_refuses(tmp_path: Path) -> None:
    def work() -> None:
        with pytest.raises(StateError, match="does not support save_only_model with DeepSpeed"):
            trainer_of(tmp_path / "run", 1, save_only_model=True).train()

    on_ranks(1, work)
