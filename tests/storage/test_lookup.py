"""The ladder of places, on a disk and in a bucket: by which rung a chunk is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from casnap import Store
from casnap.backends import Backend, LocalBackend
from casnap.errors import DamagedError
from casnap.format.digest import Digest, digest_of
from casnap.format.records import PackId, Place, Segment, SegmentId, pack_key
from casnap.storage.lookup.lookup_order import Bases, Left, Lookup, Rung, Step, lookup_at
from casnap.storage.packs.chunk_reads import Want
from casnap.storage.reading.repository import Repository
from casnap.storage.writing.segments import drop_packs
from tests.support.faulty import FaultyBackend
from tests.support.random_segments import put_segment, records_at_random
from tests.support.remote import RemoteDouble
from tests.support.written import change_of, commit, put_next_root

RAW = os.urandom(100_000)
CHUNK = digest_of(RAW)
LOCAL = ("hinted", "indexed", "in_other_places", "at_newer_roots", "by_new_index")
REMOTE = ("hinted", "in_hints", "in_ranges", *LOCAL[1:])
Open = Callable[[], Backend]


class Traced:
    """A lookup that tells which of its rungs gave places.

    Attributes:
        trace: The names of the rungs, in order, once for each step.
        meanwhile: What happens to the store before the first step of the index is read.
    """

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self.newest, self.index = lookup.newest, lookup.index
        self.node, self.note_damage = lookup.node, lookup.note_damage
        self.trace: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def bases(self) -> Bases:
        return self._lookup.bases()

    def rungs(self) -> Sequence[Rung]:
        return [self._traced(name_of(rung), rung) for rung in self._lookup.rungs()]

    def _traced(self, name: str, rung: Rung) -> Rung:
        def steps(left: Left) -> Iterator[Step]:
            for step in rung(left):
                if step.places:
                    self.trace.append(name)
                if name == "indexed":
                    self.meanwhile()
                yield step

        return steps


def name_of(rung: Rung) -> str:
    return str(getattr(rung, "__name__", "")).lstrip("_")


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Return what opens a store that is not there yet."""
    if request.param == "disk":
        return lambda: LocalBackend(tmp_path / "store")
    return lambda: RemoteDouble(str(tmp_path))


def put(place: Open) -> Place:
    """Store the chunk in a pack of its own; return where it is."""
    backend = place()
    store = Store(backend).make()
    with change_of(store) as session:
        session.new_packs.copy(CHUNK, memoryview(bytearray(RAW)), is_node=False)
        commit(session)
    index, view = store._view.repository.index, store._view.repository.view()
    return max(index.find_all(view, CHUNK), key=lambda there: there.pack)


def put_other(place: Open) -> list[Digest]:
    raw = os.urandom(5000)
    with change_of(Store(place())) as session:
        session.new_packs.copy(digest_of(raw), memoryview(bytearray(raw)), is_node=False)
        commit(session)
    return [digest_of(raw)]


def opened(place: Open) -> tuple[Repository, Traced]:
    backend = place()
    store = Repository(backend)
    lookup = Traced(store.lookup)
    store.lookup = lookup
    return store, lookup


def read(store: Repository, hint: Place | None = None) -> None:
    """Read the chunk, and check what comes."""
    came: list[bytes] = []
    want = Want(CHUNK, -1, lambda raw: came.append(bytes(raw)), "")
    store.fetch([want], hints=None if hint is None else {CHUNK: hint})
    assert came == [RAW]


def damage(place: Open, there: Place) -> None:
    backend, key = place(), pack_key(there.pack)
    content = bytearray(backend.read(key, 1 << 20))
    content[there.offset] ^= 1
    backend.delete(key)
    backend.write(key, bytes(content))


def test_the_order(place: Open) -> None:
    backend = place()
    rungs = lookup_at(backend, Store(backend).make()._view.repository.config).rungs()
    assert tuple(map(name_of, rungs)) == (REMOTE if backend.costly_requests else LOCAL)


def test_what_is_whole_is_read_where_the_index_has_it(place: Open) -> None:
    put(place)
    store, lookup = opened(place)
    read(store)
    assert lookup.trace == ["indexed"]


@pytest.mark.parametrize("is_true", [True, False])
def test_a_hint_is_tried_first_and_not_believed(
    place: Open, cache_dir: Path, is_true: bool
) -> None:
    there = put(place)
    store, lookup = opened(place)
    if is_true:
        # What the host does not know it need not learn.
        cache_dir.rename(cache_dir.with_name("another-host"))
        cache_dir.mkdir()
        read(store, there)
        assert lookup.trace == ["hinted"]
        assert not store.index.knows(store.newest())
    else:
        read(store, msgspec.structs.replace(there, offset=there.offset + 8))
        assert lookup.trace == ["hinted", "indexed"]
        [found] = store.index.find(store.view(), [CHUNK], only_live=True)
        assert found == there


def test_what_a_host_has_read_of_the_index_it_does_not_read_again(
    place: Open, cache_dir: Path
) -> None:
    put(place)
    cache_dir.rename(cache_dir.with_name("another-host"))
    cache_dir.mkdir()
    for looks in (True, False):
        backend = FaultyBackend(place())
        read(Repository(backend))
        assert any(key.startswith("index/") for _, key in backend.log) == looks


def test_what_is_damaged_is_read_elsewhere(place: Open) -> None:
    put(place)
    put(place)
    store, lookup = opened(place)
    [first] = store.index.find(store.view(), [CHUNK])
    assert first is not None
    damage(place, first)
    read(store)
    assert lookup.trace == ["indexed", "in_other_places"]


def test_what_a_collector_has_moved_is_read_where_it_is_now(place: Open) -> None:
    old = put(place)
    store, lookup = opened(place)

    def move() -> None:
        lookup.meanwhile = lambda: None
        put(place)
        other = Repository(place())
        view = other.view()
        segments = drop_packs(other, view, [PackId(old.pack)])
        assert put_next_root(other.backend, view.root, segments=segments)
        other.backend.delete(pack_key(old.pack))

    lookup.meanwhile = move
    read(store)
    assert lookup.trace == ["indexed", "at_newer_roots"]


def test_an_index_that_lacks_a_chunk_is_made_anew(place: Open, cache_dir: Path) -> None:
    """The cache of this host says that the segment has no record."""
    put(place)
    cache_dir.rename(cache_dir.with_name("another-host"))
    cache_dir.mkdir()
    store, lookup = opened(place)
    for ref in store.newest().segments:
        packs = store.index.segment(ref).packs
        store.index.cache.learn(SegmentId(ref.id), packs, [])
    read(store)
    assert lookup.trace == ["by_new_index"]


def test_what_is_on_no_rung_is_lost_and_all_else_is_read(place: Open) -> None:
    damage(place, put(place))
    another = put_other(place)
    store, lookup = opened(place)
    came: list[bytes] = []
    wants = [Want(d, -1, lambda raw: came.append(bytes(raw)), d.hex()) for d in (CHUNK, *another)]
    with pytest.raises(DamagedError, match="differ from what was written") as e:
        store.fetch(wants)
    assert e.value.paths == (CHUNK.hex(),)
    assert list(map(digest_of, came)) == another
    assert lookup.trace == ["indexed", "by_new_index"]
    # No take of this process relies on it.
    assert store.index.find(store.view(), [CHUNK], only_live=True) == [None]


def test_what_is_nowhere_is_said_to_be(place: Open) -> None:
    put(place)
    store, lookup = opened(place)
    absent = Digest(os.urandom(32))
    with pytest.raises(DamagedError, match="it is in no pack of the index"):
        store.fetch([Want(absent, -1, lambda _: None, "")])
    assert lookup.trace == []


def test_a_few_chunks_of_a_large_index_in_a_bucket_are_found_in_ranges(
    tmp_path: Path, cache_dir: Path
) -> None:
    backend = RemoteDouble(str(tmp_path))
    there = put(lambda: RemoteDouble(str(tmp_path)))
    large = records_at_random(160_000)
    records = [*large.records, (CHUNK, there)]
    packs = (*large.packs, PackId(there.pack))
    ref = put_segment(backend, Segment(packs, records))
    assert put_next_root(backend, Repository(backend).newest(), segments=(ref,))
    cache_dir.rename(cache_dir.with_name("another-host"))
    cache_dir.mkdir()
    store, lookup = opened(lambda: RemoteDouble(str(tmp_path)))
    read(store)
    assert lookup.trace == ["in_ranges"]
    assert not store.index.knows(store.newest())
