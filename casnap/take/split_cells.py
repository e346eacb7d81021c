"""Cells that shard edges cut: ranks send their parts to one rank, which puts the cell together.

So the chunks of a tensor do not depend on its sharding.

A rank writes its parts for ranks of its host into memory that they share, and says where; the
receiver copies them to their places in the cell, and says in the next round that they are free. For
other ranks the bytes are part of the message. A rank's own parts wait until others open the cell.
"""

from __future__ import annotations

import struct
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import msgspec

from casnap.format.decoding import decoder
from casnap.format.records import encode
from casnap.ranks.shared_memory import Ring, Shared
from casnap.runtime import buffers
from casnap.runtime.buffers import Pool, Slot
from casnap.storage.pack import Raw
from casnap.take.capture import Assignment
from casnap.take.staging import Piece

SHARED_BYTES = 48 << 20
"""The memory that each rank shares for parts."""
_WINDOW_BYTES = 64 << 20
_HEAD = struct.Struct("<I")
# The cells that are put together, up to so many bytes, lie in memory that is used again.
_cell_slots = Pool(48 << 20, 1)

Where = tuple[bytes, int]
"""The key of a leaf, and a cell of it."""


class _Part(msgspec.Struct, array_like=True, gc=False):
    """A part that is sent.

    Attributes:
        key: The key of the leaf.
        cell: The cell that it is a part of.
        start: The byte of the cell at which it begins.
        nbytes: Its length.
        at: Where it lies in the sender's shared memory; -1 if its bytes follow in the message.
    """

    key: bytes
    cell: int
    start: int
    nbytes: int
    at: int


class _Message(msgspec.Struct, array_like=True):
    """What goes before the bytes of parts.

    Attributes:
        last: Whether the sender will send no more parts.
        freed: How many parts the sender has taken out of the receiver's shared memory.
        parts: The parts, in order.
    """

    last: bool
    freed: int
    parts: list[_Part]


class _Cell:
    """A cell that is being put together."""

    __slots__ = ("at", "missing", "view")

    def __init__(self, view: memoryview, at: int | None) -> None:
        self.view = view
        self.at = at
        self.missing = len(view)


class SplitCells:
    """The parts that this rank sends, and the cells that it puts together.

    All but :meth:`add` and :meth:`drop` is called by the thread that talks.

    Args:
        rank: This rank.
        shared: The memory that the ranks share.
        keys: The key by which all ranks know each leaf.
        assigned: Leaf → what this rank hashes of it.
    """

    def __init__(
        self, rank: int, shared: Shared, keys: Sequence[bytes], assigned: Mapping[int, Assignment]
    ) -> None:
        self._rank = rank
        self._size = len(shared.theirs)
        self._shared = shared
        self._keys = keys
        self._leaves = {keys[i]: (i, assignment.grid) for i, assignment in assigned.items()}
        self._lock = threading.Lock()
        # What threads have added: for each rank the parts that wait, and the bytes of all of them.
        self._outbox: list[deque[Piece]] = [deque() for _ in range(self._size)]
        self._waiting_bytes = 0
        self._last = False
        # Whether each rank has said that it will send no more.
        self._lasts = [False] * self._size
        # The parts that lie in this rank's shared memory, in the order in which readers get them.
        self._ring = Ring(len(shared.own))
        self._sent: list[deque[int]] = [deque() for _ in range(self._size)]
        # Parts in other ranks' memory that are still to be copied, and those that were since the
        # last message.
        self._arrived: deque[tuple[int, _Part]] = deque()
        self._freed = [0] * self._size
        self._own: defaultdict[Where, list[Piece]] = defaultdict(list)
        self._cells: dict[Where, _Cell] = {}
        self._slot: Slot | None = None
        self._cell_ring = Ring(0)
        self._whole_bytes = 0
        self._whole: list[Piece] = []

    # --- threads that hash ---

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
            pieces = [piece for box in (*self._outbox, *self._own.values()) for piece in box]
            for box in self._outbox:
                box.clear()
            self._own.clear()
            self._waiting_bytes = 0
        for piece in pieces:
            piece.give_back()

    def finish(self) -> None:
        """Note that no more parts will be added."""
        self._last = True

    # --- sending ---

    @property
    def has_news(self) -> bool:
        """Whether other ranks may wait for what the next messages say."""
        return any(self._outbox) or any(self._freed)

    def messages(self) -> list[memoryview]:
        """Return what to send to each rank in this round."""
        last = self._last
        self._keep_own()
        drawn = [self._draw(rank) for rank in range(self._size)]
        with self._lock:
            last = last and not any(self._outbox)
        freed, self._freed = self._freed, [0] * self._size
        return [
            self._message(rank, pieces, _Message(last, freed[rank], []))
            for rank, pieces in enumerate(drawn)
        ]

    def _draw(self, rank: int) -> list[tuple[Piece, int]]:
        """Take parts for a rank off its box, with their places in shared memory."""
        drawn: list[tuple[Piece, int]] = []
        left = max(1, _WINDOW_BYTES // self._size)
        with self._lock:
            box = self._outbox[rank]
            while box and left > 0:
                nbytes = len(box[0].view)
                at: int | None = -1
                if self._shared.readers[rank] and nbytes <= len(self._shared.own) // 2:
                    at = self._ring.take(nbytes)
                    if at is None:
                        break
                    self._sent[rank].append(at)
                left -= nbytes
                self._waiting_bytes -= nbytes
                drawn.append((box.popleft(), -1 if at is None else at))
        return drawn

    def _message(self, rank: int, drawn: list[tuple[Piece, int]], message: _Message) -> memoryview:
        inline: list[Raw] = []
        try:
            for piece, at in drawn:
                assert piece.part is not None
                if piece.ready is not None:
                    piece.ready()
                nbytes = len(piece.view)
                part = _Part(self._keys[piece.leaf], piece.first, piece.part.start, nbytes, at)
                message.parts.append(part)
                if at < 0:
                    inline.append(piece.view)
                else:
                    buffers.copy(self._shared.own[at : at + nbytes], piece.view)
            encoded = encode(message)
            return memoryview(bytearray().join([_HEAD.pack(len(encoded)), encoded, *inline]))
        finally:
            for piece, _ in drawn:
                piece.give_back()

    # --- receiving ---

    def receive(self, messages: Sequence[memoryview]) -> tuple[list[Piece], bool]:
        """Put the parts of all ranks in their cells.

        Returns:
            The cells that are whole now, and whether there will be no more.
        """
        for rank, content in enumerate(messages):
            if not content:
                continue  # that rank has all its cells
            start = _HEAD.size + _HEAD.unpack_from(content)[0]
            message = decoder(_Message).decode(content[_HEAD.size : start])
            for _ in range(message.freed):
                self._ring.free(self._sent[rank].popleft())
            self._lasts[rank] = message.last
            for part in message.parts:
                if part.at >= 0:
                    self._arrived.append((rank, part))
                else:
                    self._put(part, content[start : start + part.nbytes])
                    start += part.nbytes
        self._take_arrived()
        whole, self._whole = self._whole, []
        return whole, all(self._lasts) and not self._arrived

    def _take_arrived(self) -> None:
        """Copy parts out of the memory of other ranks, as long as there is room for cells."""
        while self._arrived and self._may_open:
            rank, part = self._arrived.popleft()
            memory = self._shared.theirs[rank]
            assert memory is not None
            self._put(part, memory[part.at : part.at + part.nbytes])
            self._freed[rank] += 1

    @property
    def _may_open(self) -> bool:
        # Where no whole cell waits to be hashed, no room will become free: go on without.
        return not self._whole_bytes or self._whole_bytes < len(self._room) // 2

    @property
    def _room(self) -> memoryview:
        if self._slot is None:
            self._slot = _cell_slots.acquire(wait=False) or Slot(buffers.PAGE)
            self._cell_ring = Ring(len(self._slot.view))
        return self._slot.view

    def _keep_own(self) -> None:
        """Keep parts of this rank's own cells until other ranks' parts open these."""
        with self._lock:
            box = self._outbox[self._rank]
            pieces = list(box)
            box.clear()
            places = [(self._keys[piece.leaf], piece.first) for piece in pieces]
            for where, piece in zip(places, pieces, strict=True):
                self._own[where].append(piece)
        for where in places:
            held = sum(len(piece.view) for piece in self._own.get(where, ()))
            if where in self._cells or held == self._leaves[where[0]][1].cell_bytes(where[1]):
                self._open(where)
        if self.is_full and not self._whole_bytes:
            # No part of another rank opens them soon; other threads wait for the memory.
            for where in list(self._own):
                self._open(where)

    def _open(self, where: Where) -> None:
        """Begin to put a cell together, with this rank's own parts of it."""
        if where not in self._cells:
            nbytes, room = self._leaves[where[0]][1].cell_bytes(where[1]), self._room
            with self._lock:
                at = self._cell_ring.take(nbytes)
            view = memoryview(bytearray(nbytes)) if at is None else room[at : at + nbytes]
            self._cells[where] = _Cell(view, at)
        with self._lock:
            pieces = self._own.pop(where, [])
            self._waiting_bytes -= sum(len(piece.view) for piece in pieces)
        for piece in pieces:
            assert piece.part is not None
            try:
                if piece.ready is not None:
                    piece.ready()
                self._fill(where, piece.part.start, piece.view)
            finally:
                piece.give_back()

    def _put(self, part: _Part, content: memoryview) -> None:
        """Copy a part of another rank to its place in its cell."""
        where = part.key, part.cell
        if where not in self._cells or where in self._own:
            self._open(where)
        self._fill(where, part.start, content)

    def _fill(self, where: Where, start: int, content: Raw) -> None:
        cell = self._cells[where]
        buffers.copy(cell.view[start : start + len(content)], content)
        cell.missing -= len(content)
        if not cell.missing:
            del self._cells[where]
            leaf, nbytes = self._leaves[where[0]][0], len(cell.view)
            with self._lock:
                self._whole_bytes += nbytes

            def done() -> None:
                with self._lock:
                    self._whole_bytes -= nbytes
                    if cell.at is not None:
                        self._cell_ring.free(cell.at)

            self._whole.append(Piece(leaf, where[1], [nbytes], cell.view, cell, done=done))

    def close(self) -> None:
        """Give memory back, once no thread hashes any more."""
        slot, self._slot = self._slot, None
        if slot is not None and len(slot.view) == _cell_slots.slot_bytes:
            _cell_slots.release(slot)
