"""Whatever a state may hold, taken and restored through the public face."""

from __future__ import annotations

import datetime
import io
import itertools
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from casnap import NewStore, StateDict, Store
from casnap.errors import UnsupportedTypeError
from casnap.state.tensors import TENSOR_DTYPES
from tests.support.bitwise import assert_same, noise, raw
from tests.support.examples import FEW
from tests.support.states import Color, Mode, Pair, keys, states

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize", "ignore:Sparse invariant checks", "ignore:ComplexHalf"
)

names = map("take-{}".format, itertools.count())


def round_trip(store, **state):
    """Take a state, and restore it into an empty one."""
    snapshot = store.take({"s": StateDict(state)}, next(names))
    fresh = StateDict()
    assert not snapshot.restore({"s": fresh})
    return dict(fresh)


def check(store, **state):
    again = round_trip(store, **state)
    assert_same(again, state)
    return again


# --- tensors ----------------------------------------------------------------------------------

PLAIN = {name: dtype for name, dtype in TENSOR_DTYPES.items() if not name.startswith("q")}
SHAPES = [(), (0,), (1,), (3, 0, 2), (2, 3, 4), (3, 0x5001), (7, 5, 3, 0x301)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype(store, shape):
    assert len(PLAIN) >= 18
    check(store, **{name: noise(dtype, shape) for name, dtype in PLAIN.items()})


def test_every_dtype_in_place(store):
    """Every dtype is filled in place too, and through every kind of stride."""
    for arrange in (lambda t: t, lambda t: t.transpose(0, 2), lambda t: t[::2, :, 1:]):
        here = {n: arrange(noise(d, (9, 7, 0x902))) for n, d in PLAIN.items()}
        taken = {n: noise(t.dtype, t.shape) for n, t in here.items()}
        snapshot = store.take({"s": StateDict(taken)}, next(names))
        live = StateDict(here)
        where = {n: (t.data_ptr(), t.stride()) for n, t in here.items()}
        snapshot.restore({"s": live})
        for name, tensor in live.items():
            assert raw(tensor) == raw(taken[name]), name
            assert (tensor.data_ptr(), tensor.stride()) == where[name]


def views():
    base = torch.randn(96, 1024)
    numbers = torch.randn(40, 600, dtype=torch.complex64)
    blocks = torch.randn(6, 5, 40, 30)
    return {
        "transposed": base.t(),
        "permuted": blocks.permute(3, 1, 0, 2),
        "strided": base[::2, 1::3],
        "reversed_copy": base.flip(0),
        "column": base[:, 7],
        "offset": base[2:70, 3:],
        "expanded": torch.randn(3, 1).expand(3, 40_000),
        "expanded_scalar": torch.tensor(2.5).expand(200, 300),
        "overlapping": base.as_strided((400, 400), (1, 1)),
        "channels_last": blocks.to(memory_format=torch.channels_last),
        "diagonal": base.diagonal(),
        "conj": numbers.conj(),
        "neg": numbers.conj().imag,
        "conj_transposed": numbers.mH,
        "real": numbers.real,
        "as_bytes": base.view(torch.uint8),
        "small_transposed": base[:3, :2].t(),
        "small_conj": numbers[0, :3].conj(),
        "unfolded": base.unfold(1, 16, 3),
        "autograd_zeros": torch._efficientzerotensor((300, 200)),
        "of_a_graph": (torch.randn(200, 200, requires_grad=True) * 2).t(),
    }


def test_views(store):
    values = views()
    again = round_trip(store, **values)
    for name, value in values.items():
        assert raw(again[name]) == raw(value.clone()), name
        assert (again[name].dtype, again[name].shape) == (value.dtype, value.shape), name
        assert not again[name].is_conj()
        assert not again[name].is_neg()


def test_inference_tensors(store):
    with torch.inference_mode():
        state = {"big": torch.randn(300, 300), "small": torch.randn(3)}
        store.take({"s": StateDict(state)}, "step")
    fresh = StateDict()
    store["step"].restore({"s": fresh})
    assert raw(fresh["big"]) == raw(state["big"])
    assert raw(fresh["small"]) == raw(state["small"])


def test_parameters_buffers_and_gradients(store):
    again = check(
        store,
        parameter=torch.nn.Parameter(torch.randn(200, 100)),
        frozen=torch.nn.Parameter(torch.randn(3), requires_grad=False),
        leaf=torch.randn(200, 100, requires_grad=True),
        integers=torch.nn.Parameter(torch.arange(5), requires_grad=False),
    )
    assert again["leaf"].is_leaf
    buffer = torch.nn.Buffer(torch.randn(5))
    assert isinstance(round_trip(store, buffer=buffer)["buffer"], torch.nn.Buffer)


def sparse():
    dense = torch.zeros(50, 60)
    dense[::7, ::5] = torch.randn(8, 12)
    wide = torch.randn(300, 400) * (torch.rand(300, 400) > 0.5)
    return {
        "coo": dense.to_sparse(),
        "coo_uncoalesced": torch.sparse_coo_tensor([[1, 1, 0]], [1.0, 2.0, 3.0], (4,)),
        "coo_hybrid": torch.sparse_coo_tensor([[0, 2]], torch.randn(2, 3), (4, 3)),
        "coo_empty": torch.sparse_coo_tensor(size=(3, 4)),
        "coo_scalar": torch.tensor(3.0).to_sparse(),
        "coo_wide": wide.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csr_wide": wide.to_sparse_csr(),
        "csr_empty": torch.zeros(3, 4).to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((10, 10)),
        "bsc": dense.to_sparse_bsc((10, 10)),
        "csr_batch": torch.stack([dense, dense]).to_sparse_csr(),
        "csr_bf16": dense.bfloat16().to_sparse_csr(),
        "gradient": dense.to_sparse().requires_grad_(),
        "parameter": torch.nn.Parameter(dense.to_sparse()),
    }


def test_sparse(store):
    check(store, **sparse())


def quantized():
    floats = torch.linspace(-3, 3, 60_000).reshape(3, 200, 100)
    scales, points = torch.rand(3).double() + 0.1, torch.arange(3)
    return {
        "per_tensor": torch.quantize_per_tensor(floats, 0.1, 7, torch.quint8),
        "per_tensor_signed": torch.quantize_per_tensor(floats, 0.1, -7, torch.qint8),
        "per_tensor_wide": torch.quantize_per_tensor(floats, 0.001, -9, torch.qint32),
        "small": torch.quantize_per_tensor(torch.tensor(1.0), 0.1, 0, torch.qint8),
        "empty": torch.quantize_per_tensor(torch.empty(0, 3), 0.1, 3, torch.quint8),
        "strided": torch.quantize_per_tensor(floats, 0.1, 7, torch.quint8).transpose(0, 2),
        "per_channel": torch.quantize_per_channel(floats, scales, points, 0, torch.qint8),
        "float_qparams": torch.quantize_per_channel(
            floats, torch.rand(3), torch.rand(3), 0, torch.quint8
        ),
        "parameter": torch.nn.Parameter(
            torch.quantize_per_tensor(floats, 0.1, 0, torch.qint8), requires_grad=False
        ),
    }


def test_quantized(store):
    check(store, **quantized())


class Subclass(torch.Tensor):
    pass


def freed():
    tensor = torch.randn(8)[2:6]
    tensor.untyped_storage().resize_(0)
    return tensor


def fake():
    with torch._subclasses.FakeTensorMode() as mode:
        return mode.from_tensor(torch.randn(2))


def nested(**options):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **options)


REFUSED = {
    "subclass": (lambda: torch.ones(3).as_subclass(Subclass), "subclass"),
    "parameter_of_a_subclass": (
        lambda: torch.nn.Parameter(torch.ones(3).as_subclass(Subclass)),
        "subclass",
    ),
    "int4": (lambda: torch.empty(4, dtype=torch.int4), "whole bytes"),
    "uint7": (lambda: torch.empty(4, dtype=torch.uint7), "whole bytes"),
    "bits8": (lambda: torch.empty(4, dtype=torch.bits8), "whole bytes"),
    "quint4x2": (lambda: torch.empty(4, dtype=torch.quint4x2), "whole bytes"),
    "meta": (lambda: torch.empty(3, device="meta"), "to_empty"),
    "meta_empty": (lambda: torch.empty(0, device="meta"), "meta"),
    "freed": (freed, "freed"),
    "fake": (fake, "FakeTensor"),
    "nested": (nested, "unbind"),
    "jagged": (lambda: nested(layout=torch.jagged), "unbind"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), "to_dense"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "run the module once"),
    "object": (object, ""),
    "function": (lambda: round_trip, ""),
    "local_function": (lambda: lambda: None, ""),
    "module": (lambda: torch.nn.Linear(2, 2), ""),
    "objects_of_numpy": (lambda: np.array([object()]), ""),
    "objects_and_none_of_numpy": (lambda: np.array([datetime, None]), ""),
    "fields_of_numpy": (lambda: np.array([(1, 2.0)], dtype="i4,f8"), ""),
    "record_of_numpy": (lambda: np.array([(1, 2.0)], dtype="i4,f8")[0], ""),
    "long_text_of_numpy": (lambda: np.array(["x" * 20_000]), ""),
    "masked_array": (lambda: np.ma.masked_array([1, 2], [True, False]), ""),
    "void_of_numpy": (lambda: np.empty(2, np.dtype("V0")), ""),
    "factory": (lambda: defaultdict(lambda: 0), ""),
    "key": (lambda: {object(): 1}, ""),
    "user_dict": (lambda: StateDict(x=1), ""),
}
if np.__version__ >= "2":
    REFUSED["strings_of_numpy"] = (lambda: np.array(["a"], dtype=np.dtypes.StringDType()), "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_path_and_leave_nothing(store, name):
    make, hint = REFUSED[name]
    state = {"big": torch.randn(1000), "deep": [{"x": make()}]}
    for take in (store.take, store.async_take):
        with pytest.raises(UnsupportedTypeError, match=f"s/deep/0/x.*{hint}"):
            take({"s": StateDict(state)}, "step")
    assert store.snapshots() == []
    assert "step" not in store
    store.take({"s": StateDict(big=state["big"])}, "step")


# --- numpy, values and containers -------------------------------------------------------------


SCALARS = [
    np.float32(1.5),
    np.float64("nan"),
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


def test_numpy(store):
    big = np.arange(60_000).reshape(200, 300)
    check(
        store,
        **{d: big.astype(d) for d in "?bBhHiIlLefdFD"},
        big_endian=big.astype(">i4"),
        fortran=np.asfortranarray(big).T.copy(),
        text=np.array(["a", "ü€"] * 20_000),
        octets=np.array([b"ab", b"c"]),
        raw=np.array([b"abcd"], "V4"),
        dates=np.array(["NaT", "2024-02-29"], "M8[25us]"),
        times=np.array([1, 2], "m8[ns]"),
        empty=np.zeros((0, 3)),
        zero_dims=np.array(2.5),
        scalars=SCALARS,
    )
    views = {
        "reversed": big[::-2],
        "transposed": big.T,
        "broadcast": np.broadcast_to(big, (2, 200, 300)),
    }
    views["transposed"].flags.writeable = False
    for name, value in round_trip(store, **views).items():
        assert value.tobytes() == views[name].tobytes()
        assert value.flags.writeable


@pytest.mark.skipif(np.dtype("g") == np.dtype("d"), reason="long doubles are doubles here")
@pytest.mark.parametrize(("dtype", "advice"), [("g", "float64"), ("G", "complex128")])
def test_long_doubles_are_refused(store, dtype, advice):
    """They are 80 bits and padding on one machine, and other 128 bits on another."""
    value = np.ones(3, dtype)
    for x in (value, value[0], value.astype(value.dtype.newbyteorder())):
        with pytest.raises(UnsupportedTypeError, match=f"s/x.*convert it to {advice}"):
            store.take({"s": StateDict(x=x)}, "step")
    assert store.snapshots() == []
    check(store, x=value.astype(advice))


def test_containers(store):
    t = torch.arange
    again = check(
        store,
        dict={"a": t(3), 1: t(20_000), None: [], b"\xff": (), 2.5: {}},
        ordered=OrderedDict([("z", t(1)), ("a", {"b": t(2)})]),
        default=defaultdict(list, {"a": [t(3)]}),
        default_none=defaultdict(None, {1: 2}),
        counter=Counter("casnap"),
        list=[t(2), [[], [t(3)]], "x"],
        tuple=(t(2), (), ((1,),)),
        deque=deque([t(2), 3], maxlen=5),
        set={1, "a", None, (1, 2)},
        frozen=frozenset({1.5, b"x"}),
        named=Pair(t(3), Pair(1, 2)),
        size=torch.Size([2, 3]),
        long=list(range(5000)),
        long_tuple=tuple(map(float, range(5000))),
        long_set=set(map(str, range(5000))),
        mixed=[*range(2000), t(3)],
    )
    assert isinstance(again["named"], Pair)
    assert again["default"]["new"] == []


def test_values(store):
    written = io.BytesIO()
    torch.save([0.5, 0.25], written)
    check(
        store,
        numbers=[
            0,
            -1,
            127,
            -129,
            2**64,
            2**200,
            -(2**63),
            10**5000,
            -(10**5000),
            True,
            1.5,
            float("nan"),
            -0.0,
            float("inf"),
            1j,
            None,
        ],
        texts=["", "ü€\0", "\ud800", "x" * 200_000],
        octets=[b"", b"\0\xff", bytes(range(256)) * 1000, bytearray(b"abc")],
        files=[io.BytesIO(), io.BytesIO(b"abc"), written],
        torch=[torch.float32, torch.device("cpu"), torch.device("cuda:1"), torch.strided],
        enums=[Color.RED, Color.BLUE, Mode.A | Mode.B],
        times=[datetime.datetime(2024, 2, 29, 1, 2, 3, 4), datetime.timedelta(3, 4, 5)],
        others=[range(1, 9, 2), slice(None, 3), pathlib.Path("a/b")],
    )


@settings(max_examples=FEW)
@given(st.dictionaries(keys, states, max_size=5))
def test_any_nesting_with_any_keys(state):
    store = Store("memory://any-nesting", create=NewStore(chunk_size=64 << 10))
    snapshot = store.take({"s": StateDict(a=state)}, "step", overwrite=True)
    assert_same(snapshot.get_state_dict_for_key("s"), {"a": state})
    live = StateDict(a=state)
    snapshot.restore({"s": live})
    assert_same(live["a"], state)


def test_keys_that_look_alike(store):
    check(store, a={1: "int", "1": "str", True and "x": 3, 2.0: "float", "2.0": "text", "%": "%25"})
    check(store, a={"a/b": 1, "a": {"b": 2}, "a%2Fb": 3, "": {"": {"": torch.ones(3)}}, "/": 4})
    check(store, a={True: 1, False: 2, None: 3, "None": 4, "True": 5, (1, "a"): 6, "(1, 'a')": 7})


def test_hundreds_of_levels(store):
    value = torch.randn(500)
    for i in range(300):
        value = ({"k": value}, [value], (value,), OrderedDict(x=value), deque([value]))[i % 5]
    check(store, deep=value)


def test_very_long_and_many_keys(store):
    long = "k" * 100_000
    check(store, **{long: torch.ones(3), "ü" * 5000: {"/" * 3000: {long: [1]}}})
    check(store, many={f"key {i}": i for i in range(3000)}, ints=dict.fromkeys(range(-2000, 2000)))


@pytest.mark.parametrize(
    "key", ["", "/", "%", "a/b", "%2F", "0", "ü€", "k" * 5000, "a.b", "..", " "]
)
def test_any_key_of_the_app_state(store, key):
    state = {key: StateDict(x=torch.arange(100)), "other": StateDict(x=torch.zeros(3))}
    snapshot = store.take(state, next(names))
    fresh = {key: StateDict()}
    snapshot.restore(fresh)
    assert_same(fresh[key]["x"], torch.arange(100))
    assert_same(snapshot.get_state_dict_for_key(key), {"x": torch.arange(100)})
    for path in snapshot.get_manifest():
        snapshot.read_object(path)


def test_every_path_of_the_manifest_can_be_read(store):
    state = {"a/b": {"%": [torch.arange(30), {"": 1, 2: (3, torch.ones(2))}]}, "": {1: 2, "1": 3}}
    snapshot = store.take({"s": StateDict(state)}, "step")
    manifest = snapshot.get_manifest()
    assert_same(snapshot.read_object("0/s/a%2Fb/%25/0"), torch.arange(30))
    of_one = blake3(b"\1").hexdigest()[:16]
    assert snapshot.read_object(f"0/s//%k{of_one}") == 2
    assert snapshot.read_object("0/s//1") == 3
    assert all(path.startswith("0/s") for path in manifest)
    for path in manifest:
        assert_same(snapshot.read_object(path), snapshot.read_object(path.removeprefix("0/")))


def test_what_has_no_safe_encoding_needs_two_permissions(store):
    class_of_ours = Plain(3)
    with pytest.raises(UnsupportedTypeError, match="allow_pickle"):
        store.take({"s": StateDict(x=class_of_ours)}, "step")
    snapshot = store.take({"s": StateDict(x=class_of_ours)}, "step", allow_pickle=True)
    live = StateDict(x=0, y=1)
    with pytest.raises(UnsupportedTypeError, match="allow_pickle"):
        snapshot.restore({"s": live})
    assert live == {"x": 0, "y": 1}
    with pytest.raises(UnsupportedTypeError, match="allow_pickle"):
        snapshot.read_object("0/s/x")
    snapshot.restore({"s": live}, allow_pickle=True)
    assert live["x"].value == 3
    assert snapshot.read_object("0/s/x", allow_pickle=True).value == 3


class Plain:
    def __init__(self, value):
        self.value = value


class _Loud(StateDict):
    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key.upper(), value)


def test_a_state_dict_is_made_as_a_dict_is() -> None:
    source = {"a": 1}
    made = StateDict(source, b=2)
    assert made.state_dict() == {"a": 1, "b": 2}
    assert source == {"a": 1}
    assert StateDict([("a", 1)]).state_dict() == StateDict(StateDict(a=1)).state_dict() == source
    assert StateDict().state_dict() == {}
    assert _Loud({"a": 1}, b=2).state_dict() == {"A": 1, "B": 2}
