"""What casnap does with tensors depends on no mode of its caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from casnap import RNGState, StateDict, Store
from casnap.errors import MismatchError, StateError
from tests.support.bitwise import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
Mode = Callable[[], AbstractContextManager[object]]


class NoDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        raise AssertionError(f"{func} in the caller's mode")


class NoFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        raise AssertionError(f"{func} in the caller's mode")


@contextmanager
def half() -> Iterator[None]:
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def transform() -> Iterator[None]:
    """Be within a function that torch.func.grad transforms."""
    torch._C._functorch._grad_increment_nesting()
    try:
        yield
    finally:
        torch._C._functorch._grad_decrement_nesting()


MODES: dict[str, Mode] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
    "fake": FakeTensorMode,
    "dispatch": NoDispatch,
    "function": NoFunction,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "half": half,
    "deterministic": deterministic,
    "transform": transform,
}


ODD = {
    name: getattr(torch, name)
    for name in ("float4_e2m1fn_x2", "float8_e8m0fnu", "float8_e5m2", "uint16", "int8")
}


def as_bytes(n: int) -> torch.Tensor:
    return torch.arange(n).to(torch.uint8)


def content() -> dict[str, Any]:
    big = torch.arange(200_000, dtype=torch.float32)
    return {
        "big": big,
        "turned": big.clone().reshape(400, 500).t(),
        "small": torch.arange(3.0),
        "array": np.arange(99_999),
        "scalar": np.float64(3),
        "text": np.str_("abc"),
        "quantized": torch.quantize_per_tensor(torch.arange(9.0), 0.1, 3, torch.qint8),
        "sparse": torch.eye(4).to_sparse(),
        "conj": torch.ones(3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "buffer": torch.nn.Buffer(torch.ones(2)),
        **{name: as_bytes(40_000).view(dtype) for name, dtype in ODD.items()},
        "deep": [1, {"x": torch.arange(5)}],
    }


def zeros() -> dict[str, Any]:
    """Return what is filled in place, some of it by casts."""
    return {
        "big": torch.zeros(200_000, dtype=torch.float64),
        "turned": torch.zeros(400, 500).t(),
        "small": torch.zeros(3),
    }


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    return MODES[request.param]


def test_take_and_restore(store: Store, mode: Mode) -> None:
    taken, live, random = StateDict(content()), StateDict(), RNGState()
    before = torch.get_rng_state()
    with mode():
        store.take({"s": taken, "rng": random}, "step")
        pending = store.async_take({"s": taken, "rng": random}, "later")
        store["step"].restore({"s": live, "rng": random})
        whole = store["step"].read_object("s")
    pending.wait()
    for found in (live.data, whole, store["later"].read_object("s")):
        assert_same(found, content())
        assert not found["big"].is_inference()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("made_in_mode", [False, True])
def test_in_place(store: Store, made_in_mode: bool) -> None:
    """Tensors made in inference mode may be written to in that mode alone."""
    snapshot = store.take({"s": StateDict(content())}, "step")
    with torch.inference_mode(mode=made_in_mode):
        live, part, cast = StateDict(zeros()), torch.zeros(100, 3), torch.zeros(3).double()
    targets = dict(live)
    for inference in (False, True):
        with torch.inference_mode(mode=inference):
            snapshot.restore({"s": live})
            snapshot.read_object("s/turned", part, index=(slice(0, 500, 5), slice(2, 5)))
            snapshot.read_object("s/small", cast)
        for name, tensor in targets.items():
            assert live[name] is tensor
            assert torch.equal(tensor.float(), content()[name])
        assert torch.equal(part, content()["turned"][0:500:5, 2:5])
        assert torch.equal(cast.float(), content()["small"])


def test_reading_parts(store: Store, mode: Mode) -> None:
    snapshot = store.take({"s": StateDict(content())}, "step")
    out = torch.zeros(200_000, dtype=torch.float64)
    with mode():
        part = snapshot.read_object("s/big", index=slice(5, 150_000, 7))
        row = snapshot.read_object("s/turned", index=3)
        snapshot.read_object("s/big", out)
    assert torch.equal(part, content()["big"][5:150_000:7])
    assert torch.equal(row, content()["turned"][3])
    assert torch.equal(out.float(), content()["big"])


def test_modules(store: Store) -> None:
    model = torch.nn.Linear(200, 100)
    for name in ("inference", "no_grad", "meta", "autocast", "half"):
        with MODES[name]():
            store.take({"m": model}, name)
        other = torch.nn.Linear(200, 100)
        with MODES[name]():
            store[name].restore({"m": other})
        assert torch.equal(other.weight, model.weight)
        assert other.weight.requires_grad
        other(torch.ones(200)).sum().backward()


def test_the_state_is_read_in_the_mode_of_the_caller(store: Store) -> None:
    class Here(StateDict):
        def state_dict(self) -> dict[str, Any]:
            assert torch.is_inference_mode_enabled()
            return super().state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert torch.is_inference_mode_enabled()
            super().load_state_dict(state_dict)

    with torch.inference_mode():
        store.take({"s": Here(x=1)}, "step").restore({"s": Here(x=2)})


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x) or x.sum()),
    "vmap": lambda f: torch.func.vmap(lambda x: f(x) or x),
    "functionalize": lambda f: torch.func.functionalize(lambda x: f(x) or x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("n", [6, 60_000])
def test_what_is_transformed_has_no_memory_to_take_or_fill(store: Store, name: str, n: int) -> None:
    held = torch.arange(float(n)).reshape(2, -1)
    store.take({"s": StateDict(x=held)}, "step")

    def work(x: torch.Tensor) -> None:
        with pytest.raises(StateError, match=r"s/x: .* torch\.func"):
            store.take({"s": StateDict(x=x)}, "next")
        state = StateDict(x=x)
        store["step"].restore({"s": state})
        assert torch.equal(state["x"], held)

    TRANSFORMS[name](work)(torch.zeros(2, n // 2))
    state = StateDict(x=torch._efficientzerotensor((2, n // 2)))
    store["step"].restore({"s": state})
    assert torch.equal(state["x"], held)


def test_fake_tensors_hold_nothing(store: Store) -> None:
    store.take({"m": torch.nn.Linear(20, 10)}, "real")
    with FakeTensorMode():
        model = torch.nn.Linear(20, 10)
        for take in (store.take, store.async_take):
            with pytest.raises(StateError, match="FakeTensorMode"):
                take({"m": model}, "fake")
        with pytest.raises(StateError, match="FakeTensorMode"):
            store["real"].restore({"m": model})
        with pytest.raises(StateError, match="FakeTensorMode"):
            store["real"].read_object("m/weight", model.weight)
    with pytest.raises(MismatchError, match="meta"):
        store["real"].read_object("m/weight", torch.empty(10, 20, device="meta"))
    quantized = {"q": content()["quantized"]}
    with pytest.raises(MismatchError, match="quantized"):
        store.take({"s": StateDict(quantized)}, "q").read_object("s/q", torch.zeros(9))
    store.delete("q")
    assert [s.name for s in store.snapshots()] == ["real"]
