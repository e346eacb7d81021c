"""A large index of a remote store: a few chunks are looked up by ranges."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.errors import DamagedError
from casnap.format.digest import Digest
from casnap.format.records import (
    DeltaPlace,
    Record,
    Segment,
    SegmentId,
    SegmentRef,
    decode_segment,
    segment_key,
)
from casnap.storage.commit_log.roots import newest_root
from casnap.storage.lookup.segment_search import search
from casnap.storage.writing.segments import write_segments
from tests.support.random_segments import put_segment, records_at_random
from tests.support.remote import RemoteDouble
from tests.support.written import put_next_root

RECORDS = 160_000


def found_in(
    backend: RemoteDouble, ref: SegmentRef, digests: list[Digest], nbytes: int = -1
) -> Any:
    """Return the places that a search in one segment finds."""
    length = backend.size(segment_key(ref.id)) if nbytes < 0 else nbytes
    found = search(backend, [ref], {SegmentId(ref.id): length}, digests)
    assert all(ident == ref.id for where in found.values() for ident, _ in where)
    return {digest: [place for _, place in where] for digest, where in found.items()}


# --- the search alone ---


def test_every_record_is_found(tmp_path: Path) -> None:
    """The first, the last, and some between; what the segment does not have is not found."""
    backend = RemoteDouble(str(tmp_path))
    segment = records_at_random(20_000)
    ref = put_segment(backend, segment)
    order = sorted(segment.records, key=lambda record: record[0])
    asked = [order[0], order[-1], *order[:: len(order) // 50]]
    absent = Digest(os.urandom(32))
    for digest, place in asked:
        found = found_in(backend, ref, [digest, absent])
        assert found == {digest: [place], absent: []}


def test_all_places_of_a_digest_are_found(tmp_path: Path) -> None:
    backend = RemoteDouble(str(tmp_path))
    segment = records_at_random(20_000)
    digest, place = segment.records[0]
    more = [
        (digest, msgspec.structs.replace(place, offset=place.offset + n)) for n in range(1, 2000)
    ]
    ref = put_segment(backend, Segment(segment.packs, segment.records + more))
    found = found_in(backend, ref, [digest])[digest]
    assert len(found) == 2000


def test_places_of_deltas_are_found(tmp_path: Path) -> None:
    """Behind the records there are bases; where these begin is known without a request."""
    backend = RemoteDouble(str(tmp_path))
    segment = records_at_random(20_000)
    as_deltas = [
        (d, DeltaPlace(p.pack, p.offset, p.stored_size, p.raw_size, 2, d))
        for d, p in segment.records[::2]
    ]
    ref = put_segment(backend, Segment(segment.packs, [*as_deltas, *segment.records[1::2]]))
    lengths = {SegmentId(ref.id): backend.size(segment_key(ref.id))}
    for digest, place in (segment.records[0], segment.records[1], segment.records[19_998]):
        backend.reset()
        [(_, found)] = search(backend, [ref], lengths, [digest])[digest]
        assert backend.count <= 2
        assert (found.pack, found.offset) == (place.pack, place.offset)


def test_digests_that_are_not_spread_evenly_are_found_or_left_to_others(tmp_path: Path) -> None:
    """A forged store costs a bounded number of looks."""
    backend = RemoteDouble(str(tmp_path))
    segment = records_at_random(20_000)
    low = [(Digest(b"\0" * 8 + d[8:]), p) for d, p in segment.records]
    ref = put_segment(backend, Segment(segment.packs, low))
    lengths = {SegmentId(ref.id): backend.size(segment_key(ref.id))}
    backend.reset()
    digest = sorted(low)[15_000][0]
    assert set(search(backend, [ref], lengths, [digest])) == {digest}
    assert backend.count <= 4


@pytest.mark.parametrize("length", [0, 1000, 1_220_053, 1 << 40])
def test_a_segment_of_another_length_is_passed_over(tmp_path: Path, length: int) -> None:
    backend = RemoteDouble(str(tmp_path))
    segment = records_at_random(20_000)
    ref = put_segment(backend, segment)
    digest = segment.records[0][0]
    assert found_in(backend, ref, [digest], length) in (
        {digest: []},
        # A length that could be is believed; what lies there has another digest.
        {digest: [segment.records[0][1]]},
    )


# --- in a store ---


@pytest.fixture(autouse=True)
def without_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no hints that say where to look."""
    monkeypatch.setattr("casnap.storage.writing.new_packs.encode_hints", lambda *_: b"")


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteDouble:
    """Return a store of one snapshot, as a host sees it that has not met it before."""
    store = Store(RemoteDouble(str(tmp_path)))
    store.take({"m": StateDict(a=torch.arange(300_000.0), b=torch.ones(300_000))}, "first")
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(tmp_path / "another-host"))
    (tmp_path / "another-host").mkdir()
    return RemoteDouble(str(tmp_path))


def mixed_in(backend: RemoteDouble, lie: bool = False) -> None:
    """Put a root whose index is the store's own among many other records."""
    root = newest_root(backend)
    own = [decode_segment(backend.read(segment_key(ref.id)), "own") for ref in root.segments]
    others = records_at_random(RECORDS)
    records: list[Record] = [record for segment in own for record in segment.records]
    if lie:
        records = [(d, msgspec.structs.replace(p, offset=p.offset + 8)) for d, p in records]
    packs = (*others.packs, *(pack for segment in own for pack in segment.packs))
    ref = put_segment(backend, Segment(packs, [*others.records, *records]))
    assert put_next_root(backend, root, segments=(ref,)) is not None


def test_a_tensor_is_read_without_the_index(large: RemoteDouble) -> None:
    mixed_in(large)
    [index] = newest_root(large).segments
    nbytes = large.size(segment_key(index.id))
    large.reset()
    tensor = Store(large)["first"].read_object("m/a")
    assert torch.equal(tensor, torch.arange(300_000.0))
    read = large.read_bytes - tensor.nbytes
    assert read < nbytes // 4, large.log
    chunks = 2
    # A look at the segment, two windows, the ids of the packs.
    assert large.count - chunks <= 5 + 4, large.log


def test_chunks_of_a_tensor_are_looked_for_where_one_of_them_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not each of them in all segments."""
    name = str(tmp_path)
    backend = RemoteDouble(name)
    state = {"m": StateDict(a=torch.randn(2_000_000))}
    Store(backend, create=NewStore(chunk_size=256 << 10)).take(state, "first")
    mixed_in(backend)
    root = newest_root(backend)
    more = [put_segment(backend, records_at_random(20_000, seed=n)) for n in range(1, 7)]
    assert put_next_root(backend, root, segments=(*root.segments, *more)) is not None
    (tmp_path / "another-host").mkdir()
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(tmp_path / "another-host"))
    backend = RemoteDouble(name)
    tensor = Store(backend)["first"].read_object("m/a")
    assert torch.equal(tensor, state["m"]["a"])
    looks = [key for kind, key in backend.log if key.startswith("index/")]
    assert len(looks) <= 7 + 32 + 4, len(looks)


def test_a_record_that_lies_is_damage(large: RemoteDouble) -> None:
    mixed_in(large, lie=True)
    with pytest.raises(DamagedError, match="differ from what was written"):
        Store(large)["first"].read_object("m/a")


def test_a_restore_of_many_chunks_reads_the_index(large: RemoteDouble, tmp_path: Path) -> None:
    """To search it for each of them would take longer."""
    state = {f"w{i}": torch.full((20_000,), float(i)) for i in range(200)}
    Store(RemoteDouble(str(tmp_path))).take({"m": StateDict(**state)}, "many")
    mixed_in(large)
    target = {"m": StateDict(**{key: torch.zeros(20_000) for key in state})}
    Store(large)["many"].restore(target)
    assert all(torch.equal(target["m"][key], tensor) for key, tensor in state.items())


# --- the size of segments ---


@pytest.mark.slow
def test_no_segment_is_above_48_mib(tmp_path: Path) -> None:
    """The double refuses larger objects; each pack of the records lies in one segment."""
    backend = RemoteDouble(str(tmp_path))
    store = Store(backend)
    segment = records_at_random(1_500_000, packs=1500)
    refs = write_segments(store._view.repository, segment, 0)
    assert len(refs) == 3
    assert sum(ref.count for ref in refs) == 1_500_000
    parts = [decode_segment(backend.read(segment_key(ref.id)), "a part") for ref in refs]
    assert sorted(pack for part in parts for pack in part.packs) == sorted(segment.packs)
