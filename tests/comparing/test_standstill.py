"""Did the training go on? Steps whose weights are all equal are found, and nothing else is."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from casnap import StateDict, Store
from casnap.cli import run
from casnap.comparing import standstill

Warnings = Callable[[], list[str]]


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Warnings:
    """Return the warnings so far. Nothing was taken or said before, as in a new process."""
    forget(monkeypatch)
    caplog.set_level(logging.WARNING, "casnap.hints")
    return lambda: [
        r.getMessage() for r in caplog.records if "did training go on?" in r.getMessage()
    ]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "_taken", {})
    monkeypatch.setattr(standstill, "_told", set())


class Training:
    """A frozen base, an adapter that trains, statistics of batches, and an optimizer."""

    def __init__(self, lr: float = 0.1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64, affine=False))
        self.model.requires_grad_(False)
        self.adapter = nn.Linear(64, 2)
        self.optimizer = torch.optim.Adam(self.adapter.parameters(), lr)
        self.progress = StateDict(step=0)

    @property
    def state(self) -> dict[str, object]:
        return {
            "adam": self.optimizer,
            "adapter": self.adapter,
            "model": self.model,
            "progress": self.progress,
        }

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.adapter(self.model(torch.rand(8, 4))).square().sum().backward()
        self.optimizer.step()
        self.progress["step"] += 1


def test_a_frozen_base_is_no_standstill(tmp_path: Path, warnings: Warnings) -> None:
    store, training = Store(tmp_path), Training()
    for step in range(4):
        store.take(training.state, f"run/step_{step}")
        training.step()
    store.publish("stable", "run/step_2")
    store["run/step_2"].export(tmp_path / "m.pt")
    assert warnings() == []
    assert store.equal_weights("run") == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_training_that_stands_still(
    is_async: bool, tmp_path: Path, warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the learning rate 0, moments and statistics move on, the weights do not."""
    store, training = Store(tmp_path), Training(lr=0)
    for step in (100, 200, 300):
        training.step()
        if is_async:
            store.async_take(training.state, f"run/step_{step}").wait()
        else:
            store.take(training.state, f"run/step_{step}")
    (said,) = warnings()
    assert "run/step_200: the weights are those of run/step_100: did training go on?" in said
    assert store.equal_weights("run") == [["run/step_100", "run/step_200", "run/step_300"]]
    forget(monkeypatch)
    for _ in range(2):
        store.publish("stable", "run/step_300")
    forget(monkeypatch)
    for name in ("a.pt", "b.pt"):
        store["run/step_100"].export(tmp_path / name)
    assert len(warnings()) == 3
    assert "step_300: the weights are those of run/step_200" in warnings()[1]
    assert "step_100: the weights are those of run/step_200" in warnings()[2]


def test_names_alone_claim_that_training_went_on(tmp_path: Path, warnings: Warnings) -> None:
    """The steps that others have published have neither moments nor counters."""
    store, model = Store(tmp_path), nn.Linear(3, 3)
    for name in ("a/step-099", "b/step-1", "a/step-100"):
        store.take({"model": model}, name)
    (said,) = warnings()
    assert "a/step-100: the weights are those of a/step-099" in said


def test_what_is_no_standstill(tmp_path: Path, warnings: Warnings) -> None:
    store, training = Store(tmp_path), Training()
    training.step()
    # The last step once more, an evaluation, the same step again, another run.
    for name in ("run/step_7", "run/last", "run/eval", "run/step_07", "other/step_8"):
        store.take(training.state, name)
    store.take(training.state, "run/last", overwrite=True)
    # No weights: nothing can stand still.
    for step in range(3):
        store.take({"data": StateDict(order=torch.arange(99))}, f"no-weights/step_{step}")
    store.witness(training.state, "run/step_8")
    store.publish("stable", "run/last")
    assert warnings() == []


def test_moments_claim_that_training_went_on(tmp_path: Path, warnings: Warnings) -> None:
    store, training = Store(tmp_path), Training(lr=0)
    training.step()
    store.take(training.state, "run/best")
    training.step()
    store.take(training.state, "run/last")
    (said,) = warnings()
    assert "run/last: the weights are those of run/best" in said


def test_check_lists_equal_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path)
    for step in range(5):
        weights = torch.full((100,), float(step % 3))
        store.take({"model": StateDict(w=weights)}, f"run/step_{step}")
    groups = [["run/step_0", "run/step_3"], ["run/step_1", "run/step_4"]]
    assert run(["check", str(tmp_path), "--history", "run"]) == 0
    assert "equal weights: run/step_1, run/step_4\n" in capsys.readouterr().out
    assert run(["check", str(tmp_path), "--history", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal_names"] == groups
    assert run(["check", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal_names"] == []
    assert run(["check", str(tmp_path), "--history", "rum"]) == 1
    assert "holds no snapshot below 'rum'" in capsys.readouterr().err
    assert run(["check", str(tmp_path / "run/step_1"), "--history", "run"]) == 2
    for pack in (tmp_path / "casnap-store/packs").rglob("?" * 32):
        pack.unlink()
    capsys.readouterr()
    assert run(["check", str(tmp_path), "--history", "run"]) == 1
    assert "once the damage is repaired" in capsys.readouterr().out
