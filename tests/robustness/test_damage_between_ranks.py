"""Bytes that change on their way between two ranks: the rank that receives them finds out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from casnap import StateDict, Store
from casnap.errors import RankError
from casnap.ranks.comm import Group
from tests.support.ranks import World

Worlds = Callable[[int], World]

CHUNK = 64 << 10


@contextmanager
def flipping(at_least: int, most: int = 1 << 62) -> Iterator[list[int]]:
    """Flip one bit of what this rank sends in parts of some sizes, behind all checks of its own."""
    carry, flipped = Group._transfer, list[int]()

    def bad(group: Group, parts: Sequence[Any], *args: Any) -> Any:
        sent = list(parts)
        for rank, part in enumerate(parts):
            if rank != group.rank and at_least <= len(part) <= most:
                sent[rank] = memoryview(bytearray(part))
                sent[rank][len(part) // 2] ^= 4
                flipped.append(len(part))
        return carry(group, sent, *args)

    with mock.patch.object(Group, "_transfer", bad):
        yield flipped


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def restore_damaged(folder: str) -> bool:
    store = Store(folder)
    given = {f"w{i}": torch.zeros(100_000) for i in range(4)}
    with flipping(CHUNK) as flipped:
        store["s"].restore({"m": StateDict(given)}, read_once=True)
    for i in range(4):
        assert torch.equal(given[f"w{i}"], numbers(i, 100_000)), "damaged bytes reached a tensor"
    return bool(flipped)


def test_what_is_passed_on_is_proven_by_who_receives_it(world: Worlds, tmp_path: Path) -> None:
    store = Store(tmp_path, chunk_size=CHUNK)
    store.take({"m": StateDict({f"w{i}": numbers(i, 100_000) for i in range(4)})}, "s")
    assert any(world(3).run(restore_damaged, str(tmp_path)))


def take_damaged(folder: str, at_least: int, most: int) -> None:
    # The shards end within chunks, so parts of these are sent.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = distribute_tensor(numbers(1, 100_003, 2), mesh, [Shard(0)], src_data_rank=None)
    state = {"m": StateDict(w=whole, same=numbers(2, 50_000))}
    with flipping(at_least, most):
        Store(folder).take(state, "s", timeout=20)


@pytest.mark.parametrize(("at_least", "most"), [(1, 1 << 62), (4_000, 1 << 62), (100, 1_000)])
def test_a_take_believes_no_damaged_message(
    world: Worlds, tmp_path: Path, at_least: int, most: int
) -> None:
    Store(tmp_path, chunk_size=CHUNK)
    outcomes = world(3).run(take_damaged, str(tmp_path), at_least, most, expect_errors=True)
    assert all(isinstance(outcome, RankError) for outcome in outcomes), outcomes
    assert all(" sent came damaged to rank " in str(outcome) for outcome in outcomes)
    assert Store(tmp_path).snapshots() == []
