"""Tensors on a GPU; these tests run wherever there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from casnap import Snapshot, StateDict, release_memory
from casnap.runtime.buffers import Slot
from casnap.state.devices import pin

pytestmark = pytest.mark.gpu


def state(device: str) -> dict[str, StateDict]:
    generator = torch.Generator().manual_seed(1)
    big = torch.randn(3000, 5000, generator=generator).to(device)
    return {
        "s": StateDict(
            big=big,
            turned=big[:100, :200].t(),
            half=torch.randn(700, 900, generator=generator).to(device, torch.bfloat16),
            small=torch.arange(7, device=device),
            empty=torch.empty(0, 3, device=device),
            many=[torch.full((50,), i, device=device) for i in range(300)],
        )
    }


def test_a_take_waits_for_the_stream_of_its_caller(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(4000, 4000, device="cuda")
        for _ in range(50):
            x = x @ x / 4000
        snapshot = Snapshot.take(tmp_path / "run" / "step", {"s": StateDict(x=x)})
    assert torch.equal(snapshot.read_object("s/x"), x.cpu())


ON_THE_LAST_GPU = """
import sys
import torch
from casnap import Snapshot, StateDict, release_memory
from casnap.runtime.buffers import Slot
from casnap.state.devices import pin

device = torch.device("cuda", torch.cuda.device_count() - 1)
torch.cuda.set_device(device)
x = torch.randn(2000, 5000, device=device)
state = {"s": StateDict(x=x, turned=x.t())}
snapshot = Snapshot.take(sys.argv[1] + "/run/now", state)
Snapshot.async_take(sys.argv[1] + "/run/later", state).wait()
live = StateDict(x=torch.zeros_like(x), turned=torch.zeros_like(x).t())
snapshot.restore({"s": live})
out = torch.zeros_like(x)
snapshot.read_object("s/x", out)
snapshot.read_object("s/x", out[:10], index=slice(0, 10))
assert torch.equal(live["x"], x) and torch.equal(out, x)
used = [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)]
assert used == [device.index], used
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_only_the_gpu_of_the_state_is_used(tmp_path: Path) -> None:
    """Each rank of a node has a GPU; a context on the first one would cost it memory for each."""
    command = [sys.executable, "-c", ON_THE_LAST_GPU, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("index", [None, slice(0, 4000)])
def test_read_object_waits_for_the_stream_of_its_caller(
    tmp_path: Path, index: slice | None
) -> None:
    """What the caller began to write there must not come after what is read, nor be overtaken."""
    expected = torch.randn(4000, 4000)
    snapshot = Snapshot.take(tmp_path / "run" / "step", {"s": StateDict(x=expected)})
    x, out = torch.ones(4000, 4000, device="cuda"), torch.empty(4000, 4000, device="cuda")
    turned = torch.empty(4000, 4000, device="cuda", dtype=torch.float64).t()
    with torch.cuda.stream(torch.cuda.Stream()):
        for target in (out, turned):
            for _ in range(100):
                x = x @ x / 4000
            target.copy_(x)
            snapshot.read_object("s/x", target, index=index)
            assert torch.equal(target.float().cpu(), expected)


def test_a_restore_waits_for_the_streams_of_its_threads(tmp_path: Path) -> None:
    """Threads cast and copy on streams that the caller's stream does not wait for by itself."""
    expected = torch.randn(4000, 4000)
    snapshot = Snapshot.take(tmp_path / "run" / "step", {"s": StateDict(x=expected)})
    live = StateDict(x=torch.zeros(4000, 4000, device="cuda", dtype=torch.float64).t())
    with torch.cuda.stream(torch.cuda.Stream()):
        snapshot.restore({"s": live})
        assert torch.equal(live["x"].float().cpu(), expected)


def test_memory_that_cannot_be_pinned_is_no_error_of_a_later_kernel() -> None:
    device, slot = torch.device("cuda", torch.cuda.current_device()), Slot(1 << 20)
    pin(slot, device)
    unpin, slot.unpin = slot.unpin, None
    pin(slot, device)  # refused: it is pinned
    assert torch.ones(3, device=device).sum().item() == 3
    assert unpin is not None
    unpin()


def test_pinned_memory_can_be_given_back(tmp_path: Path) -> None:
    for name in ("first", "second"):
        snapshot = Snapshot.take(tmp_path / "run" / name, state("cuda"))
        snapshot.restore(state("cuda"))
        assert release_memory() > 0
