"""States as leaves, and back."""

from __future__ import annotations

import random
import struct
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import example, given
from hypothesis import strategies as st

from casnap.errors import DamagedError, UnsupportedTypeError
from casnap.format.entries import (
    Payload,
    ValueEntry,
)
from casnap.format.names import component_of, key_of
from casnap.state.flatten import Leaf, flatten, inflate
from tests.support.bitwise import assert_same
from tests.support.leaves import leaves_of, round_trip
from tests.support.states import Color, Level, Mode, Pair, Plain, keys, states

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize", "ignore:Sparse invariant checks", "ignore:Sparse CSR"
)


# --- round trips ------------------------------------------------------------------------------


@given(states)
@example({True: 1, "True": 2, 1.5: 3, "1.5": 4})
@example({float("nan"): 1, "nan": 3, "%k6e616e00000000": 4})
@example({"\ud800": 1, "%uD800": 2, "": 3, "é": 4, "x" * 5000: 5})
def test_any_state_comes_back(state):
    again = round_trip(state)
    assert_same(again, state)
    if isinstance(state, defaultdict):
        assert again.default_factory is state.default_factory
    if isinstance(state, deque):
        assert again.maxlen == state.maxlen
    if isinstance(state, (Pair, Plain)):
        assert type(again) is type(state)


@given(st.dictionaries(keys, st.integers(), max_size=8))
def test_paths_depend_on_the_keys_alone(state):
    assert list(leaves_of(state)) == list(leaves_of(dict.fromkeys(state, "x")))
    assert all(path.count("/") == 1 for path in leaves_of(state) if path != "m")


def test_paths():
    state = {"a/b": {"%": [1, (2,)]}, "é": {3: Pair(1)}, "": None, "\udc80": 1}
    assert list(leaves_of(state)) == [
        "m",
        "m/a%2Fb",
        "m/a%2Fb/%25",
        "m/a%2Fb/%25/0",
        "m/a%2Fb/%25/1",
        "m/a%2Fb/%25/1/0",
        "m/é",
        "m/é/3",
        "m/é/3/first",
        "m/é/3/second",
        "m/",
        "m/%udc80",
    ]
    assert component_of("a/%") == "a%2F%25"


def hashed(kind: str, data: bytes) -> str:
    """Return the component of a key that is neither str nor int, by the format's own words."""
    return f"%k{blake3(msgspec.msgpack.encode([kind, data])).hexdigest()[:16]}"


KEYS = {
    ("\U0001fae0",): ("tuple", b"\x91\xa4\xf0\x9f\xab\xa0"),
    1e-07: ("float", struct.pack("<d", 1e-07)),
    -0.0: ("float", struct.pack("<d", -0.0)),
    1j: ("complex", struct.pack("<dd", 0, 1)),
    b"by": ("bytes", b"by"),
    torch.float32: ("dtype", b"float32"),
    None: ("none", b""),
    True: ("bool", b"\1"),
    1 << 64: ("int", bytes(8) + b"\1"),
    ((1,), None, 2.0): (
        "tuple",
        msgspec.msgpack.encode(
            [["tuple", b"\x91\1"], ["none", b""], ["float", struct.pack("<d", 2)]]
        ),
    ),
    float("nan"): ("float", struct.pack("<d", float("nan"))),
}


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_the_components_of_keys_that_are_no_str(key):
    """They are made of the stored bytes: versions of Python differ in how they print a key."""
    component = hashed(*KEYS[key])
    for others in ({}, {"a": 0}, {"%k0": 0, 5: 0}):
        for state in ({**others, key: 1}, {key: 1, **others}):
            assert f"m/{component}" in leaves_of(state)
    again = round_trip({key: 1})
    assert [(type(k), repr(k)) for k in again] == [(type(key), repr(key))]


def test_an_int_whose_text_is_there_as_a_str():
    of_one = "%k" + blake3(msgspec.msgpack.encode(1)).hexdigest()[:16]
    for state in ({1: "a", "1": "b", 2: "c"}, {2: "c", "1": "b", 1: "a"}):
        assert set(leaves_of(state)) == {"m", f"m/{of_one}", "m/1", "m/2"}
        assert round_trip(state) == state
    assert list(leaves_of({1: "a", -(1 << 63): "b"})) == ["m", "m/1", f"m/{-(1 << 63)}"]


def test_keys_that_are_stored_alike_are_refused():
    with pytest.raises(UnsupportedTypeError, match="m/deep: the keys nan and nan are stored alike"):
        leaves_of({"deep": {float("nan"): 1, "nan": 2, float("nan"): 3}})


@pytest.mark.parametrize(
    "component",
    ["a", "%", "/", "%25", "%2F", "%k0123456789abcdef", "\ud800", "%ud800", "%uD800", "1", ""],
)
def test_a_str_has_its_component_alone(component):
    assert key_of(component_of(component)) == component
    assert not component_of(component).startswith("%k")


@pytest.mark.parametrize(
    "key", [Color.RED, frozenset(), np.int64(1), object(), Level.LOW, (Color,)]
)
def test_keys_that_cannot_be_stored(key):
    with pytest.raises(UnsupportedTypeError, match=r"m/deep: (the|a) key"):
        list(flatten({"deep": {key: 1}}, "m"))


def test_module_metadata_is_kept():
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    again = round_trip(state)
    assert again._metadata == state._metadata
    assert type(again._metadata) is OrderedDict


def test_what_of_the_metadata_cannot_be_stored_is_left_out_alone_and_said_once(caplog):
    def state():
        again = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
        again._metadata[""] |= {"nested": {"version": 1}, "large": 1 << 64, 3: 4, "text": "\ud800"}
        again._metadata |= {"number": 5, ("a",): {}}
        again.step = 3
        return again

    for _ in range(2):
        again = round_trip(state())
        assert again._metadata == {"": {"version": 1}, "0": {"version": 2}}
        assert not hasattr(again, "step")
    (text,) = [record.getMessage() for record in caplog.records]
    for name in ("'nested' of", "'large' of", "3 of", "the submodule 'number'", "attribute step"):
        assert name in text or "and 2 more" in text
    assert "the rest, such as the versions of modules, is kept" in text
    state = torch.nn.Linear(1, 1).state_dict()
    state._metadata = [1]
    assert not hasattr(round_trip(state), "_metadata")
    assert "the attribute _metadata cannot be stored" in caplog.text


def test_sets_have_one_order():
    mixed = [1, "a", b"b", 2.5, None, (1, "x"), frozenset({3, "y"}), Color.RED, Mode.A | Mode.B]
    contents = []
    for _ in range(5):
        random.shuffle(mixed)
        contents.append([leaf.content for leaf in leaves_of(set(mixed)).values()])
    assert all(content == contents[0] for content in contents)
    deep = frozenset()
    for _ in range(60):
        deep = frozenset({deep, 1})
    assert round_trip({deep}) == {deep}


def test_a_namedtuple_whose_class_has_changed(monkeypatch):
    leaves = leaves_of(Pair(1, 2))
    monkeypatch.setattr(sys.modules[__name__], "Pair", namedtuple("Pair", ["first", "third"]))
    assert inflate("m", leaves)._fields == ("first", "second")


# --- long plain lists -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset])
def test_long_plain_sequences_are_one_entry(kind):
    values = kind([*range(1000), -0.5, "x", b"y", None, 2**64 - 1])
    leaves = leaves_of({"long": values})
    assert leaves["m/long"].entry.kind == f"packed_{kind.__name__}"
    assert list(leaves) == ["m", "m/long"]
    assert_same(inflate("m", leaves)["long"], values)


@pytest.mark.parametrize("odd", [2**64, "\ud800", [], 1j, np.int64(1), Level.LOW])
def test_what_is_not_plain_is_not_packed(odd):
    values = [0] * 1001 + [odd]
    leaves = leaves_of({"long": values})
    assert leaves["m/long"].entry.kind == "list"
    assert_same(inflate("m", leaves)["long"], values)
    assert leaves_of([0] * 1000)["m"].entry.kind == "list"


def test_packed_elements_are_plain():
    for data in (b"\x91\x90", b"\x91\x80", b"\x80", b"\xc0", b"\x91\xd6\xff\0\0\0\0"):
        with pytest.raises(DamagedError):
            inflate("m", {"m": Leaf("m", ValueEntry(Payload(len(data)), "packed_list"), data)})


# --- tensors ----------------------------------------------------------------------------------


def test_sparse_parts_are_checked():
    dense = torch.tensor([[0, 1.5, 0, 0], [2, 0, 0, -3]])
    leaves = leaves_of(dense.to_sparse_coo())
    leaves["m/indices"].content[0, 0] = 99
    with pytest.raises(DamagedError, match="m cannot be put together"):
        inflate("m", leaves)
    leaves["m/indices"] = leaves_of("x", "m/indices")["m/indices"]
    with pytest.raises(DamagedError):
        inflate("m", leaves)
    leaves = leaves_of(dense.to_sparse_csr())
    leaves["m/crow_indices"].content[1] = 77
    with pytest.raises(DamagedError):
        inflate("m", leaves)
