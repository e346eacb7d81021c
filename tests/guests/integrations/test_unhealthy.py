"""Trainers of a run that gets NaN: each passes over those snapshots when it resumes."""

from __future__ import annotations

import logging
import shutil
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import Snapshot, StateDict, Store
from casnap.errors import SnapshotError
from casnap.extending import LiveState, TakeOptions
from casnap.integrations.folders.rotation import forget
from casnap.integrations.trainers import Checkpoints, Save, snapshot_at
from tests.support.faults import in_child

# --- what the trainers share ----------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with checkpoints of which the last two have NaN."""
    monkeypatch.setenv("CASNAP_HEALTH", "warn")
    for step, number in enumerate((1.0, 2.0, nan, nan)):
        save_step(tmp_path / "run", step, number)
    return tmp_path / "run"


def save_step(run: Path, step: int, number: float) -> None:
    state = {"model": StateDict(w=torch.full((100,), number))}
    Save(run / f"step-{step}", TakeOptions(overwrite=True)).take(lambda: LiveState(state))


def checkpoints(run: Path) -> Checkpoints:
    return Checkpoints(run, "step-", lambda path: (path / "own").exists())


def test_the_last_healthy_one_is_found(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoints(run).find_last() == str(run / "step-1")
    assert caplog.messages == [
        f"{run}/step-{step} is passed over: NaN or infinite elements in 1 tensor" for step in (3, 2)
    ]
    assert checkpoints(run).next_number() == 4
    (run / "step-3" / "own").touch()
    assert checkpoints(run).find_last() == str(run / "step-3"), "its own are not known"


def test_a_run_may_be_told_to_go_on_from_nan(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CASNAP_HEALTH")
    assert checkpoints(run).find_last() == str(run / "step-1"), "what is known counts"
    monkeypatch.setenv("CASNAP_HEALTH", "off")
    caplog.clear()
    assert checkpoints(run).find_last() == str(run / "step-3")
    assert not caplog.messages


def test_a_limit_leaves_the_last_healthy_one(run: Path) -> None:
    """A trainer deletes its folder all the same, and finds the snapshot without it."""
    checkpoints(run).forget_oldest(2)
    assert [s.name for s in Store(run).snapshots()] == ["step-1", "step-2", "step-3"]
    shutil.rmtree(run / "step-1")
    save_step(run, 4, nan)
    assert checkpoints(run).find_last() == str(run / "step-1")
    snapshot = snapshot_at(run / "step-1")
    assert snapshot is not None
    assert snapshot.unhealthy == 0
    # It goes as any other once the run is well again.
    save_step(run, 5, 1.0)
    save_step(run, 6, 1.0)
    assert [s.name for s in Store(run).snapshots()] == [f"step-{i}" for i in (2, 3, 4, 5, 6)]


def test_none_is_healthy(run: Path) -> None:
    for step in (0, 1):
        Store(run).delete(f"step-{step}")
    with pytest.raises(SnapshotError, match=r"all checkpoints in .*run have NaN .*step-3: `casnap"):
        checkpoints(run).find_last()


def test_what_is_held_is_told(run: Path) -> None:
    for step, is_gone in ((0, True), (1, False), (2, True)):
        snapshot = snapshot_at(run / f"step-{step}")
        assert snapshot is not None
        assert forget(snapshot) is is_gone


# --- real trainers --------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASNAP_HEALTH", "warn")


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")
def test_the_trainer_of_transformers(tmp_path: Path, measured: None) -> None:
    """NaN from step 5 on; all folders but two are rotated away; then it resumes, and is well."""
    import transformers

    from tests.support.hf_trainer import trainer_of

    class Breaking(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if state.global_step >= 5:
                model.transformer.h[0].mlp.c_fc.weight.data[0, 0] = nan

    def train(breaks: bool, *, resume: bool) -> None:
        trainer = trainer_of(tmp_path / "run", max_steps=10)
        if breaks:
            trainer.add_callback(Breaking)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == 10

    assert in_child(lambda: train(True, resume=False)) == 0
    found = {s.name: s.unhealthy for s in Store(tmp_path / "run").snapshots()}
    assert found.keys() == {"checkpoint-4", "checkpoint-8", "checkpoint-10"}
    assert not found["checkpoint-4"]
    assert found["checkpoint-8"]
    assert in_child(lambda: train(False, resume=True)) == 0
    last = Store(tmp_path / "run").latest()
    assert last is not None
    assert (last.name, last.unhealthy) == ("checkpoint-10", 0)


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")
def test_accelerate(tmp_path: Path, measured: None) -> None:
    from tests.support.accelerated import prepared

    def train(number: float | None) -> None:
        from casnap.integrations.accelerate import load_state, save_state

        accelerator, progress, model, *_ = prepared(tmp_path / "run", limit=2)
        if number is None:
            load_state(accelerator)
            assert progress["epoch"] == 1
            save_state(accelerator)
            return
        for epoch in range(4):
            progress["epoch"] = epoch
            model[2].weight.data[0, 0] = number if epoch > 1 else 1.0
            save_state(accelerator)

    assert in_child(lambda: train(nan)) == 0
    assert in_child(lambda: train(None)) == 0
    names = [s.name for s in Store(tmp_path / "run/checkpoints").snapshots()]
    assert names[-1] == "checkpoint_4", "the names of those with NaN are not used again"


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")
def test_lightning_says_it(
    tmp_path: Path, measured: None, caplog: pytest.LogCaptureFixture
) -> None:
    from casnap.integrations.lightning import CasnapCheckpointIO

    plugin = CasnapCheckpointIO()
    plugin.save_checkpoint({"state_dict": {"w": torch.full((9,), nan)}}, tmp_path / "a" / "1.ckpt")
    caplog.clear()
    caplog.set_level(logging.WARNING, "casnap")
    assert plugin.load_checkpoint(tmp_path / "a" / "1.ckpt")["state_dict"]["w"].isnan().all()
    assert "1.ckpt has NaN or infinite elements in 1 tensor: `casnap show" in caplog.text
    assert Snapshot(tmp_path / "a" / "1.ckpt").unhealthy == 1
