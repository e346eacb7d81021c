"""This host's cache of a store, in LMDB: places of chunks and nodes, tree nodes, and notes.

A cached record says that a digest lies at a place in a pack. It stays true: packs never change, and
their ids are never used again. So it costs only time if a cache is out of date, deleted, or shared
between processes, or if the store was rolled back and went on in another way. Each place of a store
has a cache of its own, since a copy of a store may hold other bytes under the same ids.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import lmdb

from casnap.format.codec import WHOLE_CODECS, Codec
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of
from casnap.format.names import STORE_FOLDER
from casnap.format.records import (
    CONFIG_KEY,
    ID_SIZE,
    DeltaPlace,
    PackId,
    Place,
    Record,
    SegmentId,
)
from casnap.runtime.descriptors import opened
from casnap.runtime.environment import boot_id, cache_folder, why_refused
from casnap.runtime.file_systems import is_on_shared
from casnap.runtime.fork import in_child, new_lock
from casnap.runtime.host_locks import BusyError, locked
from casnap.runtime.typing import override
from casnap.storage.lookup.lmdb_files import (
    WRITING,
    inode,
    nbytes,
    open_environment,
    put_text,
    remove,
)

_log = logging.getLogger("casnap")
C = TypeVar("C", bound="IndexCache")
P = ParamSpec("P")
R = TypeVar("R")
# Reading a member of an enum takes as long as copying a small chunk.
_DELTA = int(Codec.DELTA)
# LMDB sorts the places of a digest by these bytes. So if a pack holds a chunk twice, all
# processes find its first place. Hints name that place too, and caches of chunks hold it.
_BARE_PLACE = struct.Struct(">16sQIIB")
_PLACE_BYTES = _BARE_PLACE.size + 4
# A folder has the name of a store id and a place, or of a place alone.
_FOLDER = re.compile("[0-9a-f]{32}(-[0-9a-f]{32})?")
_URI = "uri"
MOST_FOLDERS = 64
"""The most caches that a host keeps. If it uses more stores, it often makes caches anew."""
_UNUSED_SECONDS = 30 * 86400.0
# Seconds to wait for other writers: to cache segments, and to cache data that only saves time.
_PATIENCE, _LITTLE = 30.0, 1.0
# Seconds to wait for a process that reads the same segments, before this process reads them too.
_LEARNING = 60.0
_NODES_BYTES = 64 << 20
# The digests that one call looks for.
_AT_ONCE = 1024


def _if_possible(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R | None]:
    """Wrap a method that only saves time, so that it returns None if the cache fails."""

    @functools.wraps(method)
    def try_it(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except (lmdb.Error, OSError) as e:
            # The next caller that needs an answer replaces the cache.
            _log.debug("the cache failed: %s", e)
            return None

    return try_it


class IndexCache(ABC):
    """A cache of index records, tree nodes and notes.

    Attributes:
        listed: For each segment of the root that was viewed last, the packs that it lists.
        identity: Bytes that no other cache has, on this host or another one.
    """

    def __init__(self) -> None:
        self.listed: dict[SegmentId, frozenset[PackId]] = {}
        self.identity = os.urandom(16)

    # --- the index: if one of these fails, the caller makes another cache ---

    @abstractmethod
    def packs_of(self, segment: SegmentId) -> tuple[PackId, ...] | None:
        """Return the packs that a segment lists; None if the segment is not cached."""

    @abstractmethod
    def learn(self, segment: SegmentId, packs: Iterable[PackId], records: list[Record]) -> None:
        """Cache a segment: the packs that it lists, and its records."""

    def learning(self) -> AbstractContextManager[object]:
        """Return a context manager that one process of this host at a time can be in.

        A process caches segments in it. The next process waits, and then finds these segments in
        the cache. This only saves time.
        """
        return contextlib.nullcontext()

    @abstractmethod
    def place(self, digests: Iterable[Digest], live: Container[PackId]) -> list[Place | None]:
        """Return, for each digest, the preferred place in a live pack, or None."""

    @abstractmethod
    def places(self, digest: Digest) -> list[Place]:
        """Return all cached places of a digest."""

    # --- methods that only save time: none raises if the cache fails ---

    @_if_possible
    def keep_segment(
        self, segment: SegmentId, packs: Iterable[PackId], records: list[Record]
    ) -> None:
        """Cache a segment that this process has written, so that this host need not read it."""
        self.learn(segment, packs, records)

    @abstractmethod
    def node(self, digest: Digest) -> bytes | None:
        """Return the bytes of a tree node, verified; None if the cache lacks it."""

    @abstractmethod
    def lacking(self, digests: Iterable[Digest]) -> list[Digest]:
        """Return those of some tree nodes that the cache lacks. The others are not verified."""

    @abstractmethod
    def keep_nodes(self, nodes: Iterable[tuple[Digest, bytes]]) -> None:
        """Cache tree nodes, given their digests and bytes."""

    @abstractmethod
    def note(self, key: bytes) -> bytes | None:
        """Return the text of a note; None if the cache lacks it."""

    @abstractmethod
    def keep_notes(self, notes: Mapping[bytes, bytes]) -> None:
        """Cache notes, by key. A note must do no harm if it is lost or out of date."""


class MemoryCache(IndexCache):
    """A cache in memory, for hosts where LMDB cannot be used."""

    def __init__(self) -> None:
        super().__init__()
        self._segments: dict[SegmentId, tuple[PackId, ...]] = {}
        self._places: dict[Digest, list[Place]] = {}
        self._nodes: dict[Digest, bytes] = {}
        self._nodes_bytes = 0
        self._keeping = new_lock()
        self._notes: dict[bytes, bytes] = {}

    @override
    def packs_of(self, segment: SegmentId) -> tuple[PackId, ...] | None:
        return self._segments.get(segment)

    @override
    def learn(self, segment: SegmentId, packs: Iterable[PackId], records: list[Record]) -> None:
        for digest, place in records:
            places = self._places.setdefault(digest, [])
            if place not in places:
                places.append(place)
        self._segments[segment] = tuple(packs)

    @override
    def place(self, digests: Iterable[Digest], live: Container[PackId]) -> list[Place | None]:
        return [preferred(p for p in self.places(d) if p.pack in live) for d in digests]

    @override
    def places(self, digest: Digest) -> list[Place]:
        return self._places.get(digest, [])

    @override
    def node(self, digest: Digest) -> bytes | None:
        return self._nodes.get(digest)

    @override
    def lacking(self, digests: Iterable[Digest]) -> list[Digest]:
        return [digest for digest in digests if digest not in self._nodes]

    @override
    def keep_nodes(self, nodes: Iterable[tuple[Digest, bytes]]) -> None:
        with self._keeping:
            for digest, node in nodes:
                if digest not in self._nodes:
                    self._nodes[digest] = node
                    self._nodes_bytes += len(node)
            while self._nodes_bytes > _NODES_BYTES:
                self._nodes_bytes -= len(self._nodes.pop(next(iter(self._nodes))))

    @override
    def note(self, key: bytes) -> bytes | None:
        return self._notes.get(key)

    @override
    def keep_notes(self, notes: Mapping[bytes, bytes]) -> None:
        self._notes.update(notes)


class LmdbCache(IndexCache):
    """A cache in an LMDB environment.

    A take trusts the cache, so every record has a checksum, and every node is verified. A new cache
    replaces one that may be inconsistent, since LMDB aborts a process that finds inconsistent
    pages. So a cache is not used after a reboot (its files are not synced), nor after a process
    died while it wrote to the cache.

    Args:
        folder: The folder of the cache.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._pid = os.getpid()
        self._busy = False
        self._env = open_environment(folder)
        self._inode = inode(folder)
        self.identity = f"{boot_id()} {folder.stat().st_dev} {self._inode}".encode()
        with self._turn(_PATIENCE), self._write_mark():
            # Older versions keep places in another form, in databases without "sorted-".
            self._segments = self._env.open_db(b"sorted-segments")
            self._places = self._env.open_db(b"sorted-places", dupsort=True)
            self._nodes = self._env.open_db(b"nodes")
            self._notes = self._env.open_db(b"notes")

    def usable(self) -> bool:
        """Whether this process may use the cache. A forked child must open a cache of its own."""
        return self._pid == os.getpid()

    def nbytes(self) -> int:
        """Return how many bytes of its file the cache uses."""
        return nbytes(self._env)

    def count(self) -> int:
        """Return the number of cached records."""
        with self._env.begin(db=self._places) as txn:
            return int(txn.stat(self._places)["entries"])

    def delete(self) -> None:
        """Delete the files of the cache. Processes that have it open can go on using it.

        If another process has made a new cache in the folder since, the new cache stays.
        """
        with contextlib.suppress(ValueError):
            _recent.remove(self)
        if not self.is_deleted():
            remove(self.folder)

    def is_deleted(self) -> bool:
        """Whether this cache's files are gone, or a newer cache is in the same folder."""
        return inode(self.folder) != self._inode

    @override
    def packs_of(self, segment: SegmentId) -> tuple[PackId, ...] | None:
        with self._env.begin(db=self._segments) as txn:
            packs = txn.get(segment)
        if packs is None or len(packs) < 4 or zlib.crc32(segment + packs[4:]) != _u32(packs):
            return None
        return tuple(PackId(packs[i : i + ID_SIZE]) for i in range(4, len(packs), ID_SIZE))

    @override
    def learn(self, segment: SegmentId, packs: Iterable[PackId], records: list[Record]) -> None:
        joined = b"".join(packs)
        # Joined into bytes, since many tuples would keep Python's cycle collector busy.
        places = sorted(d + _encode_place(d, p) for d, p in records)
        with self._writing(_PATIENCE) as txn:
            with txn.cursor(self._places) as cursor:
                pairs = ((each[:DIGEST_SIZE], each[DIGEST_SIZE:]) for each in places)
                cursor.putmulti(pairs, dupdata=False)
            txn.put(
                segment, struct.pack("<I", zlib.crc32(segment + joined)) + joined, db=self._segments
            )

    @override
    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(locked(self.folder / "learning", _LEARNING))
            yield

    @override
    def place(self, digests: Iterable[Digest], live: Container[PackId]) -> list[Place | None]:
        places: list[Place | None] = []
        # Few packs hold all of the chunks that a take or restore asks for.
        is_live = functools.cache(live.__contains__)
        with self._env.begin(db=self._places) as txn, txn.cursor() as cursor:
            for digest, value in _first_values(cursor, digests):
                place = None
                if value is not None:
                    place = _decode_place(digest, value)
                    if place is None or place.codec not in WHOLE_CODECS or not is_live(place.pack):
                        place = preferred(p for p in _all_places(txn, digest) if is_live(p.pack))
                places.append(place)
        return places

    @override
    def places(self, digest: Digest) -> list[Place]:
        with self._env.begin(db=self._places) as txn:
            return _all_places(txn, digest)

    @override
    @_if_possible
    def node(self, digest: Digest) -> bytes | None:
        with self._env.begin(db=self._nodes) as txn:
            node: bytes | None = txn.get(digest)
        return node if node is not None and digest_of(node) == digest else None

    @override
    def lacking(self, digests: Iterable[Digest]) -> list[Digest]:
        digests = list(digests)
        try:
            with self._env.begin(db=self._nodes, buffers=True) as txn, txn.cursor() as cursor:
                kept = {bytes(digest) for digest, _ in cursor.getmulti(digests)}
        except (lmdb.Error, OSError) as e:
            _log.debug("the cache failed: %s", e)
            return digests
        return [digest for digest in digests if digest not in kept]

    @override
    @_if_possible
    def keep_nodes(self, nodes: Iterable[tuple[Digest, bytes]]) -> None:
        with self._writing(_LITTLE) as txn, txn.cursor(self._nodes) as cursor:
            cursor.putmulti(sorted(nodes))

    @override
    @_if_possible
    def note(self, key: bytes) -> bytes | None:
        with self._env.begin(db=self._notes) as txn:
            value: bytes | None = txn.get(key)
        if value is None or len(value) < 4 or zlib.crc32(key + value[4:]) != _u32(value):
            return None
        return value[4:]

    @override
    @_if_possible
    def keep_notes(self, notes: Mapping[bytes, bytes]) -> None:
        with self._writing(_LITTLE) as txn:
            for key, text in notes.items():
                txn.put(key, struct.pack("<I", zlib.crc32(key + text)) + text, db=self._notes)

    @contextlib.contextmanager
    def _writing(self, patience: float) -> Iterator[lmdb.Transaction]:
        turn = self._turn(0 if self._busy else patience)
        with turn, self._write_mark(), self._env.begin(write=True) as txn:
            yield txn

    @contextlib.contextmanager
    def _write_mark(self) -> Iterator[None]:
        """Keep a mark file while LMDB writes.

        If this process dies, the next process sees the mark.
        """
        mark = self.folder / f"{WRITING}{os.getpid()}"
        try:
            mark.touch()
            yield
        finally:
            mark.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _turn(self, patience: float) -> Iterator[None]:
        """Hold the cache's write lock in a ``with`` block. LMDB's own lock has no time limit.

        Args:
            patience: How many seconds to wait for the lock.

        Raises:
            BusyError: Another process has held the lock for that long.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.folder / "turn", patience))
            except BusyError:
                self._busy = True
                raise
            self._busy = False
            yield


def preferred(places: Iterable[Place]) -> Place | None:
    """Return the place at which to read a chunk; None if there is no place.

    The order is: the first place where the chunk is raw or in planes, the first where it is a
    delta, the first with a codec that this version does not know.
    """
    return min(places, key=_rank, default=None)


def _rank(place: Place) -> int:
    return 0 if place.codec in WHOLE_CODECS else 1 if place.codec == _DELTA else 2


def _u32(data: bytes) -> int:
    return int.from_bytes(data[:4], "little")


def _encode_place(digest: Digest, place: Place) -> bytes:
    p = place
    bare = _BARE_PLACE.pack(p.pack, p.offset, p.stored_size, p.raw_size, p.codec)
    if isinstance(p, DeltaPlace):
        bare += p.base
    return bare + zlib.crc32(digest + bare).to_bytes(4, "little")


def _decode_place(digest: Digest, value: bytes) -> Place | None:
    if zlib.crc32(digest + value[:-4]).to_bytes(4, "little") != value[-4:]:
        return None
    if len(value) == _PLACE_BYTES:
        return Place(*_BARE_PLACE.unpack_from(value))
    if len(value) == _PLACE_BYTES + DIGEST_SIZE:
        pack, offset, stored_size, raw_size, codec = _BARE_PLACE.unpack_from(value)
        return DeltaPlace(pack, offset, stored_size, raw_size, codec, value[_BARE_PLACE.size : -4])
    return None


def _first_values(
    cursor: lmdb.Cursor, digests: Iterable[Digest]
) -> Iterator[tuple[Digest, bytes | None]]:
    """Yield each digest with its first value; None for a digest that has none."""
    pending = iter(digests)
    # One call looks for many: each call costs more time than a lookup.
    while wanted := list(islice(pending, _AT_ONCE)):
        values = dict(cursor.getmulti(wanted))
        yield from zip(wanted, map(values.get, wanted), strict=True)


def _all_places(txn: lmdb.Transaction, digest: Digest) -> list[Place]:
    with txn.cursor() as cursor:
        if not cursor.set_key(digest):
            return []
        values = map(bytes, cursor.iternext_dup())
        return [p for v in values if (p := _decode_place(digest, v)) is not None]


# A process must not open an LMDB file twice, so all open caches are listed here. The last few stay
# open, since opening takes a while. Any other cache closes when nothing refers to it any more.
_open: WeakValueDictionary[Path, LmdbCache] = WeakValueDictionary()
_recent: deque[LmdbCache] = deque(maxlen=8)
_inherited: list[LmdbCache] = []
_open_lock = new_lock()


@in_child
def _forget_inherited() -> None:
    # They must stay open: after a fork LMDB cannot even close a cache.
    _inherited.extend(_open.values())
    _open.clear()
    _recent.clear()


class CachedIndex(NamedTuple):
    """A cache in this host's cache folder, whether or not a process uses it.

    Attributes:
        last_use: When a process last opened the cache, in seconds since the epoch.
        folder: The folder of the cache.
        uri: The URI that the store had; "" if it is not known.
        boot: The id of the boot in which the cache was made.
    """

    last_use: float
    folder: Path
    uri: str
    boot: str

    @property
    def store_id(self) -> str | None:
        """The id of the store; None if the cache has only notes about a place."""
        ident, _, place = self.folder.name.partition("-")
        return ident if place else None

    @property
    def nbytes(self) -> int:
        """How many bytes the cache takes up on the disk; 0 if it is gone."""
        with contextlib.suppress(OSError):
            return sum(file.stat().st_blocks * 512 for file in self.folder.iterdir())
        return 0

    def is_needless(self, boot: str) -> bool:
        """Whether the cache can be deleted.

        It can if it was made before this boot, if its local store is gone, or if it was not used
        for a month.

        Args:
            boot: The id of this boot.
        """
        is_unused = time.time() - self.last_use > _UNUSED_SECONDS
        return is_unused or self.boot != boot or _is_gone(self.uri)

    def delete(self) -> None:
        """Delete the files of the cache. Processes that have it open can go on using it."""
        remove(self.folder)


def _is_gone(uri: str) -> bool:
    """Whether a URI is a local path where there is no store any more."""
    if not uri.startswith("/") or is_on_shared(uri):
        return False
    try:
        os.lstat(f"{uri}/{STORE_FOLDER}/{CONFIG_KEY}")
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def cached_indexes(base: Path) -> Iterator[CachedIndex]:
    """Yield the caches in a folder. A cache that another process is deleting is skipped."""
    # Each new cache looks at all others, and `Path` would take longer than the system calls.
    for name in filter(_FOLDER.fullmatch, os.listdir(base)):  # noqa: PTH208
        folder = f"{base}/{name}"
        # A cache without this file is still being made.
        with contextlib.suppress(OSError):
            boot, last_use = _read(f"{folder}/boot")
            uri = ""
            with contextlib.suppress(FileNotFoundError):
                uri, _ = _read(f"{folder}/{_URI}")
            yield CachedIndex(last_use, Path(folder), uri, boot)


def _read(path: str) -> tuple[str, float]:
    """Return the text of a small file, and when it last changed, in seconds since the epoch."""
    with opened(path, os.O_RDONLY | os.O_CLOEXEC) as fd:
        info = os.fstat(fd)
        return os.read(fd, info.st_size).decode("utf-8", "surrogateescape"), info.st_mtime


def _make_room(base: Path) -> None:
    """Delete the caches for which :meth:`CachedIndex.is_needless` is True.

    If too many are left, also delete those that have been unused for longest. Processes that have a
    cache open can go on using it.
    """
    caches: list[CachedIndex] = []
    boot = boot_id()
    for cache in cached_indexes(base):
        if cache.is_needless(boot):
            cache.delete()
        else:
            caches.append(cache)
    caches.sort()
    for cache in caches[: max(0, len(caches) - MOST_FOLDERS + 1)]:
        cache.delete()


def _folder_of(base: Path, name: str) -> Path:
    """Return the folder for a cache.

    A forked child gets another folder than its parent, if the parent has the cache open: LMDB
    refuses to open a file that it takes for open already.

    Args:
        base: The folder of all caches.
        name: The name of the cache.
    """
    inherited = {cache.folder for cache in _inherited}
    while base / name in inherited:
        name = f"{name[:32]}-{digest_of(name.encode()).hex()[:32]}"
    return base / name


def open_cache(name: str, uri: str) -> IndexCache:
    """Return the cache with a name. If LMDB cannot be used, return a new cache in memory.

    Args:
        name: The name of the cache. All callers of this process with the same name share one cache.
        uri: The URI of the store.
    """
    base = cache_folder()
    if base is None:
        _log.warning("no folder for the cache can be written; the index is kept in memory")
        return MemoryCache()
    folder = _folder_of(base, name)
    with _open_lock:
        cache = _open.get(folder)
        # A cache whose files were deleted stays open, since other threads may be using it.
        if cache is None or cache.is_deleted():
            try:
                cache = _open_folder(base, folder, uri)
            except (lmdb.Error, OSError) as e:
                _log.warning(
                    "the cache %s cannot be used (%s); the index is kept in memory", folder, e
                )
                return MemoryCache()
            _open[folder] = cache
        if cache not in _recent:
            _recent.append(cache)
        return cache


def _open_folder(base: Path, folder: Path, uri: str) -> LmdbCache:
    if not folder.exists():
        _make_room(base)
    elif refusal := why_refused(folder):
        raise lmdb.Error(f"it {refusal}")
    cache = LmdbCache(folder)
    # The URI is shown to people, and by it another process sees whether the store still exists.
    if not (folder / _URI).exists():
        put_text(folder / _URI, uri)
    return cache
