"""Where every chunk and node lies: a host-local cache of the index segments, in LMDB.

A cached record (this digest lies at this place of this pack) is true for ever: packs never change
and ids are never used again. Whether a record *counts* is decided by the root at hand alone: its
pack must be live in it. So the cache may be stale, shared between processes, between copies of a
store and between its branches after a roll-back, or be deleted, and nothing but time is lost.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lmdb

from casnap.backends.base import Backend
from casnap.digest import Digest, digest_of
from casnap.environment import boot_id, cache_folder, is_running
from casnap.errors import DamagedError
from casnap.format import (
    ID_SIZE,
    PackId,
    Place,
    Record,
    Root,
    Segment,
    SegmentId,
    decode_segment,
    segment_key,
)

_log = logging.getLogger("casnap")
_BARE_FACT = struct.Struct("<16sQIIB")
_FACT = struct.Struct("<16sQIIBI")
_WRITING = "writing-"
_MAP_SIZES = (64 << 30, 1 << 30)
_LOCK_BYTES = 8192


@dataclass(frozen=True)
class View:
    """The index as one root sees it.

    Attributes:
        root: That root.
        live: The packs that may be relied on.
    """

    root: Root
    live: frozenset[PackId]


class Facts(ABC):
    """Remembered records and tree nodes."""

    @abstractmethod
    def packs_of(self, segment: SegmentId) -> tuple[PackId, ...] | None:
        """Return the packs that a segment covers, or None where it was not learned yet."""

    @abstractmethod
    def learn(self, segment: SegmentId, packs: Iterable[PackId], records: list[Record]) -> None:
        """Remember a segment."""

    @abstractmethod
    def place(self, digests: Iterable[Digest], live: frozenset[PackId]) -> list[Place | None]:
        """Return, for each digest, a place in a live pack, or None."""

    @abstractmethod
    def places(self, digest: Digest) -> list[Place]:
        """Return all the places that are known of a digest."""

    @abstractmethod
    def node(self, digest: Digest) -> bytes | None:
        """Return a tree node, verified, or None."""

    @abstractmethod
    def keep_nodes(self, nodes: Iterable[tuple[Digest, bytes]]) -> None:
        """Remember tree nodes."""


class MemoryFacts(Facts):
    """Facts in dicts, where there is no place for LMDB."""

    def __init__(self) -> None:
        self._segments: dict[SegmentId, tuple[PackId, ...]] = {}
        self._places: dict[Digest, list[Place]] = {}
        self._nodes: dict[Digest, bytes] = {}

    def packs_of(self, segment: SegmentId) -> tuple[PackId, ...] | None:
        """Return the packs of a learned segment."""
        return self._segments.get(segment)

    def learn(self, segment: SegmentId, packs: Iterable[PackId], records: list[Record]) -> None:
        """Remember a segment."""
        for digest, place in records:
            known = self._places.setdefault(digest, [])
            if place not in known:
                known.append(place)
        self._segments[segment] = tuple(packs)

    def place(self, digests: Iterable[Digest], live: frozenset[PackId]) -> list[Place | None]:
        """Return a live place of each digest."""
        return [next((p for p in self.places(d) if p.pack in live), None) for d in digests]

    def places(self, digest: Digest) -> list[Place]:
        """Return the places of a digest."""
        return self._places.get(digest, [])

    def node(self, digest: Digest) -> bytes | None:
        """Return a kept node."""
        return self._nodes.get(digest)

    def keep_nodes(self, nodes: Iterable[tuple[Digest, bytes]]) -> None:
        """Keep nodes."""
        self._nodes.update(nodes)


class LmdbFacts(Facts):
    """Facts in an LMDB environment.

    Every record carries a checksum and every node is verified, since a take believes what stands
    here. Commits are not synced: after a crash of the machine, which the boot id tells, the cache
    is made anew. So it is after a process that died while it wrote: LMDB aborts where it finds its
    own pages in disorder, and must not do so again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pid = os.getpid()
        self._env = _open_environment(folder)
        self._segments = self._env.open_db(b"segments")
        self._places = self._env.open_db(b"places", dupsort=True)
        self._nodes = self._env.open_db(b"nodes")

    def usable(self) -> bool:
        """Whether this is the process that opened it: LMDB does not survive a fork."""
        return self._pid == os.getpid()

    def close(self) -> None:
        """Let go of the environment; whoever still uses these facts gets an ``lmdb.Error``."""
        self._env.close()

    def packs_of(self, segment: SegmentId) -> tuple[PackId, ...] | None:
        """Return the packs of a learned segment."""
        with self._env.begin(db=self._segments) as txn:
            packs = txn.get(segment)
        if packs is None or len(packs) < 4 or zlib.crc32(packs[4:]) != _u32(packs):
            return None
        return tuple(PackId(packs[i : i + ID_SIZE]) for i in range(4, len(packs), ID_SIZE))

    def learn(self, segment: SegmentId, packs: Iterable[PackId], records: list[Record]) -> None:
        """Remember a segment, in one transaction."""
        joined = b"".join(packs)
        facts = sorted((d, _fact(d, p)) for d, p in records)
        with self._writing() as txn:
            with txn.cursor(self._places) as cursor:
                cursor.putmulti(facts, dupdata=False)
            txn.put(segment, struct.pack("<I", zlib.crc32(joined)) + joined, db=self._segments)

    def place(self, digests: Iterable[Digest], live: frozenset[PackId]) -> list[Place | None]:
        """Return a live place of each digest: nearly always the first that is known."""
        found: list[Place | None] = []
        with self._env.begin(db=self._places) as txn:
            for digest in digests:
                fact = txn.get(digest)
                place = None if fact is None else _place(digest, bytes(fact))
                if fact is not None and (place is None or place.pack not in live):
                    place = next((p for p in _all_places(txn, digest) if p.pack in live), None)
                found.append(place)
        return found

    def places(self, digest: Digest) -> list[Place]:
        """Return the places of a digest."""
        with self._env.begin(db=self._places) as txn:
            return _all_places(txn, digest)

    def node(self, digest: Digest) -> bytes | None:
        """Return a kept node if it is what its digest says."""
        with self._env.begin(db=self._nodes) as txn:
            node: bytes | None = txn.get(digest)
        return node if node is not None and digest_of(node) == digest else None

    def keep_nodes(self, nodes: Iterable[tuple[Digest, bytes]]) -> None:
        """Keep nodes."""
        with self._writing() as txn, txn.cursor(self._nodes) as cursor:
            cursor.putmulti(sorted(nodes))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction]:
        mark = self.folder / f"{_WRITING}{os.getpid()}"
        try:
            mark.touch()
            with self._env.begin(write=True) as txn:
                yield txn
        finally:
            mark.unlink(missing_ok=True)


def _u32(data: bytes) -> int:
    return int.from_bytes(data[:4], "little")


def _fact(digest: Digest, place: Place) -> bytes:
    p = place
    bare = _BARE_FACT.pack(p.pack, p.offset, p.stored, p.raw, p.codec)
    return bare + zlib.crc32(digest + bare).to_bytes(4, "little")


def _place(digest: Digest, fact: bytes) -> Place | None:
    if len(fact) != _FACT.size:
        return None
    pack, offset, stored, raw, codec, crc = _FACT.unpack(fact)
    if crc != zlib.crc32(digest + fact[:-4]):
        return None
    return Place(pack, offset, stored, raw, codec)


def _all_places(txn: lmdb.Transaction, digest: Digest) -> list[Place]:
    with txn.cursor() as cursor:
        if not cursor.set_key(digest):
            return []
        return [p for f in cursor.iternext_dup() if (p := _place(digest, bytes(f))) is not None]


def _open_environment(folder: Path) -> lmdb.Environment:
    """Open the cache, making it anew where it is of another boot, cut short or no LMDB."""
    boot = folder / "boot"
    with contextlib.suppress(OSError):
        if boot.read_bytes() != boot_id().encode() or _cut_off(folder):
            _remove(folder)
    for attempt in range(2):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            env = _map_environment(folder)
            if not _cut_short(env, folder):
                boot.write_text(boot_id())
                return env
            env.close()
        except lmdb.Error as e:
            if attempt:
                raise
            _log.info("the cache %s is unusable (%s) and is made anew", folder, e)
        _remove(folder)
    raise lmdb.Error(f"{folder} cannot be made anew")


def _cut_off(folder: Path) -> bool:
    """Whether a process died while it wrote."""
    return any(
        not is_running(int(mark.name.removeprefix(_WRITING)))
        for mark in folder.glob(f"{_WRITING}[0-9]*")
    )


def _remove(folder: Path) -> None:
    import shutil  # slow to import, and needed for a cache that failed alone

    shutil.rmtree(folder, ignore_errors=True)


def _map_environment(folder: Path) -> lmdb.Environment:
    _reserve(folder / "lock.mdb")
    for size in _MAP_SIZES:
        try:
            env = lmdb.open(
                str(folder), map_size=size, max_dbs=3, sync=False, metasync=False, mode=0o600
            )
        except (lmdb.MemoryError, MemoryError):
            continue
        # Processes that were killed leave their places in the table of readers, which is short.
        env.reader_check()
        return env
    raise lmdb.Error("no address space for the map")


def _reserve(lock: Path) -> None:
    """Take space for the table of readers, which LMDB writes by memory: on a full disk, fatal."""
    fd = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _LOCK_BYTES)
    except OSError as e:
        # Where it is not supported we must hope.
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
    finally:
        os.close(fd)


def _cut_short(env: lmdb.Environment, folder: Path) -> bool:
    """Whether the file ends before its last page: to touch what is missing would be fatal."""
    pages = env.info()["last_pgno"] + 1
    return (folder / "data.mdb").stat().st_size < pages * env.stat()["psize"]


_open: dict[Path, LmdbFacts] = {}
_open_lock = threading.Lock()


def _facts_for(store_id: str) -> Facts:
    base = cache_folder()
    if base is None:
        _log.warning("no folder for the cache can be written; the index is kept in memory")
        return MemoryFacts()
    folder = base / store_id
    with _open_lock:
        facts = _open.get(folder)
        # LMDB must not be opened twice by one process, nor used after a fork.
        if facts is None or not facts.usable() or not (folder / "data.mdb").exists():
            if facts is not None and facts.usable():
                facts.close()
            try:
                facts = LmdbFacts(folder)
            except (lmdb.Error, OSError) as e:
                _log.warning(
                    "the cache %s cannot be used (%s); the index is kept in memory", folder, e
                )
                return MemoryFacts()
            _open[folder] = facts
        return facts


_distrusted: defaultdict[str, set[Digest]] = defaultdict(set)


class Index:
    """Finds the places of digests among the live packs of a root."""

    def __init__(self, backend: Backend, store_id: str) -> None:
        self._backend = backend
        self._store_id = store_id
        self._facts: Facts | None = None

    @property
    def facts(self) -> Facts:
        """The cache, opened at the first use."""
        facts = self._facts
        if facts is None or (isinstance(facts, LmdbFacts) and not facts.usable()):
            facts = self._facts = _facts_for(self._store_id)
        return facts

    @property
    def distrusted(self) -> set[Digest]:
        """Chunks that this process found damaged at all their places; a take writes them anew."""
        return _distrusted[self._store_id]

    def forget(self) -> None:
        """Go on with an empty index in memory, and delete the cache: what it said was not so."""
        if isinstance(self._facts, LmdbFacts):
            _remove(self._facts.folder)
        self._facts = MemoryFacts()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Drop a cache that fails, and let the caller ask again."""
        try:
            yield
        except (lmdb.Error, OSError) as e:
            if not isinstance(self._facts, LmdbFacts):
                raise
            _log.warning(
                "the cache %s failed (%s); the index is kept in memory", self._facts.folder, e
            )
            self.forget()
            raise _AskAgain from e

    def view(self, root: Root) -> View:
        """Return the index as ``root`` sees it, reading the segments that are new.

        Raises:
            DamagedError: A segment is missing or damaged.
        """
        try:
            with self._guarded():
                packs = [p for ref in root.segments for p in self._packs(SegmentId(ref.id))]
        except _AskAgain:
            packs = [p for ref in root.segments for p in self._packs(SegmentId(ref.id))]
        return View(root, frozenset(packs) - root.condemned.keys())

    def _packs(self, segment: SegmentId) -> tuple[PackId, ...]:
        packs = self.facts.packs_of(segment)
        if packs is None:
            content = self.segment(segment)
            packs = content.packs
            self.facts.learn(segment, packs, content.records)
        return packs

    def segment(self, segment: SegmentId) -> Segment:
        """Read a segment from the store.

        Raises:
            DamagedError: It is missing or damaged.
        """
        key = segment_key(segment)
        try:
            return decode_segment(self._backend.read(key), key)
        except FileNotFoundError:
            raise DamagedError(f"{self._backend.uri}: the index segment {key} is missing") from None

    def learn(self, segment: SegmentId, packs: Iterable[PackId], records: list[Record]) -> None:
        """Remember a segment of our own, so that it need not be read."""
        with contextlib.suppress(_AskAgain), self._guarded():
            self.facts.learn(segment, packs, records)

    def find(self, view: View, digests: list[Digest]) -> list[Place | None]:
        """Return, for each digest, a place in a live pack of a view, or None."""
        if not view.live:
            return [None] * len(digests)
        for _ in range(2):
            try:
                with self._guarded():
                    return self.facts.place(digests, view.live)
            except _AskAgain:
                self.view(view.root)
        raise AssertionError("an index in memory does not fail")

    def find_all(self, view: View, digest: Digest) -> list[Place]:
        """Return all places of a digest in the live packs of a view."""
        with contextlib.suppress(_AskAgain), self._guarded():
            return [p for p in self.facts.places(digest) if p.pack in view.live]
        return []

    def node(self, digest: Digest) -> bytes | None:
        """Return a cached tree node."""
        with contextlib.suppress(_AskAgain), self._guarded():
            return self.facts.node(digest)
        return None

    def keep_nodes(self, nodes: Iterable[tuple[Digest, bytes]]) -> None:
        """Remember tree nodes."""
        with contextlib.suppress(_AskAgain), self._guarded():
            self.facts.keep_nodes(nodes)


class _AskAgain(Exception):  # noqa: N818 - a signal, never seen outside
    """The cache failed and was replaced."""
