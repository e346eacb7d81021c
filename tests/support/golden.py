"""Golden stores: small stores that one version made, which every later one has to read.

``tools/make_golden_stores.py`` makes them: an archive of each, and what it holds as JSON. What they
hold is told by the states that were taken, not by reading.
"""

from __future__ import annotations

import datetime
import enum
import io
import json
import lzma
import pathlib
import re
import tarfile
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from blake3 import blake3
from torch.torch_version import TorchVersion

from casnap import NewStore, Snapshot, StateDict, Store
from tools import read_store

GOLDEN = Path(__file__).resolve().parents[1] / "fixtures" / "golden"
CHUNK = 64 << 10
UNSUPPORTED = "UnsupportedFormatError"
"""What stands for the value of a key that only a later version can read."""
State = dict[str, Any]


class Pair(NamedTuple):
    first: object
    second: object = None


# --- states ---------------------------------------------------------------------------------------

DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
)


def of_dtype(name: str) -> torch.Tensor:
    """Return a small tensor whose bytes count up."""
    dtype = getattr(torch, name)
    if name == "bool":
        return torch.tensor([[True, False, True]])
    return torch.arange(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(2, 3)


def tensors() -> State:
    numbers = torch.arange(1000, dtype=torch.float32).reshape(50, 20)
    channels = torch.tensor([0.5, 0.25]), torch.tensor([3, -1])
    dense = torch.zeros(6, 4)
    dense[1, 2] = 3.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            **{name: of_dtype(name) for name in DTYPES},
            "parameter": torch.nn.Parameter(numbers[:2].clone()),
            "buffer": torch.nn.Buffer(numbers[:2].clone()),
            "frozen": torch.nn.Parameter(numbers[:1].clone(), requires_grad=False),
            "strided": numbers[::3, 1::2],
            "conjugated": of_dtype("complex64").conj(),
            "scalar": torch.tensor(1.5),
            "empty": torch.empty(0, 7, dtype=torch.int16),
            "inline": torch.arange(16, dtype=torch.float32),
            "one chunk": numbers,
            "four chunks": torch.arange(4 * CHUNK // 8).reshape(4, -1) % 1021,
            "a list of chunks": torch.arange(9 * CHUNK // 8).reshape(9, 32, 256) % 251,
            "rest": torch.arange(33_000, dtype=torch.int32) // 500,
            "quint8": torch.quantize_per_tensor(numbers[:3], 0.5, 10, torch.quint8),
            "qint8": torch.quantize_per_channel(numbers[:2], *channels, 0, torch.qint8),
            "float qparams": torch.quantize_per_channel(
                numbers[:2], channels[0], channels[0] - 1, 0, torch.quint8
            ),
            "qint32": torch.quantize_per_tensor(numbers[:1], 0.125, -2, torch.qint32),
            "coo": dense.to_sparse(),
            "csr": dense.to_sparse_csr(),
            "csc": dense.to_sparse_csc(),
            "bsr": dense.to_sparse_bsr((2, 2)),
            "bsc": dense.to_sparse_bsc((2, 2)),
        }


def arrays() -> State:
    return {
        "<f4": np.arange(6, dtype="<f4").reshape(2, 3),
        ">i8": np.arange(3, dtype=">i8"),
        "|b1": np.array([True, False]),
        "<c16": np.array([1 + 2j]),
        "<M8[ns]": np.array(["2024-02-29T01:02:03.000000004"], dtype="<M8[ns]"),
        "<m8[3s]": np.array([5], dtype="<m8[3s]"),
        "|S5": np.array([b"ab", b"cde"], dtype="|S5"),
        "<U3": np.array(["a", "\U0001fae0x"], dtype="<U3"),
        "|V3": np.array([b"xyz"], dtype="|V3"),
        "scalar": np.float32(2.5),
        "str_": np.str_("ü\0"),
        "bytes_": np.bytes_(b"ab\0"),
        "large": np.arange(20_000, dtype="<u2") // 99,
    }


def values() -> State:
    position = io.BytesIO(b"some bytes")
    position.seek(4)
    return {
        "none": None,
        "bool": True,
        "int": -7,
        "large int": -(2**200),
        "float": -0.1,
        "inf": float("inf"),
        "complex": 1 - 2j,
        "str": "ü\ud800\0\U0001fae0",
        "long str": "word " * 50,
        "bytes": b"\0\xff",
        "bytearray": bytearray(b"ab"),
        "bytes_io": position,
        "range": range(-(2**70), 2**70, 3),
        "slice": slice(1, None, 2),
        "timedelta": datetime.timedelta(-3, 4, 5),
        "date": datetime.date(2024, 2, 29),
        "datetime": datetime.datetime(2024, 2, 29, 1, 2, 3, 4, datetime.timezone.utc),
        "path": pathlib.Path("/a/b"),
        "device": torch.device("cuda:1"),
        "torch_version": TorchVersion("2.4.0"),
        "dtype": torch.bfloat16,
        "layout": torch.sparse_coo,
        "memory_format": torch.channels_last,
        "qscheme": torch.per_tensor_affine,
        "enum": HTTPStatus.NOT_FOUND,
        "flag": re.MULTILINE | re.DOTALL,
        "packed_list": [None, True, -1, 1.5, "a", b"b"] * 200,
        "packed_tuple": tuple(range(1001)),
        "packed_set": set(range(1001)),
        "packed_frozenset": frozenset(map(str, range(1001))),
    }


def containers() -> State:
    ordered = OrderedDict(a=1, b=2)
    ordered._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    return {
        "dict": {},
        "Counter": Counter("abca"),
        "defaultdict": defaultdict(list, a=[1]),
        "OrderedDict": ordered,
        "list": [1, [2, []]],
        "tuple": (1, ("a",)),
        "size": torch.Size([2, 3]),
        "set": {"b", "a"},
        "frozenset": frozenset({(1, "x"), (2, "y")}),
        "deque": deque([1, 2], 7),
        "namedtuple": Pair(1, (2,)),
        "deep": deep,
    }


def keys() -> State:
    """Return keys whose text, where Python makes it, differs between its versions and platforms."""
    return {
        "of strings": {"a/b": 1, "a%b": 2, "\ud800": 3, "": 4, "%k0123456789abcdef": 5, "ü": 6},
        "of ints": {0: 1, -5: 2, 2**63 - 1: 3, 2**63: 4, 10**40: 5},
        "alike": {1: "int", "1": "str", True + 1: "two", 1.5: "float", "1.5": "text"},
        "of tuples": {("\U0001fae0",): 1, (1, "x", None): 2, ((1.5,), b"y"): 3},
        "of others": {None: 1, 1e-7: 2, 1j: 3, b"by": 4, torch.float32: 5, False: 6},
    }


def kinds() -> dict[str, Any]:
    return {
        name: StateDict(state())
        for name, state in (
            ("tensors", tensors),
            ("arrays", arrays),
            ("values", values),
            ("containers", containers),
            ("keys %/ü", keys),
        )
    }


# --- stores ---------------------------------------------------------------------------------------


@dataclass
class Made:
    """A store that was made.

    Attributes:
        store: The store.
        states: What each snapshot holds, by name; of each rank, where several took it.
    """

    store: Store
    states: dict[str, list[Mapping[str, Any]]]

    def take(self, state: Mapping[str, Any], name: str, **options: Any) -> None:
        self.store.take(state, name, **options)
        self.states[name] = [state]


def make_small(folder: Path) -> Made:
    """The test vectors of docs/format.md: a little of most things."""
    made = Made(Store(folder, create=NewStore(chunk_size=CHUNK)).make(), {})
    for step in range(3):
        weight = (torch.arange(2100) % 61).to(torch.bfloat16).view(torch.int16) + step
        ids = torch.arange(520) % 97
        ids[:: 50 + step] += step
        model = StateDict(
            weight=weight.view(torch.bfloat16).reshape(70, 30), ids=ids, bias=torch.ones(3) * step
        )
        made.take({"model": model, "at": StateDict({"step": step, ("a", 1): "ü"})}, f"run/{step}")
    made.store.tag("run/2", "best")
    made.store.gc(grace=0, recode_after=1, repack=1.0)
    return made


def make_environment(folder: Path) -> Made:
    """Snapshots that note what they were taken with: whole, thinned, and one that notes nothing."""
    made = Made(Store(folder, create=NewStore(chunk_size=CHUNK)).make(), {})
    state = {"model": StateDict(w=torch.arange(100)), "optim": StateDict(m=torch.ones(3))}
    made.take(state, "run/1")
    made.store.thin({"optim": 1})
    made.take(state, "run/2")
    made.store.thin({"optim": 1})
    made.states["run/1"] = [{"model": state["model"]}]
    Store(folder, environment=False).take(state, "none/1")
    made.states["none/1"] = [state]
    return made


WITNESSED: State = {"model": StateDict(w=torch.arange(100), b=torch.ones(3), steps=2)}


def make_witness(folder: Path) -> Made:
    """A snapshot, and witnesses before and after it."""
    made = Made(Store(folder, create=NewStore(chunk_size=CHUNK)).make(), {})
    made.store.witness(WITNESSED, "run/0")
    made.take(WITNESSED, "run/1")
    made.store.witness(WITNESSED, "run/2")
    return made


def make_health(folder: Path) -> Made:
    """Snapshots whose tensors were measured: whole, thinned, and one that was not."""
    store = Store(folder, create=NewStore(chunk_size=CHUNK), environment=False, health=True)
    made = Made(store.make(), {})
    state = {
        "model": StateDict(
            w=torch.arange(40_000.0).to(torch.bfloat16),
            b=torch.tensor([float("nan"), 1.0]),
            c=torch.tensor([3 + 4j] * 9 + [float("inf")]),
        ),
        "optim": StateDict(m=torch.full((100,), float("inf")), n=torch.arange(100)),
    }
    made.take(state, "run/1")
    made.store.thin({"optim": 1})
    made.take(state, "run/2")
    made.store.thin({"optim": 1})
    made.states["run/1"] = [{"model": state["model"]}]
    Store(folder, environment=False, health=False).take(state, "none/1")
    made.states["none/1"] = [state]
    return made


MAKERS: dict[str, Callable[[Path], Made]] = {
    "small": make_small,
    "environment": make_environment,
    "witness": make_witness,
    "health": make_health,
}
"""What makes those that a version adds; those that stand were made by makers that went since."""


# --- what they hold -------------------------------------------------------------------------------


def described(value: Any) -> Any:
    """Return a value as JSON, alike in all versions of Python, numpy and torch."""
    if isinstance(value, torch.Tensor):
        return _described_tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        text = blake3(np.asarray(value).tobytes()).hexdigest()
        return [type(value).__name__, np.asarray(value).dtype.str, list(value.shape), text]
    name = type(value).__name__
    if isinstance(value, Mapping):
        return [name, _short([[described(key), described(each)] for key, each in value.items()])]
    if isinstance(value, list | tuple | deque):
        return [name, _short([described(each) for each in value])]
    if isinstance(value, set | frozenset):
        return [name, _short(sorted(json.dumps(described(each)) for each in value))]
    if isinstance(value, enum.Enum):
        return [name, value.value]
    if isinstance(value, io.BytesIO):
        return [name, value.tell(), value.getvalue().hex()]
    return [name, _short(ascii(value))]


def _short(value: Any) -> Any:
    return value if len(value) < 100 else blake3(json.dumps(value).encode()).hexdigest()


def _described_tensor(value: torch.Tensor) -> Any:
    kind = [type(value).__name__, str(value.dtype), list(value.shape), value.requires_grad]
    value = value.detach()
    if value.layout is not torch.strided:
        return [*kind, str(value.layout), _described_tensor(value.to_dense())]
    if value.is_quantized:
        integers = value.int_repr()
        return [*kind, str(value.qscheme()), _described_tensor(integers), _of_dense(value)]
    return [*kind, _of_dense(value)]


def _of_dense(value: torch.Tensor) -> str:
    if value.is_quantized:
        value = value.dequantize()
    plain = value.resolve_conj().contiguous().reshape(-1)
    return blake3(plain.view(torch.uint8).numpy().tobytes()).hexdigest()


def document_of(made: Made) -> Any:
    """Return what is expected of a store."""
    snapshots = {}
    for snapshot in made.store.snapshots():
        states = made.states[snapshot.name]
        snapshots[snapshot.name] = {
            "commit": snapshot.commit_id,
            "metadata": snapshot.metadata.user,
            "environment": dict(snapshot.environment),
            "health": health_of(snapshot),
            "notes": described(snapshot.row.notes),
            "ranks": [
                {key: _described_state(value) for key, value in state.items()} for state in states
            ],
            "tags": list(snapshot.tags),
            "thinned": [] if snapshot.row.features else list(snapshot.thinned),
            "world_size": snapshot.world_size,
        }
    assert snapshots.keys() == made.states.keys()
    return {"settings": made.store.settings, "snapshots": snapshots}


def health_of(snapshot: Snapshot) -> dict[str, list[float]]:
    return {path: list(msgspec.structs.astuple(each)) for path, each in snapshot.health().items()}


def _described_state(value: Any) -> Any:
    if value is UNSUPPORTED:
        return UNSUPPORTED
    return described(dict(value.state_dict() if hasattr(value, "state_dict") else value))


# --- archives -------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path.parent.name != "tmp")


def pack(folder: Path, archive: Path) -> None:
    """Write the store in a folder as an archive. Its bytes depend on the store alone."""
    with lzma.open(archive, "wb", preset=9) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for path in _files(folder):
            info = tarfile.TarInfo(str(path.relative_to(folder)))
            info.size, info.mode = path.stat().st_size, 0o644
            tar.addfile(info, io.BytesIO(path.read_bytes()))


def unpack(name: str, folder: Path, golden: Path = GOLDEN) -> dict[str, Any]:
    """Put a golden store into a folder; return what is expected of it."""
    with tarfile.open(golden / f"{name}.tar.xz") as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            (folder / member.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / member.name).write_bytes(file.read())
    document: dict[str, Any] = json.loads((golden / f"{name}.json").read_text())
    return document


def make(name: str, folder: Path, work: Path) -> None:
    """Make a golden store, with what is expected of it, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    place = work / name / "store"
    made = MAKERS[name](place)
    pack(place, folder / f"{name}.tar.xz")
    text = json.dumps(document_of(made), sort_keys=True, separators=(",", ":"))
    (folder / f"{name}.json").write_text(text + "\n")


# --- test vectors ---------------------------------------------------------------------------------

_BYTES_A_LINE = 32
_HEAD = "# A small store in hex: the test vectors of format.md, which says what these lines are.\n"


def as_text(folder: Path) -> str:
    """Return a store as the text of docs/format-store.txt."""
    lines = []
    for path in _files(folder):
        content = path.read_bytes()
        digest = blake3(content).hexdigest()
        lines.append(f"file {path.relative_to(folder)} {len(content)} {digest}")
        parts = (
            (at, content[at : at + _BYTES_A_LINE]) for at in range(0, len(content), _BYTES_A_LINE)
        )
        lines += [f"{at:x} {part.hex()}" for at, part in parts if any(part)]
    store = read_store.Store(folder)
    for name in store.snapshots:
        for entry_path, entry in store.entries(name).items():
            content = store.tensor(entry).tobytes() if entry[0] == "t" else store.content(entry)
            lines.append(f"entry {name} {entry_path} {entry[0]} {blake3(content).hexdigest()}")
    return _HEAD + "".join(f"{line}\n" for line in lines)


def from_text(text: str, folder: Path) -> None:
    """Put the store of such a text into a folder."""
    files: dict[str, bytearray] = {}
    for line in text.splitlines():
        sort, *words = line.split(" ")
        if sort == "file":
            content = files[words[0]] = bytearray(int(words[1]))
        elif sort not in ("#", "entry"):
            part = bytes.fromhex(words[0])
            content[int(sort, 16) : int(sort, 16) + len(part)] = part
    for key, content in files.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(content)
