"""Shards with edges on later axes: chunks are those of the plain tensors."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from casnap import NewStore, StateDict, Store
from tests.support.bitwise import raw
from tests.support.links import forget_links
from tests.support.ranks import Worlds

CHUNK = 64 << 10

# Name → dtype, shape, and the axes that a mesh of 2 x 2 and one of 4 ranks cut.
CASES: dict[str, tuple[torch.dtype, tuple[int, ...], tuple[int, int], int]] = {
    "rows and columns": (torch.float32, (300, 256), (0, 1), 1),
    "uneven": (torch.bfloat16, (301, 1031), (0, 1), 1),
    "columns alone": (torch.uint8, (700, 511), (1, 1), 1),
    "fewer columns than ranks": (torch.int16, (50_000, 3), (1, 0), 1),
    "three axes": (torch.bfloat16, (7, 90, 301), (1, 2), 2),
    "first and last of three": (torch.float32, (5, 60, 130), (0, 2), 1),
    "slices of more than a chunk": (torch.int8, (3, 90, 1100), (2, 1), 2),
    "one cell": (torch.int64, (9, 40), (0, 1), 1),
    "in its entry": (torch.int8, (3, 5), (1, 0), 1),
    "no element": (torch.float32, (0, 5), (0, 1), 1),
}
LAYOUTS = ("2 x 2", "4", "rows", "strided")


def whole(name: str) -> torch.Tensor:
    """Return a tensor; all values of its bytes occur."""
    dtype, shape, _, _ = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    size = (*shape, dtype.itemsize)
    numbers = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    return numbers.view(dtype).view(shape)


def plain() -> dict[str, StateDict]:
    return {"m": StateDict({name: whole(name) for name in CASES})}


def piece(tensor: torch.Tensor, axis: int, number: int, of: int) -> torch.Tensor:
    """Return what torch gives to one of several shards."""
    chunks = tensor.chunk(of, axis)
    return chunks[number] if number < len(chunks) else tensor.narrow(axis, 0, 0)


def sharded(layout: str) -> dict[str, StateDict]:
    """Return this rank's shards of all tensors; ``strided`` ones do not lie in their order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    square = layout in ("2 x 2", "strided")
    mesh = init_device_mesh("cpu", (2, 2) if square else (size,))
    state = StateDict()
    for name, (_, shape, axes, axis) in CASES.items():
        cuts = axes if square else ((0 if layout == "rows" else axis),)
        places = divmod(rank, 2) if square else (rank,)
        own = whole(name)
        for at, cut in zip(places, cuts, strict=True):
            own = piece(own, cut, at, 2 if square else size)
        own = own.mT.contiguous().mT if layout == "strided" else own.contiguous()
        state[name] = DTensor.from_local(
            own,
            mesh,
            [Shard(cut) for cut in cuts],
            run_check=False,
            shape=torch.Size(shape),
            stride=whole(name).stride(),
        )
    return {"m": state}


def take_in(path: str, layouts: tuple[str, ...], how: str) -> list[int]:
    """Take in some layouts; return the new bytes of each."""
    forget_links()
    new = []
    with ExitStack() as stack:
        if how == "sockets":
            refused = mock.Mock(side_effect=PermissionError)
            stack.enter_context(mock.patch.object(os, "memfd_create", refused))
        store = Store(path, create=False)
        for layout in layouts:
            name = f"{how} {layout}"
            if how == "async":
                state = sharded(layout)
                pending = store.async_take(state, name)
                for value in state["m"].values():
                    value.to_local().zero_()
                new.append(pending.wait().stats.new_bytes)
            else:
                new.append(store.take(sharded(layout), name).stats.new_bytes)
    forget_links()
    return new


def assert_whole(store: Store, name: str) -> None:
    for tensor in CASES:
        assert raw(store[name].read_object(f"m/{tensor}")) == raw(whole(tensor)), tensor


@pytest.mark.parametrize(
    ("how", "layouts"),
    [("shared memory", LAYOUTS), ("sockets", LAYOUTS[::3]), ("async", LAYOUTS[1:3])],
)
def test_a_retake_in_any_layout_writes_a_manifest(
    world: Worlds, tmp_path: Path, how: str, layouts: tuple[str, ...]
) -> None:
    store = Store(tmp_path, create=NewStore(chunk_size=CHUNK)).make()
    alone = store.take(plain(), "alone")
    for new in world(4).run(take_in, str(tmp_path), layouts, how):
        assert all(nbytes < 4096 for nbytes in new), new
    again = Store(tmp_path).make()
    for layout in layouts:
        found = again[f"{how} {layout}"].get_manifest()
        for path, entry in alone.get_manifest().items():
            if path.removeprefix("0/m/") in CASES:
                assert found[path].payload == entry.payload, path
    assert again.check(data=True).ok


@pytest.mark.parametrize(("size", "layout"), [(4, "2 x 2"), (3, "4")])
def test_what_ranks_stored_first_is_whole(
    world: Worlds, tmp_path: Path, size: int, layout: str
) -> None:
    store = Store(tmp_path, create=NewStore(chunk_size=CHUNK)).make()
    first = world(size).run(take_in, str(tmp_path), (layout,), "first")[0][0]
    logical = sum(whole(name).nbytes for name in CASES)
    assert logical < first < 1.01 * logical + 20_000
    assert_whole(store, f"first {layout}")
    assert store.take(plain(), "alone").stats.new_bytes < 4096
    assert store.check(data=True).ok
