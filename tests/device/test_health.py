"""What a device measures of the tensors that it holds, by itself."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path

import pytest
import torch

from casnap import StateDict, Store
from tests.support import hashing_device
from tests.support.late_device import Stream, counts, module


def elements(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("hashes", [False, True])
def test_it_measures_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashes: bool
) -> None:
    if hashes:
        hashing_device.install(monkeypatch, "late:0")
    store = Store(tmp_path, health=True)
    on_host = {
        "w": elements(3_000_000),
        "b": elements(40),
        "half": elements(100_000).bfloat16(),
        "wild": elements(70_000).index_fill(0, torch.tensor([5]), nan),
        "few": torch.tensor([1.0, inf]),
        "columns": elements(90_000).view(300, 300).t(),
        "complex": elements(5_000).to(torch.complex64) * (1 + 2j),
    }
    expected = Store(tmp_path / "host", health=True).take({"s": StateDict(on_host)}, "run").health()
    with module.stream(Stream("late")):
        state = {name: tensor.to("late") for name, tensor in on_host.items()}
        first = store.take({"s": StateDict(state)}, "run/1")
        pending = store.async_take({"s": StateDict(state)}, "run/2")
        for tensor in state.values():
            tensor.fill_(7.0)
    for found in (first.health(), pending.wait().health()):
        assert found.keys() == expected.keys()
        for path, numbers in found.items():
            other = expected[path]
            assert (numbers.nan, numbers.infinite) == (other.nan, other.infinite), path
            assert numbers.norm == pytest.approx(other.norm, 1e-6), path
            assert numbers.largest == pytest.approx(other.largest, 1e-6), path


def test_few_bytes_cross_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashing_device.install(monkeypatch, "late:0")
    # Its chunks are equally long: one of them crosses, to see whether the device hashes right.
    state = {"s": StateDict(w=elements(3 << 18).to("late"))}
    store = Store(tmp_path, health=True)
    store.take(state, "run/1")
    plain = Store(tmp_path, health=False)
    crossed = []
    for each in (plain, store):
        counts.clear()
        each.take(state, f"later/{len(crossed)}")
        crossed.append(counts["to host"])
    assert crossed[1] - crossed[0] < 100
