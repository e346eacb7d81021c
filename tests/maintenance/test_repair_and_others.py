"""A repair that is not alone harms nothing, and no whole chunk is lost by it."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from casnap import StateDict, Store
from casnap.backends import LocalBackend
from casnap.format.digest import Digest, digest_of
from casnap.format.records import PackId, pack_key
from casnap.maintenance.gc import GcOptions, collect
from casnap.maintenance.repair import RepairReport
from tests.support.damaged import (
    FROZEN,
    KEY,
    WEIGHT,
    broken,
    change,
    check,
    content,
    copied_store,  # noqa: F401 - a fixture
    damage_chunk,
    damages,
    expected,
    listing_of,
    lost_in,
    named,
    objects_of,
    pristine_store,  # noqa: F401 - a fixture
    repair,
)
from tests.support.examples import FEW
from tests.support.faults import backend_faults, elsewhere, faults


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
