"""How far groups of tensors moved: against the same numbers by torch, over whole tensors."""

from __future__ import annotations

import json
from math import isnan, nan
from pathlib import Path

import pytest
import torch

from casnap import GroupStatistics, NewStore, StateDict, Store
from casnap.cli import run


def state(step: int) -> dict[str, StateDict]:
    generator = torch.Generator().manual_seed(1)
    model = {}
    for layer in range(3):
        weight = torch.randn(300, 200, generator=generator)
        weight[: 10 * step] += 0.01 * step
        model[f"blocks.{layer}.weight"] = weight.to(torch.bfloat16 if layer == 2 else torch.float32)
        model[f"blocks.{layer}.bias"] = torch.randn(8, generator=generator)
    model["embed.weight"] = torch.randn(50_000, generator=generator)
    model["head.weight"] = torch.arange(40_000.0) * (1 + step)
    model["head.weight"][3] = nan if step else 1.0
    model["phase"] = torch.randn(20_000, dtype=torch.complex64, generator=generator) * (
        1 + 1j * step
    )
    return {"model": StateDict(**model), "progress": StateDict(step=step)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=1 << 16))
    for step in range(2):
        store.take(state(step), f"step_{step}")
    return store


def by_torch(names: list[str]) -> tuple[float, float, float, float]:
    """Return share, largest, mean and cosine of tensors that all differ."""
    pairs = [[state(step)["model"][name].flatten() for step in range(2)] for name in names]
    a, b = (torch.cat([pair[i].to(torch.complex128) for pair in pairs]) for i in range(2))
    share = float((a.view(torch.int64).view(-1, 2) != b.view(torch.int64).view(-1, 2)).any(1).sum())
    finite = a.isfinite() & b.isfinite()
    apart = (a - b)[finite].abs()
    cosine = torch.dot(a[finite].conj(), b[finite]).real / (a[finite].norm() * b[finite].norm())
    return share / len(a), float(apart.max()), float(apart.sum()) / len(a), float(cosine)


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("model/blocks.*.weight", [f"blocks.{layer}.weight" for layer in range(3)]),
        ("model/head.weight", ["head.weight"]),
        ("model/phase", ["phase"]),
    ],
)
def test_a_group_that_moved(store: Store, group: str, names: list[str]) -> None:
    [found] = [each for each in store.statistics("step_0", "step_1") if each.group == group]
    assert found.tensors == found.differing_tensors == len(names)
    expected = by_torch(names)
    assert (found.share, found.largest, found.mean, found.cosine) == pytest.approx(expected, 1e-9)


def test_what_is_equal_counts_as_elements(store: Store) -> None:
    found = {each.group: each for each in store.statistics("step_0", "step_1")}
    embed = found["model/embed.weight"]
    assert (embed.elements, embed.differing, embed.differing_tensors) == (50_000, 0, 0)
    assert isnan(embed.cosine)
    assert found["model/blocks.*.bias"] == GroupStatistics(
        "model/blocks.*.bias", "weights", 3, 0, 24
    )
    assert all(not each.differing for each in store.statistics("step_1", "step_1"))


def test_the_command(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", f"{store.uri}/step_0", "step_1", "--stats"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "model/blocks.*.bias",
        "model/blocks.*.weight",
        "model/embed.weight",
        "model/head.weight",
        "model/phase",
    ]
    assert run(["diff", f"{store.uri}/step_0", "step_1", "--stats", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["groups"][0]["cosine"] is None
    assert run(["diff", f"{store.uri}/step_0", "step_1", "--stats", "--elements"]) == 2
