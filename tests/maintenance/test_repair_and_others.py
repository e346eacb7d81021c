"""A repair that is not alone harms nothing; what is lost it finds in other stores and the cache."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from casnap import NewStore, StateDict, Store
from casnap.backends import LocalBackend
from casnap.format.digest import Digest, digest_of
from casnap.format.records import PackId, pack_key
from casnap.maintenance.repair import RepairReport
from casnap.storage.collecting.gc import GcOptions, collect
from tests.support.damaged import (
    FROZEN,
    KEY,
    STEPS,
    WEIGHT,
    broken,
    change,
    check,
    content,
    copied_store,  # noqa: F401 - a fixture
    damage_chunk,
    damage_everywhere,
    damages,
    expected,
    flip,
    forget_cache,
    listing_of,
    lost_in,
    make,
    named,
    objects_of,
    pristine_store,  # noqa: F401 - a fixture
    record_of,
    repair,
)
from tests.support.examples import FEW
from tests.support.faults import (
    CHUNK,
    assert_store,
    backend_faults,
    elsewhere,
    faults,
    memory_folder,
    take,
)
from tests.support.faults import content as content_at
from tests.support.faulty import Call, Fault, FaultyBackend
from tests.support.sweep import sweep


def test_a_take_that_relied_on_a_damaged_pack(store: Path) -> None:
    """The repair commits while a take is about to: it starts again, and stores the chunk anew."""
    damage_chunk(store, FROZEN)
    reports: list[RepairReport] = []
    strike = lambda: reports.append(repair(store))  # noqa: E731
    with backend_faults(0, strike, ["put_if_absent"]):
        Store(store).take({KEY: StateDict(content(0))}, "again")
    assert len(reports[0].remaining) == 1
    assert lost_in(store) == set()
    assert broken(store) == set()


def test_a_take_meanwhile(store: Path) -> None:
    """A take commits while a repair is about to: the repair looks again."""
    damage_chunk(store, FROZEN)
    sorted((store / "casnap-store/index").iterdir())[2].unlink()
    taken: list[object] = []

    @elsewhere
    def take() -> None:
        # By a process that still remembers the lost segment.
        other = Store(store, create=False)
        taken.append(other.take({KEY: StateDict(content(7))}, "meanwhile"))

    with faults(LocalBackend, ["put_if_absent"], 1, take) as calls:
        report = repair(store)
    assert calls.struck
    assert taken
    assert "meanwhile" in named(report)
    assert torch.equal(
        Store(store)["meanwhile"].read_object(f"{KEY}/weight"), expected(7)["weight"]
    )
    assert lost_in(store) == {digest_of(FROZEN.numpy().tobytes())}


def test_collected_afterwards(store: Path) -> None:
    """What a repair took out of the index is garbage, and what it saved is not."""
    damage_chunk(store, WEIGHT)
    shutil.rmtree(store / "casnap-store/index")
    repair(store)
    assert collect(Store(store)._view.repository, GcOptions(grace=0)).deleted_packs == 6
    assert check(store).orphans == 0
    assert broken(store) == {"b"}


@settings(max_examples=FEW)
@given(seed=st.integers(0, 1 << 32))
def test_no_whole_chunk_is_lost(pristine: Path, seed: int) -> None:
    """Whatever is damaged: a chunk that is whole, and that the index or a footer lists, stays."""
    choose = random.Random(seed)
    store = pristine.parent / f"random-{os.getpid()}"
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(pristine, store)
    listing = listing_of(store)
    targets = [f for f in objects_of(store) if f.parent.name == "index" or "packs" in f.parts]
    for file in choose.sample(targets, choose.randint(1, 4)):
        change(file, choose.choice(list(damages(file, choose))))
    survivors = _survivors(store, pristine, listing.packs)
    report = repair(store)
    found = listing_of(store)
    assert not {digest for digest in survivors if not found.of(digest)}
    lost = lost_in(store)
    assert not lost & survivors
    assert report.ok == (not lost)
    shutil.rmtree(store)


def _survivors(store: Path, pristine: Path, packs: tuple[PackId, ...]) -> set[Digest]:
    """Return what is whole and can be found, told without any code of a repair."""
    segments = [f.name for f in (pristine / "casnap-store/index").iterdir()]
    same = [
        n
        for n in segments
        if _bytes(store / "casnap-store/index" / n) == _bytes(pristine / "casnap-store/index" / n)
    ]
    survivors: set[Digest] = set()
    whole = listing_of(pristine)
    for pack in packs:
        now, before = (
            _bytes(store / "casnap-store" / pack_key(pack)),
            _bytes(pristine / "casnap-store" / pack_key(pack)),
        )
        footer = len(before) - len(whole.of_pack(pack)) * 49 - 44
        listed = any(pack in _bytes(store / "casnap-store/index" / name) for name in same)
        if listed or now[-(len(before) - footer) :] == before[footer:]:
            for digest, p in whole.of_pack(pack):
                if digest_of(now[p.offset : p.offset + p.stored_size]) == digest:
                    survivors.add(digest)
    return survivors


def _bytes(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with segments to merge and a damaged chunk; do not change it."""
    path = tmp_path_factory.mktemp("damaged") / "store"
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    for step in range(4):
        take(store, step)
    place = record_of(path, content_at(3)["weight"][: CHUNK // 4])[1]
    change(path / "casnap-store" / pack_key(place.pack), flip(place.offset + 11))
    return path


def churn(path: Path) -> None:
    """Rewrite all segments and delete the old ones."""
    store = Store(path)
    store.delete("step_0")
    take(store, 0)
    store.gc(grace=0, repack=0, recode_after=None)


@pytest.mark.sweep
@pytest.mark.parametrize("calls", ["read", "size", "read_into", "write", "put_if_absent"])
def test_repair_beside_a_collector_without_grace(damaged: Path, calls: str) -> None:
    for number in sweep(2 if calls != "read" else 1):
        with memory_folder() as folder:
            path = shutil.copytree(damaged, folder / "store")
            backend = FaultyBackend(LocalBackend(path))

            def act(call: Call, path: Path = path) -> object:
                elsewhere(churn)(path)
                return call.go()

            fault = Fault(act, calls, "index/*" if calls == "read" else "*", skip=number)
            store = Store(backend)
            with backend.during(fault):
                store.repair()
            if not fault.struck:
                return
            assert {d.kind for d in repair(path).remaining} <= {"lost"}
            Store(path).delete("step_3")
            assert_store(path, {0, 1, 2})
            assert Store(path).check(data=True).ok


def test_healed_from_another_store(store: Path, tmp_path: Path) -> None:
    damage_chunk(store, FROZEN)
    damage_chunk(store, WEIGHT)
    report = repair(store, make(tmp_path / "other").uri)
    assert report.ok
    assert report.healed_chunks == 2
    assert not report.skipped
    assert lost_in(store) == set()
    assert broken(store) == set()


def test_healed_long_after(store: Path, tmp_path: Path) -> None:
    """First lost, later found; a source may be a backup of this very store, and damaged itself."""
    backup = Path(shutil.copytree(store, tmp_path / "backup"))
    lost, _ = damage_chunk(backup, WEIGHT)
    for raw in (WEIGHT, FROZEN):
        (store / "casnap-store" / pack_key(record_of(store, raw)[1].pack)).unlink()
    assert named(repair(store)) == set(STEPS)
    report = repair(store, backup)
    assert report.healed_chunks > 10
    assert lost_in(store) == {lost}
    assert broken(store) == {"b"}


def test_trees_are_healed_from_the_cache(store: Path) -> None:
    """Nodes that this host remembers need no source."""
    opened = Store(store)
    for name, step in STEPS.items():
        opened[name].restore({KEY: StateDict(content(step))})
    for row in map(opened._view.row_of, STEPS):
        for place in listing_of(store).of(Digest(row.manifest.digest)):
            (store / "casnap-store" / pack_key(place.pack)).unlink(missing_ok=True)
    report = opened.repair()
    assert report.healed_chunks > 5
    assert report.ok
    assert broken(store) == set()


def test_a_table_that_is_lost(store: Path, tmp_path: Path, cache_dir: Path) -> None:
    """Without its table a store can do nothing; a backup has it."""
    backup = Path(shutil.copytree(store, tmp_path / "backup"))
    table = Store(store)._view.repository.newest().table
    assert table is not None
    damage_everywhere(store, table.digest)
    forget_cache(cache_dir)
    assert named(repair(store)) == {"*"}
    assert repair(store, backup).ok
    assert broken(store) == set()


def test_an_import_heals(store: Path, tmp_path: Path) -> None:
    """A file that has the lost bytes is imported: a take of them stores them anew."""
    damage_chunk(store, FROZEN)
    assert not repair(store).ok
    torch.save({"frozen": expected(0)["frozen"]}, tmp_path / "weights.pt")
    Store(store).import_file(tmp_path / "weights.pt", "imported")
    assert repair(store).ok
    assert broken(store) == set()


def test_sources_that_are_no_stores(store: Path, tmp_path: Path) -> None:
    digest, _ = damage_chunk(store, FROZEN)
    (tmp_path / "folder").mkdir()
    (tmp_path / "weights.pt").touch()
    unusable = [tmp_path / name for name in ("folder", "weights.pt", "nowhere")]
    report = repair(store, *unusable, "memory://no-store-here")
    assert {bytes.fromhex(d.digest) for d in report.remaining} == {digest}
    assert len(report.skipped) == 4
    for name, why in zip([*unusable, "memory://no-store-here"], report.skipped, strict=True):
        assert str(name) in why
    assert not (tmp_path / "nowhere").exists()
