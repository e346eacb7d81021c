"""Hash the pieces of a take, on several threads, and store the chunks that are new."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from casnap.format.digest import DIGEST_SIZE, Digest, split_digests
from casnap.format.entries import INLINE_BYTES
from casnap.runtime.progress import Progress, ProgressCounter
from casnap.runtime.threads import Crew, SharedItems, cores
from casnap.storage import Raw, SelectNew
from casnap.take.capture import CapturedState
from casnap.take.health import Measuring
from casnap.take.staging import PIECE_BYTES, Piece, give_back

Batches = Callable[[int], Iterable[list[Piece]]]
"""Given a number of bytes, returns pieces in batches of about that size."""


class ChunkTaker(Protocol):
    """Hashes and stores the chunks of one thread, as the writer of a session does."""

    def store(self, raws: list[Raw], /) -> list[Digest]:
        """Store the chunks that the store lacks; return the digests of all, in order."""

    def finish(self) -> None:
        """Write the chunks that still wait to be written."""


class Digests:
    """The digests of the chunks that this rank has hashed so far.

    Args:
        state: The state whose chunks they are.

    Attributes:
        shared: Leaf → cell → the cell's digest, for leaves whose cells several ranks hash. A leaf
            so small that its entry holds its bytes has those bytes here, not a digest.
    """

    def __init__(self, state: CapturedState) -> None:
        self.shared: dict[int, dict[int, bytes]] = {i: {} for i in state.plans}
        # Leaf → the digests of its chunks, in a row; zeros where none was noted yet. Leaves of one
        # chunk are added when their digest is noted, since there may be a million of them.
        self._whole: dict[int, bytes | bytearray] = {
            i: bytearray(DIGEST_SIZE * count)
            for i in state.whole_leaves()
            if (count := state.grids[i].count) > 1
        }

    def note(self, pieces: Iterable[Piece], digests: list[Digest]) -> None:
        """Note the digests of all chunks of some pieces.

        Args:
            pieces: The pieces.
            digests: One digest for each chunk, in the order of the pieces.
        """
        start, shared, whole = 0, self.shared, self._whole
        for piece in pieces:
            leaf, stop = piece.leaf, start + len(piece.sizes)
            if leaf in shared:
                cells = range(piece.first_cell, piece.first_cell + stop - start)
                shared[leaf].update(zip(cells, digests[start:stop], strict=True))
            elif leaf in whole:
                row, at = whole[leaf], piece.first_cell * DIGEST_SIZE
                assert isinstance(row, bytearray)
                row[at : at + (stop - start) * DIGEST_SIZE] = b"".join(digests[start:stop])
            else:
                [whole[leaf]] = digests[start:stop]
            start = stop

    def of_piece(self, piece: Piece) -> Sequence[bytes]:
        """Return the digests that were noted for the chunks of a piece."""
        leaf, start, stop = piece.leaf, piece.first_cell, piece.first_cell + len(piece.sizes)
        if leaf in self.shared:
            return [self.shared[leaf][cell] for cell in range(start, stop)]
        return split_digests(bytes(self._whole[leaf][start * DIGEST_SIZE : stop * DIGEST_SIZE]))

    def of_leaf(self, leaf: int) -> bytes:
        """Return the joined digests of all chunks of a leaf that this rank hashes alone."""
        digests = self._whole[leaf]
        if isinstance(digests, bytes):
            return digests
        # If a digest was not noted, zeros stand in its place.
        assert bytes(DIGEST_SIZE) not in digests, leaf
        return bytes(digests)


class Hasher:
    """Hashes pieces, and stores the chunks among them that are new.

    Args:
        state: The state that the pieces belong to.
        writer: Returns a new :class:`ChunkTaker` for one thread. Its argument is a function that
            chooses which new chunks this rank writes; with None, the rank writes all.
        progress: Called with the phase, the bytes done, and the total.
        measuring: Measures the tensors in the pieces; None for nothing.

    Attributes:
        digests: The digests of the chunks that were hashed so far.
    """

    def __init__(
        self,
        state: CapturedState,
        writer: Callable[[SelectNew | None], ChunkTaker],
        progress: Progress | None,
        measuring: Measuring | None = None,
    ) -> None:
        self.digests = Digests(state)
        self._measuring = measuring
        self._state = state
        self._writer = writer
        self._counter = (
            None
            if progress is None
            else ProgressCounter(progress, "storing", state.bytes_to_hash())
        )

    def hash_all(self, batches: Batches, crew: Crew) -> None:
        """Hash all batches and write all new chunks. A process that takes alone calls this.

        It uses one thread for each core, but at most eight, and no more than ``crew`` allows.
        """
        source = SharedItems(batches(PIECE_BYTES), crew)
        crew.run(lambda: self.hash(source, None), crew.limited(min(cores(), 8)))

    def hash(self, batches: Iterable[list[Piece]], select_share: SelectNew | None) -> None:
        """Hash batches of pieces, store their new chunks, and give back the pieces' memory.

        Each hashing thread calls this once.

        Args:
            batches: The pieces.
            select_share: Given some new chunks, returns which ones this rank writes. None: it
                writes all.
        """
        writer = self._writer(select_share)
        try:
            for batch in batches:
                try:
                    pieces = batch
                    if self.digests.shared:
                        pieces = [piece for piece in batch if not self._keep_inline(piece)]
                    digests = writer.store(_chunks_of(pieces))
                    self.digests.note(pieces, digests)
                    if self._measuring is not None:
                        self._measuring.note(pieces, digests)
                    if self._counter is not None:
                        self._counter.add(sum(len(piece.view) for piece in pieces))
                finally:
                    give_back(batch)
        finally:
            writer.finish()

    def _keep_inline(self, piece: Piece) -> bool:
        """Keep the bytes of a piece in ``self.digests.shared``, if an entry will hold these bytes.

        That is so for a leaf that several ranks hash, and that is small enough to be stored inside
        its entry.

        Returns:
            Whether the bytes were kept. If so, the caller must not hash the piece.
        """
        cells = self.digests.shared.get(piece.leaf)
        if cells is None or self._state.leaves[piece.leaf].entry.payload.nbytes > INLINE_BYTES:
            return False
        if piece.ready is not None:
            piece.ready()
        cells[piece.first_cell] = bytes(piece.view)
        return True

    def note_known(self, piece: Piece, digests: list[Digest]) -> None:
        """Note the digests of a piece whose chunks the store has. A device has computed them."""
        self.digests.note([piece], digests)
        if self._counter is not None:
            self._counter.add(sum(piece.sizes))


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
