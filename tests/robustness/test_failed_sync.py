"""A sync fails once, and passes when called again: what it was to write is not on the disk."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from casnap import Store
from casnap.backends import LocalBackend
from casnap.errors import PLACE_ERRORS, BackendError
from tests.support.faults import CHUNK, assert_store, in_child, system_faults, take


class Disk:
    """What of a folder is on the disk, on a system that believes in a write that has failed.

    A folder is one block, which is written when it has changed since it was last tried to be.

    Args:
        top: The folder, all of which is on the disk at first.
        fail_at: Which sync fails, from 0.
        of: Of those of this folder alone.
    """

    def __init__(self, top: Path, fail_at: int | None = None, of: Path | None = None) -> None:
        self.fail_at = fail_at
        self.of = of
        self.struck = False
        self._top = top
        self._lock = threading.Lock()
        folders = [top, *(p for p in top.rglob("*") if p.is_dir())]
        self._clean = {folder: self._listed(folder) for folder in folders}
        self._written = dict(self._clean)
        self._lost_files: set[int] = set()

    @staticmethod
    def _listed(folder: Path) -> dict[str, int]:
        return {p.name: p.lstat().st_ino for p in folder.iterdir()}

    def fsync(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        with self._lock:
            fails = self.of in (None, path) and self.fail_at == 0
            if self.fail_at is not None and self.of in (None, path):
                self.fail_at -= 1
            self._sync(path, os.fstat(fd), fails=fails)
            if fails:
                self.struck = True
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _sync(self, path: Path, found: os.stat_result, *, fails: bool) -> None:
        if not stat.S_ISDIR(found.st_mode):
            if fails:
                self._lost_files.add(found.st_ino)
        else:
            listed = self._listed(path)
            if listed != self._clean.get(path) and not fails:
                self._written[path] = listed
            self._clean[path] = listed

    @contextmanager
    def used(self) -> Iterator[Disk]:
        with mock.patch.object(os, "fsync", self.fsync):
            yield self

    def after_a_crash(self, to: Path) -> Path:
        """Return a copy of what the disk holds."""
        shutil.rmtree(to, ignore_errors=True)
        self._restore(self._top, to)
        return to

    def _restore(self, folder: Path, to: Path) -> None:
        to.mkdir()
        for name, inode in self._written.get(folder, {}).items():
            if (folder / name).is_dir():
                self._restore(folder / name, to / name)
            elif (folder / name).exists() and inode not in self._lost_files:
                shutil.copy(folder / name, to / name)


@pytest.mark.parametrize("again", ["the same store", "another one"])
def test_each_sync_of_a_take_fails_once(tmp_path: Path, again: str) -> None:
    """A take that returned survives a crash; one that failed is taken again, and then does."""
    store = Store(tmp_path / "base", chunk_size=CHUNK).make()
    take(store, 0)
    messages = []
    for k in itertools.count():
        copy = tmp_path / str(k)
        shutil.copytree(tmp_path / "base", copy)
        store = Store(copy).make()
        with Disk(copy, fail_at=k).used() as disk:
            try:
                take(store, 1)
            except PLACE_ERRORS as e:
                messages.append(str(e))
                if again == "another one":
                    store = Store(copy).make()
                take(store, 1, overwrite="step_1" in store)
            assert_store(disk.after_a_crash(tmp_path / "crashed"), {0, 1})
        shutil.rmtree(copy)
        if not disk.struck:
            break
    assert len(messages) == k
    assert sum("was put, but may be lost" in text for text in messages) >= 1
    assert k > 6


def test_each_sync_of_a_new_store_fails_once(tmp_path: Path) -> None:
    for k in itertools.count():
        folder = tmp_path / str(k)
        folder.mkdir()
        with Disk(folder, fail_at=k).used() as disk:
            try:
                store = Store(folder / "store", chunk_size=CHUNK).make()
            except PLACE_ERRORS:
                store = Store(folder / "store", chunk_size=CHUNK).make()
            disk.fail_at = None
            take(store, 0)
            assert_store(disk.after_a_crash(tmp_path / "crashed") / "store", {0})
        if not disk.struck:
            break
    assert k > 4


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
        assert in_child(lambda: Store(folder, chunk_size=CHUNK)) == 0
        take(folder, 1)
        assert_store(disk.after_a_crash(tmp_path / "crashed"), {1})


def test_a_collector_does_not_believe_in_a_root_that_may_be_lost(tmp_path: Path) -> None:
    """It deletes what the root before names, so it makes the doubtful one anew."""
    store = Store(tmp_path / "store", chunk_size=CHUNK).make()
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
