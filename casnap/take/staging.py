"""Make the bytes of tensors readable on the host, in runs of chunks.

A contiguous CPU tensor is read from its own memory. Any other CPU tensor is copied through a
buffer, box by box. A tensor on an accelerator is copied into pinned memory, on a side stream. An
async take copies into memory that is kept for the next takes. From the second async take on, that
memory is pinned, and the device copies straight there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

import torch
from msgspec import Struct
from msgspec.structs import replace

from casnap.format.grid import Grid
from casnap.format.records import MAX_CHUNK_SIZE
from casnap.format.region import Region
from casnap.runtime import buffers
from casnap.runtime.buffers import Pool, Slot, view_at
from casnap.runtime.fork import in_child
from casnap.runtime.threads import Crew, SharedItems, cores, python_gc_paused
from casnap.state.devices import begin_copy, pin
from casnap.state.tensors import as_copyable
from casnap.storage import Raw
from casnap.take.plan import SentPart

PIECE_BYTES = 8 << 20
_BATCH = 256
# A tensor below this is copied. So a thread that counts in a small one does not end the take.
_COPIED_BYTES = 16 << 10


class Piece(Struct, frozen=True):
    """The bytes of a run of chunks of one leaf, or of a part of them.

    Attributes:
        leaf: The number of the leaf.
        first_cell: The number of the first chunk.
        sizes: The bytes of each chunk.
        view: The bytes of all chunks, one after the other; empty if they are on an accelerator.
        keep_alive: The owner of the memory.
        ready: Waits until the bytes have arrived in ``view``; None if they are there already.
        release: Gives the memory back; None if the piece has no memory to give back.
        part: Which part of the chunks the bytes are; None if the chunks are whole.
        on_device: The bytes on an accelerator, which are still to be copied; None if they are in
            ``view``.
    """

    leaf: int
    first_cell: int
    sizes: Sequence[int]
    view: Raw
    keep_alive: object = None
    ready: Callable[[], None] | None = None
    release: Callable[[], None] | None = None
    part: SentPart | None = None
    on_device: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes of the piece."""
        return len(self.view) if self.on_device is None else self.on_device.nbytes

    def give_back(self) -> None:
        """Give the piece's memory back, once no copy into it is running."""
        if self.release is not None:
            try:
                if self.ready is not None:
                    self.ready()
            finally:
                self.release()


def give_back(pieces: Iterable[Piece]) -> None:
    """Give the memory of all pieces back, even if an error is raised for one of them."""
    with ExitStack() as stack:
        for piece in pieces:
            if piece.release is not None:
                stack.callback(piece.give_back)


class HeldBox(Struct, frozen=True):
    """A box of a leaf that this rank holds, and the elements in it."""

    region: Region
    content: torch.Tensor | bytes


def pieces_of(number: int, content: torch.Tensor | bytes, grid: Grid) -> Iterable[Piece]:
    """Return the bytes of a whole leaf in runs of about 8 MiB, in order.

    Args:
        number: The number of the leaf.
        content: The tensor, or the encoded value.
        grid: The grid of the leaf.
    """
    if isinstance(content, bytes):
        return _runs(number, grid, memoryview(content), content)
    if content.is_cpu and content.is_contiguous():
        nbytes = content.nbytes
        view = view_at(content.data_ptr(), nbytes)
        if grid.count > 1:
            return _runs(number, grid, view, content)
        # There may be many small tensors, so no more objects are made than needed.
        small = nbytes <= _COPIED_BYTES
        return (Piece(number, 0, (nbytes,), bytes(view) if small else view, content),)
    if content.is_contiguous():
        return _runs_on_device(number, grid, _bytes_of(content))
    held = HeldBox(Region.whole(grid.shape), as_copyable(content))
    return pieces_between(number, held, grid, 0)


def _runs(number: int, grid: Grid, view: memoryview, owner: object) -> Iterator[Piece]:
    for first_cell, sizes, start, stop in _runs_in_row(grid):
        yield Piece(number, first_cell, sizes, view[start:stop], owner)


def _runs_on_device(number: int, grid: Grid, content: torch.Tensor) -> Iterator[Piece]:
    for first_cell, sizes, start, stop in _runs_in_row(grid):
        yield Piece(number, first_cell, sizes, b"", on_device=content[start:stop])


def _runs_in_row(grid: Grid) -> Iterator[tuple[int, list[int], int, int]]:
    """Yield runs of cells of up to 8 MiB, for a leaf whose bytes stand in the order of cells.

    Yields:
        The first cell, the bytes of each cell, and where the run begins and ends, in bytes.
    """
    first_cell, start, sizes, total = 0, 0, list[int](), 0
    for size in grid.sizes():
        if sizes and total + size > PIECE_BYTES:
            yield first_cell, sizes, start, start + total
            first_cell, start, sizes, total = first_cell + len(sizes), start + total, [], 0
        sizes.append(size)
        total += size
    if sizes:
        yield first_cell, sizes, start, start + total


def _bytes_of(contiguous: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor as one row of bytes."""
    return as_copyable(contiguous).reshape(-1).view(torch.uint8)


def pieces_between(
    number: int, held: HeldBox, grid: Grid, first_cell: int, stop: int | None = None
) -> Iterator[Piece]:
    """Yield the bytes of some cells, which all lie in one box, in runs of about 8 MiB.

    Args:
        number: The number of the leaf.
        held: The box.
        grid: The grid of the leaf.
        first_cell: The first cell.
        stop: One past the last cell; None for all cells of the grid.
    """
    stop = grid.count if stop is None else stop
    if isinstance(held.content, bytes):
        start = sum(grid.cell_bytes(i) for i in range(first_cell))
        for i in range(first_cell, stop):
            n = grid.cell_bytes(i)
            yield Piece(number, i, [n], memoryview(held.content)[start : start + n])
            start += n
        return
    for begin, sizes, region in _runs_in_boxes(grid, first_cell, stop):
        yield _piece(number, begin, sizes, held, region)


def piece_of_part(number: int, held: HeldBox, part: SentPart) -> Piece:
    """Return the bytes of the part of a joint that one box holds, to be sent to another rank.

    Args:
        number: The number of the leaf.
        held: The box.
        part: The part.
    """
    assert isinstance(held.content, torch.Tensor)
    # Copied at once, also from a GPU, since the part may wait long until it is sent.
    elements = held.content[part.region.within(held.region)].contiguous().cpu()
    view = view_at(elements.data_ptr(), elements.nbytes)
    return Piece(number, part.first_cell, [elements.nbytes], view, elements, part=part)


def _piece(number: int, first_cell: int, sizes: list[int], held: HeldBox, region: Region) -> Piece:
    content = held.content
    assert isinstance(content, torch.Tensor)
    elements = content[region.within(held.region)].contiguous()
    if not elements.is_cpu:
        return Piece(number, first_cell, sizes, b"", on_device=_bytes_of(elements))
    return Piece(number, first_cell, sizes, view_at(elements.data_ptr(), elements.nbytes), elements)


def _runs_in_boxes(
    grid: Grid, first_cell: int, stop: int
) -> Iterator[tuple[int, list[int], Region]]:
    """Yield runs of cells that form a box: the first cell, the bytes of each, and the box."""
    begin, sizes, box = first_cell, list[int](), Region((), ())
    for i in range(first_cell, stop):
        region, nbytes = grid.region(i), grid.cell_bytes(i)
        joined = _as_one_box(box, region) if sizes else None
        if joined is not None and sum(sizes) + nbytes <= PIECE_BYTES:
            sizes.append(nbytes)
            box = joined
            continue
        if sizes:
            yield begin, sizes, box
        begin, sizes, box = i, [nbytes], region
    if sizes:
        yield begin, sizes, box


def _as_one_box(box: Region, following: Region) -> Region | None:
    """Join two adjacent boxes into one whose row-major elements are those of both, in order.

    Returns:
        The joined box; None if there is no such box.
    """
    for axis, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if following.offsets[axis] != start:
            sizes = (*box.sizes[:axis], size + following.sizes[axis], *box.sizes[axis + 1 :])
            adjacent = following.offsets[axis] == start + size
            later_pieces = (
                following.offsets[axis + 1 :] == box.offsets[axis + 1 :]
                and following.sizes[axis + 1 :] == box.sizes[axis + 1 :]
            )
            return Region(box.offsets, sizes) if adjacent and later_pieces else None
        if size != 1 or following.sizes[axis] != 1:
            # The rows of the two boxes would alternate.
            return None
    return None


# Pieces have pools of their own: a thread that holds a piece may wait for the pool of the packs.
_pinned_pool, _large_pinned_pool = Pool(PIECE_BYTES, 4), Pool(MAX_CHUNK_SIZE, 4)


def _from_device(piece: Piece) -> Piece:
    """Return a copy of a piece in pinned memory; the copying may still be under way.

    A piece that is not on a device is returned as it is.
    """
    on_device = piece.on_device
    if on_device is None:
        return piece
    pool = _pinned_pool if on_device.nbytes <= PIECE_BYTES else _large_pinned_pool
    slot = pool.take()
    try:
        pin(slot, on_device.device)
        return _copied(piece, on_device, slot.view[: on_device.nbytes], lambda: pool.release(slot))
    except BaseException:
        pool.release(slot)
        raise


def _copied(
    piece: Piece, on_device: torch.Tensor, target: memoryview, release: Callable[[], None]
) -> Piece:
    """Begin to copy a piece from a device to the host; return the copy, as a piece.

    Args:
        piece: The piece.
        on_device: Its bytes on the device.
        target: The memory to copy to.
        release: Gives that memory back.
    """
    ready = begin_copy(torch.frombuffer(target, dtype=torch.uint8), on_device)
    return replace(
        piece, view=target, keep_alive=on_device, ready=ready, release=release, on_device=None
    )


def batched(pieces: Iterable[Piece], nbytes: int = PIECE_BYTES) -> Iterator[list[Piece]]:
    """Group pieces into batches of about ``nbytes`` bytes, so that threads seldom switch.

    Pieces on a device are copied to the host on the way.
    """
    remaining = iter(pieces)
    while True:
        batch, total = list[Piece](), 0
        with python_gc_paused():
            for piece in map(_from_device, remaining):
                batch.append(piece)
                total += len(piece.view)
                # A piece in a bounded buffer is handed on at once, or its maker might wait for the
                # buffer. Parts come in small batches, since the memory of waiting parts is bounded.
                enough = nbytes if piece.part is None else min(nbytes, PIECE_BYTES)
                if total >= enough or len(batch) == _BATCH or piece.release is not None:
                    break
        if not batch:
            return
        yield batch


# --- copies for async takes -------------------------------------------------------------------

_BLOCK_BYTES = 64 << 20
_LEAST_BLOCKS = 4
# Seconds for which a thread waits for a copy before it looks for other work.
_LOOK = 0.02
_block_pool = Pool(_BLOCK_BYTES, None)


class _Block:
    """A slot of memory that holds several copies. It is given back once all copies are released."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.fill = 0
        self._users = 1
        self._lock = threading.Lock()

    def room(self, nbytes: int) -> memoryview | None:
        start = -(-self.fill // 64) * 64
        if start + nbytes > len(self.slot.view):
            return None
        self.fill = start + nbytes
        return self.slot.view[start : self.fill]

    def share(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            _block_pool.release(self.slot)


class _Copying(NamedTuple):
    """A copy to make.

    Attributes:
        piece: The piece to copy.
        target: The memory to copy it to.
        under_way: A lock that is held until the copy is made.
    """

    piece: Piece
    target: memoryview
    under_way: threading.Lock


def _to_block(piece: Piece, slot: Slot, target: memoryview) -> Piece:
    """Begin to copy a piece from a device into pinned memory: into a block, if that can be pinned.

    Otherwise the memory is a slot of the pinned pool. A block that is used for the first time is
    not pinned: pinning would zero its pages on one thread, while copies zero them on all threads.

    Args:
        piece: The piece. One that is not on a device is returned as it is.
        slot: The slot of the block.
        target: The memory in the block.
    """
    on_device = piece.on_device
    if on_device is not None and slot.is_used and pin(slot, on_device.device):
        return _copied(piece, on_device, target, _do_nothing)
    return _from_device(piece)


def _do_nothing() -> None:
    """Release nothing. A block is given back when its last copy is released, not piece by piece."""


def _wait_for(under_way: threading.Lock) -> None:
    with under_way:
        pass


class StagedCopies:
    """Copies of a state's pieces in host memory, so that the caller may change the originals.

    The memory is kept between takes. A copy stays after it has been read, so that the take can
    start again. It is freed when the take ends, or earlier if a later copy needs its memory.

    Args:
        max_bytes: The most memory to use, at least four blocks of 64 MiB; None for no bound.
        threads: The most threads that copy; None for one on each core.
    """

    def __init__(self, max_bytes: int | None, threads: int | None = None) -> None:
        self._threads = threads
        _block_pool.limit = (
            None if max_bytes is None else max(_LEAST_BLOCKS, max_bytes // _BLOCK_BYTES)
        )
        self._when_full: Callable[[], None] = lambda: None
        # All copies in order, how many of them were drawn, and the calls that free the read ones.
        self._copies: list[Piece] = []
        self._drawn = 0
        self._read: list[Callable[[], None]] = []
        self._keeps_read = True
        self._changed = threading.Condition()
        # Complete as long as there is nothing to copy, so that release() ends without fill().
        self._complete = True
        self._error: BaseException | None = None
        _with_copies.add(self)

    def fill(self, pieces: Iterable[Piece], when_full: Callable[[], None]) -> None:
        """Copy all pieces, on one thread for each core, or on as many as are allowed.

        Args:
            pieces: The pieces to copy.
            when_full: Called when all memory is in use; starts the thread that reads the copies.
        """
        self._when_full = when_full
        try:
            self._complete = False
            with closing(self._placed(pieces)) as placed, Crew(self._threads) as crew:
                source = SharedItems(placed, crew)
                crew.run(lambda: self._copy(source), crew.limited(cores()))
        except BaseException as e:
            self._error = e
            raise
        finally:
            with self._changed:
                self._complete = True
                self._changed.notify_all()

    def _placed(self, pieces: Iterable[Piece]) -> Generator[_Copying]:
        """Yield one copy to make for each piece, with its place in memory.

        The copies are in the order of the pieces: ranks that put cells together rely on that order.
        """
        block: _Block | None = None
        try:
            for piece in pieces:
                try:
                    target = block.room(piece.nbytes) if block is not None else None
                    if block is None or target is None:
                        full, block = block, None
                        if full is not None:
                            full.release()
                        block = _Block(self._slot())
                        target = block.room(piece.nbytes)
                        assert target is not None
                    piece = _to_block(piece, block.slot, target)
                except BaseException:
                    piece.give_back()
                    raise
                under_way = threading.Lock()
                under_way.acquire()
                wait = partial(_wait_for, under_way)
                on_read = partial(self._note_read, block.release)
                copy = replace(piece, view=target, keep_alive=None, ready=wait, release=on_read)
                block.share()
                with self._changed:
                    self._copies.append(copy)
                    self._changed.notify()
                yield _Copying(piece, target, under_way)
        finally:
            if block is not None:
                block.release()

    def _copy(self, source: SharedItems[_Copying]) -> None:
        for piece, target, under_way in source:
            try:
                if piece.ready is not None:
                    piece.ready()
                if piece.view is not target:
                    buffers.copy(target, piece.view)
            finally:
                # If the copy failed, the take fails after its last copy: see batches().
                under_way.release()
                piece.give_back()

    def _slot(self) -> Slot:
        slot = _block_pool.acquire(wait=False)
        if slot is None:
            self._when_full()
            for copies in list(_with_copies):
                copies._free_read()
            slot = _block_pool.take()
        return slot

    def _note_read(self, on_read: Callable[[], None]) -> None:
        with self._changed:
            if self._keeps_read:
                self._read.append(on_read)
                return
        on_read()

    def _free_read(self) -> None:
        """Free the copies that have been read; from now on, free each one as soon as it is read."""
        with self._changed:
            self._keeps_read = False
            callbacks, self._read = self._read, []
        for on_read in callbacks:
            on_read()

    def start_over(self) -> bool:
        """Let :meth:`batches` begin again; return False if some copies are gone."""
        with self._changed:
            # A copy that was drawn, but not read, was lost in a failure.
            if not self._keeps_read or len(self._read) < self._drawn:
                return False
            self._read, self._drawn = [], 0
            return True

    def batches(self, nbytes: int = PIECE_BYTES) -> Iterator[list[Piece]]:
        """Yield all copies as they are made, in batches of about ``nbytes`` bytes.

        If no copy was made for a while, an empty batch comes. So the reader is not stuck here while
        copying waits for memory that only the reader can free.
        """
        while True:
            with self._changed:
                if self._drawn == len(self._copies) and not self._complete:
                    self._changed.wait(_LOOK)
                if self._drawn == len(self._copies) and self._complete:
                    break
                batch, total = list[Piece](), 0
                while self._drawn < len(self._copies) and total < nbytes and len(batch) < _BATCH:
                    batch.append(self._copies[self._drawn])
                    self._drawn += 1
                    total += len(batch[-1].view)
            yield batch
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Give back the memory of all copies, for the next take."""
        self._free_read()
        with suppress(BaseException):
            for batch in self.batches():
                with suppress(BaseException):
                    give_back(batch)
        # The traceback of an error may keep this object alive, but it must not keep the copies.
        self._copies, self._drawn = [], 0


# Copies of takes that may not have ended. Only the thread whose turn it is to begin a take looks
# here.
_with_copies: WeakSet[StagedCopies] = WeakSet()
in_child(_with_copies.clear)
