"""Every decoder, given random bytes and real records that were changed: typed errors, soon."""

from __future__ import annotations

import enum
import json
import os
import struct
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from casnap import NewStore, StateDict, Store
from casnap.backends import MemoryBackend
from casnap.cli.option_types import duration, share
from casnap.errors import CasnapError
from casnap.format.codec import Codec, compress, decompress
from casnap.format.digest import digest_of
from casnap.format.entries import KnownEntry, Manifest, TensorEntry, decode_entry
from casnap.format.names import check_name
from casnap.format.records import (
    CONFIG_KEY,
    PackId,
    Row,
    SealedSegment,
    StoreConfig,
    decode,
    decode_segment,
    encode,
    merged_segment,
    pack_key,
    read_pack_footer,
    root_key,
    seal,
)
from casnap.format.tree import Tree
from casnap.maintenance.full_index import FullIndex
from casnap.maintenance.survey import Survey
from casnap.state.flatten import flatten, inflate
from casnap.state.tensors import Leaf, allocate
from casnap.storage.commit_log.config import read_config
from casnap.storage.commit_log.roots import read_root
from casnap.storage.packs.footers import read_footer
from casnap.storage.snapshots.references import MANIFEST, TABLE, TREE, references
from tests.support.cli_calls import CHUNK
from tests.support.layouts import node_fields

SECONDS = 5.0
LARGE = 1 << 20
QUANTIZED = pytest.mark.filterwarnings("ignore:.*quantize")

Point = namedtuple("Point", "x y")


class Color(enum.Enum):
    """An enum that can be found."""

    RED = 1


class Decoder(NamedTuple):
    """What decodes something, and real examples of that."""

    examples: list[bytes]
    decode: Callable[[bytes], object]


def state() -> dict[str, Any]:
    """Return something of every kind."""
    eye = torch.eye(3)
    return {
        "tensors": [eye, eye.to_sparse(), eye.to_sparse_csr(), torch.nn.Parameter(eye)],
        "quantized": [
            torch.quantize_per_tensor(eye, 0.1, 2, torch.qint8),
            torch.quantize_per_channel(eye, torch.ones(3), torch.zeros(3), 0, torch.quint8),
        ],
        "numpy": [np.arange(3), np.float32(1), np.str_("é"), np.datetime64("2020-01-01", "D")],
        "values": [None, True, -5, 1.5, 2j, "é", b"x", bytearray(b"y"), range(1, 9, 2)],
        "others": [slice(1, None), timedelta(1, 2, 3), date(2020, 1, 1), datetime(2020, 1, 1)],
        "torch": [torch.float32, torch.strided, torch.device("cpu"), torch.Size([1, 2])],
        "more": [Path("a/b"), Color.RED, torch.per_tensor_affine, torch.contiguous_format],
        "packed": [list(range(1500)), {*range(1500)}, tuple(map(str, range(1500)))],
        "containers": [{1: 2, "a": {}, (1, "b"): 3, 2.5: 1}, defaultdict(list, {"x": [1]})],
        "yet more": [OrderedDict(b=1), Counter("aab"), deque([1], 3), Point(1, 2), {1, "x"}],
        "object": torch.nn.Linear(1, 1).state_dict(),
    }


class Parts:
    """The records of a store, by kind."""

    def __init__(self, store: Store, folder: Path) -> None:
        survey = Survey(store._view.repository)
        survey.run()
        self.roots = [
            p.read_bytes()[8:-32] for p in (folder / "casnap-store/roots" / "0").iterdir()
        ]
        self.segments = [p.read_bytes()[8:-32] for p in (folder / "casnap-store/index").iterdir()]
        self.footers: list[bytes] = []
        self.nodes: dict[str, list[bytes]] = defaultdict(list)
        for pack in survey.index.packs:
            content = (folder / "casnap-store" / pack_key(pack)).read_bytes()
            records = survey.index.of_pack(pack)
            end = max(place.offset + place.stored_size for _, place in records)
            self.footers.append(content[end:-32])
            if content[-40:-32] == b"CASNAPt1":
                for _, place in records:
                    node = content[place.offset : place.offset + place.stored_size]
                    self.nodes[node_fields(node)[0]].append(node)


def memory(key: str, content: bytes) -> MemoryBackend:
    backend = MemoryBackend(f"fuzzed-{os.urandom(8).hex()}")
    backend.put_if_absent(key, content)
    return backend


def forget(backend: MemoryBackend) -> None:
    backend._objects.clear()


def footer(head: bytes) -> object:
    sealed = head + digest_of(head)
    pack = PackId(bytes(16))
    backend = memory(pack_key(pack), sealed)
    try:
        read_footer(backend, pack, len(sealed))
    finally:
        forget(backend)
    return read_pack_footer(pack, sealed)


def root(body: bytes) -> object:
    backend = memory(root_key(1), seal(b"r", body))
    try:
        return read_root(backend, 1)
    finally:
        forget(backend)


def config(content: bytes) -> object:
    backend = memory(CONFIG_KEY, content)
    try:
        return read_config(backend)
    finally:
        forget(backend)


def tree(value_type: Any, kind: bytes) -> Callable[[bytes], object]:
    def read(node: bytes) -> object:
        digest = digest_of(node)
        decode_one = decode_entry if value_type is KnownEntry else None
        found: Tree[Any] = Tree(digest, lambda _: node, value_type, decode_one=decode_one)
        found.get("/x")
        list(found.items())
        return references(lambda _: node, kind + digest)

    def each(node: bytes) -> None:
        # Each part must be as careful as the others, so none hides behind another.
        for part in (read, lambda raw: references(lambda _: raw, kind + digest_of(raw))):
            part(node)

    return each


def segment(body: bytes) -> object:
    content = seal(b"s", body)
    error: CasnapError | None = None
    for read in (
        lambda: list(SealedSegment(content, "it").records()),
        lambda: list(SealedSegment(content, "it").records_of_deltas()),
        lambda: decode_segment(content, "it"),
        lambda: merged_segment([(content, "it")]),
        lambda: FullIndex([(content, "it")]),
    ):
        try:
            read()
        except CasnapError as e:
            error = e
    if error is not None:
        raise error
    return None


def manifest(raw: bytes) -> object:
    decode(raw, Manifest, "it")
    return references(lambda _: raw, MANIFEST + digest_of(raw))


def entry(raw: bytes) -> object:
    """Put a state together from one entry and, if that is a tensor, no more memory than said."""
    described, content = decode(raw, tuple[KnownEntry, bytes], "it")
    if isinstance(described, TensorEntry):
        if described.payload.nbytes > LARGE:
            return None
        return inflate("x", {"x": Leaf("x", described, allocate(described))})
    return inflate("x", {"x": Leaf("x", described, content)})


def containers(raw: bytes) -> object:
    """Put a state together from leaves all of which are there."""
    parts = decode(raw, list[tuple[str, KnownEntry, bytes]], "it")
    leaves = {path: Leaf(path, e, c) for path, e, c in parts if not isinstance(e, TensorEntry)}
    return inflate("s", leaves)


def checked_name(raw: bytes) -> object:
    name = raw.decode("utf-8", "surrogateescape")
    clean = check_name(name)
    assert check_name(clean) == clean
    assert os.path.normpath(f"/store/{clean}") == f"/store/{clean}"
    return clean


def number(convert: Callable[[str], float | None], most: float) -> Callable[[bytes], object]:
    def read(raw: bytes) -> object:
        found = convert(raw.decode("utf-8", "replace"))
        assert found is not None
        assert 0 <= found <= most
        return found

    return read


def leaf_bytes(leaf: Leaf) -> bytes:
    return leaf.content if isinstance(leaf.content, bytes) else b""


def decoders(folder: Path) -> dict[str, Decoder]:
    store = Store(folder, create=NewStore(chunk_size=CHUNK))
    for step in range(3):
        frozen = torch.arange(80_000)
        store.take(
            {"s": StateDict(frozen=frozen, x={f"{i:03}": step for i in range(130)})}, f"{step}"
        )
    store.delete("0")
    store.gc(grace=3600)
    parts = Parts(store, folder)
    leaves = [leaf for value in state().values() for leaf in flatten(value, "s")]
    wholes = [
        encode([(x.path, x.entry, leaf_bytes(x)) for x in flatten(value, "s")])
        for key, value in state().items()
        if key in ("values", "others", "torch", "containers", "yet more", "packed")
    ]
    lists = parts.nodes["list of digests"]
    trees = [*parts.nodes["leaf of a tree"], *parts.nodes["list of leaves"]]
    listed = {
        f"list of depth {depth}": Decoder(
            lists, lambda raw, d=bytes([depth]): references(lambda _: raw, d + digest_of(raw))
        )
        for depth in (1, 4)
    }
    return listed | {
        "root": Decoder(parts.roots, root),
        "segment": Decoder(parts.segments, segment),
        "footer": Decoder(parts.footers, footer),
        "manifest": Decoder(parts.nodes["manifest"], manifest),
        "tree": Decoder(trees, tree(KnownEntry, TREE)),
        "table": Decoder(parts.nodes["leaf of the table"] + trees[-1:], tree(Row, TABLE)),
        "entry": Decoder([encode([x.entry, leaf_bytes(x)]) for x in leaves], entry),
        "containers": Decoder(wholes, containers),
        "zstd": Decoder(
            [compress(bytes(range(200)) * 5) or b"", PLANES],
            lambda raw: decompress(Codec.PLANES, memoryview(raw), 1000),
        ),
        "config": Decoder([(folder / "casnap-store" / CONFIG_KEY).read_bytes()], config),
        "name": Decoder(["run/é/step_1".encode(), b"a/../b", b"x" * 255], checked_name),
        "duration": Decoder([b"1.5h", b"7d", b"0"], number(duration, 1e9 * 604_800)),
        "share": Decoder([b"50%", b"0.5%", b"0.05"], number(share, 1)),
    }


RAMP, FRAME = bytes(range(250)), zstandard.compress(bytes(250))
PLANES = struct.pack("<B4I", 4, 250, 250, len(FRAME), 250) + RAMP + RAMP + FRAME + RAMP

NAMES = [
    *("root", "segment", "footer", "manifest", "tree", "table", "list of depth 1"),
    *("list of depth 4", "entry", "containers", "zstd", "config", "name", "duration"),
    "share",
]
EXTREMES = [0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF]
Change = tuple[str, int, int, bytes]
CHANGES: st.SearchStrategy[list[Change]] = st.lists(
    st.tuples(
        st.sampled_from(["flip", "byte", "cut", "splice", "remove", "ones", "repeat"]),
        st.integers(0, 1 << 16),
        st.integers(0, 255),
        st.binary(max_size=12),
    ),
    max_size=4,
)


PLAIN = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
THINGS = st.recursive(
    PLAIN | st.text(max_size=9) | st.binary(max_size=40) | st.sampled_from(["l", "b", "t", "v"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)
RECORDS = THINGS.map(encode)
JSON = st.dictionaries(
    st.sampled_from(list(StoreConfig.__struct_fields__)), PLAIN | st.text() | st.lists(PLAIN)
).map(
    lambda change: json.dumps(
        {"digest": "blake3", "store_id": "0" * 32, "chunk_size": CHUNK} | change
    ).encode()
)


def changed(raw: bytes, changes: Iterable[Change]) -> bytes:
    """Return a record with bits flipped, parts removed, repeated or put in, or cut off."""
    for how, where, n, more in changes:
        at = where % (len(raw) + 1)
        head, rest = raw[:at], raw[at:]
        raw = {
            "flip": head + bytes(b ^ 1 << n % 8 for b in rest[:1]) + rest[1:],
            "byte": head + bytes([EXTREMES[n % len(EXTREMES)]]) + rest[1:],
            "cut": head,
            "splice": head + more + rest,
            "remove": head + rest[n:],
            "ones": head + b"\xff" * (1 << n % 4) + rest[1 << n % 4 :],
            "repeat": head + rest[: n + 1] + rest,
        }[how]
    return raw


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    found = decoders(tmp_path_factory.mktemp("fuzz") / "store")
    assert found.keys() == set(NAMES)
    return found


def attempt(decoder: Decoder, raw: bytes) -> bool:
    """Decode something; return whether it was taken."""
    started = time.process_time()
    try:
        decoder.decode(raw)
    except (CasnapError, click.BadParameter):
        return False
    finally:
        assert time.process_time() - started < SECONDS
    return True


def fuzz(decoder: Decoder, examples: int) -> int:
    count = 0

    @settings(max_examples=examples)
    @given(raw=st.binary(max_size=400) | RECORDS | JSON)
    def random_bytes(raw: bytes) -> None:
        nonlocal count
        count += 1
        attempt(decoder, raw)

    @settings(max_examples=examples * 3)
    @given(which=st.integers(0, 1 << 16), changes=CHANGES)
    def changed_records(which: int, changes: list[Change]) -> None:
        nonlocal count
        count += 1
        attempt(decoder, changed(decoder.examples[which % len(decoder.examples)], changes))

    random_bytes()
    changed_records()
    return count


@QUANTIZED
@pytest.mark.parametrize("name", NAMES)
def test_a_decoder(
    every: dict[str, Decoder], name: str, record_property: Callable[[str, int], None]
) -> None:
    record_property("examples", fuzz(every[name], 20))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@QUANTIZED
@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_for_longer(
    every: dict[str, Decoder], name: str, record_property: Callable[[str, int], None]
) -> None:
    record_property("examples", fuzz(every[name], 800))


@QUANTIZED
@pytest.mark.parametrize("name", NAMES)
def test_what_is_unchanged_is_read(every: dict[str, Decoder], name: str) -> None:
    """So the decoders are those of these records."""
    taken = [attempt(every[name], raw) for raw in every[name].examples]
    assert any(taken), name
