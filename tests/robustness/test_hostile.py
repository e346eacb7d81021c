"""Hostile stores: all seals are right, and the content is not true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zstandard

from casnap import StateDict, Store
from casnap.errors import CasnapError, DamagedError, MismatchError
from casnap.format.codec import Codec, decompress
from casnap.format.records import (
    encode,
    root_key,
    seal,
)
from tests.support.faults import CHUNK, in_child
from tests.support.forger import (
    ABSENT,
    GOOD,
    HUGE,
    STATE,
    Forger,
    assert_refused,
    branch,
    chunks,
    container,
    inline,
    limit_memory,
    one_plane,
    tensor,
    value,
)
from tests.support.mutations import Parts

pytestmark = pytest.mark.sampled


@pytest.fixture
def forger(tmp_path: Path, cache_dir: Path) -> Forger:
    return Forger(tmp_path / "store")


def test_what_is_forged_well_is_read(forger: Forger) -> None:
    """A forged snapshot without a fault is read: the cases below are refused for their fault."""
    raw = bytes(range(200)) * 2
    places = forger.add(raw), forger.add(raw[::-1], one_plane(raw[::-1]), codec=1)
    items = [
        ["", container("list", 2)],
        *([f"/{i}", tensor([100], chunks(400, d), "int32")] for i, d in enumerate(places)),
    ]
    forger.publish({"s": branch(forger, ["", forger.tree(*items), 3])})
    found = Store(forger.folder)["evil"].read_object("s")
    assert [x.numpy().tobytes() for x in found] == [raw, raw[::-1]]
    state = {"s": StateDict()}
    with pytest.raises(MismatchError, match="a value of kind list"):
        Store(forger.folder)["evil"].restore(state)  # a StateDict takes no list
    assert [s.name for s in Store(forger.folder).snapshots()] == ["evil"]


# --- entries ----------------------------------------------------------------------------------


def quantized(scheme: str, scales: bytes, zeros: bytes, axis: int) -> list[Any]:
    return tensor([4], inline(b"1234"), "qint8", quantization=[scheme, scales, zeros, axis])


def nested_key(depth: int) -> Any:
    key: Any = 1
    for _ in range(depth):
        key = ["tuple", encode([key])]
    return key


F = bytes(16)  # four float32
# More of what makes no sense, and that a check finds it: tests/maintenance/test_entry_checks.py;
# each number of all records: tests/format/test_forged.py.
ENTRIES: dict[str, Any] = {
    "huge_shape": tensor([1 << 30, 1 << 30], chunks(HUGE, ABSENT)),
    "large_shape": tensor([1 << 40], chunks(1 << 42, ABSENT * 4)),
    "negative_length": tensor([-4], [-16, b"", b"", 0]),
    "huge_empty_shape": tensor([0, (1 << 64) - 1], inline(b"")),
    "length_of_2_to_the_62": tensor([4], chunks(HUGE, ABSENT)),
    "fractional_digest": tensor([100], chunks(400, ABSENT + b"x")),
    "short_digest": tensor([100], chunks(400, b"x")),
    "no_digest": tensor([100], chunks(400, b"")),
    "too_many_digests": tensor([100], chunks(400, ABSENT * 5)),
    "absent_chunk": tensor([100], chunks(400, ABSENT)),
    "absent_list": tensor([100_000], chunks(400_000, ABSENT, 1)),
    "depth_of_1000": tensor([100_000], chunks(400_000, ABSENT, 1000)),
    "negative_depth": tensor([100_000], chunks(400_000, ABSENT, -1)),
    "huge_depth": tensor([100_000], chunks(400_000, ABSENT, HUGE)),
    "unknown_dtype": tensor([4], inline(F), "float99"),
    "sub_byte_dtype": tensor([4], inline(F), "quint4x2"),
    "attribute_as_dtype": tensor([4], inline(F), "save"),
    "unknown_kind": tensor([4], inline(F), kind="evil"),
    "dtype_of_objects": tensor([2], inline(F), "|O8", "ndarray"),
    "dtype_of_records": tensor([2], inline(F), "f4,O", "ndarray"),
    "dtype_of_long_items": tensor([1], inline(F), "|V99999", "ndarray"),
    "dtype_of_no_bytes": tensor([1], inline(b""), "|V0", "ndarray"),
    "unknown_scheme": quantized("evil", b"", b"", 0),
    "huge_axis": quantized("per_channel_affine", bytes(32), bytes(32), HUGE),
    "unknown_value": value("evil", b"x"),
    "malformed_dtype": value("dtype", b"save"),
    "malformed_device": value("device", b"evil:-1"),
    "malformed_list": value("packed_list", b"\xdd\xff\xff\xff\xff"),
    "unhashable_set": value("packed_set", encode([[1]])),
    "enum_of_no_class": value("enum", encode(["os", "system", "ls"])),
    "malformed_object": value("object", b"PK\3\4"),
    "pickle": value("pickle", b"cos\nsystem\n(S'true'\ntR."),
    "pickle_as_object": value("object", b"cos\nsystem\n(S'true'\ntR."),
    "value_of_2_to_the_62": ["v", chunks(HUGE, ABSENT * 4), "bytes"],
    "value_of_negative_length": ["v", [-1, b"", b"", 0], "bytes"],
    "endless_list": container("list", HUGE),
    "unknown_container": container("evil", 0),
    "missing_children": container("dict", 1, encode([["a"], None, None])),
    "endless_keys": container("dict", 1, b"\x93\xdd\xff\xff\xff\xff"),
    "nested_keys": ["c", chunks(70_000, ABSENT * 2), "dict", 1],
    "unknown_key": container("dict", 1, encode([[["evil", b""]], None, None])),
    "unknown_factory": container("defaultdict", 0, encode([[], "system", None])),
    "namedtuple_of_code": container("namedtuple", 1, encode(["os", "x", ["a b"]])),
    "hollow_sparse": container("sparse_coo", 2, encode([[HUGE, HUGE], True, False, False])),
    "no_entry": None,
    "no_tag": ["z", 1],
    "text_as_shape": ["t", inline(F), "float32", "abc"],
    "floats_as_shape": ["t", inline(F), "float32", [4.5]],
}


CHILDREN: dict[str, dict[str, Any]] = {
    "namedtuple_of_code": {"/x/a b": value("none", b"")},
    "hollow_sparse": {
        "/x/indices": tensor([2, 1], inline(bytes(16)), "int64"),
        "/x/values": tensor([2], inline(bytes(8))),
    },
}


@pytest.mark.parametrize("case", ENTRIES)
def test_hostile_entries(forger: Forger, case: str) -> None:
    spec = encode([["x"], None, None])
    items = {"": container("dict", 1, spec), "/x": ENTRIES[case], **CHILDREN.get(case, {})}
    tree = forger.tree(*map(list, sorted(items.items())))
    forger.publish({"s": tree})
    assert_refused(forger.folder)


@pytest.mark.parametrize("count", [HUGE, -1])
def test_a_container_of_a_rank_with_any_number_of_elements(forger: Forger, count: int) -> None:
    """A rank's own containers are read before the others, to tell which elements are its."""
    own = forger.tree(STATE, ["/x", container("list", count)])
    ranks = {"global": {"s": forger.tree(["/x/0", GOOD])}, "ranks": {"0": {"s": own}}}
    forger.publish({}, ranks)
    assert_refused(forger.folder)


def test_keys_nested_deeply(forger: Forger) -> None:
    spec = encode([[nested_key(3000)], None, None])
    assert len(spec) < CHUNK
    x = ["c", chunks(len(spec), forger.add(spec)), "dict", 1]
    forger.publish({"s": forger.tree(STATE, ["/x", x])})
    assert_refused(forger.folder)


def test_many_axes(forger: Forger) -> None:
    """A shape of very many axes is refused, or is a tensor; it is no crash."""
    x = tensor([1] * 100_000, inline(bytes(4)))
    forger.publish({"s": forger.tree(["", x])})
    found = []

    def work() -> None:
        try:
            found.append(Store(forger.folder)["evil"].read_object("s"))
        except CasnapError:
            return
        assert found[0].numel() == 1

    assert in_child(work) == 0


# --- rows and roots ---------------------------------------------------------------------------


def test_a_segment_that_a_root_names_twice(forger: Forger) -> None:
    forger.publish({"s": forger.tree(STATE, ["/x", GOOD])})
    parts = Parts(forger.folder)
    parts.put_root({**parts.root, "segments": 2 * parts.root["segments"]})
    assert_refused(forger.folder)
    assert not Store(forger.folder).check().ok


@pytest.mark.parametrize(
    "body", [b"", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", encode([1]), encode({"seq": 2})]
)
def test_roots_of_garbage(forger: Forger, body: bytes) -> None:
    forger.publish({"s": forger.tree(STATE)})
    (forger.folder / "casnap-store" / root_key(2)).write_bytes(seal(b"r", body))
    assert_refused(forger.folder)


# --- places and codecs ------------------------------------------------------------------------


def bombs() -> dict[str, bytes]:
    """Return planes that hold 1 GiB of zeros, and say 400 bytes, nothing, or the truth."""
    large = bytes(1 << 30)
    honest = zstandard.ZstdCompressor(level=1).compress(large)
    assert zstandard.get_frame_parameters(honest).content_size == len(large)
    at = honest.index(len(large).to_bytes(4, "little"))
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(large)
    lying = honest[:at] + (400).to_bytes(4, "little") + honest[at + 4 :]
    frames = {"honest": honest, "silent": silent, "lying": lying}
    return {case: one_plane(frame=frame) for case, frame in frames.items()}


@pytest.mark.parametrize("case", ["honest", "silent", "lying"])
def test_decompression_bombs(forger: Forger, case: str) -> None:
    """A chunk of 400 bytes that unfolds to a gigabyte is never unfolded."""
    bomb = bombs()[case]
    assert len(bomb) < CHUNK
    with pytest.raises(DamagedError):
        decompress(Codec.PLANES, memoryview(bomb), 400)
    chunk = forger.add(bytes(400), bomb, codec=Codec.PLANES)
    forger.publish({"s": forger.tree(STATE, ["/x", tensor([100], chunks(400, chunk))])})
    assert_refused(forger.folder)


def test_metadata_that_grow(forger: Forger) -> None:
    """Empty lists take one byte each in a node, and sixty in memory."""
    lists = b"\x81\xa1a\xdd" + (40 << 20).to_bytes(4, "big") + b"\x90" * (40 << 20)
    forger.row["metadata_node"] = forger.add(lists, one_plane(lists), codec=Codec.PLANES)
    forger.publish({"s": forger.tree(STATE, ["/x", GOOD])})

    def work() -> None:
        limit_memory()
        store = Store(forger.folder)
        with pytest.raises(DamagedError, match="too many"):
            store["evil"].metadata.user  # noqa: B018
        assert [d.kind for d in store.check().damages] == ["malformed"]

    assert in_child(work) == 0
