"""Each chunk that is new is written once: the ranks decide together, round by round, by whom.

A chunk's digest says which rank decides over it. That one hears, in each round, who holds the
chunk and does not find it in the store, and picks the holder that has been given least to write.
Nobody sees all digests, and who decides has as much to do as anybody else.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from casnap.errors import RankError
from casnap.format.digest import DIGEST_SIZE, Digest
from casnap.format.names import rank_names
from casnap.ranks.comm import Comm
from casnap.runtime.threads import Crew, Shared
from casnap.take.split_cells import SplitCells
from casnap.take.staging import Piece

# Seconds that a round waits for more questions, and that a thread sleeps before it looks again.
_PATIENCE, _LOOK = 0.02, 0.1
_HEAD = struct.Struct("<?Qd")
_ASK = struct.Struct(f"<{DIGEST_SIZE}sI")


class _Question:
    """Chunks that one thread could write, and, in the end, which of them it is to."""

    def __init__(self, chunks: list[tuple[Digest, int]]) -> None:
        self.chunks = chunks
        self.answer: list[bool] | None = None


class Rounds:
    """What the threads of this rank ask, what they are told, and what it decides for others.

    Args:
        comm: The ranks.
        crew: Whom the threads belong to that hash and ask.
        split_cells: The cells that are put together from parts.
        threads: How many threads draw from :meth:`batches`.
    """

    def __init__(self, comm: Comm, crew: Crew, split_cells: SplitCells, threads: int) -> None:
        self._comm = comm
        self._crew = crew
        self._edges = split_cells
        self._drawing = self._hashing = threads
        self._waiting = 0
        self._last_progress = time.monotonic()
        self._changed = threading.Condition()
        self._questions: list[_Question] = []
        self._whole: deque[Piece] = deque()
        self._parts_done = False  # all parts of all ranks have come
        self._chosen: set[Digest] = set()
        self._load = 0

    # --- the threads that hash ---

    def batches(self, local: Shared[list[Piece]]) -> Iterator[list[Piece]]:
        """Yield, to one thread, what is to be hashed: of this rank, or put together of parts."""
        try:
            for batch in local:
                self._last_progress = time.monotonic()
                # All of it is somebody's before anything can fail.
                for piece in batch:
                    if piece.part is not None:
                        self._edges.add(piece)
                yield [piece for piece in batch if piece.part is None]
                self._await_room()
                while whole := self._whole_cells():
                    yield whole
            with self._changed:
                self._drawing -= 1
                if not self._drawing:
                    self._edges.finish()
                self._changed.notify_all()
            while not self._crew.failed and (whole := self._whole_cells(wait=True)):
                yield whole
        finally:
            with self._changed:
                self._hashing -= 1
                self._changed.notify_all()
            if self._crew.failed:
                # Others may wait for the memory.
                self._edges.drop()

    def _await_room(self) -> None:
        with self._changed, self._waiting_for_ranks():
            while self._edges.is_full and not self._crew.failed:
                self._changed.wait(_LOOK)

    def _whole_cells(self, *, wait: bool = False) -> list[Piece]:
        """Return some cells that were put together; none if there are, or will be, none."""
        with self._changed, self._waiting_for_ranks():
            while wait and not self._whole and not self._parts_done and not self._crew.failed:
                self._changed.wait(_LOOK)
            return [self._whole.popleft() for _ in range(min(len(self._whole), 16))]

    def ask(self, digests: list[Digest], sizes: list[int]) -> list[bool]:
        """Return which of some chunks, which the store lacks, this rank is to write.

        Waits until all ranks have come to the next round.
        """
        question = _Question(list(zip(digests, sizes, strict=True)))
        with self._changed, self._waiting_for_ranks():
            self._questions.append(question)
            self._changed.notify_all()
            while question.answer is None:
                if self._crew.error is not None:
                    raise self._crew.error
                self._changed.wait(_LOOK)
        return question.answer

    @contextmanager
    def _waiting_for_ranks(self) -> Iterator[None]:
        """Note that a thread waits for other ranks."""
        self._waiting += 1
        yield
        self._waiting -= 1
        self._last_progress = time.monotonic()

    def _idle_seconds(self) -> float:
        """Return for how many seconds there was something to do here, and it was not done."""
        with self._changed:
            busy = self._waiting < self._hashing
            return time.monotonic() - self._last_progress if busy else 0.0

    # --- the thread that talks ---

    def run(self) -> None:
        """Hold rounds until all ranks have hashed, and decided over, everything.

        Raises:
            RankError: Another rank failed.
        """
        over = False
        while not over:
            if self._crew.error is not None:
                raise self._crew.error
            if not self._parts_done:
                self._exchange_parts()
            over = self._round(*self._collected())

    def _exchange_parts(self) -> None:
        whole, over = self._edges.receive(self._comm.all_to_all(self._edges.messages()))
        with self._changed:
            self._whole.extend(whole)
            self._parts_done = over
            self._changed.notify_all()

    def _collected(self) -> tuple[list[_Question], bool]:
        """Return what is asked by now, and whether nothing more will be."""
        until = time.monotonic() + _PATIENCE
        with self._changed:
            # Until everyone asks; but others wait for parts that are there to be sent.
            while (
                len(self._questions) < self._hashing
                and not self._crew.failed
                and (self._parts_done or self._drawing or self._whole)
                and (left := until - time.monotonic()) > 0
            ):
                self._changed.wait(left)
            questions, self._questions = self._questions, []
            return questions, not self._hashing

    def _round(self, questions: list[_Question], last: bool) -> bool:
        """Have some questions answered; return whether this was the last round of all ranks."""
        size = self._comm.size
        asked: list[list[tuple[Digest, int]]] = [[] for _ in range(size)]
        for question in questions:
            for chunk in question.chunks:
                asked[int.from_bytes(chunk[0][:8], "big") % size].append(chunk)
        head = _HEAD.pack(last, self._load, self._idle_seconds())
        heard = self._comm.all_to_all(
            [b"".join([head, *(_ASK.pack(*chunk) for chunk in asks)]) for asks in asked]
        )
        heads = [_HEAD.unpack_from(said) for said in heard]
        self._check_all_go_on([stood_still for _, _, stood_still in heads])
        over = all(last for last, _, _ in heads)
        answers = self._comm.all_to_all(self._choose_writers(heard))
        mine = {
            chunk[0]
            for asks, answer in zip(asked, answers, strict=True)
            for chunk, yes in zip(asks, answer, strict=True)
            if yes
        }
        with self._changed:
            for question in questions:
                question.answer = [digest in mine for digest, _ in question.chunks]
                self._load += sum(n for digest, n in question.chunks if digest in mine)
            self._changed.notify_all()
        return over

    def _check_all_go_on(self, stood_still: list[float]) -> None:
        """Give up on a rank that talks, but does not get on: its storage hangs, for example."""
        timeout = self._comm.timeout
        stuck = [rank for rank, seconds in enumerate(stood_still) if seconds > timeout]
        if stuck:
            raise RankError(
                f"{self._comm.operation}: {rank_names(stuck)} did not go on for {timeout:g} s "
                "(last seen hashing and writing)",
                tuple(stuck),
            )

    def _choose_writers(self, heard: list[memoryview]) -> list[bytes]:
        """Choose, for each chunk that nobody was given yet, who of its holders writes it."""
        own, size = self._comm.rank, len(heard)
        holders: dict[Digest, list[tuple[int, int]]] = {}
        answers, sizes = [], dict[Digest, int]()
        loads = [_HEAD.unpack_from(said)[1] for said in heard]
        for rank, said in enumerate(heard):
            asks = list(_ASK.iter_unpack(said[_HEAD.size :]))
            answers.append(bytearray(len(asks)))
            for i, (digest, nbytes) in enumerate(asks):
                if digest not in self._chosen:
                    holders.setdefault(Digest(digest), []).append((rank, i))
                    sizes[digest] = nbytes
        for digest, held in holders.items():
            rank, i = min(held, key=lambda h: (loads[h[0]], (h[0] - own) % size))
            answers[rank][i] = 1
            # Each of the others gives away as much meanwhile, and looks at the same loads.
            loads[rank] += size * sizes[digest]
            self._chosen.add(digest)
        return [bytes(answer) for answer in answers]
