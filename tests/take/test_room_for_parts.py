"""Many tensors whose cells shard edges cut: ranks give more parts than there is room for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from casnap import StateDict, Store
from casnap.runtime.buffers import Pool
from casnap.take import exchange, plan, split_cells, staging
from tests.support.links import forget_links
from tests.support.ranks import World

CHUNK, TENSORS, LONG = 64 << 10, 200, 40
ROOM = 4 * CHUNK


def tensor(i: int) -> torch.Tensor:
    """Return one of the tensors; the last one has many cells."""
    rows = 128 if i < TENSORS else 128 * LONG
    return torch.arange(rows * 128).view(rows, 128).float().add(i)


def take(path: str, axis: int, how: str) -> int:
    """Take with little room; return the most bytes of cells that lay in memory at once."""
    forget_links()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    state = StateDict()
    for i in range(TENSORS + 1):
        own = tensor(i).chunk(size, axis)[rank].contiguous()
        state[f"w{i}"] = DTensor.from_local(own, mesh, [Shard(axis)], run_check=False)
    most, messages = 0, split_cells.SplitCells.messages

    def watched(self: Any) -> Any:
        nonlocal most
        most = max(most, self._bytes_in_use)
        if how == "one is slow" and rank == 0:
            time.sleep(0.005)  # parts of the other rank could pile up
        return messages(self)

    little = [
        (exchange, "SHARED_BYTES", ROOM),
        (exchange, "SLOT_BYTES", 16 * CHUNK),
        (split_cells, "_WINDOW_BYTES", 5 * CHUNK),
        (split_cells, "_cell_slots", Pool(ROOM, 1)),
        (split_cells.SplitCells, "messages", watched),
        (plan, "_JOINT_BYTES", 2 * CHUNK),
        (staging, "PIECE_BYTES", 4 * CHUNK),
        (staging, "_BLOCK_BYTES", 8 * CHUNK),
        (staging, "_block_pool", Pool(8 * CHUNK, 2)),
    ]
    with ExitStack() as stack:
        for owner, name, value in little:
            stack.enter_context(mock.patch.object(owner, name, value))
        store = Store(path, create=False)
        if how == "async":
            store.async_take({"m": state}, "a", max_staging_bytes=1).wait()
        else:
            store.take({"m": state}, "a", threads=1 if how == "one thread" else None)
    forget_links()
    return most


@pytest.mark.parametrize(
    ("axis", "how"),
    [(0, "take"), (1, "one is slow"), (1, "one thread"), (1, "async")],
)
def test_ranks_give_no_more_than_there_is_room_for(
    world: Callable[[int], World], tmp_path: Path, axis: int, how: str
) -> None:
    """Nor do all threads wait for room, which whole cells take that none of them hashes."""
    Store(tmp_path, chunk_size=CHUNK).make()
    most = world(2).run(take, str(tmp_path), axis, how, timeout=40)
    assert 0 < max(most) <= ROOM
    for i in (0, TENSORS - 1, TENSORS):
        assert torch.equal(Store(tmp_path)["a"].read_object(f"0/m/w{i}"), tensor(i))
