"""Write packs: immutable files that hold many chunks, or many tree nodes."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec

from casnap.backends.base import Backend
from casnap.errors import StateError
from casnap.format.codec import Codec, compress
from casnap.format.digest import Digest, digest_of
from casnap.format.records import (
    FOOTER_RECORD_SIZE,
    PACK_TAIL_SIZE,
    DeltaPlace,
    PackId,
    Place,
    Record,
    count_deltas,
    pack_footer,
    pack_key,
)
from casnap.runtime import buffers
from casnap.runtime.buffers import PAGE, SLOTS, Pool, Slot, whole_pages
from casnap.runtime.threads import Crew, Worker, mapped

CHUNKS, NODES = b"p", b"t"
_ALIGN_FROM = 64 << 10
# More than one thread, so that the disk has work while another thread waits for a sync.
_WRITERS = 3
# The most stored bytes of a chunk that its pack holds twice.
_SMALL_BYTES = 4096
# The first pack of a thread is a small one, so that the disk has work soon.
_FIRST_BYTES = 12 << 20

# Reading a member of an enum takes as long as copying a small chunk.
_RAW = Codec.RAW

Raw: TypeAlias = memoryview | bytes
SelectNew = Callable[[list[Digest], list[int]], list[bool]]
"""Returns, for the digests and lengths of chunks, whether each chunk is to be written."""


def new_id(base: int) -> bytes:
    """Return a new id for a pack or segment that is written under the root ``base``."""
    return base.to_bytes(6, "big") + os.urandom(10)


class Room(NamedTuple):
    """Memory in an open pack, into which the caller puts chunks.

    The pack is written only afterwards.

    Attributes:
        view: The memory.
        keep: The caller must call this exactly once, even after an error. Its argument is the
            chunks to keep, as triples: digest, offset in ``view``, length.
    """

    view: memoryview
    keep: Callable[[Sequence[tuple[Digest, int, int]]], None]


@dataclass(eq=False)
class _Pack:
    """A pack in memory, before it is written.

    Attributes:
        id: The id of the pack.
        slot: The memory of the pack.
        fill: How many of its bytes are in use.
        records: The records of its chunks or nodes.
        hints: The hints to write after its nodes.
        promised: The number of records still to come, for which the footer must have space.
        waits: How many ``PackFiller`` and ``Room`` objects still use the pack. At 0 it is written.
        again: The bytes that a second copy of the small chunks among ``records`` takes.
        counted: The number of records that ``again`` covers so far.
    """

    id: PackId
    slot: Slot
    fill: int = 0
    records: list[Record] = field(default_factory=list)
    hints: bytes = b""
    promised: int = 0
    waits: int = 1
    again: int = 0
    counted: int = 0

    def room_again(self) -> int:
        """Return how many bytes a second copy of the small chunks will take, with its records."""
        unseen = self.records[self.counted :]
        self.counted += len(unseen)
        self.again += sum(
            place.stored_size + FOOTER_RECORD_SIZE for _, place in unseen if _is_small(place)
        )
        return self.again + PAGE if self.again else 0


class PackWriter:
    """Writes full packs on threads in the background.

    A pack of nodes holds each node twice. A damaged node hurts all entries below it, perhaps in
    many snapshots, and all nodes together take about a thousandth of a store's bytes. (ZFS keeps
    two copies of its metadata too.) A pack of chunks holds its small chunks twice: the settings of
    an optimizer may be one small chunk, and without it no snapshot of a run can be restored.

    Args:
        backend: The backend of the store.
        base: The number of the root that the packs are written under.
        folder: The last byte of the packs' ids, which selects their folder.
        kind: ``CHUNKS`` or ``NODES``.
        pool: The pool of memory for packs.
        crew: Starts the threads in the background.
        codec: The codec of new chunks or nodes.

    Attributes:
        pool: The pool of memory for packs.
        crew: Starts the threads in the background.
        codec: The codec of new chunks or nodes.
        packs: The ids of the packs that the writer has begun to write.
        records: The records of the packs that were written.
        lengths: The length of each pack that was written.
        stored_bytes: The stored bytes of the chunks or nodes in full packs.
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
        self._full: queue.SimpleQueue[_Pack | None] = queue.SimpleQueue()
        self._writers: list[Worker] = []
        # Each writing thread holds a slot of the pool. Threads that write to a remote store only
        # wait, so the limit of the crew does not bind them.
        at_once = crew.limited(_WRITERS)
        if backend.costs.waiting:
            at_once = min(backend.in_flight, SLOTS)
        self._most_writers = at_once
        self.packs: list[PackId] = []
        self.records: list[Record] = []
        self.lengths: dict[PackId, int] = {}
        self.stored_bytes = 0

    def filler(self) -> PackFiller:
        """Return a new filler. One thread fills packs with it."""
        return PackFiller(self)

    def new_pack(self) -> PackId:
        """Return a new pack id.

        On a disk, all packs of a take are in one folder, so that one folder is synced. An object
        store distributes its load by folder names, so there the packs are spread over folders.
        """
        ident = new_id(self._base)
        return PackId(ident[:-1] + self._folder if self._backend.syncs_folders else ident)

    def begin_wait(self, pack: _Pack) -> None:
        """Note that one more ``PackFiller`` or ``Room`` uses a pack, so it is not written yet."""
        # Rooms of the same pack end on other threads.
        with self._lock:
            pack.waits += 1

    def end_wait(self, pack: _Pack) -> None:
        """Note that a ``PackFiller`` or ``Room`` no longer uses a pack.

        Once nothing uses the pack any more, a thread writes it. Then the pack's memory goes
        back to the pool. The memory of an empty pack goes back at once.
        """
        with self._lock:
            pack.waits -= 1
            if pack.waits:
                return
        if not pack.records:
            self.pool.release(pack.slot)
            return
        with self._lock:
            self.stored_bytes += sum(place.stored_size for _, place in pack.records)
            if len(self._writers) < self._most_writers:
                try:
                    self._writers += self.crew.start(self._write_packs)
                except BaseException:
                    self.pool.release(pack.slot)
                    raise
        self._full.put(pack)

    def _write_packs(self) -> None:
        while (pack := self._full.get()) is not None:
            self._write_or_fail(pack)

    def _write_or_fail(self, pack: _Pack) -> None:
        try:
            # After a failure, only give the slot back: a thread may wait for one.
            if not self.crew.failed:
                self._write(pack)
        except BaseException as e:  # noqa: BLE001 - the crew raises it
            self.crew.fail(e)
        finally:
            self.pool.release(pack.slot)

    @property
    def times(self) -> int:
        """How many copies a pack has of each node (2) or of each large chunk (1).

        It has two copies of a small chunk, if there is space.
        """
        return 2 if self._kind == NODES else 1

    def _write(self, pack: _Pack) -> None:
        records = pack.records
        # The footer follows the last chunk: readers compute from it how long the pack has to be.
        # Room at the end may not have been filled.
        fill = pack.fill = max(place.offset + place.stored_size for _, place in records)
        if self.times == 2 and _room(2, pack.fill, len(records), pack.slot) >= 0:
            fill, records = _append_second_copy(pack)
        elif self.times == 1:
            fill, records = _append_small_chunks(pack)
        room = _room(1, fill + len(pack.hints), len(records) + 1, pack.slot)
        if pack.hints and room >= 0:
            fill, records = _append_hints(pack, fill, records)
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
        """Wait until all full packs are written.

        Raises:
            BaseException: The first error of a thread.
        """
        self.crew.join(self._stop())

    def close(self) -> None:
        """End the threads in the background. This may be called after a failure, too."""
        for writer in self._stop():
            writer.wait()

    def _stop(self) -> list[Worker]:
        writers, self._writers = self._writers, []
        for _ in writers:
            self._full.put(None)
        return writers

    def move(self, base: int) -> dict[PackId, PackId]:
        """Give all packs new ids, under another root.

        Args:
            base: The number of that root.

        Returns:
            The old id of each pack → its new id.

        Raises:
            FileNotFoundError: A pack is gone.
        """
        self._base = base
        new_ids = {pack: self.new_pack() for pack in self.packs}

        def copy(pack: PackId) -> None:
            self._backend.copy(pack_key(pack), pack_key(new_ids[pack]))

        for _ in mapped(copy, new_ids, self._backend.in_flight):
            pass
        self.packs = list(new_ids.values())
        self.lengths = {new_ids[pack]: n for pack, n in self.lengths.items()}
        self.records = [(digest, moved_place(place, new_ids)) for digest, place in self.records]
        return new_ids

    def delete_packs(self) -> None:
        """Delete all packs that this writer has begun to write. No root may name any of them."""
        for refused in self._backend.delete_all(map(pack_key, self.packs)).values():
            raise refused
        self.packs = []


class PackFiller:
    """Fills one pack after the other, from one thread.

    It first copies a chunk into the memory of the pack, and then hashes the copy, which no other
    thread can change. So every chunk in the pack has the digest in its record. If the store has a
    chunk already, the memory of its copy is used for the next chunk.

    Args:
        writer: Writes the packs.
    """

    def __init__(self, writer: PackWriter) -> None:
        self._writer = writer
        self._pack: _Pack | None = None
        self._first = True

    def add(self, raws: Sequence[Raw], select_new: SelectNew) -> list[Digest]:
        """Copy chunks into the pack, hash the copies, and keep only the new chunks.

        Args:
            raws: The bytes of the chunks.
            select_new: Returns which of some chunks are new.

        Returns:
            The digest of each chunk, whether it was kept or not.
        """
        digests: list[Digest] = []
        for group in self._groups(raws):
            pack = self._open_pack
            hashes, places, start, view = [], [], pack.fill, pack.slot.view
            for raw in group:
                place = self._copy(raw)
                copy = view[place.offset : place.offset + place.stored_size]
                hashes.append(digest_of(copy if place.codec == _RAW else raw))
                places.append(place)
            self._keep(start, hashes, places, select_new(hashes, [len(raw) for raw in group]))
            digests += hashes
        return digests

    def add_known(self, chunks: Sequence[tuple[Digest, Raw]]) -> None:
        """Copy chunks whose digests the caller knows into the pack, and keep them.

        Args:
            chunks: The digest and bytes of each chunk.

        Raises:
            StateError: The bytes no longer have the digest: the state changed during the take.
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
        """Copy a chunk into the pack without hashing it. The caller has verified its bytes.

        No other thread may write to these bytes.
        """
        for _ in self._groups([raw]):
            self._open_pack.records.append((digest, self._copy(raw)))

    def add_stored(
        self, digest: Digest, stored_form: Raw, nbytes: int, codec: Codec, base: Digest | None
    ) -> None:
        """Copy a chunk into the pack in a stored form that the caller has verified.

        Args:
            digest: The digest of the chunk.
            stored_form: The stored bytes.
            nbytes: The raw length of the chunk.
            codec: The codec of the stored form.
            base: The digest of the base if the form is a delta; else None.
        """
        for _ in self._groups([stored_form]):
            pack = self._open_pack
            offset = self._pad(len(stored_form))
            pack.fill += len(stored_form)
            buffers.copy(pack.slot.view[offset : pack.fill], stored_form)
            place = Place(pack.id, offset, len(stored_form), nbytes, codec)
            if base is not None:
                place = DeltaPlace(pack.id, offset, len(stored_form), nbytes, codec, base)
                # The footer names the base too, in less room than a record takes.
                pack.promised += 1
            pack.records.append((digest, place))

    def room(self, nbytes: int, count: int) -> Room | None:
        """Reserve memory in a pack, into which the caller puts raw chunks.

        The memory begins on a page.

        Args:
            nbytes: The bytes of the memory.
            count: The most chunks that the caller puts into the memory.

        Returns:
            The room; None if chunks are to be compressed, or the memory does not fit into a pack.
        """
        if self._writer.codec != Codec.RAW:
            return None
        most = nbytes + PAGE + count * FOOTER_RECORD_SIZE
        if most > self._room_left():
            self.seal()
            self._open()
        if most > self._room_left():
            return None
        pack = self._open_pack
        start = self._pad(nbytes)
        pack.fill += nbytes
        pack.promised += count
        self._writer.begin_wait(pack)
        view = pack.slot.view[start : pack.fill]
        return Room(view, partial(self._keep_room, pack, start, view))

    def _keep_room(
        self, pack: _Pack, start: int, view: memoryview, chunks: Sequence[tuple[Digest, int, int]]
    ) -> None:
        stop = 0
        try:
            for digest, begin, nbytes in sorted(chunks, key=lambda chunk: chunk[1]):
                # Bytes between the kept chunks are not verified, so zero them.
                view[stop:begin] = bytes(max(0, begin - stop))
                stop = max(stop, begin + nbytes)
                place = Place(pack.id, start + begin, nbytes, nbytes, Codec.RAW)
                pack.records.append((digest, place))
            view[stop:] = bytes(len(view) - stop)
        except BaseException as e:
            # Out of memory, for example. The slot is given back, and nothing is written.
            self._writer.crew.fail(e)
            raise
        finally:
            self._writer.end_wait(pack)

    def _groups(self, raws: Sequence[Raw]) -> Iterator[list[Raw]]:
        """Yield groups of chunks.

        Each group fits into the open pack; if needed, a new pack is opened.

        Raises:
            StateError: A single node or chunk is larger than a pack.
        """
        group: list[Raw] = []
        need, room = 0, self._room_left()
        for raw in raws:
            most = len(raw) + PAGE + FOOTER_RECORD_SIZE
            if len(raw) <= _SMALL_BYTES:
                most *= 2
            if need + most > room:
                if group:
                    yield group
                    group, need = [], 0
                if most > self._room_left():
                    self.seal()
                    self._open()
                room = self._room_left()
                if most > self._room_left(is_single=True):
                    raise StateError(
                        f"a part of the state's description takes {len(raw):,} bytes, more than a "
                        "pack holds; use shorter keys and less metadata"
                    )
            group.append(raw)
            need += most
        if group:
            yield group

    def _room_left(self, *, is_single: bool = False) -> int:
        """Return how many bytes still fit into the open pack, their records included.

        The result is negative if none fit, or no pack is open.

        Args:
            is_single: Whether to count as if the pack held each node once instead of twice.
        """
        pack = self._pack
        if pack is None or (self._first and pack.fill > _FIRST_BYTES):
            return -1
        # A node too large to be stored twice is stored once, in a pack of its own.
        times = 1 if is_single else self._writer.times
        again = pack.room_again() if self._writer.times == 1 else 0
        return _room(times, pack.fill + again, len(pack.records) + pack.promised, pack.slot)

    def _open(self) -> None:
        slot = self._writer.pool.take()
        error = self._writer.crew.error
        if error is not None:
            self._writer.pool.release(slot)
            raise error
        self._pack = _Pack(self._writer.new_pack(), slot)

    @property
    def _open_pack(self) -> _Pack:
        assert self._pack is not None
        return self._pack

    def _pad(self, nbytes: int) -> int:
        """Pad the open pack with zeros up to where a chunk may begin; return the offset.

        Args:
            nbytes: The length of the chunk. A large chunk begins on a page.
        """
        pack = self._open_pack
        start = _aligned(pack.fill, nbytes)
        if start > pack.fill:
            pack.slot.view[pack.fill : start] = bytes(start - pack.fill)
            pack.fill = start
        return start

    def _copy(self, raw: Raw) -> Place:
        pack = self._open_pack
        codec = self._writer.codec
        compressed = compress(raw, codec)
        stored_form, codec = (raw, _RAW) if compressed is None else (compressed, codec)
        offset = self._pad(len(stored_form))
        pack.fill += len(stored_form)
        buffers.copy(pack.slot.view[offset : pack.fill], stored_form)
        return Place(pack.id, offset, len(stored_form), len(raw), codec)

    def _keep(
        self, start: int, digests: list[Digest], places: list[Place], is_chosen: list[bool]
    ) -> None:
        """Keep the chosen chunks of a group in the pack, and drop the others.

        The chosen ones are moved together, so that no gap stays.

        Args:
            start: The offset of the group in the pack.
            digests: The digest of each chunk.
            places: The place of each chunk.
            is_chosen: Whether each chunk is kept.
        """
        pack = self._open_pack
        if all(is_chosen):
            pack.records += zip(digests, places, strict=True)
            return
        pack.fill = start
        view = pack.slot.view
        for digest, p, is_wanted in zip(digests, places, is_chosen, strict=True):
            if is_wanted:
                offset = self._pad(p.stored_size)
                pack.fill += p.stored_size
                if offset != p.offset:
                    buffers.copy(
                        view[offset : pack.fill], view[p.offset : p.offset + p.stored_size]
                    )
                pack.records.append(
                    (digest, Place(p.pack, offset, p.stored_size, p.raw_size, p.codec))
                )

    def last_place(self) -> Place:
        """Return the place of the chunk or node that was added last."""
        return self._open_pack.records[-1][1]

    @property
    def filling(self) -> tuple[PackId, int] | None:
        """The id of the open pack, and how many of its bytes are in use; None if there is none."""
        return None if self._pack is None else (self._pack.id, self._pack.fill)

    def seal(self, hints: bytes = b"") -> None:
        """Close the open pack, and have it written. An empty pack only gives back its memory.

        Args:
            hints: The hints to write at the end of a pack of nodes.
        """
        pack, self._pack = self._pack, None
        if pack is not None:
            self._first = False
            pack.hints = hints
            self._writer.end_wait(pack)


def _room(times: int, fill: int, count: int, slot: Slot) -> int:
    """Return how many more bytes of chunks or nodes fit into a pack; negative if none do.

    Args:
        times: How many copies of each chunk or node the pack has.
        fill: The bytes in use.
        count: How many records the footer must have space for.
        slot: The memory of the pack.
    """
    most = (len(slot.view) - PACK_TAIL_SIZE) // times
    return most - fill - count * FOOTER_RECORD_SIZE - PAGE


def _append_second_copy(pack: _Pack) -> tuple[int, list[Record]]:
    """Append a second copy of all nodes of a pack. It does not share a page with the first copy.

    Returns:
        The offset after the second copy, and the records of both copies.
    """
    places = [place for _, place in pack.records]
    # How far each copy must be moved to lie on other pages than the first one.
    distances = [whole_pages(p.offset + p.stored_size) - p.offset for p in places]
    start = max(pack.fill, *distances)
    if any(p.stored_size >= _ALIGN_FROM for p in places):
        start = whole_pages(start)
    pack.slot.view[pack.fill : start] = bytes(start - pack.fill)
    buffers.copy(pack.slot.view[start : start + pack.fill], pack.slot.view[: pack.fill])
    again = [
        (digest, msgspec.structs.replace(place, offset=start + place.offset))
        for digest, place in pack.records
    ]
    return start + pack.fill, pack.records + again


def _is_small(place: Place) -> bool:
    return place.stored_size <= _SMALL_BYTES and not isinstance(place, DeltaPlace)


def _append_small_chunks(pack: _Pack) -> tuple[int, list[Record]]:
    """Append a second copy of the small chunks of a pack.

    The second copy shares no page with the first. If there is no space for it, the pack holds its
    small chunks once.

    Returns:
        The offset after the second copy, and the records of all chunks.
    """
    small = [record for record in pack.records if _is_small(record[1])]
    nbytes = sum(place.stored_size for _, place in small)
    start = whole_pages(pack.fill)
    count = len(pack.records) + count_deltas(pack.records) + 2 * len(small)
    room = _room(1, start + nbytes, count, pack.slot)
    if not small or room < 0:
        return pack.fill, pack.records
    view, end = pack.slot.view, start
    view[pack.fill : start] = bytes(start - pack.fill)
    again: list[Record] = []
    for digest, p in small:
        view[end : end + p.stored_size] = view[p.offset : p.offset + p.stored_size]
        again.append((digest, Place(p.pack, end, p.stored_size, p.raw_size, p.codec)))
        end += p.stored_size
    return end, pack.records + again


def _append_hints(pack: _Pack, fill: int, records: list[Record]) -> tuple[int, list[Record]]:
    """Append the hints to a pack of nodes, in one copy.

    Args:
        pack: The pack.
        fill: The offset after its nodes.
        records: The records of its nodes.

    Returns:
        The offset after the hints, and all records.
    """
    nbytes = len(pack.hints)
    offset = _aligned(fill, nbytes)
    pack.slot.view[fill:offset] = bytes(offset - fill)
    pack.slot.view[offset : offset + nbytes] = pack.hints
    place = Place(pack.id, offset, nbytes, nbytes, Codec.RAW)
    return offset + nbytes, [*records, (digest_of(pack.hints), place)]


def moved_place(place: Place, new_ids: dict[PackId, PackId]) -> Place:
    """Return a place with the new id of its pack.

    Args:
        place: The place, with the old id.
        new_ids: The old id of each moved pack → its new id.
    """
    return msgspec.structs.replace(place, pack=new_ids[place.pack])


def _aligned(offset: int, nbytes: int) -> int:
    return whole_pages(offset) if nbytes >= _ALIGN_FROM else offset
