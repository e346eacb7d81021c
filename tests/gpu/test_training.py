"""What training on a GPU needs: random states, optimizers, graphs, precisions, other frameworks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from casnap import RNGState, Snapshot, StateDict, Store
from casnap.integrations.dcp import CasnapReader, CasnapWriter
from casnap.serving import Follower
from casnap.state.tensors import TENSOR_DTYPES
from casnap.take.staging import PIECE_BYTES
from tests.support.ports import free_port
from tests.support.ranks import World

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

MIB = 1 << 20


class Run:
    """A training run in half precision, with dropout, a scaler and a fused optimizer."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(500, 700), torch.nn.Dropout(0.5), torch.nn.Linear(700, 500)
        ).cuda()
        self.optim = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20, growth_interval=2)
        self.app_state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optim,
            "scaler": self.scaler,
            "rng": RNGState(),
        }

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optim.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(torch.randn(16, 500, device="cuda")).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optim)
            self.scaler.update()

    def bits(self) -> list[torch.Tensor]:
        moments = [s[k] for s in self.optim.state.values() for k in ("exp_avg", "exp_avg_sq")]
        held = [*self.model.parameters(), *moments]
        return [t.detach().cpu() for t in held] + [torch.tensor(self.scaler.get_scale())]


def assert_equal(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(tensors) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("how", ["take", "async_take"])
def test_a_run_goes_on_with_the_same_bits(tmp_path: Path, how: str) -> None:
    run, path = Run(), tmp_path / "run" / "step"
    run.train(4)
    if how == "take":
        snapshot = Snapshot.take(path, run.app_state)
        run.train(4)
    else:
        pending = Snapshot.async_take(path, run.app_state)
        run.train(4)
        snapshot = pending.wait()
    again = Run(seed=1)
    again.train(1)
    snapshot.restore(again.app_state)
    again.train(4)
    assert_equal(again.bits(), run.bits())


def test_many_takes_beside_training(tmp_path: Path) -> None:
    """Each shows the moment of its call, though the next steps are enqueued at once."""
    run, store = Run(), Store(tmp_path / "store")
    run.train(1)
    wanted, pending = [], []
    for step in range(12):
        wanted.append([p.detach().clone() for p in run.model.parameters()])
        pending.append(store.async_take({"model": run.model}, f"run/{step}"))
        run.train(2)
    for values, each in zip(wanted, pending, strict=True):
        state = each.wait().read_object("model")
        assert_equal([v.cpu() for v in values], list(state.values()))


def test_a_graph_is_captured_while_a_take_is_under_way(tmp_path: Path) -> None:
    """Calls of other threads that a capture forbids would make it fail, or the take."""
    x = torch.randn(2000, 3000, device="cuda")
    state = {"s": StateDict(x=x, turned=x.t().clone().t())}
    store = Store(tmp_path / "store")
    store.take({"s": StateDict(x=x + 1)}, "warm")
    wanted = x.cpu()
    y = torch.zeros_like(x)
    y.add_(1)
    torch.cuda.synchronize()
    for number in range(5):
        state["s"]["x"].copy_(wanted + number)
        pending = store.async_take(state, f"run/{number}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(200):
                y.add_(1)
        snapshot = pending.wait()
        y.zero_()
        graph.replay()
        assert y[0, 0].item() == 200
        assert torch.equal(snapshot.read_object("s/x"), wanted + number)


ALLOCATORS = """
import sys, torch
from casnap import Snapshot, StateDict

x = torch.randn(3000, 2000, device="cuda")
snapshot = Snapshot.take(sys.argv[1] + "/run/1", {"s": StateDict(x=x, t=x.t())})
pending = Snapshot.async_take(sys.argv[1] + "/run/2", {"s": StateDict(x=x + 1)})
wanted = (x + 1).cpu()
live = StateDict(x=torch.zeros_like(x), t=torch.zeros_like(x).t())
snapshot.restore({"s": live})
assert torch.equal(live["x"], x) and torch.equal(live["t"], x.t())
assert torch.equal(pending.wait().read_object("s/x"), wanted)
"""


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_allocators(tmp_path: Path, setting: str) -> None:
    command = [sys.executable, "-c", ALLOCATORS, str(tmp_path)]
    # The second name is that of torch before 2.10.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {**os.environ, **dict.fromkeys(names, setting)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("turned", [False, True])
def test_takes_and_restores_need_little_memory_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turned: bool
) -> None:
    """A tensor that is not contiguous is made so block by block, about one for each thread."""
    monkeypatch.setenv("CASNAP_DEVICE_HASH", "off")  # hashing takes memory for its nodes
    state = {f"t{i}": torch.randn(2048, 4096, device="cuda") for i in range(64)}
    if turned:
        state = {name: tensor.t() for name, tensor in state.items()}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    snapshot = Snapshot.take(tmp_path / "run" / "1", {"s": StateDict(**state)})
    Snapshot.async_take(tmp_path / "run" / "2", {"s": StateDict(**state)}).wait()
    snapshot.restore({"s": StateDict(**state)})
    blocks = PIECE_BYTES * (2 + len(os.sched_getaffinity(0))) if turned else 0
    assert torch.cuda.max_memory_allocated() - before <= blocks + MIB
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(
    "dtype", [d for n, d in TENSOR_DTYPES.items() if not n.startswith("q")], ids=str
)
def test_a_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    random = torch.randint(2, (300, 100 * dtype.itemsize), dtype=torch.uint8)
    state = StateDict(
        rows=random.cuda().view(dtype),
        scalar=random.cuda().view(-1)[: dtype.itemsize].view(dtype)[0],
        empty=random.cuda().view(dtype)[:0],
    )
    snapshot = Snapshot.take(tmp_path / "run" / "step", {"s": state})
    for name, tensor in state.items():
        value = snapshot.read_object(f"s/{name}")
        assert (value.dtype, value.shape) == (dtype, tensor.shape)
        pair = [t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (value, tensor)]
        assert torch.equal(*pair)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_views_and_layouts(tmp_path: Path) -> None:
    x = torch.randn(300, 400, dtype=torch.complex64, device="cuda")
    mask = torch.randn(300, 400, device="cuda").relu()
    wanted = StateDict(
        conj=x.conj(), imag=x.conj().imag, every=mask[:, ::3], coo=mask.to_sparse().coalesce()
    )
    snapshot = Snapshot.take(tmp_path / "run" / "step", {"s": wanted})
    live = StateDict({name: torch.zeros_like(value) for name, value in wanted.items()})
    snapshot.restore({"s": live})
    for name, value in wanted.items():
        assert torch.equal(live[name].to_dense().cpu(), value.to_dense().cpu()), name


def test_pinned_memory_of_the_caller(tmp_path: Path) -> None:
    """Tensors of the host that somebody else has pinned, as offloaded optimizers are."""
    pinned = torch.randn(3 * MIB).pin_memory()
    wanted = pinned.clone()
    pending = Snapshot.async_take(tmp_path / "run" / "step", {"s": StateDict(x=pinned)})
    pinned.zero_()
    pending.wait().restore({"s": StateDict(x=pinned)})
    assert pinned.is_pinned()
    assert torch.equal(pinned, wanted)


def test_dcp(tmp_path: Path) -> None:
    run = Run()
    run.train(2)
    state = run.model.state_dict()
    wanted = [v.cpu() for v in state.values()]
    for number in range(3):  # the copies' memory is kept, and used again
        path = tmp_path / "run" / f"step_{number}"
        saved = dcp.async_save({"model": state}, storage_writer=CasnapWriter(path))
        for value in state.values():
            value.data.add_(1)
        saved.result()
        live = {name: torch.zeros_like(value) for name, value in state.items()}
        dcp.load({"model": live}, storage_reader=CasnapReader(path))
        assert_equal([v.cpu() for v in live.values()], wanted)
        wanted = [v.cpu() for v in state.values()]


def test_a_follower_patches_a_module(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    model, live = (torch.nn.Linear(3000, 2000).cuda().bfloat16() for _ in range(2))
    store.take({"model": model}, "run/0")
    with Follower(store.uri, live, interval=None) as follower:
        for step in range(1, 4):
            with torch.no_grad():
                model.weight[-100 * step :] += 1
            store.take({"model": model}, f"run/{step}")
            assert follower.update()
            with torch.cuda.stream(torch.cuda.Stream()), follower.applied() as version:
                assert torch.equal(live.weight, model.weight)
            assert version.name == f"run/{step}"
            assert version.copied_bytes < model.weight.nbytes / 2


def on_one_gpu(path: str) -> None:
    """Two ranks share a GPU, and a group of gloo."""
    rank = dist.get_rank()
    torch.cuda.set_device(0)
    same = torch.arange(900_000.0, device="cuda").reshape(900, 1000)
    mine = torch.full((300, 1000), float(rank), device="cuda")
    live = {"s": StateDict(x=same, turned=same.t()), "mine": StateDict(rows=mine)}
    wanted = same.cpu()
    pending = Snapshot.async_take(path, live, replicated=["s/**"], per_rank=["mine/**"])
    for tensor in (same, mine):
        tensor.zero_()
    snapshot = pending.wait()
    snapshot.restore(live)
    assert torch.equal(same.cpu(), wanted)
    assert bool((mine == rank).all())


def test_two_ranks(tmp_path: Path, world: Callable[[int], World]) -> None:
    with world(2).fresh() as ranks:
        ranks.run(on_one_gpu, str(tmp_path / "run" / "step"))


NCCL = """
import os, sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from casnap import RNGState, Snapshot
from casnap.integrations.dcp import CasnapReader, CasnapWriter

path = sys.argv[1]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3], RANK="0", WORLD_SIZE="1")
torch.cuda.set_device(0)
dist.init_process_group(sys.argv[2])

def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 300)).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())

def train(model, optim, steps):
    for step in range(steps):
        optim.zero_grad()
        model(torch.ones(4, 300, device="cuda") * (step + 1)).square().mean().backward()
        optim.step()

def bits(model):
    return [p.full_tensor().detach().clone() for p in model.parameters()]

model, optim = made(0)
train(model, optim, 2)
snapshot = Snapshot.async_take(path + "/run/1", {"model": model, "optim": optim})
weights, moments = get_state_dict(model, optim)
state = {"model": weights, "optim": moments}
save = dcp.save if sys.argv[2] == "nccl" else dcp.async_save  # which wants a group of gloo, too
saved = save(state, storage_writer=CasnapWriter(path + "/dcp/1"))
train(model, optim, 2)
if save is dcp.async_save:
    saved.result()
snapshot = snapshot.wait()
wanted = bits(model)

for how in ("casnap", "dcp"):
    model, optim = made(1)
    train(model, optim, 1)
    if how == "casnap":
        snapshot.restore({"model": model, "optim": optim})
    else:
        weights, moments = get_state_dict(model, optim)
        state = {"model": weights, "optim": moments}
        dcp.load(state, storage_reader=CasnapReader(path + "/dcp/1"))
        weights, moments = state["model"], state["optim"]
        set_state_dict(model, optim, model_state_dict=weights, optim_state_dict=moments)
    train(model, optim, 2)
    assert all(torch.equal(a, b) for a, b in zip(bits(model), wanted, strict=True)), how
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
def test_fsdp(tmp_path: Path, backend: str) -> None:
    command = [sys.executable, "-c", NCCL, str(tmp_path), backend, str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
