"""Modules of devices that lack what CUDA's has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from casnap import RNGState, Snapshot, StateDict, release_memory
from tests.support.late_device import module

# What the modules of torch lack, of what casnap asks for.
MTIA = ["cudart"]
XPU = ["cudart", "default_stream"]
MPS = [*XPU, "Stream", "stream", "device", "current_stream", "current_device", "is_initialized"]


class Without:
    """A module that lacks some names."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __getattr__(self, name: str) -> object:
        if name in self._names:
            raise AttributeError(name)
        return getattr(module, name)


@pytest.mark.parametrize(
    ("names", "prompt"), [(MTIA, True), (XPU, False), (MPS, False)], ids=["MTIA", "XPU", "MPS"]
)
def test_a_module_that_lacks_some_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], prompt: bool
) -> None:
    release_memory()
    module.is_prompt = prompt
    module.manual_seed_all(1)
    monkeypatch.setattr(torch, "late", Without(names))
    x = torch.arange(3_000_000.0)
    live = {
        "s": StateDict(x=x.to("late"), turned=x.to("late:1").view(1000, 3000).t()),
        "rng": RNGState(),
    }
    snapshot = Snapshot.take(tmp_path / "run" / "step", live)
    pending = Snapshot.async_take(tmp_path / "run" / "again", live)
    for tensor in live["s"].values():
        tensor.zero_()
    module.manual_seed_all(99)
    seeds = [module.get_rng_state(i) for i in range(2)]
    again = pending.wait()
    snapshot.restore(live)
    assert torch.equal(live["s"]["x"].cpu(), x)
    assert torch.equal(live["s"]["turned"].cpu(), x.view(1000, 3000).t())
    assert torch.equal(again.read_object("s/turned"), x.view(1000, 3000).t())
    restored = [not torch.equal(module.get_rng_state(i), seeds[i]) for i in range(2)]
    assert restored == [names is not MPS] * 2


def test_a_device_that_torch_has_no_module_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(3_000_000.0).to("late")
    module.synchronize("late")
    with monkeypatch.context() as patch:
        patch.delattr(torch, "late")
        snapshot = Snapshot.take(tmp_path / "run" / "step", {"s": StateDict(x=x), "r": RNGState()})
        snapshot.restore({"s": StateDict(x=torch.zeros_like(x)), "r": RNGState()})
    assert torch.equal(snapshot.read_object("s/x"), x.cpu())


def test_random_states_do_not_ask_whether_there_is_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's answer would keep forked children from using it."""
    monkeypatch.setattr(module, "is_available", lambda: pytest.fail("was asked"))
    snapshot = Snapshot.take(tmp_path / "run" / "step", {"rng": RNGState()})
    snapshot.restore({"rng": RNGState()})


def test_random_states_of_more_and_of_fewer_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.manual_seed_all(7)
    seeds = [module.get_rng_state(i) for i in range(2)]
    two = Snapshot.take(tmp_path / "run" / "two", {"rng": RNGState()})
    with monkeypatch.context() as patch:
        patch.setattr(module, "device_count", lambda: 1)
        module.manual_seed_all(1)
        two.restore({"rng": RNGState()})
        one = Snapshot.take(tmp_path / "run" / "one", {"rng": RNGState()})
    assert torch.equal(module.get_rng_state(0), seeds[0])
    assert not torch.equal(module.get_rng_state(1), seeds[1])
    two.restore({"rng": RNGState()})
    module.manual_seed_all(2)
    other = module.get_rng_state(1)
    one.restore({"rng": RNGState()})
    assert torch.equal(module.get_rng_state(0), seeds[0])
    assert torch.equal(module.get_rng_state(1), other)
