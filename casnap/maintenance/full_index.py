"""The whole index of a store in memory, read from its segments."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

from casnap.format.digest import DIGEST_SIZE, Digest
from casnap.format.records import (
    DeltaPlace,
    PackId,
    Place,
    Record,
    SealedSegment,
    merged_segment,
)


class FullIndex:
    """The places (pack and offset) of all chunks and nodes that some segments list, by digest.

    Args:
        parts: The sealed bytes of the segments, and their names for messages.

    Attributes:
        packs: The packs that the segments list.
        distinct: How many different digests they list.
    """

    def __init__(self, parts: Iterable[tuple[bytes, str]]) -> None:
        content, self.packs = merged_segment(parts)
        segment = SealedSegment(content, "the index")
        # In columns: a Python object for each record would take several times the bytes.
        digests = bytearray()
        self._numbers, self._offsets = array("I"), array("Q")
        self._stored, self._raw, self._codecs = array("I"), array("I"), array("B")
        self._of_pack = {pack: array("Q") for pack in self.packs}
        self.distinct, previous = 0, b""
        self._bases = segment.bases_by_index()
        for i, (digest, number, offset, nbytes, raw, codec) in enumerate(segment.records()):
            digests += digest
            self.distinct += digest != previous
            previous = digest
            self._numbers.append(number)
            self._offsets.append(offset)
            self._stored.append(nbytes)
            self._raw.append(raw)
            self._codecs.append(codec)
            self._of_pack[self.packs[number]].append(i)
        self._digests = bytes(digests)
        self._count = segment.count

    @property
    def stored_bytes(self) -> int:
        """The stored bytes of all chunks and nodes, at all their places."""
        return sum(self._stored)

    def of(self, digest: Digest) -> list[Place]:
        """Return all places, in packs, of the chunk or node with a digest."""
        i = bisect_left(range(self._count), digest, key=self._digest)
        places = []
        while i < self._count and self._digest(i) == digest:
            places.append(self._place(i))
            i += 1
        return places

    def of_pack(self, pack: PackId) -> list[Record]:
        """Return the chunks and nodes in a pack with their places, in the order of offsets."""
        order = sorted(self._of_pack[pack], key=self._offsets.__getitem__)
        return [(self._digest(i), self._place(i)) for i in order]

    def _digest(self, i: int) -> Digest:
        return Digest(self._digests[i * DIGEST_SIZE : (i + 1) * DIGEST_SIZE])

    def _place(self, i: int) -> Place:
        pack, offset = self.packs[self._numbers[i]], self._offsets[i]
        place = (pack, offset, self._stored[i], self._raw[i], self._codecs[i])
        base = self._bases.get(i)
        return Place(*place) if base is None else DeltaPlace(*place, base)
