"""Values declared equal on all ranks that are not: no snapshot silently mixes ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from casnap import NewStore, StateDict, Store
from casnap.errors import StateError
from casnap.take.ranks.replica_samples import Sampler
from tests.support.heard import warnings_heard
from tests.support.ranks import Worlds

CHUNK = 64 << 10


def own_paths(folder: Path) -> list[set[str]]:
    """Return the paths that belong to each rank."""
    contents = Store(folder)["s"].contents
    return [
        {key + inner for key, d in trees.items() for inner, _ in contents.tree(d).items()}
        for _, trees in sorted(contents.manifest.ranks.items())
    ]


# --- DDP ------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A module with all that a state can hold: parameters, buffers, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(256, 256, bias=False)
        self.head = nn.Linear(256, 8, bias=False)
        self.norm = nn.BatchNorm1d(256)
        self.seen = 0
        self.register_buffer("count", torch.zeros(1))

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


IGNORED = ["head.weight", "count"]


def wrapped(ignores: bool = False, **options: Any) -> DistributedDataParallel:
    net = Net()
    if ignores:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, IGNORED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch call it otherwise
        return DistributedDataParallel(net, **options)


def through_ddp(folder: str, what: str, options: dict[str, Any]) -> tuple[dict[str, Any], int, str]:
    """Make one part of a module differ; return what a rank restores, and the warnings."""
    rank = dist.get_rank()
    module = wrapped(**options)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(7)
        changed = module.module
        if what == "buffers":
            changed.norm.running_mean.fill_(rank)
        elif what == "extra state":
            changed.seen = rank
        elif what == "a parameter":
            changed.body.weight.fill_(rank)
        elif what == "a chunk":
            changed.body.weight[64:128].fill_(rank)
        elif what == "ignored":
            changed.head.weight.fill_(rank)
            changed.count.fill_(rank)
    with warnings_heard() as said:
        Store(folder).take({"model": module}, "s")
    given = wrapped(**options)
    Store(folder)["s"].restore({"model": given})
    net = given.module
    values = {
        "body": net.body.weight.unique().tolist(),
        "rows": net.body.weight[64:128].unique().tolist(),
        "head": net.head.weight.unique().tolist(),
        "mean": net.norm.running_mean.unique().tolist(),
        "count": net.count.tolist(),
    }
    return values, net.seen, " ".join(said)


def take_ddp(world: Worlds, folder: Path, what: str, **options: Any) -> list[Any]:
    Store(folder, create=NewStore(chunk_size=CHUNK)).make()
    return world(2).run(through_ddp, str(folder), what, options)


def test_buffers_that_ddp_does_not_broadcast_are_each_ranks(world: Worlds, tmp_path: Path) -> None:
    results = take_ddp(world, tmp_path, "buffers", broadcast_buffers=False)
    assert [values["mean"] for values, _, _ in results] == [[0.0], [1.0]]
    assert own_paths(tmp_path) == [{"model/module.norm.running_mean"}] * 2


def test_buffers_that_ddp_broadcasts_are_rank_0s(world: Worlds, tmp_path: Path) -> None:
    results = take_ddp(world, tmp_path, "buffers")
    assert [values["mean"] for values, _, _ in results] == [[0.0], [0.0]]
    assert own_paths(tmp_path) == [set()] * 2


def test_what_ddp_ignores_is_each_ranks(world: Worlds, tmp_path: Path) -> None:
    for rank, (values, *_) in enumerate(take_ddp(world, tmp_path, "ignored", ignores=True)):
        assert (values["head"], values["count"], values["body"]) == ([rank], [rank], [7.0])
    assert own_paths(tmp_path) == [{f"model/module.{name}" for name in IGNORED}] * 2


def test_ddp_says_nothing_of_extra_state(world: Worlds, tmp_path: Path) -> None:
    assert [seen for _, seen, _ in take_ddp(world, tmp_path, "extra state")] == [0, 1]


@pytest.mark.parametrize("what", ["a parameter", "a chunk"])
def test_replicas_of_ddp_that_differ_are_each_ranks(
    world: Worlds, tmp_path: Path, what: str
) -> None:
    for rank, (values, _, said) in enumerate(take_ddp(world, tmp_path, what)):
        assert values["rows"] == [rank]
        assert values["body"] == sorted([rank, 7.0] if what == "a chunk" else [rank])
        assert values["head"] == [7.0]
        assert ("does not keep model/module.body.weight equal" in said) == (rank == 0)
    assert own_paths(tmp_path) == [{"model/module.body.weight"}] * 2


# --- globs ----------------------------------------------------------------------------------------


def declared(rank: int, what: str) -> StateDict:
    odd = float(rank == 2)
    large = torch.ones(200_000)
    if what == "a tensor":
        large += odd
    elif what == "a chunk of a tensor":
        large[CHUNK // 2 : CHUNK // 2 + CHUNK // 4] += odd
    return StateDict(
        large=large,
        small=torch.ones(3) + (odd if what == "a small tensor" else 0),
        array=np.ones(90_000) + (odd if what == "an array" else 0),
        value=int(odd) if what == "a value" else 5,
        same=torch.ones(70_000),
    )


def take_declared(folder: str, what: str, per_rank: list[str]) -> list[float]:
    state = declared(dist.get_rank(), what)
    store = Store(folder)
    store.take({"m": state}, "s", replicated=["m/**"], per_rank=per_rank)
    found = StateDict()
    store["s"].restore({"m": found})
    assert torch.equal(found["large"], state["large"])
    return found["large"].unique().tolist()


@pytest.mark.parametrize(
    ("what", "path"),
    [
        ("a tensor", "m/large"),
        ("a chunk of a tensor", "m/large"),
        ("a small tensor", "m/small"),
        ("an array", "m/array"),
        ("a value", "m/value"),
    ],
)
def test_what_is_declared_and_differs_is_refused(
    world: Worlds, tmp_path: Path, what: str, path: str
) -> None:
    Store(tmp_path, create=NewStore(chunk_size=CHUNK)).make()
    outcomes = world(3).run(take_declared, str(tmp_path), what, [], expect_errors=True)
    for outcome in outcomes:
        assert isinstance(outcome, StateError), outcome
        assert f"{path} is named by replicated=, but is not the same on all ranks" in str(outcome)
        assert "on rank 2 it differs from rank 0" in str(outcome)
    assert Store(tmp_path).snapshots() == []
    world(3).run(take_declared, str(tmp_path), what, [path])


# --- sharded tensors ------------------------------------------------------------------------------


def sharded(placements: list[Placement], local: torch.Tensor, shape: tuple[int, ...]) -> DTensor:
    mesh = init_device_mesh("cpu", (2, 2))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def take_replicas(folder: str, kind: str, odd: int) -> list[float]:
    local = torch.ones(300, 200)
    if dist.get_rank() == odd:
        local += 1
    if kind == "HSDP":
        value = sharded([Replicate(), Shard(0)], local, (600, 200))
    else:
        value = sharded([Replicate(), Shard(1)], local, (300, 400))
    Store(folder).take({"m": StateDict(w=value)}, "s")
    result: list[float] = Store(folder)["s"].read_object("m/w").unique().tolist()
    return result


@pytest.mark.parametrize("kind", ["HSDP", "columns"])
def test_replicas_of_shards_that_differ_are_refused(
    world: Worlds, tmp_path: Path, kind: str
) -> None:
    Store(tmp_path, create=NewStore(chunk_size=CHUNK)).make()
    for outcome in world(4).run(take_replicas, str(tmp_path), kind, 3, expect_errors=True):
        assert isinstance(outcome, StateError), outcome
        assert "m/w: ranks " in str(outcome)
        assert "and 3 hold replicas of one part of it" in str(outcome)
    assert Store(tmp_path).snapshots() == []
    assert world(4).run(take_replicas, str(tmp_path), kind, -1) == [[1.0]] * 4


# --- samples --------------------------------------------------------------------------------------


def same(seed: int, *contents: torch.Tensor | bytes) -> bool:
    return len(set(Sampler(seed, CHUNK).samples(contents))) == 1


DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex128),
    *(torch.int64, torch.uint16, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sample_depends_on_the_elements_alone(dtype: torch.dtype) -> None:
    plain = (torch.arange(301 * 401) % 2).reshape(301, 401).to(dtype)
    assert same(1, plain, plain.clone(), plain.t().contiguous().t())
    assert not same(1, plain, torch.zeros_like(plain))
    for few in (plain[:3, :5], plain[0, 1], plain[:0]):
        assert same(1, few, few.clone())
    assert same(1, plain[:1].expand(301, -1), plain[:1].repeat(301, 1))


def test_samples_compare_bits() -> None:
    assert same(1, torch.full((9,), torch.nan), torch.full((9,), torch.nan))
    assert not same(1, torch.zeros(50_000), -torch.zeros(50_000))


@given(st.integers(0, 2**56 - 1), st.integers(0, 10 * CHUNK - CHUNK // 4), st.integers(0, 7))
def test_a_quarter_of_a_chunk_that_differs_is_always_found(seed: int, at: int, more: int) -> None:
    one = torch.zeros(10 * CHUNK + more, dtype=torch.uint8)
    other = one.clone()
    other[at : at + CHUNK // 4] = 1
    assert not same(seed, one, other)


def test_scattered_differences_are_found() -> None:
    """One element of a thousand differs, as in an embedding row that one rank trained."""
    one = torch.zeros(16, 1 << 18)
    for seed in range(20):
        other = one.clone()
        other[:, :: 1 << 10] = 1
        assert not same(seed, one, other)


def test_takes_look_at_other_places() -> None:
    first, second = (Sampler(seed, CHUNK)._positions(1 << 20, 4) for seed in (1, 2))
    assert (first == second).double().mean() < 0.01
