"""Takes of ranks with room for fewer parts, or fewer copies, than may wait for each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from casnap import NewStore, StateDict, Store
from casnap.errors import RankError
from casnap.runtime.buffers import Pool
from casnap.take import plan, staging
from casnap.take.ranks import exchange, split_cells
from tests.support.links import forget_links
from tests.support.ranks import Worlds

CHUNK, TENSORS, LONG = 64 << 10, 80, 20
ROOM = 4 * CHUNK


def tensor(i: int) -> torch.Tensor:
    """Return one of the tensors, whose cells shard edges cut; the last one has many cells."""
    rows = 128 if i < TENSORS else 128 * LONG
    return torch.arange(rows * 128).view(rows, 128).float().add(i)


def shards(count: int, axis: int = 0) -> StateDict:
    """Return what this rank holds of so many tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    state = StateDict()
    for i in range(count):
        own = tensor(i).chunk(size, axis)[rank].contiguous()
        state[f"w{i}"] = DTensor.from_local(own, mesh, [Shard(axis)], run_check=False)
    return state


@contextmanager
def little_room(*little: tuple[Any, str, Any]) -> Iterator[None]:
    """Have new links, whose ranks have little room."""
    forget_links()
    with ExitStack() as stack:
        for owner, name, value in little:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
    forget_links()


def assert_taken(path: Path, *numbers: int) -> None:
    for i in numbers:
        assert torch.equal(Store(path)["a"].read_object(f"0/m/w{i}"), tensor(i))


# --- parts --------------------------------------------------------------------------------------


def take(path: str, axis: int, how: str) -> int:
    """Take with little room; return the most bytes of cells that lay in memory at once."""
    rank, state = dist.get_rank(), shards(TENSORS + 1, axis)
    most, messages = 0, split_cells.SplitCells.messages

    def watched(self: Any) -> Any:
        nonlocal most
        most = max(most, self._bytes_in_use)
        if how == "one is slow" and rank == 0:
            time.sleep(0.005)  # parts of the other rank could pile up
        return messages(self)

    with little_room(
        (exchange, "SHARED_BYTES", ROOM),
        (exchange, "SLOT_BYTES", 16 * CHUNK),
        (split_cells, "_WINDOW_BYTES", 5 * CHUNK),
        (split_cells, "_cell_slots", Pool(ROOM, 1)),
        (split_cells.SplitCells, "messages", watched),
        (plan, "_JOINT_BYTES", 2 * CHUNK),
        (staging, "PIECE_BYTES", 4 * CHUNK),
        (staging, "_BLOCK_BYTES", 8 * CHUNK),
        (staging, "_block_pool", Pool(8 * CHUNK, 2)),
    ):
        store = Store(path, create=False)
        if how == "async":
            store.async_take({"m": state}, "a", max_staging_bytes=1).wait()
        else:
            store.take({"m": state}, "a", threads=1 if how == "one thread" else None)
    return most


@pytest.mark.parametrize(("axis", "how"), [(0, "one is slow"), (1, "one thread"), (1, "async")])
def test_ranks_give_no_more_than_there_is_room_for(
    world: Worlds, tmp_path: Path, axis: int, how: str
) -> None:
    """Nor do all threads wait for room, which whole cells take that none of them hashes."""
    Store(tmp_path, create=NewStore(chunk_size=CHUNK)).make()
    most = world(2).run(take, str(tmp_path), axis, how, timeout=40)
    assert 0 < max(most) <= ROOM
    assert_taken(tmp_path, 0, TENSORS - 1, TENSORS)


# --- copies of a take in the background ---------------------------------------------------------

COPIED = 50


def few_copies() -> list[tuple[Any, str, Any]]:
    return [
        (exchange, "SHARED_BYTES", 2 * CHUNK),
        (exchange, "SLOT_BYTES", 4 * CHUNK),
        (split_cells, "_WINDOW_BYTES", 12 * CHUNK),
        (split_cells, "_cell_slots", Pool(2 * CHUNK, 1)),
        (staging, "_BLOCK_BYTES", CHUNK),
        (staging, "_block_pool", Pool(CHUNK, None)),
        (staging, "cores", lambda: 2),
    ]


def take_in_background(path: str) -> None:
    with little_room(*few_copies()):
        state = {"m": shards(COPIED)}
        Store(path, create=False).async_take(state, "a", max_staging_bytes=1).wait()


def test_whole_cells_are_hashed_while_no_copy_can_be_made(world: Worlds, tmp_path: Path) -> None:
    """All threads waited for a copy, whose room was freed by hashing what had come meanwhile."""
    Store(tmp_path, create=NewStore(chunk_size=CHUNK)).make()
    world(2).run(take_in_background, str(tmp_path), timeout=40)
    assert_taken(tmp_path, 0, COPIED - 1)


def take_without_memory(path: str) -> int:
    """Fail on rank 0 where parts are copied to the first rank; return the slots still in use."""
    with little_room(*few_copies()):
        with ExitStack() as stack:
            if dist.get_rank() == 0:
                copy = mock.Mock(side_effect=MemoryError)
                stack.enter_context(mock.patch.object(split_cells, "_copy", copy))
            store, state = Store(path, create=False), {"m": shards(COPIED)}
            pending = store.async_take(state, "failed", max_staging_bytes=1)
            with pytest.raises((MemoryError, RankError)):
                pending.wait()
        kept = staging._block_pool
        return kept._made - len(kept._free)


def test_an_error_gives_back_the_copies_for_all_ranks(world: Worlds, tmp_path: Path) -> None:
    """Those for later ranks than the one where it came were lost, and the next take waited."""
    Store(tmp_path, create=NewStore(chunk_size=CHUNK)).make()
    assert world(2).run(take_without_memory, str(tmp_path), timeout=40) == [0, 0]
