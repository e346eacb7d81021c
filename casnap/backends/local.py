"""Objects as files of a local file system, each step durable, creation atomic by ``link``."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

from casnap.backends.base import Backend, translated
from casnap.backends.durability import NewNames
from casnap.errors import BackendError
from casnap.format.records import CONFIG_KEY
from casnap.runtime.buffers import PAGE, address_of

_DIRECT = getattr(os, "O_DIRECT", 0)
# Below this, going through the page cache costs less than going around it.
_DIRECT_WRITE_BYTES = 1 << 20
_TEMPORARY = re.compile(r"[0-9a-f]{24}")
_ATTEMPTS = 3


class LocalBackend(Backend):
    """A folder of a local file system.

    Large aligned writes and cold reads go around the page cache where the file system lets them:
    that is faster, and leaves the cache to the training data. Modes and group follow the folder,
    so that a shared store stays shared; where nobody else may write to it, less the umask.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = str(folder)
        self._new = NewNames(self._put_anew)
        self._entered: set[Path] = set()
        self._lock = threading.Lock()

    def make(self) -> None:
        """Make the folder itself, and those above it that are missing."""
        with translated(self.uri):
            missing = [f for f in (self.folder, *self.folder.parents) if not f.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, *self.folder.parents):
            if folder in missing or self._new.failures(folder):
                self._new.add(folder)
        # Listed only where there is no store yet: each snapshot of one has a name here.
        is_new = not (self.folder / CONFIG_KEY).exists() and {"tmp"}.issuperset(self.names(""))
        if is_new and os.access(self.folder.parent, os.R_OK):
            # Whoever made it may have failed before it was durable.
            self._new.add(self.folder)

    @property
    def identity(self) -> str:
        """The real path, and what the file system calls the folder and the store's record.

        Inodes are used again; when one changed last, nobody chooses.
        """
        real = os.path.realpath(self.folder)
        with translated(self.uri):
            try:
                folder, record = os.stat(real), os.stat(f"{real}/{CONFIG_KEY}")  # noqa: PTH116
            except FileNotFoundError as e:
                raise BackendError(f"{self.uri} is gone, or was moved; open it anew") from e
        return (
            f"{real} {folder.st_dev} {folder.st_ino} "
            f"{record.st_dev} {record.st_ino} {record.st_ctime_ns}"
        )

    def write(self, key: str, content: memoryview | bytes) -> None:
        """Write a file of its own name: under ``tmp/``, synced, then linked into place."""
        if not self._link(key, content):
            raise BackendError(f"{self.uri}/{key} exists already, and is not written over")

    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Create a file by ``link``, which fails where the name exists."""
        return self._link(key, content)

    def copy(self, key: str, to: str) -> None:
        """Link a file under another name."""
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
                    # Again: who synced its folder until now may not have seen it.
                    self._new.add(target, failures)
                    break
                except FileExistsError:
                    return False
                except FileNotFoundError as e:
                    # Swept away by a collector that could not see our lock?
                    if attempt == _ATTEMPTS - 1:
                        raise BackendError(f"{self.uri}/{key}: its folder vanished") from e
                finally:
                    temporary.unlink(missing_ok=True)
                    os.close(fd)
        return True

    def _enter(self, target: Path) -> int:
        """Make the folder of a new name, durable even if another process has made it.

        Returns:
            What is to be said of the name, once it is there, when it is noted.
        """
        folder = target.parent
        self._make_folder(folder)
        failures = self._new.failures(target)
        # Before there is anything new in it: what fails afterwards must not hide it.
        self._new.add(target, failures)
        with self._lock:
            if folder not in self._entered:
                self._entered.add(folder)
                while folder != self.folder:
                    self._new.add(folder)
                    folder = folder.parent
        return failures

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
        """Write a file and return it open: its lock says that its writer lives."""
        fd = self._create(path)
        try:
            _lock(fd)
            view, start = memoryview(content), 0
            if _DIRECT and len(view) >= _DIRECT_WRITE_BYTES and not view.readonly:
                start = _write_direct(fd, view)
            while start < len(view):
                start += os.pwrite(fd, view[start:], start)
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

    def sync(self, *keys: str) -> None:
        """Make the names of new files durable; their bytes are before they have names."""
        for key in keys:
            self._new.add(self.folder / key)
        self._new.sync()

    def read(self, key: str) -> bytes:
        """Return a whole file."""
        with translated(f"{self.uri}/{key}"):
            return (self.folder / key).read_bytes()

    def read_into(self, key: str, offset: int, target: memoryview, *, bulk: bool = False) -> int:
        """Read from the page cache what is there; the rest of a bulk read goes around it."""
        with translated(f"{self.uri}/{key}"):
            fd = os.open(self.folder / key, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not bulk or not _DIRECT:
                    return _read_buffered(fd, target, offset, 0)
                done = _read_cached(fd, target, offset)
                done = _read_direct(fd, target, offset, done)
                return _read_buffered(fd, target, offset, done)
            finally:
                os.close(fd)

    def size(self, key: str) -> int:
        """Return a file's length."""
        path = f"{self.uri}/{key}"
        try:
            # A take asks for thousands, so this does without a Path.
            return os.stat(path).st_size  # noqa: PTH116
        except OSError:
            with translated(path):
                raise

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        with translated(f"{self.uri}/{folder}"):
            try:
                # A Path for each of many names would cost more than the listing.
                return os.listdir(self.folder / folder)  # noqa: PTH208
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, key: str) -> None:
        """Unlink a file."""
        with translated(f"{self.uri}/{key}"):
            (self.folder / key).unlink(missing_ok=True)

    def tidy(self, min_age: float) -> int:
        """Unlink what stands in ``tmp/`` and whose writer holds no lock on it any more."""
        freed = 0
        with translated(f"{self.uri}/tmp"):
            for name in self.names("tmp"):
                path = self.folder / "tmp" / name
                if _TEMPORARY.fullmatch(name):
                    freed += _unlink_abandoned(path, min_age)
        return freed

    def mark(self, key: str, content: bytes | None) -> None:
        """Put or remove a marker file, and folders that it leaves empty."""
        path = self.folder / key
        with translated(str(path)):
            if content is not None:
                # Not to be synced: whoever deletes the snapshot removes these folders too.
                self._make_folder(path.parent, durable=False)
                # Not written into: it may be somebody else's.
                path.unlink(missing_ok=True)
                with suppress(FileExistsError), os.fdopen(self._create(path), "wb") as file:
                    file.write(content)
                return
            path.unlink(missing_ok=True)
            for folder in path.parents:
                if folder == self.folder:
                    break
                try:
                    folder.rmdir()
                except OSError:
                    break


def _lock(fd: int) -> bool:
    """Try to lock a file; whether that is impossible here is not told."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return e.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _may_unlink(path: Path) -> bool:
    """Unlink a file, unless it is another user's in a sticky folder; return whether it is gone."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        return False
    return True


def _unlink_abandoned(path: Path, min_age: float) -> int:
    """Unlink a temporary file, unless it is young or its writer lives; return what that freed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        # Another user's, who alone can lock it.
        return 0
    try:
        found = os.fstat(fd)
        # A time in the future says nothing; the lock does.
        if 0 <= time.time() - found.st_mtime < min_age or not _lock(fd):
            return 0
        if not _may_unlink(path):
            return 0
        # A second name means that it was linked into place: nothing is freed.
        return found.st_size if found.st_nlink == 1 else 0
    finally:
        os.close(fd)


def _is_shared(folder: os.stat_result) -> bool:
    """Whether a store is for several users: others may write to its folder, or share its group."""
    return bool(folder.st_mode & (stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH))


def _follow_group(where: Path | int, gid: int) -> None:
    try:
        os.chown(where, -1, gid)
    except PermissionError:
        # Not a member of that group: the file stays readable as its mode says.
        return


def _write_direct(fd: int, view: memoryview) -> int:
    """Write the whole pages of an aligned view around the page cache; return how many bytes."""
    whole = len(view) // PAGE * PAGE
    if address_of(view) % PAGE:
        return 0
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    start = 0
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT)
        while start < whole:
            start += os.pwrite(fd, view[start:whole], start)
            if start % PAGE:
                break
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return start


def _read_cached(fd: int, target: memoryview, offset: int) -> int:
    """Read what the page cache holds of the beginning of a run; return how many bytes."""
    if not hasattr(os, "preadv") or not hasattr(os, "RWF_NOWAIT"):
        return 0
    done = 0
    try:
        while done < len(target):
            n = os.preadv(fd, [target[done:]], offset + done, os.RWF_NOWAIT)
            if n == 0:
                break
            done += n
    except OSError as e:
        if e.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
            raise
    return done


def _read_direct(fd: int, target: memoryview, offset: int, done: int) -> int:
    """Go on reading around the page cache, whole pages only; return how many bytes there are."""
    done = done // PAGE * PAGE
    whole = len(target) // PAGE * PAGE
    if (offset + done) % PAGE or address_of(target) % PAGE:
        return done
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _DIRECT)
        while done < whole:
            n = os.preadv(fd, [target[done:whole]], offset + done)
            done += n
            if n == 0 or n % PAGE:
                break
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)
    return done


def _read_buffered(fd: int, target: memoryview, offset: int, done: int) -> int:
    while done < len(target):
        n = os.preadv(fd, [target[done:]], offset + done)
        if n == 0:
            break
        done += n
    return done
