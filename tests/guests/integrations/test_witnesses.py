"""A run that is killed proves itself when it resumes: a right one is silent, a wrong one warns."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import RNGState, Store
from casnap.errors import StateError, WitnessError
from tests.support.accelerated import prepared
from tests.support.cli_calls import COMMAND
from tests.support.faults import in_child
from tests.support.heard import warnings_heard
from tests.support.hf_trainer import trainer_of
from tests.support.launched import kill_all, launched
from tests.support.mounts import fill, tmpfs

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]


def killed(work: Callable[[], object], ranks: int | None = None) -> None:
    ended = [in_child(work)] if ranks is None else launched(ranks, work)
    assert ended == [-9] * (ranks or 1)


def told(work: Callable[[], object], place: Path, ranks: int | None = None) -> list[str]:
    """Do some work on each rank; return what rank 0 is told of witnesses, or what it raises."""

    def listen() -> None:
        with warnings_heard() as texts:
            try:
                work()
            except WitnessError as e:
                texts.append(f"raised: {e}")
        place.with_suffix(f".{os.environ.get('RANK', 0)}").write_text(json.dumps(texts))

    ended = [in_child(listen)] if ranks is None else launched(ranks, listen)
    assert ended == [0] * (ranks or 1)
    for rank in range(1, ranks or 1):
        others: list[str] = json.loads(place.with_suffix(f".{rank}").read_text())
        assert [text for text in others if "raised" not in text] == []
    texts: list[str] = json.loads(place.with_suffix(".0").read_text())
    return [text for text in texts if "+" in text or "witness" in text]


def witnesses_in(store: Path, snapshot: str) -> list[str]:
    """Return the names of the witnesses after a snapshot that are there."""
    names = [f"witness/{snapshot}+{step}" for step in range(1, 5)]
    return [name.partition("+")[2] for name in names if name in Store(store, create=False)]


# --- Transformers -------------------------------------------------------------------------------


def hf(folder: Path, *, kill_at: int | None = None, fault: str = "", **how: Any) -> None:
    """Train up to step 8, from the last checkpoint; each fourth step is saved."""
    import transformers

    class Striking(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **has: Any) -> None:
            if fault == "moments" and state.global_step:
                has["optimizer"].state.clear()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == kill_at:
                kill_all()

    on_mismatch = how.pop("on_mismatch", "warn")
    trainer = trainer_of(folder, **{"save_steps": 4, "ignore_data_skip": fault == "data", **how})
    trainer.casnap_witness_steps, trainer.casnap_on_mismatch = 2, on_mismatch
    trainer.add_callback(Striking)
    trainer.train(resume_from_checkpoint="auto")


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_trainer_of_transformers(tmp_path: Path, ranks: int | None) -> None:
    """Steps are those of the optimizer. Alone, it resumes within an epoch."""
    out, said = tmp_path / "out", tmp_path / "said"
    train = partial(hf, out, gradient_accumulation_steps=2)
    killed(partial(train, kill_at=6), ranks)
    assert witnesses_in(out, "checkpoint-4") == ["1", "2"]
    killed(partial(train, kill_at=6), ranks)
    wrong = partial(train, on_mismatch="raise")
    (text,) = told(partial(wrong, fault="moments"), said, ranks)
    assert text.startswith("raised: checkpoint-4+1: ")
    assert "the first by role: moments: optimizer/state/" in text
    if ranks is None:
        (text,) = told(partial(wrong, fault="data"), said)
        assert "counters: progress/epoch; " in text
    assert told(train, said, ranks) == []


def test_a_difference_is_told_once(tmp_path: Path) -> None:
    """So is another number of ranks."""
    out, said = tmp_path / "out", tmp_path / "said"
    killed(lambda: hf(out, kill_at=6), 2)
    (text,) = told(partial(hf, out, fault="moments"), said, 2)
    assert text.startswith("checkpoint-4+1: ")
    (out / "checkpoint-8").rename(tmp_path / "aside")
    why = "not compared: 2 ranks had it, and this is 1"
    assert told(partial(hf, out), said) == [f"checkpoint-4+1: {why}"]


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_witness_that_fails_ends_no_training(tmp_path: Path, ranks: int | None) -> None:
    """Rank 0 alone meets the full disk, and all go on."""
    import transformers

    class Full(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not state.is_world_process_zero:
                return
            if state.global_step == 4:
                fill(disk)
            elif state.global_step == 5:
                (disk / "fill").unlink()

    def train() -> None:
        trainer = trainer_of(disk / "out", save_steps=4)
        trainer.casnap_witness_steps = 2
        trainer.add_callback(Full)
        trainer.train()

    with tmpfs(tmp_path / "disk", "24m") as disk:
        (text,) = told(train, tmp_path / "said", ranks)
        assert text.startswith(f"no witness of step 1 after {disk}/out/checkpoint-4: ")
        assert "--grace 0` frees" in text
        assert witnesses_in(disk / "out", "checkpoint-4") == []


def test_a_fork_and_a_new_run_meet_no_witness(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed(lambda: hf(out, kill_at=6))
    of_run = "witness/checkpoint-4+1"

    def begin(folder: Path, resume: str | None = None) -> None:
        trainer = trainer_of(folder, save_steps=4, learning_rate=0.5)
        trainer.casnap_witness_steps = 2
        trainer.train(resume_from_checkpoint=resume)

    before = Store(out)[of_run].commit_id
    fork = partial(begin, tmp_path / "fork", str(out / "checkpoint-4"))
    assert told(fork, tmp_path / "said") == []
    assert Store(out)[of_run].commit_id == before
    assert told(partial(begin, out), tmp_path / "said") == []
    assert Store(out)[of_run].commit_id != before


def test_wrong_options_are_told_before_the_training(tmp_path: Path) -> None:
    for attribute, value in (
        ("witness_steps", -1),
        ("witness_steps", "2"),
        ("on_mismatch", "tell"),
    ):
        trainer = trainer_of(tmp_path)
        setattr(trainer, f"casnap_{attribute}", value)
        with pytest.raises(ValueError, match=f"{attribute} is .*; got "):
            trainer.train()


SCRIPT = """
import os, signal, sys
from pathlib import Path
from transformers import Trainer, TrainerCallback
from tests.support.hf_trainer import trainer_of

class Striking(TrainerCallback):
    def on_train_begin(self, args, state, control, optimizer, **_):
        if "--fault" in sys.argv:
            optimizer.state.clear()
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

trainer = trainer_of(Path("out"), plain=True, save_steps=4, resume_from_checkpoint="auto")
trainer.add_callback(Striking)
trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
"""


def test_casnap_run(tmp_path: Path) -> None:
    (tmp_path / "casnap.toml").write_text("witness_steps = 3\n")
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*more: str) -> str:
        options = ["--witness-steps", "2", "--config", "casnap.toml"]
        command = [*COMMAND, "run", *options, "--", sys.executable, "train.py", *more]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == -9, done.stderr
        return done.stderr

    run()
    assert witnesses_in(tmp_path / "out", "checkpoint-4") == ["1", "2"]
    assert "checkpoint-4+" not in run()
    assert "checkpoint-4+1: " in run("--fault")


# --- Accelerate ---------------------------------------------------------------------------------


def accelerated(project: Path, *, end: str = "", fault: str = "", accumulate: int = 1) -> None:
    """Train for four epochs, from the last checkpoint; each is saved.

    Args:
        project: The folder.
        end: Whether to "kill" this process, or "stop", before the last batch of the third epoch.
        fault: What to forget after a resume.
        accumulate: How many batches make a step.
    """
    from casnap.integrations.accelerate import load_state, save_state, witness_steps

    accelerator, progress, model, optimizer, (scheduler, loader) = prepared(project)
    accelerator.gradient_accumulation_steps = accumulate
    witness_steps(accelerator, 2)
    torch.manual_seed(1)
    if (project / "checkpoints").exists():
        load_state(accelerator)
        if fault == "moments":
            optimizer.optimizer.state.clear()
        elif fault == "generators":
            torch.manual_seed(5)
    while progress["epoch"] < 4:
        for number, (batch,) in enumerate(loader):
            if end and progress["epoch"] == 2 and number == len(loader) - 1:
                if end == "stop":
                    return
                kill_all()
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        progress["epoch"] += 1
        save_state(accelerator)


@pytest.mark.parametrize("ranks", [None, 2])
def test_an_accelerator(tmp_path: Path, ranks: int | None) -> None:
    """Alone, two batches make a step."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    project, said = tmp_path / "run", tmp_path / "said"
    train = partial(accelerated, project, accumulate=2 if ranks is None else 1)
    killed(partial(train, end="kill"), ranks)
    assert witnesses_in(project / "checkpoints", "checkpoint_1") == ["1"]
    killed(partial(train, end="kill"), ranks)
    for fault in ("moments", "generators"):
        (text,) = told(partial(train, fault=fault, end="stop"), said, ranks)
        assert text.startswith("checkpoint_1+1: ")
        assert f"{fault}: " in text
    assert told(train, said, ranks) == []


def test_an_accelerator_without_an_optimizer_is_refused() -> None:
    from accelerate import Accelerator

    from casnap.integrations.accelerate import witness_steps

    with pytest.raises(StateError, match="needs a prepared optimizer"):
        witness_steps(Accelerator(cpu=True), 2)


# --- Lightning ----------------------------------------------------------------------------------


def lightning(
    folder: Path, package: str, *, kill_at: int | None = None, fault: str = "", **options: Any
) -> None:
    """Train for four epochs of four steps, from the last checkpoint; each epoch is saved."""
    pl = importlib.import_module("lightning.pytorch" if package == "lightning" else package)
    plugin = importlib.import_module(f"casnap.integrations.{package}").CasnapCheckpointIO

    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(64, 8))

        def on_train_start(self) -> None:
            if fault == "moments":
                self.trainer.optimizers[0].state.clear()

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            if self.global_step == kill_at:
                kill_all()
            loss: torch.Tensor = self.head(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.head.parameters(), lr=0.1)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["rng"] = RNGState().state_dict()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if fault != "generators":
                RNGState().load_state_dict(checkpoint["rng"])

    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64, generator=torch.Generator()))
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        accumulate_grad_batches=2,
        plugins=[plugin(witness_steps=2, **options)],
        callbacks=[pl.callbacks.ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, 8), ckpt_path="last")


@pytest.mark.parametrize(
    ("package", "ranks"), [("lightning", None), ("lightning", 2), ("pytorch_lightning", None)]
)
def test_lightning(tmp_path: Path, package: str, ranks: int | None) -> None:
    """Two batches make a step; the plugin of rank 0 saves, and all ranks make the state."""
    run, said = tmp_path / "run", tmp_path / "said"
    train = partial(lightning, run, package)
    kill_at = 3 if ranks else 6
    killed(partial(train, kill_at=kill_at), ranks)
    assert witnesses_in(run, "last.ckpt") == (["1"] if ranks else ["1", "2"])
    killed(partial(train, kill_at=kill_at), ranks)
    for fault in ("moments", "generators"):
        (text,) = told(partial(train, fault=fault, on_mismatch="raise"), said, ranks)
        assert text.startswith("raised: last.ckpt+1: ")
        assert ("moments" if fault == "moments" else "generators: rng") in text
    if ranks:
        assert "raised: " in Path(f"{said}.1").read_text()
    assert told(train, said, ranks) == []


def test_lightning_in_the_background(tmp_path: Path) -> None:
    """A witness waits until the snapshot is stored."""
    train = partial(lightning, tmp_path / "run", "lightning", async_save=True)
    killed(partial(train, kill_at=6))
    (text,) = told(partial(train, fault="moments", on_mismatch="raise"), tmp_path / "said")
    assert text.startswith("raised: last.ckpt+1: ")
    assert told(train, tmp_path / "said") == []
