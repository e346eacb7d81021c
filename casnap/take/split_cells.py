"""Cells that shard edges cut: ranks send their parts to one rank, which puts the cell together.

So the chunks of a tensor do not depend on its sharding.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from casnap.format.decoding import decoder
from casnap.take.capture import Assignment
from casnap.take.staging import Piece

_WINDOW_BYTES = 64 << 20
# Whether these are the last parts of a rank; the length of their headers.
_HEAD = struct.Struct("<?I")


class _PartHeader(msgspec.Struct, array_like=True):
    """What goes before the bytes of a part.

    Attributes:
        key: The key of the leaf.
        cell: The cell that it is a part of.
        start: The byte of the cell at which it begins.
        nbytes: Its length.
    """

    key: bytes
    cell: int
    start: int
    nbytes: int


class SplitCells:
    """The parts that this rank sends, and the cells that it puts together.

    Args:
        size: The number of ranks.
        keys: The key by which all ranks know each leaf.
        assigned: Leaf → what this rank hashes of it.
    """

    def __init__(
        self, size: int, keys: Sequence[bytes], assigned: Mapping[int, Assignment]
    ) -> None:
        self._size = size
        self._keys = keys
        self._leaves = {keys[i]: (i, assignment.grid) for i, assignment in assigned.items()}
        self._outbox: list[deque[Piece]] = [deque() for _ in range(size)]
        # Key and cell → its buffer, and how many bytes are missing.
        self._cells: dict[tuple[bytes, int], tuple[bytearray, int]] = {}
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._last = False

    # --- sending ---

    def add(self, piece: Piece) -> None:
        """Add a part that is to be sent; from any thread."""
        assert piece.part is not None
        with self._lock:
            self._outbox[piece.part.to_rank].append(piece)
            self._waiting_bytes += len(piece.view)

    @property
    def is_full(self) -> bool:
        """Whether no more parts should be added until some have been sent."""
        return self._waiting_bytes > _WINDOW_BYTES

    def drop(self) -> None:
        """Give back the memory of parts that will not be sent any more."""
        with self._lock:
            pieces = [piece for box in self._outbox for piece in box]
            for box in self._outbox:
                box.clear()
            self._waiting_bytes = 0
        for piece in pieces:
            piece.give_back()

    def finish(self) -> None:
        """Note that no more parts will be added."""
        self._last = True

    def messages(self) -> list[memoryview]:
        """Return what to send to each rank in this round."""
        last = self._last
        most = max(1, _WINDOW_BYTES // self._size)
        with self._lock:
            drawn = [_draw(box, most) for box in self._outbox]
            last = last and not any(self._outbox)
            self._waiting_bytes -= sum(len(p.view) for pieces in drawn for p in pieces)
        return [self._message(pieces, last) for pieces in drawn]

    def _message(self, pieces: list[Piece], last: bool) -> memoryview:
        headers = []
        try:
            for piece in pieces:
                assert piece.part is not None
                if piece.ready is not None:
                    piece.ready()
                key, start = self._keys[piece.leaf], piece.part.start
                headers.append(_PartHeader(key, piece.first, start, len(piece.view)))
            encoded = msgspec.msgpack.encode(headers)
            views = (piece.view for piece in pieces)
            return memoryview(bytearray().join([_HEAD.pack(last, len(encoded)), encoded, *views]))
        finally:
            for piece in pieces:
                piece.give_back()

    # --- receiving ---

    def receive(self, messages: list[memoryview]) -> tuple[list[Piece], bool]:
        """Put the parts of all ranks in their cells.

        Returns:
            The cells that are whole now, and whether these were the last parts of all ranks.
        """
        whole: list[Piece] = []
        over = all(_HEAD.unpack_from(message)[0] for message in messages)
        for message in messages:
            start = _HEAD.size + _HEAD.unpack_from(message)[1]
            headers = decoder(list[_PartHeader]).decode(message[_HEAD.size : start])
            for header in headers:
                self._put(header, message[start : start + header.nbytes], whole)
                start += header.nbytes
        return whole, over

    def _put(self, part: _PartHeader, content: memoryview, whole: list[Piece]) -> None:
        """Copy a part to its place in its cell; add the cell to ``whole`` once it is."""
        leaf, grid = self._leaves[part.key]
        where = part.key, part.cell
        buffer, missing = self._cells.pop(where, (bytearray(0), grid.cell_bytes(part.cell)))
        if not buffer:
            buffer = bytearray(missing)
        buffer[part.start : part.start + part.nbytes] = content
        if missing > part.nbytes:
            self._cells[where] = buffer, missing - part.nbytes
        else:
            whole.append(Piece(leaf, part.cell, [len(buffer)], memoryview(buffer), buffer))


def _draw(box: deque[Piece], most: int) -> list[Piece]:
    """Take pieces off a box: at least one, and further ones up to so many bytes."""
    pieces, total = list[Piece](), 0
    while box and total < most:
        pieces.append(box.popleft())
        total += len(pieces[-1].view)
    return pieces
