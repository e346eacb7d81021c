"""A repair finds what is lost in other stores and in the cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from casnap import StateDict, Store
from casnap.format.digest import Digest
from casnap.format.records import pack_key
from tests.support.damaged import (
    FROZEN,
    KEY,
    STEPS,
    WEIGHT,
    broken,
    content,
    copied_store,  # noqa: F401 - a fixture
    damage_chunk,
    damage_everywhere,
    expected,
    forget_cache,
    listing_of,
    lost_in,
    make,
    named,
    pristine_store,  # noqa: F401 - a fixture
    record_of,
    repair,
)


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
    for row in map(opened._view.row, STEPS):
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
