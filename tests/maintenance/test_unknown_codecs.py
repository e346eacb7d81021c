"""What a later version stores with a codec of its own is not damaged: this version keeps it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.errors import UnsupportedFormatError
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of
from casnap.format.records import (
    PackId,
    Record,
    Segment,
    decode_segment,
    encode_segment,
    footer_length,
    pack_footer,
    pack_key,
    read_pack_footer,
)
from casnap.maintenance.damage import UNSUPPORTED
from tests.support.cli_calls import document, invoke
from tests.support.damaged import change, flip, forget_cache, listing_of

CHUNK = 64 << 10
LATER = 9
"""A codec that this version does not know."""
NEW, BOTH, OLD = (torch.arange(CHUNK // 4) + CHUNK * i for i in range(3))
NEW, BOTH, OLD = (each.to(torch.int32) for each in (NEW, BOTH, OLD))


def digest(tensor: torch.Tensor) -> Digest:
    return digest_of(tensor.numpy().tobytes())


def with_codec(records: list[Record], wanted: Digest, codec: int) -> list[Record]:
    return [(d, msgspec.structs.replace(p, codec=codec) if d == wanted else p) for d, p in records]


def set_codec(store: Path, cache_dir: Path, wanted: Digest, codec: int) -> None:
    """Have all places of a chunk name a codec, in packs and in segments."""
    for file in (store / "casnap-store/packs").rglob("?" * 32):
        content = file.read_bytes()
        records = read_pack_footer(PackId(bytes.fromhex(file.name)), content)
        kind = content[-DIGEST_SIZE - 2 : -DIGEST_SIZE - 1]
        footer = pack_footer(kind, with_codec(records, wanted, codec))
        file.unlink()
        file.write_bytes(content[: -footer_length(content)] + footer)
    for file in (store / "casnap-store/index").iterdir():
        segment = decode_segment(file.read_bytes(), file.name)
        records = with_codec(segment.records, wanted, codec)
        file.unlink()
        file.write_bytes(encode_segment(Segment(segment.packs, records)))
    forget_cache(cache_dir)


def opened(store: Path) -> Store:
    return Store(store, create=False)


@pytest.fixture(name="store")
def store_of_a_later_version(tmp_path: Path, cache_dir: Path) -> Path:
    """Return a store in which one chunk has a codec that this version does not know.

    The pack of that chunk holds more, of which one snapshot alone needs most.
    """
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)).make()
    more = torch.arange(4 * CHUNK, dtype=torch.float64)
    store.take({"m": StateDict(x=NEW, y=BOTH, more=more)}, "first")
    store.take({"m": StateDict(x=NEW, y=BOTH)}, "later")
    store.take({"m": StateDict(y=BOTH, z=OLD)}, "plain")
    set_codec(tmp_path / "store", cache_dir, digest(NEW), LATER)
    return tmp_path / "store"


def assert_kept(store: Path, cache_dir: Path) -> None:
    """Read as the later version does: to it the chunk is known, and whole."""
    set_codec(store, cache_dir, digest(NEW), 0)
    snapshot = opened(store)["later"]
    assert torch.equal(snapshot.read_object("m/x"), NEW)
    assert torch.equal(snapshot.read_object("m/y"), BOTH)
    report = opened(store).check(data=True)
    assert report.ok, report.damages
    assert not report.unsupported


@pytest.mark.parametrize("data", [False, True])
def test_a_check_finds_no_damage(store: Path, data: bool) -> None:
    report = opened(store).check(data=data)
    assert report.ok
    assert report.damages == []
    [unknown] = report.unsupported
    assert unknown.kind == UNSUPPORTED
    assert {(h.snapshot, h.path) for h in unknown.hurts} == {("first", "m/x"), ("later", "m/x")}
    assert opened(store).check(name="plain").unsupported == []


def test_a_repair_gives_nothing_up(store: Path, cache_dir: Path) -> None:
    newest = opened(store)._view.repository.newest()
    invoke("repair", store, "-y")
    assert document("repair", store, "-y")["ok"]
    assert opened(store)._view.repository.newest() == newest
    for _ in range(2):
        opened(store).gc(grace=0)
    assert_kept(store, cache_dir)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_repair_refuses_what_it_cannot_save(store: Path, cache_dir: Path, dry_run: bool) -> None:
    """What lies in a damaged pack cannot be copied out of it, nor be dropped with it."""
    index = listing_of(store)
    [pack] = {place.pack for place in index.of(digest(NEW))}
    victim = next(p for d, p in index.of_pack(PackId(pack)) if d not in (digest(NEW), digest(BOTH)))
    file = store / "casnap-store" / pack_key(pack)
    change(file, flip(victim.offset))
    newest = opened(store)._view.repository.newest()
    with pytest.raises(UnsupportedFormatError, match=r"nothing was given up.*[Uu]pdate casnap"):
        opened(store).repair(dry_run=dry_run)
    assert opened(store)._view.repository.newest() == newest
    change(file, flip(victim.offset))
    assert_kept(store, cache_dir)


def test_a_collection_keeps_it(
    store: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pack stays as a whole, however little of it is needed."""
    opened(store).delete("first")
    for _ in range(3):
        report = opened(store).gc(grace=0, repack=1.0)
    assert report.repacked_packs == 0
    # It was not even tried, each time again.
    assert "cannot be copied" not in caplog.text
    opened(store).take({"m": StateDict(y=BOTH + 1)}, "another")
    opened(store).gc(grace=0, repack=1.0)
    assert_kept(store, cache_dir)


def test_a_collection_that_goes_on_keeps_it(store: Path, cache_dir: Path) -> None:
    """One process that collects again and again looks only at what changed."""
    place = Store(store, create=False)
    place.gc(grace=0)
    place.delete("first")
    for step in range(3):
        place.take({"m": StateDict(y=BOTH + step)}, f"another/{step}")
        place.gc(grace=0, repack=1.0)
    assert_kept(store, cache_dir)


def test_a_take_does_not_rely_on_it(store: Path, cache_dir: Path) -> None:
    """Its row would not say what is needed to read it. The chunk is stored anew."""
    opened(store).take({"m": StateDict(x=NEW)}, "again")
    for name in ("again", "later"):
        assert torch.equal(opened(store)[name].read_object("m/x"), NEW)
    report = opened(store).check(data=True)
    assert report.ok
    assert [damage.hurts for damage in report.unsupported] == [{}]
    assert_kept(store, cache_dir)


def test_a_tree_that_cannot_be_read_stops_a_collection(store: Path, cache_dir: Path) -> None:
    """What it names is not known. Nothing is deleted, and the error says what to do."""
    top = Digest(opened(store)["plain"].row.manifest.digest)
    set_codec(store, cache_dir, top, LATER)
    assert torch.equal(opened(store)["first"].read_object("m/y"), BOTH)
    with pytest.raises(UnsupportedFormatError, match="update casnap"):
        opened(store).gc(grace=0)
    report = opened(store).check(data=True)
    assert report.ok
    hurts = {(h.snapshot, h.path) for damage in report.unsupported for h in damage.hurts}
    assert hurts == {("first", "m/x"), ("later", "m/x"), ("plain", "")}
    assert opened(store).repair().ok
    set_codec(store, cache_dir, top, 0)
    assert_kept(store, cache_dir)
