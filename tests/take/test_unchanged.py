"""The third take in a row that finds the weights of a run unchanged is a warning."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casnap import RNGState, Snapshot, StateDict, Store
from tests.support.ranks import World


class Run:
    """A training loop with a scheduler, random numbers and a counter.

    Args:
        steps: Whether its optimizer steps. Otherwise it has parameters that nothing trains.
    """

    def __init__(self, *, steps: bool) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 8))
        self.idle = torch.optim.AdamW(copy.deepcopy(self.model).parameters())
        self.active = torch.optim.AdamW(self.model.parameters())
        self.optimizer = self.active if steps else self.idle
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.progress = StateDict(step=0)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "progress": self.progress,
            "random": RNGState(),
        }

    def train(self) -> None:
        self.model(torch.rand(4, 32)).square().mean().backward()
        self.optimizer.step()
        self.model.zero_grad()
        self.scheduler.step()
        self.progress["step"] += 1


def train(store: Store, run: Run, names: list[str], **options: Any) -> None:
    for name in names:
        run.train()
        store.take(run.state(), name, **options)


STEPS = [f"run/step_{step}" for step in range(6)]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    def texts() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

    return texts


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_an_optimizer_that_does_not_step(store: Store, warnings: Any) -> None:
    run = Run(steps=False)
    train(store, run, STEPS[:3])
    assert warnings() == []
    train(store, run, STEPS[3:])
    assert warnings() == [
        "run/step_3: 3 takes in a row have found all weights (model) as run/step_0 has them. Is "
        "the optimizer stepping? warn_unchanged=False turns this warning off"
    ]


def test_it_warns_again_after_a_change(store: Store, warnings: Any) -> None:
    run = Run(steps=False)
    train(store, run, STEPS[:4])
    run.optimizer = run.active
    train(store, run, ["run/step_4"])
    run.optimizer = run.idle
    train(store, run, ["run/step_5", "run/step_6", "run/step_7"])
    assert [text.partition(":")[0] for text in warnings()] == ["run/step_3", "run/step_7"]


def test_in_the_background_and_under_one_name(tmp_path: Path, warnings: Any) -> None:
    run = Run(steps=False)
    for _ in range(4):
        run.train()
        path = tmp_path / "run/latest"
        Snapshot.async_take(path, run.state(), overwrite=True).wait()
    assert len(warnings()) == 1


def test_it_can_be_turned_off(store: Store, warnings: Any) -> None:
    train(store, Run(steps=False), STEPS, warn_unchanged=False)
    pending = [
        store.async_take({"m": torch.nn.Linear(9, 9)}, f"m/{i}", warn_unchanged=False)
        for i in range(5)
    ]
    pending[-1].wait()
    assert warnings() == []


def test_what_is_normal(store: Store, warnings: Any) -> None:
    """Training; the same step again; a frozen model; a few names, or runs, for one model."""
    train(store, Run(steps=True), STEPS)
    run = Run(steps=True)
    for _ in range(5):
        store.take(run.state(), "retried/step_1", overwrite=True)
    frozen = torch.nn.Linear(32, 32).requires_grad_(False)
    head = torch.nn.Linear(32, 2)
    for step in range(5):
        store.take({"base": frozen, "step": StateDict(step=step)}, f"base/step_{step}")
        with torch.no_grad():
            head.weight += 1
        store.take({"base": frozen, "head": head}, f"head/step_{step}")
        store.take({"model": run.model}, f"sweep_{step}/start")
    for name in ("best", "final", "evaluated"):
        store.take({"model": run.model}, f"evaluation/{name}")
    assert warnings() == []


def take_on_a_rank(folder: str) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("casnap").addHandler(handler)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    own = torch.nn.Linear(64, dist.get_rank() + 1)
    for run in ("changed", "same"):
        for step in range(4):
            progress = StateDict(step=step, rank=dist.get_rank())
            state = {"model": model, "own": own, "progress": progress}
            Snapshot.take(f"{folder}/{run}/step_{step}", state)
            if run == "changed" and dist.get_rank() == 1:
                with torch.no_grad():
                    own.weight += 1
    logging.getLogger("casnap").removeHandler(handler)
    return heard


def test_rank_0_warns(tmp_path: Path, world: Callable[[int], World]) -> None:
    """What other ranks alone have counts, too."""
    of_rank_0, of_rank_1 = world(2).run(take_on_a_rank, str(tmp_path))
    assert [text.partition(":")[0] for text in of_rank_0] == ["step_3"]
    assert of_rank_1 == []
