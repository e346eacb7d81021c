"""A plain tensor that holds parts of a larger one is refused; only DCP knows what its parts are."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from casnap import Snapshot, StateDict, Store
from casnap.errors import MismatchError, UnsupportedTypeError
from casnap.integrations.dcp import CasnapReader, CasnapWriter
from tests.support.parts import holding, say_as

# In another order, but of the same shape: nothing else tells them apart.
SWAPPED = [(4, 8), (0, 4)]
REFUSED = r"holds parts of one of shape \(8, 5\) \(CheckpointableTensor"


def rows() -> torch.Tensor:
    return torch.arange(40.0).reshape(8, 5)


def swapped() -> torch.Tensor:
    return holding(rows(), SWAPPED, gap=0)


class Net(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


def split_net() -> Net:
    net = Net(swapped())
    say_as(swapped(), net.weight)
    # This is why a state need not say it.
    assert not hasattr(net.state_dict()["weight"], "global_shape")
    return net


def states() -> dict[str, Any]:
    net = split_net()
    return {
        "s/deep/0": StateDict(deep=[swapped()]),
        "s/0.weight": torch.nn.Sequential(net),
        "s, of a parameter": torch.optim.AdamW(net.parameters()),
    }


@pytest.mark.parametrize("path", list(states()))
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_they_are_not_taken(tmp_path: Path, path: str, allow_pickle: bool) -> None:
    with pytest.raises(UnsupportedTypeError, match=rf"{re.escape(path)}: .*{REFUSED}"):
        Store(tmp_path).take({"s": states()[path]}, "step", allow_pickle=allow_pickle)
    assert not Store(tmp_path).snapshots()


@pytest.fixture
def taken(tmp_path: Path) -> Snapshot:
    """Return a snapshot with a whole tensor in place of each."""
    net = Net(rows())
    optimizer = torch.optim.AdamW(net.parameters())
    net.weight.sum().backward()
    optimizer.step()
    state: dict[str, Any] = {"deep": StateDict(deep=[rows()]), "optimizer": optimizer}
    state["net"] = torch.nn.Sequential(net)
    return Store(tmp_path).take(state, "step")


@pytest.mark.parametrize("key", ["deep", "net", "optimizer"])
@pytest.mark.parametrize("strict", [True, False])
def test_they_are_not_filled(taken: Snapshot, key: str, strict: bool) -> None:
    live = dict(zip(("deep", "net", "optimizer"), states().values(), strict=True))[key]
    before = swapped()
    with pytest.raises(UnsupportedTypeError, match=REFUSED):
        taken.restore({key: live}, strict=strict)
    if key != "optimizer":
        held = live["deep"][0] if key == "deep" else live[0].weight
        assert torch.equal(held, before)


def test_they_are_not_read_into(taken: Snapshot) -> None:
    with pytest.raises(MismatchError, match=REFUSED):
        taken.read_object("deep/deep/0", swapped())
    with pytest.raises(MismatchError, match=REFUSED):
        taken.load_into(torch.nn.Sequential(split_net()), "net")
    report = taken.load_into(torch.nn.Sequential(split_net()), "net", strict=False)
    assert "holds parts" in report.mismatched[0]


def test_a_state_that_has_put_the_parts_together_is_whole(tmp_path: Path) -> None:
    net = split_net()
    net.register_state_dict_post_hook(lambda *args: args[1].update(weight=rows()))
    taken = Store(tmp_path).take({"net": net}, "step")
    assert torch.equal(taken.read_object("net/weight"), rows())


class Wrapped(torch.optim.Optimizer):
    """An optimizer within one that has nothing of its base class, as trainers have it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state_dict = inner.state_dict  # type: ignore[method-assign]


def test_an_optimizer_that_a_trainer_wraps_is_taken(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 2)
    Store(tmp_path).take({"o": Wrapped(torch.optim.SGD(linear.parameters(), 0.25))}, "step")
    with pytest.raises(UnsupportedTypeError, match=REFUSED):
        Store(tmp_path).take({"o": Wrapped(states()["s, of a parameter"])}, "parts")


def test_one_attribute_says_nothing(tmp_path: Path) -> None:
    tensor: Any = rows()
    tensor.global_shape = (16, 5)
    taken = Store(tmp_path).take({"s": StateDict(x=tensor)}, "step")
    assert torch.equal(taken.read_object("s/x"), rows())


@pytest.mark.skipif(hasattr(dcp, "CheckpointableTensor"), reason="this torch knows what they are")
def test_a_dcp_that_does_not_know_them_does_not_save_or_load_them(tmp_path: Path) -> None:
    Store(tmp_path).make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointException, match=r"x: .*Only torch 2.14 and newer"):
            dcp.save({"x": swapped()}, storage_writer=CasnapWriter(tmp_path / "a"))
        with pytest.raises(CheckpointException, match=r"x: .*Only torch 2.14 and newer"):
            dcp.save({"x": holding(rows(), [(0, 3)])}, storage_writer=CasnapWriter(tmp_path / "a"))
        dcp.save({"x": rows()}, storage_writer=CasnapWriter(tmp_path / "a"))
        with pytest.raises(CheckpointException, match=r"x: .*Only torch 2.14 and newer"):
            dcp.load({"x": swapped()}, storage_reader=CasnapReader(tmp_path / "a"))
