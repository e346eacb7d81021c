"""Cells that shard edges cut: their parts are sent to one rank each, which puts them together.

So chunks do not know the sharding: however a tensor is spread, its cells are the same.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from casnap.format.grid import Grid
from casnap.format.tiling import Tiling
from casnap.take.staging import Piece

_WINDOW_BYTES = 64 << 20
_HEAD = struct.Struct("<?I")


class AssembledLeaf(NamedTuple):
    """A leaf whose cells are put together here.

    Attributes:
        leaf: Its number on this rank.
        grid: How it is cut.
    """

    leaf: int
    grid: Grid | Tiling


class _PartHeader(msgspec.Struct, array_like=True):
    """What is said of a part: path key, cell, where in the cell it begins, its bytes."""

    key: bytes
    cell: int
    start: int
    nbytes: int


class SplitCells:
    """The parts that this rank sends, and the cells that it puts together.

    Args:
        size: How many ranks there are.
        keys: Leaf → the key of its path, which all ranks know it by.
        targets: The leaves whose cells are put together here, by key.
    """

    def __init__(
        self, size: int, keys: Sequence[bytes], targets: Mapping[bytes, AssembledLeaf]
    ) -> None:
        self._size = size
        self._keys = keys
        self._targets = targets
        self._outbox: list[deque[Piece]] = [deque() for _ in range(size)]
        self._cells: dict[tuple[bytes, int], tuple[bytearray, int]] = {}
        self._lock = threading.Lock()
        self._waiting = 0
        self._last = False

    def add(self, piece: Piece) -> None:
        """Have a part sent; from any thread."""
        assert piece.part is not None
        with self._lock:
            self._outbox[piece.part.to_rank].append(piece)
            self._waiting += len(piece.view)

    @property
    def is_full(self) -> bool:
        """Whether no more should be added until some was sent."""
        return self._waiting > _WINDOW_BYTES

    def drop(self) -> None:
        """Give back what will not be sent any more."""
        with self._lock:
            pieces = [piece for box in self._outbox for piece in box]
            for box in self._outbox:
                box.clear()
            self._waiting = 0
        for piece in pieces:
            piece.give_back()

    def finish(self) -> None:
        """Say that no more parts will be added."""
        self._last = True

    def messages(self) -> list[memoryview]:
        """Return what to send to each rank in this window."""
        last = self._last
        most = max(1, _WINDOW_BYTES // self._size)
        with self._lock:
            drawn = [_drawn(box, most) for box in self._outbox]
            last = last and not any(self._outbox)
            self._waiting -= sum(len(p.view) for pieces in drawn for p in pieces)
        return [self._message(pieces, last) for pieces in drawn]

    def _message(self, pieces: list[Piece], last: bool) -> memoryview:
        sent = []
        try:
            for piece in pieces:
                assert piece.part is not None
                if piece.ready is not None:
                    piece.ready()
                key, start = self._keys[piece.leaf], piece.part.start
                sent.append(_PartHeader(key, piece.first, start, len(piece.view)))
            said = msgspec.msgpack.encode(sent)
            return memoryview(
                bytearray().join([_HEAD.pack(last, len(said)), said, *(p.view for p in pieces)])
            )
        finally:
            for piece in pieces:
                piece.give_back()

    def receive(self, messages: list[memoryview]) -> tuple[list[Piece], bool]:
        """Take in what every rank sent; return the cells that are whole now, and if it was all."""
        whole: list[Piece] = []
        over = all(_HEAD.unpack_from(message)[0] for message in messages)
        for message in messages:
            start = _HEAD.size + _HEAD.unpack_from(message)[1]
            said = msgspec.msgpack.decode(message[_HEAD.size : start], type=list[_PartHeader])
            for sent in said:
                start += self._put(sent, message[start:], whole)
        return whole, over

    def _put(self, sent: _PartHeader, content: memoryview, whole: list[Piece]) -> int:
        """Copy a part to its place in its cell; return its bytes."""
        leaf, grid = self._targets[sent.key]
        where = sent.key, sent.cell
        buffer, missing = self._cells.pop(where, (bytearray(0), grid.cell_bytes(sent.cell)))
        if not buffer:
            buffer = bytearray(missing)
        buffer[sent.start : sent.start + sent.nbytes] = content[: sent.nbytes]
        if missing > sent.nbytes:
            self._cells[where] = buffer, missing - sent.nbytes
        else:
            whole.append(Piece(leaf, sent.cell, [len(buffer)], memoryview(buffer), buffer))
        return sent.nbytes


def _drawn(box: deque[Piece], most: int) -> list[Piece]:
    pieces, total = list[Piece](), 0
    while box and total < most:
        pieces.append(box.popleft())
        total += len(pieces[-1].view)
    return pieces
