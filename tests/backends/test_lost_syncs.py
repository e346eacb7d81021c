"""What a sync that failed, or that another process never called, leaves off the disk."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
from pathlib import Path

import pytest

from casnap import NewStore, Store
from casnap.backends import LocalBackend
from casnap.errors import PLACE_ERRORS, BackendError
from tests.support.faults import CHUNK, assert_store, files, in_child, system_faults, take
from tests.support.power import Disk, Journal


def test_folders_that_this_process_has_synced_are_not_synced_again(tmp_path: Path) -> None:
    """Also where each take opens the store anew; folders that it has not entered yet are."""
    for step in range(3):
        take(tmp_path / "store", step)
    with system_faults(names=["fsync"]) as syncs:
        take(tmp_path / "store", 0, overwrite=True)
    # Three files: a pack, the segment, the root. Their folders, and the one of a new pack folder.
    assert 6 <= syncs.count <= 7


def test_folders_that_another_process_has_made_anew_are_synced(tmp_path: Path) -> None:
    """It may have died before it did so: the store at a path is another one by then."""
    folder = tmp_path / "store"
    take(folder, 0)
    for child in folder.iterdir():
        shutil.rmtree(child) if child.is_dir() else child.unlink()
    with Disk(folder).used() as disk:
        assert in_child(lambda: Store(folder, create=NewStore(chunk_size=CHUNK))) == 0
        take(folder, 1)
        assert_store(disk.after_a_crash(tmp_path / "crashed"), {1})


def test_a_collector_does_not_believe_in_a_root_that_may_be_lost(tmp_path: Path) -> None:
    """It deletes what the root before names, so it makes the doubtful one anew."""
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)).make()
    for step in range(3):
        take(store, step)
    store.delete("step_0")
    with Disk(tmp_path / "store").used() as disk:
        assert store.gc(grace=0).freed_bytes > 0
        assert_store(disk.after_a_crash(tmp_path / "crashed"), {1, 2})
    store.delete("step_1")
    for k in itertools.count():
        shutil.copytree(tmp_path / "store", copy := tmp_path / str(k))
        with Disk(copy, k, copy / "casnap-store/roots/0").used() as disk:
            try:
                Store(copy).gc(grace=0)
            except PLACE_ERRORS:
                Store(copy).gc(grace=0)
            disk.fail_at = None
            assert_store(disk.after_a_crash(tmp_path / "crashed"), {2})
            take(copy, 3)
            assert_store(disk.after_a_crash(tmp_path / "crashed"), {2, 3})
        if not disk.struck:
            break
    assert k > 1


@pytest.mark.parametrize("who", ["the same", "another"])
@pytest.mark.parametrize("folder", ["packs/ab", "packs", ""])
def test_what_others_wrote_before_a_sync_failed(tmp_path: Path, folder: str, who: str) -> None:
    """Of two writers one hears that a sync failed; what the other wrote lasts all the same."""
    with Disk(tmp_path).used() as disk:
        first = LocalBackend(tmp_path / "store")
        first.make()
        second = first if who == "the same" else LocalBackend(tmp_path / "store")
        first.write("packs/ab/x", b"first")
        second.write("packs/ab/y", b"second")
        disk.fail_at, disk.of = 0, tmp_path / "store/casnap-store" / folder
        with pytest.raises(BackendError):
            first.sync()
        second.sync()
        crashed = disk.after_a_crash(tmp_path.parent / f"{tmp_path.name}-crashed") / "store"
    assert (crashed / "casnap-store/packs/ab/y").read_bytes() == b"second"
    assert {p.name for p in (crashed / "casnap-store/packs/ab").iterdir()} <= {"x", "y"}


def fail_to_sync(folder: Path) -> None:
    """Have the folder of the packs of a new store not be synced."""
    with Disk(folder.parent, 0, folder / "casnap-store/packs").used() as disk:
        with pytest.raises(BackendError):
            take(folder, 0)
        assert disk.struck


KNOWN = re.compile(
    "casnap.json|roots/0/[0-9]+|roots/copies/[0-9]+|packs/../[0-9a-f]{32}|index/[0-9a-f]{32}|tmp/.*"
)


def test_a_cut_after_a_failed_sync_leaves_no_unknown_file(tmp_path: Path) -> None:
    """What the sync after it makes lies in `tmp/`, where a collection finds what is left."""
    Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)).make()
    fail_to_sync(tmp_path / "store")
    journal = Journal(tmp_path / "store")
    with journal.kept():
        take(tmp_path / "store", 0)
    for moment in range(len(journal.moments)):
        crashed = journal.after_a_cut(moment, 1.0, random.Random(0), tmp_path / "crashed")
        left = files(crashed / "casnap-store")
        assert not {key for key in left if not KNOWN.fullmatch(key)}
    assert_store(crashed, {0})


@pytest.mark.parametrize("store_is", ["the same", "another"])
def test_a_failed_sync_says_nothing_of_a_later_store_at_that_path(
    tmp_path: Path, store_is: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    Store(folder, create=NewStore(chunk_size=CHUNK)).make()
    fail_to_sync(folder)
    if store_is == "another":
        shutil.rmtree(folder)
    changed: list[object] = []
    real = os.utime
    monkeypatch.setattr(os, "utime", lambda *given: [changed.append(given[0]), real(*given)])
    take(folder, 0)
    # Those of folders are by their handles.
    assert any(isinstance(place, int) for place in changed) == (store_is == "the same")
