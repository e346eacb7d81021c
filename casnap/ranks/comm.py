"""Collectives of the ranks that do one operation together, such as a take.

In a collective, each rank sends each other rank a *part*: some bytes, perhaps none. If a rank has
failed, the others get its error instead. Each collective has a deadline.

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

    :func:`~casnap.ranks.joining.join` returns a ``Comm``. If its ``with`` block ends with an error
    on one rank, the operation ends on all ranks: each other rank raises an error that names the
    failed rank.

    Attributes:
        rank: The number of this rank in the group.
        size: The number of ranks in the group.
        ranks: The numbers of the group's ranks in the default process group.
        operation: The operation in words, for messages, such as "the take of 'step_1'".
        timeout: The most seconds that one rank waits for another.
        ended: Whether the operation has ended on this rank, with or without an error.
        hosts: For each rank, the number of its host; 0 if the host is not known.
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
        """The number of ranks on this rank's host, this rank included."""
        return self.hosts.count(self.hosts[self.rank])

    @property
    def largest_team(self) -> int:
        """The number of ranks in the largest team; 1 without teams.

        One rank of a team passes on the bytes of all others. So with large teams, callers send
        fewer bytes at once, to spare the memory of that rank.
        """
        return 1

    @property
    def traffic(self) -> Traffic:
        """How much this rank has sent in this operation so far."""
        return Traffic()

    # --- what each subclass implements ---

    @abstractmethod
    def all_to_all(
        self, parts: Sequence[Buffer], room: memoryview | None = None, *, is_proven: bool = False
    ) -> list[memoryview]:
        """Send ``parts[i]`` to rank i; return the part that each rank sent to this rank.

        Args:
            parts: A part for each rank. If several ranks get the same object, it is sent once where
                the connections allow that.
            room: Memory to receive parts into, to save allocations. It is not used for parts that
                arrive by way of another rank, and not at all if the other parts do not fit.
            is_proven: Whether the receivers verify the parts themselves. Parts are then sent
                without a checksum.

        Raises:
            RankError: Another rank failed, died or missed the deadline; or a part was damaged on
                the way.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell all other ranks that this rank has failed.

        On each other rank, the next collective raises the error.
        """

    @abstractmethod
    def leave(self) -> None:
        """End the operation on this rank, after its last collective.

        The other ranks do not learn of a later error of this rank.
        """

    @abstractmethod
    def enter_phase(self, phase: str) -> None:
        """Note which phase this rank begins, in words.

        If this rank dies, the error on the other ranks names the phase.
        """

    def resume(self, error: BaseException) -> bool:
        """Agree with the other ranks, after an error, whether the operation goes on.

        It goes on if all failed ranks have errors of one type. This is a collective: each rank
        calls it with its own error, or with the error that it got from another rank.

        Args:
            error: The error.

        Returns:
            Whether the operation goes on, the same on all ranks. If it does not, it has ended.
        """
        return True

    def background(self, number: int) -> Comm:
        """Return a second ``Comm`` of these ranks, for the part of the operation in the background.

        The second ``Comm`` has its own connections. It waits until earlier operations in the
        background have ended. So this operation may end before its part in the background begins.

        Args:
            number: A number of the operation, the same on all ranks. If a rank has skipped an
                operation, the numbers differ, and the ranks raise an error.
        """
        return self

    def share(self, nbytes: int) -> SharedMemory:
        """Share memory with the ranks of this host. This is a collective.

        The ranks keep the memory for later calls and operations. So it may hold bytes of earlier
        operations: a rank must read only bytes that were written in this operation.

        Args:
            nbytes: The number of bytes that each rank gives; the same on all ranks.
        """
        return not_shared(nbytes, self.size)

    def await_end(self, rank: int) -> bool:
        """Wait until another rank has left this operation.

        Returns:
            Whether the rank has left; False if it died before, or the deadline has passed.
        """
        return self.rank == rank

    def check_not_abandoned(self) -> None:
        """Check that the other ranks have not ended the operation because this rank was too slow.

        Raises:
            RankError: The others have ended it. It has ended on this rank too.
        """
        return

    # --- bytes ---

    def all_gather(self, part: Buffer) -> list[memoryview]:
        """Send the same part to every rank; return the parts of all ranks."""
        return self.all_to_all([part] * self.size)

    def gather(self, part: Buffer) -> list[memoryview]:
        """Send a part to rank 0.

        Return the parts of all ranks on rank 0, and an empty list on others.
        """
        received = self.all_to_all([part, *[b""] * (self.size - 1)])
        return received if self.rank == 0 else []

    def scatter(self, parts: Sequence[Buffer] = ()) -> memoryview:
        """Send ``parts[i]`` from rank 0 to rank i, and return this rank's part.

        Other ranks pass no parts.
        """
        return self.all_to_all(parts if self.rank == 0 else [b""] * self.size)[0]

    def broadcast(self, part: Buffer = b"") -> memoryview:
        """Send the part of rank 0 to every rank, and return it. Other ranks pass no part."""
        return self.scatter([part] * self.size)

    # --- messages: msgspec structs; a rank's message to itself is not encoded ---

    def exchange_messages(self, messages: Sequence[M], kind: type[M]) -> list[M]:
        """Send ``messages[i]`` to rank i; return the messages that the ranks sent to this rank.

        Messages that are equal when encoded are sent as one object.

        Args:
            messages: A message for each rank.
            kind: The type of the messages.
        """
        known: dict[bytes, bytes] = {}
        encoded = (b"" if rank == self.rank else encode(m) for rank, m in enumerate(messages))
        parts = [known.setdefault(part, part) for part in encoded]
        return self._decoded(self.all_to_all(parts), messages[self.rank], kind)

    def gather_messages(self, message: M, kind: type[M]) -> list[M]:
        """Send a message to rank 0.

        Return all messages on rank 0, and an empty list on other ranks.
        """
        received = self.gather(encode(message) if self.rank else b"")
        return self._decoded(received, message, kind)

    def broadcast_message(self, message: M | None, kind: type[M]) -> M:
        """Send the message of rank 0 to every rank, and return it. Other ranks may pass None."""
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
        """Check that an argument of the operation is the same on this rank as on rank 0.

        Args:
            name: The name of the argument, for the error message.
            on_this_rank: The value on this rank.
            on_rank_0: The value on rank 0.

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
        """In a ``with`` block, end the operation on all ranks if this rank raises an error.

        Without an error, the operation goes on after the block.
        """
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
        """End the operation. If the block raised an error, the other ranks get it first."""
        try:
            if error is not None:
                self.fail(error)
        finally:
            self.leave()


class SingleProcess(Comm):
    """A process that does an operation alone. It sends nothing."""

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
