"""Many tensors of one cell each, cut by shard edges: ranks send more than there is room for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from casnap import StateDict, Store
from casnap.ranks import joining
from casnap.runtime.buffers import Pool
from casnap.take import rounds, split_cells
from tests.support.ranks import World

CHUNK, TENSORS = 64 << 10, 200


def take(path: str, threads: int | None) -> None:
    joining._links.clear()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    state = StateDict()
    for i in range(TENSORS):
        own = torch.arange(128 * 128).view(128, 128).float().add(i).chunk(size)[rank]
        state[f"w{i}"] = DTensor.from_local(own.contiguous(), mesh, [Shard(0)], run_check=False)
    little = [
        (rounds, "SHARED_BYTES", 4 * CHUNK),
        (rounds, "SLOT_BYTES", 16 * CHUNK),
        (split_cells, "_WINDOW_BYTES", 5 * CHUNK),
        (split_cells, "_cell_slots", Pool(8 * CHUNK, 1)),
    ]
    with ExitStack() as stack:
        for owner, name, value in little:
            stack.enter_context(mock.patch.object(owner, name, value))
        Store(path, create=False).take({"m": state}, "a", threads=threads)
    joining._links.clear()


@pytest.mark.parametrize("threads", [None, 1])
def test_ranks_that_wait_for_room_hash_what_is_whole(
    world: Callable[[int], World], tmp_path: Path, threads: int | None
) -> None:
    """All threads waited for room, which whole cells took that none of them hashed."""
    Store(tmp_path, chunk_size=CHUNK)
    world(2).run(take, str(tmp_path), threads, timeout=40)
    for i in (0, TENSORS - 1):
        found = Store(tmp_path)["a"].read_object(f"0/m/w{i}")
        assert torch.equal(found, torch.arange(128 * 128).view(128, 128).float().add(i))
