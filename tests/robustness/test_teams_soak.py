"""Ranks that die at random, one after the other, while worlds of many sizes talk in teams."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from casnap import NewStore, StateDict, Store
from casnap.ranks.group import Group
from tests.support.faults import CHUNK, assert_no_orphans, kill
from tests.support.ranks import RankDied, World
from tests.support.yard import Seen, watch

DEATHS = 40
SIZES = (3, 5, 6, 8)
SHAPE = (501, 203)  # no shard edge is a cell edge


def whole(step: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))


def state_of(step: int, dim: int) -> dict[str, Any]:
    """Return this rank's shard of what is taken at a step, and what is equal on all ranks."""
    mesh, tensor = init_device_mesh("cpu", (dist.get_world_size(),)), whole(step)
    own = tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()
    shard = DTensor.from_local(
        own, mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return {"model": StateDict(w=shard, same=tensor[0].clone())}


def go_through(path: str, verb: str, step: int, of: int, dim: int, dying: dict[int, int]) -> Seen:
    """Take a step, or restore an earlier one, while some ranks die at a collective each."""
    state = state_of(step if verb == "take" else 1000, dim)
    left = dying.get(dist.get_rank(), 1 << 30)
    exchange = Group._exchange

    def die_in_time(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            kill()
        return exchange(*args)

    def work() -> None:
        if verb == "take":
            store.take(state, f"step_{step}", timeout=60)
            return
        store[f"step_{of}"].restore(state, timeout=60)
        expected = state_of(of, dim)["model"]
        assert torch.equal(state["model"]["w"].to_local(), expected["w"].to_local())
        assert torch.equal(state["model"]["same"], expected["same"])

    store = Store(path, create=NewStore(chunk_size=CHUNK))
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "_exchange", die_in_time)
        return watch(work)


@pytest.mark.slow
def test_ranks_of_teams_die_at_random(
    world: Callable[[int], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASNAP_TEAM_RANKS", "2")
    path, draw = tmp_path / "store", random.Random(43)
    taken = [0]
    (first, *_) = world(4).run(go_through, str(path), "take", 0, 0, 0, {})
    assert first.error == "", first
    deaths = step = 0
    while deaths < DEATHS:
        step += 1
        size, verb = draw.choice(SIZES), draw.choice(["take", "take", "restore"])
        dying = {
            rank: draw.randrange(12) for rank in draw.sample(range(size), draw.choice([0, 1, 1, 2]))
        }
        told = (verb, step, draw.choice(taken), draw.randrange(2), dying)
        outcomes = world(size).run(go_through, str(path), *told, expect_errors=True)
        dead = {rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, RankDied)}
        assert dead <= dying.keys(), (told, outcomes)
        deaths += len(dead)
        for rank, seen in enumerate(outcomes):
            if rank not in dead:
                assert isinstance(seen, Seen), (told, outcomes)
                assert seen.error == "RankError" if dead else not seen.error, (told, seen)
                assert set(seen.ranks) <= dead, (told, seen)
                assert seen.ranks or not dead, (told, seen)
        if verb == "take" and not dead:
            taken.append(step)
    # A rank may have died when rank 0 had committed.
    store = Store(path, create=False)
    found = {int(snapshot.name.removeprefix("step_")) for snapshot in store.snapshots()}
    assert found >= set(taken)
    for step in found:
        assert torch.equal(store[f"step_{step}"].read_object("model/w"), whole(step))
    assert store.check(data=True).ok
    store.gc(grace=0)
    assert_no_orphans(path)
