"""Hints: the places of the chunks and nodes to which a pack of nodes refers.

The hints are the last node of that pack. A hint may be wrong, so a reader verifies the bytes at the
hinted place. If their digest differs, the reader looks in the index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import msgspec
from msgspec import Struct

from casnap.format.codec import KNOWN_CODECS
from casnap.format.decoding import decoder
from casnap.format.digest import DIGEST_SIZE, Digest, split_digests
from casnap.format.records import ID_SIZE, PackId, Place, encode

MOST_HINTS_BYTES = 512 << 10
"""The most bytes of the hints in one pack."""
MOST_HINTS = 1 << 15
"""The most digests that the hints in one pack may name."""

_MAGIC = b"CASNAPh1"
_NAME_SIZE = 6
# A search may find a name across the edge of two others. By chance that happens at most once;
# hostile hints could make it happen at each byte.
_MOST_FINDS = 16
_PAGE, _ALIGN_FROM = 4096, 64 << 10
_TREE, _MANIFEST = (b"\x92\xa1l", b"\x92\xa1b"), b"\x82\xa6global"
_LIST_OF_NODES = b"\x92\xa1b"
# A row names its manifest together with a hint, so the hints need not have it.
_HINTED = b"\xa8manifest\x92"


class _PlaceRun(Struct, frozen=True, array_like=True, gc=False):
    """Chunks or nodes of equal lengths that follow each other in a pack.

    Attributes:
        count: The number of chunks or nodes.
        pack: The index of their pack in the list of packs of the hints; -1 for the pack that
            contains the hints.
        offset: The offset of the first chunk or node in the pack.
        stored_size: The stored bytes of each chunk or node.
        raw_size: The raw bytes of each chunk or node.
        codec: The codec of each chunk or node.
    """

    count: int
    pack: int
    offset: int
    stored_size: int
    raw_size: int
    codec: int

    def offset_of(self, after: int) -> int:
        """Return the offset of a chunk or node of the run in its pack.

        Args:
            after: The number of chunks or nodes before it in the run.
        """
        step = (
            -(-self.stored_size // _PAGE) * _PAGE
            if self.stored_size >= _ALIGN_FROM
            else self.stored_size
        )
        return self.offset + after * step

    def goes_on_with(self, run: _PlaceRun) -> bool:
        """Whether ``run`` begins where this run ends in the pack, with equal lengths and codec."""
        alike = (self.pack, self.stored_size, self.raw_size, self.codec) == (
            run.pack,
            run.stored_size,
            run.raw_size,
            run.codec,
        )
        return alike and self.offset_of(self.count) == run.offset


class _Body(Struct, frozen=True, array_like=True):
    packs: bytes
    names: bytes
    runs: list[_PlaceRun]
    nodes: list[bytes]


class Hints:
    """The hints of one pack.

    Args:
        body: The decoded hints.
        pack: The id of the pack that has the hints.

    Attributes:
        nodes: Tree nodes whose bytes stand in the hints: upper lists of the table of snapshots.
            Their digests have not been verified.
    """

    def __init__(self, body: _Body, pack: bytes) -> None:
        self.nodes = body.nodes
        self._body = body
        self._pack = pack
        self._stops = list(accumulate(run.count for run in body.runs))

    def find(self, digest: bytes) -> Place | None:
        """Return the hinted place of a chunk or node; None if the hints do not name its digest."""
        names, name, at = self._body.names, digest[:_NAME_SIZE], -1
        for _ in range(_MOST_FINDS):
            at = names.find(name, at + 1)
            if at < 0 or at % _NAME_SIZE == 0:
                break
        else:
            return None
        return None if at < 0 else self._place(at // _NAME_SIZE)

    def _place(self, index: int) -> Place | None:
        number = bisect_right(self._stops, index)
        run = self._body.runs[number]
        if run.codec not in KNOWN_CODECS:
            return None
        start = ID_SIZE * run.pack
        # A pack does not know its own id, which changes when it is moved past a fence.
        pack = self._body.packs[start : start + ID_SIZE] if run.pack >= 0 else self._pack
        after = index - self._stops[number] + run.count
        return Place(PackId(pack), run.offset_of(after), run.stored_size, run.raw_size, run.codec)


def encode_hints(
    places: Sequence[tuple[Digest, Place]], nodes: Iterable[bytes], pack: bytes
) -> bytes:
    """Return the hints of a pack as bytes.

    Args:
        places: The digests of chunks and nodes, each with its place.
        nodes: The tree nodes whose bytes the hints contain.
        pack: The id of the pack that gets the hints.
    """
    numbers: dict[bytes, int] = {}
    runs: list[_PlaceRun] = []
    for _, place in places:
        in_same_pack = place.pack == pack
        number = -1 if in_same_pack else numbers.setdefault(place.pack, len(numbers))
        run = _PlaceRun(1, number, place.offset, place.stored_size, place.raw_size, place.codec)
        if runs and runs[-1].goes_on_with(run):
            runs[-1] = msgspec.structs.replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(run)
    names = b"".join(digest[:_NAME_SIZE] for digest, _ in places)
    body = encode(_Body(b"".join(numbers), names, runs, list(nodes)))
    return _MAGIC + body


def are_hints(node: bytes) -> bool:
    """Whether the bytes of a pack's node are hints and not a tree node."""
    return node.startswith(_MAGIC)


def decode_hints(data: bytes, pack: bytes) -> Hints | None:
    """Decode hints.

    Args:
        data: The bytes of the hints.
        pack: The id of the pack that has the hints.

    Returns:
        The hints; None if the bytes are not hints, are malformed, or are too long.
    """
    if not are_hints(data) or len(data) > MOST_HINTS_BYTES:
        return None
    try:
        body = decoder(_Body).decode(data[len(_MAGIC) :])
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    count, remainder = divmod(len(body.names), _NAME_SIZE)
    sound = all(run.count > 0 and run.pack >= -1 for run in body.runs)
    if not sound or remainder or count > MOST_HINTS or count != sum(run.count for run in body.runs):
        return None
    return Hints(body, pack)


def names_nodes(node: bytes) -> bool:
    """Whether the bytes are a tree node of the upper levels, which lists other nodes."""
    return node.startswith(_LIST_OF_NODES)


def named_in(node: bytes) -> Iterator[Digest]:
    """Yield the digests in the bytes of a node.

    The search does not decode the node. It may miss a digest, or yield bytes that are not a digest.
    """
    if not node.startswith((*_TREE, _MANIFEST)):
        if len(node) % DIGEST_SIZE == 0:
            yield from split_digests(node)
        return
    at = -1
    # MessagePack has bytes of up to 255 as 0xc4 and their length.
    while (at := node.find(b"\xc4", at + 1)) >= 0:
        size = node[at + 1] if at + 1 < len(node) else 0
        if size and size % DIGEST_SIZE == 0:
            if not node.endswith(_HINTED, 0, at):
                yield from split_digests(node[at + 2 : at + 2 + size])
            at += 1 + size
