"""The backend that keeps objects as files of a file system. It creates each file by ``link``."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from casnap.backends.base import (
    MAX_MARKER_BYTES,
    MAX_WHOLE_BYTES,
    Backend,
    Target,
)
from casnap.backends.late_names import is_left_open, is_taken_at_server, is_there_anew
from casnap.backends.local.file_locks import (
    announced_in,
    bases_announced_in,
    unlink_abandoned,
)
from casnap.backends.local.store_folder import StoreFolder
from casnap.backends.local.warming import Warmer
from casnap.backends.local_files.file_io import is_cached, read_file, read_run, write_at
from casnap.backends.local_files.locking import lock
from casnap.backends.local_files.safe_paths import (
    OpenFolder,
    check_regular,
    folder_at,
    link_at,
    open_file,
    parent_of,
    stat_at,
    unlink,
    unlink_at,
)
from casnap.backends.local_files.system_errors import (
    NO_LINKS,
    gone_error,
    is_stale,
    no_links_error,
    translated,
)
from casnap.errors import PLACE_ERRORS, BackendError, CasnapError
from casnap.format.names import STORE_FOLDER
from casnap.format.notices import HEAD_BYTES, is_notice
from casnap.format.records import CONFIG_KEY
from casnap.runtime.buffers import reserve_space
from casnap.runtime.descriptors import opened
from casnap.runtime.environment import boot_id, warms_new_packs
from casnap.runtime.fork import new_lock
from casnap.runtime.typing import override

V = TypeVar("V")

_ATTEMPTS = 3
# Errors of a folder that this user cannot list.
_UNLISTED = frozenset({errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})
# The space that the copy of the newest root holds, for commits on a full disk that free something.
_RESERVE_BYTES = 256 << 10
# The unit of ``st_blocks``, whatever the file system's own blocks are.
_BLOCK = 512


class LocalBackend(Backend):
    """The objects of a store in a folder of a local or network file system.

    Large aligned writes go around the page cache if the file system allows this, which is faster.
    After a take, new packs are read into the page cache, for the reader that comes next. All files
    in the folder are opened by ``safe_paths.py``.

    Args:
        folder: The store's folder. Links in its path are resolved now; later changes to the links
            have no effect.
    """

    keeps_copies = True
    syncs_folders = True
    folder: Path
    inner = f"/{STORE_FOLDER}"
    """The path of the objects, relative to the store's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.uri = str(self.folder)
        self._base = f"{self.uri}{self.inner}"
        self._received = 0
        self._counting = new_lock()
        self._place = StoreFolder(self.folder, self.inner)
        self._warmer = Warmer()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path and the settings, so that another process can use the same folder."""
        return type(self), (self.folder,), (self.exclusive, self._place.guard)

    def __setstate__(self, state: tuple[bool, Callable[[], None] | None]) -> None:
        """Take over the settings that the other process had pickled."""
        self.exclusive, self._place.guard = state

    def guard(self, check: Callable[[], None]) -> None:
        """Set a check that is called once, before the first change.

        Args:
            check: Raises a StoreError if this user may only read the store. It must be picklable.
        """
        self._place.guard = check

    @override
    def check_changes(self) -> None:
        self._place.check_guard()

    def make(self) -> None:
        """Create the store's folder and its parents, as far as they are missing."""
        self._place.make()
        is_new = self.size_if_there(CONFIG_KEY) is None and {"tmp"}.issuperset(self.names(""))
        if is_new and os.access(self.folder.parent, os.R_OK):
            # The maker of the folder may have failed before its name was durable.
            self._place.new_names.add(self.uri)

    def _path(self, key: str) -> str:
        """Return the path of an object; of the folder of all objects if the key is "".

        Raises:
            BackendError: The key contains ``..``, and so would lead out of the folder.
        """
        return _path_in(self._base, key) if key else self._base

    @override
    def where(self, key: str) -> str:
        return f"{self._base}/{key}"

    @override
    @property
    def received_bytes(self) -> int:
        """How many bytes were read, whether from the disk or from the page cache."""
        return self._received

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self._received += nbytes

    @override
    @property
    def identity(self) -> str:
        return self._place.identity

    @override
    @property
    def endpoint(self) -> str:
        """A text for the mounted file system. It is valid until this host reboots."""
        with translated(self.uri):
            return f"{boot_id()} {os.stat(self.uri).st_dev}"

    @override
    @property
    def name_lag(self) -> float:  # type: ignore[override]
        """For how many seconds this host may not see a new name, by the file system's type."""
        return self._place.name_lag

    @override
    def is_put(self, key: str) -> bool:
        return is_taken_at_server(self._path(key))

    def _seen(self, path: str, look: Callable[[], V]) -> V:
        """Return the result of ``look``, which looks at a path; repeat it if it may be outdated.

        The result may be outdated if the path seems absent but the server has it, or if the server
        has replaced the file handle.
        """
        try:
            return look()
        except FileNotFoundError:
            if not self.name_lag or not is_there_anew(path):
                raise
        except (OSError, *PLACE_ERRORS) as e:
            if not is_stale(e):
                raise
        return look()

    @override
    def belong(self, check: Callable[[Backend], None]) -> None:
        self._place.belong(lambda: check(self))

    def new_file(self) -> os.stat_result | None:
        """Return the status of a new file of this user here; None if no file can be created."""
        return self._place.new_file()

    # --- objects ---

    @override
    def write(self, key: str, content: memoryview | bytes) -> None:
        """Write a file in ``tmp/``, sync it, then link it to its final name."""
        if not self._link(key, content):
            raise BackendError(f"{self.where(key)} exists already, and is never overwritten")

    @override
    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Write a file in ``tmp/``, sync it, then link it to its final name if that is free."""
        return self._link(key, content)

    @override
    def copy(self, key: str, to: str) -> None:
        path, new_path = self._path(key), self._path(to)
        with (
            translated(new_path),
            self._place.base_folder(make=False) as base,
            parent_of(path, base) as (source, name),
        ):
            check_regular(os.stat(name, dir_fd=source, follow_symlinks=False), path)
            with self._place.entered_above(new_path, base) as folder:
                link_at(name, source, new_path.rpartition("/")[2], folder)
                self._place.new_names.add(new_path)

    def _link(self, key: str, content: memoryview | bytes) -> bool:
        path = self._path(key)
        with translated(path):
            for _ in range(_ATTEMPTS):
                try:
                    return self._try_to_link(path, content)
                except FileNotFoundError as e:
                    # A collector that could not see our lock may have deleted the file.
                    cause = e
            raise BackendError(f"{path}: its folder vanished") from cause

    def _try_to_link(self, path: str, content: memoryview | bytes) -> bool:
        with (
            self._place.base_folder() as base,
            self._temporary_folder(base) as tmp,
            self._place.entered_above(path, base) as folder,
        ):
            with self._temporary_file(tmp, content, base) as temporary:
                try:
                    link_at(temporary, tmp, path.rpartition("/")[2], folder)
                except FileExistsError:
                    return False
                except OSError as e:
                    if e.errno in NO_LINKS and self.name_lag and is_taken_at_server(path):
                        # sshfs gives this error where another host has just taken the name.
                        return False
                    if e.errno in NO_LINKS:
                        raise no_links_error(e, path) from e
                    raise
            # Noted again: a sync of the folder before this moment may not have covered the name.
            self._place.new_names.add(path)
        return True

    @contextmanager
    def _temporary_file(
        self, folder: int, content: memoryview | bytes, base: OpenFolder
    ) -> Iterator[str]:
        """Write and sync a file that exists during a ``with`` block.

        A lock on it shows that its writer lives.

        Args:
            folder: The open folder ``tmp/``.
            content: The content of the file.
            base: The open folder of the objects.

        Yields:
            The name of the file.
        """
        name = os.urandom(12).hex()
        try:
            with self._place.create(name, folder, base) as fd:
                lock(fd)
                write_at(fd, memoryview(content), 0)
                os.fsync(fd)
                yield name
        finally:
            # Only now that the file is closed: a client keeps a file that is deleted while open.
            unlink_at(name, folder)

    @override
    def sync(self, *keys: str) -> None:
        """Make the names of new files durable.

        The content of a file was synced before it got its name.
        """
        for key in keys:
            self._place.new_names.add(self._path(key))
        self._place.sync()

    @override
    def read(self, key: str, most: int = MAX_WHOLE_BYTES) -> bytes:
        path = self._path(key)
        content, info = self._seen(path, lambda: read_file(path, most))
        if key == CONFIG_KEY:
            self._place.note_record(info)
        self._count(len(content))
        return content

    @override
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        return list(self._read_each(key, targets))

    @override
    def _read_each(self, key: str, targets: Sequence[Target]) -> Iterator[int]:
        path = self._path(key)
        with translated(path):
            file, _ = self._seen(path, lambda: open_file(path))
        received = 0
        try:
            with file as fd:
                for offset, target in targets:
                    with translated(path):
                        n = read_run(fd, target, offset)
                    received += n
                    yield n
        finally:
            self._count(received)

    @override
    def will_read(self, key: str, runs: Sequence[tuple[int, int]]) -> None:
        with suppress(OSError, *PLACE_ERRORS):
            file, _ = open_file(self._path(key))
            with file as fd:
                for offset, nbytes in runs:
                    # Look at the last byte first: fadvise looks up each page, cached or not.
                    if not is_cached(fd, offset + nbytes - 1):
                        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    @override
    def warm(self, lengths: Mapping[str, int]) -> None:
        # Another host reads its own page cache.
        if warms_new_packs() and not self.name_lag:
            self._warmer.start({self._path(key): nbytes for key, nbytes in lengths.items()})

    @override
    def size(self, key: str) -> int:
        path = self._path(key)
        with translated(path):
            info = self._seen(path, lambda: stat_at(path))
            check_regular(info, path)
        return info.st_size

    @override
    def names(self, folder: str) -> list[str]:
        path = self._path(folder)
        with translated(path):
            try:
                names = self._seen(path, lambda: _names_in(path))
            except (FileNotFoundError, NotADirectoryError):
                return []
        return [name for name in names if not is_left_open(name)] if self.name_lag else names

    @override
    def sizes(self, folder: str) -> dict[str, int]:
        return {key: info.st_size for key, info in self._infos(folder)}

    @override
    def taken_up(self, folder: str) -> int:
        return sum(info.st_blocks * _BLOCK for _, info in self._infos(folder))

    def _infos(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the key and the status of each object below a folder, at any depth."""
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
                            elif is_left_open(entry.name):
                                continue
                            elif entry.is_file(follow_symlinks=False):
                                with suppress(FileNotFoundError):
                                    yield key, entry.stat(follow_symlinks=False)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError as e:
                    # Anybody who may write could put folders here that nobody else can list.
                    if parent == folder or e.errno not in _UNLISTED:
                        raise

    @override
    def delete(self, key: str) -> None:
        self._remove(self._path(key))

    def _remove(self, path: str) -> None:
        with (
            translated(path),
            suppress(FileNotFoundError),
            self._place.base_folder(make=False) as base,
        ):
            unlink(path, base)

    @override
    def free_bytes(self) -> int | None:
        with translated(self.uri):
            disk = os.statvfs(self.uri)
        return disk.f_bavail * disk.f_frsize

    # --- tmp/ ---

    def _temporary_folder(self, base: OpenFolder) -> AbstractContextManager[int]:
        return self._place.opened_or_made(self._path("tmp"), base)

    @contextmanager
    def _listed_temporary(self) -> Iterator[int]:
        """Open ``tmp/`` for a ``with`` block that lists the folder and deletes files in it."""
        path = self._path("tmp")
        with (
            translated(path),
            self._place.base_folder(make=False) as base,
            folder_at(path, listed=True, base=base) as folder,
        ):
            yield folder

    @override
    def tidy(self, min_age: float) -> int:
        """Delete the files in ``tmp/`` whose writers are dead: no process holds their locks."""
        with suppress(FileNotFoundError), self._listed_temporary() as folder:
            return unlink_abandoned(folder, min_age)
        return 0

    @override
    @contextmanager
    def announced(self, base: int, *, at_once: bool = False) -> Iterator[Callable[[], None]]:
        path = self._path("tmp")
        with ExitStack() as opened:
            try:
                with translated(path):
                    store = opened.enter_context(self._place.base_folder())
                    tmp = opened.enter_context(self._temporary_folder(store))
            except FileNotFoundError as e:
                raise gone_error(self.uri) from e
            create = partial(self._place.create, folder=tmp, base=store)
            with announced_in(tmp, path, base, create) as renew:
                yield renew

    @override
    def announced_bases(self, max_age: float) -> list[int]:
        with suppress(FileNotFoundError), self._listed_temporary() as folder:
            return bases_announced_in(folder, max_age)
        return []

    # --- files for people ---

    @override
    def mark(self, key: str, content: bytes) -> None:
        path = _path_in(self.uri, key)
        with translated(path):
            self._place.check_place()
            for _ in range(_ATTEMPTS):
                # A process that removes an earlier marker removes its folder too, if that is empty
                # just then. And a process that has put a marker aside may put it back.
                with suppress(FileNotFoundError, FileExistsError):
                    self._put_loosely(path, content)
                    return
            self._put_loosely(path, content)

    @override
    def read_marker(self, key: str) -> bytes:
        return read_file(_path_in(self.uri, key), MAX_MARKER_BYTES)[0]

    @override
    def unmark(
        self, keys: Iterable[str], is_stale: Callable[[str, bytes], bool]
    ) -> dict[str, CasnapError]:
        """Remove stale marker files, and then their folders, if these are empty.

        An empty parent folder is removed too, unless a user made it.
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
                    unlink_at(aside, folder)
            marked_folder = path.rpartition("/")[0]
            if was_stale:
                _remove_notices(marked_folder)
            self._place.remove_empty(marked_folder)

    @override
    def keep_copy(self, key: str, content: bytes | None) -> None:
        path = self._path(key)
        if content is None:
            self._remove(path)
            return
        with translated(path), self._place.base_folder() as base, suppress(FileExistsError):
            self._put_loosely(path, content, base, _RESERVE_BYTES)

    def _put_loosely(
        self, path: str, content: bytes, base: OpenFolder | None = None, reserve: int = 0
    ) -> None:
        """Write a file that replaces any file of its name. The file is not synced.

        Args:
            path: The path of the file.
            content: Its content.
            base: The open folder of the objects, if the file lies in this folder.
            reserve: How many bytes of the disk to reserve for the file.

        Raises:
            FileExistsError: Another process has just created the file too.
        """
        parent, _, name = path.rpartition("/")
        # Not synced, since deleting the snapshot removes these folders too.
        with self._place.opened_or_made(parent, base, durable=False) as folder:
            # Do not write into an existing file: it may be another user's.
            unlink_at(name, folder)
            with self._place.create(name, folder, base) as fd:
                write_at(fd, memoryview(content), 0)
                reserve_space(fd, reserve)


def _names_in(path: str) -> list[str]:
    with folder_at(path, listed=True) as fd:
        return os.listdir(fd)


def _path_in(folder: str, key: str) -> str:
    """Return the path of a key in a folder.

    Raises:
        BackendError: The key contains ``..``, and so would lead out of the folder.
    """
    if ".." in key and ".." in key.split("/"):
        raise BackendError(f"{folder}/{key} is not in the store")
    return f"{folder}/{key}"


def _put_back(aside: str, name: str, folder: int) -> None:
    """Rename a file or folder back to its old name, unless something else has this name now.

    Args:
        aside: Its present name.
        name: The old name.
        folder: The open folder of both names.
    """
    try:
        link_at(aside, folder, name, folder)
    except FileExistsError:
        return
    except OSError:  # a folder cannot be linked
        os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)


def _remove_notices(path: str) -> None:
    """Remove casnap's notices from a folder.

    A notice is a small file with the name of another library's checkpoint. It says that casnap has
    the data.
    """
    with folder_at(path, listed=True) as folder:
        for name in os.listdir(folder):
            if _is_notice(name, folder):
                unlink_at(name, folder)


def _is_notice(name: str, folder: int) -> bool:
    """Whether a name in an open folder is a notice: a regular file that begins as notices do."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError), opened(name, flags, folder=folder) as fd:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        return is_file and is_notice(os.read(fd, HEAD_BYTES))
    return False
