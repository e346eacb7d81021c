"""Writing packs: many chunks, or many tree nodes, in one immutable file."""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass, field

from casnap import buffers
from casnap.backends.base import Backend
from casnap.buffers import PAGE, Pool, Slot
from casnap.codec import Codec, compress
from casnap.digest import Digest, digest_of
from casnap.errors import StateError
from casnap.format import (
    FOOTER_RECORD_SIZE,
    PACK_TAIL_SIZE,
    PackId,
    Place,
    Record,
    pack_footer,
    pack_key,
)
from casnap.pipeline import Crew

CHUNKS, NODES = b"p", b"t"
_ALIGN_FROM = 64 << 10
_WRITERS = 2


def new_id(base: int) -> bytes:
    """Return a fresh id, made under root ``base``: never used before, never again."""
    return base.to_bytes(6, "big") + os.urandom(10)


@dataclass(eq=False)
class _OpenPack:
    id: PackId
    kind: bytes
    slot: Slot
    fill: int = 0
    busy: int = 0
    sealed: bool = False
    records: list[Record] = field(default_factory=list)


class PackWriter:
    """Fills packs from many threads and writes full ones in the background.

    A chunk is copied into the pack first and hashed there, where nobody else can change it, so
    that what is stored always has the digest it is stored under.

    Args:
        backend: Where packs go.
        base: The root number that ids are made under.
        kind: ``CHUNKS`` or ``NODES``.
        pool: Where the memory comes from.
        crew: Whom the background threads belong to.
        codec: How chunks are stored.
    """

    def __init__(
        self, backend: Backend, base: int, kind: bytes, pool: Pool, crew: Crew, codec: Codec
    ) -> None:
        self._backend = backend
        self._base = base
        self._kind = kind
        self._pool = pool
        self._crew = crew
        self._codec = codec
        self._lock = threading.Lock()
        self._open: _OpenPack | None = None
        self._full: queue.SimpleQueue[_OpenPack | None] = queue.SimpleQueue()
        self._writers: list[threading.Thread] = []
        self.packs: list[PackId] = []
        self.records: list[Record] = []
        self.stored_bytes = 0

    def add(self, chunks: list[tuple[Digest, memoryview | bytes]]) -> None:
        """Store chunks that the store does not hold yet.

        Raises:
            StateError: The bytes are changing while they are read.
        """
        for digest, raw in chunks:
            stored = raw
            codec = Codec.RAW
            if self._codec == Codec.ZSTD:
                compressed = compress(raw)
                if len(compressed) < len(raw):
                    stored, codec = compressed, Codec.ZSTD
            with self._lock:
                pack, offset = self._reserve(len(stored))
            try:
                target = pack.slot.view[offset : offset + len(stored)]
                buffers.copy(target, stored)
                if digest_of(target if codec == Codec.RAW else raw) != digest:
                    raise StateError(
                        "a tensor changed while it was being taken; do not write to the state "
                        "during take(), or use async_take(), which copies it first"
                    )
            except BaseException as e:
                self._crew.fail(e)
                raise
            finally:
                with self._lock:
                    pack.busy -= 1
                    if not self._crew.failed:
                        place = Place(pack.id, offset, len(stored), len(raw), codec)
                        pack.records.append((digest, place))
                    self._hand_over_if_done(pack)

    def _reserve(self, nbytes: int) -> tuple[_OpenPack, int]:
        pack = self._open
        if pack is not None:
            offset = _aligned(pack.fill, nbytes)
            pack.slot.view[pack.fill : offset] = bytes(offset - pack.fill)
            footer = (len(pack.records) + pack.busy + 1) * FOOTER_RECORD_SIZE + PACK_TAIL_SIZE
            if offset + nbytes + footer > len(pack.slot.view):
                self._seal(pack)
                pack = None
        if pack is None:
            pack = self._open = self._new_pack()
            offset = 0
        pack.fill = offset + nbytes
        pack.busy += 1
        return pack, offset

    def _new_pack(self) -> _OpenPack:
        slot = self._pool.take()
        if self._crew.failed:
            self._pool.release(slot)
            assert self._crew.error is not None
            raise self._crew.error
        return _OpenPack(PackId(new_id(self._base)), self._kind, slot)

    def _seal(self, pack: _OpenPack) -> None:
        pack.sealed = True
        self._open = None
        self._hand_over_if_done(pack)

    def _hand_over_if_done(self, pack: _OpenPack) -> None:
        if not pack.sealed or pack.busy:
            return
        if len(self._writers) < _WRITERS:
            self._writers += self._crew.start(self._write_packs)
        self._full.put(pack)

    def _write_packs(self) -> None:
        while (pack := self._full.get()) is not None:
            try:
                # After a failure packs are only given back, so that nobody waits for a slot.
                if not self._crew.failed:
                    self._write(pack)
            except BaseException as e:  # noqa: BLE001 - the crew raises it
                self._crew.fail(e)
            finally:
                self._pool.release(pack.slot)

    def _write(self, pack: _OpenPack) -> None:
        records = sorted(pack.records, key=lambda r: r[1].offset)
        footer = pack_footer(self._kind, records)
        end = pack.fill + len(footer)
        pack.slot.view[pack.fill : end] = footer
        with self._lock:
            # Noted before it is written: whoever cleans up must find what was begun.
            self.packs.append(pack.id)
        self._backend.write(pack_key(pack.id), pack.slot.view[:end])
        with self._lock:
            self.records += records
            self.stored_bytes += sum(place.stored for _, place in records)

    def finish(self) -> None:
        """Write what is left, and wait until all packs are written."""
        with self._lock:
            if self._open is not None:
                self._seal(self._open)
        for _ in self._writers:
            self._full.put(None)
        self._crew.join(self._writers)
        self._writers = []

    def close(self) -> None:
        """Give all memory back, also after a failure; nothing is written any more."""
        with self._lock:
            if self._open is not None:
                self._pool.release(self._open.slot)
                self._open = None
        for _ in self._writers:
            self._full.put(None)
        for writer in self._writers:
            writer.join()
        self._writers = []

    def delete_packs(self) -> None:
        """Delete the packs of a take that never tried to commit."""
        for pack in self.packs:
            self._backend.delete(pack_key(pack))
        self.packs = []


def _aligned(offset: int, nbytes: int) -> int:
    return -(-offset // PAGE) * PAGE if nbytes >= _ALIGN_FROM else offset
