"""Entries of tensors and numpy values that are false, or not for this torch or numpy."""

from __future__ import annotations

import pytest
import torch

from casnap.errors import DamagedError, UnsupportedFormatError, UnsupportedTypeError
from casnap.format.entries import Payload, Quantization, TensorEntry
from casnap.state.tensors import TENSOR_DTYPES, Leaf, allocate, assemble
from tests.support.warm import run_python

BAD = [
    TensorEntry(Payload(25), "float32", (2, 3)),
    TensorEntry(Payload(24), "float32", (-2, -3)),
    TensorEntry(Payload(0), "float32", (0, 1 << 61, 1 << 61)),
    TensorEntry(Payload(1 << 72), "float32", (1 << 70,)),
    TensorEntry(Payload(4 * 99999), "<U99999", (1,), "ndarray"),
]
UNKNOWN = [
    TensorEntry(Payload(24), "float33", (2, 3)),
    TensorEntry(Payload(24), "__class__", (2, 3)),
    TensorEntry(Payload(24), "<f4", (2, 3)),
    TensorEntry(Payload(24), "O", (3,), "ndarray"),
    TensorEntry(Payload(24), "|O8", (3,), "ndarray"),
    TensorEntry(Payload(48), "<f8,<f8", (3,), "ndarray"),
    TensorEntry(Payload(24), "<f8\n", (3,), "ndarray"),
    TensorEntry(Payload(6), "<f3", (2,), "ndarray"),
    TensorEntry(Payload(48), "<f16", (3,), "ndarray"),
    TensorEntry(Payload(6), "qint8", (2, 3), quantization=Quantization("wild", b"", b"")),
]


@pytest.mark.parametrize("entry", BAD, ids=str)
def test_entries_are_checked_before_memory_is_taken(entry):
    with pytest.raises(DamagedError):
        allocate(entry)


@pytest.mark.parametrize("entry", UNKNOWN, ids=str)
def test_entries_of_the_future(entry):
    with pytest.raises(UnsupportedFormatError, match="update casnap"):
        assemble(Leaf("m/x", entry, allocate(entry)))


def quantized_entry(*args):
    return TensorEntry(Payload(6), "qint8", (2, 3), quantization=Quantization(*args))


@pytest.mark.parametrize(
    "entry",
    [
        quantized_entry("per_tensor_affine", b"", b""),
        quantized_entry("per_channel_affine", b"1" * 16, b"1" * 16, 1),
        quantized_entry("per_channel_affine", b"1" * 16, b"1" * 16, 9),
        quantized_entry("per_channel_affine", b"1" * 16, b"1" * 16, 1 << 80),
        TensorEntry(Payload(16), "int64", (2,), "parameter", requires_grad=True),
        TensorEntry(Payload(16), "<M8[x]", (2,), "ndarray"),
        TensorEntry(Payload(4), "<f4", (1,) * 90, "ndarray"),
        TensorEntry(Payload(12), "<f4", (3,), "numpy_scalar"),
        TensorEntry(Payload(4), "<U1", (1,), "numpy_scalar"),
    ],
    ids=str,
)
def test_entries_that_contradict_themselves(entry):
    def made():
        carrier = allocate(entry).fill_(-1 if entry.dtype == "qint8" else 255)
        return assemble(Leaf("m/x", entry, carrier))

    with pytest.raises(DamagedError):
        made()


def test_a_kind_of_the_future():
    with pytest.raises(UnsupportedFormatError, match="update"):
        assemble(Leaf("m/x", TensorEntry(Payload(1), "int8", (1,), "hologram"), torch.ones(1)))


def test_a_dtype_that_this_torch_lacks(monkeypatch):
    monkeypatch.delitem(TENSOR_DTYPES, "float8_e8m0fnu")
    with pytest.raises(UnsupportedTypeError, match="newer torch"):
        allocate(TensorEntry(Payload(1), "float8_e8m0fnu", (1,)))


def test_numpy_stays_optional():
    code = """
import sys
import torch
# As if it were not installed. What the process was forked from may have it, and casnap.
for name in [name for name in sys.modules if name.partition(".")[0] in ("numpy", "casnap")]:
    del sys.modules[name]
sys.modules["numpy"] = None
from casnap.errors import UnsupportedTypeError
from casnap.state.flatten import Leaf, flatten, inflate
from casnap.format.entries import Payload, TensorEntry
from casnap.state.stateful import RNGState
leaves = {l.path: l for l in flatten({"a": torch.ones(2), "b": 1}, "m")}
assert inflate("m", leaves)["b"] == 1
random = RNGState()
state = random.state_dict()
assert "numpy" not in state
random.load_state_dict(state)
random.load_state_dict({**state, "numpy": {}})
try:
    inflate("m", {"m": Leaf("m", TensorEntry(Payload(4), "<f4", (1,), "ndarray"), torch.ones(1))})
except UnsupportedTypeError as e:
    assert "install numpy" in str(e)
else:
    raise AssertionError
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
