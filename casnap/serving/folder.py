"""The folder of a pull: a link to one of several versions.

``DIR`` is a link to ``DIR.versions/<name>@<commit>``. A version appears whole under its name, and a
rename replaces the link. So a reader that resolves the link once has one whole version.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from msgspec import structs

from casnap.backends.local_files import (
    HeldFolder,
    Owners,
    is_link,
    is_taken,
    read_file,
    status,
    sync_folder,
    translated,
)
from casnap.errors import PLACE_ERRORS, BackendError, CasnapError, DamagedError, FileFormatError
from casnap.files.export_output import check_local, check_outside
from casnap.serving.version import (
    CHANGING,
    CHUNKS,
    LOCK,
    RECORD,
    Version,
    VersionRecord,
    folder_name,
    read_record,
)

_log = logging.getLogger("casnap")
_CALLED, _TURN = ".called.json", ".turn"
_MOST_TURN = 9  # characters
FILE_MODE = 0o644
"""The mode of all files of a pull. Other users may not write to them: engines serve these files."""
_FOLDER_MODE = FILE_MODE | 0o111
_PARTIAL, VERSION = re.compile(r"\..*\.partial"), re.compile(r".*@[0-9a-f]{32}(\.[0-9]+)?")


class ServedFolder:
    """A folder at which engines find the current version.

    Args:
        out: The folder. Its parent must be there.

    Raises:
        FileFormatError: ``out`` is a URI, or something lies there that no pull made.
        FileNotFoundError: The parent does not exist.
        PlaceError: The system cannot look at ``out``.
    """

    def __init__(self, out: Path) -> None:
        check_local(out, "and a pull makes a folder on a disk: name a local path")
        if not out.name or out.name == "..":
            raise FileFormatError(
                f"{out} cannot become a link; name a folder that is not there yet"
            )
        # Only the parent is resolved: the folder is a link itself.
        with translated(str(out.parent)):
            parent = Path(os.path.realpath(out.parent, strict=True))
        self.link = parent / out.name
        check_outside(self.link)
        self.versions = parent / f"{out.name}.versions"
        self._known: tuple[object, ...] = ()
        self._record: VersionRecord | None = None
        # While the folder is locked: the open folder of the versions, and the lock.
        self._opened = ExitStack()
        self._held: HeldFolder | None = None
        self._fd = -1
        self._owners: Owners = Owners.by()
        self._undeletable: set[str] = set()
        # Whether a crash may bring back the link to the version before.
        self._may_return = False
        self._check_link()

    def _check_link(self) -> None:
        info = status(self.link, follow=False)
        if info is None:
            return
        if self._held is not None and not self._owners.own(info):
            raise FileFormatError(
                f"{self.link} belongs to another user (uid {info.st_uid}), who can have it lead "
                "elsewhere at any time. Remove it, or name another folder"
            )
        if stat.S_ISLNK(info.st_mode):
            target = Path(os.path.normpath(self.link.parent / self.link.readlink()))
            if target.parent == self.versions:
                return
        self._check_kind(self._has_files, "with")
        raise self._foreign()

    def _foreign(self) -> FileFormatError:
        return FileFormatError(
            f"{self.link} exists, and no pull made it; choose another name, or move it away first"
        )

    @property
    def _has_files(self) -> bool:
        """Whether files of a version lie right in the folder, as after a pull in place."""
        return any(is_taken(self.link / name) for name in (RECORD, CHUNKS, CHANGING))

    def _check_kind(self, is_other: bool, option: str) -> None:
        if is_other:
            raise FileFormatError(
                f"{self.link} is what a pull {option} --inplace (in_place=) has made. Pull so "
                "again, or name another folder"
            )

    @contextmanager
    def locked(self) -> Iterator[ServedFolder]:
        """Lock the folder for this process, and delete the unfinished versions of killed pulls.

        Raises:
            CasnapError: Another process has locked the folder.
        """
        try:
            self.hold()
            with self.translated():
                self._remove(self._names(_PARTIAL.fullmatch))
            yield self
        finally:
            self._free()

    def hold(self) -> None:
        """Lock the folder of the versions, which is made if need be.

        If this object holds the lock, do nothing.

        Raises:
            CasnapError: Another process has locked it.
            FileFormatError: Something that no pull of this user made lies in its place, or other
                users may write there.
            PlaceError: The folder cannot be made, locked or looked at.
            FileNotFoundError: The parent of the folder is gone.
        """
        if self._fd >= 0:
            there = status(self.versions / LOCK, follow=False)
            if there is not None and os.path.samestat(there, os.fstat(self._fd)):
                return
        self._free()
        with self.translated():
            self._open_folder()
            self._check_link()
            fd = self._open_lock()
            if HeldFolder.lock(fd) is False:
                owner = os.read(fd, 20).decode("ascii", "replace").strip()
                raise CasnapError(
                    f"the process {owner or '?'} pulls, or follows, into {self.link}, and only one "
                    "may at a time. Stop it, or name another folder"
                )
            self._fd = fd
            # A full disk is no reason to stop: the pull may free some of it.
            with suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def _free(self) -> None:
        self._held, self._fd = None, -1
        self._opened.close()

    def translated(self) -> AbstractContextManager[None]:
        """Return a context manager that turns the system's errors into casnap's.

        ``FileNotFoundError`` stays as it is.
        """

        def path_of(error: OSError) -> str:
            # A bare name lies in the folder of the versions. An error of a write has no name.
            return str(self.versions / os.fsdecode(error.filename or ""))

        return translated(path_of, f"{self.link} stays as it is")

    def _open_folder(self) -> None:
        """Open the folder of the versions; make it if it does not exist."""
        with suppress(FileExistsError):
            self.versions.mkdir(_FOLDER_MODE)
        info = status(self.versions, follow=False)
        if info is not None and not stat.S_ISDIR(info.st_mode):
            raise FileFormatError(
                f"{self.versions} is no folder, and no pull made it; remove it, or name another "
                "folder"
            )
        # Each change is made through this handle, even if another folder is moved to this path.
        self._held = self._opened.enter_context(HeldFolder(str(self.versions)))
        self._owners = self._held.owners()
        self._owners.close_to_others(self._held.fd)
        why = self._owners.why_not(self._held.status())
        if why is not None:
            raise FileFormatError(
                f"{self.versions} {why}, so what is in it need not be what a pull has written. "
                "Remove it, or name another folder. Only if you know that all in it is yours: "
                "`chown -R` it to you, and `chmod -R go-w` it"
            )

    def _open_lock(self) -> int:
        path = self.versions / LOCK
        try:
            fd = self._opened.enter_context(self._folder.file_to_lock(LOCK, FILE_MODE))
        except (BackendError, OSError) as e:
            info = status(path, follow=False)
            if info is None or stat.S_ISREG(info.st_mode):
                raise
            raise FileFormatError(f"{path} is no file, and no pull made it; remove it") from e
        info = os.fstat(fd)
        # This process writes its id into the file, so no other file may share its bytes.
        why = "has another name too" if info.st_nlink > 1 else self._owners.why_not(info)
        if why is not None:
            raise FileFormatError(f"{path} {why}, and no pull made it; remove it")
        return fd

    @property
    def _folder(self) -> HeldFolder:
        """The folder of the versions, as an open handle, while it is locked."""
        assert self._held is not None
        return self._held

    def close_to_others(self) -> None:
        """Make sure that no other user may write to the versions, whatever the mount allows."""
        self._owners.close_to_others(self._folder.fd)
        for name in self._names(VERSION.fullmatch):
            path = f"{self._folder.path}/{name}"
            with suppress(OSError, *PLACE_ERRORS), HeldFolder(path, self._folder) as folder:
                self._owners.close_to_others(folder.fd)

    # --- names in the folder of the versions ---

    def _names(self, matches: Callable[[str], object]) -> list[str]:
        return self._folder.names(matches)

    # --- versions ---

    def current(self) -> Version | None:
        """Return the version that the link leads to; None if there is none, or it is damaged.

        Raises:
            PlaceError: The system cannot look at the version.
        """
        return self._version(self.versions / self._target.name) if is_link(self.link) else None

    def _version(self, folder: Path) -> Version | None:
        """Return the version in a folder; None if it is absent or damaged, or another user's."""
        info, about = status(folder / RECORD, follow=False), status(folder, follow=False)
        if info is None or about is None:
            return None
        if not (stat.S_ISREG(info.st_mode) and stat.S_ISDIR(about.st_mode)):
            return None
        if self._owners.why_not(info) or self._owners.why_not(about):
            return None
        known = (folder, info.st_ino, info.st_mtime_ns, info.st_size)
        # A record that could not be read may be readable now.
        if known != self._known or self._record is None:
            # The record of many tensors takes long to read, so it is kept.
            self._known, self._record = known, read_record(folder / RECORD)
        return None if self._record is None else Version(folder, self._record, self._owners)

    def is_whole(self) -> bool:
        """Whether there is a current version, and each of its files is as a pull wrote it."""
        version = self.current()
        return version is not None and version.is_whole()

    @property
    def _target(self) -> Path:
        return self.versions / self.link.readlink().name

    def of(self, store_id: str, commit: str, mapping: object) -> Version | None:
        """Return a whole version of a snapshot, current or not; None if there is none.

        Args:
            store_id: The id of the store.
            commit: The commit id of the snapshot.
            mapping: The options that a version depends on: :meth:`PullOptions.mapping`.
        """
        for name in self._names(lambda name: name.split("@")[-1].startswith(commit)):
            version = self._version(self.versions / name)
            if version is not None and version.is_of(store_id, commit, mapping):
                return version
        return None

    def new_name(self, snapshot: str, commit: str) -> Path:
        """Return the path for the folder of a new version. Nothing lies there yet."""
        name = folder_name(snapshot, commit)
        number, path = 1, self.versions / name
        while is_taken(path):
            number += 1
            path = self.versions / f"{name}.{number}"
        return path

    def next_turn(self) -> int:
        """Return the number of this pull: one more than that of the last pull.

        The number selects which of the :data:`~casnap.serving.version.PARTS` of the kept bytes this
        pull verifies.
        """
        turn = 0
        with suppress(FileNotFoundError, ValueError, DamagedError, *PLACE_ERRORS):
            turn = int(read_file(str(self.versions / _TURN), _MOST_TURN)[0]) + 1
        # If the turn cannot be noted, this pull reads its part all the same.
        with suppress(OSError, *PLACE_ERRORS):
            self._put(_TURN, str(turn).encode())
        return turn

    def switch(self, version: Version) -> Version:
        """Make the link lead to another version, which is durable already; return that version."""
        self._check_link()
        with suppress(OSError):
            self._note_current(version.folder.name)
        link = self.link.with_name(f".{self.link.name}.casnap-link")
        link.unlink(missing_ok=True)
        link.symlink_to(Path(self.versions.name, version.folder.name))
        link.rename(self.link)
        self._may_return = True
        try:
            sync_folder(str(self.link.parent))
            self._may_return = False
        except (CasnapError, OSError) as e:
            # Only the sync failed: the link leads to the version.
            _log.warning(
                "%s leads to %s, but may lead to the version before after a crash of this machine: "
                "%s",
                self.link,
                version.folder.name,
                e,
            )
        return version

    def _note_current(self, name: str) -> None:
        """Set the time of a version's folder to later than the times of all other versions.

        :meth:`clean_up` keeps the versions with the latest times, since an engine has one of them
        loaded. The clock of this host may have been set back, so the current time may be earlier
        than theirs.
        """
        before = [self._folder.status(each).st_mtime_ns for each in self._names(VERSION.fullmatch)]
        # 1000: not all file systems tell nanoseconds apart.
        now = max(time.time_ns(), max(before, default=0) + 1000)
        os.utime(name, ns=(now, now), dir_fd=self._folder.fd, follow_symlinks=False)

    def clean_up(self, keep: int, *, is_announced: bool = False) -> None:
        """Delete unfinished versions, and old versions beyond the last ``keep``.

        Nothing is deleted while a crash may bring back the link to the previous version. A version
        that cannot be deleted causes a warning.

        Args:
            keep: How many versions stay, the current one included.
            is_announced: Whether a callback is called for each version. If so, the last version for
                which it succeeded is the last old one to be deleted: an engine may have it loaded.
        """
        if self._may_return:
            return
        try:
            self._delete_old(keep, is_announced=is_announced)
        except (CasnapError, OSError) as e:
            _log.warning("old versions of %s are deleted later: %s", self.link, e)

    def _delete_old(self, keep: int, *, is_announced: bool) -> None:
        current, called = self._target.name, self.called() if is_announced else None
        others = [name for name in self._names(VERSION.fullmatch) if name != current]

        def worth(name: str) -> tuple[bool, int]:
            is_held = called is not None and name.split("@")[-1].startswith(called.commit)
            return is_held, self._folder.status(name).st_mtime_ns

        others.sort(key=worth)
        before = self._names(_PARTIAL.fullmatch)
        self._remove([*before, *others[: max(0, len(others) - (keep - 1))]])

    def _remove(self, names: Iterable[str]) -> None:
        """Delete folders of versions; warn once about each that cannot be deleted now.

        The next pull tries these again.
        """
        for name in names:
            left = name
            try:
                if not _PARTIAL.fullmatch(name):
                    # Renamed first: a half-deleted folder must not have the name of a version.
                    left = f".{name}.{os.urandom(6).hex()}.partial"
                    self._folder.rename(name, left)
                with translated(str(self.versions / left)):
                    self._delete(left)
            except FileNotFoundError:
                continue  # another pull made it, was refused meanwhile, and has removed it
            except (CasnapError, OSError) as e:
                if left not in self._undeletable:
                    self._undeletable.add(left)
                    _log.warning(
                        "an old version cannot be deleted, which each pull tries again: %s", e
                    )

    def _delete(self, name: str) -> None:
        """Delete a file or folder. If a part of a folder cannot be deleted, delete the rest.

        Raises:
            OSError: Something could not be deleted.
        """
        if not stat.S_ISDIR(self._folder.status(name).st_mode):
            self._folder.unlink(name)
            return
        # Before Python 3.11 rmtree takes no handle of a folder.
        path = f"/proc/self/fd/{self._folder.fd}/{name}"
        try:
            shutil.rmtree(path)
        except OSError:
            # rmtree stopped at the first thing that it could not delete.
            shutil.rmtree(path, ignore_errors=True)
            if self._names(name.__eq__):
                raise

    # --- the version that the callback was called for ---

    def called(self) -> VersionRecord | None:
        """Return the record of the version that the callback has loaded; None if it is unknown.

        If the last call failed or has not returned, the engine may hold tensors of two versions.
        Then this is the record of the last call that succeeded, with an empty ``snapshot``, and
        without the tensors that a later call may have loaded.
        """
        path = self.versions / _CALLED
        info = status(path, follow=False)
        # Another user who could write this note could keep the callback from being called.
        return None if info is None or self._owners.why_not(info) else read_record(path)

    def note_calling(self, version: Version) -> None:
        """Note that the callback is about to be called for a version.

        The callback may load the version and then fail. Because of the note, it is called again for
        whichever version comes next, even for the one loaded before.

        Raises:
            PlaceError: The note cannot be written.
        """
        last = self.called()
        if last is not None:
            self.note_doubtful(version.record.changed_since(last))

    def note_doubtful(self, names: Iterable[str]) -> None:
        """Note tensors of which the engine may hold wrong bytes, for the next call of the callback.

        Raises:
            PlaceError: The note cannot be written.
        """
        last, doubtful = self.called(), set(names)
        if last is None:
            return
        kept = {name: tensor for name, tensor in last.tensors.items() if name not in doubtful}
        begun = structs.replace(last, snapshot="", tensors=kept)
        begun.digest = begun.own_digest()
        if begun != last:
            self._note(begun)

    def note_called(self, version: Version) -> None:
        """Note that the callback has succeeded for a version.

        Raises:
            PlaceError: The note cannot be written.
        """
        self._note(version.record)

    def _note(self, record: VersionRecord) -> None:
        with self.translated():
            self._put(_CALLED, record.encode())

    def _put(self, name: str, content: bytes) -> None:
        """Write a note into the folder of the versions, durably."""
        self._folder.put(name, content, FILE_MODE)
