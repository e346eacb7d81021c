"""Any tensor, spread over a world in any way: DTensors, ShardedTensors, whole copies.

``spread`` runs on all ranks of a world; what a ``Way`` says is the same on each.
"""

from __future__ import annotations

import itertools
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from casnap.format.region import Region
from casnap.state.sharded import shards_of
from tests.support.bitwise import raw

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
)
# Cells of many rows, of one row and of parts of one; a cell; what stands in the entry itself.
DIMENSIONS = (0, 1, 2, 3, 5, 8, 13, 130, 700, 20_000)
MOST = 60_000


class OnMesh(NamedTuple):
    """A DTensor on some ranks.

    Attributes:
        ranks: Of the mesh, in ascending order.
        shape: Of the mesh.
        placements: One for each axis of the mesh: which dimension is split there, and into how many
            pieces first (1 as a rule); None where nothing is.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    placements: tuple[tuple[int, int] | None, ...]


class InRows(NamedTuple):
    """A ShardedTensor: which rank holds the rows up to each cut."""

    cuts: tuple[int, ...]
    owners: tuple[int, ...]


Way = OnMesh | InRows | None
"""How a tensor is spread; None: all ranks hold all of it."""

_MESHES: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {
    1: [((0,), (1,))],
    2: [((0, 1), (2,)), ((1,), (1,)), ((0, 1), (1, 2))],
    3: [((0, 1, 2), (3,)), ((0, 2), (2,)), ((1, 2), (2, 1))],
    4: [
        ((0, 1, 2, 3), (4,)),
        ((0, 1, 2, 3), (2, 2)),
        ((2, 3), (2,)),
        ((0, 1, 3), (3,)),
        ((0, 1, 2, 3), (1, 2, 2)),
    ],
    8: [
        (tuple(range(8)), (8,)),
        (tuple(range(8)), (4, 2)),
        (tuple(range(8)), (2, 2, 2)),
        ((0, 2, 4, 5, 6, 7), (2, 3)),
    ],
}


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    shape = draw(st.lists(st.sampled_from(DIMENSIONS), max_size=3))
    while prod(shape) > MOST:
        shape.remove(max(shape))
    return tuple(shape)


def _on_mesh(shape: tuple[int, ...], size: int) -> st.SearchStrategy[Way]:
    splits: st.SearchStrategy[Any] = st.none()
    if shape:
        dims = st.integers(0, len(shape) - 1)
        whole, pieces = st.just(1), st.integers(1, 3)
        splits = st.none() | st.tuples(dims, whole) | st.tuples(dims, whole | pieces)
    return st.sampled_from(_MESHES[size]).flatmap(
        lambda mesh: st.tuples(*[splits] * len(mesh[1])).map(lambda p: OnMesh(*mesh, p))
    )


@st.composite
def _in_rows(draw: st.DrawFn, rows: int, size: int) -> Way:
    cuts = sorted({*draw(st.lists(st.integers(1, rows), max_size=2 * size)), rows})
    owner = st.integers(0, size - 1)
    return InRows(tuple(cuts), tuple(draw(st.tuples(*[owner] * len(cuts)))))


def ways(shape: tuple[int, ...], dtype: torch.dtype, size: int) -> st.SearchStrategy[Way]:
    """Return the ways to spread a tensor over so many ranks."""
    some = [_on_mesh(shape, size), _on_mesh(shape, size), st.none()]
    if prod(shape) and shape:
        some.append(_in_rows(shape[0], size))
    return st.one_of(some)


# --- on the ranks -----------------------------------------------------------------------------

_meshes: dict[tuple[Any, ...], DeviceMesh] = {}
_world: list[Any] = []


def mesh_of(ranks: tuple[int, ...], shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh of the current group; to make one takes longer than all else.

    Meshes of groups that are gone are forgotten: their threads run as long as they are known.
    """
    if not _world or _world[0] is not dist.group.WORLD:
        _meshes.clear()
        _world[:] = [dist.group.WORLD]
    key = ranks, shape
    if key not in _meshes:
        _meshes[key] = DeviceMesh("cpu", torch.tensor(ranks).reshape(shape))
    return _meshes[key]


def spread(whole: torch.Tensor, way: Way) -> torch.Tensor:
    """Return what this rank has of a tensor."""
    if way is None:
        return whole.clone()
    if isinstance(way, InRows):
        rank, starts = dist.get_rank(), (0, *way.cuts)
        shards = [
            LocalShard.from_tensor_and_offsets(
                whole[start:stop].clone(), [start] + [0] * (whole.dim() - 1), rank
            )
            for owner, (start, stop) in zip(way.owners, itertools.pairwise(starts), strict=True)
            if owner == rank
        ]
        return init_from_local_shards(shards, list(whole.shape))
    placements = [_placement(placement) for placement in way.placements]
    mesh = mesh_of(way.ranks, way.shape)
    # Each rank has the whole; nothing needs to be sent, and gloo cannot send all dtypes.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _placement(given: tuple[int, int] | None) -> Any:
    if given is None:
        return Replicate()
    dim, pieces = given
    return Shard(dim) if pieces == 1 else _StridedShard(dim, split_factor=pieces)


def is_right(value: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether this rank holds its part of a tensor; all ranks call it, since it also gathers."""
    shards = shards_of("value", value)
    if shards is None:
        return raw(value) == raw(whole)
    right = all(
        raw(part) == raw(whole[box.within(Region.whole(shards.shape))])
        for box, part in zip(shards.boxes, shards.tensors, strict=True)
    )
    gathers = (
        isinstance(value, DTensor)
        and whole.dtype in (torch.float32, torch.int64)
        and value.device_mesh.get_coordinate() is not None
        and not any(hasattr(p, "split_factor") for p in value.placements)
        and not hasattr(value.to_local(), "local_offsets")
    )
    # Not `and`: what is wrong on one rank alone would leave the others waiting.
    return (raw(cast(DTensor, value).full_tensor()) == raw(whole) if gathers else True) & right
