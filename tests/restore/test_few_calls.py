"""How many calls of casnap's functions a restore makes for each tensor."""

from __future__ import annotations

from pathlib import Path

import torch

import casnap
from tools.way import way


def test_a_restore_makes_few_calls_for_each_tensor(tmp_path: Path) -> None:
    """A checkpoint may have a hundred thousand tensors: what each of them costs is bounded."""
    store = casnap.Store(tmp_path)
    calls = []
    for blocks in (1, 6):
        module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(50 * blocks)))
        optimizer = torch.optim.AdamW([{"params": [*m.parameters()]} for m in module])
        module(torch.ones(2)).sum().backward()
        optimizer.step()
        state = {"model": module, "optim": optimizer}
        name = f"blocks{blocks}"
        store.take(state, name)
        store[name].restore(state)  # what is done once is done
        snapshot = store[name]
        calls.append(way(lambda: snapshot.restore(state))[1])  # noqa: B023 - called at once
    # For each of 500 more parameters there are four tensors: its step and two moments as well.
    assert calls[1] - calls[0] < 4 * 500 * 98
