"""Leaves: objects, depth and hostile input."""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import sys
from collections import OrderedDict, defaultdict

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from casnap.errors import CasnapError, DamagedError, UnsupportedFormatError, UnsupportedTypeError
from casnap.format.entries import ContainerEntry, Payload, ValueEntry
from casnap.state.flatten import Leaf, fill_targets, flatten, inflate
from tests.support.leaves import leaves_of, round_trip
from tests.support.states import Color, Pair, states

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize", "ignore:Sparse invariant checks", "ignore:Sparse CSR"
)


# --- objects ----------------------------------------------------------------------------------


class Custom:
    def __init__(self, x):
        self.x = x


class MyDict(dict):
    pass


class MyInt(int):
    pass


class Unwritable:
    def __reduce__(self):
        raise RuntimeError("never")


@pytest.mark.parametrize(
    "value", [Custom(1), MyDict(a=1), MyInt(3), np.array([Custom(1)]), torch.ones(2).max(0)]
)
def test_objects_need_permission(value):
    with pytest.raises(UnsupportedTypeError, match=r"m/deep/0: .*") as e:
        list(flatten({"deep": [value]}, "m", allow_pickle=False))
    # Who has no such option is not told of it.
    with pytest.raises(UnsupportedTypeError, match=r"m/deep/0: (?!.*allow_pickle)"):
        list(flatten({"deep": [value]}, "m"))
    if not isinstance(value, np.ndarray):
        assert "allow_pickle=True" in str(e.value)
        assert type(value).__qualname__ in str(e.value)
    leaves = leaves_of({"deep": [value]}, allow_pickle=True)
    assert leaves["m/deep/0"].entry.kind == "pickle"
    with pytest.raises(UnsupportedTypeError, match="pass allow_pickle=True here too"):
        inflate("m", leaves, allow_pickle=False)
    with pytest.raises(UnsupportedTypeError, match=r"read_object\('m/deep/0', allow_pickle=True\)"):
        inflate("m", leaves)
    again = inflate("m", leaves, allow_pickle=True)["deep"][0]
    assert type(again) is type(value)


@pytest.mark.parametrize(
    "value", [lambda: 0, Unwritable(), (i for i in ()), sys, torch.UntypedStorage(4)]
)
def test_objects_that_cannot_be_stored_at_all(value):
    for allow_pickle in (False, True):
        with pytest.raises(UnsupportedTypeError, match="m/x: a value of type"):
            list(flatten({"x": value}, "m", allow_pickle=allow_pickle))


def test_objects_that_weights_only_reads():
    with torch.serialization.safe_globals([Custom]):
        leaves = leaves_of({"x": Custom(torch.ones(2))})
        assert leaves["m/x"].entry.kind == "object"
        assert torch.equal(inflate("m", leaves)["x"].x, torch.ones(2))
    with pytest.raises(UnsupportedTypeError, match="add_safe_globals"):
        inflate("m", leaves)


def test_local_enums_need_permission():
    class Local(enum.Enum):
        X = 1

    with pytest.raises(UnsupportedTypeError, match="m/x"):
        list(flatten({"x": Local.X}, "m"))


def test_enums_are_never_imported(monkeypatch):
    leaves = leaves_of(Color.RED)
    home = sys.modules[Color.__module__]
    monkeypatch.delattr(home, "Color")
    with pytest.raises(UnsupportedTypeError, match=f"import {Color.__module__} first"):
        inflate("m", leaves)
    monkeypatch.undo()
    leaves = leaves_of(Color.BLUE)
    monkeypatch.setattr(home, "Color", enum.Enum("Color", "RED"))
    with pytest.raises(UnsupportedTypeError, match="BLUE"):
        inflate("m", leaves)


def test_times_that_an_iso_string_would_lose_are_not_stored():
    zone = datetime.timezone(datetime.timedelta(hours=2), "home")
    for kept in ({"tzinfo": zone}, {"fold": 1}):
        with pytest.raises(UnsupportedTypeError):
            list(flatten({"x": datetime.datetime(2024, 1, 1, **kept)}, "m"))


@pytest.mark.parametrize("factory", [lambda: 0, OrderedDict, Custom, collections.deque])
def test_factories_that_cannot_be_stored(factory):
    with pytest.raises(UnsupportedTypeError, match="m/d: a defaultdict"):
        list(flatten({"d": defaultdict(factory)}, "m"))


# --- depth ------------------------------------------------------------------------------------


def nested(depth, wrap):
    value = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda v: {"k": v}, lambda v: [v], lambda v: (v,)])
def test_absurd_nesting(wrap):
    with pytest.raises(UnsupportedTypeError, match="nested"):
        list(flatten(nested(5000, wrap), "m"))


def test_absurd_nesting_of_keys_and_sets():
    deep = nested(100_000, lambda v: (v,))
    for state in ({deep: 1}, {deep}):
        with pytest.raises(UnsupportedTypeError, match="nested"):
            list(flatten(state, "m"))
    del state
    while deep != 1:  # one by one: some versions free deep tuples by recursion
        (deep,) = deep


def test_cycles():
    cycle = {"a": []}
    cycle["a"].append((cycle,))
    with pytest.raises(UnsupportedTypeError, match=r"m/x/a/0/0: .*refers to itself"):
        list(flatten({"x": cycle}, "m"))
    with pytest.raises(UnsupportedTypeError, match="refers to itself"):
        fill_targets(cycle, "m")
    shared = [1]
    assert round_trip({"a": shared, "b": shared}) == {"a": [1], "b": [1]}


# --- hostile leaves ---------------------------------------------------------------------------

KINDS = ["dict", "OrderedDict", "defaultdict", "Counter", "list", "tuple", "set", "frozenset",
    "size", "deque", "namedtuple", "sparse_coo", "sparse_csr"]  # fmt: skip
VALUES = ["none", "bool", "int", "float", "complex", "str", "bytes", "bytearray", "range", "slice",
    "timedelta", "date", "datetime", "path", "device", "torch_version", "dtype", "layout",
    "bytes_io", "memory_format", "qscheme", "enum", "object", "packed_list",
    "packed_set"]  # fmt: skip


def mutate(draw, data):
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@given(st.data(), states)
def test_damaged_leaves_raise_casnap_errors_alone(data, state):
    leaves = leaves_of(state)
    path = data.draw(st.sampled_from(list(leaves)))
    leaf = leaves[path]
    if isinstance(leaf.content, bytes):
        leaves[path] = replace(leaf, content=mutate(data.draw, leaf.content))
    with contextlib.suppress(CasnapError):
        inflate("m", leaves)


@given(st.sampled_from(KINDS), st.integers(0, 1 << 40), st.binary(max_size=40), st.data())
def test_hostile_specs(kind, count, spec, data):
    count = data.draw(st.sampled_from([count, 0, 1, 2]))
    leaves = leaves_of([1, {}], "m")
    leaves["m"] = Leaf("m", ContainerEntry(Payload(len(spec)), kind, count), spec)
    with contextlib.suppress(CasnapError):
        inflate("m", leaves)


@given(st.sampled_from(VALUES), st.binary(max_size=40))
def test_hostile_values(kind, data):
    with contextlib.suppress(CasnapError):
        inflate("m", {"m": Leaf("m", ValueEntry(Payload(len(data)), kind), data)})


def hostile(kind, count, spec, *children):
    from msgspec.msgpack import encode

    data = encode(spec) if spec is not None else b""
    leaves = {"m": Leaf("m", ContainerEntry(Payload(len(data)), kind, count), data)}
    for component, child in children:
        leaves.update(leaves_of(child, f"m/{component}"))
    return leaves


@pytest.mark.parametrize(
    "leaves",
    [
        hostile("dict", 2, [["a", "a"]], ("a", 1)),
        hostile("dict", 1, [[["tuple", b"\xc1"]]]),
        hostile("dict", 2, [["a", ["str", b"a"]]], ("a", 1)),
        hostile("dict", 1, [[["str", b"\xff"]]], ("a", 1)),
        hostile("dict", 1, [["a", "b"]], ("a", 1), ("b", 1)),
        hostile("set", 1, None, ("0", [])),
        hostile("set", 2, None, ("0", 1), ("1", 1)),
        hostile("size", 1, None, ("0", "x")),
        hostile("list", 1 << 60, None, ("0", 1)),
        hostile("deque", 1, [0], ("0", 1)),
        hostile("deque", 1, [1 << 62], ("0", 1), ("1", 1)) | {"m/0": None},
        hostile("namedtuple", 1, ["os", "system", ["a b"]], ("a b", 1)),
        hostile("namedtuple", 1, ["os", "x y", ["a"]], ("a", 1)),
        hostile("namedtuple", 2, ["os", "X", ["a", "a"]], ("a", 1)),
        hostile("sparse_coo", 2, [[2, 2], False, False, False], ("indices", 1), ("values", 1)),
        hostile("sparse_coo", 3, [[2, 2], False, False, False]),
    ],
)
def test_specs_that_lie(leaves):
    leaves = {path: leaf for path, leaf in leaves.items() if leaf is not None}
    with pytest.raises(DamagedError):
        inflate("m", leaves)


@pytest.mark.parametrize(
    "leaves",
    [
        hostile("dict", 1, [[["uuid", b""]]]),
        hostile("dict", 1, [[["tuple", msgspec.msgpack.encode([["uuid", b""]])]]]),
        hostile("defaultdict", 0, [[], "eval"]),
    ],
    ids=["key", "key in a tuple", "factory"],
)
def test_specs_of_the_future(leaves):
    with pytest.raises(UnsupportedFormatError, match="update casnap"):
        inflate("m", leaves)


def test_a_namedtuple_runs_no_code_of_a_named_class():
    class Trap(Pair):
        def __new__(cls, *args):
            raise AssertionError("ran")

    Trap.__qualname__ = "Trap"
    sys.modules[__name__].Trap = Trap
    leaves = hostile("namedtuple", 2, [__name__, "Trap", ["first", "second"]], *zip(
        ("first", "second"), (1, 2), strict=True))  # fmt: skip
    assert tuple(inflate("m", leaves)) == (1, 2)
    del sys.modules[__name__].Trap


def test_missing_and_unknown_leaves():
    leaves = leaves_of({"a": {"b": 1}})
    del leaves["m/a/b"]
    with pytest.raises(DamagedError, match="m/a/b is missing") as e:
        inflate("m", leaves)
    assert e.value.paths == ("m/a/b",)
    for entry in (ContainerEntry(Payload(0), "bag", 0), ValueEntry(Payload(0), "qubit")):
        with pytest.raises(UnsupportedFormatError, match="update"):
            inflate("m", {"m": Leaf("m", entry, b"")})
    with pytest.raises(DamagedError):
        inflate("m", {"m": Leaf("m", ValueEntry(Payload(0), "int"), torch.ones(1))})
