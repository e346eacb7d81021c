"""Objects as files of a local file system: each step is durable, creation is atomic by ``link``."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from casnap.backends.base import TEMPORARY, Backend, Target, translated
from casnap.backends.durability import NewNames
from casnap.errors import BackendError
from casnap.format.records import CONFIG_KEY
from casnap.runtime.buffers import PAGE, address_of
from casnap.runtime.environment import boot_id
from casnap.runtime.handlers import pass_on, system_errors_ignored
from casnap.runtime.typing import override

_DIRECT = getattr(os, "O_DIRECT", 0)
# Below this, going through the page cache costs less than going around it.
_DIRECT_WRITE_BYTES = 1 << 20
_ATTEMPTS = 3
# Folders that this process has made durable: the identity of the store, and the folder. Who opens
# a store anew for each take would else sync them each time, as they may be another process's.
_durable: set[tuple[str, Path]] = set()


class LocalBackend(Backend):
    """A folder of a local file system.

    Large aligned writes go around the page cache if the file system allows it: that is faster, and
    leaves the cache to the training data. Reads go through it, for the next reader. Modes and group
    of files follow the folder, so that a shared store stays shared. If only its owner may write to
    the folder, the umask applies as well.
    """

    keeps_copies = True
    folder: Path

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = str(folder)
        self._new = NewNames(self._put_anew)
        self._entered: set[Path] = set()
        # What goes into _durable with the next sync.
        self._noted: set[tuple[str, Path]] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process reach the same folder."""
        return type(self), (self.folder,), {"exclusive": self.exclusive}

    def make(self) -> None:
        """Make the folder itself, and those above it that are missing."""
        with translated(self.uri):
            missing = [f for f in (self.folder, *self.folder.parents) if not f.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, *self.folder.parents):
            if folder in missing or self._new.failures(folder):
                self._new.add(folder)
        # List the folder only if it holds no store: a store has a name here for each snapshot.
        is_new = not (self.folder / CONFIG_KEY).exists() and {"tmp"}.issuperset(self.names(""))
        if is_new and os.access(self.folder.parent, os.R_OK):
            # Its maker may have failed before it was durable.
            self._new.add(self.folder)

    @override
    @property
    def identity(self) -> str:
        """The real path, and the device and inode of the folder and of the store's record.

        Inodes are used again, so the time of the record's last change is part of it: no user can
        choose that.
        """
        with translated(self.uri):
            try:
                real = os.path.realpath(self.folder, strict=True)
                folder, record = os.stat(real), os.stat(f"{real}/{CONFIG_KEY}")  # noqa: PTH116
            except FileNotFoundError as e:
                raise BackendError(f"{self.uri} is gone, or was moved; open it anew") from e
        return (
            f"{real} {folder.st_dev} {folder.st_ino} "
            f"{record.st_dev} {record.st_ino} {record.st_ctime_ns}"
        )

    @override
    @property
    def endpoint(self) -> str:
        """The mounted file system, for as long as this host runs."""
        with translated(self.uri):
            return f"{boot_id()} {self.folder.stat().st_dev}"

    @override
    def write(self, key: str, content: memoryview | bytes) -> None:
        """Write a file under ``tmp/``, sync it, then link it into place."""
        if not self._link(key, content):
            raise BackendError(f"{self.uri}/{key} exists already, and is not written over")

    @override
    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Create a file by ``link``, which fails if the name exists."""
        return self._link(key, content)

    @override
    def copy(self, key: str, to: str) -> None:
        target = self.folder / to
        with translated(f"{self.uri}/{to}"):
            failures = self._enter(target)
            os.link(self.folder / key, target)
            self._new.add(target, failures)

    def _link(self, key: str, content: memoryview | bytes) -> bool:
        target = self.folder / key
        with translated(f"{self.uri}/{key}"):
            self._make_folder(self.folder / "tmp")
            failures = self._enter(target)
            for attempt in range(_ATTEMPTS):
                temporary = self.folder / "tmp" / os.urandom(12).hex()
                fd = self._write_file(temporary, content)
                try:
                    os.link(temporary, target)
                    # Again: a sync of its folder until now may not have covered it.
                    self._new.add(target, failures)
                    break
                except FileExistsError:
                    return False
                except FileNotFoundError as e:
                    # Did a collector delete it, which could not see our lock?
                    if attempt == _ATTEMPTS - 1:
                        raise BackendError(f"{self.uri}/{key}: its folder vanished") from e
                finally:
                    temporary.unlink(missing_ok=True)
                    os.close(fd)
        return True

    def _enter(self, target: Path) -> int:
        """Make the folder of a new name. It becomes durable even if another process has made it.

        Returns:
            What to pass to ``NewNames.add`` once the name is there.
        """
        folder = target.parent
        self._make_folder(folder)
        failures = self._new.failures(target)
        # Note the name before it is made, so that a failure in between does not lose it.
        self._new.add(target, failures)
        with self._lock:
            if folder not in self._entered:
                self._entered.add(folder)
                store = self._identity_if_whole()
                for above in self._up_to_store(folder):
                    if (store, above) not in _durable:
                        self._new.add(above)
                        if store:
                            self._noted.add((store, above))
        return failures

    def _up_to_store(self, folder: Path) -> Iterator[Path]:
        """Yield a folder, and those above it, below the folder of the store."""
        while folder != self.folder:
            yield folder
            folder = folder.parent

    def _identity_if_whole(self) -> str:
        """Return the identity; nothing while the store is being made."""
        try:
            return self.identity
        except BackendError:
            return ""

    def _put_anew(self, path: Path) -> None:
        self._make_folder(self.folder / "tmp")
        temporary = self.folder / "tmp" / os.urandom(12).hex()
        fd = self._write_file(temporary, path.read_bytes())
        try:
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
            os.close(fd)

    def _make_folder(self, folder: Path, *, durable: bool = True) -> None:
        if folder.is_dir():
            return
        self._make_folder(folder.parent, durable=durable)
        like = self.folder.stat()
        try:
            folder.mkdir(stat.S_IMODE(like.st_mode))
        except FileExistsError:
            return
        if _is_shared(like):
            folder.chmod(stat.S_IMODE(like.st_mode))
        _follow_group(folder, like.st_gid)
        if durable:
            self._new.add(folder)

    def _write_file(self, path: Path, content: memoryview | bytes) -> int:
        """Write a file and return it open. Its lock says that its writer lives."""
        fd = self._create(path)
        try:
            _lock(fd)
            write_at(fd, memoryview(content), 0)
            os.fsync(fd)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        return fd

    def _create(self, path: Path) -> int:
        like = self.folder.stat()
        mode = like.st_mode & 0o666
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
        if _is_shared(like):
            os.fchmod(fd, mode)
        if like.st_gid != os.getegid():
            _follow_group(fd, like.st_gid)
        return fd

    @override
    def sync(self, *keys: str) -> None:
        """Make the names of new files durable. Their bytes were synced before they got names."""
        for key in keys:
            self._new.add(self.folder / key)
        with self._lock:
            noted = self._noted.copy()
        self._new.sync()
        _durable.update(noted)
        with self._lock:
            self._noted -= noted

    @override
    def read(self, key: str) -> bytes:
        with translated(f"{self.uri}/{key}"):
            return (self.folder / key).read_bytes()

    @override
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        return list(self._read_each(key, targets))

    @override
    def _read_each(self, key: str, targets: Sequence[Target]) -> Iterator[int]:
        # To make a Path takes as long as to read a small chunk; so in will_read.
        path = f"{self.uri}/{key}"
        with translated(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset, target in targets:
                with translated(path):
                    n = _read(fd, target, offset)
                yield n
        finally:
            os.close(fd)

    @override
    def will_read(self, key: str, runs: Sequence[tuple[int, int]]) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        with system_errors_ignored():
            fd = os.open(f"{self.uri}/{key}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                for offset, nbytes in runs:
                    # The hint looks up each page, also where all of them are cached.
                    if not _is_cached(fd, offset + nbytes - 1):
                        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    @override
    def size(self, key: str) -> int:
        path = f"{self.uri}/{key}"
        try:
            # A take asks thousands of times, so this uses no Path.
            return os.stat(path).st_size  # noqa: PTH116
        except OSError:
            with translated(path):
                raise

    @override
    def names(self, folder: str) -> list[str]:
        with translated(f"{self.uri}/{folder}"):
            try:
                # Making a Path for each name would take longer than the listing.
                return os.listdir(self.folder / folder)  # noqa: PTH208
            except (FileNotFoundError, NotADirectoryError):
                return []

    @override
    def delete(self, key: str) -> None:
        with translated(f"{self.uri}/{key}"):
            (self.folder / key).unlink(missing_ok=True)

    @override
    def tidy(self, min_age: float) -> int:
        """Unlink files in ``tmp/`` that no living writer has locked."""
        freed = 0
        with translated(f"{self.uri}/tmp"):
            for name in self.names("tmp"):
                path = self.folder / "tmp" / name
                if TEMPORARY.fullmatch(name):
                    freed += _unlink_abandoned(path, min_age)
        return freed

    @override
    def sizes(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with translated(f"{self.uri}/{folder}"):
            try:
                entries = list(os.scandir(self.folder / folder))
            except (FileNotFoundError, NotADirectoryError):
                return {}
            for entry in entries:
                key = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    found |= self.sizes(key)
                else:
                    with suppress(FileNotFoundError):
                        found[key] = entry.stat().st_size
        return found

    @override
    def mark(self, key: str, content: bytes | None) -> None:
        """Put or remove a marker file; remove folders that are empty then."""
        self._put_loosely(key, content)

    @override
    def keep_copy(self, key: str, content: bytes | None) -> None:
        self._put_loosely(key, content)

    def _put_loosely(self, key: str, content: bytes | None) -> None:
        path = self.folder / key
        with translated(str(path)):
            if content is not None:
                # Not synced, since deleting the snapshot removes these folders too.
                self._make_folder(path.parent, durable=False)
                # Do not write into an existing file: it may be another user's.
                path.unlink(missing_ok=True)
                with suppress(FileExistsError), os.fdopen(self._create(path), "wb") as file:
                    file.write(content)
                return
            path.unlink(missing_ok=True)
            for folder in self._up_to_store(path.parent):
                try:
                    folder.rmdir()
                except OSError:
                    break


def _lock(fd: int) -> bool:
    """Try to lock a file; return True also if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return e.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _may_unlink(path: Path) -> bool:
    """Unlink a file if that is allowed (it is not for another user's in a sticky folder)."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        return False
    return True


def _unlink_abandoned(path: Path, min_age: float) -> int:
    """Unlink a temporary file, unless it is young or its writer lives; return the freed bytes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        # It is another user's; only that user can lock it.
        return 0
    try:
        found = os.fstat(fd)
        # A time in the future says nothing; then only the lock counts.
        if 0 <= time.time() - found.st_mtime < min_age or not _lock(fd):
            return 0
        if not _may_unlink(path):
            return 0
        # A second name: it was linked into place, so unlinking frees nothing.
        return found.st_size if found.st_nlink == 1 else 0
    finally:
        os.close(fd)


def _is_shared(folder: os.stat_result) -> bool:
    """Whether a store is for several users: its group or all may write to its folder."""
    return bool(folder.st_mode & (stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH))


def _follow_group(where: Path | int, gid: int) -> None:
    try:
        os.chown(where, -1, gid)
    except PermissionError:
        # This user is not in that group. The mode still says who can read the file.
        return


def write_at(fd: int, view: memoryview, offset: int) -> None:
    """Write to a file; whole pages of a large aligned view around the page cache."""
    done = 0
    if _DIRECT and len(view) >= _DIRECT_WRITE_BYTES and not view.readonly:
        done = _write_direct(fd, view, offset)
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _write_direct(fd: int, view: memoryview, offset: int) -> int:
    """Write whole pages of an aligned view around the page cache; return how many bytes."""
    whole = len(view) // PAGE * PAGE
    if address_of(view) % PAGE or offset % PAGE:
        return 0
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT)
        while done < whole:
            done += os.pwrite(fd, view[done:whole], offset + done)
            if done % PAGE:
                break
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return done


def _is_cached(fd: int, offset: int) -> bool:
    """Whether a byte can be read without the disk, as far as the system says."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, getattr(os, "RWF_NOWAIT", 0)) == 1
    except OSError as e:
        pass_on(e)
        return False


def _read(fd: int, target: memoryview, offset: int) -> int:
    done = 0
    while done < len(target):
        n = os.preadv(fd, [target[done:]], offset + done)
        if n == 0:
            break
        done += n
    return done
