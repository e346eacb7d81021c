"""With FSDP, Trainer and Accelerator save and resume as with DDP, on any number of ranks."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from casnap import Snapshot
from casnap.errors import StateError
from tests.support import accelerated, hf_trainer
from tests.support.accelerate_fsdp import use_fsdp
from tests.support.bitwise import assert_same
from tests.support.faults import in_child
from tests.support.hf_trainer import loaded, stored, with_weights
from tests.support.launched import kill_all, launched
from tests.support.trainer_contract import RunContract

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]


def local(value: Any) -> Any:
    """Return a state with the parts that this rank has in place of divided tensors."""
    if isinstance(value, dict):
        return {key: local(inner) for key, inner in value.items()}
    if isinstance(value, ShardedTensor):
        return [shard.tensor.clone() for shard in value.local_shards()]
    return value.to_local().clone() if isinstance(value, DTensor) else value


def whole(value: Any) -> Any:
    """Return a copy of a state, with whole tensors on rank 0 in place of divided ones."""
    if isinstance(value, dict):
        return {key: whole(value[key]) for key in sorted(value)}
    if isinstance(value, ShardedTensor):
        full = torch.empty(value.size()) if os.environ["RANK"] == "0" else None
        value.gather(0, full)
        return full
    return value.full_tensor() if isinstance(value, DTensor) else copy.deepcopy(value)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    from casnap.integrations.sharded import ShardedModel, ShardedOptimizer

    return {
        "model": ShardedModel(model).state_dict(),
        "optimizer": ShardedOptimizer(model, optimizer).state_dict(),
    }


def assert_holds(snapshot: Snapshot, state: dict[str, Any]) -> None:
    """Compare the snapshot with the whole state of a run that has loaded it."""
    for key in ("model", "optimizer"):
        assert_same(whole(dict(snapshot.get_state_dict_for_key(key))), state[key])


class FsdpContract(RunContract):
    """Killed and resumed on two ranks; then loaded by three, and by one without FSDP.

    Attributes:
        version: FSDP1 or FSDP2.
        kind: How the framework's own saves are, which changes nothing here.
    """

    ranks = 2
    version: ClassVar[int]
    kind: ClassVar[str]

    def load(self, folder: Path, *, fsdp: bool = True) -> dict[str, Any]:
        """Load the last snapshot, and return the whole state on rank 0."""
        raise NotImplementedError

    def check_last(self, snapshot: Snapshot, end: dict[str, Any], folder: Path) -> None:
        manifest = snapshot.get_manifest()
        assert all(manifest.is_global(p) for p in manifest if p.startswith("0/model"))
        assert not manifest.is_global("1/rng/torch")
        run = folder / "run"

        def load(name: str, *, fsdp: bool) -> None:
            out = folder / f"{name}-{os.environ.get('RANK', 0)}"
            shutil.copytree(run, out)
            torch.save(self.load(out, fsdp=fsdp), f"{out}.pt")

        assert launched(3, lambda: load("three", fsdp=True)) == [0, 0, 0]
        assert in_child(lambda: load("one", fsdp=False)) == 0
        for name in ("three", "one"):
            assert_holds(snapshot, torch.load(folder / f"{name}-0.pt", weights_only=True))


class TrainerWithFsdp(FsdpContract):
    kill_at = 5
    kept = ("checkpoint-6", "checkpoint-8")
    least_bytes = most_new_bytes = hf_trainer.FROZEN

    def trainer(self, folder: Path, *, fsdp: bool = True, **arguments: Any) -> Any:
        trainer = hf_trainer.trainer_of(folder, **arguments)
        if fsdp:
            use_fsdp(trainer.accelerator, self.version, self.kind)
            trainer.is_fsdp_enabled = True
        return trainer

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        import transformers

        class Striking(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == kill_at:
                    kill_all()

        trainer = self.trainer(folder)
        trainer.add_callback(Striking)
        trainer.train(resume_from_checkpoint="auto")
        state: dict[str, Any] = local(state_of(trainer.model, trainer.optimizer))
        return state

    def load(self, folder: Path, *, fsdp: bool = True) -> dict[str, Any]:
        import transformers

        found = {}

        class Looking(transformers.TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                found.update(whole(state_of(trainer.model, trainer.optimizer)))

        trainer = self.trainer(folder, fsdp=fsdp)
        trainer.add_callback(Looking)
        trainer.train(resume_from_checkpoint=str(folder / self.kept[-1]))
        return found

    def check_last(self, snapshot: Snapshot, end: dict[str, Any], folder: Path) -> None:
        super().check_last(snapshot, end, folder)
        assert with_weights(folder / "run") == ["checkpoint-8"]
        assert_same(loaded(Path(snapshot.path)), stored(snapshot))


class TestTrainerFsdp1(TrainerWithFsdp):
    version, kind = 1, "FULL_STATE_DICT"


class TestTrainerFsdp2(TrainerWithFsdp):
    version, kind = 2, "SHARDED_STATE_DICT"

    def test_the_best_model_is_loaded(self, tmp_path: Path) -> None:
        def go() -> None:
            trainer = self.trainer(
                tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2,
                load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
            )  # fmt: skip
            trainer.train()
            assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
            state = whole(state_of(trainer.model, trainer.optimizer))
            if os.environ["RANK"] == "0":
                values = Snapshot(tmp_path / "checkpoint-2").get_state_dict_for_key("model")
                assert_same(whole(dict(values)), state["model"])

        assert launched(2, go) == [0, 0]

    def test_what_was_saved_without_fsdp_is_refused(self, tmp_path: Path) -> None:
        """Its optimizer has no names."""

        def resume() -> None:
            with pytest.raises(StateError, match="was saved without FSDP"):
                self.trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=True)

        assert in_child(lambda: self.trainer(tmp_path, fsdp=False, max_steps=2).train()) == 0
        assert launched(2, resume) == [0, 0]


def test_an_adapter_stands_beside_its_snapshot(tmp_path: Path) -> None:
    """LoRA of PEFT: the base is stored once, and a killed run goes on with the same bits."""
    from safetensors.torch import load_file

    def go(name: str, steps: int, *, resume: bool = False) -> None:
        trainer = hf_trainer.trainer_of(
            tmp_path / name, adapter="wrapped", max_steps=steps, lr_scheduler_type="constant"
        )
        use_fsdp(trainer.accelerator)
        trainer.is_fsdp_enabled = True
        trainer.train(resume_from_checkpoint=resume)

    assert launched(2, lambda: go("run", 2)) == [0, 0]
    assert launched(2, lambda: go("run", 4, resume=True)) == [0, 0]
    assert launched(2, lambda: go("whole", 4)) == [0, 0]
    states = [Snapshot(tmp_path / name / "checkpoint-4") for name in ("run", "whole")]
    for key in ("model", "optimizer"):
        assert_same(*(dict(s.get_state_dict_for_key(key)) for s in states))
    adapter = load_file(tmp_path / "run/checkpoint-4/adapter_model.safetensors")
    assert adapter
    values = states[0].get_state_dict_for_key("model")
    for name, tensor in adapter.items():
        assert_same(tensor, values[name.replace(".weight", ".default.weight")])
    assert states[0].stats.new_bytes < hf_trainer.FROZEN


def test_an_adapter_with_fsdp1_is_refused(tmp_path: Path) -> None:
    """Its whole tensors cannot be had without the base."""

    def go() -> None:
        trainer = hf_trainer.trainer_of(tmp_path / "run", adapter="wrapped")
        use_fsdp(trainer.accelerator, 1)
        trainer.is_fsdp_enabled = True
        with pytest.raises(StateError, match="PEFT with FSDP1"):
            trainer.train()

    assert launched(2, go) == [0, 0]


class AcceleratorWithFsdp(FsdpContract):
    kill_at = 2
    store = "checkpoints"
    kept = ("checkpoint_2", "checkpoint_3")
    least_bytes = accelerated.FROZEN
    most_new_bytes = accelerated.FROZEN // 10

    @pytest.fixture(autouse=True)
    def _no_state_of_before(self) -> None:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        from casnap.integrations.accelerate import load_state, save_state, witness_steps

        prepared = accelerated.prepared(folder, fsdp=(self.version, self.kind))
        accelerator, progress, model, optimizer, (scheduler, loader) = prepared
        witness_steps(accelerator, 1, on_mismatch="raise")
        torch.manual_seed(1)
        if (folder / "checkpoints").exists():
            load_state(accelerator)
        while progress["epoch"] < 4:
            for number, (batch,) in enumerate(loader):
                if progress["epoch"] == kill_at and number == 1:
                    kill_all()
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress["epoch"] += 1
            save_state(accelerator)
        state: dict[str, Any] = local(state_of(model, optimizer))
        return state

    def load(self, folder: Path, *, fsdp: bool = True) -> dict[str, Any]:
        from casnap.integrations.accelerate import load_state, witness_steps

        how = (self.version, self.kind) if fsdp else None
        accelerator, progress, model, optimizer, _ = accelerated.prepared(folder, fsdp=how)
        # torch makes a step to read the state of an optimizer that has none on this rank.
        witness_steps(accelerator, 1)
        load_state(accelerator)
        assert progress["epoch"] == 4
        return whole(state_of(model, optimizer))  # type: ignore[no-any-return]


class TestAcceleratorFsdp1(AcceleratorWithFsdp):
    version, kind = 1, "SHARDED_STATE_DICT"


class TestAcceleratorFsdp2(AcceleratorWithFsdp):
    version, kind = 2, "FULL_STATE_DICT"

    def test_other_numbers_of_models_and_optimizers_are_refused(self, tmp_path: Path) -> None:
        def go() -> None:
            from casnap.integrations.accelerate import save_state

            accelerator = accelerated.prepared(tmp_path, fsdp=(2, "SHARDED_STATE_DICT"))[0]
            accelerator._models.append(accelerator._models[0])
            with pytest.raises(StateError, match="2 models and 1 optimizers are prepared"):
                save_state(accelerator)

        assert launched(2, go) == [0, 0]
