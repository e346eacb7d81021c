"""The power fails at any moment: of what was not synced, any part may be lost."""

from __future__ import annotations

import os
import random
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from casnap import Store
from casnap.backends import store_folder
from tests.support.faults import CHUNK, assert_holds, assert_no_orphans, take
from tests.support.sweep import STEP

pytestmark = pytest.mark.sweep


class Change(NamedTuple):
    """A name that was made (of a folder, or of a file with an inode), or removed."""

    path: Path
    inode: int | None
    is_folder: bool = False


class Journal:
    """What a process changes in a folder, and what of it is synced at each moment.

    The bytes of files count only once they are synced, and names once their folder is.

    Args:
        top: The folder; all that is in it at first is on the disk.
    """

    def __init__(self, top: Path) -> None:
        self._top = top
        self._base = top.parent / "base"
        shutil.copytree(top, self._base)
        self._changes: list[Change] = []
        self._contents: dict[int, bytes] = {}
        # Held while a change is made and noted: the notes are in the order of the changes.
        self._lock = threading.RLock()
        # For each moment how many changes there were, and how many of them each folder has synced.
        self.moments: list[tuple[int, dict[Path, int], frozenset[str]]] = [(0, {}, frozenset())]
        self._told: frozenset[str] = frozenset()

    def tell(self, *names: str) -> None:
        """Note that a call has returned, after which the store holds these snapshots."""
        with self._lock:
            self._told = frozenset(names)
            self._note(None)

    def _note(self, change: Change | None, synced: dict[Path, int] | None = None) -> None:
        if change is not None:
            self._changes.append(change)
        before = self.moments[-1][1]
        self.moments.append((len(self._changes), before | (synced or {}), self._told))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Note all changes that are made meanwhile."""
        real = {name: getattr(os, name) for name in ("open", "link", "unlink", "mkdir", "rmdir")}

        def path_of(name: Any, folder: int | None) -> Path:
            above = Path() if folder is None else Path(f"/proc/self/fd/{folder}").readlink()
            return above / os.fsdecode(name)

        def make(name: str, at: int) -> Callable[..., Any]:
            def call(*given: Any, **options: Any) -> Any:
                folder = options.get("dst_dir_fd", options.get("dir_fd"))
                path = path_of(given[at], folder)
                is_ours = self._top in path.parents
                if not is_ours or (name == "open" and os.path.lexists(path)):
                    return real[name](*given, **options)
                with self._lock:
                    result = real[name](*given, **options)
                    if name in ("unlink", "rmdir"):
                        self._note(Change(path, None))
                    else:
                        self._note(Change(path, path.lstat().st_ino, name == "mkdir"))
                return result

            return call

        def fsync(fd: int) -> None:
            path, found = Path(f"/proc/self/fd/{fd}").readlink(), os.fstat(fd)
            with self._lock:
                if stat.S_ISDIR(found.st_mode):
                    self._note(None, {path: len(self._changes)})
                else:
                    self._contents[found.st_ino] = path.read_bytes()

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(os, "fsync", fsync))
            for name in real:
                replaced = make(name, 1 if name == "link" else 0)
                stack.enter_context(mock.patch.object(os, name, replaced))
            yield

    def after_a_cut(self, moment: int, share: float, dice: random.Random, to: Path) -> Path:
        """Return what the disk may hold if the power fails at a moment.

        Args:
            moment: The moment.
            share: How likely a name that was not synced is there all the same.
            dice: Chooses which.
            to: Where to put the copy.
        """
        count, synced, _ = self.moments[moment]
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self._base, to)
        for number, change in enumerate(self._changes[:count]):
            path = to / change.path.relative_to(self._top)
            if number >= synced.get(change.path.parent, 0) and dice.random() >= share:
                continue
            if not path.parent.is_dir():
                continue
            if change.is_folder:
                path.mkdir(exist_ok=True)
            elif change.inode is not None:
                unsynced = (b"", bytes(1000), b"cut off")
                path.write_bytes(self._contents.get(change.inode, dice.choice(unsynced)))
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return to


def take_all(path: Path, journal: Journal) -> None:
    take(path, 1)
    journal.tell("step_0", "step_1")
    take(path, 2)
    journal.tell("step_0", "step_1", "step_2")


def delete_and_collect(path: Path, journal: Journal) -> None:
    store = Store(path)
    take(store, 1)
    journal.tell("step_0", "step_1")
    store.delete("step_0")
    journal.tell("step_1")
    store.gc(grace=0, repack=1.0)
    take(store, 2, overwrite=True)
    journal.tell("step_1", "step_2")


def assert_goes_on(path: Path, told: frozenset[str]) -> None:
    """Check that all is whole that was told, that takes go on, and that orphans are collected."""
    store = Store(path, create=False)
    assert told <= {snapshot.name for snapshot in store.snapshots()}
    assert store.check(data=True).damages == []
    for step in (2, 3):
        take(store, step, overwrite=True)
    store.gc(grace=0)
    for snapshot in Store(path).snapshots():
        assert_holds(snapshot, snapshot.metadata.user["step"])
    assert_no_orphans(path)


@pytest.mark.parametrize("share", [0, 0.5, 1], ids=["none", "some", "all"])
@pytest.mark.parametrize("work", [take_all, delete_and_collect])
def test_the_power_fails_at_any_moment(
    tmp_path: Path, work: Callable[[Path, Journal], None], share: float
) -> None:
    path = tmp_path / "store"
    take(Store(path, chunk_size=CHUNK), 0)
    # What another process has synced is not known to this one.
    store_folder._durable.clear()
    journal = Journal(path)
    journal.tell("step_0")
    with journal.kept():
        work(path, journal)
    dice = random.Random(1)
    for moment in range(0, len(journal.moments), 1 if STEP == 1 else 2 * STEP):
        told = journal.moments[moment][2]
        # A delete may be on the disk before it has returned.
        later = [names for _, _, names in journal.moments[moment:] if names != told][:1]
        crashed = journal.after_a_cut(moment, share, dice, tmp_path / "crashed")
        assert_goes_on(crashed, told.intersection(*later))
