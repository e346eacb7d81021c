"""What a ``load_state_dict`` is given, and when: after all values, but before it loads anything."""

from __future__ import annotations

import enum
import sys
import types
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel

from casnap import NewStore, StateDict, Store
from casnap.errors import MismatchError, UnsupportedTypeError
from tests.support.bitwise import assert_same
from tests.support.versioned import Head, of_first_version, versioned


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return Store(f"memory://{request.node.nodeid}", create=NewStore(chunk_size=64 << 10))


# --- loaders that are not known -----------------------------------------------------------------


class Average:
    """Forgets what it has before it reads what it is given."""

    def __init__(self, value: float) -> None:
        self.shadow = [torch.full((50_000,), value), torch.full((2,), value)]
        self.shadow.append(self.shadow[0])

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "by name": {"first": self.shadow[0]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for tensor in self.shadow:
            tensor.zero_()
        for tensor, given in zip(self.shadow, state["shadow"], strict=True):
            tensor.copy_(given)


class Comparing(Average):
    """Notices what changes."""

    changed = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pairs = zip(self.shadow, state["shadow"], strict=True)
        self.changed = all(not torch.equal(old, given) for old, given in pairs)
        self.shadow = state["shadow"]
        assert self.shadow[0] is self.shadow[2] is state["by name"]["first"]


class Momentum(torch.optim.SGD):
    """An optimizer that forgets its moments before it loads others."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for moments in self.state.values():
            moments["momentum_buffer"].zero_()
        super().load_state_dict(state)


class Progress(StateDict):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self["total"].zero_()
        self["total"] += state["total"]


class Scaled(nn.Linear):
    """A layer whose extra state is forgotten before it is read."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 2)
        self.history = torch.full((40_000,), value)

    def get_extra_state(self) -> dict[str, Any]:
        return {"history": self.history}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.history.zero_()
        self.history += state["history"]


def optimizer(value: float) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.full((20_000,), value))
    weight.grad = torch.full((20_000,), value)
    momentum = Momentum([weight], lr=0.0, momentum=0.9)
    momentum.step()
    return momentum


def test_an_unknown_loader_gets_new_tensors(store: Store) -> None:
    def state(value: float) -> dict[str, Any]:
        return {
            "average": Average(value),
            "comparing": Comparing(value),
            "optim": optimizer(value),
            "progress": Progress(total=torch.full((30_000,), value)),
            "model": nn.Sequential(Scaled(value)),
        }

    store.take(state(3.0), "a")
    live = state(1.0)
    before = live["average"].shadow[0]
    store["a"].restore(live)
    assert live["average"].shadow[0] is before
    assert live["comparing"].changed
    (moments,) = live["optim"].state.values()
    for tensor in (
        *live["average"].shadow,
        *live["comparing"].shadow,
        moments["momentum_buffer"],
        live["progress"]["total"],
        live["model"][0].history,
    ):
        assert tensor.unique().tolist() == [3.0]


def test_an_object_with_a_loader_of_its_own_gets_new_tensors(store: Store) -> None:
    store.take({"s": StateDict(x=torch.full((50_000,), 3.0))}, "a")
    live = StateDict(x=torch.ones(50_000))

    def load(state: dict[str, Any]) -> None:
        live["x"].zero_()
        live["x"] += state["x"]

    live.load_state_dict = load  # type: ignore[method-assign]
    store["a"].restore({"s": live})
    assert live["x"].unique().tolist() == [3.0]


def test_an_error_of_a_loader_names_what_was_filled_in_place(store: Store) -> None:
    class Failing(Average):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("on purpose")

    state = {"a": Failing(1.0), "b": Average(1.0), "c": StateDict(x=torch.ones(3))}
    store.take(state, "a")
    with pytest.raises(MismatchError, match=r"only tensors were filled in place of: c$"):
        store["a"].restore(state)
    assert state["b"].shadow[0].unique().tolist() == [1.0]


# --- values that cannot be decoded --------------------------------------------------------------


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """Return a module that can be imported while a test wants that."""
    made = types.ModuleType("phases")

    class Phase(enum.Enum):
        MAIN = 1

    class Config:
        pass

    class Fussy:
        def __setstate__(self, state: object) -> None:
            raise ZeroDivisionError("in __setstate__")

    class Point(namedtuple("Point", "x y")):
        __slots__ = ()

    Point._fields = ("_x", "y")
    fussy = Fussy()
    fussy.x = 1  # type: ignore[attr-defined]
    for name, kind in (("Phase", Phase), ("Config", Config), ("Fussy", Fussy), ("Point", Point)):
        kind.__module__, kind.__qualname__ = "phases", name
        setattr(made, name, kind)
    made.values = {  # type: ignore[attr-defined]
        "an enum": Phase.MAIN,
        "a pickle": Config(),
        "a pickle that raises": fussy,
        "a namedtuple": Point(1, 2),
    }
    sys.modules["phases"] = made
    yield made
    sys.modules.pop("phases", None)


VALUES = ("an enum", "a pickle", "a pickle that raises", "a namedtuple")


@pytest.mark.parametrize("name", VALUES)
def test_what_cannot_be_decoded_leaves_all_as_it_is(
    store: Store, module: types.ModuleType, name: str
) -> None:
    def state(value: float, **more: Any) -> dict[str, Any]:
        model = nn.Linear(300, 100)
        nn.init.constant_(model.weight, value)
        return {"model": model, "progress": StateDict(step=value, big=torch.ones(50_000), **more)}

    store.take(state(3.0, deep=[{"x": module.values[name]}]), "a", allow_pickle=True)
    if name != "a pickle that raises":
        del sys.modules["phases"]
    live = state(1.0)
    live["progress"]["big"] *= 5
    with pytest.raises(UnsupportedTypeError, match="progress/deep/0/x"):
        store["a"].restore(live, allow_pickle=True)
    assert live["model"].weight.unique().tolist() == [1.0]
    assert live["progress"]["step"] == 1.0
    assert live["progress"]["big"].unique().tolist() == [5.0]
    with pytest.raises(UnsupportedTypeError, match="progress/deep/0/x"):
        store["a"].read_object("progress", allow_pickle=True)


def test_what_a_module_has_not_is_not_decoded(store: Store, module: types.ModuleType) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"config": module.values["a pickle"]}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    store.take({"model": Extra(3, 2)}, "a", allow_pickle=True)
    del sys.modules["phases"]
    report = store["a"].restore({"model": nn.Linear(3, 2)}, strict=False)
    assert report.unexpected == ["model/_extra_state"]


# --- the versions of modules --------------------------------------------------------------------


def test_modules_get_the_versions_that_were_taken(store: Store) -> None:
    model = versioned(spectral=True)
    store.take({"m": model}, "a")
    store.async_take({"m": model}, "b").wait()
    store.take({"m": Given(of_first_version(model))}, "c")
    for name in "abc":
        for options in ({}, {"strict": False}, {"reuse": True}):
            fresh = versioned(spectral=True)
            assert not store[name].restore({"m": fresh}, **options)
            assert_same(fresh.state_dict(), model.state_dict())
        fresh = versioned(spectral=True)
        fresh.load_state_dict(store[name].get_state_dict_for_key("m"))
        assert_same(fresh.state_dict(), model.state_dict())


class Given(StateDict):
    """Gives a state dict of a module as it is."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.data = state


class Whole(Given):
    """Gives and loads a module as trainers do, without the names of wrappers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self._module)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self._module, state)


compiled: Any = partial(torch.compile, backend="eager")

WRAPS: dict[str, Any] = {
    "nothing": lambda model: model,
    "compile": compiled,
    "compiled inside": lambda model: nn.Sequential(model[0], compiled(model[1])),
    "checkpointed": lambda model: nn.Sequential(model[0], checkpoint_wrapper(model[1])),
    "both": lambda model: compiled(nn.Sequential(model[0], checkpoint_wrapper(model[1]))),
}


@pytest.mark.parametrize("at", WRAPS)
def test_versions_are_found_by_the_names_that_wrappers_give(store: Store, at: str) -> None:
    for name, wrap in WRAPS.items():
        source = versioned()
        store.take({"m": Whole(wrap(source))}, f"{name}/2")
        store.take({"m": Given(of_first_version(wrap(source)))}, f"{name}/1")
        for version in (1, 2):
            fresh = versioned()
            store[f"{name}/{version}"].restore({"m": Whole(WRAPS[at](fresh))})
            assert_same(fresh.state_dict(), source.state_dict(), f"{name}/{version}")


@pytest.mark.parametrize("by", ["ddp", "compile"])
def test_versions_are_stored_by_the_names_of_the_keys_too(store: Store, by: str) -> None:
    """A state may lack in its keys what a wrapper adds, and then be loaded by hand."""
    added = {"ddp": "module.", "compile": "_orig_mod."}[by]

    def wrapped(model: nn.Module) -> nn.Module:
        return nn.ModuleDict({added.rstrip("."): model})

    for version in (1, 2):
        model = versioned()
        state = wrapped(model).state_dict()
        if version == 1:
            state[f"{added}1.0.weight"] = state[f"{added}1.0.weight"].t()
            state._metadata[f"{added}1.0"]["version"] = 1
        for key in list(state):
            state[key.removeprefix(added)] = state.pop(key)
        store.take({"m": Given(state)}, "a", overwrite=True)
        plain, again = versioned(), versioned()
        plain.load_state_dict(store["a"].get_state_dict_for_key("m"))
        assert_same(plain.state_dict(), model.state_dict())
        state = store["a"].get_state_dict_for_key("m")
        if by == "ddp":
            # The same weights have the same tree on one rank, which has no DDP.
            assert list(state._metadata) == list(plain.state_dict()._metadata)
            continue
        for key in list(state):
            state[f"{added}{key}"] = state.pop(key)
        wrapped(again).load_state_dict(state)
        assert_same(again.state_dict(), model.state_dict())


def test_a_submodule_may_be_called_module(store: Store) -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"module": nn.ModuleDict({"module": Head()}), "module_2": Head()})

    source, fresh = model(), model()
    store.take({"m": source, "n": source["module"]}, "a").restore({"m": fresh})
    assert_same(fresh.state_dict(), source.state_dict())
    fresh = model()
    store["a"].restore({"n": fresh["module"]})
    assert_same(fresh["module"].state_dict(), source["module"].state_dict())


@pytest.mark.parametrize("wrap", [lambda model: model, AveragedModel])
@pytest.mark.parametrize("is_beside", [(True, False), (False, True)])
def test_a_submodule_called_module_keeps_its_version(
    store: Store, wrap: Any, is_beside: tuple[bool, bool]
) -> None:
    """A loss or an activation may come or go beside it, and has no items."""
    source, fresh = (
        wrap(nn.ModuleDict({"module": Head()} | ({"loss": nn.ReLU()} if beside else {})))
        for beside in is_beside
    )
    store.take({"m": source}, "a").restore({"m": fresh})
    assert_same(fresh.state_dict(), source.state_dict())


@pytest.mark.parametrize("strict", [True, False])
def test_a_batch_norm_adds_what_its_first_version_lacked(store: Store, strict: bool) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.SyncBatchNorm(3))

    source: Any = model().state_dict()
    del source["1.num_batches_tracked"], source["2.num_batches_tracked"]
    second = OrderedDict(source)
    second._metadata = {"1": {"version": 2}, "2": {"version": 2}}  # type: ignore[attr-defined]
    source._metadata["1"]["version"] = 1
    del source._metadata["2"]["version"]
    store.take({"first": Given(source), "second": Given(second)}, "a")
    fresh, wanted = model(), model()
    wanted.load_state_dict(source)
    assert not store["a"].restore({"first": fresh}, strict=strict)
    assert_same(fresh.state_dict(), wanted.state_dict())
    names = ["second/1.num_batches_tracked", "second/2.num_batches_tracked"]
    assert store["a"].restore({"second": fresh}, strict=False).missing == names
    with pytest.raises(MismatchError, match=names[1]):
        store["a"].restore({"second": fresh})


def test_a_state_without_versions_gets_those_of_the_module(store: Store) -> None:
    model, fresh = versioned(), versioned()
    plain = dict(model.state_dict())
    ordered = OrderedDict(plain)
    store.take({"m": StateDict(plain), "deep": StateDict(list=[{"m": ordered}])}, "a")
    deep = StateDict(list=[{"m": fresh.state_dict()}])
    store["a"].restore({"m": fresh, "deep": deep})
    assert_same(dict(fresh.state_dict()), plain)
    fresh = versioned()
    fresh.load_state_dict(deep["list"][0]["m"])
    assert_same(dict(fresh.state_dict()), plain)
