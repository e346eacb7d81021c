"""A check finds what a read refuses of an entry, though all its bytes are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from casnap import StateDict, Store
from casnap.errors import CasnapError, DamagedError, UnsupportedFormatError
from casnap.format.records import encode
from casnap.maintenance.damage import Hurt
from casnap.state.flatten import MAX_NESTING
from tests.support.faults import CHUNK
from tests.support.forger import GOOD, STATE, Forger, chunks, container, inline, tensor, value
from tests.support.remote import RemoteDouble

F = bytes(16)
ONE = ["per_tensor_affine", bytes(8), bytes(8), 0]
TWO = ["per_channel_affine", bytes(16), bytes(16), 1]
PAIRS = [2, 2]


def quantized(parameters: Any, dtype: str = "qint8") -> list[Any]:
    return tensor(PAIRS, inline(bytes(4)), dtype, quantization=parameters)


MALFORMED: dict[str, Any] = {
    "another length": tensor([5], inline(F)),
    "length without bytes": tensor([4], [16, b"", b"", 0]),
    "bytes without length": ["v", [2, b"xyz", b"", 0], "bytes"],
    "negative shape": tensor([-2, -2], inline(F)),
    "axis below 0": quantized([*TWO[:3], -1]),
    "axis beyond the shape": quantized([*TWO[:3], 2]),
    "axis of a whole tensor": quantized([*ONE[:3], 1]),
    "scales": quantized([TWO[0], bytes(8), *TWO[2:]]),
    "zero points": quantized([*ONE[:2], b"", 0]),
    "no quantization": quantized(None),
    "quantization of integers": quantized(ONE, "uint8"),
    "scalar with a dimension": tensor([1], inline(bytes(4)), "<f4", "numpy_scalar"),
    "bool": value("bool", b"x"),
    "none": value("none", b"x"),
    "float": value("float", b"x"),
    "str": value("str", b"\xff"),
    "range": value("range", encode([1, 2])),
    "range of step 0": value("range", encode([1, 2, 0])),
    "date": value("date", b"99999-99-99"),
    "packed": value("packed_list", encode([[1]])),
    "key twice": container("dict", 2, encode([["a", "a"], None, None])),
    "keys alike": container("dict", 2, encode([[1, ["int", b"\1"]], None, None])),
    "no spec": container("dict", 0),
    "count": container("dict", 3, encode([["a"], None, None])),
    "negative count": container("dict", -1, encode([[], None, None])),
    "negative count of a list": container("list", -1),
    "spec of a list": container("list", 0, b"x"),
    "deque": container("deque", 9, encode([1])),
}


def published(folder: Path, *items: Any) -> Store:
    forger = Forger(folder)
    forger.keep_good()
    forger.publish({"s": forger.tree(STATE, *items)})
    return Store(folder, create=False)


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_entries(tmp_path: Path, cache_dir: Path, case: str) -> None:
    store = published(tmp_path / "store", ["/x", MALFORMED[case]])
    with pytest.raises(DamagedError, match="s/x"):
        store["evil"].read_object("s/x")
    for data in (False, True):
        damages = store.check(data=data).damages
        assert [d.kind for d in damages][:1] == ["malformed"], damages
        assert Hurt("evil", "s/x") in damages[0].hurts
    assert store.check(name="good", data=True).ok


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_quantized(tmp_path: Path, cache_dir: Path) -> None:
    floats = ["per_channel_affine_float_qparams", bytes(8), bytes(8), 1]
    for i, entry in enumerate([quantized(ONE), quantized(TWO), quantized(floats, "quint8")]):
        store = published(tmp_path / str(i), ["/x", entry])
        assert store.check(data=True).ok
        assert repr(store["evil"].read_object("s/x"))


@pytest.mark.parametrize("depth", [MAX_NESTING, MAX_NESTING + 1])
def test_containers_in_containers(tmp_path: Path, cache_dir: Path, depth: int) -> None:
    forger = Forger(tmp_path / "store")
    items = [["/0" * i, container("list", int(i < depth - 1))] for i in range(depth)]
    forger.publish({"s": forger.tree(*items)})
    store = Store(tmp_path / "store", create=False)
    report = store.check()
    assert report.ok == (depth == MAX_NESTING)
    if report.ok:
        store["evil"].read_object("s")
    else:
        with pytest.raises(DamagedError, match=r"more than 1,000 deep"):
            store["evil"].read_object("s")


def test_tensors_of_one_list_of_chunks(tmp_path: Path, cache_dir: Path) -> None:
    """That one makes sense does not say it of the next one."""
    forger = Forger(tmp_path / "store")
    payload = chunks(4 * CHUNK, forger.add(4 * forger.add(bytes(CHUNK))), 1)
    shape = [CHUNK]
    entries = [["/x", tensor(shape, payload)], ["/y", tensor(shape, payload, "float64")]]
    forger.publish({"s": forger.tree(["", dict_of("x", "y")], *entries)})
    [damage] = Store(tmp_path / "store", create=False).check().damages
    assert list(damage.hurts) == [Hurt("evil", "s/y")]


def dict_of(*keys: Any) -> Any:
    return container("dict", len(keys), encode([list(keys), None, None]))


LACKING: dict[str, list[Any]] = {
    "of a dict": [["/x", dict_of("a", "b")], ["/x/a", GOOD]],
    "of a list": [["/x", container("list", 3)], ["/x/0", GOOD], ["/x/2", GOOD]],
    "very many": [["/x", container("list", (1 << 63) - 1)], ["/x/0", GOOD]],
    "of another name": [["/x", container("tuple", 1)], ["/x/00", GOOD]],
    "as many of others": [["/x", dict_of("a", "b")], ["/x/a", GOOD], ["/x/c", GOOD]],
    "of one that is empty": [["/x", container("list", 1)]],
    "below an unknown key": [["/x", dict_of("a")], ["/x/b", GOOD]],
}


@pytest.mark.parametrize("case", LACKING)
def test_containers_that_lack_elements(tmp_path: Path, cache_dir: Path, case: str) -> None:
    store = published(tmp_path / "store", *LACKING[case])
    with pytest.raises(DamagedError, match="s/x"):
        store["evil"].read_object("s/x")
    [damage] = store.check(data=True).damages
    assert (damage.kind, list(damage.hurts)) == ("malformed", [Hurt("evil", "0/s/x")])


def test_values_in_chunks(tmp_path: Path, cache_dir: Path) -> None:
    """These are looked at where all bytes are."""
    folder = tmp_path / "store"
    forger = Forger(folder)
    text, spec = b"\xff" * 100, encode([["long key " * 10] * 2, None, None])
    items = [
        ["/x", ["v", chunks(len(text), forger.add(text)), "str"]],
        ["/y", ["c", chunks(len(spec), forger.add(spec)), "dict", 2]],
    ]
    forger.publish({"s": forger.tree(["", dict_of("x", "y")], *items)})
    store = Store(folder, create=False)
    assert store.check().ok
    hurt = {hurt.path for damage in store.check(data=True).damages for hurt in damage.hurts}
    assert hurt == {"s/x", "s/y"}


def test_elements_of_several_ranks(tmp_path: Path, cache_dir: Path) -> None:
    """What one rank has of its own is no element that the others lack, and the other way."""
    forger = Forger(tmp_path / "store")
    shared = forger.tree(["", dict_of("x", "y")], ["/x", GOOD])
    own, other = forger.tree(["/y", GOOD]), forger.tree(["/z", GOOD])
    forger.row = {"world_size": 2}
    ranks = {"0": {"s": own}, "1": {"s": other}}
    forger.publish({}, {"global": {"s": shared}, "ranks": ranks})
    [damage] = Store(tmp_path / "store").check(data=True).damages
    assert list(damage.hurts) == [Hurt("evil", "1/s")]


def test_what_is_unknown_is_no_damage(tmp_path: Path, cache_dir: Path) -> None:
    """A kind of key or a factory of a later version, and a class or a dtype that is not here."""
    read: dict[str, tuple[Any, type[CasnapError]]] = {
        "factory": (
            container("defaultdict", 0, encode([[], "deque", None])),
            UnsupportedFormatError,
        ),
        "key": (
            container("dict", 1, encode([[["uuid", b""]], None, None])),
            UnsupportedFormatError,
        ),
        "enum": (value("enum", encode(["no.module", "X", "A"])), CasnapError),
        "dtype": (value("dtype", b"float3"), CasnapError),
        "device": (value("device", b"abacus:1"), CasnapError),
    }
    for case, (entry, error) in read.items():
        store = published(tmp_path / case, ["/x", entry])
        with pytest.raises(error) as caught:
            store["evil"].read_object("s/x")
        assert not isinstance(caught.value, DamagedError)
        report = store.check(data=True)
        assert report.ok, report.damages
        assert bool(report.unsupported) == (error is UnsupportedFormatError)


def test_specs_that_are_lost(tmp_path: Path) -> None:
    """The index is not read anew for each: the survey knows where they are not whole."""
    backend = RemoteDouble(str(tmp_path))
    state = {f"d{i}": {f"a long name: {i} {j}": 0 for j in range(9)} for i in range(9)}
    Store(backend).take({"s": StateDict(state)}, "a")
    hurt_paths = set()
    for pack in backend.sizes("packs"):
        content = backend.read(pack)
        backend.delete(pack)
        backend.reset()
        for damage in Store(backend).check(data=True).damages:
            hurt_paths |= {hurt.path for hurt in damage.hurts}
        assert sum(key.startswith("index/") for kind, key in backend.log if kind == "get") == 1
        backend.write(pack, content)
    assert hurt_paths >= {f"s/d{i}" for i in range(9)}
