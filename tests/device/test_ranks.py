"""Ranks whose states lie on a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

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


def sharded(rows: torch.Tensor, dim: int) -> DTensor:
    """Return a tensor that the ranks hold in parts, each on its own device."""
    mesh = DeviceMesh("late", list(range(dist.get_world_size())))
    part = rows.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    local = part.contiguous().to(f"late:{dist.get_rank()}")
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)


def take_parts(path: str) -> None:
    late_device.install()
    with late_device.module.device(dist.get_rank()):
        values = {f"by_{dim}": sharded(weights(), dim) for dim in range(2)}
        pending = Snapshot.async_take(path, {"s": StateDict(**values)})
        for value in values.values():
            value.to_local().zero_()
        pending.wait()


def restore_parts(path: str) -> None:
    late_device.install()
    device = torch.device("late", dist.get_rank())
    with late_device.module.device(device):
        with late_device.module.stream(late_device.Stream(device)):
            values = {f"by_{dim}": sharded(torch.zeros(900, 1000), 1 - dim) for dim in range(2)}
            Snapshot(path).restore({"s": StateDict(**values)})
        for dim in range(2):
            expected = weights().chunk(dist.get_world_size(), 1 - dim)[dist.get_rank()]
            assert torch.equal(values[f"by_{dim}"].to_local().cpu(), expected)


def test_parts_on_the_devices_of_two_ranks(tmp_path: Path, world: Callable[[int], World]) -> None:
    """Parts of rows and of columns, which cut cells, and are restored the other way round."""
    path = str(tmp_path / "run" / "step")
    world(2).run(take_parts, path)
    world(2).run(restore_parts, path)
    snapshot = Snapshot(path)
    assert torch.equal(snapshot.read_object("s/by_0"), weights())
    assert torch.equal(snapshot.read_object("s/by_1"), weights())
