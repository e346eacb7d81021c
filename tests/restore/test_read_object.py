"""Reading one object, or a part of it, and nothing else."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import EntryNotFoundError, MismatchError
from casnap.state.tensors import TENSOR_DTYPES
from tests.support.bitwise import assert_same, noise, raw
from tests.support.reads import counted
from tests.support.warm import run_python

CHUNK = 64 << 10
PAGE = 4096

# A row of a chunk, rows of many chunks, chunks of many rows, cells below the first axis, one cell.
SHAPES = [(), (5,), (70_000,), (9, 16384), (3, 40_000), (300, 7, 11), (2, 3, 5, 9000), (4, 0, 3)]


TENSORS = {str(i): torch.randint(-99, 99, s, dtype=torch.int32) for i, s in enumerate(SHAPES)}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("read") / "store", create=NewStore(chunk_size=CHUNK))


@pytest.fixture(scope="module")
def snapshot(store):
    state = {
        **TENSORS,
        "parameter": torch.nn.Parameter(torch.randn(200, 300)),
        "complex": torch.randn(200, 300, dtype=torch.complex64).conj(),
        "array": np.arange(60_000.0).reshape(200, 300),
        "dates": np.arange(3).astype("M8[s]"),
        "value": 7,
        "text": "x" * 200_000,
        "deep": OrderedDict(a=[torch.arange(30_000), {"b": (1, 2.5)}], c=torch.ones(3)),
        "empty": {},
    }
    return store.take({"model": StateDict(state), "other": StateDict(x=1)}, "run/step_1")


# --- whole ------------------------------------------------------------------------------------


def test_whole_tensors_with_and_without_a_rank(snapshot):
    for name, tensor in TENSORS.items():
        assert_same(snapshot.read_object(f"0/model/{name}"), tensor)
        assert_same(snapshot.read_object(f"model/{name}"), tensor)


def test_containers(snapshot):
    deep = OrderedDict(a=[torch.arange(30_000), {"b": (1, 2.5)}], c=torch.ones(3))
    assert_same(snapshot.read_object("0/model/deep"), deep)
    assert_same(snapshot.read_object("0/model/deep/a"), deep["a"])
    assert_same(snapshot.read_object("0/model/deep/a/1/b"), (1, 2.5))
    assert snapshot.read_object("0/model/empty") == {}
    assert snapshot.read_object("other") == {"x": 1}
    assert_same(snapshot.get_state_dict_for_key("model")["deep"], deep)


def test_what_is_read_is_the_readers_own(snapshot):
    first = snapshot.read_object("0/model/2")
    first.zero_()
    assert snapshot.read_object("0/model/2").any()
    array = snapshot.read_object("0/model/array")
    array[:] = 0
    assert snapshot.read_object("0/model/array").any()


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("0/model/paramter", "model/parameter"),
        ("0/modle/value", "model/value"),
        ("model/deep/a/1/c", "model/deep/a/1/b"),
        ("0/model/deep/a/7", "model/deep/a/0"),
        ("1/model/value", "model/value"),
    ],
)
def test_a_wrong_path_suggests_the_nearest(snapshot, path, near):
    with pytest.raises(EntryNotFoundError, match="no entry") as e:
        snapshot.read_object(path)
    assert isinstance(e.value, KeyError)
    assert near in str(e.value)
    assert path in str(e.value)


@pytest.mark.parametrize(
    "path", ["", "/", "0", "0/", "//", "..", "0/model/", "0/model//", "%", "\ud800"]
)
def test_paths_that_are_none(snapshot, path):
    with pytest.raises(EntryNotFoundError):
        snapshot.read_object(path)


# --- parts ------------------------------------------------------------------------------------


def bounds(size):
    return st.none() | st.integers(-size - 2, size + 2)


def slices(size):
    return st.builds(slice, bounds(size), bounds(size), st.none() | st.integers(1, size + 2))


@st.composite
def indices(draw, shape):
    items = [
        draw(slices(n) | (st.integers(-n, n - 1) if n else st.nothing()))
        for n in shape[: draw(st.integers(0, len(shape)))]
    ]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(items)))
        rest = len(items) - at
        # What follows an ellipsis counts from the end.
        tail = (
            [
                draw(slices(n) | (st.integers(-n, n - 1) if n else st.nothing()))
                for n in shape[len(shape) - rest :]
            ]
            if rest
            else []
        )
        items = [*items[:at], ..., *tail]
    if len(items) == 1 and draw(st.booleans()):
        return items[0]
    return tuple(items)


@given(st.data())
def test_parts_are_what_torch_says(snapshot, data):
    number = data.draw(st.integers(0, len(SHAPES) - 1))
    tensor = TENSORS[str(number)]
    index = data.draw(indices(SHAPES[number]))
    expected = tensor[index]
    path = f"0/model/{number}"
    assert_same(snapshot.read_object(path, index=index), expected.clone())
    out = torch.full(expected.shape, 12345, dtype=torch.int64)
    assert snapshot.read_object(path, out, index=index) is out
    assert_same(out, expected.long())
    strided = torch.zeros((*expected.shape, 2), dtype=torch.int32)[..., 1]
    assert snapshot.read_object(path, strided, 1, index=index) is strided
    assert_same(strided.clone(), expected.clone())


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_parts_of_every_dtype(store):
    plain = {n: noise(d, (40, 3001)) for n, d in TENSOR_DTYPES.items() if not n.startswith("q")}
    tiny = {f"tiny {n}": noise(t.dtype, (2, 2)) for n, t in plain.items()}
    taken = store.take({"s": StateDict({**plain, **tiny})}, "dtypes", overwrite=True)
    for name, tensor in {**plain, **tiny}.items():
        for index in (1, (slice(None), 1), (slice(0, 2), slice(1, None, 7)), (..., -1)):
            part = taken.read_object(f"0/s/{name}", index=index)
            assert part.dtype == tensor.dtype
            assert raw(part) == raw(tensor[index]), (name, index)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_parts_of_odd_tensors(store):
    odd = {
        "parameter": torch.nn.Parameter(torch.randn(200, 300)),
        "leaf": torch.randn(200, 300, requires_grad=True),
        "conj": torch.randn(200, 300, dtype=torch.complex64).conj(),
        "t": torch.randn(200, 300).t(),
        "quantized": torch.quantize_per_tensor(torch.randn(200, 300), 0.1, 3, torch.qint8),
        "buffer": torch.nn.Buffer(torch.randn(200, 300)),
    }
    taken = store.take({"s": StateDict(odd)}, "odd", overwrite=True)
    for name, tensor in odd.items():
        part = taken.read_object(f"0/s/{name}", index=(slice(3, 90, 2), 5))
        assert type(part) is torch.Tensor, name
        assert not part.requires_grad
        assert raw(part) == raw(tensor.detach()[3:90:2, 5].clone()), name


def test_parts_of_arrays(store):
    arrays = {
        "big": np.arange(60_000.0).reshape(200, 300),
        "text": np.array(["a", "ü€", "xyz"] * 9000).reshape(300, 90),
        "dates": np.arange(30_000).astype("M8[s]"),
        "tiny": np.arange(6, dtype=">i2").reshape(2, 3),
    }
    taken = store.take({"s": StateDict(arrays)}, "arrays", overwrite=True)
    for name, array in arrays.items():
        for index in (1, slice(1, None, 2), (..., slice(0, 1)), (..., -1)):
            part = taken.read_object(f"0/s/{name}", index=index)
            assert_same(np.asarray(part), np.array(array[index], order="C"), (name, index))


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (9, IndexError),
        (-10, IndexError),
        ((0, 0, 0), IndexError),
        ((..., ...), IndexError),
        (slice(None, None, -1), ValueError),
        (slice(None, None, 0), ValueError),
        (None, None),
        (True, TypeError),
        ("x", TypeError),
        ([0, 1], TypeError),
        (torch.tensor([True]), TypeError),
    ],
    ids=str,
)
def test_indices_that_are_none(snapshot, index, error):
    if error is None:
        assert snapshot.read_object("0/model/3", index=index).shape == (9, 16384)
        return
    with pytest.raises(error):
        snapshot.read_object("0/model/3", index=index)


def test_only_tensors_take_an_index(snapshot):
    for path in ("0/model/value", "0/model/deep", "0/model/text"):
        with pytest.raises(MismatchError, match="index"):
            snapshot.read_object(path, index=0)


# --- into memory that is there ----------------------------------------------------------------


def test_into_a_tensor(snapshot):
    out = torch.zeros(9, 16384, dtype=torch.int32)
    assert snapshot.read_object("0/model/3", obj_out=out) is out
    assert_same(out, TENSORS["3"])
    for cast in (torch.float64, torch.bfloat16, torch.int8):
        out = torch.zeros(9, 16384, dtype=cast)
        snapshot.read_object("0/model/3", out)
        assert_same(out, TENSORS["3"].to(cast))
    turned = torch.zeros(16384, 9, dtype=torch.int32).t()
    where = turned.data_ptr()
    assert snapshot.read_object("0/model/3", turned) is turned
    assert turned.data_ptr() == where
    assert torch.equal(turned, TENSORS["3"])
    wide = torch.full((20, 16390), -7, dtype=torch.int32)
    snapshot.read_object("0/model/3", wide[1:19:2, 3:16387])
    assert torch.equal(wide[1:19:2, 3:16387], TENSORS["3"])
    assert (wide[::2] == -7).all()
    assert (wide[:, :3] == -7).all()


def test_into_a_parameter(snapshot):
    parameter = torch.nn.Parameter(torch.zeros(9, 16384))
    assert snapshot.read_object("0/model/3", parameter) is parameter
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert_same(parameter.detach(), snapshot.read_object("0/model/3").float())


def test_into_what_cannot_be_filled_directly(snapshot):
    out = torch.zeros(200, 300, dtype=torch.complex64).conj()
    assert snapshot.read_object("0/model/complex", out) is out
    assert raw(out.clone()) == raw(snapshot.read_object("0/model/complex"))


def test_an_array_into_a_tensor(snapshot):
    out = torch.zeros(200, 300, dtype=torch.float64)
    assert snapshot.read_object("0/model/array", out) is out
    assert_same(out, torch.arange(60_000.0, dtype=torch.float64).reshape(200, 300))
    with pytest.raises(MismatchError, match="cannot be read into a tensor"):
        snapshot.read_object("0/model/dates", torch.zeros(3))
    part = torch.zeros(3)
    assert snapshot.read_object("0/model/array", part, index=(1, slice(3))) is part
    assert_same(part, torch.tensor([300.0, 301.0, 302.0]))


@pytest.mark.parametrize("shape", [(9, 16383), (16384, 9), (9 * 16384,), (1, 9, 16384), (), (0,)])
def test_a_wrong_shape_writes_nothing(snapshot, shape):
    out = torch.full(shape, 3, dtype=torch.int32)
    with pytest.raises(MismatchError, match=r"shape \(9, 16384\)"):
        snapshot.read_object("0/model/3", out)
    assert (out == 3).all()
    with pytest.raises(MismatchError, match="shape"):
        snapshot.read_object("0/model/3", torch.zeros(9, 16384), index=0)


def test_into_what_is_no_tensor(snapshot):
    with pytest.raises(MismatchError, match="obj_out"):
        snapshot.read_object("0/model/3", [0] * 9)


# --- no more than is needed -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "index", "chunks"),
    [
        ("0/model/3", 4, 1),  # a row is a chunk
        ("0/model/3", (slice(2, 6), slice(5, 6)), 4),
        ("0/model/3", (slice(None), 0), 9),
        ("0/model/2", slice(20_000, 20_001), 1),
        ("0/model/2", slice(16_383, 16_385), 2),
        ("0/model/2", slice(5, 5), 0),
        ("0/model/2", -1, 1),
    ],
    ids=str,
)
def test_only_chunks_that_hold_something_wanted_are_read(snapshot, path, index, chunks):
    opened, backend = counted(snapshot)
    opened.read_object(path, index=0)  # the tree is known from here on
    backend.reads.clear()
    opened.read_object(path, index=index)
    assert all(key.startswith("packs/") for key, _, _ in backend.reads)
    # From the page that a chunk begins in to the end of the one that it ends in.
    assert (chunks > 0) <= backend.nbytes <= chunks * (CHUNK + 2 * PAGE)


def test_a_repeated_chunk_is_read_once(store):
    state = {"s": StateDict(x=torch.zeros(64, 16384))}
    opened, backend = counted(store.take(state, "zeros", overwrite=True))
    opened.read_object("0/s/x", index=0)
    backend.reads.clear()
    assert not opened.read_object("0/s/x").any()
    assert 0 < backend.nbytes <= CHUNK + 2 * PAGE


def test_one_of_many_entries(tmp_path):
    """Of a tree of some hundred nodes a read looks at a list and a leaf."""
    tensors = torch.arange(5_000 * 20, dtype=torch.int64).reshape(5_000, 20)
    state = StateDict({f"layer.{i}": t for i, t in enumerate(tensors)})
    snapshot, backend = counted(Snapshot.take(tmp_path / "store/step_1", {"s": state}))
    backend.reads.clear()
    for i in (0, 777, 4_999):
        assert_same(snapshot.read_object(f"0/s/layer.{i}"), tensors[i].clone())
    assert 0 < len(backend.reads) < 20
    assert len(snapshot.get_manifest()) == 5_001


BUDGET = """
import sys, threading, torch
from casnap import Snapshot

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10

def growth(out):
    before, peak, stop = anonymous(), [0], threading.Event()

    def watch():
        while not stop.wait(0.001):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = snapshot.read_object("0/s/x", out, 16 << 20)
    stop.set()
    watcher.join()
    assert result.shape == (100, 300_000)
    assert result[57, 3] == 57 * 300_000 + 3
    return max(peak[0], anonymous()) - before - (0 if out is not None else result.nbytes)

snapshot = Snapshot(sys.argv[1])
snapshot.read_object("0/s/small")
print(growth(None) >> 20, growth(torch.ones(100, 300_000, dtype=torch.int32)) >> 20)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_the_budget_holds(tmp_path):
    """A tensor of 120 MB within 16 MiB: measured, as anonymous memory beside the result."""
    big = torch.arange(30_000_000, dtype=torch.int32).reshape(100, 300_000)
    path = tmp_path / "run" / "step_1"
    Snapshot.take(path, {"s": StateDict(x=big, small=torch.ones(100))})
    del big
    process = run_python(BUDGET, path)
    assert process.returncode == 0, process.stderr
    new, in_place = map(int, process.stdout.split())
    assert new <= 24, f"{new} MiB"
    assert in_place <= 24, f"{in_place} MiB"


def test_a_budget_below_a_chunk_means_a_chunk(snapshot):
    for budget in (0, 1, 1000, CHUNK, 10 * CHUNK):
        assert_same(snapshot.read_object("0/model/3", memory_budget_bytes=budget), TENSORS["3"])
        deep = snapshot.read_object("0/model/deep", memory_budget_bytes=budget)
        assert_same(deep["a"][0], torch.arange(30_000))
