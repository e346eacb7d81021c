"""Reads of a host that knows nothing of a large remote store: few requests, whatever is stale."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from casnap import StateDict, Store
from casnap.backends import memory
from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.digest import Digest, digest_of
from casnap.format.hints import MOST_HINTS, MOST_HINTS_BYTES, decode_hints, encode_hints
from casnap.format.records import Place, encode, pack_key
from casnap.storage.commit_log.roots import newest_root
from tests.support.random_segments import put_segment, records_at_random
from tests.support.remote import RemoteDouble
from tests.support.written import put_next_root

SNAPSHOTS = 60
TENSOR = torch.arange(300_000.0)
NewHost = Callable[[], None]


@pytest.fixture
def name(tmp_path: Path) -> str:
    """Return the name of a store that is not there yet."""
    return str(tmp_path)


@pytest.fixture
def new_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewHost:
    """Return what makes this process one of a host that has seen nothing yet."""
    hosts = iter(range(1000))

    def change() -> None:
        folder = tmp_path / f"host-{next(hosts)}"
        folder.mkdir()
        monkeypatch.setenv("CASNAP_CACHE_DIR", str(folder))

    return change


def with_large_index(name: str) -> RemoteDouble:
    """Add segments that are too large to be read whole."""
    backend = RemoteDouble(name)
    root = newest_root(backend)
    more = [put_segment(backend, records_at_random(100_000, seed=n)) for n in range(2)]
    assert put_next_root(backend, root, segments=(*root.segments, *more)) is not None
    return backend


def take_many(name: str, count: int = SNAPSHOTS, first: int = 0) -> Store:
    store = Store(RemoteDouble(name))
    for number in range(first, first + count):
        tensors = {"w": TENSOR + number} if number in (0, count // 2) else {}
        store.take({"m": StateDict(step=number, **tensors)}, f"run/step_{10 * number}")
    return store


def beside(backend: RemoteDouble, tensor: torch.Tensor) -> int:
    """Return how many requests did not read the chunks of a tensor, which are the last ones."""
    chunks = -(-tensor.nbytes // (1 << 20))
    assert {kind for kind, _ in backend.log[-chunks:]} == {"get"}
    return backend.count - chunks


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> RemoteDouble:
    """Return a store of many snapshots, made by many commits, with a large index."""
    name = str(tmp_path_factory.mktemp("many"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CASNAP_CACHE_DIR", name)
        take_many(name)
        return with_large_index(name)


@pytest.fixture
def large(name: str, many: RemoteDouble) -> str:
    """Return the name of a copy of that store."""
    copy = RemoteDouble(name)
    for key in many.sizes(""):
        copy.write(key, memory.MemoryBackend.read(many, key))
    return name


def test_any_snapshot_is_read_by_few_requests(large: str, new_host: NewHost) -> None:
    """Its path in the table was written by many commits; without hints each node is a search."""
    for number in (0, SNAPSHOTS // 2):
        new_host()
        for most in (8, 2):
            backend = RemoteDouble(large)
            tensor = Store(backend)[f"run/step_{10 * number}"].read_object("m/w")
            assert torch.equal(tensor, TENSOR + number)
            assert beside(backend, tensor) <= most, backend.log
            assert backend.read_bytes - tensor.nbytes < 1 << 20
            assert not any(key.startswith("index") for _, key in backend.log)


def test_a_node_that_many_commits_refer_to_is_found_by_hints(name: str, new_host: NewHost) -> None:
    """A tensor that the last take did not write, of a key that it did."""
    store = Store(RemoteDouble(name))
    for number in range(5):
        store.take({"m": StateDict(step=number, w=torch.randn(2_000_000))}, f"{number}")
        torch.manual_seed(0)
    with_large_index(name)
    new_host()
    backend = RemoteDouble(name)
    Store(backend)["4"].read_object("m/w")
    assert not any(key.startswith("index") for _, key in backend.log), backend.log


def test_hints_that_a_collector_made_stale(large: str, new_host: NewHost) -> None:
    """What they lead to is gone, so it is looked for in the index."""
    store = Store(RemoteDouble(large))
    for number in range(1, SNAPSHOTS, 2):
        store.delete(f"run/step_{10 * number}")
    assert store.gc(grace=0, repack=1.0).deleted_packs
    for number in (0, SNAPSHOTS // 2):
        new_host()
        tensor = Store(RemoteDouble(large))[f"run/step_{10 * number}"].read_object("m/w")
        assert torch.equal(tensor, TENSOR + number)
    assert Store(RemoteDouble(large)).check(data=True).ok


@pytest.mark.parametrize("are_damaged", [False, True])
def test_hints_are_not_believed(
    name: str, new_host: NewHost, monkeypatch: pytest.MonkeyPatch, are_damaged: bool
) -> None:
    """A writer that lies in them, or a disk, costs requests."""

    def lie(places: Sequence[tuple[Digest, Place]], nodes: Sequence[bytes], pack: bytes) -> bytes:
        moved = [(d, msgspec.structs.replace(p, offset=p.offset + 8)) for d, p in places]
        return encode_hints(moved, [b"no node", *nodes], pack)[: 99 if are_damaged else None]

    monkeypatch.setattr("casnap.storage.writing.new_packs.encode_hints", lie)
    assert take_many(name, 3).check(data=True).ok
    with_large_index(name)
    new_host()
    tensor = Store(RemoteDouble(name))["run/step_0"].read_object("m/w")
    assert torch.equal(tensor, TENSOR)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": -1, "stored_size": -5, "codec": 9},
        {"pack": b"", "stored_size": 1 << 40, "raw_size": 1 << 40},
    ],
)
def test_hints_that_make_no_sense(
    name: str, new_host: NewHost, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    def lie(places: Sequence[tuple[Digest, Place]], nodes: Sequence[bytes], pack: bytes) -> bytes:
        return encode_hints(
            [(d, msgspec.structs.replace(p, **change)) for d, p in places], nodes, pack
        )

    monkeypatch.setattr("casnap.storage.writing.new_packs.encode_hints", lie)
    take_many(name, 3)
    with_large_index(name)
    new_host()
    tensor = Store(RemoteDouble(name))["run/step_0"].read_object("m/w")
    assert torch.equal(tensor, TENSOR)


def test_hints_have_bounds() -> None:
    """Numbers in them that are not so, and more than any writer writes, are no hints."""
    place = Place(bytes(16), 0, 100, 100, 0)
    digests = [digest_of(b"%d" % n) for n in range(MOST_HINTS + 1)]
    # No two are one run.
    places = [msgspec.structs.replace(place, offset=200 * n) for n in range(len(digests))]
    for count, are_some in ((1000, True), (MOST_HINTS + 1, False)):
        encoded = encode_hints(list(zip(digests, places, strict=False))[:count], [], b"")
        assert (decode_hints(encoded, bytes(16)) is not None) == are_some
    encoded = encode_hints([], [bytes(MOST_HINTS_BYTES)], b"")
    assert decode_hints(encoded, bytes(16)) is None
    for names, counts in ((12, [1]), (12, [1, 2]), (7, [1]), (0, [1 << 62])):
        body = [b"p" * 16, bytes(names), [[n, 0, 0, 1, 1, 0] for n in counts], []]
        assert decode_hints(b"CASNAPh1" + encode(body), bytes(16)) is None


def test_a_name_that_is_found_between_others() -> None:
    """Once by chance, at most; a search for one that is found everywhere ends."""
    digest, body = b"abcdef" + bytes(26), [[300, 0, 0, 1, 1, 0]]
    for between, is_found in ((1, True), (298, False)):
        names = b"xabcde" + b"fabcde" * between + b"fxxxxx" + b"abcdef" * (298 - between)
        encoded = encode([b"p" * 16, names, body, []])
        hints = decode_hints(b"CASNAPh1" + encoded, bytes(16))
        assert hints is not None
        assert (hints.find(digest) is not None) == is_found


def test_hints_name_a_damaged_chunk(large: str, new_host: NewHost) -> None:
    """The read says so, as from the index, and names the path."""
    store = Store(RemoteDouble(large))
    contents = store["run/step_0"].contents
    inner, entry, _ = contents.entry("m/w")
    digest = contents.chunks(inner, entry)[0][0]
    place = store._view.repository.index.find(store._view.repository.view(), [digest])[0]
    assert place is not None
    key = pack_key(place.pack)
    content = bytearray(memory.MemoryBackend.read(store._view.repository.backend, key))
    content[place.offset] ^= 1
    memory.MemoryBackend.write(store._view.repository.backend, key, bytes(content))
    new_host()
    with pytest.raises(DamagedError, match="m/w"):
        Store(RemoteDouble(large))["run/step_0"].read_object("m/w")


def test_hints_say_where_each_thing_lies() -> None:
    own, other = bytes(range(16)), bytes(16)
    digests = [digest_of(b"%d" % n) for n in range(300)]
    places = [Place(other, 4096 * 2 * n, 5000 + 65_536, 70_536, 1) for n in range(100)]
    places += [Place(other, n * (2 << 20), 1 << 20, 1 << 20, 0) for n in range(100)]
    places += [Place(own, 700 + 300 * n, 300, 300, 0) for n in range(100)]
    encoded = encode_hints(list(zip(digests, places, strict=True)), [b"a node"], own)
    hints = decode_hints(encoded, own)
    assert hints is not None
    assert [hints.find(d) for d in digests] == places
    assert hints.find(digest_of(b"another")) is None
    assert hints.nodes == [b"a node"]
    # In a pack that was moved past a fence, its own things lie in the new one.
    moved = decode_hints(encoded, b"m" * 16)
    assert moved is not None
    assert moved.find(digests[-1]) == msgspec.structs.replace(places[-1], pack=b"m" * 16)
    assert decode_hints(b"CASNAPh1\x90", own) is None
    assert decode_hints(b"", own) is None


# --- the copy of casnap.json in the root ---


@pytest.mark.parametrize("record", [{}, {"store_id": "x"}, {"store_id": "a" * 32}])
def test_a_record_in_a_root_that_makes_no_sense(
    name: str, new_host: NewHost, record: object
) -> None:
    store = take_many(name, 1)
    double = RemoteDouble(name)
    root = newest_root(double)
    assert root.store["store_id"] == store.id
    assert put_next_root(double, root, store=record) is not None
    new_host()
    backend = RemoteDouble(name)
    assert Store(backend).id == store.id
    assert ("get", "casnap.json") in backend.log


def test_a_remote_store_that_a_casnap_before_1_0_made(name: str, new_host: NewHost) -> None:
    take_many(name, 1)
    double = RemoteDouble(name)
    record = json.loads(double.read("casnap.json", 1 << 16))
    del record["digest"]
    double.delete("casnap.json")
    double.put_if_absent("casnap.json", json.dumps(record).encode())
    settings = {"record": record}
    assert put_next_root(double, newest_root(double), store={}, settings=settings) is not None
    new_host()
    for use in (lambda: Store(RemoteDouble(name)), lambda: take_many(name, 1)):
        with pytest.raises(UnsupportedFormatError, match=r"of a casnap before 1\.0"):
            use()


def test_a_record_in_a_root_that_differs_from_the_store(name: str, new_host: NewHost) -> None:
    take_many(name, 1)
    double = RemoteDouble(name)
    root = newest_root(double)
    record = {**root.store, "store_id": "b" * 32}
    assert put_next_root(double, root, store=record) is not None
    new_host()
    assert not Store(RemoteDouble(name)).check().ok
