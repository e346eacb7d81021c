"""Ranks whose states lie on a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from casnap import Snapshot, StateDict
from tests.support import late_device
from tests.support.ranks import World


def weights() -> torch.Tensor:
    return torch.arange(900_000.0).reshape(900, 1000)


def state(device: str) -> dict[str, StateDict]:
    """Return weights that all ranks have, turned as well, and rows that this rank alone has."""
    x = weights().to(device)
    mine = torch.full((300, 1000), float(dist.get_rank()), device=device)
    return {"s": StateDict(x=x, turned=x.t()), "mine": StateDict(rows=mine)}


def take(path: str) -> None:
    late_device.install()
    late_device.counts.clear()
    live = state(f"late:{dist.get_rank()}")
    pending = Snapshot.async_take(path, live, replicated=["s/**"], per_rank=["mine/**"])
    for values in live.values():
        for tensor in values.values():
            tensor.zero_()
    pending.wait()
    # Each rank stages its share of what all have, and what it has alone.
    assert late_device.counts["to host"] < 2 * weights().nbytes


def restore(path: str) -> None:
    late_device.install()
    live, expected = state(f"late:{1 - dist.get_rank()}"), state("cpu")
    for values in live.values():
        for tensor in values.values():
            tensor.zero_()
    Snapshot(path).restore(live)
    for key, values in expected.items():
        for name, tensor in values.items():
            assert torch.equal(live[key][name].cpu(), tensor), name


def test_two_ranks(tmp_path: Path, world: Callable[[int], World]) -> None:
    path = str(tmp_path / "run" / "step")
    world(2).run(take, path)
    world(2).run(restore, path)
