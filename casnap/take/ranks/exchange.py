"""Hash on many ranks: the ranks exchange messages in rounds, while the threads of each rank hash.

In a round the ranks send each other the parts of split cells, and decide which rank writes each new
chunk, so that each chunk is written once. The digest of a chunk selects the rank that decides about
it. A rank that holds the chunk, and does not find it in the store, offers it to the deciding rank,
which picks the rank that has been given the fewest bytes to write. So no rank sees all digests, and
each decides about equally many.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from casnap.errors import RankError
from casnap.format.decoding import unpacked
from casnap.format.digest import DIGEST_SIZE, Digest
from casnap.format.names import rank_names
from casnap.ranks.comm import Comm
from casnap.ranks.shared_memory import not_shared
from casnap.runtime.buffers import SLOT_BYTES, SLOTS
from casnap.runtime.threads import Crew, SharedItems, Worker, cores
from casnap.storage import SelectNew
from casnap.take.capture import CapturedState
from casnap.take.hashing import Batches
from casnap.take.ranks.division import Division
from casnap.take.ranks.split_cells import SHARED_BYTES, SplitCells
from casnap.take.staging import Piece

Hash = Callable[[Iterable[list[Piece]], SelectNew | None], None]
"""Hashes batches, on one thread; its second argument chooses which new chunks this rank writes."""

# The seconds for which a round waits for more offers; the same, if other ranks may wait for parts;
# and for which a thread sleeps before it looks again.
_PATIENCE, _SHORT_PATIENCE, _LOOK = 0.02, 0.003, 0.1
# A rank's message in a round begins with a _Head. Then come a byte for each offer that the rank got
# in the round before, its own offers (digest and size), and the message of SplitCells.
HEAD = struct.Struct("<??QdII")
OFFER = struct.Struct(f"<{DIGEST_SIZE}sI")

_Chunk: TypeAlias = tuple[Digest, int]


class _Head(NamedTuple):
    """The beginning of a rank's message in a round.

    Attributes:
        is_last: Whether the rank has hashed everything.
        asks: Whether the rank offers chunks in this round, to any rank.
        load: The bytes that the rank was given to write so far.
        idle: For how many seconds the rank has had work, but has hashed nothing.
        decided: How many decisions follow.
        offered: How many offers follow.
    """

    is_last: bool
    asks: bool
    load: int
    idle: float
    decided: int
    offered: int


class _Message:
    """One rank's message in a round, split into its parts."""

    def __init__(self, message: memoryview) -> None:
        self.head = _Head(*HEAD.unpack_from(message))
        offers = HEAD.size + self.head.decided
        parts = offers + self.head.offered * OFFER.size
        self.decisions = message[HEAD.size : offers]
        self.offers = message[offers:parts]
        self.parts = message[parts:]


class _Offer:
    """Chunks that a thread offers to write, since the store lacks them; later also the decision."""

    def __init__(self, chunks: list[tuple[Digest, int]]) -> None:
        self.chunks = chunks
        self.decision: list[bool] | None = None


class Decider:
    """Decides which rank writes a chunk, for the chunks whose digests select this rank.

    Args:
        rank: The rank that decides.
        size: The number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._decided: set[Digest] = set()

    def decide(self, loads: list[int], messages: Sequence[memoryview]) -> list[bytes]:
        """Choose one writer for each offered chunk, unless an earlier round has chosen it.

        Args:
            loads: The bytes that each rank was given to write so far.
            messages: The offers of each rank, packed.

        Returns:
            For each rank, one byte for each of its offers: 1 if the rank is to write that chunk.
        """
        holders: dict[Digest, list[tuple[int, int]]] = {}
        decisions, sizes = [], dict[Digest, int]()
        loads = list(loads)
        for rank, message in enumerate(messages):
            offers = list(unpacked(OFFER, message))
            decisions.append(bytearray(len(offers)))
            for i, (digest, nbytes) in enumerate(offers):
                if digest not in self._decided:
                    holders.setdefault(Digest(digest), []).append((rank, i))
                    sizes[digest] = nbytes
        for digest, of_ranks in holders.items():
            rank, i = min(of_ranks, key=lambda h: (loads[h[0]], (h[0] - self._rank) % self._size))
            decisions[rank][i] = 1
            # All ranks decide at the same time, from the same loads, and give away equally much.
            loads[rank] += self._size * sizes[digest]
            self._decided.add(digest)
        return [bytes(decision) for decision in decisions]


class Exchange:
    """Hashes the cells of one of several ranks: some threads hash, one talks to the other ranks.

    Args:
        comm: The ranks.
        crew: Starts the threads that hash.
        state: The state of this rank.
        division: How the ranks have divided the work.
    """

    def __init__(self, comm: Comm, crew: Crew, state: CapturedState, division: Division) -> None:
        self._comm = comm
        self._crew = crew
        shared = comm.share(SHARED_BYTES) if division.splits else not_shared(0, comm.size)
        self._split_cells = SplitCells(
            comm.rank, shared, division.leaf_ids, state.plans, state.grids, comm.largest_team
        )
        self._decider = Decider(comm.rank, comm.size)
        # While some threads wait for a decision, others hash. A waiting thread keeps a slot that is
        # filled in part, and some slots must be left. Ranks of one host share its cores.
        each = -(-cores() // comm.neighbours)
        threads = min(each + (2 if comm.neighbours == 1 else 1), SLOTS - 2)
        self._threads = crew.limited(threads)
        # How many threads still draw batches; still hash; and wait for other ranks.
        self._drawing = self._hashing = self._threads
        self._waiting = 0
        self._last_progress = time.monotonic()
        self._changed = threading.Condition()
        self._offers: list[_Offer] = []
        self._whole_cells: deque[Piece] = deque()
        self._all_parts_came = False
        self._load = 0

    def run(self, batches: Batches, hash_batches: Hash) -> None:
        """Hash on some threads, and hold rounds of messages until all ranks have hashed everything.

        Args:
            batches: Returns the batches of this rank's pieces.
            hash_batches: Hashes batches, on one thread.

        Raises:
            RankError: Another rank failed, died or hangs.
        """
        source = SharedItems(self._without_parts(batches(SLOT_BYTES)), self._crew)
        hashing: list[Worker] = []
        try:
            hashing = self._crew.start(
                lambda: hash_batches(self._with_whole_cells(source), self._select_share),
                self._threads,
            )
            self._hold_rounds()
        except BaseException as e:
            self._crew.fail(e)
            raise
        finally:
            # The caller may delete the packs next, so no thread may write after this.
            for thread in hashing:
                thread.wait()
            self._split_cells.close()
        self._crew.join(hashing)

    # --- the threads that hash ---

    def _without_parts(self, batches: Iterable[list[Piece]]) -> Iterator[list[Piece]]:
        """Yield each batch without its parts of split cells, which are queued to be sent.

        The parts of a batch are queued before the rest of it is yielded. So ``_split_cells`` has
        them if an error follows, and releases their memory.
        """
        for batch in batches:
            if batch:
                self._last_progress = time.monotonic()
            for piece in batch:
                if piece.part is not None:
                    self._split_cells.add(piece)
            yield [piece for piece in batch if piece.part is None]

    def _with_whole_cells(self, source: SharedItems[list[Piece]]) -> Iterator[list[Piece]]:
        """Yield the batches that one thread hashes: from ``source``, and cells joined from parts.

        Args:
            source: The batches of this rank's own pieces, shared by all threads.
        """
        try:
            for batch in source:
                yield batch
                while cells := self._take_whole_cells(wait_while=lambda: self._split_cells.is_full):
                    yield cells
            with self._changed:
                self._drawing -= 1
                if not self._drawing:
                    self._split_cells.finish()
                self._changed.notify_all()
            while not self._crew.failed and (
                cells := self._take_whole_cells(wait_while=lambda: not self._all_parts_came)
            ):
                yield cells
        finally:
            with self._changed:
                self._hashing -= 1
                self._changed.notify_all()
            if self._crew.failed:
                # Other threads may wait for the memory of the parts.
                self._split_cells.drop()

    def _take_whole_cells(self, wait_while: Callable[[], bool]) -> list[Piece]:
        """Return cells that this rank has put together. If there are none, wait for some.

        Threads must hash these cells first: until then other ranks cannot send more parts.

        Args:
            wait_while: Returns whether to go on waiting. If not, this method returns no cells.
        """

        def waits() -> bool:
            return not self._whole_cells and wait_while() and not self._crew.failed

        with self._changed:
            if waits():
                with self._waiting_for_ranks():
                    while waits():
                        self._changed.wait(_LOOK)
            if self._whole_cells:
                self._last_progress = time.monotonic()
            return [self._whole_cells.popleft() for _ in range(min(len(self._whole_cells), 16))]

    def _select_share(self, digests: list[Digest], sizes: list[int]) -> list[bool]:
        """Return, for each of some chunks that the store lacks, whether this rank is to write it.

        The call waits for the round in which the ranks decide.
        """
        offer = _Offer(list(zip(digests, sizes, strict=True)))
        with self._changed, self._waiting_for_ranks():
            self._offers.append(offer)
            self._changed.notify_all()
            while offer.decision is None:
                if self._crew.error is not None:
                    raise self._crew.error
                self._changed.wait(_LOOK)
        return offer.decision

    @contextmanager
    def _waiting_for_ranks(self) -> Iterator[None]:
        """Within this ``with`` block, count the calling thread as waiting for other ranks."""
        self._waiting += 1
        if self._waiting == self._hashing:
            self._changed.notify_all()
        yield
        self._waiting -= 1
        self._last_progress = time.monotonic()

    # --- the thread that talks ---

    def _hold_rounds(self) -> None:
        size = self._comm.size
        earlier, by_rank = list[_Offer](), [list[_Chunk]() for _ in range(size)]
        decisions, urgent = [b""] * size, False
        while True:
            offers, is_last = self._collect_offers(urgent)
            if self._crew.error is not None:
                raise self._crew.error
            messages, sorted_offers = self._messages(offers, decisions, is_last)
            received = [_Message(message) for message in self._comm.all_to_all(messages)]
            self._check_all_go_on([message.head.idle for message in received])
            self._settle(earlier, by_rank, [message.decisions for message in received])
            loads = [message.head.load for message in received]
            decisions = self._decider.decide(loads, [message.offers for message in received])
            earlier, by_rank = offers, sorted_offers
            # The offers of this round are decided in the next one, which should come soon.
            urgent = any(message.head.asks for message in received)
            if not self._all_parts_came:
                cells, over = self._split_cells.receive([message.parts for message in received])
                with self._changed:
                    self._whole_cells.extend(cells)
                    self._all_parts_came = over
                    self._changed.notify_all()
            if all(message.head.is_last for message in received):
                return

    def _collect_offers(self, urgent: bool) -> tuple[list[_Offer], bool]:
        """Return the offers of the threads so far, and whether there will be no more.

        Args:
            urgent: Whether to return at once, rather than wait a little for more offers.
        """
        now = time.monotonic()
        with self._changed:
            # Wait for more offers until all threads wait for other ranks; but not long, since other
            # ranks may wait for this one.
            while not urgent and self._waiting < self._hashing and not self._crew.failed:
                patience = _SHORT_PATIENCE if self._split_cells.has_news else _PATIENCE
                if (seconds := now + patience - time.monotonic()) <= 0:
                    break
                self._changed.wait(seconds)
            offers, self._offers = self._offers, []
            return offers, not self._hashing

    def _messages(
        self, offers: list[_Offer], decisions: list[bytes], is_last: bool
    ) -> tuple[list[memoryview], list[list[_Chunk]]]:
        """Make this rank's messages of a round.

        Args:
            offers: The chunks that this rank's threads offer.
            decisions: For each rank, the decisions about its offers of the round before.
            is_last: Whether this rank has hashed everything.

        Returns:
            For each rank, the message to it; and for each rank, the chunks offered to it, in order.
        """
        size = self._comm.size
        by_rank: list[list[_Chunk]] = [[] for _ in range(size)]
        for offer in offers:
            for chunk in offer.chunks:
                by_rank[int.from_bytes(chunk[0][:8], "big") % size].append(chunk)
        with self._changed:
            # The seconds for which this rank has had work, but has not gone on.
            busy = self._waiting < self._hashing
            idle = time.monotonic() - self._last_progress if busy else 0.0
        parts = [memoryview(b"")] * size
        if not self._all_parts_came:
            parts = self._split_cells.messages()
        # Among many ranks, most get the same message, which only says how this rank gets on.
        plain = memoryview(HEAD.pack(is_last, bool(offers), self._load, idle, 0, 0))
        messages = []
        for chunks, decided, part in zip(by_rank, decisions, parts, strict=True):
            if not (chunks or decided or part):
                messages.append(plain)
                continue
            head = HEAD.pack(is_last, bool(offers), self._load, idle, len(decided), len(chunks))
            offered = (OFFER.pack(*chunk) for chunk in chunks)
            messages.append(memoryview(bytearray().join([head, decided, *offered, part])))
        return messages, by_rank

    def _settle(
        self, offers: list[_Offer], by_rank: list[list[_Chunk]], decisions: list[memoryview]
    ) -> None:
        """Give the threads the decisions about the chunks that they offered in the round before.

        Args:
            offers: The offers.
            by_rank: For each rank, the chunks that were offered to it, in order.
            decisions: For each rank, its decisions about these chunks, a byte each.
        """
        mine = {
            chunk[0]
            for chunks, decision in zip(by_rank, decisions, strict=True)
            for chunk, writes in zip(chunks, decision, strict=True)
            if writes
        }
        with self._changed:
            for offer in offers:
                offer.decision = [digest in mine for digest, _ in offer.chunks]
                self._load += sum(n for digest, n in offer.chunks if digest in mine)
            self._changed.notify_all()

    def _check_all_go_on(self, idle: list[float]) -> None:
        """Check that no rank has stopped hashing, for example because its storage hangs.

        Such a rank still answers the others, so they do not notice it by a missed deadline.

        Args:
            idle: For how many seconds each rank has had work, but has hashed nothing.

        Raises:
            RankError: A rank has hashed nothing for longer than the timeout.
        """
        timeout = self._comm.timeout
        stuck = [rank for rank, seconds in enumerate(idle) if seconds > timeout]
        if stuck:
            raise RankError(
                f"{self._comm.operation}: {rank_names(stuck)} did not go on for {timeout:g} s "
                "(last seen hashing and writing)",
                tuple(stuck),
            )
