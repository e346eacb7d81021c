"""Ranks whose states lie on a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import FencedError
from casnap.take.take import _Steps
from tests.support import hashing_device, late_device
from tests.support.ranks import Worlds


def weights() -> torch.Tensor:
    return torch.arange(900_000.0).reshape(900, 1000)


def state(device: str) -> dict[str, StateDict]:
    """Return weights that all ranks have, turned as well, and rows that this rank alone has."""
    x = weights().to(device)
    mine = torch.full((300, 1000), float(dist.get_rank()), device=device)
    return {"s": StateDict(x=x, turned=x.t()), "mine": StateDict(rows=mine)}


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


def restore_parts_verified_there(path: str) -> None:
    late_device.install()
    with pytest.MonkeyPatch.context() as patch:
        hashing_device.install(patch, f"late:{dist.get_rank()}")
        restore_parts(path)


@pytest.mark.parametrize("restore", [restore_parts, restore_parts_verified_there])
def test_parts_on_the_devices_of_two_ranks(
    tmp_path: Path,
    world: Worlds,
    monkeypatch: pytest.MonkeyPatch,
    restore: Callable[[str], None],
) -> None:
    """Parts of rows and of columns, which cut cells, and are restored the other way round."""
    monkeypatch.setenv("CASNAP_HEALTH", "warn")
    path = str(tmp_path / "run" / "step")
    world(2).run(take_parts, path)
    world(2).run(restore, path)
    snapshot = Snapshot(path)
    assert torch.equal(snapshot.read_object("s/by_0"), weights())
    assert torch.equal(snapshot.read_object("s/by_1"), weights())
    norms = {path: health.norm for path, health in snapshot.health().items()}
    norm = float(weights().double().norm())
    assert norms == {"s/by_0": pytest.approx(norm), "s/by_1": pytest.approx(norm)}


# --- what the store has -----------------------------------------------------------------------


def numbered(rank: int) -> torch.Tensor:
    return torch.arange(300_000.0).reshape(300, 1000) + 1e6 * (rank + 1)


def take_again(path: str, how: str) -> list[int]:
    """Take twice; return the bytes that have crossed, also once some rows have changed."""
    late_device.install()
    rank, crossed = dist.get_rank(), list[int]()
    with pytest.MonkeyPatch.context() as patch, late_device.module.device(rank):
        hashing_device.install(patch, f"late:{rank}")
        parts = {f"by_{dim}": sharded(weights(), dim) for dim in range(2)}
        live = {**state(f"late:{rank}"), "parts": StateDict(**parts)}
        live["mine"]["rows"] = numbered(rank).to(f"late:{rank}")
        for number in range(3):
            if number == 2:
                live["mine"]["rows"][:100] += 1
            late_device.run_all()
            late_device.counts.clear()
            given = {"replicated": ["s/**"], "per_rank": ["mine/**"]}
            if how == "take":
                Snapshot.take(f"{path}/{number}", live, **given)
            else:
                pending = Snapshot.async_take(f"{path}/{number}", live, **given)
                live["mine"]["rows"] += 1
                pending.wait()
                live["mine"]["rows"] -= 1
            crossed.append(late_device.counts["to host"])
    return crossed


@pytest.mark.parametrize("how", ["take", "async_take"])
def test_what_the_store_has_stays_on_the_devices_of_the_ranks(
    tmp_path: Path, world: Worlds, how: str
) -> None:
    """But for the parts of cells that shard edges cut: no device has the whole."""
    path = str(tmp_path / "run")
    Store(path, create=NewStore(chunk_size=64 << 10)).make()
    first, again, changed = zip(*world(2).run(take_again, path, how), strict=True)
    for rank in range(2):
        assert first[rank] > 5_000_000
        # By columns, each cell is cut.
        assert again[rank] < weights().nbytes // 2 + 400_000
        # The samples of replicas that are compared differ in their lengths from take to take.
        assert 300_000 < changed[rank] - again[rank] < 600_000
    mine = numbered(1)
    mine[:100] += 1
    snapshot = Snapshot(f"{path}/2")
    assert torch.equal(snapshot.read_object("1/mine/rows"), mine)
    assert torch.equal(snapshot.read_object("parts/by_1"), weights())
    assert torch.equal(snapshot.read_object("s/turned"), weights().t())
    assert Store(path).check(data=True).ok


def take_fenced(path: str) -> None:
    """Take what the store has; it is collected before the take stores anything."""
    late_device.install()
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch, late_device.module.device(rank):
        hashing_device.install(patch, f"late:{rank}")
        patch.setattr(LocalBackend, "announced_bases", lambda *_: [])
        live = {"mine": StateDict(rows=numbered(rank).to(f"late:{rank}"))}
        Snapshot.take(f"{path}/first", {"n": StateDict(x=numbered(rank) + 0.5)})
        Snapshot.take(f"{path}/known", live)
        late_device.run_all()
        store_copies = _Steps.store_copies

        def collect_first(*args: Any) -> Any:
            if rank == 0:
                Store(path).delete("known")
                Store(path).gc(grace=0)
                Store(path).gc(grace=0)
            return store_copies(*args)

        patch.setattr(_Steps, "store_copies", collect_first)
        late_device.counts.clear()
        pending = Snapshot.async_take(f"{path}/again", live)
        assert late_device.counts["to host"] < 200_000
        pending.wait()


def test_all_ranks_end_if_what_stayed_on_a_device_is_gone(tmp_path: Path, world: Worlds) -> None:
    path = str(tmp_path / "run")
    Store(path, create=NewStore(chunk_size=64 << 10)).make()
    outcomes = world(2).run(take_fenced, path, expect_errors=True)
    assert all(isinstance(outcome, FencedError) for outcome in outcomes), outcomes
    assert "stayed on the device" in str(outcomes[0])
    assert [s.name for s in Store(path).snapshots()] == ["first"]
