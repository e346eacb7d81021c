"""Cells that shard edges cut: ranks send their parts to one rank, which puts the cells together.

So the chunks of a tensor do not depend on its sharding. The planner divides these cells into
*joints*: runs of cells that the same edges cut, and that one rank puts together.

All ranks send their parts in the same order of joints. Each rank opens its joints in that order,
once it has memory for them, and tells the ranks that have parts of them. A part is sent once its
joint is open. So memory is bounded, and some rank can always go on: the first joint that is not
whole is open, and each rank that has a part of it has sent all parts that come before.

The joints of a rank lie in memory that it shares. Ranks of its host copy their parts there; ranks
of other hosts send the bytes in their messages.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import msgspec
import torch

from casnap.format.decoding import decoder
from casnap.format.grid import Grid
from casnap.format.records import encode
from casnap.format.region import Region
from casnap.ranks.shared_memory import Ring, SharedMemory
from casnap.runtime import buffers
from casnap.runtime.buffers import Pool, Slot
from casnap.storage import Raw
from casnap.take.plan import RankPlan
from casnap.take.staging import Piece, give_back

SHARED_BYTES = 48 << 20
"""The memory that each rank shares for the cells that it puts together."""
_WINDOW_BYTES = 64 << 20
_HEAD = struct.Struct("<I")
# Where the cells lie if no rank shares memory with this one.
_cell_slots = Pool(SHARED_BYTES, 1)


class _OpenJoint(msgspec.Struct, array_like=True, gc=False):
    """A joint (a run of cells that one rank puts together) whose parts may be sent now.

    Attributes:
        leaf_id: The id of the leaf.
        first_cell: The first cell.
        stop: One past the last cell.
        at: The joint's offset in the shared memory of its rank; -1 if it is in other memory.
    """

    leaf_id: bytes
    first_cell: int
    stop: int
    at: int


class _SentPart(msgspec.Struct, array_like=True, gc=False):
    """One rank's part of a joint (a run of cells that another rank puts together), as sent.

    Attributes:
        leaf_id: The id of the leaf.
        first_cell: The first cell of the joint.
        nbytes: The length of the part.
        region: Where the part lies in the tensor, if its bytes follow in the message; None if the
            sender has copied them into the joint.
    """

    leaf_id: bytes
    first_cell: int
    nbytes: int
    region: Region | None


class _PartList(msgspec.Struct, array_like=True):
    """The beginning of a message: the joints that have just opened, and the parts that follow.

    Attributes:
        is_last: Whether the sender will send no more parts.
        opened: The joints that the sender has just opened, in order; only those that need parts
            from the receiver.
        parts: The parts, in order.
    """

    is_last: bool
    opened: list[_OpenJoint]
    parts: list[_SentPart]


class _Joint:
    """A joint that this rank puts together: a run of cells that the same shard edges cut.

    Attributes:
        leaf: The number of the leaf.
        opened: The joint as the other ranks know it.
        sizes: The bytes of each cell.
        view: The bytes of all cells.
        missing: How many of these bytes are still to come.
    """

    __slots__ = ("leaf", "missing", "opened", "sizes", "view")

    def __init__(self, leaf: int, opened: _OpenJoint, sizes: list[int], view: memoryview) -> None:
        self.leaf = leaf
        self.opened = opened
        self.sizes = sizes
        self.view = view
        self.missing = len(view)


class SplitCells:
    """The parts of cells that this rank sends, and the cells that it puts together from parts.

    Threads that hash call :meth:`add`, :meth:`finish` and :meth:`drop`, and look at
    :attr:`is_full`. Only the thread that talks to the other ranks calls the other methods.

    Args:
        rank: This rank.
        shared: The memory that the ranks share.
        leaf_ids: The id by which all ranks know each leaf.
        plans: Leaf → this rank's work for it. Leaves that several ranks hold shards of are in the
            same order on all ranks.
        grids: Leaf → its grid of cells.
        largest_team: The most ranks whose messages go through one rank.
    """

    def __init__(
        self,
        rank: int,
        shared: SharedMemory,
        leaf_ids: Sequence[bytes],
        plans: Mapping[int, RankPlan],
        grids: Mapping[int, Grid],
        largest_team: int = 1,
    ) -> None:
        self._rank = rank
        self._size = len(shared.theirs)
        self._largest_team = largest_team
        self._shared = shared
        self._leaf_ids = leaf_ids
        self._plans = plans
        self._grids = {leaf_ids[i]: grids[i] for i in plans}
        self._lock = threading.Lock()
        # The parts that threads have added, and that wait for each rank; the bytes of all of them.
        self._outbox: list[deque[Piece]] = [deque() for _ in range(self._size)]
        self._waiting_bytes = 0
        self._last = False
        # For each rank: whether it has said that it will send no more; and its open joints of which
        # this rank has parts, in order.
        self._lasts = [False] * self._size
        self._taking: list[deque[_OpenJoint]] = [deque() for _ in range(self._size)]
        # This rank's joints that are still to be opened; the next one; the open ones; the bytes of
        # open joints, and of joints that are whole but not hashed yet.
        self._to_open = self._joints()
        self._next = next(self._to_open, None)
        self._open: dict[tuple[bytes, int], _Joint] = {}
        self._bytes_in_use = 0
        self._whole: list[Piece] = []
        self._room = shared.own_memory
        self._slot: Slot | None = None
        if self._next is not None and not len(self._room):
            self._slot = _cell_slots.acquire(wait=False) or Slot(buffers.PAGE)
            self._room = self._slot.view
        self._ring = Ring(len(self._room))

    def _joints(self) -> Iterator[tuple[int, int, list[int], Sequence[int]]]:
        """Yield this rank's joints: leaf, first cell, bytes of each cell, and sending ranks."""
        for i, plan in self._plans.items():
            grid = self._grids[self._leaf_ids[i]]
            for (first_cell, stop), ranks in zip(plan.joints, plan.senders, strict=True):
                yield (
                    i,
                    first_cell,
                    [grid.cell_bytes(cell) for cell in range(first_cell, stop)],
                    ranks,
                )

    # --- threads that hash ---

    def add(self, piece: Piece) -> None:
        """Queue a part to be sent. Parts have to be added in the order of joints."""
        assert piece.part is not None
        with self._lock:
            self._outbox[piece.part.to].append(piece)
            self._waiting_bytes += len(piece.view)

    @property
    def is_full(self) -> bool:
        """Whether callers should add no parts for now, since too many bytes wait to be sent."""
        return self._waiting_bytes > _WINDOW_BYTES

    def drop(self) -> None:
        """Give back the memory of the queued parts, which will not be sent any more."""
        with self._lock:
            pieces = [piece for box in self._outbox for piece in box]
            for box in self._outbox:
                box.clear()
            self._waiting_bytes = 0
        give_back(pieces)

    def finish(self) -> None:
        """Note that no more parts will be added."""
        self._last = True

    # --- sending ---

    @property
    def has_news(self) -> bool:
        """Whether other ranks may wait for this rank's next messages."""
        with self._lock:
            return self._may_open or any(self._next_joint(rank) for rank in range(self._size))

    def _next_joint(self, rank: int) -> _OpenJoint | None:
        """Return the open joint to which the next part for a rank belongs.

        None if there is no part for the rank, or if the rank has not opened that joint yet.
        """
        box, joints = self._outbox[rank], self._taking[rank]
        if not box:
            return None
        wanted = self._leaf_ids[box[0].leaf], box[0].first_cell
        # All parts of the joints before that one have been sent.
        while joints and (joints[0].leaf_id, joints[0].first_cell) != wanted:
            joints.popleft()
        return joints[0] if joints else None

    def messages(self) -> list[memoryview]:
        """Return the message to each rank in this round."""
        is_last, new_joints = self._last, self._open_more()
        drawn = [self._draw(rank) for rank in range(self._size)]
        try:
            with self._lock:
                is_last = is_last and not any(self._outbox)
            return [
                self._message(rank, pieces, _PartList(is_last, new_joints[rank], []))
                for rank, pieces in enumerate(drawn)
            ]
        finally:
            # After an error too, since no outbox has these pieces any more.
            give_back(piece for pieces in drawn for piece, _ in pieces)

    def _draw(self, rank: int) -> list[tuple[Piece, _OpenJoint]]:
        """Remove the next parts for a rank from the queue, as many as one round may send.

        Returns:
            The parts, each with its open joint.
        """
        drawn: list[tuple[Piece, _OpenJoint]] = []
        room = max(1, _WINDOW_BYTES // (self._size * self._largest_team))
        with self._lock:
            while room > 0 and (joint := self._next_joint(rank)) is not None:
                piece = self._outbox[rank].popleft()
                room -= len(piece.view)
                self._waiting_bytes -= len(piece.view)
                drawn.append((piece, joint))
        return drawn

    def _message(
        self, rank: int, drawn: list[tuple[Piece, _OpenJoint]], message: _PartList
    ) -> memoryview:
        inline: list[Raw] = []
        memory = self._shared.theirs[rank]
        for piece, joint in drawn:
            assert piece.part is not None
            assert isinstance(piece.view, memoryview)
            if piece.ready is not None:
                piece.ready()
            region, nbytes = piece.part.region, len(piece.view)
            part = _SentPart(joint.leaf_id, joint.first_cell, nbytes, None)
            if rank == self._rank:
                self._fill(part, region, piece.view)
                continue
            if memory is not None and joint.at >= 0:
                outer = self._grids[joint.leaf_id].region(joint.first_cell, joint.stop)
                _copy(memory[joint.at :], outer, region, piece.view)
            else:
                part.region = region
                inline.append(piece.view)
            message.parts.append(part)
        encoded = encode(message)
        return memoryview(bytearray().join([_HEAD.pack(len(encoded)), encoded, *inline]))

    # --- receiving ---

    def receive(self, messages: Sequence[memoryview]) -> tuple[list[Piece], bool]:
        """Process the messages of all ranks in this round.

        Args:
            messages: The message of each rank.

        Returns:
            The cells that are whole now, and whether no rank will send more parts.
        """
        for rank, content in enumerate(messages):
            if not content:
                continue  # that rank has learned that no more parts come
            start = _HEAD.size + _HEAD.unpack_from(content)[0]
            message = decoder(_PartList).decode(content[_HEAD.size : start])
            self._lasts[rank] = message.is_last
            self._taking[rank] += message.opened
            for part in message.parts:
                if part.region is None:
                    self._fill(part)
                else:
                    self._fill(part, part.region, content[start : start + part.nbytes])
                    start += part.nbytes
        cells, self._whole = self._whole, []
        return cells, all(self._lasts)

    @property
    def _may_open(self) -> bool:
        """Whether there is memory for this rank's next joint."""
        if self._next is None:
            return False
        return self._bytes_in_use + sum(self._next[2]) <= len(self._room) or not self._bytes_in_use

    def _open_more(self) -> list[list[_OpenJoint]]:
        """Open this rank's next joints, as far as there is memory.

        Returns:
            For each rank, the newly opened joints of which that rank sends parts.
        """
        new_joints: list[list[_OpenJoint]] = [[] for _ in range(self._size)]
        while self._next is not None and self._may_open:
            leaf, first_cell, sizes, senders = self._next
            nbytes = sum(sizes)
            with self._lock:
                self._bytes_in_use += nbytes
                at = self._ring.take(nbytes)
            view = memoryview(bytearray(nbytes)) if at is None else self._room[at : at + nbytes]
            opened = _OpenJoint(
                self._leaf_ids[leaf], first_cell, first_cell + len(sizes), -1 if at is None else at
            )
            self._open[opened.leaf_id, first_cell] = _Joint(leaf, opened, sizes, view)
            for rank in senders:
                new_joints[rank].append(opened)
            self._next = next(self._to_open, None)
        return new_joints

    def _fill(
        self, part: _SentPart, region: Region | None = None, content: memoryview | None = None
    ) -> None:
        """Note that a part of a joint has come. After the last part, the joint can be hashed.

        Args:
            part: The part.
            region: Where the part lies in the tensor; None if the sender has copied it already.
            content: The bytes to copy into the joint; None if the sender has copied them already.
        """
        joint = self._open[part.leaf_id, part.first_cell]
        opened = joint.opened
        if region is not None and content is not None:
            outer = self._grids[opened.leaf_id].region(opened.first_cell, opened.stop)
            _copy(joint.view, outer, region, content)
        joint.missing -= part.nbytes
        if joint.missing:
            return
        del self._open[part.leaf_id, part.first_cell]

        def free_room() -> None:
            with self._lock:
                self._bytes_in_use -= len(joint.view)
                if opened.at >= 0:
                    self._ring.free(opened.at)

        self._whole.append(
            Piece(joint.leaf, opened.first_cell, joint.sizes, joint.view, joint, release=free_room)
        )

    def close(self) -> None:
        """Give back the memory for joints, once no thread hashes any more."""
        slot, self._slot = self._slot, None
        if slot is not None and len(slot.view) == _cell_slots.slot_bytes:
            _cell_slots.release(slot)


def _copy(target: memoryview, outer: Region, part: Region, content: memoryview) -> None:
    """Copy the bytes of a part to its place in a box.

    Args:
        target: The memory of the box, at its start.
        outer: The box, in the tensor.
        part: The part, in the tensor. It lies in the box.
        content: The bytes of the part.
    """
    itemsize = len(content) // part.numel
    start = part.start_in(outer)
    if start is not None:
        buffers.copy(target[start * itemsize : start * itemsize + len(content)], content)
        return
    # The axes after the last one that is cut are one run of bytes.
    axis = max(i for i, size in enumerate(part.sizes) if size != outer.sizes[i])
    run = prod(outer.sizes[axis + 1 :]) * itemsize
    into = _bytes(target[: outer.numel * itemsize]).view(*outer.sizes[: axis + 1], run)
    source = _bytes(content).view(*part.sizes[: axis + 1], run)
    into[part.within(outer)[: axis + 1]].copy_(source)


def _bytes(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)
