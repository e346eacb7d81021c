"""Several ranks that do one operation together, over a gloo group of casnap's own.

The ranks never use the trainer's process group (:mod:`casnap.ranks.link`). In each collective, the
ranks first tell each other the lengths of their parts. A rank that has failed sends that news
instead, whichever collective the others are in. Then all ranks raise its error, and can still use
the group.

A rank that is killed or hangs breaks the connections. The other ranks find out which rank is at
fault; the next operation makes a new gloo group.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TypeVar
from zlib import crc32

from casnap.errors import CasnapError, RankError, StateError
from casnap.format.decoding import decoder
from casnap.format.digest import digest_of
from casnap.format.names import rank_names
from casnap.format.records import encode
from casnap.ranks import gloo
from casnap.ranks.comm import Buffer, Comm
from casnap.ranks.failures import (
    ErrorText,
    Failure,
    LinkFailedError,
    damage_text,
    error_of_ranks,
    error_text,
)
from casnap.ranks.link import PATIENCE, Link
from casnap.ranks.shared_memory import Address, OwnMemory, SharedMemory, mapped
from casnap.ranks.topology import FAILED, Incoming, Outgoing, Traffic
from casnap.runtime.torch_modes import without_torch_modes
from casnap.runtime.typing import override

T = TypeVar("T")

_log = logging.getLogger("casnap")

# Seconds that ranks which could not be connected get to come again: some notice it late.
_AGAIN = 3 * PATIENCE


class Group(Comm):
    """Several ranks of a process group, for one operation.

    Args:
        link: The connection between the ranks. If another operation uses it, the constructor waits
            for the end of that operation.
        timeout: The most seconds that one rank waits for another.
        operation: The operation in words, for messages.
        number: For an operation in the background, a number that all ranks know; otherwise 0.
    """

    def __init__(self, link: Link, timeout: float, operation: str, number: int = 0) -> None:
        self._link = link
        link.acquire(id(self))
        self.rank, self.size, self.ranks = link.rank, link.size, link.ranks
        self.timeout = timeout
        self.operation = operation
        # Ranks may be given different names. The operation reports that itself, so leave them out.
        self._kind = crc32(f"{operation.partition(' of ')[0]} {number}".encode())
        self._phase = ""
        self._calls = 0
        transport = self._transport_before = link.transport
        self._sent_before = (
            (transport.messages, transport.nbytes) if transport is not None else (0, 0)
        )
        # The errors of ranks, which all ranks got while they were in step.
        self._errors: dict[int, ErrorText] = {}
        self.ended = False

    def __del__(self) -> None:
        # An interrupt can lose this object. The link must be free for the next operation.
        self.leave()

    @override
    def enter_phase(self, phase: str) -> None:
        self._phase = phase
        if self._calls:
            self._link.note_phase(phase)

    @override
    def await_end(self, rank: int) -> bool:
        return self._link.await_end(rank, self.timeout)

    @override
    def check_not_abandoned(self) -> None:
        failure = self._link.recorded_failure()
        if failure is not None and self.rank in failure.ranks:
            self.ended = True
            self._link.close()
            raise RankError(f"{self.operation}: {failure.reason}", failure.ranks)

    @override
    @without_torch_modes()
    def all_to_all(
        self, parts: Sequence[Buffer], room: memoryview | None = None, *, is_proven: bool = False
    ) -> list[memoryview]:
        if self.ended:
            raise StateError(f"{self.operation}: it has ended already")
        sums = [0] * self.size if is_proven else self._checksums(parts)
        told = self._exchange_in_step(parts, sums)
        if FAILED in told.sizes:
            self.ended = True
            self._forget_shared()
            self._errors = self._exchange_errors(told.sizes, b"")
            raise error_of_ranks(self.operation, self._errors)
        received = self._transfer(parts, told, room)
        if not is_proven:
            self._verify(received, told.sums)
        return received

    @override
    def background(self, number: int) -> Group:
        return Group(self._link.background(), self.timeout, self.operation, number)

    @property
    @override
    def largest_team(self) -> int:
        transport = self._link.transport
        return 1 if transport is None else transport.largest_team

    @property
    @override
    def hosts(self) -> Sequence[int]:  # type: ignore[override]
        return self._link.hosts

    @override
    def share(self, nbytes: int) -> SharedMemory:
        if not self._calls:
            self.all_gather(b"")  # before ranks meet, they do not know the hosts of each other
        shared = self._link.shared
        if shared is None or shared.nbytes < nbytes:
            shared = self._link.shared = self._newly_shared(nbytes)
        return shared

    def _newly_shared(self, nbytes: int) -> SharedMemory:
        memory: OwnMemory | None = None
        near = [self._link.is_near(rank) for rank in range(self.size)]
        if sum(near) > 1:
            # A system may refuse such memory. This rank then sends by sockets.
            with suppress(OSError):
                memory = OwnMemory(nbytes)
        address = memory.address if memory is not None else Address()
        nothing = Address()
        addresses = self.exchange_messages([address if n else nothing for n in near], Address)
        theirs = [
            mapped(address) if near[rank] and rank != self.rank else None
            for rank, address in enumerate(addresses)
        ]
        # Each rank tells the ranks near it whose memory it has found.
        finds = bytes(view is not None for view in theirs)
        rows = self.all_to_all([finds if n else b"" for n in near])
        if memory is not None:
            memory.close_descriptor()
        readers = [n and row[self.rank] == 1 for n, row in zip(near, rows, strict=True)]
        view = memory.view if memory is not None and any(readers) else memoryview(b"")
        self._link.memory = memory
        by_all = all(near) and all(sum(row) == self.size - 1 for row in rows)
        return SharedMemory(nbytes, view, theirs, readers, by_all)

    def _forget_shared(self) -> None:
        # The failure may have come in the middle of sharing, which then only some ranks finished.
        # So all ranks share anew in the next operation.
        self._link.shared = self._link.memory = None

    def _checksums(self, parts: Sequence[Buffer]) -> list[int]:
        """Return the checksum of each part.

        It is 0 for an empty part, and for the part to this rank.
        """
        sums, sums_by_id = [0] * self.size, dict[int, int]()
        for rank, part in enumerate(parts):
            if rank == self.rank or not len(part):
                continue
            # The same object may go to several ranks.
            if id(part) not in sums_by_id:
                sums_by_id[id(part)] = int.from_bytes(digest_of(part)[:8], "little", signed=True)
            sums[rank] = sums_by_id[id(part)]
        return sums

    def _verify(self, received: Sequence[memoryview], expected: list[int]) -> None:
        """Check received parts against the checksums that their senders computed.

        Args:
            received: The part of each rank.
            expected: The checksum that each rank sent.

        Raises:
            RankError: Some parts were damaged on their way.
        """
        bad = [rank for rank, s in enumerate(self._checksums(received)) if s != expected[rank]]
        if bad:
            raise RankError(f"{self.operation}: {damage_text(bad, self.rank)}", tuple(bad))

    @override
    @without_torch_modes()
    def fail(self, error: BaseException) -> None:
        if self.ended:
            return
        if self._calls:
            # A rank that is busy for longer finds the error in the process group's store.
            self.timeout = min(self.timeout, PATIENCE)
        text = error_text(error)
        with suppress(CasnapError):  # this rank raises its own error in any case
            told = self._exchange_in_step([b""] * self.size, [0] * self.size, text)
            self._errors = self._exchange_errors(told.sizes, encode(text))
        self._forget_shared()
        self.ended = True

    @override
    def resume(self, error: BaseException) -> bool:
        patience = self.timeout
        self.fail(error)
        self.timeout = patience
        errors, self._errors = self._errors, {}
        kinds = {rank_error.kind for rank_error in errors.values()}
        self.ended = kinds != {type(error).__name__}
        return not self.ended

    @property
    @override
    def traffic(self) -> Traffic:
        transport = self._link.transport
        if transport is None:
            return Traffic(self._calls)
        of_others = self._sent_before if transport is self._transport_before else (0, 0)
        return Traffic(
            self._calls, transport.messages - of_others[0], transport.nbytes - of_others[1]
        )

    @override
    def leave(self) -> None:
        if not self.ended and _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s: rank %d sent %s", self.operation, self.rank, self.traffic)
        self.ended = True
        self._link.release(id(self))

    # --- the steps of a collective ---

    def _exchange_in_step(
        self,
        parts: Sequence[Buffer],
        sums: list[int],
        error: ErrorText | None = None,
    ) -> Incoming:
        """Exchange parts with the other ranks; check that all ranks are in the same collective.

        Args:
            parts: The part for each rank.
            sums: The checksum of each part.
            error: The error of this rank, if it has failed. The other ranks learn here only that
                this rank has failed.

        Returns:
            The parts for this rank. For some parts only the length may have come;
            :meth:`_transfer` receives these parts.

        Raises:
            StateError: Some ranks are in another operation, or at another of its collectives.
        """
        told = self._exchange(parts, sums, error)
        astray = [rank for rank, step in enumerate(told.steps) if step != told.steps[self.rank]]
        if astray:
            # Every rank sees the mismatch, so all exchange the names of their operations.
            other = self._exchange_texts(self.operation.encode())[astray[0]].decode()
            self.ended = True
            raise StateError(
                f"{self.operation}: {rank_names(astray)} came to {other} meanwhile; all ranks of a "
                "process group must call the same operations in the same order"
            )
        return told

    def _exchange(
        self,
        parts: Sequence[Buffer],
        sums: list[int],
        error: ErrorText | None = None,
    ) -> Incoming:
        self._calls += 1
        # Ranks that do another operation, or are at another of its calls, have another step.
        step = (self._kind << 24) + self._calls
        outgoing = Outgoing(step, parts, sums, error is not None)

        def exchange(seconds: float) -> Incoming:
            return self._link.connected.exchange(outgoing, seconds)

        def talk() -> Incoming:
            is_first = self._calls == 1
            return self._first_exchange(exchange) if is_first else exchange(self.timeout)

        return self._communicate(talk, error)

    def _exchange_texts(self, mine: bytes) -> list[bytes]:
        """Send a text to all ranks; return the text of each rank."""
        parts = [mine] * self.size
        told = self._exchange(parts, [0] * self.size)
        return [bytes(text) for text in self._transfer(parts, told)]

    def _exchange_errors(self, sizes: list[int], mine: bytes) -> dict[int, ErrorText]:
        """Exchange errors between all ranks; return the error of each failed rank.

        Args:
            sizes: The length that each rank has announced; ``FAILED`` if the rank has failed.
            mine: The encoded error of this rank; empty if it has not failed.
        """
        texts = self._exchange_texts(mine)
        return {
            rank: decoder(ErrorText).decode(texts[rank])
            for rank, size in enumerate(sizes)
            if size == FAILED and len(texts[rank])
        }

    def _first_exchange(self, exchange: Callable[[float], T]) -> T:
        """Do the first exchange of the operation, and make a new gloo group if that is needed.

        The last operation's gloo group is used if it is whole. If it broke in an earlier operation,
        all ranks make a new one.

        Args:
            exchange: The exchange, given how many seconds to wait for other ranks.
        """
        until = time.monotonic() + self.timeout
        phase = self._phase or f"beginning {self.operation}"
        if self._link.transport is not None:
            self._link.begin(self.operation, phase)
            try:
                with self._link.warning_of_absent(self.operation, self.timeout):
                    return exchange(self.timeout)
            except RuntimeError:
                if time.monotonic() >= until or not self._link.broke_before():
                    raise
        patience, limit = max(0.0, until - time.monotonic()), self.timeout
        for is_last in (False, False, True):
            try:
                self._link.connect(patience, limit, self.operation, phase)
                # All ranks are here now.
                return exchange(min(self.timeout, max(PATIENCE, until - time.monotonic())))
            except RuntimeError as e:
                if not self._link.is_apart():
                    raise
                # On a busy machine gloo may fail to connect ranks. All of them then try again.
                patience = limit = min(_AGAIN, until - time.monotonic())
                if is_last or patience <= 0:
                    self._link.close()
                    reason = f"the ranks could not be connected: {e}"
                    raise LinkFailedError(Failure((), reason)) from e
        raise AssertionError

    def _transfer(
        self, parts: Sequence[Buffer], told: Incoming, room: memoryview | None = None
    ) -> list[memoryview]:
        """Send and receive the parts that were only announced; return the parts of all ranks.

        Args:
            parts: The part of this rank for each rank.
            told: The result of the exchange that announced the parts.
            room: Memory to receive into. It is used if all announced parts fit into it.
        """
        coming = {rank: told.sizes[rank] for rank, part in enumerate(told.parts) if part is None}
        if room is None or sum(coming.values()) > len(room):
            buffers = {rank: memoryview(bytearray(nbytes)) for rank, nbytes in coming.items()}
        else:
            ends = accumulate(coming.values())
            buffers = {
                rank: room[end - nbytes : end]
                for (rank, nbytes), end in zip(coming.items(), ends, strict=True)
            }
        others = [rank for rank, part in enumerate(parts) if len(part) and rank != self.rank]
        if buffers or others:
            # The same object may go to several ranks.
            outgoing = {id(parts[rank]): parts[rank] for rank in others}
            tensors = {key: gloo.as_tensor(part) for key, part in outgoing.items()}
            self._communicate(
                lambda: self._link.connected.transfer(
                    {rank: tensors[id(parts[rank])] for rank in others},
                    {rank: gloo.as_tensor(into) for rank, into in buffers.items()},
                    self.timeout,
                )
            )
        return [buffers[rank] if part is None else part for rank, part in enumerate(told.parts)]

    def _communicate(self, talk: Callable[[], T], error: ErrorText | None = None) -> T:
        """Call a function that communicates with other ranks. If it fails, find the rank at fault.

        Args:
            talk: The function.
            error: The error that this rank is about to report, if it has failed.

        Raises:
            RankError: The communication failed. The error names the ranks at fault.
        """
        began = time.monotonic()
        try:
            return talk()
        except LinkFailedError as e:
            self.ended = True
            raise RankError(f"{self.operation}: {e.failure.reason}", e.failure.ranks) from None
        except RuntimeError as e:
            self.ended = True
            seconds = time.monotonic() - began
            failure = self._link.find_cause(error, seconds, is_late=seconds >= 0.9 * self.timeout)
            if failure.error is not None:
                raise error_of_ranks(self.operation, {failure.ranks[0]: failure.error}) from e
            raise RankError(f"{self.operation}: {failure.reason}", failure.ranks) from e
        except BaseException as e:
            # An interrupt: this rank is out of step now.
            self.ended = True
            self._link.find_cause(error_text(e), 0, is_late=False)
            raise
