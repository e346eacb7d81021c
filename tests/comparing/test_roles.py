"""What paths are to a training, told by their names; how the elements of two snapshots differ."""

from __future__ import annotations

import random
import uuid
from typing import Any

import numpy as np
import pytest
import torch

from casnap import Diff, NewStore, RNGState, StateDict, Store
from casnap.state.roles import role_of

CHUNK = 64 << 10


@pytest.fixture
def store() -> Store:
    return Store(f"memory://{uuid.uuid4().hex}", create=NewStore(chunk_size=CHUNK)).make()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_each_path_has_a_role(store: Store) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu")
    state: dict[str, Any] = {
        "model": model,
        "ema": StateDict({"0.weight": torch.ones(3)}),
        "optimizer": optimizer,
        "lr": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        "amp": StateDict(scaler.state_dict()),
        "rng": RNGState(),
        "shuffle": torch.Generator(),
        "draw": np.random.default_rng(0),
        "train_loader": StateDict(position=7, state={"epoch": 1}),
        "batches": StateDict(position=7),
        # As torchtitan flattens it.
        "flat": StateDict(
            {"state.0.weight.exp_avg": torch.ones(3), "param_groups.0.weight.lr": 0.1}
        ),
        # A model, whatever the key is called.
        "sampler": StateDict({"scaler.weight": torch.ones(3)}),
        "progress": StateDict(global_step=3, best_loss=0.5, run="name"),
        "trainer": StateDict(
            lr_schedulers=[{"last_epoch": 3}],
            optimizer_states=[{"state": {0: {"exp_avg": torch.ones(3)}}}],
            rng_states={"torch": torch.get_rng_state()},
            sampler={"epoch": 1},
            step=3,
        ),
    }
    manifest = store.take(state, "step").get_manifest()
    roles = {path.partition("/")[2]: role_of(path, entry) for path, entry in manifest.items()}
    assert {path: roles[path] for path in EXPECTED} == EXPECTED


EXPECTED = {
    "model/0.weight": "weights",
    "model/1.running_mean": "weights",
    "model/1.num_batches_tracked": "counters",
    "ema/0.weight": "weights",
    "optimizer/state/0/momentum_buffer": "moments",
    "optimizer/param_groups/0/lr": "scheduler",
    "lr/last_epoch": "scheduler",
    "amp/growth_factor": "scaler",
    "rng/torch": "generators",
    "rng/python/1": "generators",
    "shuffle/torch": "generators",
    "draw/numpy/state/state": "generators",
    "train_loader/position": "loader",
    "train_loader/state/epoch": "loader",
    "batches/position": "loader",
    "flat/state.0.weight.exp_avg": "moments",
    "flat/param_groups.0.weight.lr": "scheduler",
    "sampler/scaler.weight": "weights",
    "progress/global_step": "counters",
    "progress/best_loss": "values",
    "progress/run": "values",
    "trainer/lr_schedulers/0/last_epoch": "scheduler",
    "trainer/optimizer_states/0/state/0/exp_avg": "moments",
    "trainer/rng_states/torch": "generators",
    "trainer/sampler/epoch": "loader",
    "trainer/step": "counters",
}


# --- two snapshots ------------------------------------------------------------------------------


def between(store: Store, before: Any, after: Any, **options: Any) -> Diff:
    for name, value in (("a", before), ("b", after)):
        store.take({"s": StateDict(x=value)}, name, overwrite=True)
    return store.diff("a", "b", **options)


def test_elements_are_compared_on_request(store: Store) -> None:
    before = torch.randn(100, 1000)
    after = before.clone()
    after[50, 3], after[99, 999] = before[50, 3] + 2, float("nan")
    (change,) = between(store, before, after).changes
    assert change.elements is None
    (change,) = between(store, before, after, elements=True).changes
    assert change.elements is not None
    apart = abs(float(after[50, 3].double() - before[50, 3].double()))
    found = change.elements
    assert (found.differing, found.total, found.nan) == (2, 100_000, 1)
    assert found.largest == apart
    assert "2 of 100,000 differ" in change.difference
    assert between(store, before, before, elements=True).equal


def test_numbers_and_what_has_no_elements(store: Store) -> None:
    (change,) = between(store, 3, 5, elements=True).changes
    assert change.elements is not None
    assert (change.elements.largest, change.elements.largest_relative) == (2.0, 0.4)
    assert change.difference == "3 → 5"
    for before, after in ((3, 3.0), ("a", "b"), (torch.ones(3), torch.ones(4)), (b"1" * 999, 1)):
        (change,) = between(store, before, after, elements=True).changes
        assert change.elements is None


def test_many_tensors_in_windows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("casnap.comparing.elements._WINDOW_BYTES", 100_000)
    drawn = random.Random(0)
    shapes = [(drawn.randrange(1, 90), 900) for _ in range(9)]
    before = {f"{i}": torch.randn(shape).bfloat16() for i, shape in enumerate(shapes)}
    after = {name: value.clone() for name, value in before.items()}
    expected = {}
    for name, value in after.items():
        flat = value.view(-1)
        expected[f"s/x/{name}"] = count = drawn.randrange(1, 5)
        for index in drawn.sample(range(len(flat)), count):
            flat[index] += 8
    found = between(store, before, after, elements=True)
    assert {c.path: c.elements.differing for c in found.changes if c.elements} == expected


def test_the_report_is_sorted_by_role(store: Store) -> None:
    for step in range(2):
        state = {"w": StateDict(x=torch.full((3,), step)), "rng": RNGState()}
        state["m"] = StateDict(x=torch.full((30,), step * 0.5), step=step)
        store.take(state, f"{step}")
        torch.rand(1)
    text = str(store.diff("0", "1", elements=True)).splitlines()
    assert [line for line in text if not line.startswith(" ")][1:] == [
        "generators:",
        "counters:",
        "weights:",
        "values:",
    ]
    assert "  ~  m/step  int  0 → 1" in text
