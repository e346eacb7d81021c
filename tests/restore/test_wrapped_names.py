"""Names that a wrapper of a module adds to, on one side: the error says what to give instead."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from casnap import StateDict, Store
from casnap.errors import MismatchError


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return Store(f"memory://{request.node.nodeid}")


def plain(value: float = 0.0) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for parameter in net.parameters():
        nn.init.constant_(parameter, value)
    return net


def compiled(value: float = 0.0) -> Any:
    return torch.compile(plain(value), backend="eager")


def ddp(value: float = 0.0) -> nn.Module:
    return nn.ModuleDict({"module": plain(value)})


def both(value: float = 0.0) -> nn.Module:
    return nn.ModuleDict({"module": compiled(value)})


def compiled_layers(value: float = 0.0) -> nn.Module:
    return nn.Sequential(*(torch.compile(layer, backend="eager") for layer in plain(value)))


class Headed(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.body, self.head = plain(value), nn.Linear(2, 1)


WRAPPERS = [compiled, ddp, both, compiled_layers, Headed]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_what_fills_the_module_is_said(store: Store, wrap: Any) -> None:
    store.take({"model": wrap(3.0), "progress": StateDict(step=7)}, "a")
    for load in ("restore", "load_into"):
        module = plain()
        fill = getattr(store["a"], load)
        with pytest.raises(MismatchError) as e:
            fill({"model": module} if load == "restore" else module)
        assert not any(p.any() for p in module.parameters())
        message = str(e.value)
        assert "strict=False" not in message  # nothing would be filled
        (call,) = re.findall(r"load_into\(.*\)(?= fills)", message)
        eval(f"snapshot.{call}", {"snapshot": store["a"], "module": module})
        assert all(p.unique().tolist() == [3.0] for p in module.parameters())
    with pytest.raises(MismatchError, match="strict=False to restore what fits, nothing of model"):
        store["a"].restore({"model": plain(), "progress": StateDict(step=0)})


@pytest.mark.parametrize(("wrap", "name"), [(compiled, "torch.compile"), (ddp, "Distributed")])
def test_it_is_said_who_adds_it(store: Store, wrap: Any, name: str) -> None:
    store.take({"model": wrap()}, "a")
    with pytest.raises(MismatchError, match=name):
        store["a"].restore({"model": plain()})


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_what_to_give_in_place_of_a_wrapper_is_said(store: Store, wrap: Any) -> None:
    store.take({"model": plain(3.0)}, "a")
    module = wrap()
    for load in (
        lambda: store["a"].restore({"model": module}),
        lambda: store["a"].load_into(module),
    ):
        with pytest.raises(MismatchError) as e:
            load()
        message = str(e.value)
        assert "strict=False" not in message
        if wrap is compiled_layers:
            assert "give the module as it is before its parts are wrapped" in message
            continue
        (path,) = re.findall(r"its attribute (.*)\.$", message, re.MULTILINE)
        inner = module.get_submodule(path)
        store["a"].restore({"model": inner})
        assert all(p.unique().tolist() == [3.0] for p in inner.parameters())


def test_other_differences_are_no_wrapper(store: Store) -> None:
    store.take({"model": plain(3.0)}, "a")
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    with pytest.raises(MismatchError) as e:
        store["a"].restore({"model": module})
    assert "Names below" not in str(e.value)
    assert "strict=False" in str(e.value)
