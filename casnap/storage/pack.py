"""Writing packs: many chunks, or many tree nodes, in one immutable file."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from casnap.backends.base import Backend
from casnap.errors import StateError
from casnap.format.codec import Codec, compress
from casnap.format.digest import Digest, digest_of
from casnap.format.records import (
    FOOTER_RECORD_SIZE,
    PACK_TAIL_SIZE,
    PackId,
    Place,
    Record,
    pack_footer,
    pack_key,
)
from casnap.runtime import buffers
from casnap.runtime.buffers import PAGE, SLOTS, Pool, Slot
from casnap.runtime.threads import Crew, Worker, mapped

CHUNKS, NODES = b"p", b"t"
_ALIGN_FROM = 64 << 10
# More than one, so that the disk has work while another waits for its sync.
_WRITERS = 3
# A thread's first pack is a small one, so that the disk has work soon.
_FIRST_BYTES = 12 << 20

Raw: TypeAlias = memoryview | bytes
Choose = Callable[[list[Digest], list[int]], list[bool]]
"""Given the digests and lengths of some chunks, says which of them to keep."""


def new_id(base: int) -> bytes:
    """Return a fresh id, made under root ``base``. No id is ever used twice."""
    return base.to_bytes(6, "big") + os.urandom(10)


class _FullPack(NamedTuple):
    id: PackId
    slot: Slot
    fill: int
    records: list[Record]
    hints: bytes = b""


class PackWriter:
    """Writes full packs in the background. A pack of nodes holds each node twice.

    A damaged node hurts all that is below it, perhaps in many snapshots, and all nodes together
    take about a thousandth of the bytes. ZFS keeps its metadata in two places too.

    Args:
        backend: Where to write.
        base: The root number that ids begin with.
        folder: The last byte of ids, which names the folder of the packs.
        kind: ``CHUNKS`` or ``NODES``.
        pool: The pool of memory.
        crew: The crew of the background threads.
        codec: How chunks are stored.

    Attributes:
        packs: The packs that were begun.
        records: Where each chunk or node lies in the packs that were written.
        lengths: How many bytes each of these has.
        stored_bytes: Bytes of the chunks or nodes in full packs.
    """

    def __init__(
        self,
        backend: Backend,
        base: int,
        folder: bytes,
        kind: bytes,
        pool: Pool,
        crew: Crew,
        codec: Codec,
    ) -> None:
        self.pool = pool
        self.crew = crew
        self.codec = codec
        self._backend = backend
        self._base = base
        self._folder = folder
        self._kind = kind
        self._lock = threading.Lock()
        self._full: queue.SimpleQueue[_FullPack | None] = queue.SimpleQueue()
        self._writers: list[Worker] = []
        # Each holds a slot of the pool.
        self._most_writers = min(backend.in_flight, SLOTS) if backend.is_remote else _WRITERS
        self.packs: list[PackId] = []
        self.records: list[Record] = []
        self.lengths: dict[PackId, int] = {}
        self.stored_bytes = 0

    def filler(self) -> PackFiller:
        """Return what one thread fills packs with."""
        return PackFiller(self)

    def new_pack(self) -> PackId:
        """Return a new id.

        On a disk all packs of a take lie in one folder, which is synced once. An object store
        spreads its work by the beginnings of names.
        """
        ident = new_id(self._base)
        return PackId(ident if self._backend.is_remote else ident[:-1] + self._folder)

    def hand_over(self, pack: _FullPack) -> None:
        """Write a pack in the background, then give its slot back to the pool."""
        with self._lock:
            self.stored_bytes += sum(place.stored for _, place in pack.records)
            if len(self._writers) < self._most_writers:
                self._writers += self.crew.start_some(self._write_packs)
            in_background = bool(self._writers)
        if in_background:
            self._full.put(pack)
        else:
            self._write_or_fail(pack)

    def _write_packs(self) -> None:
        while (pack := self._full.get()) is not None:
            self._write_or_fail(pack)

    def _write_or_fail(self, pack: _FullPack) -> None:
        try:
            # After a failure only give the slots back: a thread may wait for one.
            if not self.crew.failed:
                self._write(pack)
        except BaseException as e:  # noqa: BLE001 - the crew raises it
            self.crew.fail(e)
        finally:
            self.pool.release(pack.slot)

    @property
    def times(self) -> int:
        """How often a pack holds each chunk or node."""
        return 2 if self._kind == NODES else 1

    def _write(self, pack: _FullPack) -> None:
        fill, records = pack.fill, pack.records
        if self.times == 2 and _fits(2, pack.fill, len(records), pack.slot):
            fill, records = _repeated(pack)
        if pack.hints and _fits(1, fill + len(pack.hints), len(records) + 1, pack.slot):
            fill, records = _with_hints(pack, fill, records)
        footer = pack_footer(self._kind, records)
        end = fill + len(footer)
        pack.slot.view[fill:end] = footer
        with self._lock:
            # Record the pack before writing it, so that cleanup can find a partial file.
            self.packs.append(pack.id)
        self._backend.write(pack_key(pack.id), pack.slot.view[:end])
        with self._lock:
            self.records += records
            self.lengths[pack.id] = end

    def finish(self) -> None:
        """Wait until all full packs are written."""
        self.crew.join(self._stop())

    def close(self) -> None:
        """End the background threads, also after a failure."""
        for writer in self._stop():
            writer.wait()

    def _stop(self) -> list[Worker]:
        writers, self._writers = self._writers, []
        for _ in writers:
            self._full.put(None)
        return writers

    def move(self, base: int) -> dict[PackId, PackId]:
        """Give all packs new ids, made under another root.

        Returns:
            The new id of each pack.

        Raises:
            FileNotFoundError: One is gone.
        """
        self._base = base
        moved = {pack: self.new_pack() for pack in self.packs}

        def copy(pack: PackId) -> None:
            self._backend.copy(pack_key(pack), pack_key(moved[pack]))

        at_once = self._backend.in_flight if self._backend.is_remote else 1
        for _ in mapped(copy, moved, at_once):
            pass
        self.packs = list(moved.values())
        self.lengths = {moved[pack]: n for pack, n in self.lengths.items()}
        self.records = [(digest, moved_place(place, moved)) for digest, place in self.records]
        return moved

    def delete_packs(self) -> None:
        """Delete all packs that were begun."""
        for refused in self._backend.delete_all(map(pack_key, self.packs)).values():
            raise refused
        self.packs = []


class PackFiller:
    """Fills one pack after the other, from one thread.

    It copies a chunk into the pack first and hashes it there, where no other thread can change it.
    So every chunk has the digest that it is stored under. Known chunks give their room back.
    """

    def __init__(self, writer: PackWriter) -> None:
        self._writer = writer
        self._slot: Slot | None = None
        self._first = True
        self._id = PackId(b"")
        self._fill = 0
        self._records: list[Record] = []

    def add(self, raws: Sequence[Raw], choose: Choose) -> list[Digest]:
        """Copy chunks into the pack, hash them there, and keep the chosen ones."""
        digests: list[Digest] = []
        for group in self._groups(raws):
            found, stored, start = [], [], self._fill
            for raw in group:
                offset, size, codec = self._copy(raw)
                assert self._slot is not None
                own = self._slot.view[offset : offset + size] if codec == Codec.RAW else raw
                found.append(digest_of(own))
                stored.append(Place(self._id, offset, size, len(raw), codec))
            chosen = choose(found, [len(raw) for raw in group])
            self._keep(start, list(zip(found, stored, chosen, strict=True)))
            digests += found
        return digests

    def add_known(self, chunks: Sequence[tuple[Digest, Raw]]) -> None:
        """Keep chunks that the caller has hashed.

        Raises:
            StateError: One has changed since.
        """

        def check(digests: list[Digest], _sizes: list[int]) -> list[bool]:
            if digests != [next(expected) for _ in digests]:
                raise StateError(
                    "a tensor changed while it was being taken; do not write to the state during "
                    "take(), or use async_take(), which copies it first"
                )
            return [True] * len(digests)

        expected = iter([digest for digest, _ in chunks])
        self.add([raw for _, raw in chunks], check)

    def add_verified(self, digest: Digest, raw: Raw) -> None:
        """Keep a chunk that was verified where it lies, in memory that no other thread writes."""
        for _ in self._groups([raw]):
            offset, size, codec = self._copy(raw)
            self._records.append((digest, Place(self._id, offset, size, len(raw), codec)))

    def _groups(self, raws: Sequence[Raw]) -> Iterator[list[Raw]]:
        """Yield runs of chunks that fit into the open pack; open another one where none fits."""
        group: list[Raw] = []
        need = 0
        for raw in raws:
            most = len(raw) + PAGE + FOOTER_RECORD_SIZE
            if not self._has_room(need + most):
                if group:
                    yield group
                    group, need = [], 0
                if not self._has_room(most):
                    self.seal()
                    self._open()
                if not self._has_room(most, alone=True):
                    raise StateError(
                        f"a part of the state's description takes {len(raw):,} bytes, more than a "
                        "pack holds; use shorter keys and less metadata"
                    )
            group.append(raw)
            need += most
        if group:
            yield group

    def _has_room(self, nbytes: int, *, alone: bool = False) -> bool:
        if self._slot is None:
            return False
        if self._first and self._fill > _FIRST_BYTES:
            return False
        # A node too large to stand twice stands once, in a pack of its own.
        times = 1 if alone else self._writer.times
        return _fits(times, self._fill + nbytes, len(self._records), self._slot)

    def _open(self) -> None:
        slot = self._writer.pool.take()
        error = self._writer.crew.error
        if error is not None:
            self._writer.pool.release(slot)
            raise error
        self._slot, self._fill, self._records = slot, 0, []
        self._id = self._writer.new_pack()

    def _copy(self, raw: Raw) -> tuple[int, int, Codec]:
        assert self._slot is not None
        stored, codec = raw, Codec.RAW
        if self._writer.codec == Codec.ZSTD:
            compressed = compress(raw)
            if len(compressed) < len(raw):
                stored, codec = compressed, Codec.ZSTD
        offset = _aligned(self._fill, len(stored))
        self._slot.view[self._fill : offset] = bytes(offset - self._fill)
        self._fill = offset + len(stored)
        buffers.copy(self._slot.view[offset : self._fill], stored)
        return offset, len(stored), codec

    def _keep(self, start: int, copied: list[tuple[Digest, Place, bool]]) -> None:
        """Keep the wanted ones of the chunks copied from ``start`` on; close the gaps."""
        if all(wanted for _, _, wanted in copied):
            self._records += [(digest, place) for digest, place, _ in copied]
            return
        assert self._slot is not None
        self._fill = start
        view = self._slot.view
        for digest, p, wanted in copied:
            if wanted:
                offset = _aligned(self._fill, p.stored)
                view[self._fill : offset] = bytes(offset - self._fill)
                self._fill = offset + p.stored
                if offset != p.offset:
                    buffers.copy(view[offset : self._fill], view[p.offset : p.offset + p.stored])
                self._records.append((digest, Place(p.pack, offset, p.stored, p.raw, p.codec)))

    def last(self) -> Place:
        """Return the place of the last chunk."""
        return self._records[-1][1]

    @property
    def open_pack(self) -> tuple[PackId, int] | None:
        """The pack that is being filled, and how many bytes it has; None if there is none."""
        return None if self._slot is None else (self._id, self._fill)

    def seal(self, hints: bytes = b"") -> None:
        """Have the open pack written, with hints at its end; if it is empty, free its memory."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        self._first = False
        if self._records:
            self._writer.hand_over(_FullPack(self._id, slot, self._fill, self._records, hints))
        else:
            self._writer.pool.release(slot)


def _fits(times: int, fill: int, count: int, slot: Slot) -> bool:
    most = fill + count * FOOTER_RECORD_SIZE + PAGE
    return times * most + PACK_TAIL_SIZE <= len(slot.view)


def _repeated(pack: _FullPack) -> tuple[int, list[Record]]:
    """Copy the content of a pack behind itself, on other pages; return the end and the records."""
    places = [place for _, place in pack.records]
    # How far each copy has to be moved to lie on other pages than the first one.
    behind = [-(-(p.offset + p.stored) // PAGE) * PAGE - p.offset for p in places]
    start = max(pack.fill, *behind)
    if any(p.stored >= _ALIGN_FROM for p in places):
        start = -(-start // PAGE) * PAGE
    pack.slot.view[pack.fill : start] = bytes(start - pack.fill)
    buffers.copy(pack.slot.view[start : start + pack.fill], pack.slot.view[: pack.fill])
    again = [
        (digest, msgspec.structs.replace(place, offset=start + place.offset))
        for digest, place in pack.records
    ]
    return start + pack.fill, pack.records + again


def _with_hints(pack: _FullPack, fill: int, records: list[Record]) -> tuple[int, list[Record]]:
    """Add the hints behind the nodes, once; return the end and the records."""
    nbytes = len(pack.hints)
    offset = _aligned(fill, nbytes)
    pack.slot.view[fill:offset] = bytes(offset - fill)
    pack.slot.view[offset : offset + nbytes] = pack.hints
    place = Place(pack.id, offset, nbytes, nbytes, Codec.RAW)
    return offset + nbytes, [*records, (digest_of(pack.hints), place)]


def moved_place(place: Place, moved: dict[PackId, PackId]) -> Place:
    """Return the place of a chunk whose pack has got a new id."""
    return msgspec.structs.replace(place, pack=moved[PackId(place.pack)])


def _aligned(offset: int, nbytes: int) -> int:
    return -(-offset // PAGE) * PAGE if nbytes >= _ALIGN_FROM else offset
