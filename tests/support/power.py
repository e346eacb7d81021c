"""A disk that fails, or whose power does: what of a folder is on it, and what may be lost.

:class:`Disk` has one sync fail, and believes from then on that all is written, as Linux does.
:class:`Journal` notes what a process changes and syncs, to tell what a cut at any moment leaves.
"""

from __future__ import annotations

import errno
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


class Disk:
    """What of a folder is on the disk, on a system that believes in a write that has failed.

    A folder is one block, which is written when it has changed since it was last tried to be: its
    names, or its time.

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
        real_utime = os.utime

        def utime(place: int | str | Path, *times: Any) -> None:
            real_utime(place, *times)
            if isinstance(place, int):
                with self._lock:
                    self._clean.pop(Path(f"/proc/self/fd/{place}").readlink(), None)

        with mock.patch.object(os, "fsync", self.fsync), mock.patch.object(os, "utime", utime):
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

    Attributes:
        moments: One for each change, and for each sync.
    """

    def __init__(self, top: Path) -> None:
        self._top = top
        self._base = top.with_name(f"{top.name}-before")
        shutil.copytree(top, self._base)
        self._changes: list[Change] = []
        self._contents = {p.stat().st_ino: p.read_bytes() for p in top.rglob("*") if p.is_file()}
        # Held while a change is made and noted: the notes are in the order of the changes.
        self._lock = threading.RLock()
        # For each moment how many changes there were, and how many of them each folder has synced.
        self.moments: list[tuple[int, dict[Path, int]]] = [(0, {})]

    def _note(self, change: Change | None, synced: dict[Path, int] | None = None) -> None:
        if change is not None:
            self._changes.append(change)
        self.moments.append((len(self._changes), self.moments[-1][1] | (synced or {})))

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
                        inode = path.lstat().st_ino
                        if name == "open":
                            # Of a file that was removed since, perhaps.
                            self._contents.pop(inode, None)
                        self._note(Change(path, inode, name == "mkdir"))
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
        count, synced = self.moments[moment]
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
