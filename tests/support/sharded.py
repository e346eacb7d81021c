"""One training state in many layouts: plain, DDP, FSDP2, HSDP and FSDP over TP.

Every function here runs on all ranks of a world. Values depend on a seed and a name alone, so the
states of all layouts are the same one, and ``expected`` says what it is with no process group.
"""

from __future__ import annotations

import itertools
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from casnap.format.region import Region
from casnap.state.flatten import flatten
from casnap.state.sharded import Shards

LAYOUTS: tuple[str, ...] = ("plain", "ddp", "fsdp2", "hsdp")
if torch.__version__ >= "2.8":  # before, it divides no uneven tensor by both
    LAYOUTS = (*LAYOUTS, "fsdp_tp")

VOCABULARY = 1031  # a prime: no world size divides it
_WIDTH = 96
_STEP = 7.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.attention = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH, bias=False)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH, bias=False)


class Transformer(nn.Module):
    """The parameters of a transformer, and a buffer; it is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(1))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False)
        self.register_buffer("positions", torch.zeros(50, 8))


_TENSOR_PARALLEL: dict[str, type[ColwiseParallel | RowwiseParallel]] = {
    "embedding": RowwiseParallel,
    "blocks.*.attention": ColwiseParallel,
    "blocks.*.out": RowwiseParallel,
    "blocks.*.up": ColwiseParallel,
    "blocks.*.down": RowwiseParallel,
    "head": ColwiseParallel,
}


def values(seed: int, name: str, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Return what a tensor of this name holds."""
    generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator)


# --- layouts ----------------------------------------------------------------------------------


def model(layout: str, seed: int) -> nn.Module:
    """Return the model of a seed, spread over the world by torch."""
    module = Transformer()
    with torch.no_grad():
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            tensor.copy_(values(seed, name, tensor.shape))
    if layout == "plain":
        return module
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(module)
    mesh = mesh_of(layout)
    if layout == "fsdp_tp":
        parallelize_module(module, mesh["tp"], {k: v() for k, v in _TENSOR_PARALLEL.items()})
        mesh = mesh["dp"]
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def mesh_of(layout: str) -> DeviceMesh:
    """Return the mesh of a layout: of 2 x n/2 ranks, or n/2 x 2 for TP, where n is even."""
    size = dist.get_world_size()
    pairs = 2 if size % 2 == 0 else 1
    if layout == "fsdp2":
        return init_device_mesh("cpu", (size,))
    if layout == "hsdp":
        shape, names = (pairs, size // pairs), ("replicas", "dp")
    else:
        shape, names = (size // pairs, pairs), ("dp", "tp")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def training(layout: str, seed: int) -> Training:
    """Return a model and its optimizer after some steps."""
    module = model(layout, seed)
    optimizer = stepped(module)
    for name, parameter in module.named_parameters():
        state = optimizer.state[parameter]
        state["step"].fill_(_STEP)
        for i, moment in enumerate(("exp_avg", "exp_avg_sq")):
            own = name.removeprefix("module.")  # as it is without DDP
            whole = values(seed + 1000 * (i + 1), own, parameter.shape)
            _local(state[moment]).copy_(_local(_spread_as(parameter, whole)))
    return Training(module, optimizer)


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with the state that AdamW makes in a first step, without that step.

    To make a step on DTensors takes longer than all else: torch works out how each operator acts.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in module.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _spread_as(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    # All ranks have the whole, so none need send it.
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Training:
    """Model and optimizer as one Stateful, whose names are the same in all layouts."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = module
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        parameters, moments = get_state_dict(self.model, self.optimizer)
        return {"model": parameters, "optim": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


# --- comparison -------------------------------------------------------------------------------


def expected(seed: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a ``Training`` of this seed, whole, by their paths in its state."""
    module, tensors = Transformer(), dict[str, torch.Tensor]()
    for name, tensor in module.state_dict().items():
        tensors[f"model/{name}"] = values(seed, name, tensor.shape)
    for name, parameter in module.named_parameters():
        path = f"optim/state/{name}"
        tensors[f"{path}/step"] = torch.tensor(_STEP)
        tensors[f"{path}/exp_avg"] = values(seed + 1000, name, parameter.shape)
        tensors[f"{path}/exp_avg_sq"] = values(seed + 2000, name, parameter.shape)
    return tensors


def full_state(state: Any) -> dict[str, torch.Tensor]:
    """Return all tensors of a state, whole, by path; a collective call.

    Not by ``full_tensor()``, which hangs on FSDP over TP where a dimension does not divide.
    """
    leaves = {leaf.path.removeprefix("state/"): leaf for leaf in flatten(state, "state")}
    contents = {path: leaf.content for path, leaf in leaves.items()}
    mine = {path: c for path, c in contents.items() if not isinstance(c, bytes)}
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        held,
        {
            path: [(box, part.cpu()) for box, part in zip(c.boxes, c.tensors, strict=True)]
            for path, c in mine.items()
            if isinstance(c, Shards)
        },
    )
    return {
        path: assembled(content.shape, [pieces for rank in held for pieces in rank[path]])
        if isinstance(content, Shards)
        else content.detach().cpu()
        for path, content in mine.items()
    }


def assembled(shape: tuple[int, ...], pieces: list[tuple[Region, torch.Tensor]]) -> torch.Tensor:
    """Put a tensor together from boxes that cover it and agree where they overlap."""
    whole = torch.empty(shape, dtype=pieces[0][1].dtype if pieces else None)
    covered = torch.zeros(shape, dtype=torch.bool)
    for box, part in pieces:
        where = box.within(Region.whole(shape))
        assert torch.equal(whole[where][covered[where]], part[covered[where]]), box
        whole[where] = part
        covered[where] = True
    assert covered.all(), "no rank holds some elements"
    return whole


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Check that tensors are equal bit by bit, and have the same names and dtypes."""
    assert sorted(found) == sorted(wanted)
    for path, tensor in wanted.items():
        assert found[path].dtype == tensor.dtype, path
        assert torch.equal(found[path], tensor), path
