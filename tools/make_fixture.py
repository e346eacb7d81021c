"""Make the store of `tests/format/test_format_fixture.py`: of this format, and fixed content.

    python -m tools.make_fixture [FOLDER]

It is made once for a format and then read for ever, so it holds everything that can be stored.
All content comes from integer arithmetic: it is the same under every version of everything.
"""

from __future__ import annotations

import datetime
import enum
import random
import shutil
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.torch_version import TorchVersion

from casnap import RNGState, StateDict, Store

FOLDER = Path(__file__).parent.parent / "tests" / "fixtures" / "store-v1"
CHUNK = 64 << 10

# fmt: off
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
TYPESTRS = (
    "|b1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f8", "<c16", "<M8[ns]", "<m8[s]", "<U3", "|S5",
    "|V6",
)
# fmt: on


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


Point = namedtuple("Point", "x y")


class Settings:
    """Stored by ``torch.save``; a reader has to call :func:`allow_settings` first."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.content == other.content

    __hash__ = None  # type: ignore[assignment]


def allow_settings() -> None:
    """Tell torch that objects of that class are harmless."""
    torch.serialization.add_safe_globals([Settings])


def pattern(nbytes: int, seed: int) -> bytes:
    """Return bytes that follow from two integers alone; never 0 nor above 127."""
    return bytes((i * i * 7 + i * seed + i // 251 + seed) % 127 + 1 for i in range(nbytes))


def tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor whose bytes are a pattern."""
    kind = getattr(torch, dtype)
    raw = pattern(torch.Size(shape).numel() * kind.itemsize, seed)
    if kind is torch.bool:
        raw = bytes(b & 1 for b in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    if kind is torch.complex32:  # viewed directly, torch warns that it is experimental
        return flat.view(torch.int32).reshape(shape).view(kind)
    return flat.view(kind).reshape(shape)


def tensors() -> dict[str, Any]:
    """Return a tensor of every dtype that this torch has, and of every shape that is special."""
    odd = {name: tensor(name, (5, 7), i) for i, name in enumerate(DTYPES) if hasattr(torch, name)}
    base = tensor("int32", (6, 8), 50)
    shared = tensor("float32", (40,), 51)
    return {
        "dtypes": odd,
        "scalar": torch.tensor(42),
        "empty": torch.empty((0, 3)),
        "inline": torch.arange(16, dtype=torch.int32),
        "not_inline": torch.arange(17, dtype=torch.int32),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.arange(3).expand(4, 3),
        "conjugated": torch.complex(torch.arange(9.0), torch.ones(9)).conj(),
        "tied": [shared, shared],
        "parameter": nn.Parameter(tensor("float32", (4, 4), 52)),
        "frozen": nn.Parameter(tensor("float32", (2, 2), 53), requires_grad=False),
        "needs_grad": torch.arange(30.0).requires_grad_(),
        "sparse_coo": torch.sparse_coo_tensor(
            torch.tensor([[0, 1, 1], [2, 0, 2]]),
            torch.arange(3.0),
            (2, 3),
            is_coalesced=True,
            check_invariants=True,
        ),
        "sparse_csr": torch.sparse_csr_tensor(
            torch.tensor([0, 1, 3]),
            torch.tensor([1, 0, 2]),
            torch.arange(3.0),
            (2, 3),
            check_invariants=True,
        ),
    }


def quantized() -> dict[str, Any]:
    """Return what later versions of torch may no longer make or read."""
    ints = torch.arange(20, dtype=torch.int8).reshape(4, 5)
    return {
        "per_tensor": torch._make_per_tensor_quantized_tensor(ints, 0.5, 3),
        "per_channel": torch._make_per_channel_quantized_tensor(
            ints,
            torch.tensor([0.5, 0.25, 1.0, 2.0], dtype=torch.float64),
            torch.tensor([0, 1, 2, 3]),
            0,
        ),
    }


def arrays() -> dict[str, Any]:
    """Return numpy arrays and scalars."""
    found: dict[str, Any] = {}
    for i, name in enumerate(TYPESTRS):
        dtype = np.dtype(name)
        count = 24 // dtype.itemsize + 1
        if dtype.kind == "U":
            found[name] = np.array(["a", "äöü", ""], dtype)
        elif dtype.kind == "b":
            found[name] = np.arange(9) % 2 == 0
        else:
            raw = pattern(count * dtype.itemsize, 60 + i)
            found[name] = np.frombuffer(raw, dtype).copy()
    return {
        "arrays": found,
        "fortran": np.asfortranarray(np.arange(12, dtype="<i8").reshape(3, 4)),
        "zero_d": np.array(7, "<i4"),
        "empty": np.zeros((0, 2), "<f4"),
        "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("a\0"), np.bytes_(b"b")],
    }


def containers() -> dict[str, Any]:
    """Return a container of every kind, with keys of every kind."""
    return {
        "keys": {1: "int", "1": "str", 1.5: 0, None: 0, b"b": 0, (1, "a", (2.0,)): 0, 1j: 0, "": 0}
        | {torch.float32: 0, False: 0, "a/b": 0, "50%": 0, "ключ": 0, "\ud800": 0, 1 << 70: 0},
        "list": [1, [2, [3, []]]],
        "tuple": (1, (), ("a",)),
        "set": {3, 1, 2},
        "frozenset": frozenset({"b", "a"}),
        "ordered": OrderedDict([("z", 1), ("a", 2)]),
        "default": defaultdict(list, {"a": [1]}),
        "counter": Counter("abracadabra"),
        "deque": deque([1, 2, 3], maxlen=5),
        "point": Point(1, [2]),
        "size": torch.Size((2, 3)),
        "packed_list": list(range(1200)),
        "packed_tuple": tuple(f"word {i}" for i in range(1100)),
        "packed_set": set(range(1001)),
        "deep": _nested(100),
    }


def _nested(depth: int) -> Any:
    value: Any = "bottom"
    for _ in range(depth):
        value = [value]
    return value


def values() -> dict[str, Any]:
    """Return a value of every kind, without pickle."""
    return {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 127, 128, -(1 << 63), 1 << 64, 3**200],
        "floats": [0.0, -0.0, 1.5, float("inf"), 5e-324],
        "complex": 1 - 2j,
        "str": "naïve \U0001f600 \0",
        "long_str": "abc" * 100,
        "bytes": b"\0\xff",
        "bytearray": bytearray(b"xy"),
        "long_bytes": pattern(70_000, 80),
        "range": range(1, 10, 3),
        "slice": slice(None, 5, 2),
        "timedelta": datetime.timedelta(3, 4, 5),
        "date": datetime.date(2024, 2, 29),
        "datetime": datetime.datetime(2024, 2, 29, 12, 30, 1, 5, datetime.timezone.utc),
        "path": Path("a/b"),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "layout": torch.strided,
        "memory_format": torch.channels_last,
        "enum": Colour.BLUE,
        "flag": Access.READ | Access.WRITE,
        "torch_version": TorchVersion("2.4.0"),
        "object": Settings({"lr": 0.5}),
    }


def rng_states() -> dict[str, Any]:
    """Return the state of the generators of Python and numpy: all that does not depend on torch."""
    return {"python": random.Random(5).getstate(), "numpy": np.random.RandomState(5).get_state()}


def weights(step: int) -> dict[str, Any]:
    """Return what training changes: one tensor of six chunks, of which a step changes one."""
    large = torch.frombuffer(bytearray(pattern(4096, 90) * 96), dtype=torch.float32).clone()
    chunk = step % 6 * (CHUNK // 4)
    large[chunk : chunk + 5] = torch.arange(5.0) + step
    return {
        "large": large.reshape(96, 1024),
        "bias": torch.full((100,), float(step)),
        "step": step,
    }


def many() -> dict[str, Any]:
    """Return so many entries that their tree has several leaves."""
    return {f"{i:04}": i for i in range(1500)}


def app_state(step: int) -> dict[str, Any]:
    """Return what the snapshot of a step holds, by the keys of its app state."""
    state = {"weights": weights(step)}
    if step == 0:
        state |= {
            "tensors": tensors(),
            "arrays": arrays(),
            "containers": containers(),
            "values": values(),
            "rng": rng_states(),
            "many": many(),
        }
    return state


SNAPSHOTS = {
    "run/step_0": 0,
    "run/step_2": 2,
    "run/step_3": 3,
    "compressed": 4,
    **{f"more/{i}": i for i in range(5, 8)},
}
"""The snapshots that the store holds, in the order of their commits, and the step of each."""


def metadata(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / (step + 1), "tags": ["a", None, {"b": True}]}


def seed_generators() -> None:
    """Put the global generators into the state that ``run/step_0`` holds."""
    random.seed(5)
    torch.manual_seed(5)
    np.random.seed(5)


def stateful(content: dict[str, Any]) -> dict[str, Any]:
    return {key: StateDict(value) for key, value in content.items()}


def make(folder: Path) -> None:
    """Make the store."""
    store = Store(folder, chunk_size=CHUNK, codec="zstd")
    allow_settings()
    seed_generators()
    first: dict[str, Any] = {**stateful(app_state(0)), "generators": RNGState()}
    store.take(first, "run/step_0", metadata=metadata(0))
    store.take(stateful(app_state(1)), "run/step_1", metadata=metadata(1))
    store.take(stateful({"weights": {"step": -1}}), "run/step_2")
    store.take(stateful(app_state(2)), "run/step_2", metadata=metadata(2), overwrite=True)
    store.delete("run/step_1")
    store.configure(codec="raw")
    store.take(stateful(app_state(3)), "run/step_3", metadata=metadata(3))
    store.configure(codec="zstd")
    store.take(stateful(app_state(4)), "compressed", metadata=metadata(4))
    for i in range(5, 8):
        store.take(stateful(app_state(i)), f"more/{i}", metadata=metadata(i))
    store.take({"quantized": StateDict(quantized())}, "quantized")
    (folder / "casnap-store/tmp").rmdir()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    if target.exists():
        shutil.rmtree(target)
    # Classes are stored by the name of their module, which must not be __main__.
    from tools.make_fixture import make as make_fixture

    make_fixture(target)
    total = sum(p.stat().st_size for p in target.rglob("*") if p.is_file())
    print(f"{target}: {total:,} bytes")
