"""The folder of a local store: which store it holds, and the files and folders made in it.

New files and folders get the group of the store's folder, and its mode if other users may write to
the store. So a store that users share stays shared. In a folder that only its owner may write to,
the umask applies.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from casnap.backends.local_files.durability import NewNames
from casnap.backends.local_files.file_io import read_file
from casnap.backends.local_files.late_calls import watch_calls_to
from casnap.backends.local_files.local_paths import exists
from casnap.backends.local_files.owners import new_file_in
from casnap.backends.local_files.safe_paths import (
    OpenFolder,
    create_file,
    folder_at,
    parent_of,
    unlink_at,
)
from casnap.backends.local_files.system_errors import gone_error, translated
from casnap.errors import PLACE_ERRORS, BackendError, DamagedError
from casnap.format.records import CONFIG_KEY, MAX_CONFIG_BYTES
from casnap.runtime.descriptors import Descriptor
from casnap.runtime.file_systems import name_lag
from casnap.runtime.fork import new_lock

# The extended attribute of a folder that was made for markers. The folder is removed with its last
# marker; a folder that a user made stays.
_MADE = "user.casnap.made"
# Folders that this process has made durable: the identity of the store, and the folder. Without
# this, a program that opens a store anew for each take would sync them each time, since another
# process may have made them.
_durable: set[tuple[str, str]] = set()
_Inode: TypeAlias = tuple[int, int, int]


class StoreFolder:
    """The folder of a local store.

    In this class, "the record" is the store's ``casnap.json``.

    Args:
        folder: The real path of the store's folder.
        inner: The path of the objects in it: empty, or a slash and a name.

    Attributes:
        uri: The real path of the store's folder.
        objects: The path of the folder of the objects.
        new_names: The new names that the next :meth:`sync` makes durable.
        guard: A function that is called before the first change; it raises a StoreError if this
            user may only read the store. None once it was called, or if there is none.
    """

    def __init__(self, folder: Path, inner: str) -> None:
        self._folder = folder
        self.uri = str(folder)
        self.objects = f"{self.uri}{inner}"
        self.new_names = NewNames(self._identity_if_whole)
        self._entered: set[str] = set()
        # The folders that go into _durable with the next sync.
        self._noted: set[tuple[str, str]] = set()
        self._lock = new_lock()
        self._is_there = False
        self._check: Callable[[], None] | None = None
        self.guard: Callable[[], None] | None = None
        # The file of the record that was read last, and of the record of the store that uses this.
        self._read_record: _Inode | None = None
        self._record: _Inode | None = None
        self._name_lag: float | None = None

    @property
    def name_lag(self) -> float:
        """For how many seconds this host may not see a name that another host has put."""
        if self._name_lag is not None:
            return self._name_lag
        for folder in (self._folder, *self._folder.parents):
            # The look that follows raises the error, if there is one.
            with suppress(OSError):
                lag = name_lag(str(folder))
                if lag:
                    watch_calls_to(str(folder))
                if folder == self._folder:
                    self._name_lag = lag
                return lag
        return 0.0

    # --- which store is in it ---

    @property
    def identity(self) -> str:
        """A text that no other store's folder has, and no earlier one at the same path.

        On a local disk it consists of the folder's real path, device and inode, and of the record's
        device, inode and time of last change. Inodes are reused, but no user can choose this time.
        On a network file system, the client may give a file another inode and time after a while.
        So the identity is the path alone on such a file system.
        """
        with translated(self.uri):
            try:
                folder, record = os.stat(self.objects), os.lstat(f"{self.objects}/{CONFIG_KEY}")
            except FileNotFoundError as e:
                raise gone_error(self.uri) from e
        if self.name_lag:
            return self.uri
        return (
            f"{self.uri} {folder.st_dev} {folder.st_ino} "
            f"{record.st_dev} {record.st_ino} {record.st_ctime_ns}"
        )

    def note_record(self, info: os.stat_result) -> None:
        """Note the status of the record that was just read."""
        self._read_record = _inode(info)

    def belong(self, check: Callable[[], None]) -> None:
        """Note that this folder belongs to the store whose record was read last.

        Args:
            check: Raises a StoreError if the folder now holds another store.
        """
        self._check, self._record = check, self._read_record

    @contextmanager
    def base_folder(self, *, make: bool = True) -> Iterator[OpenFolder]:
        """Open the folder of the objects for a ``with`` block that changes objects.

        If the file of the record is not the one that was noted, the record is read and checked,
        since another store may have been moved to this path. The block's changes happen in the
        folder that was opened, even if this folder is moved meanwhile.

        Args:
            make: Whether to create the folder if it is missing.

        Raises:
            StoreError: The folder now holds another store, or this user may only read the store.
        """
        self.check_guard()
        with self.opened_or_made(self.objects) if make else folder_at(self.objects) as fd:
            base = OpenFolder(fd, self.objects)
            if self._check is not None and _record_in(fd) != self._record:
                self._check_record(base, self._check)
            yield base

    def check_place(self) -> None:
        """Check that the folder still holds the same store, and that this user may change it.

        Raises:
            StoreError: The folder holds another store, or this user may only read the store.
        """
        self.check_guard()
        if self._check is not None:
            with self.base_folder(make=False):
                pass

    def check_guard(self) -> None:
        """Call the guard, unless it was called before.

        Raises:
            StoreError: This user may only read the store.
        """
        if self.guard is not None:
            self.guard()
            self.guard = None

    def new_file(self) -> os.stat_result | None:
        """Create an empty file in ``tmp/`` with mode 0600, delete it, and return its status.

        The status shows if the file system gives all files to one user, or keeps no modes.

        Returns:
            The status; None if no file can be created.
        """
        with (
            suppress(OSError, *PLACE_ERRORS),
            folder_at(self.objects) as fd,
            self.opened_or_made(
                f"{self.objects}/tmp", OpenFolder(fd, self.objects), durable=False
            ) as tmp,
        ):
            return new_file_in(tmp, os.urandom(12).hex())
        return None

    def _check_record(self, base: OpenFolder, check: Callable[[], None]) -> None:
        record = _record_in(base.fd)
        check()
        # The check read the record at the path, which may be another one than in the open folder.
        # Their bytes are compared: equal inodes and times say that a record has not changed, but
        # different ones do not say that it is another record.
        with folder_at(self.objects) as fd:
            if self._record_at(base) != self._record_at(OpenFolder(fd, self.objects)):
                raise BackendError(f"{self.uri} was moved just now; try again")
        self._record = record

    def _record_at(self, base: OpenFolder) -> bytes | _Inode | None:
        """Return the record's bytes in an open folder; if unreadable, its file's :func:`_inode`."""
        try:
            return read_file(f"{self.objects}/{CONFIG_KEY}", MAX_CONFIG_BYTES, base)[0]
        except (FileNotFoundError, DamagedError, BackendError):
            return _record_in(base.fd)

    # --- what is made in it ---

    def make(self) -> None:
        """Create the store's folder and its parents, as far as they are missing."""
        with translated(self.uri):
            new_folders = [f for f in (self._folder, *self._folder.parents) if not exists(f)]
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError as e:
                # Below /proc, for example.
                raise BackendError(f"no folder can be made at {self.uri}; choose another") from e
        for folder in (self._folder, *self._folder.parents):
            if folder in new_folders or self.new_names.is_doubtful(str(folder.parent)):
                self.new_names.add(str(folder))

    @contextmanager
    def entered_above(self, path: str, base: OpenFolder) -> Iterator[int]:
        """Open the parent folder of a new file for a ``with`` block that creates the file.

        The parent folder is created if it is missing. The next :meth:`sync` makes durable the name
        of the file and the names of the folders above it, even if another process has made these
        folders.

        Args:
            path: The path of the new file.
            base: The open folder of the objects.
        """
        parent = path.rpartition("/")[0]
        with self.opened_or_made(parent, base) as folder:
            # Note the name before it is made, so that a failure in between does not lose it.
            self.new_names.add(path)
            with self._lock:
                if parent not in self._entered:
                    self._entered.add(parent)
                    store = self._identity_if_whole()
                    for place in self.up_to_store(parent):
                        if (store, place) not in _durable:
                            self.new_names.add(place)
                            if store:
                                self._noted.add((store, place))
            yield folder

    def up_to_store(self, folder: str) -> Iterator[str]:
        """Yield a folder and its parents, up to but without the store's own folder."""
        while folder != self.uri:
            yield folder
            folder = folder.rpartition("/")[0]

    def _identity_if_whole(self) -> str:
        """Return :attr:`identity`; "" while the store is still being made."""
        try:
            return self.identity
        except PLACE_ERRORS:
            return ""

    @contextmanager
    def opened_or_made(
        self, path: str, base: OpenFolder | None = None, *, durable: bool = True
    ) -> Iterator[int]:
        """Open a folder in the store's folder for a ``with`` block; create it if it is missing.

        Args:
            path: The path of the folder.
            base: The open folder of the objects, if this folder lies in it.
            durable: Whether the next :meth:`sync` makes the name of a new folder durable.
        """
        try:
            opened = folder_at(path, base=base)
        except FileNotFoundError:
            # If a store is removed while it is open, its folder is not made anew.
            if path == self.uri or (path == self.objects and self._is_there):
                raise
            self._make_folder(path, base, durable=durable)
            opened = folder_at(path, base=base)
        with opened as folder:
            self._is_there |= base is not None or path == self.objects
            yield folder

    def _make_folder(self, path: str, base: OpenFolder | None, *, durable: bool) -> None:
        parent, _, name = path.rpartition("/")
        with self.opened_or_made(parent, base, durable=durable) as folder:
            like = self._model(base)
            mode = stat.S_IMODE(like.st_mode)
            # A store in a folder like /tmp is not for everybody who may write there.
            is_open = path == self.objects and mode & stat.S_IWOTH and not mode & stat.S_ISGID
            try:
                os.mkdir(name, 0o777 if is_open else mode, dir_fd=folder)
            except OSError as e:
                # GlusterFS says "stale" where another host makes the same folder just now.
                if e.errno in (errno.EEXIST, errno.ESTALE):
                    return
                raise
        if not is_open and (_is_shared(like) or like.st_gid != os.getegid()):
            with folder_at(path, base=base) as fd:
                # By a handle with O_PATH: the umask may have taken the right to open it otherwise.
                handle = f"/proc/self/fd/{fd}"
                if _is_shared(like):
                    os.chmod(handle, mode)
                _follow_group(handle, like.st_gid)
        if base is None and path != self.objects:
            with suppress(OSError), parent_of(path) as (folder, name):
                os.setxattr(f"/proc/self/fd/{folder}/{name}", _MADE, b"1", follow_symlinks=False)
        if durable:
            self.new_names.add(path)

    def remove_empty(self, lowest: str) -> None:
        """Remove an empty folder, and its empty parents that were made for markers.

        Args:
            lowest: The path of the folder.
        """
        for place in self.up_to_store(lowest):
            with parent_of(place) as (folder, name):
                try:
                    if place != lowest:
                        handle = f"/proc/self/fd/{folder}/{name}"
                        os.getxattr(handle, _MADE, follow_symlinks=False)
                    os.rmdir(name, dir_fd=folder)
                except OSError:
                    break

    def create(self, name: str, folder: int, base: OpenFolder | None) -> Descriptor:
        """Create a file in an open folder of the store; return it open for writing.

        The file gets the mode and group that the store's other files have.

        Args:
            name: The name of the file.
            folder: The open folder.
            base: The open folder of the objects, if the file lies in it.
        """
        like = self._model(base)
        mode = like.st_mode & 0o666
        file = create_file(name, folder, mode)
        try:
            if _is_shared(like):
                os.fchmod(file.fd, mode)
            if like.st_gid != os.getegid():
                _follow_group(file.fd, like.st_gid)
        except BaseException:
            unlink_at(name, folder)
            file.close()
            raise
        return file

    def _model(self, base: OpenFolder | None) -> os.stat_result:
        """Return the status of the folder whose mode and group new files and folders get.

        It is the folder of the objects if that is open, otherwise the store's own folder.
        """
        return os.stat(self.uri) if base is None else os.fstat(base.fd)

    def sync(self) -> None:
        """Make the names of new files and folders durable.

        Raises:
            BackendError: The store's folder is gone.
        """
        with self._lock:
            folders = self._noted.copy()
        try:
            self.new_names.sync()
        except FileNotFoundError as e:
            raise gone_error(e.filename or self.uri) from e
        _durable.update(folders)
        with self._lock:
            self._noted -= folders


def _inode(file: os.stat_result) -> _Inode:
    """Return a key of a file. A later file with the same inode gets another key."""
    return file.st_dev, file.st_ino, file.st_ctime_ns


def _record_in(folder: int) -> _Inode | None:
    """Return the :func:`_inode` of the record in an open folder; None if there is no record."""
    try:
        return _inode(os.stat(CONFIG_KEY, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return None


def _is_shared(folder: os.stat_result) -> bool:
    """Whether users share a store: its group, or all users, may write to its folder."""
    return bool(folder.st_mode & (stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH))


def _follow_group(file: int | str, gid: int) -> None:
    try:
        os.chown(file, -1, gid)
    except PermissionError:
        # This user is not in the group. The mode still says who may read the file.
        return
