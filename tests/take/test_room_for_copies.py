"""A take in the background with room for fewer copies than may wait until other ranks take them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from casnap import StateDict, Store
from casnap.ranks import joining
from casnap.runtime.buffers import Pool
from casnap.take import rounds, split_cells, staging
from tests.support.ranks import World

CHUNK, TENSORS = 64 << 10, 50


def tensor(i: int) -> torch.Tensor:
    return torch.arange(128 * 128).view(128, 128).float().add(i)


def take(path: str) -> None:
    joining._links.clear()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    state = StateDict()
    for i in range(TENSORS):
        own = tensor(i).chunk(size)[rank].contiguous()
        state[f"w{i}"] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    little = [
        (rounds, "SHARED_BYTES", 2 * CHUNK),
        (rounds, "SLOT_BYTES", 4 * CHUNK),
        (split_cells, "_WINDOW_BYTES", 12 * CHUNK),
        (split_cells, "_cell_slots", Pool(2 * CHUNK, 1)),
        (staging, "_BLOCK_BYTES", CHUNK),
        (staging, "_kept", Pool(CHUNK, None)),
        (staging, "cores", lambda: 2),
    ]
    with ExitStack() as stack:
        for owner, name, value in little:
            stack.enter_context(mock.patch.object(owner, name, value))
        Store(path, create=False).async_take({"m": state}, "a", max_staging_bytes=1).wait()
    joining._links.clear()


def test_whole_cells_are_hashed_while_no_copy_can_be_made(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    """All threads waited for a copy, whose room was freed by hashing what had come meanwhile."""
    Store(tmp_path, chunk_size=CHUNK)
    world(2).run(take, str(tmp_path), timeout=40)
    for i in (0, TENSORS - 1):
        assert torch.equal(Store(tmp_path)["a"].read_object(f"0/m/w{i}"), tensor(i))
