"""Hashing the pieces of a take, on several threads, and storing the chunks that are new."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from casnap.format.digest import DIGEST_SIZE, Digest, split_digests
from casnap.format.entries import INLINE_BYTES
from casnap.runtime.progress import Progress, ProgressCounter
from casnap.runtime.threads import Crew, SharedItems, cores
from casnap.storage import (
    Raw,
    SelectNew,
    Session,
)
from casnap.take.capture import CapturedState
from casnap.take.staging import PIECE_BYTES, Piece, give_back

Batches = Callable[[int], Iterable[list[Piece]]]
"""Returns pieces in batches of so many bytes."""


class Digests(NamedTuple):
    """The digests of the chunks that this rank hashed.

    Attributes:
        runs: Leaf → the digests of all its chunks, if there are several and this rank hashes all.
        only: Leaf → the digest of its only chunk, once this rank has hashed that.
        cells: Leaf → cell → its digest, where ranks share a leaf; the bytes of the cell instead
            where the leaf is so small that its bytes stand in the entry.
    """

    runs: dict[int, bytearray]
    only: dict[int, Digest]
    cells: dict[int, dict[int, bytes]]


class Hasher:
    """Hashes pieces, and stores the chunks among them that are new.

    Args:
        state: The state that the pieces are of.
        session: Where new chunks are stored.
        progress: Told how many bytes are done.

    Attributes:
        digests: What was hashed so far.
    """

    def __init__(self, state: CapturedState, session: Session, progress: Progress | None) -> None:
        self.digests = Digests(
            {i: bytearray(DIGEST_SIZE * g.count) for i, g in state.grids.items() if g.count > 1},
            {},
            {i: {} for i in state.assigned},
        )
        self._state = state
        self._session = session
        self._counter = (
            None
            if progress is None
            else ProgressCounter(progress, "storing", state.bytes_to_hash())
        )

    def hash_all(self, batches: Batches, crew: Crew) -> None:
        """Hash on all cores, up to eight, or up to the limit of the crew, and write all new chunks.

        So a process hashes alone, if it puts no cells together.
        """
        source = SharedItems(batches(PIECE_BYTES), crew)
        crew.run(lambda: self.hash(source, None), crew.limited(min(cores(), 8)))

    def hash(self, batches: Iterable[list[Piece]], select_share: SelectNew | None) -> None:
        """Hash batches of pieces; the work of one thread.

        Args:
            batches: The pieces.
            select_share: Returns which of some new chunks this rank is to write; None for all.
        """
        writer = self._session.writer(select_share)
        try:
            for batch in batches:
                try:
                    pieces = batch
                    if self.digests.cells:
                        pieces = [piece for piece in batch if not self._keep_inline(piece)]
                    self._note(pieces, writer.store(_chunks_of(pieces)))
                finally:
                    give_back(batch)
        finally:
            writer.finish()

    def _keep_inline(self, piece: Piece) -> bool:
        """Keep the bytes of a piece if its tensor is shared by ranks, but stands in its entry."""
        cells = self.digests.cells.get(piece.leaf)
        if cells is None or self._state.leaves[piece.leaf].entry.payload.nbytes > INLINE_BYTES:
            return False
        if piece.ready is not None:
            piece.ready()
        cells[piece.first_cell] = bytes(piece.view)
        return True

    def note_known(self, piece: Piece, digests: list[Digest]) -> None:
        """Note the digests of chunks that the store has, and that were hashed elsewhere."""
        self._note([piece], digests)
        if self._counter is not None:
            self._counter.add(sum(piece.sizes))

    def digests_of(self, piece: Piece) -> list[bytes]:
        """Return the digests that were noted of the chunks of a piece."""
        runs, only, cells = self.digests
        stop = piece.first_cell + len(piece.sizes)
        if piece.leaf in cells:
            return [cells[piece.leaf][cell] for cell in range(piece.first_cell, stop)]
        if piece.leaf in runs:
            of_run = runs[piece.leaf][piece.first_cell * DIGEST_SIZE : stop * DIGEST_SIZE]
            return list(split_digests(bytes(of_run)))
        return [only[piece.leaf]]

    def _note(self, pieces: list[Piece], digests: list[Digest]) -> None:
        """Note the digests of the chunks of some pieces."""
        start, (runs, only, by_cell) = 0, self.digests
        for piece in pieces:
            stop = start + len(piece.sizes)
            of_piece = digests[start:stop]
            if piece.leaf in by_cell:
                cells = range(piece.first_cell, piece.first_cell + len(of_piece))
                by_cell[piece.leaf].update(zip(cells, of_piece, strict=True))
            elif piece.leaf in runs:
                at, joined = piece.first_cell * DIGEST_SIZE, b"".join(of_piece)
                runs[piece.leaf][at : at + len(joined)] = joined
            else:
                [only[piece.leaf]] = of_piece
            start = stop
        if self._counter is not None:
            self._counter.add(sum(len(piece.view) for piece in pieces))


def _chunks_of(pieces: list[Piece]) -> list[Raw]:
    chunks: list[Raw] = []
    for piece in pieces:
        if piece.ready is not None:
            piece.ready()
        if len(piece.sizes) == 1:
            chunks.append(piece.view)
            continue
        start = 0
        for size in piece.sizes:
            chunks.append(piece.view[start : start + size])
            start += size
    return chunks
