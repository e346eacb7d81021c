"""Collectives of the ranks of one operation: they carry errors, and they have a deadline.

A single process is a group of one. Several ranks are a :class:`casnap.ranks.group.Group`; an
operation begins with :func:`casnap.ranks.joining.join`.
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
    """The ranks that do one operation together; all call the same collectives in the same order.

    Attributes:
        rank: This rank, counted within the group.
        size: The number of ranks.
        ranks: The ranks of the group, as numbered in the default process group.
        operation: What the ranks do, for messages.
        timeout: Seconds that one rank waits for another.
        ended: Whether the operation has ended here, well or not.
        hosts: A number for each rank, which ranks of one host have in common; 0 if it is not known.
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
        """How many of the ranks are on the host of this one, itself included."""
        return self.hosts.count(self.hosts[self.rank])

    @property
    def largest_team(self) -> int:
        """How many ranks' parts go by one rank; who sends much at once, sends so much less."""
        return 1

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent in this operation."""
        return Traffic()

    # --- what each kind of communicator does its own way ---

    @abstractmethod
    def all_to_all(
        self, parts: Sequence[Buffer], room: memoryview | None = None, *, is_proven: bool = False
    ) -> list[memoryview]:
        """Send ``parts[i]`` to rank i; return what came from each. Sizes may differ, or be 0.

        Args:
            parts: The same object may go to several ranks; it is sent once where that is possible.
            room: Warm memory to receive into; used if everything that comes straight fits.
            is_proven: The receiver verifies the content itself, so it needs no checksum.

        Raises:
            RankError: Another rank failed, died or missed the deadline; or what came from it is
                not what it sent.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell all other ranks, at their next collective, that this rank has failed."""

    @abstractmethod
    def leave(self) -> None:
        """End the operation after the last collective; a later error stays on this rank."""

    @abstractmethod
    def enter_phase(self, phase: str) -> None:
        """Note what this rank does from now on, for the messages of others if it gets lost."""

    def resume(self, error: BaseException) -> bool:
        """Tell the other ranks of an error; go on with them if all that failed have such an error.

        Args:
            error: The error of this rank, which it may have heard of from others.

        Returns:
            Whether the operation goes on, on all ranks; if not, it has ended.
        """
        return True

    def background(self, number: int) -> Comm:
        """Return these ranks for the part of the operation that goes on in the background.

        It meets other operations in the background alone, so this one can end before that part
        begins; its turn comes when those before it have ended.

        Args:
            number: What tells this operation from others of its kind, the same on all ranks. If one
                rank skips an operation, it and the next one are not taken for one another.
        """
        return self

    def share(self, nbytes: int) -> SharedMemory:
        """Share memory with the ranks of this host; a collective.

        It is kept for later calls of this operation, and of later ones. The content is only what
        this operation wrote.

        Args:
            nbytes: How many bytes each rank gives, the same on all ranks.
        """
        return not_shared(nbytes, self.size)

    def await_end(self, rank: int) -> bool:
        """Wait until another rank has left this operation, well or not; return whether it has."""
        return self.rank == rank

    def check_not_abandoned(self) -> None:
        """Check that the other ranks have not given up on this one for being too slow.

        Raises:
            RankError: They have. This rank gives up, too.
        """
        return

    # --- bytes ---

    def all_gather(self, part: Buffer) -> list[memoryview]:
        """Return the part of every rank."""
        return self.all_to_all([part] * self.size)

    def gather(self, part: Buffer) -> list[memoryview]:
        """Return the part of every rank on rank 0, nothing elsewhere."""
        received = self.all_to_all([part, *[b""] * (self.size - 1)])
        return received if self.rank == 0 else []

    def scatter(self, parts: Sequence[Buffer] = ()) -> memoryview:
        """Return the one of rank 0's parts that is for this rank."""
        return self.all_to_all(parts if self.rank == 0 else [b""] * self.size)[0]

    def broadcast(self, part: Buffer = b"") -> memoryview:
        """Return rank 0's part."""
        return self.scatter([part] * self.size)

    # --- messages: msgspec structs; a rank's message to itself is not encoded ---

    def exchange_messages(self, messages: Sequence[M], kind: type[M]) -> list[M]:
        """Send ``messages[i]`` to rank i; return what came from each.

        What is the same for several ranks is sent once where that is possible.
        """
        known: dict[bytes, bytes] = {}
        encoded = (b"" if rank == self.rank else encode(m) for rank, m in enumerate(messages))
        parts = [known.setdefault(part, part) for part in encoded]
        return self._decoded(self.all_to_all(parts), messages[self.rank], kind)

    def gather_messages(self, message: M, kind: type[M]) -> list[M]:
        """Return the message of every rank on rank 0, nothing elsewhere."""
        received = self.gather(encode(message) if self.rank else b"")
        return self._decoded(received, message, kind)

    def broadcast_message(self, message: M | None, kind: type[M]) -> M:
        """Return the message of rank 0; the other ranks need not give any."""
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
        """Check that this rank was given the same as rank 0.

        Raises:
            StateError: It was not.
        """
        if on_this_rank != on_rank_0:
            raise StateError(
                f"{name} must be the same on all ranks: {on_rank_0} on rank 0, {on_this_rank} on "
                f"rank {self.rank}"
            )

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Run the beginning of an operation; an error in it is sent to all ranks and ends it."""
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
        """End the operation; an error is sent to the other ranks first."""
        try:
            if error is not None:
                self.fail(error)
        finally:
            self.leave()


class SingleProcess(Comm):
    """A group of one rank: it talks to itself, so nothing is sent."""

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
