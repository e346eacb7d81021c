"""Tensors on a GPU; these tests run wherever there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from casnap import Snapshot, StateDict

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


def same(a: dict[str, StateDict], b: dict[str, StateDict]) -> bool:
    x, y = a["s"], b["s"]
    return all(
        torch.equal(p.cpu(), q.cpu())
        for key in x
        for p, q in zip(
            x[key] if key == "many" else [x[key]],
            y[key] if key == "many" else [y[key]],
            strict=True,
        )
    )


def test_a_gpu_state_comes_back_in_place(tmp_path: Path) -> None:
    taken = state("cuda")
    snapshot = Snapshot.take(tmp_path / "run" / "step", taken)
    live = state("cuda")
    for tensor in live["s"].values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    big = live["s"]["big"]
    snapshot.restore(live)
    assert live["s"]["big"] is big
    assert same(live, taken)


def test_async_take_of_a_gpu_state_shows_the_moment_of_the_call(tmp_path: Path) -> None:
    live, expected = state("cuda"), state("cpu")
    pending = Snapshot.async_take(tmp_path / "run" / "step", live)
    live["s"]["big"].zero_()
    snapshot = pending.wait()
    assert torch.equal(snapshot.read_object("s/big"), expected["s"]["big"])


def test_a_take_waits_for_the_stream_of_its_caller(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(4000, 4000, device="cuda")
        for _ in range(50):
            x = x @ x / 4000
        snapshot = Snapshot.take(tmp_path / "run" / "step", {"s": StateDict(x=x)})
    assert torch.equal(snapshot.read_object("s/x"), x.cpu())


def test_devices_may_differ_between_take_and_restore(tmp_path: Path) -> None:
    snapshot = Snapshot.take(tmp_path / "run" / "step", state("cuda"))
    on_cpu = state("cpu")
    on_cpu["s"]["big"].zero_()
    snapshot.restore(on_cpu)
    assert same(on_cpu, state("cpu"))
    out = torch.zeros(3000, 5000, device="cuda")
    snapshot.read_object("s/big", out)
    assert torch.equal(out.cpu(), on_cpu["s"]["big"])
    part = snapshot.read_object("s/big", index=(slice(10, 20), 3))
    assert torch.equal(part, on_cpu["s"]["big"][10:20, 3])


def test_the_same_values_on_gpu_and_cpu_are_stored_once(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "run" / "gpu", state("cuda"))
    again = Snapshot.take(tmp_path / "run" / "cpu", state("cpu"))
    assert again.stats.new_bytes < 100_000
