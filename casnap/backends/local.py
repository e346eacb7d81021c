"""Objects as files of a local file system: each step is durable, creation is atomic by ``link``."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from casnap.backends.base import (
    MAX_MARKER_BYTES,
    MAX_WHOLE_BYTES,
    TEMPORARY,
    Backend,
    Target,
    check_length,
    translated,
)
from casnap.backends.door import (
    OpenFolder,
    check_regular,
    create_file,
    folder_at,
    open_file,
    open_folder,
    parent_of,
    stat_at,
    unlink,
)
from casnap.backends.durability import NewNames, doubtful
from casnap.errors import BackendError, CasnapError
from casnap.format.names import NOTICE_HEAD, STORE_FOLDER
from casnap.format.records import CONFIG_KEY
from casnap.runtime.buffers import PAGE, address_of
from casnap.runtime.environment import boot_id
from casnap.runtime.typing import override

_DIRECT = getattr(os, "O_DIRECT", 0)
# Below this, going through the page cache costs less than going around it.
_DIRECT_WRITE_BYTES = 256 << 10
_ATTEMPTS = 3
# Errors of a folder that is not there for this user.
_UNLISTED = frozenset({errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})
# The extended attribute of a folder that was made for markers: it goes with the last of them, where
# a user's stays.
_MADE = "user.casnap.made"
# Folders that this process has made durable: the identity of the store, and the folder. Who opens
# a store anew for each take would else sync them each time, as they may be another process's.
_durable: set[tuple[str, str]] = set()
_Inode: TypeAlias = tuple[int, int, int]

# A take under way: the root that it is based on.
_ANNOUNCEMENT = re.compile("take-([0-9a-f]{12})-[0-9a-f]{12}")
# The open files of the takes of this process that are under way.
_announcements: set[int] = set()
# Where there are no locks, an announcement counts for so many seconds.
_DAY = 86400.0


class LocalBackend(Backend):
    """A folder of a local file system.

    Large aligned writes go around the page cache if the file system allows it: that is faster, and
    leaves the cache to the training data. Reads go through it, for the next reader. Modes and group
    of files follow the folder, so that a shared store stays shared. If only its owner may write to
    the folder, the umask applies as well. Everything in the folder is reached by ``door.py``.

    Args:
        folder: The folder. Links on the way to it are followed now, and not again.
    """

    keeps_copies = True
    syncs_folders = True
    folder: Path
    inner = f"/{STORE_FOLDER}"
    """Where the objects are in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.uri = str(self.folder)
        self._base = f"{self.uri}{self.inner}"
        self._record_path = self._path(CONFIG_KEY)
        self._new = NewNames()
        self._entered: set[str] = set()
        # What goes into _durable with the next sync.
        self._noted: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._is_there = False
        self._check: Callable[[Backend], None] | None = None
        # The record that was read last, and the one of the store that uses this, as files.
        self._read_record: _Inode | None = None
        self._record: _Inode | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process reach the same folder."""
        return type(self), (self.folder,), {"exclusive": self.exclusive}

    def make(self) -> None:
        """Make the folder itself, and those above it that are missing."""
        with translated(self.uri):
            new_folders = [f for f in (self.folder, *self.folder.parents) if not f.exists()]
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError as e:
                # Below /proc, say.
                raise BackendError(f"no folder can be made at {self.uri}; choose another") from e
        for folder in (self.folder, *self.folder.parents):
            if folder in new_folders or str(folder.parent) in doubtful:
                self._new.add(str(folder))
        is_new = self.size_if_there(CONFIG_KEY) is None and {"tmp"}.issuperset(self.names(""))
        if is_new and os.access(self.folder.parent, os.R_OK):
            # Its maker may have failed before it was durable.
            self._new.add(self.uri)

    def _path(self, key: str) -> str:
        """Return the path of an object.

        Raises:
            BackendError: It climbs out of the folder.
        """
        return _path_in(self._base, key) if key else self._base

    @override
    def where(self, key: str) -> str:
        return f"{self._base}/{key}"

    @override
    @property
    def identity(self) -> str:
        """The real path, and the device and inode of the folder and of the store's record.

        Inodes are used again, so the time of the record's last change is part of it: no user can
        choose that.
        """
        with translated(self.uri):
            try:
                folder, record = os.stat(self._base), os.lstat(self._path(CONFIG_KEY))
            except FileNotFoundError as e:
                raise BackendError(f"{self.uri} is gone, or was moved; open it anew") from e
        return (
            f"{self.uri} {folder.st_dev} {folder.st_ino} "
            f"{record.st_dev} {record.st_ino} {record.st_ctime_ns}"
        )

    @override
    @property
    def endpoint(self) -> str:
        """The mounted file system, for as long as this host runs."""
        with translated(self.uri):
            return f"{boot_id()} {os.stat(self.uri).st_dev}"

    @override
    def belong(self, check: Callable[[Backend], None]) -> None:
        self._check, self._record = check, self._read_record

    @contextmanager
    def _opened_base(self, *, make: bool = True) -> Iterator[OpenFolder]:
        """Open the folder of the objects for a ``with`` block that changes some.

        A record that is another file than before says that another store may have come here. What
        is then changed lies in this very folder, also if that is moved meanwhile.

        Args:
            make: Whether to make the folder if it is missing.

        Raises:
            StoreError: It is the folder of another store than that which uses this.
        """
        with self._opened_or_made(self._base) if make else folder_at(self._base) as fd:
            if self._check is not None and _record_in(fd) != self._record:
                self._check_record(fd, self._check)
            yield OpenFolder(fd, self._base)

    def _check_place(self) -> None:
        """Check that no other store has come here."""
        if self._check is not None:
            with self._opened_base(make=False):
                pass

    def _check_record(self, folder: int, check: Callable[[Backend], None]) -> None:
        record = _record_in(folder)
        check(self)
        with folder_at(self._base) as at_path:
            if not record == _record_in(folder) == _record_in(at_path):
                raise BackendError(f"{self.uri} was moved just now; try again")
        self._record = record

    @override
    def write(self, key: str, content: memoryview | bytes) -> None:
        """Write a file under ``tmp/``, sync it, then link it into place."""
        if not self._link(key, content):
            raise BackendError(f"{self.where(key)} exists already, and is not written over")

    @override
    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Create a file by ``link``, which fails if the name exists."""
        return self._link(key, content)

    @override
    def copy(self, key: str, to: str) -> None:
        path, target = self._path(key), self._path(to)
        with (
            translated(target),
            self._opened_base(make=False) as base,
            parent_of(path, base) as (source, name),
        ):
            check_regular(os.stat(name, dir_fd=source, follow_symlinks=False), path)
            with self._entered_above(target, base) as folder:
                _link_at(name, source, target.rpartition("/")[2], folder)
                self._new.add(target)

    def _link(self, key: str, content: memoryview | bytes) -> bool:
        target = self._path(key)
        with translated(target):
            for _ in range(_ATTEMPTS):
                try:
                    return self._try_to_link(target, content)
                except FileNotFoundError as e:
                    # Did a collector delete it, which could not see our lock?
                    cause = e
            raise BackendError(f"{target}: its folder vanished") from cause

    def _try_to_link(self, target: str, content: memoryview | bytes) -> bool:
        with (
            self._opened_base() as base,
            self._temporary_folder(base) as tmp,
            self._entered_above(target, base) as folder,
        ):
            temporary = os.urandom(12).hex()
            fd = self._write_file(temporary, tmp, content, base)
            try:
                _link_at(temporary, tmp, target.rpartition("/")[2], folder)
            except FileExistsError:
                return False
            finally:
                _unlink_at(temporary, tmp)
                os.close(fd)
            # Again: a sync of its folder until now may not have covered it.
            self._new.add(target)
        return True

    @contextmanager
    def _entered_above(self, target: str, base: OpenFolder) -> Iterator[int]:
        """Open the folder of a new name. It becomes durable even if another process has made it."""
        parent = target.rpartition("/")[0]
        with self._opened_or_made(parent, base) as folder:
            # Note the name before it is made, so that a failure in between does not lose it.
            self._new.add(target)
            with self._lock:
                if parent not in self._entered:
                    self._entered.add(parent)
                    store = self._identity_if_whole()
                    for place in self._up_to_store(parent):
                        if (store, place) not in _durable:
                            self._new.add(place)
                            if store:
                                self._noted.add((store, place))
            yield folder

    def _up_to_store(self, folder: str) -> Iterator[str]:
        """Yield a folder, and those above it, below the folder of the store."""
        while folder != self.uri:
            yield folder
            folder = folder.rpartition("/")[0]

    def _identity_if_whole(self) -> str:
        """Return the identity; nothing while the store is being made."""
        try:
            return self.identity
        except BackendError:
            return ""

    def _temporary_folder(self, base: OpenFolder) -> AbstractContextManager[int]:
        return self._opened_or_made(self._path("tmp"), base)

    @contextmanager
    def _opened_or_made(
        self, path: str, base: OpenFolder | None = None, *, durable: bool = True
    ) -> Iterator[int]:
        """Open a folder of the store for a ``with`` block; make it if it is missing.

        Args:
            path: The folder.
            base: The folder of the objects, if this one is in it.
            durable: Whether a new one is to be made durable.
        """
        try:
            folder = open_folder(path, base=base)
        except FileNotFoundError:
            # Nothing is made anew of a store that was removed while it is open.
            if path == self.uri or (path == self._base and self._is_there):
                raise
            self._make_folder(path, base, durable=durable)
            folder = open_folder(path, base=base)
        try:
            self._is_there |= base is not None or path == self._base
            yield folder
        finally:
            os.close(folder)

    def _make_folder(self, path: str, base: OpenFolder | None, *, durable: bool) -> None:
        parent, _, name = path.rpartition("/")
        with self._opened_or_made(parent, base, durable=durable) as folder:
            like = self._model(base)
            mode = stat.S_IMODE(like.st_mode)
            # A store in a folder like /tmp is not meant for all who may write there.
            is_open = path == self._base and mode & stat.S_IWOTH and not mode & stat.S_ISGID
            try:
                os.mkdir(name, 0o777 if is_open else mode, dir_fd=folder)
            except FileExistsError:
                return
        if not is_open and (_is_shared(like) or like.st_gid != os.getegid()):
            with folder_at(path, base=base) as fd:
                # The umask may have taken the right to open it otherwise.
                handle = f"/proc/self/fd/{fd}"
                if _is_shared(like):
                    os.chmod(handle, mode)
                _follow_group(handle, like.st_gid)
        if base is None and path != self._base:
            with suppress(OSError), parent_of(path) as (folder, name):
                os.setxattr(f"/proc/self/fd/{folder}/{name}", _MADE, b"1", follow_symlinks=False)
        if durable:
            self._new.add(path)

    def _write_file(
        self, name: str, folder: int, content: memoryview | bytes, base: OpenFolder
    ) -> int:
        """Write a file and return it open. Its lock says that its writer lives."""
        fd = self._create(name, folder, self._model(base))
        try:
            _lock(fd)
            write_at(fd, memoryview(content), 0)
            os.fsync(fd)
        except BaseException:
            _unlink_at(name, folder)
            os.close(fd)
            raise
        return fd

    def _model(self, base: OpenFolder | None) -> os.stat_result:
        """Return the folder whose mode and group those of what is made follow."""
        return os.stat(self.uri) if base is None else os.fstat(base.fd)

    def _create(self, name: str, folder: int, like: os.stat_result) -> int:
        mode = like.st_mode & 0o666
        fd = create_file(name, folder, mode)
        if _is_shared(like):
            os.fchmod(fd, mode)
        if like.st_gid != os.getegid():
            _follow_group(fd, like.st_gid)
        return fd

    @override
    def sync(self, *keys: str) -> None:
        """Make the names of new files durable. Their bytes were synced before they got names."""
        for key in keys:
            self._new.add(self._path(key))
        with self._lock:
            folders = self._noted.copy()
        try:
            self._new.sync()
        except FileNotFoundError as e:
            raise BackendError(f"{e.filename or self.uri} is gone, or was moved") from e
        _durable.update(folders)
        with self._lock:
            self._noted -= folders

    @override
    def read(self, key: str, most: int = MAX_WHOLE_BYTES) -> bytes:
        return self._read_path(self._path(key), most)

    def _read_path(self, path: str, most: int) -> bytes:
        with translated(path):
            fd, info = open_file(path)
            try:
                check_length(path, info.st_size, most)
                content = _read_all(fd, info.st_size)
            finally:
                os.close(fd)
        if path == self._record_path:
            self._read_record = _inode(info)
        return content

    @override
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        return list(self._read_each(key, targets))

    @override
    def _read_each(self, key: str, targets: Sequence[Target]) -> Iterator[int]:
        path = self._path(key)
        with translated(path):
            fd, _ = open_file(path)
        try:
            for offset, target in targets:
                with translated(path):
                    n = _read_run(fd, target, offset)
                yield n
        finally:
            os.close(fd)

    @override
    def will_read(self, key: str, runs: Sequence[tuple[int, int]]) -> None:
        with suppress(OSError, BackendError):
            fd, _ = open_file(self._path(key))
            try:
                for offset, nbytes in runs:
                    # The hint looks up each page, also where all of them are cached.
                    if not _is_cached(fd, offset + nbytes - 1):
                        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    @override
    def size(self, key: str) -> int:
        path = self._path(key)
        with translated(path):
            info = stat_at(path)
            check_regular(info, path)
        return info.st_size

    @override
    def names(self, folder: str) -> list[str]:
        path = self._path(folder)
        with translated(path):
            try:
                with folder_at(path, listed=True) as fd:
                    return os.listdir(fd)
            except (FileNotFoundError, NotADirectoryError):
                return []

    @override
    def delete(self, key: str) -> None:
        self._remove(self._path(key))

    def _remove(self, path: str) -> None:
        with translated(path), suppress(FileNotFoundError), self._opened_base(make=False) as base:
            unlink(path, base)

    @override
    def tidy(self, min_age: float) -> int:
        """Unlink files in ``tmp/`` that no living writer has locked."""
        freed = 0
        with suppress(FileNotFoundError), self._listed_temporary() as folder:
            for name in os.listdir(folder):
                if TEMPORARY.fullmatch(name):
                    freed += _unlink_abandoned(name, folder, min_age)
                elif _ANNOUNCEMENT.fullmatch(name):
                    # This unlinks what a take that has died left there.
                    _is_announced(name, folder, _DAY)
        return freed

    @contextmanager
    def _listed_temporary(self) -> Iterator[int]:
        """Open ``tmp/`` for a ``with`` block that lists it and deletes there."""
        path = self._path("tmp")
        with (
            translated(path),
            self._opened_base(make=False) as base,
            folder_at(path, listed=True, base=base) as folder,
        ):
            yield folder

    @override
    @contextmanager
    def announced(self, base: int, *, at_once: bool = False) -> Iterator[Callable[[], None]]:
        """Hold a locked file in ``tmp/``; the kernel frees the lock of a process that dies."""
        name = f"take-{base:012x}-{os.urandom(6).hex()}"
        path = self._path(f"tmp/{name}")
        with self._opened_base() as store, self._temporary_folder(store) as tmp:
            with translated(path):
                fd = self._create_locked(name, tmp, store)
            _announcements.add(fd)
            try:
                yield lambda: None
            finally:
                # Not in a forked child: the take is its parent's.
                if fd in _announcements:
                    _announcements.discard(fd)
                    with suppress(OSError):
                        _unlink_at(name, tmp)
                    os.close(fd)

    def _create_locked(self, name: str, folder: int, store: OpenFolder) -> int:
        """Create a file that has its name only once it is locked; return it open."""
        for _ in range(_ATTEMPTS):
            temporary = os.urandom(12).hex()
            fd = self._create(temporary, folder, self._model(store))
            try:
                # A collector may have locked it before, or deleted it.
                if _lock(fd) is not False:
                    with suppress(FileNotFoundError):
                        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                        return fd
                _unlink_at(temporary, folder)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "collectors delete what announces a take", name)

    @override
    def announced_bases(self, max_age: float) -> list[int]:
        bases: list[int] = []
        with suppress(FileNotFoundError), self._listed_temporary() as folder:
            for name in os.listdir(folder):
                found = _ANNOUNCEMENT.fullmatch(name)
                if found is not None and _is_announced(name, folder, max_age):
                    bases.append(int(found[1], 16))
        return bases

    @override
    def free_bytes(self) -> int | None:
        with translated(self.uri):
            found = os.statvfs(self.uri)
        return found.f_bavail * found.f_frsize

    @override
    def sizes(self, folder: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        folders = [folder]
        while folders:
            parent = folders.pop()
            path = self._path(parent)
            with translated(path):
                try:
                    with folder_at(path, listed=True) as fd, os.scandir(fd) as entries:
                        for entry in entries:
                            key = f"{parent}/{entry.name}" if parent else entry.name
                            if entry.is_dir(follow_symlinks=False):
                                folders.append(key)
                            elif entry.is_file(follow_symlinks=False):
                                with suppress(FileNotFoundError):
                                    sizes[key] = entry.stat(follow_symlinks=False).st_size
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError as e:
                    # Who may write could put folders below that nobody else can list.
                    if parent == folder or e.errno not in _UNLISTED:
                        raise
        return sizes

    @override
    def mark(self, key: str, content: bytes) -> None:
        path = _path_in(self.uri, key)
        with translated(path):
            self._check_place()
            for _ in range(_ATTEMPTS):
                # Whoever removes an earlier marker removes its folder, if that is empty just now.
                # Who put it aside may put it back.
                with suppress(FileNotFoundError, FileExistsError):
                    self._put_loosely(path, content)
                    return
            self._put_loosely(path, content)

    @override
    def read_marker(self, key: str) -> bytes:
        return self._read_path(_path_in(self.uri, key), MAX_MARKER_BYTES)

    @override
    def unmark(
        self, keys: Iterable[str], is_stale: Callable[[str, bytes], bool]
    ) -> dict[str, CasnapError]:
        """Remove marker files that are stale, and their folders, if these are empty then.

        A folder further up goes too if it is empty, unless a user made it.
        """
        errors: dict[str, CasnapError] = {}
        for key in keys:
            try:
                self._unmark(key, partial(is_stale, key))
            except CasnapError as e:
                errors[key] = e
        return errors

    def _unmark(self, key: str, is_stale: Callable[[bytes], bool]) -> None:
        path = _path_in(self.uri, key)
        with translated(path), suppress(FileNotFoundError):
            if not is_stale(self.read_marker(key)):
                return
            with parent_of(path) as (folder, name):
                aside = f".{name}.{os.urandom(12).hex()}"
                os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
                was_stale = False
                try:
                    # Another process may have put a new marker since the look.
                    was_stale = is_stale(self.read_marker(f"{key.rpartition('/')[0]}/{aside}"))
                finally:
                    if not was_stale:
                        _put_back(aside, name, folder)
                    _unlink_at(aside, folder)
            marked_folder = path.rpartition("/")[0]
            if was_stale:
                _remove_notices(marked_folder)
            for place in self._up_to_store(marked_folder):
                with parent_of(place) as (folder, name):
                    try:
                        if place != marked_folder:
                            at = f"/proc/self/fd/{folder}/{name}"
                            os.getxattr(at, _MADE, follow_symlinks=False)
                        os.rmdir(name, dir_fd=folder)
                    except OSError:
                        break

    @override
    def keep_copy(self, key: str, content: bytes | None) -> None:
        path = self._path(key)
        if content is None:
            self._remove(path)
            return
        with translated(path), self._opened_base() as base, suppress(FileExistsError):
            self._put_loosely(path, content, base)

    def _put_loosely(self, path: str, content: bytes, base: OpenFolder | None = None) -> None:
        """Put a file in place of another one.

        Raises:
            FileExistsError: Another process does so too.
        """
        parent, _, name = path.rpartition("/")
        # Not synced, since deleting the snapshot removes these folders too.
        with self._opened_or_made(parent, base, durable=False) as folder:
            # Do not write into an existing file: it may be another user's.
            _unlink_at(name, folder)
            fd = self._create(name, folder, self._model(base))
            try:
                write_at(fd, memoryview(content), 0)
            finally:
                os.close(fd)


def _inode(file: os.stat_result) -> _Inode:
    """Return what tells a file from others, also from an earlier one of the same number."""
    return file.st_dev, file.st_ino, file.st_ctime_ns


def _record_in(folder: int) -> _Inode | None:
    """Return the record of the store in an open folder; None if there is none."""
    try:
        return _inode(os.stat(CONFIG_KEY, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return None


def _path_in(folder: str, key: str) -> str:
    """Return the path of a key in a folder.

    Raises:
        BackendError: It climbs out.
    """
    if ".." in key and ".." in key.split("/"):
        raise BackendError(f"{folder}/{key} is not in the store")
    return f"{folder}/{key}"


def _close_announcements() -> None:
    """Close what a child has inherited: a lock lasts until the last process closes the file."""
    while _announcements:
        os.close(_announcements.pop())


os.register_at_fork(after_in_child=_close_announcements)


def _lock(fd: int) -> bool | None:
    """Try to lock a file; return None if the file system has no locks, or not for this file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return False if e.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _link_at(name: str, folder: int, to: str, target: int) -> None:
    """Give a file in an open folder a second name in another one."""
    os.link(name, to, src_dir_fd=folder, dst_dir_fd=target, follow_symlinks=False)


def _put_back(aside: str, name: str, folder: int) -> None:
    """Give a file or folder its name again, unless there is another one by now."""
    try:
        _link_at(aside, folder, name, folder)
    except FileExistsError:
        return
    except OSError:  # it is a folder
        os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)


def _remove_notices(path: str) -> None:
    """Remove what stands beside a marker for the readers of other libraries."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with folder_at(path, listed=True) as folder:
        for name in os.listdir(folder):
            try:
                fd = os.open(name, flags, dir_fd=folder)
            except OSError:
                continue
            with open(fd, "rb") as file:
                is_file = stat.S_ISREG(os.fstat(fd).st_mode)
                if is_file and file.read(len(NOTICE_HEAD)) == NOTICE_HEAD:
                    _unlink_at(name, folder)


def _unlink_at(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _unlink_abandoned(name: str, folder: int, min_age: float) -> int:
    """Unlink a temporary file, unless it is young or its writer lives; return the freed bytes.

    Another user's file stays: only that user can lock it, or may remove it from a sticky folder.
    """
    try:
        fd = _open_to_lock(name, folder)
    except OSError:
        return 0
    try:
        info = os.fstat(fd)
        # A time in the future says nothing; then only the lock counts.
        is_young = 0 <= time.time() - info.st_mtime < min_age
        if not stat.S_ISREG(info.st_mode) or is_young or _lock(fd) is False:
            return 0
        try:
            _unlink_at(name, folder)
        except PermissionError:
            return 0
        # A second name: it was linked into place, so unlinking frees nothing.
        return info.st_size if info.st_nlink == 1 else 0
    finally:
        os.close(fd)


def _is_announced(name: str, folder: int, max_age: float) -> bool:
    """Whether the process lives that announced a take; unlink what a dead one has left.

    Where there are no locks, each announcement counts until it is too old.
    """
    try:
        fd = _open_to_lock(name, folder)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return False
        # A time in the future says nothing; then only the lock counts.
        age, is_free = time.time() - found.st_mtime, _lock(fd)
        if is_free or (is_free is None and not 0 <= age < max_age):
            with suppress(OSError):
                _unlink_at(name, folder)
            return False
        return age < max_age
    finally:
        os.close(fd)


def _open_to_lock(name: str, folder: int) -> int:
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # On NFS, only a file that is open for writing can be locked.
        return os.open(name, os.O_RDWR | flags, dir_fd=folder)
    except OSError:
        return os.open(name, os.O_RDONLY | flags, dir_fd=folder)


def _is_shared(folder: os.stat_result) -> bool:
    """Whether a store is for several users: its group or all may write to its folder."""
    return bool(folder.st_mode & (stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH))


def _follow_group(file: int | str, gid: int) -> None:
    try:
        os.chown(file, -1, gid)
    except PermissionError:
        # This user is not in that group. The mode still says who can read the file.
        return


def write_at(fd: int, view: memoryview, offset: int) -> None:
    """Write to a file; whole pages of a large aligned view around the page cache."""
    written = 0
    if _DIRECT and len(view) >= _DIRECT_WRITE_BYTES and not view.readonly:
        written = _write_direct(fd, view, offset)
    while written < len(view):
        written += os.pwrite(fd, view[written:], offset + written)


def _write_direct(fd: int, view: memoryview, offset: int) -> int:
    """Write whole pages of an aligned view around the page cache; return how many bytes."""
    nbytes = len(view) // PAGE * PAGE
    if address_of(view) % PAGE or offset % PAGE:
        return 0
    try:
        # Opened once more, since other threads may write to the file too.
        direct = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | _DIRECT | os.O_CLOEXEC)
    except OSError:
        return 0
    written = 0
    try:
        while written < nbytes:
            written += os.pwrite(direct, view[written:nbytes], offset + written)
            if written % PAGE:
                break
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(direct)
    return written


def _is_cached(fd: int, offset: int) -> bool:
    """Whether a byte can be read without the disk, as far as the system says."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, getattr(os, "RWF_NOWAIT", 0)) == 1
    except OSError:
        return False


def _read_all(fd: int, nbytes: int) -> bytes:
    """Read a file of so many bytes; less if it was cut off meanwhile."""
    content = b""
    while len(content) < nbytes and (piece := os.read(fd, nbytes - len(content))):
        # A read of a local file returns all of it.
        content = content + piece if content else piece
    return content


def _read_run(fd: int, target: memoryview, offset: int) -> int:
    nbytes = 0
    while nbytes < len(target):
        n = os.preadv(fd, [target[nbytes:]], offset + nbytes)
        if n == 0:
            break
        nbytes += n
    return nbytes
