"""What is remembered of a store on this host: places of digests, and tree nodes; in LMDB.

A fact (this digest lies at this place of this pack) is true for ever: packs never change and ids
are never used again. So the cache may be stale, shared between processes and between the branches
of a store after a roll-back, or be deleted, and nothing but time is lost. It is true where it was
learned: another place may hold what others wrote under the same ids, so it has another cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import struct
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from weakref import WeakValueDictionary

import lmdb

from casnap.format.digest import Digest, digest_of
from casnap.format.records import ID_SIZE, PackId, Place, Record, SegmentId
from casnap.runtime.environment import boot_id, cache_folder
from casnap.storage.lmdb_files import WRITING, inode, nbytes, open_environment, remove

_log = logging.getLogger("casnap")
_BARE_FACT = struct.Struct("<16sQIIB")
_FACT = struct.Struct("<16sQIIBI")
# Caches of a store id and a place, and those that casnap had before, of a store id alone.
_FOLDER = re.compile("[0-9a-f]{32}(-[0-9a-f]{32})?")
MOST_FOLDERS = 64
"""So many caches are kept; a host that uses more stores loses time."""
# Seconds to wait for other writers: what has to be remembered, and what only saves time.
_PATIENCE, _LITTLE = 30.0, 1.0
_POLL = 0.002
_NODES_BYTES = 64 << 20


class BusyError(OSError):
    """Another process writes to the cache, and does not come to an end."""


class Facts(ABC):
    """Remembered records and tree nodes.

    Attributes:
        listed: The packs of the segments of the root that was looked at last.
    """

    def __init__(self) -> None:
        self.listed: dict[SegmentId, frozenset[PackId]] = {}

    @abstractmethod
    def packs_of(self, segment: SegmentId) -> tuple[PackId, ...] | None:
        """Return the packs that a segment covers, or None where it was not learned yet."""

    @abstractmethod
    def learn(self, segment: SegmentId, packs: Iterable[PackId], records: list[Record]) -> None:
        """Remember a segment."""

    @abstractmethod
    def place(self, digests: Iterable[Digest], live: Container[PackId]) -> list[Place | None]:
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

    # What is damaged each process remembers itself; some tell others.

    def distrusted(self, digests: Iterable[Digest]) -> set[Record]:
        """Return the places of some digests that somebody found damaged."""
        return set()

    def distrust(self, records: Iterable[Record], packs: Container[PackId]) -> None:  # noqa: B027
        """Remember places that are damaged, and forget those that are in none of these packs."""

    def trust(self, records: Iterable[Record]) -> None:  # noqa: B027
        """Forget that places were damaged."""

    @abstractmethod
    def note(self, key: bytes) -> bytes | None:
        """Return a note, or None."""

    @abstractmethod
    def keep_note(self, key: bytes, text: bytes) -> None:
        """Remember a note: of what will stay true, and does no harm if it is forgotten."""


class MemoryFacts(Facts):
    """Facts in dicts, where there is no place for LMDB."""

    def __init__(self) -> None:
        super().__init__()
        self._segments: dict[SegmentId, tuple[PackId, ...]] = {}
        self._places: dict[Digest, list[Place]] = {}
        self._nodes: dict[Digest, bytes] = {}
        self._nodes_bytes = 0
        self._notes: dict[bytes, bytes] = {}

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

    def place(self, digests: Iterable[Digest], live: Container[PackId]) -> list[Place | None]:
        """Return a live place of each digest."""
        return [next((p for p in self.places(d) if p.pack in live), None) for d in digests]

    def places(self, digest: Digest) -> list[Place]:
        """Return the places of a digest."""
        return self._places.get(digest, [])

    def node(self, digest: Digest) -> bytes | None:
        """Return a kept node."""
        return self._nodes.get(digest)

    def keep_nodes(self, nodes: Iterable[tuple[Digest, bytes]]) -> None:
        """Keep nodes, and let go those that were kept first where they become too many."""
        for digest, node in nodes:
            if digest not in self._nodes:
                self._nodes[digest] = node
                self._nodes_bytes += len(node)
        while self._nodes_bytes > _NODES_BYTES:
            self._nodes_bytes -= len(self._nodes.pop(next(iter(self._nodes)), b""))

    def note(self, key: bytes) -> bytes | None:
        """Return a kept note."""
        return self._notes.get(key)

    def keep_note(self, key: bytes, text: bytes) -> None:
        """Keep a note."""
        self._notes[key] = text


class LmdbFacts(Facts):
    """Facts in an LMDB environment.

    Every record carries a checksum and every node is verified, since a take believes what stands
    here. Commits are not synced: after a crash of the machine, which the boot id tells, the cache
    is made anew. So it is after a process that died while it wrote: LMDB aborts where it finds its
    own pages in disorder, and must not do so again.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._pid = os.getpid()
        self._busy = False
        self._env = open_environment(folder)
        self._inode = inode(folder)
        with self._turn(_PATIENCE), self._marked():
            self._segments = self._env.open_db(b"segments")
            self._places = self._env.open_db(b"places", dupsort=True)
            self._nodes = self._env.open_db(b"nodes")
            self._notes = self._env.open_db(b"notes")
            self._damaged = self._env.open_db(b"damaged", dupsort=True)

    def usable(self) -> bool:
        """Whether this is the process that opened it: LMDB does not survive a fork."""
        return self._pid == os.getpid()

    def nbytes(self) -> int:
        """Return the bytes that it takes up."""
        return nbytes(self._env)

    def delete(self) -> None:
        """Delete the files; whoever uses them goes on with what they have open.

        Unless they are not there any more: then these are somebody else's, and new.
        """
        if inode(self.folder) == self._inode:
            remove(self.folder)

    def packs_of(self, segment: SegmentId) -> tuple[PackId, ...] | None:
        """Return the packs of a learned segment."""
        with self._env.begin(db=self._segments) as txn:
            packs = txn.get(segment)
        if packs is None or len(packs) < 4 or zlib.crc32(segment + packs[4:]) != _u32(packs):
            return None
        return tuple(PackId(packs[i : i + ID_SIZE]) for i in range(4, len(packs), ID_SIZE))

    def learn(self, segment: SegmentId, packs: Iterable[PackId], records: list[Record]) -> None:
        """Remember a segment, in one transaction."""
        joined = b"".join(packs)
        facts = sorted((d, _fact(d, p)) for d, p in records)
        with self._writing(_PATIENCE) as txn:
            with txn.cursor(self._places) as cursor:
                cursor.putmulti(facts, dupdata=False)
            txn.put(
                segment, struct.pack("<I", zlib.crc32(segment + joined)) + joined, db=self._segments
            )

    def place(self, digests: Iterable[Digest], live: Container[PackId]) -> list[Place | None]:
        """Return a live place of each digest: nearly always the first that is known."""
        found: list[Place | None] = []
        known: dict[bytes, bool] = {}
        with self._env.begin(db=self._places) as txn:
            for digest in digests:
                fact = txn.get(digest)
                place = None if fact is None else _place(digest, bytes(fact))
                if place is not None and place.pack not in known:
                    known[place.pack] = place.pack in live
                if fact is not None and (place is None or not known[place.pack]):
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
        with self._writing(_LITTLE) as txn, txn.cursor(self._nodes) as cursor:
            cursor.putmulti(sorted(nodes))

    def distrusted(self, digests: Iterable[Digest]) -> set[Record]:
        """Return the places of some digests that are kept as damaged: nearly always none."""
        with self._env.begin(db=self._damaged) as txn:
            if not txn.stat(self._damaged)["entries"]:
                return set()
            return {(d, place) for d in digests for place in _all_places(txn, d)}

    def distrust(self, records: Iterable[Record], packs: Container[PackId]) -> None:
        """Keep damaged places."""
        with self._writing(_PATIENCE) as txn, txn.cursor(self._damaged) as cursor:
            for digest, fact in list(cursor):
                place = _place(Digest(bytes(digest)), bytes(fact))
                if place is None or place.pack not in packs:
                    txn.delete(digest, fact, db=self._damaged)
            cursor.putmulti(sorted((d, _fact(d, p)) for d, p in records), dupdata=False)

    def trust(self, records: Iterable[Record]) -> None:
        """Delete places from the damaged ones."""
        with self._writing(_LITTLE) as txn:
            for digest, place in records:
                txn.delete(digest, _fact(digest, place), db=self._damaged)

    def note(self, key: bytes) -> bytes | None:
        """Return a kept note, if it is what was written."""
        with self._env.begin(db=self._notes) as txn:
            found: bytes | None = txn.get(key)
        if found is None or len(found) < 4 or zlib.crc32(key + found[4:]) != _u32(found):
            return None
        return found[4:]

    def keep_note(self, key: bytes, text: bytes) -> None:
        """Keep a note."""
        with self._writing(_LITTLE) as txn:
            txn.put(key, struct.pack("<I", zlib.crc32(key + text)) + text, db=self._notes)

    @contextlib.contextmanager
    def _writing(self, patience: float) -> Iterator[lmdb.Transaction]:
        turn = self._turn(0 if self._busy else patience)
        with turn, self._marked(), self._env.begin(write=True) as txn:
            yield txn

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        """Leave a mark while LMDB writes: if it aborts, the next process finds the mark."""
        mark = self.folder / f"{WRITING}{os.getpid()}"
        try:
            mark.touch()
            yield
        finally:
            mark.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _turn(self, patience: float) -> Iterator[None]:
        """Wait for the turn to write, but not for ever: LMDB would, for a process that is stopped.

        Raises:
            BusyError: Somebody else writes for longer than that.
        """
        fd = os.open(self.folder / "turn", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        end = time.monotonic() + patience
        try:
            while not self._try_lock(fd):
                if time.monotonic() >= end:
                    self._busy = True
                    raise BusyError(f"another process has been writing for {patience:g} s")
                time.sleep(_POLL)
            self._busy = False
            yield
        finally:
            os.close(fd)

    @staticmethod
    def _try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


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


# LMDB must not be opened twice by one process, so those that anybody holds are known. Some are held
# here, since to open one takes a while; the others are closed when nobody has them any more.
_open: WeakValueDictionary[Path, LmdbFacts] = WeakValueDictionary()
_recent: deque[LmdbFacts] = deque(maxlen=8)
_inherited: list[LmdbFacts] = []
_open_lock = threading.Lock()


def _forget_after_fork() -> None:
    global _open_lock
    _open_lock = threading.Lock()
    # Kept, so that nothing is closed: LMDB does not survive a fork, not even to be closed.
    _inherited.extend(_open.values())
    _open.clear()
    _recent.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def _make_room(base: Path) -> None:
    """Remove caches that cannot be used any more, and where there are many, the least used.

    Whoever has one open goes on with it.
    """
    ours = boot_id().encode()
    used: list[tuple[float, Path]] = []
    for folder in base.iterdir():
        with contextlib.suppress(OSError):
            # One without this file is being made.
            boot = folder / "boot"
            if _FOLDER.fullmatch(folder.name) and (at := boot.stat().st_mtime):
                if boot.read_bytes() == ours:
                    used.append((at, folder))
                else:
                    remove(folder)
    used.sort()
    for _, folder in used[: max(0, len(used) - MOST_FOLDERS + 1)]:
        remove(folder)


def _folder_of(base: Path, name: str) -> Path:
    """Return where a cache lies; for a fork of a process that has it open, beside it.

    There LMDB takes it for open still, and would not open it again.
    """
    inherited = {facts.folder for facts in _inherited}
    while base / name in inherited:
        name = f"{name[:32]}-{digest_of(name.encode()).hex()[:32]}"
    return base / name


def facts_for(name: str) -> Facts:
    """Return a cache by name: one for all of this process; in memory if there is no other.

    Args:
        name: Tells stores, and the places where they lie, from each other.
    """
    base = cache_folder()
    if base is None:
        _log.warning("no folder for the cache can be written; the index is kept in memory")
        return MemoryFacts()
    folder = _folder_of(base, name)
    with _open_lock:
        facts = _open.get(folder)
        # One whose files were deleted is left open, since others may be using it.
        if facts is None or not (folder / "data.mdb").exists():
            try:
                if not folder.exists():
                    _make_room(base)
                facts = LmdbFacts(folder)
            except (lmdb.Error, OSError) as e:
                _log.warning(
                    "the cache %s cannot be used (%s); the index is kept in memory", folder, e
                )
                return MemoryFacts()
            _open[folder] = facts
        if facts not in _recent:
            _recent.append(facts)
        return facts
