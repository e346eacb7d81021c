"""A check finds every damage, and names exactly what cannot be restored because of it."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import BackendError
from casnap.format.codec import Codec
from casnap.format.digest import Digest
from casnap.format.records import PACK_TAIL_SIZE, PackId, pack_key
from casnap.maintenance.check import CheckReport
from tests.support.cli_calls import invoke
from tests.support.damaged import (
    FROZEN,
    KEY,
    STEPS,
    broken,
    change,
    check,
    damage_chunk,
    damages,
    drop_from_index,
    expected,
    flip,
    forget_cache,
    forget_copies,
    listing_of,
    make,
    newest,
    objects_of,
    record_of,
)
from tests.support.faults import CHUNK, elsewhere, files
from tests.support.faulty import Call, Fault, FaultyBackend
from tests.support.written import change_of, commit, put_next_root

Hurts = set[tuple[str, str]]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that no test damages: three snapshots, the second a change of the first."""
    folder = tmp_path_factory.mktemp("pristine") / "store"
    make(folder)
    return folder


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "store"))


def hurts_of(report: CheckReport) -> Hurts:
    return {(hurt.snapshot, hurt.path) for hurt in report.hurts}


def everywhere(path: str) -> Hurts:
    return {(name, path) for name in STEPS}


def test_a_whole_store(store: Path) -> None:
    before = files(store)
    report = check(store)
    assert report.ok
    assert (report.snapshots, report.packs, report.root) == (3, 6, 3)
    assert report.read_bytes == report.orphans == report.temporary == 0
    assert report.sample is None
    told: list[tuple[str, int, int]] = []
    report = check(store, data=True, progress=lambda *call: told.append(call))
    assert report.ok
    assert report.read_bytes == report.stored_bytes > 500_000
    assert ("reading", report.stored_bytes, report.stored_bytes) in told
    phases = list(dict.fromkeys(what for what, _, _ in told))
    assert phases == ["reading the index", "looking at packs", "reading", "looking at snapshots"]
    assert files(store) == before


def test_compressed_chunks(tmp_path: Path) -> None:
    store = Store(tmp_path, create=NewStore(chunk_size=CHUNK, codec="zstd")).make()
    store.take({"s": StateDict(x=torch.zeros(100_000))}, "zeros")
    assert store.check(data=True).ok
    _, place = damage_chunk(tmp_path, torch.zeros(CHUNK // 4))
    assert place.codec == Codec.PLANES
    report = store.check(data=True)
    assert hurts_of(report) == {("zeros", "s/x")}
    assert store.check().ok


# --- packs ------------------------------------------------------------------------------------


def test_a_flipped_chunk(store: Path) -> None:
    digest, place = record_of(store, FROZEN)
    change(store / "casnap-store" / pack_key(place.pack), flip(place.offset + 5))
    assert check(store).ok
    [damage] = check(store, data=True).damages
    assert damage.kind == "changed"
    assert damage.object == pack_key(place.pack)
    assert damage.digest == digest.hex()
    assert {(h.snapshot, h.path) for h in damage.hurts} == everywhere(f"{KEY}/frozen")


@pytest.mark.parametrize("at", [-1, -PACK_TAIL_SIZE - 1])
def test_a_flipped_footer(store: Path, at: int) -> None:
    """It hurts no snapshot."""
    _, place = record_of(store, FROZEN)
    file = store / "casnap-store" / pack_key(place.pack)
    change(file, flip(file.stat().st_size + at))
    for data in (False, True):
        [damage] = check(store, data=data).damages
        assert (damage.kind, damage.object) == ("changed", pack_key(place.pack))
        assert "footer" in damage.message
        assert damage.hurts == {}


def test_a_missing_pack(store: Path) -> None:
    _, place = record_of(store, expected(1)["weight"][: CHUNK // 4])
    (store / "casnap-store" / pack_key(place.pack)).unlink()
    for data in (False, True):
        report = check(store, data=data)
        assert [(d.kind, d.object) for d in report.damages] == [("missing", pack_key(place.pack))]
        names = ("weight", "bias", "notes/1/text")
        assert hurts_of(report) == {("b", f"{KEY}/{name}") for name in names}


def test_a_damaged_tree_is_found_though_it_is_cached(store: Path) -> None:
    """A check believes the store alone, and needs no --data to read trees."""
    opened = Store(store).make()
    row = opened._view.row_of("b")
    assert opened["b"].get_manifest()
    for copies, hurt in enumerate([set(), {("b", "")}], 1):
        place = listing_of(store).of(Digest(row.manifest.digest))[copies - 1]
        change(store / "casnap-store" / pack_key(place.pack), flip(place.offset + 3))
        assert opened["b"].get_manifest()
        report = opened.check()
        assert hurts_of(report) == hurt
        assert [d.digest for d in report.damages] == [row.manifest.digest.hex()] * copies


def test_damages_of_one_copy_hurt_no_snapshot(store: Path) -> None:
    opened = Store(store).make()
    digest, place = record_of(store, FROZEN)

    with change_of(opened) as session:
        session.new_packs.copy(digest, memoryview(FROZEN.numpy()).cast("B"), is_node=False)
        commit(session)
    change(store / "casnap-store" / pack_key(place.pack), flip(place.offset))
    report = opened.check(data=True)
    assert hurts_of(report) == set()
    [damage] = report.damages
    assert (damage.object, damage.digest) == (pack_key(place.pack), digest.hex())
    assert "another copy is whole" in damage.message


def test_a_damage_that_nothing_needs(store: Path) -> None:
    digest, place = record_of(store, expected(1)["weight"][: CHUNK // 4])
    opened = Store(store).make()
    opened.delete("b")
    change(store / "casnap-store" / pack_key(place.pack), flip(place.offset))
    [damage] = opened.check(data=True).damages
    assert damage.digest == digest.hex()
    assert "nothing needs it" in damage.message


def test_what_the_storage_refuses(store: Path) -> None:
    """One chunk that cannot be read does not make its neighbours bad."""
    digest, place = record_of(store, FROZEN)
    sector = place.offset + 4096

    def refuse(call: Call) -> object:
        if any(at <= sector < at + len(target) for at, target in call.arguments[0]):
            raise BackendError(f"{call.key}: Input/output error")
        return call.go()

    fault = Fault(refuse, "read_into", pack_key(place.pack), times=None)
    [damage] = Store(FaultyBackend(LocalBackend(store), fault)).check(data=True).damages
    assert (damage.kind, damage.digest) == ("unreadable", digest.hex())


def test_what_goes_while_it_is_looked_at_is_no_damage(store: Path) -> None:
    """Each time the check looks, a collector has replaced what it needs; yet all is whole."""
    others = Store(store).make()

    @elsewhere
    def go_on(what: str, done: int, _total: int) -> None:
        if (what, done) == ("looking at packs", 0):
            others.take({KEY: StateDict(x=torch.randn(CHUNK))}, "often", overwrite=True)
            others.gc(grace=0)

    go_on("looking at packs", 0, 0)
    assert check(store, progress=go_on).ok
    digest, place = record_of(store, FROZEN)
    change(store / "casnap-store" / pack_key(place.pack), flip(place.offset))
    [damage] = check(store, data=True, progress=go_on).damages
    assert damage.digest == digest.hex()


def test_what_is_missing_is_missing_though_others_go_on(store: Path) -> None:
    """A chunk that is in no pack of the index: the report names no file, but the snapshots hurt."""
    opened = Store(store).make()
    _, place = record_of(store, FROZEN)
    drop_from_index(opened, place.pack)

    @elsewhere
    def go_on(what: str, _done: int, _total: int) -> None:
        if what == "looking at snapshots":
            opened.take({KEY: StateDict(x=1)}, "often", overwrite=True)

    found = check(store, progress=go_on)
    assert everywhere(f"{KEY}/frozen") <= hurts_of(found)


# --- segments and roots -----------------------------------------------------------------------


def test_a_missing_segment(store: Path) -> None:
    """What only it listed is blamed on it."""
    file = sorted((store / "casnap-store/index").iterdir())[0]
    file.unlink()
    report = check(store, data=True)
    assert [(d.kind, d.object) for d in report.damages] == [("missing", f"index/{file.name}")]
    paths = ("exact", "frozen", "notes/0")
    assert hurts_of(report) >= {("a", ""), *(("b", f"{KEY}/{path}") for path in paths)}


def test_the_newest_root(store: Path) -> None:
    opened = Store(store).make()
    change(newest(store), flip(30))
    [damage] = opened.check().damages
    assert (damage.kind, damage.object, damage.hurts) == ("changed", "roots/0/3", {})
    assert "its copy stands in for it" in damage.message
    forget_copies(store)
    [damage] = opened.check().damages
    assert (damage.kind, damage.object) == ("unreadable", "roots/0/3")
    assert "Restore this file from a backup; never delete it" in damage.message


def test_needed_but_condemned(store: Path) -> None:
    opened = Store(store).make()
    _, place = record_of(store, FROZEN)
    root = opened._view.repository.newest()
    assert put_next_root(
        opened._view.repository.backend, root, condemned={place.pack: root.seq + 1}
    )
    [damage] = opened.check(data=True).damages
    assert (damage.kind, damage.object) == ("condemned", pack_key(place.pack))
    assert ("run/c", f"{KEY}/frozen") in {(h.snapshot, h.path) for h in damage.hurts}


def test_known_to_be_lost_and_not_listed(store: Path) -> None:
    """Chunks of a pack that left the index are missing, or lost if the root says so."""
    opened = Store(store).make()
    digest, place = record_of(store, FROZEN)
    drop_from_index(opened, place.pack, lost=digest)
    report = opened.check()
    kinds = {d.digest: d.kind for d in report.damages}
    assert kinds.pop(digest.hex()) == "lost"
    assert set(kinds.values()) == {"missing"}
    assert hurts_of(report) >= everywhere(f"{KEY}/frozen")
    assert report.orphans > 1


def test_what_is_left_over(store: Path) -> None:
    left = store / "casnap-store" / pack_key(PackId(b"\0" * 5 + b"\1" + os.urandom(10)))
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(bytes(1000))
    (store / "casnap-store/tmp").mkdir(exist_ok=True)
    (store / "casnap-store/tmp" / os.urandom(12).hex()).write_bytes(bytes(50))
    (store / "casnap-store/packs" / "README").write_text("not ours")
    report = check(store)
    assert report.ok
    assert (report.orphans, report.orphan_bytes) == (1, 1000)
    assert (report.temporary, report.temporary_bytes) == (1, 50)
    assert "collections free what is left over" in invoke("check", store).stdout


# --- all of it --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["packs/ab/.casnap-0a", "index/old", "roots/0/1.bak", "backup/packs/x", "tmp/mine", ""]
)
def test_files_that_casnap_does_not_know(store: Path, key: str) -> None:
    """No collection deletes them, so the user is told; `tmp/` is counted by itself."""
    if key:
        path = store / "casnap-store" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    report = Store(store).check()
    assert report.ok
    told = "".join(report.warnings)
    if key in ("tmp/mine", ""):
        assert told == ""
    else:
        assert f"casnap does not know: {key.removesuffix('/packs/x')}. " in told


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_named_is_what_cannot_be_restored(
    pristine: Path, tmp_path: Path, cache_dir: Path, seed: int
) -> None:
    """For damage to any file, the snapshots named are exactly those that cannot be restored."""
    choose = random.Random(seed)
    store = tmp_path / "store"
    keys = [p.relative_to(pristine) for p in objects_of(pristine) if p.name != "casnap.json"]
    for key in keys:
        if key == newest(pristine).relative_to(pristine):
            continue
        for damage in choose.sample(list(damages(pristine / key, choose)), 3):
            shutil.rmtree(store, ignore_errors=True)
            shutil.copytree(pristine, store)
            change(store / key, damage)
            forget_cache(cache_dir)
            report = check(store, data=True)
            named = {snapshot for snapshot, _ in hurts_of(report)}
            forget_cache(cache_dir)
            cannot = broken(store)
            if any("is as of root" in warning for warning in report.warnings):
                # Files are missing, and what an older root has can be read all the same.
                assert "*" in named
                assert cannot < set(STEPS)
            else:
                assert cannot == (set(STEPS) if "*" in named else named), key


def test_a_pack_ends_without_a_gap_where_the_last_chunks_were_known(tmp_path, monkeypatch):
    # One hashing thread comes to the copy when all that it holds is in the pack already.
    monkeypatch.setattr("casnap.take.hashing.cores", lambda: 1)
    store = Store(tmp_path / "store").make()
    tensor = torch.randint(0, 255, (9, 1_000_003), dtype=torch.uint8)
    store.take({"model": StateDict(x=tensor, y=tensor.clone())}, "a")
    assert store.check(data=True).damages == []
