"""Files of torch.save are read back whole; a file that says wrong sizes is refused."""

from __future__ import annotations

import collections
import dataclasses
import io
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from casnap import Snapshot, StateDict, Store
from casnap.errors import UnsupportedTypeError
from tests.support.bitwise import assert_same
from tests.support.faults import CHUNK, in_child
from tests.support.forger import Forger, limit_memory

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize",
    "ignore:TypedStorage",
    "ignore:Sparse invariant checks",
    "ignore:Sparse CSR",
)


@dataclasses.dataclass
class Held:
    x: Any


@pytest.fixture(autouse=True)
def registered():
    with torch.serialization.safe_globals([Held]):
        yield


def parameter_with_a_mark():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.mark = 3
    return parameter


VALUES = {
    "tensor": lambda: torch.randn(300, 7),
    "strided": lambda: torch.randn(300, 7)[::3, 1:5].t(),
    "expanded": lambda: torch.randn(1, 7).expand(100_000, 7),
    "empty": lambda: torch.ones(0, 3),
    "scalar": lambda: torch.tensor(3.5),
    "uint16": lambda: torch.ones(9, dtype=torch.uint16),
    "float8": lambda: torch.ones(5).to(torch.float8_e4m3fn),
    "conj": lambda: torch.randn(5, dtype=torch.complex64).conj(),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "marked": lambda: parameter_with_a_mark(),
    "sparse": lambda: torch.eye(9).to_sparse(),
    "csr": lambda: torch.eye(9).to_sparse_csr(),
    "quantized": lambda: torch._make_per_tensor_quantized_tensor(
        torch.ones(9, dtype=torch.int8), 0.1, 3
    ),
    "per channel": lambda: torch._make_per_channel_quantized_tensor(
        torch.ones(3, 9, dtype=torch.uint8), torch.ones(3), torch.zeros(3), 0
    ),
    "half bytes": lambda: torch.quantize_per_channel(
        torch.ones(3, 5), torch.ones(3), torch.zeros(3), 0, torch.quint4x2
    ),
    "plain": lambda: [
        None,
        True,
        1,
        -70_000,
        1 << 200,
        0.5,
        1 + 2j,
        "text ü",
        b"bytes",
        bytearray(b"ba"),
    ],
    "containers": lambda: [(), (1, (2, 3)), {1}, {"a": [1]}, [[]] * 9, collections.Counter("aab")],
    "ordered": lambda: collections.OrderedDict(a=collections.OrderedDict(b=1)),
    "torch's": lambda: [torch.Size([2, 3]), torch.device("cpu"), torch.float32, torch.bfloat16],
    "many": lambda: [float(i) for i in range(10_000)],
    "many small": lambda: [{"i": i} for i in range(3_000)],
    "shared": lambda: [torch.ones(100_000)] * 100,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_registered_class_with_all_that_torch_saves(name, request):
    value = VALUES[name]()
    store = Store(f"memory://{request.node.nodeid}")
    snapshot = store.take({"s": StateDict(held=Held(value))}, "step")
    assert snapshot.get_manifest()["0/s/held"].kind == "object"
    again = snapshot.read_object("s/held")
    assert type(again) is Held
    if name in ("quantized", "per channel", "half bytes"):
        assert torch.equal(again.x.dequantize(), value.dequantize())
    else:
        assert_same(again.x, value)


# --- written to do harm -----------------------------------------------------------------------


def archive(body: bytes, members: dict[str, bytes] | None = None, compression: int = 0) -> bytes:
    """Return an archive with a pickle of some opcodes."""
    out = io.BytesIO()
    parts = {"data.pkl": b"\x80\2" + body, "version": b"3\n", "byteorder": b"little"}
    with zipfile.ZipFile(out, "w", compression) as z:
        for name, content in (parts | (members or {})).items():
            z.writestr(f"archive/{name}", content)
    return out.getvalue()


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name_of(full: str) -> bytes:
    module, _, name = full.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def long(n: int) -> bytes:
    data = n.to_bytes(16, "little")
    return b"\x8a" + bytes([len(data)]) + data


def storage(numel: int, key: bytes = text("0"), kind: str = "Float") -> bytes:
    return (
        b"("
        + text("storage")
        + name_of(f"torch.{kind}Storage")
        + key
        + text("cpu")
        + long(numel)
        + b"tQ"
    )


def tensor(numel: int, size: int, stride: int = 1, offset: int = 0, rebuild="tensor_v2") -> bytes:
    hooks = name_of("collections.OrderedDict") + b")R"
    place = long(offset) + long(size) + b"\x85" + long(stride) + b"\x85"
    return (
        name_of(f"torch._utils._rebuild_{rebuild}")
        + b"("
        + storage(numel)
        + place
        + (b"\x89" + hooks + b"tR")
    )


def quantized(size: int) -> bytes:
    hooks = name_of("collections.OrderedDict") + b")R"
    scheme = b"(" + name_of("torch.per_tensor_affine") + b"G" + struct.pack(">d", 1.0) + b"K\0t"
    pid = (
        b"(" + text("storage") + name_of("torch.QInt8Storage") + text("0") + text("cpu") + b"K\4tQ"
    )
    place = b"K\0" + long(size) + b"\x85K\0\x85"
    return (
        name_of("torch._utils._rebuild_qtensor")
        + b"("
        + pid
        + place
        + scheme
        + b"\x89"
        + hooks
        + (b"tR")
    )


def called(name: str, *args: bytes) -> bytes:
    return name_of(name) + b"(" + b"".join(args) + b"tR"


GIB = 1 << 30
FOUR = {"data/0": bytes(4)}
HOSTILE: dict[str, Callable[[], bytes]] = {
    "deflated": lambda: archive(b"N.", {"data/0": bytes(GIB // 16)}, zipfile.ZIP_DEFLATED),
    "a deflated pickle": lambda: archive(b"N" * 40_000_000 + b".", None, zipfile.ZIP_DEFLATED),
    "bytearray": lambda: archive(called("__builtin__.bytearray", long(4 * GIB)) + b"."),
    "bytearray of a tensor": lambda: archive(
        called("__builtin__.bytearray", tensor(1, 4 * GIB, 0)) + b".", FOUR
    ),
    "a storage's constructor": lambda: archive(
        called("torch.storage.UntypedStorage", long(GIB)) + b"."
    ),
    "a tensor's constructor": lambda: archive(called("torch.FloatTensor", long(GIB)) + b"."),
    "a new tensor": lambda: archive(name_of("torch.FloatTensor") + long(GIB) + b"\x85\x81."),
    "a storage longer than its member": lambda: archive(storage(GIB) + b".", FOUR),
    "a storage of a number": lambda: archive(storage(1, b"K\0") + b".", FOUR),
    "a tensor beyond its storage": lambda: archive(tensor(1, GIB) + b".", FOUR),
    "strides beyond the storage": lambda: archive(tensor(1, 2, GIB) + b".", FOUR),
    "an offset beyond the storage": lambda: archive(tensor(1, 1, 1, GIB) + b".", FOUR),
    "a quantized tensor, expanded": lambda: archive(quantized(GIB) + b".", FOUR),
    "items of a tensor": lambda: archive(tensor(1, 1) + tensor(1, GIB, 0) + b"K\1s.", FOUR),
    "a storage as two types": lambda: archive(
        storage(1) + storage(4, kind="Byte") + b"\x86.", FOUR
    ),
    "a state for a tensor": lambda: archive(
        tensor(1, 1) + b"(" + storage(1) + b"K\0" + long(GIB) + b"\x85K\1\x85tb.", FOUR
    ),
    "nested tuples as a key": lambda: archive(b"}" + b"K\1" + b"\x85" * 1_000_000 + b"Ns."),
    "empty sets": lambda: archive(b"(" + b"\x8f" * 1_000_000 + b"t."),
    "another protocol": lambda: archive(b"\x80\4N."),
}


def _twice() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("archive/data.pkl", b"\x80\2N.")
        with pytest.warns(UserWarning, match="Duplicate"):
            z.writestr("archive/data.pkl", b"\x80\2].")
    return out.getvalue()


def _overlapping() -> bytes:
    """Many members that are one run of bytes."""
    names = [f"data/{i}" for i in range(2000)]
    pids = b"".join(storage(1 << 18, text(n.removeprefix("data/"))) for n in names)
    whole = archive(b"(" + pids + b"t.", dict.fromkeys(names[:1], bytes(1 << 20)))
    with zipfile.ZipFile(io.BytesIO(whole)) as z:
        infos = {i.filename: i for i in z.infolist()}
        start = z.start_dir
    out = io.BytesIO(whole)
    with zipfile.ZipFile(out, "a") as z:
        first = infos["archive/data/0"]
        for name in names[1:]:
            info = zipfile.ZipInfo(f"archive/{name}")
            info.header_offset, info.CRC = first.header_offset, first.CRC
            info.file_size = info.compress_size = first.file_size
            z.filelist.append(info)
        z._didModify, z.start_dir = True, start
    return out.getvalue()


def _legacy() -> bytes:
    out = io.BytesIO()
    torch.save({"x": torch.ones(3)}, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


HOSTILE |= {"a member twice": _twice, "members in one place": _overlapping, "legacy": _legacy}


def publish(folder, data: bytes) -> None:
    forger = Forger(folder)
    digests = b"".join(forger.add(data[i : i + CHUNK]) for i in range(0, len(data), CHUNK))
    forger.publish({"s": forger.tree(["", ["v", [len(data), b"", digests, 0], "object"]])})


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_refused_before_it_takes_memory(name, tmp_path, cache_dir):
    data = HOSTILE[name]()
    publish(tmp_path / "store", data)

    def work() -> None:
        limit_memory()
        with pytest.raises(UnsupportedTypeError, match="is not read without permission"):
            Snapshot(str(tmp_path / "store/evil")).read_object("s")

    assert in_child(work) == 0


def test_a_caller_who_trusts_may_have_what_is_refused_unasked(tmp_path, cache_dir):
    data = archive(called("__builtin__.bytearray", b"K\5") + b".")
    publish(tmp_path / "store", data)
    snapshot = Snapshot(str(tmp_path / "store/evil"))
    with pytest.raises(UnsupportedTypeError, match="allow_pickle=True"):
        snapshot.read_object("s")
    assert snapshot.read_object("s", allow_pickle=True) == bytearray(5)
