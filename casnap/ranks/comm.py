"""Collectives of the ranks that do one operation. They carry errors, and have a deadline.

:func:`casnap.ranks.joining.join` begins an operation. A process without other ranks gets a
:class:`SingleProcess`; several ranks get a :class:`casnap.ranks.group.Group`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from casnap.errors import StateError
from casnap.format.decoding import decoder
from casnap.format.records import encode
from casnap.ranks.shared_memory import SharedMemory, not_shared
from casnap.ranks.topology import Traffic
from casnap.runtime.typing import override

M = TypeVar("M")
Buffer = bytes | memoryview

DEFAULT_TIMEOUT = 600.0


class Comm(ABC):
    """The ranks that do one operation together. All call the same collectives in the same order.

    :func:`~casnap.ranks.joining.join` returns one. In a ``with`` block, an error of one rank ends
    the operation on all ranks: each of the others raises a ``RankError`` that names it.

    Attributes:
        rank: The number of this rank in the group.
        size: The number of ranks.
        ranks: The numbers of the group's ranks in the default process group.
        operation: The operation in words, for messages, such as "the take of 'step_1'".
        timeout: Seconds that one rank waits for another.
        ended: Whether the operation has ended on this rank, with or without an error.
        hosts: The number of each rank's host; 0 if a host is not known.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    operation = ""
    timeout = DEFAULT_TIMEOUT
    ended = False
    hosts: Sequence[int] = (0,)

    @property
    def neighbours(self) -> int:
        """How many ranks are on this rank's host, this rank included."""
        return self.hosts.count(self.hosts[self.rank])

    @property
    def largest_team(self) -> int:
        """The most ranks whose parts one rank passes on: if many, send fewer bytes at once."""
        return 1

    @property
    def traffic(self) -> Traffic:
        """The messages and bytes that this rank has sent in this operation."""
        return Traffic()

    # --- what each subclass implements ---

    @abstractmethod
    def all_to_all(
        self, parts: Sequence[Buffer], room: memoryview | None = None, *, is_proven: bool = False
    ) -> list[memoryview]:
        """Send ``parts[i]`` to rank i; return the part that each rank sent to this rank.

        Args:
            parts: A part for each rank. Their lengths may differ, or be 0. An object that goes to
                several ranks is sent once where that is possible.
            room: Memory to receive into. It is used if all parts that come straight from their
                ranks fit into it.
            is_proven: Whether the receiver verifies the content itself, so that the parts need no
                checksum.

        Raises:
            RankError: Another rank failed, died or missed the deadline; or a part was damaged on
                its way.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell all other ranks that this rank has failed. Their next collective raises an error."""

    @abstractmethod
    def leave(self) -> None:
        """End the operation after its last collective. A later error stays on this rank."""

    @abstractmethod
    def enter_phase(self, phase: str) -> None:
        """Note the phase that this rank begins. If this rank dies, other ranks name the phase."""

    def resume(self, error: BaseException) -> bool:
        """Tell the other ranks of an error; go on if all failed ranks have errors of one type.

        Args:
            error: The error of this rank, or the one that it got from another rank.

        Returns:
            Whether the operation goes on, on all ranks. Else it has ended.
        """
        return True

    def background(self, number: int) -> Comm:
        """Return the same ranks for the part of the operation that runs in the background.

        Operations in the background have connections of their own, and run one after the other. So
        this operation can end before its part in the background begins.

        Args:
            number: A number of the operation, the same on all ranks. If a rank skips an operation,
                the numbers show it.
        """
        return self

    def share(self, nbytes: int) -> SharedMemory:
        """Share memory with the ranks of this host. This is a collective.

        The memory is kept for later calls, of later operations too. So it may hold bytes of earlier
        operations: read only what this operation wrote.

        Args:
            nbytes: How many bytes each rank gives; the same on all ranks.
        """
        return not_shared(nbytes, self.size)

    def await_end(self, rank: int) -> bool:
        """Wait until another rank has left this operation; return False if it died before that."""
        return self.rank == rank

    def check_not_abandoned(self) -> None:
        """Check that the other ranks have not given up on this rank for being too slow.

        Raises:
            RankError: They have given up. The operation has ended here too.
        """
        return

    # --- bytes ---

    def all_gather(self, part: Buffer) -> list[memoryview]:
        """Return the part of every rank."""
        return self.all_to_all([part] * self.size)

    def gather(self, part: Buffer) -> list[memoryview]:
        """Return the part of every rank on rank 0, and nothing on other ranks."""
        received = self.all_to_all([part, *[b""] * (self.size - 1)])
        return received if self.rank == 0 else []

    def scatter(self, parts: Sequence[Buffer] = ()) -> memoryview:
        """Send ``parts[i]`` from rank 0 to rank i; return the part for this rank."""
        return self.all_to_all(parts if self.rank == 0 else [b""] * self.size)[0]

    def broadcast(self, part: Buffer = b"") -> memoryview:
        """Return rank 0's part."""
        return self.scatter([part] * self.size)

    # --- messages: msgspec structs; a rank's message to itself is not encoded ---

    def exchange_messages(self, messages: Sequence[M], kind: type[M]) -> list[M]:
        """Send ``messages[i]`` to rank i; return the message of each rank to this rank.

        Equal messages to several ranks are sent once where that is possible.
        """
        known: dict[bytes, bytes] = {}
        encoded = (b"" if rank == self.rank else encode(m) for rank, m in enumerate(messages))
        parts = [known.setdefault(part, part) for part in encoded]
        return self._decoded(self.all_to_all(parts), messages[self.rank], kind)

    def gather_messages(self, message: M, kind: type[M]) -> list[M]:
        """Return the message of every rank on rank 0, and nothing on other ranks."""
        received = self.gather(encode(message) if self.rank else b"")
        return self._decoded(received, message, kind)

    def broadcast_message(self, message: M | None, kind: type[M]) -> M:
        """Return the message of rank 0. The other ranks may pass None."""
        if self.rank == 0:
            assert message is not None
            self.broadcast(encode(message) if self.size > 1 else b"")
            return message
        return decoder(kind).decode(self.broadcast())

    def _decoded(self, received: Sequence[memoryview], mine: M, kind: type[M]) -> list[M]:
        decode = decoder(kind).decode
        return [mine if rank == self.rank else decode(part) for rank, part in enumerate(received)]

    # --- agreeing, and ending ---

    def check_same(self, name: str, on_this_rank: object, on_rank_0: object) -> None:
        """Check that an argument is the same on this rank as on rank 0.

        Args:
            name: The name of the argument, for the message.
            on_this_rank: The value here.
            on_rank_0: The value there.

        Raises:
            StateError: The values differ.
        """
        if on_this_rank != on_rank_0:
            raise StateError(
                f"{name} must be the same on all ranks: {on_rank_0} on rank 0, {on_this_rank} on "
                f"rank {self.rank}"
            )

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Run the beginning of an operation. An error goes to all ranks, and ends it there too."""
        try:
            yield
        except BaseException as e:
            self.__exit__(type(e), e, None)
            raise

    def __enter__(self) -> Comm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End the operation. Before that, an error goes to the other ranks."""
        try:
            if error is not None:
                self.fail(error)
        finally:
            self.leave()


class SingleProcess(Comm):
    """A group of one rank. Nothing is sent."""

    rank, size, ranks = 0, 1, (0,)

    @override
    def all_to_all(
        self, parts: Sequence[Buffer], room: memoryview | None = None, *, is_proven: bool = False
    ) -> list[memoryview]:
        return [memoryview(parts[0])]

    @override
    def fail(self, error: BaseException) -> None:
        pass  # there is no other rank, here and below

    @override
    def leave(self) -> None:
        pass

    @override
    def enter_phase(self, phase: str) -> None:
        pass
