"""Tensors and numpy values as entries and carriers."""

from __future__ import annotations

import datetime
import functools
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from casnap.errors import CasnapError, DamagedError, UnsupportedFormatError, UnsupportedTypeError
from casnap.format.entries import Payload, Quantization, TensorEntry
from casnap.state.tensors import (
    TENSOR_DTYPES,
    Leaf,
    allocate,
    assemble,
    describe,
    is_fillable,
    itemsize_of,
)

QUANTIZED = ("quint8", "qint8", "qint32")
ORDINARY = sorted(set(TENSOR_DTYPES) - set(QUANTIZED))

per_channel = torch.quantize_per_channel
FLOATS = torch.linspace(-3, 3, 24).reshape(2, 3, 4)


def raw(t):
    """Return the row-major bytes of a strided tensor."""
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    return t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def random_of(dtype, shape=(2, 3, 4)):
    n = torch.Size(shape).numel() * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (n,), dtype=torch.uint8).view(dtype).reshape(shape)


def carried(leaf):
    """Return a leaf with its content passed through bytes into a fresh carrier, as in a store."""
    fresh = allocate(leaf.entry)
    assert (fresh.shape, fresh.dtype) == (leaf.content.shape, leaf.content.dtype)
    assert fresh.nbytes == leaf.entry.data.nbytes == leaf.content.nbytes
    fresh.copy_(leaf.content)
    return leaf._replace(content=fresh)


def round_trip(value):
    return assemble(carried(describe("m/x", value)))


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4), (3, 0, 2)], ids=str)
def test_every_dtype_and_shape(name, shape):
    value = random_of(TENSOR_DTYPES[name], shape)
    leaf = describe("m/x", value)
    assert leaf == Leaf("m/x", TensorEntry(name, shape, Payload(value.nbytes)), value)
    assert leaf.content is value
    assert assemble(leaf) is value
    assert itemsize_of(leaf.entry) == value.itemsize
    again = round_trip(value)
    assert (type(again), again.dtype, again.shape) == (torch.Tensor, value.dtype, value.shape)
    assert raw(again) == raw(value)


def views():
    base = torch.randn(6, 8)
    complex_ = torch.randn(3, 4, dtype=torch.complex64)
    return {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.randn(3, 1).expand(3, 5),
        "offset": base[2:4],
        "overlapping": base.as_strided((4, 4), (1, 1)),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": complex_.conj(),
        "neg": complex_.conj().imag,
        "conj_transposed": complex_.mH,
        "zeros_of_autograd": torch._efficientzerotensor((3, 2)),
        "inference": _inference(),
    }


def _inference():
    with torch.inference_mode():
        return torch.randn(3)


@pytest.mark.parametrize("name", views())
def test_views(name):
    value = views()[name]
    leaf = describe("m/x", value)
    assert not leaf.content.is_conj()
    assert not leaf.content.is_neg()
    assert raw(leaf.content) == raw(value.clone())
    assert raw(round_trip(value)) == raw(value.clone())
    if name in ("transposed", "strided", "expanded", "offset", "overlapping"):
        assert leaf.content is value


def test_parameters_and_buffers():
    for requires_grad in (True, False):
        value = torch.nn.Parameter(torch.randn(3), requires_grad)
        leaf = describe("m/x", value)
        assert (leaf.entry.kind, leaf.entry.requires_grad) == ("parameter", requires_grad)
        assert type(leaf.content) is torch.Tensor
        assert leaf.content.data_ptr() == value.data_ptr()
        again = round_trip(value)
        assert (type(again), again.requires_grad) == (torch.nn.Parameter, requires_grad)
        assert raw(again) == raw(value)
        assert assemble(leaf._replace(content=value)) is value
    buffer = torch.nn.Buffer(torch.randn(3))
    assert describe("m/x", buffer).entry.kind == "buffer"
    assert isinstance(round_trip(buffer), torch.nn.Buffer)
    assert assemble(describe("m/x", buffer)) is buffer


def test_tensors_that_require_grad():
    value = torch.randn(3, requires_grad=True)
    leaf = describe("m/x", value)
    assert not leaf.content.requires_grad
    assert round_trip(value).requires_grad
    assert raw(round_trip(value * 2)) == raw(value * 2)
    integers = torch.arange(3)
    assert assemble(leaf._replace(content=integers)) is integers


def quietly(make):
    """Ignore what torch warns of while it makes the values of a test."""

    @functools.wraps(make)
    def made():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return made


@quietly
def quantized():
    scales, points = torch.rand(3).double() + 0.1, torch.arange(3)
    return {
        "per_tensor": torch.quantize_per_tensor(FLOATS, 0.1, 7, torch.quint8),
        "per_tensor_32": torch.quantize_per_tensor(FLOATS, 0.001, -9, torch.qint32),
        "scalar": torch.quantize_per_tensor(torch.tensor(1.0), 0.1, 0, torch.qint8),
        "empty": torch.quantize_per_tensor(torch.empty(0, 3), 0.1, 3, torch.quint8),
        "per_channel": per_channel(FLOATS, scales, points, 1, torch.qint8),
        "per_tensor_strided": torch.quantize_per_tensor(FLOATS, 0.1, 7, torch.quint8).transpose(
            0, 2
        ),
        "float_qparams": per_channel(FLOATS, torch.rand(3), torch.rand(3), 1, torch.quint8),
        "parameter": torch.nn.Parameter(
            torch.quantize_per_tensor(FLOATS, 0.1, 0, torch.qint8), requires_grad=False
        ),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", quantized())
def test_quantized(name):
    value = quantized()[name]
    again = round_trip(value)
    assert (type(again), again.dtype, again.shape) == (type(value), value.dtype, value.shape)
    assert again.qscheme() == value.qscheme()
    assert torch.equal(again.int_repr(), value.int_repr())
    if value.qscheme() == torch.per_tensor_affine:
        assert (again.q_scale(), again.q_zero_point()) == (value.q_scale(), value.q_zero_point())
    else:
        assert again.q_per_channel_axis() == value.q_per_channel_axis()
        for part in ("q_per_channel_scales", "q_per_channel_zero_points"):
            assert torch.equal(getattr(again, part)(), getattr(value, part)())


def arrays():
    simple = [np.arange(6).reshape(2, 3).astype(d) for d in "?bBhHiIlLefdgFDG"]
    frozen = np.arange(4)
    frozen.flags.writeable = False
    return [
        *simple,
        np.array(3.5),
        np.zeros((0, 3)),
        np.array("2024-02-29", "M8[D]"),
        np.array(["NaT", "2024-02-29"], "M8[25us]"),
        np.array([1, 2], "m8[ns]"),
        np.arange(4, dtype=">i4"),
        np.array(["a", "ü€"]),
        np.array([b"ab", b"c"]),
        np.array([b"abcd"], "V4"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::-2],
        np.broadcast_to(np.arange(3), (2, 3)),
        frozen,
    ]


@pytest.mark.parametrize("value", arrays(), ids=lambda v: f"{v.dtype.str}{v.shape}")
def test_numpy_arrays(value):
    again = round_trip(value)
    assert (type(again), again.dtype.str, again.shape) == (np.ndarray, value.dtype.str, value.shape)
    assert again.tobytes() == value.tobytes()
    assert again.flags.writeable
    assert itemsize_of(describe("m/x", value).entry) == value.itemsize


def test_numpy_arrays_are_not_copied():
    value = np.arange(5.0)
    value_bytes = describe("m/x", value).content
    value[0] = 7
    assert raw(value_bytes) == value.tobytes()


SCALARS = [
    np.float32(1.5),
    np.float64("nan"),
    np.longdouble(1) / 3,
    np.complex64(1 + 2j),
    np.bool_(True),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.datetime64("2024-02-29"),
    np.datetime64("NaT"),
    np.timedelta64(3, "ns"),
    np.str_("ü€\0"),
    np.str_(""),
    np.str_("\ud800"),
    np.bytes_(b"a\0"),
    np.bytes_(b""),
    np.void(b"abcd"),
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda v: f"{type(v).__name__}-{v.nbytes}")
def test_numpy_scalars(value):
    again = round_trip(value)
    assert (type(again), again.dtype) == (type(value), value.dtype)
    assert again.tobytes() == value.tobytes()
    if isinstance(value, (str, bytes)):
        assert again == value
    assert describe("m/x", value).entry.kind == "numpy_scalar"


@quietly
def hollow():
    freed = torch.randn(8)[2:6]
    freed.untyped_storage().resize_(0)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(2))
    return {
        "int4": (torch.empty(4, dtype=torch.int4), "whole bytes"),
        "uint7": (torch.empty(4, dtype=torch.uint7), "whole bytes"),
        "bits8": (torch.empty(4, dtype=torch.bits8), "whole bytes"),
        "quint4x2": (torch.empty(4, dtype=torch.quint4x2), "whole bytes"),
        "meta": (torch.empty(4, device="meta"), "to_empty"),
        "meta_empty": (torch.empty(0, device="meta"), "meta"),
        "freed": (freed, "freed"),
        "fake": (fake, "FakeTensor"),
        "uninitialized": (torch.nn.UninitializedParameter(), "run the module once"),
        "nested": (torch.nested.nested_tensor([torch.ones(2)]), "unbind"),
        "jagged": (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "unbind"),
        "mkldnn": (torch.ones(2, 2).to_mkldnn(), "to_dense"),
        "subclass": (torch.ones(2).as_subclass(Subclass), "subclass"),
        "nothing": (object(), "neither"),
    }


class Subclass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", hollow())
def test_refusals(name):
    value, hint = hollow()[name]
    with pytest.raises(UnsupportedTypeError, match=hint) as e:
        describe("m/x", value)
    assert str(e.value).startswith("m/x: ")
    if isinstance(value, torch.Tensor):
        assert not is_fillable(value)


@pytest.mark.parametrize(
    "value",
    [
        np.array([datetime, None]),
        np.array([(1, 2.0)], dtype="i4,f8"),
        np.array([(1, 2.0)], dtype="i4,f8")[0],
        np.array(["x" * 20_000]),
        # numpy 2 has it.
        *([np.array(["a"], dtype=np.dtypes.StringDType())] if np.__version__ >= "2" else []),
        np.ma.masked_array([1, 2], [True, False]),
        np.empty(2, np.dtype("V0")),
    ],
    ids=lambda v: type(v).__name__ + str(v.dtype)[:20],
)
def test_numpy_refusals(value):
    with pytest.raises(UnsupportedTypeError, match="m/x: "):
        describe("m/x", value)


def test_fillable():
    assert is_fillable(torch.ones(3, 4).t())
    assert is_fillable(torch.nn.Parameter(torch.ones(3)))
    assert is_fillable(torch.empty(0, 3))
    assert is_fillable(torch.ones(1).expand(1))
    for value in (views()["conj"], views()["neg"], views()["expanded"], quantized()["scalar"]):
        assert not is_fillable(value)


GOOD = TensorEntry("float32", (2, 3), Payload(24))
BAD = [
    TensorEntry("float32", (2, 3), Payload(25)),
    TensorEntry("float32", (-2, -3), Payload(24)),
    TensorEntry("float32", (0, 1 << 61, 1 << 61), Payload(0)),
    TensorEntry("float32", (1 << 70,), Payload(1 << 72)),
    TensorEntry("float33", (2, 3), Payload(24)),
    TensorEntry("__class__", (2, 3), Payload(24)),
    TensorEntry("O", (3,), Payload(24), "ndarray"),
    TensorEntry("|O8", (3,), Payload(24), "ndarray"),
    TensorEntry("<f8,<f8", (3,), Payload(48), "ndarray"),
    TensorEntry("<U99999", (1,), Payload(4 * 99999), "ndarray"),
    TensorEntry("<f8\n", (3,), Payload(24), "ndarray"),
]


@pytest.mark.parametrize("entry", BAD, ids=str)
def test_entries_are_checked_before_memory_is_taken(entry):
    with pytest.raises(DamagedError):
        allocate(entry)


def quantized_entry(*args):
    return TensorEntry("qint8", (2, 3), Payload(6), quantization=Quantization(*args))


@pytest.mark.parametrize(
    "entry",
    [
        quantized_entry("per_tensor_affine", b"", b""),
        quantized_entry("per_channel_affine", b"1" * 16, b"1" * 16, 1),
        quantized_entry("per_channel_affine", b"1" * 16, b"1" * 16, 9),
        quantized_entry("per_channel_affine", b"1" * 16, b"1" * 16, 1 << 80),
        quantized_entry("wild", b"", b""),
        TensorEntry("int64", (2,), Payload(16), "parameter", requires_grad=True),
        TensorEntry("<f3", (2,), Payload(6), "ndarray"),
        TensorEntry("<M8[x]", (2,), Payload(16), "ndarray"),
        TensorEntry("<f4", (1,) * 90, Payload(4), "ndarray"),
        TensorEntry("<f4", (3,), Payload(12), "numpy_scalar"),
        TensorEntry("<U1", (1,), Payload(4), "numpy_scalar"),
    ],
    ids=str,
)
def test_entries_that_contradict_themselves(entry):
    carrier = allocate(entry).fill_(-1 if entry.dtype == "qint8" else 255)
    with pytest.raises(DamagedError):
        assemble(Leaf("m/x", entry, carrier))


def test_a_kind_of_the_future():
    with pytest.raises(UnsupportedFormatError, match="update"):
        assemble(Leaf("m/x", TensorEntry("int8", (1,), Payload(1), "hologram"), torch.ones(1)))


def test_a_dtype_that_this_torch_lacks(monkeypatch):
    monkeypatch.delitem(TENSOR_DTYPES, "float8_e8m0fnu")
    with pytest.raises(UnsupportedTypeError, match="newer torch"):
        allocate(TensorEntry("float8_e8m0fnu", (1,), Payload(1)))


def test_errors_are_of_casnap():
    assert issubclass(UnsupportedTypeError, CasnapError)


def test_numpy_stays_optional():
    code = """
import sys
sys.modules["numpy"] = None  # as if it were not installed
import torch
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
    inflate("m", {"m": Leaf("m", TensorEntry("<f4", (1,), Payload(4), "ndarray"), torch.ones(1))})
except UnsupportedTypeError as e:
    assert "install numpy" in str(e)
else:
    raise AssertionError
"""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, cwd=Path(__file__).parents[2]
    )
