"""Sharded tensors as boxes: what each rank says that it holds is what it holds."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

from casnap.errors import UnsupportedTypeError
from casnap.format.region import Region
from casnap.state.flatten import flatten
from casnap.state.sharded import Shards, shards_of
from casnap.state.tensors import describe
from tests.support import spreading
from tests.support.ranks import Worlds
from tests.support.sharded import assembled
from tests.support.torches import needs_torch
from tests.support.warm import run_python

Pieces = list[tuple[Region, torch.Tensor]]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh of the first ranks."""
    return spreading.mesh_of(tuple(range(prod(shape))), shape)


def counted(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of different elements, so that each value tells its place."""
    return torch.arange(prod(shape)).reshape(shape)


def pieces_of(value: torch.Tensor) -> Pieces:
    shards = shards_of("state/x", value)
    assert shards is not None
    assert shards.value is value
    return list(zip(shards.boxes, shards.tensors, strict=True))


def check(shape: tuple[int, ...], held: list[Pieces]) -> None:
    """Check that all ranks together hold a counted tensor, each element in its place."""
    pieces = [piece for rank in held for piece in rank]
    for box, part in pieces:
        assert box.numel > 0
        assert box.sizes == tuple(part.shape)
    if prod(shape):
        assert torch.equal(assembled(shape, pieces), counted(shape))
    else:
        assert not pieces


# --- placements ---------------------------------------------------------------------------------


def in_another_order() -> Pieces:
    """Split 10 rows by the last axis of the mesh first, as torch keeps it in the specification."""
    mesh = mesh_of((2, 2))
    full, (i, j) = counted((10, 2)), mesh.get_coordinate() or [0, 0]
    local = full.chunk(2)[j].chunk(2)[i].contiguous()
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    placements = (Shard(0), Shard(0))
    order = DTensorSpec.compute_default_shard_order(placements)
    order = tuple(entry._replace(mesh_dims=entry.mesh_dims[::-1]) for entry in order)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=order)
    return pieces_of(DTensor(local, spec, requires_grad=False))


@needs_torch("2.10", "a DTensor keeps no order")
def test_the_order_of_splits_counts(world: Worlds) -> None:
    results = world(4).run(in_another_order)
    check((10, 2), results)
    assert [pieces[0][0].offsets[0] for pieces in results] == [0, 5, 3, 8]


# --- DTensors that are not as usual ---------------------------------------------------------------


def under_way() -> tuple[str, Pieces]:
    value = distribute_tensor(counted((6, 4)), mesh_of((2,)), [Shard(0)])
    moving = value.redistribute(placements=[Replicate()], async_op=True)
    kind = type(moving._local_tensor).__name__
    return kind, pieces_of(moving)


def test_what_a_collective_still_brings_is_waited_for(world: Worlds) -> None:
    for kind, pieces in world(2).run(under_way):
        assert kind == "AsyncCollectiveTensor"
        check((6, 4), [pieces])
        assert type(pieces[0][1]) is torch.Tensor


def refused(what: str) -> str:
    mesh = mesh_of((2,))
    if what == "partial":
        value = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    elif what == "uneven":
        rows = 3 - dist.get_rank()  # 3 and 2 of 6 rows
        local = torch.ones(rows, 2)
        value = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((6, 2)), stride=(2, 1))
    elif what == "strided":
        # As FSDP over TP makes it, but split one after the other; torch reads it otherwise.
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        mesh = mesh_of((4, 2))
        value = distribute_tensor(counted((9,)), mesh, placements, src_data_rank=None)
    elif what == "descending":
        # FSDP2 and distribute_tensor go by the rank in the group, DTensor's offsets by the mesh.
        value = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [1, 0]), [Shard(0)])
    elif what == "meta":
        value = distribute_tensor(torch.ones(4, device="meta"), mesh, [Shard(0)])
    else:
        wrapper = LocalShardsWrapper([torch.ones(2, 3)], [(3, 0)])
        value = DTensor.from_local(
            wrapper, mesh, [Shard(0)], shape=torch.Size((4, 3)), stride=(3, 1), run_check=False
        )
    try:
        describe("model/x", value)
    except UnsupportedTypeError as e:
        return str(e)
    return ""


@pytest.mark.parametrize(
    ("what", "ranks", "hint"),
    [
        ("partial", [0, 1], "redistribute it first"),
        ("uneven", [1], "do not account for; make it with distribute_tensor"),
        pytest.param(
            *("strided", [6, 7], "do not account for"),
            marks=needs_torch("2.10", "strided shards are divided in another way"),
        ),
        ("descending", [0, 1], "ranks in ascending order"),
        ("meta", [0, 1], "to_empty"),
        ("outside", [0, 1], r"at \(3, 0\) does not lie inside"),
    ],
)
def test_refusals(world: Worlds, what: str, ranks: list[int], hint: str) -> None:
    answers = world(8 if what == "strided" else 2).run(refused, what)
    assert [rank for rank, said in enumerate(answers) if said] == ranks
    for rank in ranks:
        assert answers[rank].startswith("model/x: ")
        with pytest.raises(UnsupportedTypeError, match=hint):
            raise UnsupportedTypeError(answers[rank])


# --- as leaves of a state -------------------------------------------------------------------------


def leaves() -> dict[str, Any]:
    mesh = mesh_of((2,))
    state = {
        "weight": nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])),
        "frozen": nn.Parameter(
            distribute_tensor(torch.ones(3, 4), mesh, [Shard(1)]), requires_grad=False
        ),
        "half": distribute_tensor(torch.ones(4, dtype=torch.bfloat16), mesh, [Replicate()]),
        "conj": distribute_tensor(torch.ones(4, dtype=torch.complex64) * 1j, mesh, [Shard(0)]),
        "scalar": distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]),
    }
    conj = state["conj"]
    state["conj"] = DTensor.from_local(conj.to_local().conj(), mesh, [Shard(0)])
    found = {leaf.path: leaf for leaf in flatten(state, "s")}
    contents = {p: leaf.content for p, leaf in found.items() if isinstance(leaf.content, Shards)}
    assert contents.keys() == {f"s/{name}" for name in state}
    for name, value in state.items():
        content = contents[f"s/{name}"]
        assert all(
            type(part) is torch.Tensor and not part.requires_grad for part in content.tensors
        )
        if name != "conj":
            assert [part.data_ptr() for part in content.tensors] == [value.to_local().data_ptr()]
    (part,) = contents["s/conj"].tensors
    assert part.tolist() == [-1j, -1j]
    assert not part.is_conj()
    return {path: leaf.entry for path, leaf in found.items()}


def test_entries_are_of_the_whole(world: Worlds) -> None:
    first, second = world(2).run(leaves)
    assert first == second
    weight, frozen = first["s/weight"], first["s/frozen"]
    assert (weight.kind, weight.requires_grad, weight.dtype) == ("parameter", True, "float32")
    assert (weight.shape, weight.payload.nbytes) == ((5, 3), 60)
    assert (frozen.kind, frozen.requires_grad, frozen.shape) == ("parameter", False, (3, 4))
    assert (first["s/half"].kind, first["s/half"].payload.nbytes) == ("tensor", 8)
    assert (first["s/scalar"].shape, first["s/scalar"].payload.nbytes) == ((), 4)


def test_without_sharded_tensors_nothing_is_imported_for_them() -> None:
    code = (
        "import sys, torch; from casnap.state.flatten import fill_targets, flatten\n"
        # What the process was forked from may have it.
        "here = [name for name in sys.modules if name.startswith('torch.distributed.tensor')]\n"
        "for name in here: del sys.modules[name]\n"
        "state = {'a': torch.ones(3), 'b': torch.nn.Parameter(torch.ones(2))}\n"
        "list(flatten(state, 's')), fill_targets(state, 's')\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
