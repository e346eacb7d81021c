"""The read cache: chunks of remote stores on a disk of this host.

So this host fetches each byte once.

For each pack there is a sparse file. A cached chunk has the same offset in the file as in the pack.
The file's holes are the chunks that are not cached; no other record is kept. A cached chunk is
verified as any other is, and read from the store if that fails. So other processes may overwrite,
shorten or delete the files at any time, and writes are not synced. A lock is needed only to keep to
the size limit.
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
from casnap.backends.local_files import write_at
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
    """The file with the cached chunks of one pack.

    Attributes:
        last_use: When it was last used, in seconds since the epoch.
        nbytes: How many bytes it takes up on the disk.
        path: The path of the file.
        store_id: The id of the pack's store.
    """

    last_use: float
    nbytes: int
    path: Path
    store_id: str

    def delete(self) -> None:
        """Delete the file. Processes that have it open can go on reading."""
        self.path.unlink(missing_ok=True)


class _Files(LocalBackend):
    """The files of the read cache, as a backend.

    Any failure of this backend says that a chunk is not cached.
    """

    inner = ""

    @override
    def _read_each(self, key: str, targets: Sequence[Target]) -> Iterator[int]:
        try:
            yield from super()._read_each(key, targets)
        except UnavailableError as e:
            raise BackendError(str(e)) from e


class ChunkCache:
    """The read cache of one store.

    Args:
        folder: The folder with the cached chunks of all stores.
        nbytes: The most bytes that the files of all stores together may take up.
        store_id: The id of the store. Copies of the store have the same id, and share the cache.
            This is safe, since each chunk is verified.
        uri: The URI of the store, to show to people.
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
        """Pass those chunks that are cached to their sinks; return the other chunks.

        Args:
            places: The places of chunks, each with the ``Want`` objects for its chunk.
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
        """Divide places into those whose bytes seem to be cached, and the others."""
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
        """Return which runs of a pack's file have data, in order; note that the file was used."""
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
        """Cache runs of bytes of a pack, as far as there is room.

        Errors of the disk are only logged.

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
        """Cache nothing more in this process, and log a warning once."""
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
        """Reserve room for bytes. If need be, delete older files.

        Returns:
            For how many bytes there is room. They count as used from now on.
        """
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
        """Make room for bytes by deleting the files that have been unused for longest.

        If files are deleted, at least a sixteenth of the size limit becomes free, so that the files
        need not be counted for each run.

        Returns:
            How many bytes the files take up now.
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
        path: The path of the file.
        runs: The runs of bytes, each with its offset.
        room: The most bytes to write, in whole pages.
    """
    with opened(path, os.O_CREAT | os.O_WRONLY | _SAFE, 0o600) as fd:
        for start, content in runs:
            write_at(fd, content[:room], start)
            room -= _in_pages(content)
            if room <= 0:
                break


def _data_runs(fd: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of a file that are not holes, as pairs of begin and end, in order.

    If the system cannot tell, the whole file is one run.
    """
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
    """The folder with the cached chunks of all stores, and the most bytes that they may take up."""

    folder: Path
    nbytes: int

    def of(self, config: StoreConfig, backend: Backend) -> ChunkCache:
        """Return the read cache of one store.

        Args:
            config: The store's ``casnap.json``.
            backend: The backend of the store.
        """
        return ChunkCache(self.folder, self.nbytes, config.store_id, backend.uri)


def room_for(backend: Backend, bound: Size | None) -> CacheRoom | None:
    """Return the folder and the size limit of the read cache for a store; None for no cache.

    Args:
        backend: The backend of the store.
        bound: The user's size limit; 0 for no cache. With None, ``CASNAP_CACHE_BYTES`` has the
            limit.

    Raises:
        TypeError: The limit is not a size.
        ValueError: The limit is not a number of bytes, or the store is on this machine.
        StoreError: The folder of the cache belongs to another user, or is on a network file system.
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
    """Yield the files of cached packs. A file that another process is deleting is skipped."""
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
    """Return the URI of a store, as its cache has noted it; "" if it is not known.

    Args:
        folder: The folder with the cached chunks of all stores.
        store_id: The id of the store.
    """
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
