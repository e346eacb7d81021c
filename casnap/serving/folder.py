"""The folder that readers are given: a link to one version of several.

``DIR`` is a link to ``DIR.versions/<name>@<commit>``. A version appears whole under its name, and
the link is replaced by a rename. So whoever follows the link once has one whole version.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from casnap.backends.durability import sync_folder
from casnap.backends.file_locks import lock
from casnap.backends.places import exists, is_folder, is_link, is_taken, status
from casnap.errors import CasnapError, FileFormatError
from casnap.files.export_output import check_local
from casnap.runtime.fork import locked_file
from casnap.serving.version import RECORD, Version, VersionRecord, read_record

_log = logging.getLogger("casnap")
_LOCK, _CALLED = ".lock", ".called.json"
_PARTIAL, _VERSION = re.compile(r"\..*\.partial"), re.compile(r".*@[0-9a-f]{32}(\.[0-9]+)?")


class ServedFolder:
    """A folder that is kept at one version.

    Args:
        out: The folder. Its parent must be there.

    Raises:
        FileFormatError: It is a URI, or something else stands there.
        FileNotFoundError: There is no such parent.
    """

    def __init__(self, out: Path) -> None:
        check_local(out, "and a pull makes a folder on a disk: name a local path")
        if not out.name or out.name == "..":
            raise FileFormatError(
                f"{out} cannot become a link; name a folder that is not there yet"
            )
        # Not resolved as a whole: it is a link itself.
        parent = out.parent.resolve(strict=True)
        self.link = parent / out.name
        self.versions = parent / f"{out.name}.versions"
        self._known: tuple[object, ...] = ()
        self._record: VersionRecord | None = None
        self._lock = ExitStack()
        self._fd = -1
        self._undeletable: set[Path] = set()
        # Whether a crash may bring back the link to the version before.
        self._may_return = False
        self._check_link()

    def _check_link(self) -> None:
        if is_link(self.link):
            target = Path(os.path.normpath(self.link.parent / self.link.readlink()))
            if target.parent == self.versions:
                return
        elif not exists(self.link):
            return
        raise FileFormatError(
            f"{self.link} exists, and no pull made it; choose another name, or move it away first"
        )

    @contextmanager
    def locked(self) -> Iterator[ServedFolder]:
        """Be the only one who changes the folder, and remove what others have left unfinished.

        Raises:
            CasnapError: Another process is.
        """
        try:
            self.hold()
            self._remove(self._entries(_PARTIAL.fullmatch))
            yield self
        finally:
            self._free()

    def hold(self) -> None:
        """Lock the folder of the versions, unless it is; make it again if somebody has removed it.

        Raises:
            CasnapError: Another process has locked it, or it cannot be looked at.
            FileFormatError: Something that no pull made stands in its place.
            OSError: It cannot be made.
        """
        path = self.versions / _LOCK
        if self._fd >= 0:
            there = status(path)
            if there is not None and os.path.samestat(there, os.fstat(self._fd)):
                return
            self._free()
        if is_link(self.versions):
            raise FileFormatError(
                f"{self.versions} is a link, and no pull made it; remove it, or name another folder"
            )
        self.versions.mkdir(exist_ok=True)
        fd = _open_lock(path)
        self._lock.enter_context(locked_file(fd))
        if lock(fd) is False:
            owner = os.read(fd, 20).decode("ascii", "replace").strip()
            self._free()
            raise CasnapError(
                f"the process {owner or '?'} pulls, or follows, into {self.link}, and only one "
                "may at a time. Stop it, or name another folder"
            )
        self._fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def _free(self) -> None:
        self._fd = -1
        self._lock.close()

    def _entries(self, matches: Callable[[str], object]) -> list[Path]:
        return [path for path in self.versions.iterdir() if matches(path.name)]

    # --- versions ---

    def current(self) -> Version | None:
        """Return the version that the link leads to; None if there is none, or it is damaged.

        Raises:
            BackendError: It cannot be looked at.
        """
        if not is_link(self.link):
            return None
        info = status(self._target / RECORD)
        if info is None:
            return None
        known = (self._target, info.st_ino, info.st_mtime_ns, info.st_size)
        # What could not be read may be readable now.
        if known != self._known or self._record is None:
            # Of many tensors, it takes long to read.
            self._known, self._record = known, read_record(self._target / RECORD)
        return None if self._record is None else Version(self._target, self._record)

    def is_whole(self) -> bool:
        """Whether there is a current version, and no file of it has changed."""
        version = self.current()
        return version is not None and version.is_whole()

    @property
    def _target(self) -> Path:
        return self.versions / self.link.readlink().name

    def of(self, store_id: str, commit: str, mapping: object) -> Version | None:
        """Return a whole version of this content, current or not; None if there is none."""
        for folder in self._entries(lambda name: name.split("@")[-1].startswith(commit)):
            version = Version.load(folder)
            if version is not None and version.is_of(store_id, commit, mapping):
                return version
        return None

    def new_name(self, snapshot: str, commit: str) -> Path:
        """Return a folder for a new version that is not there yet."""
        # A name has at most 255 bytes.
        name = os.fsdecode(os.fsencode(snapshot.rpartition("/")[2])[:180])
        number, path = 1, self.versions / f"{name}@{commit}"
        while is_taken(path):
            number += 1
            path = self.versions / f"{name}@{commit}.{number}"
        return path

    def switch(self, version: Version) -> None:
        """Have the link lead to another version, which is durable already."""
        self._check_link()
        link = self.link.with_name(f".{self.link.name}.casnap-link")
        link.unlink(missing_ok=True)
        link.symlink_to(Path(self.versions.name, version.folder.name))
        link.rename(self.link)
        self._may_return = True
        try:
            sync_folder(str(self.link.parent))
            self._may_return = False
        except (CasnapError, OSError) as e:
            # The link leads to it all the same.
            _log.warning(
                "%s leads to %s, but may lead to the version before after a crash of this machine: "
                "%s",
                self.link,
                version.folder.name,
                e,
            )

    def prune(self, keep: int) -> None:
        """Delete all versions but the current one and the newest others; warn of what stays.

        Args:
            keep: How many stay.
        """
        if self._may_return:
            return
        try:
            self._prune(keep)
        except (CasnapError, OSError) as e:
            _log.warning("old versions of %s are deleted later: %s", self.link, e)

    def _prune(self, keep: int) -> None:
        others = [path for path in self._entries(_VERSION.fullmatch) if path != self._target]
        others.sort(key=lambda path: path.stat().st_mtime_ns)
        before = self._entries(_PARTIAL.fullmatch)
        self._remove([*before, *others[: max(0, len(others) - (keep - 1))]])

    def _remove(self, paths: Iterable[Path]) -> None:
        """Delete folders of versions; warn, once, of what cannot be deleted: it is tried again."""
        for path in paths:
            left = path
            try:
                if not _PARTIAL.fullmatch(path.name):
                    # A half of it never has the name of a version.
                    left = path.rename(
                        path.with_name(f".{path.name}.{os.urandom(6).hex()}.partial")
                    )
                _delete(left)
            except (CasnapError, OSError) as e:
                if left not in self._undeletable:
                    self._undeletable.add(left)
                    _log.warning(
                        "an old version cannot be deleted, which each pull tries again: %s: %s",
                        left,
                        e,
                    )

    # --- whom it was announced to ---

    def called(self) -> VersionRecord | None:
        """Return the version that a callback was last called for without a failure."""
        return read_record(self.versions / _CALLED)

    def note_called(self, version: Version) -> None:
        """Note that a callback was called for a version."""
        partial = self.versions / f"{_CALLED}.partial"
        partial.write_bytes(version.record.encode())
        partial.rename(self.versions / _CALLED)


def _delete(path: Path) -> None:
    """Delete a folder, or a file, with all that can be deleted in it.

    Raises:
        OSError: Some of it is still there.
    """
    if not is_folder(path) or is_link(path):
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError:
        # It stops at the first thing that cannot be deleted.
        shutil.rmtree(path, ignore_errors=True)
        if is_taken(path):
            raise


def _open_lock(path: Path) -> int:
    """Open the file that is locked, made if it is not there.

    The pull writes to it, so it must not be a file of somebody's that a link leads to.
    """
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as e:
        if not is_link(path):
            raise
        raise FileFormatError(f"{path} is a link, and no pull made it; remove it") from e
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_nlink <= 1:
        return fd
    os.close(fd)
    raise FileFormatError(f"{path} is no file of its own, and no pull made it; remove it")
