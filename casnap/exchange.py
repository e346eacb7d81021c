"""Each chunk that is new is written once: the ranks decide together, round by round, by whom.

A chunk's digest says which rank decides over it. That one hears, in each round, who holds the
chunk and does not find it in the store, and picks the holder that has been given least to write.
Nobody sees all digests, and who decides has as much to do as anybody else.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from casnap.comm import Comm
from casnap.digest import DIGEST_SIZE, Digest
from casnap.edges import Edges
from casnap.pipeline import Crew, Shared
from casnap.staging import Piece

_WINDOW_BYTES = 64 << 20
_MOST_BYTES = 4 * _WINDOW_BYTES
# Seconds that a round waits for more chunks, and that a thread sleeps before it looks again.
_PATIENCE, _LOOK = 0.02, 0.1
_HEAD = struct.Struct("<?Q")
_ASK = struct.Struct(f"<{DIGEST_SIZE}sI")

Chunk = tuple[Digest, memoryview]


class _Offer(NamedTuple):
    """Chunks that this rank could write, and the pieces that they lie in."""

    chunks: list[Chunk]
    pieces: list[Piece]

    def give_back(self) -> None:
        for piece in self.pieces:
            piece.give_back()


class Exchange:
    """What this rank offers, what it is told to write, and what it decides for others.

    Args:
        comm: The ranks.
        crew: Whom the threads belong to that hash and write.
        edges: The cells that are put together from parts.
        hashers: How many threads draw from :meth:`batches`.
    """

    def __init__(self, comm: Comm, crew: Crew, edges: Edges, hashers: int) -> None:
        self._comm = comm
        self._crew = crew
        self._edges = edges
        self._drawing = self._hashing = hashers
        self._changed = threading.Condition()
        self._offers: deque[_Offer] = deque()
        self._offered = 0
        self._whole: deque[list[Piece]] = deque()
        self._chosen: queue.SimpleQueue[_Offer | None] = queue.SimpleQueue()
        self._settled: set[Digest] = set()
        self._loads = [0] * comm.size

    # --- the threads that hash, and that write ---

    def batches(self, local: Shared[list[Piece]]) -> Iterator[list[Piece]]:
        """Yield, to one thread, what is to be hashed: of this rank, or put together of parts."""
        try:
            for batch in local:
                while (whole := self._next_whole()) is not None:
                    yield whole
                for piece in batch:
                    if piece.part is not None:
                        self._edges.add(piece)
                if self._crew.failed:
                    self.drop()
                yield [piece for piece in batch if piece.part is None]
            self._drawn_all()
            while (whole := self._await_whole()) is not None:
                yield whole
        finally:
            with self._changed:
                self._hashing -= 1
                self._changed.notify_all()

    def _next_whole(self) -> list[Piece] | None:
        with self._changed:
            return self._whole.popleft() if self._whole else None

    def _drawn_all(self) -> None:
        with self._changed:
            self._drawing -= 1
            if not self._drawing:
                self._edges.finish()
            self._changed.notify_all()

    def _await_whole(self) -> list[Piece] | None:
        with self._changed:
            while not self._whole and not self._edges.over and not self._crew.failed:
                self._changed.wait(_LOOK)
            return self._whole.popleft() if self._whole else None

    def offer(self, chunks: list[Chunk], pieces: list[Piece]) -> None:
        """Offer to write chunks; waits while much is offered that is not decided yet."""
        offer = _Offer(chunks, pieces)
        if not chunks:
            offer.give_back()
            return
        with self._changed:
            while self._offered > _MOST_BYTES and not self._crew.failed:
                self._changed.wait(_LOOK)
            self._offers.append(offer)
            self._offered += sum(len(raw) for _, raw in chunks)
            self._changed.notify_all()
        if self._crew.failed:
            self.drop()

    def write(self, keep: Callable[[list[Chunk]], None]) -> None:
        """Have ``keep`` called with what this rank is to write, from one thread."""
        while (offer := self._chosen.get()) is not None:
            try:
                if not self._crew.failed:
                    keep(offer.chunks)
            finally:
                offer.give_back()

    def drop(self) -> None:
        """Give back what nobody will decide over any more: others may wait for its memory."""
        with self._changed:
            offers = list(self._offers)
            self._offers.clear()
        for offer in offers:
            offer.give_back()
        self._edges.drop()

    # --- the thread that talks ---

    def run(self, writers: int) -> None:
        """Hold rounds until all ranks have hashed, and decided over, everything.

        Args:
            writers: How many threads are in :meth:`write`.

        Raises:
            RankError: Another rank failed.
        """
        try:
            over = False
            while not over:
                if self._crew.error is not None:
                    raise self._crew.error
                if not self._edges.over:
                    self._meet_edges()
                over = self._round()
        except BaseException as e:
            self._crew.fail(e)
            self.drop()
            raise
        finally:
            for _ in range(writers):
                self._chosen.put(None)

    def _meet_edges(self) -> None:
        whole = self._edges.receive(self._comm.all_to_all(self._edges.messages()))
        with self._changed:
            self._whole.extend([piece] for piece in whole)
            self._changed.notify_all()

    def _collect(self) -> tuple[list[_Offer], bool]:
        """Return what is offered by now, and whether nothing more will be."""
        until = time.monotonic() + _PATIENCE
        with self._changed:
            while (
                self._offered < _WINDOW_BYTES
                and self._hashing
                and not self._crew.failed
                and (left := until - time.monotonic()) > 0
            ):
                # Parts are sent as soon as they are there: others wait for them.
                if not self._edges.over and not self._whole and not self._drawing:
                    break
                self._changed.wait(left)
            offers = list(self._offers)
            self._offers.clear()
            self._offered = 0
            self._changed.notify_all()
            return offers, not self._hashing

    def _round(self) -> bool:
        """Ask about what is offered; return whether this was the last round of all ranks."""
        offers, last = self._collect()
        try:
            return self._decided(offers, last)
        except BaseException:
            for offer in offers:
                offer.give_back()
            raise

    def _decided(self, offers: list[_Offer], last: bool) -> bool:
        size = self._comm.size
        asked: list[list[Chunk]] = [[] for _ in range(size)]
        for offer in offers:
            for chunk in offer.chunks:
                asked[int.from_bytes(chunk[0][:8], "big") % size].append(chunk)
        head = _HEAD.pack(last, self._loads[self._comm.rank])
        questions = self._comm.all_to_all(
            [b"".join([head, *(_ASK.pack(d, len(raw)) for d, raw in asks)]) for asks in asked]
        )
        answers = self._comm.all_to_all(self._decide(questions))
        mine = {
            digest
            for asks, answer in zip(asked, answers, strict=True)
            for (digest, _), yes in zip(asks, answer, strict=True)
            if yes
        }
        over = all(_HEAD.unpack_from(question)[0] for question in questions)
        for offer in offers:
            chunks = [chunk for chunk in offer.chunks if chunk[0] in mine]
            self._loads[self._comm.rank] += sum(len(raw) for _, raw in chunks)
            self._chosen.put(_Offer(chunks, offer.pieces))
        return over

    def _decide(self, questions: list[memoryview]) -> list[bytes]:
        """Choose, for each chunk that nobody was given yet, who of its holders writes it."""
        own, size = self._comm.rank, len(questions)
        holders: dict[Digest, list[tuple[int, int]]] = {}
        answers, sizes = [], {}
        loads = [_HEAD.unpack_from(question)[1] for question in questions]
        for rank, question in enumerate(questions):
            asks = list(_ASK.iter_unpack(question[_HEAD.size :]))
            answers.append(bytearray(len(asks)))
            for i, (raw_digest, nbytes) in enumerate(asks):
                digest = Digest(raw_digest)
                if digest not in self._settled:
                    holders.setdefault(digest, []).append((rank, i))
                    sizes[digest] = nbytes
        for digest, held in holders.items():
            rank, i = min(held, key=lambda h: (loads[h[0]], (h[0] - own) % size))
            answers[rank][i] = 1
            # Each of the others gives away as much meanwhile, and looks at the same loads.
            loads[rank] += size * sizes[digest]
            self._settled.add(digest)
        return [bytes(answer) for answer in answers]
