"""Sharded tensors: which boxes of the global tensor this rank holds, and their memory.

The boxes of a DTensor are computed here from its placements, as runs of indices along each axis.
torch's own function is not used: it gives only the first index of each axis, though a rank may hold
several runs, and it makes a tensor of all indices on the way.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any, TypeAlias

import torch
from msgspec import Struct
from msgspec.structs import replace

from casnap.errors import UnsupportedTypeError
from casnap.format.region import Region


class Shards(Struct, frozen=True):
    """The shards of a tensor that this rank holds.

    Attributes:
        shape: The global shape.
        boxes: Where in the global tensor the shards lie. A sharded tensor has no empty boxes.
        tensors: The shards, one for each box: views of the live memory.
        value: The tensor itself.
    """

    shape: tuple[int, ...]
    boxes: tuple[Region, ...]
    tensors: tuple[torch.Tensor, ...]
    value: torch.Tensor

    @property
    def is_sharded(self) -> bool:
        """Whether the tensor is a DTensor or ShardedTensor."""
        return type(self.value) not in (torch.Tensor, torch.nn.Parameter)


_Run: TypeAlias = tuple[int, int]  # start, stop
_Axis: TypeAlias = list[_Run]  # indices into the global tensor, in the order of the local one


class _Split(Struct, frozen=True):
    """How one axis of a mesh splits one axis of a tensor.

    Attributes:
        axis: The axis of the tensor.
        shards: The number of shards.
        number: The number of this rank's shard.
        factor: torch's ``split_factor``: the axis is first cut into so many pieces, then each piece
            is split, and a shard has a part of every piece. None to split the axis as a whole.
    """

    axis: int
    shards: int
    number: int
    factor: int | None


def shards_of(path: str, value: object) -> Shards | None:
    """Return the shards that this rank holds of a DTensor or ShardedTensor; None for other values.

    Args:
        path: The logical path, for errors.
        value: Anything.

    Raises:
        UnsupportedTypeError: The placements do not determine which elements this rank holds.
    """
    if not isinstance(value, torch.Tensor):
        return None
    with torch.no_grad(), without_torch_function():
        if _is_a(value, "DTensor", "torch.distributed.tensor", "torch.distributed._tensor"):
            return _of_dtensor(path, value)
        if _is_a(value, "ShardedTensor", "torch.distributed._shard.sharded_tensor"):
            return _of_sharded_tensor(path, value)
    return None


def sharded_like(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a new tensor with the shape and the sharding of another. Its values are arbitrary.

    Args:
        value: A DTensor or ShardedTensor.
        dtype: The dtype of the new tensor, if it differs; only for a DTensor.
    """
    if not hasattr(value, "local_shards"):
        # torchrec's tables cannot be made empty, only copied.
        new: torch.Tensor = value.detach().to(dtype or value.dtype, copy=True)
        return new
    # Its functions are those of __torch_function__, which warns that the class is deprecated.
    shards = [type(s)(torch.empty_like(s.tensor), s.metadata) for s in value.local_shards()]
    like: torch.Tensor = type(value)._init_from_local_shards_and_global_metadata(
        shards, value.metadata(), value._process_group, sharding_spec=value.sharding_spec()
    )
    return like


def holders_of(value: torch.Tensor) -> tuple[int, ...]:
    """Return the ranks that hold a sharded tensor: the ranks of its mesh or group."""
    mesh: Any = getattr(value, "device_mesh", None)
    if mesh is not None:
        return tuple(sorted(mesh.mesh.flatten().tolist()))
    group: Any = getattr(value, "_process_group", None)
    return tuple(sorted(torch.distributed.get_process_group_ranks(group))) if group else ()


def shard_again(module: torch.nn.Module) -> None:
    """Let FSDP2 free the parameters that it has gathered, so that the module has its shards again.

    After a forward without a backward, FSDP2 leaves some parameters gathered, in separate memory.
    Values written there would be lost once FSDP2 frees that memory. Values written to the shards
    would not be seen by forwards until then.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # a program with such a module imports it
    for part in module.modules() if fsdp is not None else ():
        if isinstance(part, fsdp.FSDPModule):
            part.reshard()


def without_torch_function() -> AbstractContextManager[object]:
    """Return a context manager that bypasses ``__torch_function__``.

    ShardedTensor's ``__torch_function__`` warns that the class is deprecated.
    """
    return torch._C.DisableTorchFunctionSubclass()


def _is_a(value: object, name: str, *modules: str) -> bool:
    # A program with such a value has imported the module, so it need not be imported here.
    classes = (getattr(sys.modules.get(module), name, None) for module in modules)
    return any(type(value) is c for c in classes if c is not None)


# --- ShardedTensor ------------------------------------------------------------------------------


def _of_sharded_tensor(path: str, value: Any) -> Shards:
    shards = value.local_shards()
    offsets = [tuple(shard.metadata.shard_offsets) for shard in shards]
    return _of_pieces(path, value, offsets, [shard.tensor for shard in shards])


def _of_pieces(
    path: str,
    value: torch.Tensor,
    offsets: Iterable[tuple[int, ...]],
    tensors: Iterable[torch.Tensor],
) -> Shards:
    shape = tuple(value.shape)
    pairs = [
        (Region(start, tuple(tensor.shape)), tensor.detach())
        for start, tensor in zip(offsets, tensors, strict=False)
        if tensor.numel()
    ]
    for box, _ in pairs:
        if len(box.sizes) != len(shape) or box != box.intersect(Region.whole(shape)):
            raise UnsupportedTypeError(
                f"{path}: a shard of shape {box.sizes} at {box.offsets} does not lie inside of "
                f"its tensor of shape {shape}; create the tensor with the true offsets"
            )
    return _shards(value, pairs)


def _shards(value: torch.Tensor, parts: Sequence[tuple[Region, torch.Tensor]]) -> Shards:
    boxes, tensors = tuple(box for box, _ in parts), tuple(tensor for _, tensor in parts)
    return Shards(tuple(value.shape), boxes, tensors, value)


# --- DTensor ------------------------------------------------------------------------------------

# The rank whose file is being read: its DTensors are loaded without a process group.
_on_behalf_of: ContextVar[int | None] = ContextVar("_on_behalf_of", default=None)


@contextmanager
def on_behalf_of(rank: int) -> Iterator[None]:
    """Within this ``with`` block, treat DTensors as if this process were rank ``rank``.

    A checkpoint that is read rank by rank needs this: each file has the boxes of its rank.
    """
    token = _on_behalf_of.set(rank)
    try:
        yield
    finally:
        _on_behalf_of.reset(token)


def _coordinate_of(mesh: Any, rank: int) -> list[int] | None:
    places = (mesh.mesh == rank).nonzero().tolist()
    return places[0] if places else None


def _of_dtensor(path: str, value: Any) -> Shards:
    shape, mesh = tuple(value.shape), value.device_mesh
    rank = _on_behalf_of.get()
    coordinate = mesh.get_coordinate() if rank is None else _coordinate_of(mesh, rank)
    splits = _splits(path, value, coordinate)
    if coordinate is None:
        return _shards(value, [])
    local = value.to_local()
    if hasattr(local, "wait"):  # a collective may still be under way
        local = local.wait()
    if hasattr(local, "local_offsets"):  # torchrec's tables: several shards in one DTensor
        offsets = map(tuple, local.local_offsets())
        return _of_pieces(path, value, offsets, local.local_shards())
    axes = _indices(shape, _ordered(splits, value))
    sizes = tuple(sum(stop - start for start, stop in runs) for runs in axes)
    if sizes == tuple(local.shape) or 0 == prod(sizes) == local.numel():
        return _shards(value, list(_boxes(axes, local.detach())))
    raise UnsupportedTypeError(
        f"{path}: this DTensor of shape {shape} holds a local tensor of shape "
        f"{tuple(local.shape)}, which its placements {tuple(value.placements)} on a mesh of shape "
        f"{tuple(mesh.shape)} do not account for; make it with distribute_tensor(), or store "
        "value.to_local() under a key of each rank"
    )


def _splits(path: str, value: Any, coordinate: Sequence[int] | None) -> dict[int, _Split]:
    """Return how a DTensor's placements split the tensor: axis of the mesh → split.

    Axes along which the tensor is replicated are left out.

    Args:
        path: The logical path, for errors.
        value: The DTensor.
        coordinate: The place of this rank in the mesh; None if this rank is not in it.

    Raises:
        UnsupportedTypeError: The placements do not determine which elements this rank holds.
    """
    splits = {}
    for i, placement in enumerate(value.placements):
        if placement.is_partial():
            raise UnsupportedTypeError(
                f"{path}: this DTensor is {placement}: its ranks hold terms of a reduction that is "
                "still to come, not values; redistribute it first, as with "
                "value.redistribute(placements=[Replicate()])"
            )
        if placement.is_replicate():
            continue
        if not placement.is_shard() and not hasattr(placement, "split_factor"):
            raise UnsupportedTypeError(
                f"{path}: a DTensor with the placement {placement} cannot be stored; "
                "redistribute it to Shard or Replicate first"
            )
        if (
            coordinate is not None
            and _on_behalf_of.get() is None
            and value.device_mesh.get_local_rank(i) != coordinate[i]
        ):
            raise UnsupportedTypeError(
                f"{path}: the mesh of this DTensor, {value.device_mesh}, has its ranks in another "
                "order than their group, so torch contradicts itself about which rank holds what; "
                "make the mesh with its ranks in ascending order"
            )
        axis, shards = placement.dim % len(value.shape), value.device_mesh.size(i)
        index = coordinate[i] if coordinate is not None else 0
        splits[i] = _Split(axis, shards, index, getattr(placement, "split_factor", None))
    return splits


def _ordered(splits: dict[int, _Split], value: Any) -> Iterable[_Split]:
    """Return the splits in the order in which torch made them: each divides the earlier shards.

    In FSDP over TP, for example, a later axis of the mesh was split first. The split of the earlier
    axis then has a ``factor``: how many shards the splits before it made. So the factors give the
    order, and are set to None in the result.

    If no order gives these factors, the splits are returned unchanged, with their factors.
    """
    if all(split.factor is None for split in splits.values()):
        shard_order = getattr(getattr(value, "_spec", None), "shard_order", None) or ()
        order = [i for entry in shard_order for i in entry.mesh_dims]
        return [splits[i] for i in order] if sorted(order) == list(splits) else splits.values()
    orders: dict[int, list[_Split]] = {}
    for split in reversed(splits.values()):
        order, shards = orders.setdefault(split.axis, []), 1
        for place in range(len(order) + 1):
            if shards == (split.factor or 1):
                order.insert(place, split)
                break
            shards *= order[place].shards if place < len(order) else 0
        else:
            return splits.values()
    return [replace(split, factor=None) for order in orders.values() for split in order]


def _indices(shape: tuple[int, ...], splits: Iterable[_Split]) -> list[_Axis]:
    axes: list[_Axis] = [[(0, n)] if n else [] for n in shape]
    for split in splits:
        runs, factor = axes[split.axis], split.factor or 1
        length, pieces = sum(stop - start for start, stop in runs), list[_Run]()
        for piece in range(min(factor, length)):
            start_index, stop_index = _chunk(length, factor, piece)
            start, stop = _chunk(stop_index - start_index, split.shards, split.number)
            pieces += _cut_runs(runs, start_index + start, start_index + stop)
        axes[split.axis] = _joined(pieces)
    return axes


def _chunk(length: int, count: int, index: int) -> _Run:
    """Return start and stop of chunk ``index`` of ``torch.chunk`` into ``count`` chunks."""
    size = -(-length // count)
    return min(length, size * index), min(length, size * (index + 1))


def _cut_runs(runs: _Axis, start: int, stop: int) -> Iterator[_Run]:
    """Slice runs of indices as if all their indices were one list: yield ``[start:stop]`` as runs.

    Args:
        runs: Runs of indices of an axis: first, and one past the last.
        start: The first position of the slice.
        stop: One past the last position.
    """
    passed = 0
    for run_start, run_stop in runs:
        begin, end = (
            max(run_start, run_start + start - passed),
            min(run_stop, run_start + stop - passed),
        )
        if begin < end:
            yield begin, end
        passed += run_stop - run_start


def _joined(runs: Iterable[_Run]) -> _Axis:
    joined: _Axis = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _boxes(axes: list[_Axis], local: torch.Tensor) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield the boxes that this rank holds, each with its elements.

    Args:
        axes: For each axis, the runs of global indices that this rank holds.
        local: The local tensor. Along each axis it has the indices of all runs, one after the
            other.
    """
    placed = []
    for runs in axes:
        ends = itertools.accumulate(stop - start for start, stop in runs)
        placed.append([(*run, end) for run, end in zip(runs, ends, strict=True)])
    for box in itertools.product(*placed):
        offsets = tuple(start for start, _, _ in box)
        sizes = tuple(stop - start for start, stop, _ in box)
        slices = tuple(slice(end - n, end) for (_, _, end), n in zip(box, sizes, strict=True))
        yield Region(offsets, sizes), local[slices]
