"""A take in the background with room for fewer copies than may wait until other ranks take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from casnap import StateDict, Store
from casnap.errors import RankError
from casnap.runtime.buffers import Pool
from casnap.take import exchange, split_cells, staging
from tests.support.links import forget_links
from tests.support.ranks import World

CHUNK, TENSORS = 64 << 10, 50


def tensor(i: int) -> torch.Tensor:
    return torch.arange(128 * 128).view(128, 128).float().add(i)


def state_of_this_rank() -> StateDict:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    state = StateDict()
    for i in range(TENSORS):
        own = tensor(i).chunk(size)[rank].contiguous()
        state[f"w{i}"] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    return state


@contextmanager
def little_room() -> Iterator[None]:
    forget_links()
    little = [
        (exchange, "SHARED_BYTES", 2 * CHUNK),
        (exchange, "SLOT_BYTES", 4 * CHUNK),
        (split_cells, "_WINDOW_BYTES", 12 * CHUNK),
        (split_cells, "_cell_slots", Pool(2 * CHUNK, 1)),
        (staging, "_BLOCK_BYTES", CHUNK),
        (staging, "_block_pool", Pool(CHUNK, None)),
        (staging, "cores", lambda: 2),
    ]
    with ExitStack() as stack:
        for owner, name, value in little:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
    forget_links()


def take(path: str) -> None:
    with little_room():
        state = {"m": state_of_this_rank()}
        Store(path, create=False).async_take(state, "a", max_staging_bytes=1).wait()


def test_whole_cells_are_hashed_while_no_copy_can_be_made(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    """All threads waited for a copy, whose room was freed by hashing what had come meanwhile."""
    Store(tmp_path, chunk_size=CHUNK).make()
    world(2).run(take, str(tmp_path), timeout=40)
    for i in (0, TENSORS - 1):
        assert torch.equal(Store(tmp_path)["a"].read_object(f"0/m/w{i}"), tensor(i))


def take_without_memory(path: str) -> int:
    """Fail on rank 0 where parts are copied to the first rank; return the slots still in use."""

    def copy(*_: object) -> None:
        raise MemoryError

    with little_room():
        with ExitStack() as stack:
            if dist.get_rank() == 0:
                stack.enter_context(mock.patch.object(split_cells, "_copy", copy))
            pending = Store(path, create=False).async_take(
                {"m": state_of_this_rank()}, "failed", max_staging_bytes=1
            )
            with pytest.raises((MemoryError, RankError)):
                pending.wait()
        kept = staging._block_pool
        return kept._made - len(kept._free)


def test_an_error_gives_back_the_copies_for_all_ranks(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    """Those for later ranks than the one where it came were lost, and the next take waited."""
    Store(tmp_path, chunk_size=CHUNK).make()
    assert world(2).run(take_without_memory, str(tmp_path), timeout=40) == [0, 0]
