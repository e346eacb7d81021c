"""The read cache: chunks of remote stores on the disk of this host, which fetches each byte once.

Each pack has a sparse file with its name. A cached chunk lies in it at the same offset as in the
pack. Only the file system records which chunks are cached, since it knows the holes. Cached chunks
are verified like all others, and read from the store if that fails. So any process may tear, flip,
truncate or delete a file at any time, and no write is synced. A lock serves only to keep the bound.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from casnap.backends import Backend, LocalBackend
from casnap.backends.base import Target
from casnap.backends.local import write_at
from casnap.errors import BackendError, UnavailableError
from casnap.format.records import Place, StoreConfig, id_from_name, pack_key
from casnap.runtime.buffers import PAGE, whole_pages
from casnap.runtime.descriptors import opened
from casnap.runtime.environment import cache_bytes_asked, folder_for_chunks
from casnap.runtime.fork import new_lock
from casnap.runtime.host_locks import BusyError, locked
from casnap.runtime.typing import override
from casnap.runtime.units import Size, bytes_of
from casnap.storage.packs.chunk_reads import ReadOptions, Want, read_places

_log = logging.getLogger("casnap")
FOLDER = "chunks"
"""The folder of the read cache, in the folder for caches."""
# The file with the URI of a store.
_URI = "uri"
# A pack stays this many seconds after its last use. So a snapshot that is larger than the bound
# does not push itself out while it is read, but keeps a part of itself.
_YOUNG = 600.0
# How many seconds the noted time of use may lag.
_TOUCH = 60.0
# For how many seconds to cache nothing once there is no room: to find that out, files are counted.
_FULL = 5.0
# How many seconds to wait for other writers; for how many to cache nothing if one seems to hang.
_PATIENCE, _BUSY = 5.0, 60.0
_SECTOR = 512
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_stopping = new_lock()
_COUNT_BYTES = 8

Placed = list[tuple[Place, list[Want]]]


class CachedPack(NamedTuple):
    """The cached part of a pack.

    Attributes:
        last_use: When it was used last, in seconds since the epoch.
        nbytes: How many bytes it takes up on the disk.
        path: The file.
        store_id: The store of the pack.
    """

    last_use: float
    nbytes: int
    path: Path
    store_id: str

    def delete(self) -> None:
        """Delete the file. Processes that read it can go on."""
        self.path.unlink(missing_ok=True)


class _Files(LocalBackend):
    """The files of the cache, read like the files of a local store. Each failure is a miss."""

    inner = ""

    @override
    def _read_each(self, key: str, targets: Sequence[Target]) -> Iterator[int]:
        try:
            yield from super()._read_each(key, targets)
        except UnavailableError as e:
            raise BackendError(str(e)) from e


class ChunkCache:
    """The cached chunks of one store.

    Args:
        folder: The folder of the cached chunks of all stores.
        nbytes: The most bytes that the files of all stores may take up.
        store_id: The id of the store. Copies of the store share the cache: each chunk is verified.
        uri: The URI of the store, to be shown to people.
    """

    def __init__(self, folder: Path, nbytes: int, store_id: str, uri: str) -> None:
        self.nbytes = nbytes
        self._all = folder
        self._folder = folder / store_id
        self._files = _Files(self._folder)
        self._uri = uri
        self._stopped = self._counted = False
        self._pause_until = 0.0

    # --- reading ---

    def read(self, places: Placed, chunk_size: int, options: ReadOptions) -> Placed:
        """Hand the cached chunks that are whole to their sinks; return the others.

        Args:
            places: The places of chunks, each with its wants.
            chunk_size: The chunk size of the store.
            options: How to read.
        """
        cached, elsewhere = self._divide(places)
        if cached:
            failed = read_places(self._files, chunk_size, cached, options)
            if failed:
                _log.debug("%d cached chunks are not whole; %s", len(failed), failed[0].failure)
            elsewhere += [(unread.place, unread.wants) for unread in failed]
        return elsewhere

    def _divide(self, places: Placed) -> tuple[Placed, Placed]:
        """Return the places that seem to be cached, and the others."""
        cached: Placed = []
        elsewhere: Placed = []
        runs: dict[bytes, list[tuple[int, int]]] = {}
        for wanted_place in places:
            place = wanted_place[0]
            if place.pack not in runs:
                runs[place.pack] = self._runs(place.pack)
            before = bisect_right(runs[place.pack], place.offset, key=lambda run: run[0]) - 1
            is_here = (
                before >= 0 and place.offset + place.stored_size <= runs[place.pack][before][1]
            )
            (cached if is_here else elsewhere).append(wanted_place)
        return cached, elsewhere

    def _runs(self, pack: bytes) -> list[tuple[int, int]]:
        """Return the runs of a pack's file that have data, in order; note the use of the pack."""
        try:
            # Not blocking: someone may have put a pipe in the place of the file.
            with opened(self._path(pack), os.O_RDONLY | _SAFE) as fd:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    return []
                if abs(time.time() - os.fstat(fd).st_mtime) > _TOUCH:
                    with suppress(OSError):
                        os.utime(fd)
                return list(_data_runs(fd))
        except OSError:
            return []

    def _path(self, pack: bytes) -> Path:
        return self._folder / pack_key(pack)

    # --- writing ---

    def keep(self, pack: bytes, runs: Sequence[Target]) -> None:
        """Cache runs of a pack, as far as there is room. This never raises an error of the disk.

        Args:
            pack: The id of the pack.
            runs: Verified runs of bytes, each with its offset in the pack, which begins a page.
        """
        if not runs or self._stopped or time.monotonic() < self._pause_until:
            return
        nbytes = sum(_in_pages(content) for _, content in runs)
        try:
            path = self._path(pack)
            self._make_folders(path.parent)
            # The writers of this host take turns, so that files can be counted at any time. A disk
            # writes large runs no faster at the same time.
            with locked(self._all / "used", _PATIENCE):
                room = self._room_for(nbytes)
                if room:
                    _write(path, runs, room)
            if room < nbytes:
                self._pause_until = time.monotonic() + _FULL
        except BusyError as e:
            _log.debug("not cached: %s", e)
            self._pause_until = time.monotonic() + _BUSY
        except FileNotFoundError as e:
            # Another process is clearing the cache.
            _log.debug("not cached: %s", e)
        except OSError as e:
            self._stop(e)

    def _stop(self, error: OSError) -> None:
        """Cache nothing more in this process, and warn once."""
        with _stopping:
            before, self._stopped = self._stopped, True
        if not before:
            _log.warning(
                "the read cache %s cannot be written (%s): this process reads on, and caches no "
                "more chunks",
                self._all,
                error.strerror or error,
            )

    def _make_folders(self, folder: Path) -> None:
        if folder.is_dir():
            return
        top = self._all.parent
        # One by one, since other users could look into folders that `parents` makes.
        for path in (top, self._all, self._folder, folder.parent, folder):
            path.mkdir(mode=0o700, parents=path == top, exist_ok=True)
        (self._folder / _URI).write_text(self._uri, "utf-8", "surrogateescape")

    def _room_for(self, nbytes: int) -> int:
        """Make room for bytes if need be. Return for how many there is room; note these as used."""
        nbytes = min(nbytes, self.nbytes // PAGE * PAGE)
        count = self._all / "used"
        content = count.read_bytes()
        total = int.from_bytes(content, "little")
        if len(content) != _COUNT_BYTES or not self._counted or total + nbytes > self.nbytes:
            total = self._make_room(nbytes)
            self._counted = True
        room = max(0, min(nbytes, (self.nbytes - total) // PAGE * PAGE))
        # Count them before writing: if this process is killed, the count is too high, until files
        # are counted anew.
        count.write_bytes((total + room).to_bytes(_COUNT_BYTES, "little"))
        return room

    def _make_room(self, nbytes: int) -> int:
        """Make room by deleting the least recently used packs; return how many bytes are in use.

        If there is no room, this frees a sixteenth of the bound, so that the files need not be
        counted for each run.
        """
        packs = sorted(cached_packs(self._all))
        total = sum(pack.nbytes for pack in packs)
        if total + nbytes <= self.nbytes:
            return total
        most = self.nbytes - max(nbytes, self.nbytes // 16)
        now = time.time()
        for pack in packs:
            if total <= most:
                break
            if not 0 <= now - pack.last_use < _YOUNG:
                pack.delete()
                total -= pack.nbytes
        return total


def _in_pages(content: memoryview) -> int:
    return whole_pages(len(content))


def _write(path: Path, runs: Sequence[Target], room: int) -> None:
    """Write runs into a file, as far as there is room.

    Args:
        path: The file.
        runs: The runs, each with its offset.
        room: The most bytes to write, in whole pages.
    """
    with opened(path, os.O_CREAT | os.O_WRONLY | _SAFE, 0o600) as fd:
        for start, content in runs:
            write_at(fd, content[:room], start)
            room -= _in_pages(content)
            if room <= 0:
                break


def _data_runs(fd: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of a file that have data, in order; all of it if the system cannot tell."""
    stop, size = 0, os.fstat(fd).st_size
    while stop < size:
        try:
            start = os.lseek(fd, stop, os.SEEK_DATA)
            stop = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as e:
            if e.errno == errno.ENXIO:
                # Only a hole follows.
                return
            if e.errno != errno.EINVAL:
                raise
            start, stop = stop, size
        yield start, stop


# --- which stores have a cache ----------------------------------------------------------------


class CacheRoom(NamedTuple):
    """The folder of cached chunks, and the most bytes that they may take up."""

    folder: Path
    nbytes: int

    def of(self, config: StoreConfig, backend: Backend) -> ChunkCache:
        """Return the cache of one store."""
        return ChunkCache(self.folder, self.nbytes, config.store_id, backend.uri)


def room_for(backend: Backend, bound: Size | None) -> CacheRoom | None:
    """Return the room for cached chunks of a store; None for no cache.

    Args:
        backend: The backend of the store.
        bound: The bound that the user gave; 0 for no cache, None for the bound in the environment.

    Raises:
        TypeError: The bound is not a size.
        ValueError: The bound is not a number of bytes, or the store is on this machine.
        StoreError: The folder of the cache is another user's, or on a network file system.
    """
    nbytes = None if bound is None else bytes_of("cache_bytes", bound, least=0)
    if backend.has_page_cache:
        if nbytes:
            raise ValueError(
                f"cache_bytes is for a store on a server, but {backend.uri} is on this machine; "
                "leave it out"
            )
        return None
    cache_setting = cache_bytes_asked() if nbytes is None else nbytes
    folder = folder_for_chunks(FOLDER) if cache_setting else None
    return None if folder is None else CacheRoom(folder, cache_setting)


# --- for people -------------------------------------------------------------------------------


def cached_packs(folder: Path) -> Iterator[CachedPack]:
    """Yield the cached part of each pack. A file that another process deletes is skipped."""
    for store in _entries(folder):
        if id_from_name(store.name) is None:
            continue
        for group in _entries(Path(store.path, "packs")):
            for file in _entries(Path(group.path)):
                with suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    nbytes = status.st_blocks * _SECTOR
                    yield CachedPack(status.st_mtime, nbytes, Path(file.path), store.name)


def noted_uri(folder: Path, store_id: str) -> str:
    """Return the noted URI of a store with cached packs; "" if it is not known."""
    try:
        return (folder / store_id / _URI).read_text("utf-8", "surrogateescape")
    except OSError:
        return ""


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
