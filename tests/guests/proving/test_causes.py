"""What differs after a resume leads to what it usually means, the most likely first."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch

from casnap import StateDict, Store
from casnap.proving.causes import causes_of, environment_cause


def state(**changes: Any) -> dict[str, Any]:
    """Return the state of a training after some steps, with other values at some paths."""
    values: dict[str, dict[str, Any]] = {
        "model": {"weight": torch.ones(30)},
        "optim": {
            "state": {"0": {"exp_avg": torch.ones(30), "step": torch.tensor(7.0)}},
            "param_groups": [{"lr": 0.1}],
        },
        "sched": {"last_epoch": 7},
        "scaler": {"scale": 2.0, "_growth_tracker": 1},
        "loader": {"position": 7},
        "progress": {"step": 7},
        "rng": {"torch": torch.zeros(100, dtype=torch.uint8)},
    }
    for key, value in changes.items():
        if value is None:
            del values[key]
        else:
            values[key] = {**values[key], **value}
    return {key: StateDict(value) for key, value in values.items()}


TRAINED_ON = {"model": {"weight": torch.zeros(30)}}
OLD: dict[str, Any] = {"state": {"0": state()["optim"]["state"]["0"]}}
FRESH: dict[str, Any] = {"state": {"0": {"exp_avg": torch.zeros(30), "step": torch.tensor(2.0)}}}
CASES: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {"optim": FRESH}, ["moments"]),
    ({}, {"optim": {"state": {}}}, ["moments"]),
    ({}, {"sched": {"last_epoch": 2}}, ["scheduler"]),
    ({}, {"optim": {"param_groups": [{"lr": 0.2}]}}, ["scheduler"]),
    ({}, {"scaler": {"_growth_tracker": 0}}, ["scaler"]),
    ({}, {"loader": {"position": 0}}, ["loader"]),
    ({}, {"rng": {"torch": torch.ones(100, dtype=torch.uint8)}}, ["generators"]),
    ({}, {"progress": {"step": 8}}, ["counters"]),
    ({}, {}, ["weights"]),
    ({"rng": None}, {"rng": None}, ["generators", "weights"]),
    ({"loader": None}, {"loader": None}, ["loader", "weights"]),
    ({"optim": None}, {"optim": None}, ["moments"]),
    ({"optim": None}, {"optim": None, "sched": {"last_epoch": 2}}, ["moments", "scheduler"]),
    ({}, {"optim": {"state": {**OLD["state"], "1": FRESH["state"]["0"]}}}, ["moments"]),
]


@pytest.mark.parametrize(("before", "after", "roles"), CASES)
def test_causes(before: dict[str, Any], after: dict[str, Any], roles: list[str]) -> None:
    store = Store(f"memory://{uuid.uuid4().hex}")
    snapshot = store.take(state(**before), "unbroken")
    store.take(state(**after, **TRAINED_ON), "killed")
    diff = store.diff("unbroken", "killed", elements=True)
    known = {path: handle.role for path, handle in snapshot.handles().items()}
    assert [cause.role for cause in causes_of(diff, known)] == roles


def test_small_differences_look_like_another_order_of_additions() -> None:
    store = Store(f"memory://{uuid.uuid4().hex}")
    snapshot = store.take(state(), "unbroken")
    store.take(state(model={"weight": torch.full((30,), 1 + 2e-7)}), "killed")
    diff = store.diff("unbroken", "killed", elements=True)
    known = {path: handle.role for path, handle in snapshot.handles().items()}
    (cause,) = causes_of(diff, known)
    assert "another order of additions" in cause.text


def cause_named_first(before: dict[str, Any], after: dict[str, Any], *own: str) -> tuple[str, str]:
    store = Store(f"memory://{uuid.uuid4().hex}")
    snapshot = store.take(state(**before), "unbroken")
    store.take(state(**after), "killed")
    diff = store.diff("unbroken", "killed", elements=True)
    known = {path: handle.role for path, handle in snapshot.handles().items()}
    return causes_of(diff, known, own)[0]


def test_what_weights_tell() -> None:
    """Ties, names, and dtypes lead to a cause by themselves; so do keys that are single ranks'."""
    head = {"head": torch.ones(30)}  # as `weight`
    role, text = cause_named_first({"model": head}, {"model": {**head, "weight": torch.zeros(30)}})
    assert role == "weights"
    assert "model/head and model/weight" not in text  # only one of them differs
    changed = {"weight": torch.zeros(30), "head": torch.full((30,), 2.0)}
    role, text = cause_named_first({"model": head}, {"model": changed})
    assert (role, "tie" in text) == ("weights", True)
    role, text = cause_named_first({"model": head}, {"model": {"tail": torch.ones(30)}})
    assert (role, "model/head is gone, model/tail is new" in text) == ("weights", True)
    halves = ({"model": {"weight": torch.full((30,), x).bfloat16()}} for x in (1.0, 1.25))
    role, text = cause_named_first(*halves)
    assert (role, "master weights" in text) == ("weights", True)
    role, text = cause_named_first({}, TRAINED_ON, "table")
    assert (role, "table" in text) == ("ranks", True)


def test_other_settings_are_a_cause() -> None:
    assert environment_cause({"threads": "1"}, {"threads": "1"}) == []
    before = {"threads": "1", "device": "GPU", "OMP_NUM_THREADS": "1"}
    (cause,) = environment_cause(before, {"threads": "2"})
    assert cause.role == "environment"
    assert cause.text.endswith("threads 1 → 2, OMP_NUM_THREADS 1 → none")
