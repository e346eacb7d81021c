"""What the cache was taught at one place never counts at another, whatever a store says it is."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from casnap import StateDict, Store
from casnap.format.digest import digest_of
from casnap.format.records import (
    Place,
    Segment,
    SegmentRef,
    encode_segment,
    segment_key,
)
from casnap.runtime.environment import boot_id
from casnap.storage.lookup.index_cache import MOST_FOLDERS
from casnap.storage.packs.pack_writer import new_id
from tests.support.cli_calls import process
from tests.support.faults import CHUNK, assert_holds, assert_store, in_child, take
from tests.support.written import put_next_root

WANTED = torch.arange(CHUNK // 4, dtype=torch.int32)
"""A chunk that the attacker expects the victim to take."""


def forge(victim: Path, hostile: Path) -> None:
    """Make a store of the victim's id, which says that a chunk lies in a pack of the victim's."""
    shutil.copytree(victim, hostile, dirs_exist_ok=True)
    repository = Store(hostile)._view.repository
    root, pack = repository.newest(), min(repository.view().live)
    place = Place(pack, 0, WANTED.nbytes, WANTED.nbytes, 0)
    ident = new_id(root.seq)
    content = encode_segment(Segment((pack,), [(digest_of(WANTED.numpy().tobytes()), place)]))
    (hostile / "casnap-store" / segment_key(ident)).write_bytes(content)
    assert put_next_root(
        repository.backend, root, segments=(*root.segments, SegmentRef(ident, 1, 0))
    )


def take_wanted(path: Path) -> None:
    Store(path).take({"s": StateDict(wanted=WANTED)}, "wanted")
    found = Store(path)["wanted"].read_object("s/wanted")
    assert torch.equal(found, WANTED)
    assert Store(path).check(data=True).ok


@pytest.fixture
def victim(tmp_path: Path, cache_dir: Path) -> Path:
    """Return a store under a cache that no other test uses."""
    take(tmp_path / "victim", 0)
    return tmp_path / "victim"


def test_a_hostile_store_of_the_same_id(victim: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    assert in_child(lambda: forge(victim, hostile)) == 0
    assert_holds(Store(hostile)["step_0"], 0)
    take_wanted(victim)


def test_a_hostile_store_that_gives_way_to_the_victims(victim: Path, tmp_path: Path) -> None:
    """At the same path, in the same folder even, under a store that is open all the time."""
    hostile = tmp_path / "hostile"
    assert in_child(lambda: forge(victim, hostile)) == 0
    opened = Store(hostile)
    assert_holds(opened["step_0"], 0)
    for found in hostile.iterdir():
        if found.is_dir():
            shutil.rmtree(found)
        else:
            found.unlink()
    shutil.copytree(victim, hostile, dirs_exist_ok=True)
    opened.take({"s": StateDict(wanted=WANTED)}, "wanted")
    assert torch.equal(Store(hostile)["wanted"].read_object("s/wanted"), WANTED)
    assert Store(hostile).check(data=True).ok


def test_one_store_by_several_names_has_one_cache(
    victim: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(victim)
    monkeypatch.chdir(tmp_path)
    for name in ("victim", "./victim/", "link", victim):
        assert_holds(Store(name)["step_0"], 0)
    assert len(list(cache_dir.glob("*/data.mdb"))) == 1


def test_a_store_that_is_moved_loses_nothing_but_time(victim: Path, tmp_path: Path) -> None:
    moved = victim.rename(tmp_path / "moved")
    take(moved, 1)
    assert_store(moved, {0, 1})


def test_caches_that_are_not_used_any_more_are_removed(tmp_path: Path, cache_dir: Path) -> None:
    def old(name: str, boot: str, age: int, uri: str = "") -> Path:
        folder = cache_dir / name
        folder.mkdir()
        (folder / "boot").write_text(boot)
        (folder / "data.mdb").touch()
        (folder / "uri").write_text(uri)
        then = time.time() - 60 - age
        os.utime(folder / "boot", (then, then))
        return folder

    before = old(f"{1:032x}-{2:032x}", "another boot", 0)
    unused = old(f"{1:032x}-{3:032x}", boot_id(), 31 * 86400)
    unused_place = old(f"{4:032x}", boot_id(), 31 * 86400)
    gone = old(f"{1:032x}-{5:032x}", boot_id(), -30, f"{tmp_path}/gone")
    there = Store(tmp_path / "there").make()
    kept = [
        old(f"{1:032x}-{6:032x}", boot_id(), -30, there.uri),
        old(f"{1:032x}-{7:032x}", boot_id(), -30, "s3://bucket/run"),
    ]
    current = [old(f"{n:032x}-{n:032x}", boot_id(), n) for n in range(MOST_FOLDERS + 5)]
    others = cache_dir / "something else"
    others.mkdir()
    take(tmp_path / "store", 0)
    assert not any(folder.exists() for folder in (before, unused, unused_place, gone))
    assert all(folder.exists() for folder in kept)
    assert others.exists()
    assert [f for f in current if f.exists()] == current[: MOST_FOLDERS - 3]
    assert len(list(cache_dir.glob("*/data.mdb"))) == MOST_FOLDERS
    # A folder that is opened only, not made, costs no look at the others.
    old("2" * 32, "another boot", 0)
    assert process("show", tmp_path / "store/step_0").returncode == 0
    assert (cache_dir / ("2" * 32)).exists()
