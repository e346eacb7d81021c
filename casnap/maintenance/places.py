"""The places of all chunks and nodes, read from segments and packs, and which are whole."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from casnap.backends import Backend
from casnap.format.codec import Codec
from casnap.format.digest import DIGEST_SIZE, Digest
from casnap.format.records import (
    FOOTER_RECORD_SIZE,
    PACK_TAIL_SIZE,
    PackId,
    Place,
    Record,
    merged_segment,
    pack_key,
    read_pack_footer,
    segment_records,
)
from casnap.storage.objects import Objects
from casnap.storage.pack_runs import is_possible
from casnap.storage.place_reads import Want, Why

_WINDOW_BYTES = 128 << 20
_WINDOW_RECORDS = 1 << 15
_CODECS = frozenset(Codec)


class Places:
    """The places of all digests in some segments.

    Args:
        parts: The sealed bytes of the segments, and their names for messages.

    Attributes:
        packs: The packs that the segments list.
        distinct: How many different digests they list.
    """

    def __init__(self, parts: Iterable[tuple[bytes, str]]) -> None:
        content, self.packs, self._count = merged_segment(parts)
        # In columns: a Python object a record would take several times its bytes.
        digests = bytearray()
        self._numbers, self._offsets = array("I"), array("Q")
        self._stored, self._raw, self._codecs = array("I"), array("I"), array("B")
        self._of_pack = {pack: array("Q") for pack in self.packs}
        self.distinct, last = 0, b""
        _, records = segment_records(content, "the index")
        for i, (digest, number, offset, stored, raw, codec) in enumerate(records):
            digests += digest
            self.distinct += digest != last
            last = digest
            self._numbers.append(number)
            self._offsets.append(offset)
            self._stored.append(stored)
            self._raw.append(raw)
            self._codecs.append(codec)
            self._of_pack[self.packs[number]].append(i)
        self._digests = bytes(digests)

    def __contains__(self, pack: object) -> bool:
        """Whether a pack is listed."""
        return pack in self._of_pack

    @property
    def stored_bytes(self) -> int:
        """Stored bytes of all chunks and nodes, at all their places."""
        return sum(self._stored)

    def of(self, digest: Digest) -> list[Place]:
        """Return all places of a digest."""
        found = []
        i = bisect_left(range(self._count), digest, key=self._digest)
        while i < self._count and self._digest(i) == digest:
            found.append(self._place(i))
            i += 1
        return found

    def of_pack(self, pack: PackId) -> list[Record]:
        """Return the contents of a pack, in the order of offsets."""
        order = sorted(self._of_pack[pack], key=self._offsets.__getitem__)
        return [(self._digest(i), self._place(i)) for i in order]

    def _digest(self, i: int) -> Digest:
        return Digest(self._digests[i * DIGEST_SIZE : (i + 1) * DIGEST_SIZE])

    def _place(self, i: int) -> Place:
        pack = self.packs[self._numbers[i]]
        return Place(pack, self._offsets[i], self._stored[i], self._raw[i], self._codecs[i])


def read_footer(backend: Backend, pack: PackId, size: int, guess: int = 0) -> list[Record]:
    """Return the records in the footer of a pack.

    Args:
        backend: Where the store lives.
        pack: The pack.
        size: Its length.
        guess: How many records to expect; if that is right, one read is enough.

    Raises:
        DamagedError: The footer is not what was written.
        FileNotFoundError: There is no such pack.
    """
    tail = _tail(backend, pack, size, guess)
    count = int.from_bytes(tail[-PACK_TAIL_SIZE:][:4], "little")
    if guess < count <= size // FOOTER_RECORD_SIZE:
        tail = _tail(backend, pack, size, count)
    return read_pack_footer(pack, tail)


def _tail(backend: Backend, pack: PackId, size: int, count: int) -> bytes:
    tail = bytearray(min(size, count * FOOTER_RECORD_SIZE + PACK_TAIL_SIZE))
    [n] = backend.read_into(pack_key(pack), [(size - len(tail), memoryview(tail))])
    return bytes(tail[:n])


def bad_records(
    objects: Objects, records: Iterable[Record], told: Callable[[int], None]
) -> Iterator[tuple[Record, Why]]:
    """Read chunks and nodes; yield those that are not whole, and why.

    Args:
        objects: The store.
        records: The chunks and nodes, and their places.
        told: Called with the number of bytes read since the last call.
    """
    window: list[tuple[Place, list[Want]]] = []
    nbytes = 0
    for digest, place in records:
        window.append((place, [Want(digest, -1, _forget, "")]))
        nbytes += place.stored
        if nbytes >= _WINDOW_BYTES or len(window) >= _WINDOW_RECORDS:
            yield from _bad_of(objects, window)
            told(nbytes)
            window, nbytes = [], 0
    yield from _bad_of(objects, window)
    told(nbytes)


def _bad_of(
    objects: Objects, window: list[tuple[Place, list[Want]]]
) -> Iterator[tuple[Record, Why]]:
    for place, wants, _ in objects.read_places(window):
        # Each alone: one unreadable chunk makes a read with its neighbours fail.
        for unread in objects.read_places([(place, wants)]):
            yield (wants[0].digest, place), unread.why


def _forget(_raw: memoryview) -> None:
    """Drop the bytes of a chunk that only had to be verified."""


def can_lie_at(place: Place) -> bool:
    """Whether a place from the index is possible. Checked before memory is taken for it."""
    if place.codec == Codec.RAW and place.raw != place.stored:
        return False
    return place.codec in _CODECS and is_possible(place)
