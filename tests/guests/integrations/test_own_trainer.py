"""The trainer of ``docs/guides/own-trainer.md``, on several ranks; test_readme.py has it on one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from casnap import Store
from tests.support.ranks import Worlds

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "own-trainer.md"
_BLOCKS = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_RUNS = re.compile(r'^(?:train_replicas\(|runner = train\()"runs/', re.MULTILINE)


def trainer() -> dict[str, Any]:
    """Return the names of the page, without what its blocks run."""
    blocks = [_RUNS.split(block)[0] for block in _BLOCKS.findall(PAGE.read_text())]
    code = "\n".join(blocks)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def train(folder: str, steps: int) -> tuple[int, torch.Tensor]:
    runner = trainer()["train"](folder, steps)
    return runner.step, runner.model.weight.detach().clone()


def resumed(folder: str) -> tuple[int, dict[str, tuple[int, list[float]]]]:
    """Return the step, and which elements of each momentum this rank has."""
    names = trainer()
    runner = names["Runner"]()
    step = names["resume"](runner, folder)
    parameters = dict(runner.model.named_parameters())
    held = {n: (runner.run(parameters[n])[0], runner.momentum[n].tolist()) for n in parameters}
    return step, held


def test_another_number_of_ranks_goes_on(tmp_path: Path, world: Worlds) -> None:
    folder, alone = str(tmp_path / "run"), str(tmp_path / "alone")
    world(2).run(train, folder, 20)
    (step, weight), *_ = world(3).run(train, folder, 15)
    assert step == 35
    # Sums are made in another order with other ranks, so the last bits may differ.
    ((_, expected),) = world(1).run(train, alone, 35)
    torch.testing.assert_close(weight, expected)
    names = [snapshot.name for snapshot in Store(folder).snapshots()]
    assert names == ["step_000020", "step_000030"]


def test_each_element_is_held_once_by_any_ranks(tmp_path: Path, world: Worlds) -> None:
    folder = str(tmp_path / "run")
    world(3).run(train, folder, 10)
    whole = world(1).run(resumed, folder)[0]
    by_two = world(2).run(resumed, folder)
    for name, (_, elements) in whole[1].items():
        parts = [each[1][name] for each in by_two]
        assert [each for _, part in sorted(parts) for each in part] == elements
    assert [step for step, _ in by_two] == [10, 10]
    assert "momentum/weight" in Store(folder)["step_000010"]


def test_it_imports_nothing_from_inside() -> None:
    imported = re.findall(r"^from (casnap\S*) import", PAGE.read_text(), re.MULTILINE)
    assert set(imported) == {"casnap", "casnap.extending"}
