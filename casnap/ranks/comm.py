"""What the ranks of one operation tell each other: collectives that carry errors, with a deadline.

All run on a gloo group of casnap's own (:mod:`casnap.ranks.link`), never on the trainer's. Each
begins by telling all others how much follows. A rank that has failed tells them that instead,
whichever collective they are in; so an error on one rank is raised on all, and the group stays in
step. A rank that is killed or hangs breaks the group: whoever waits for it hears of that from gloo,
finds out who is at fault, and the next operation makes a new group.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate
from types import TracebackType
from typing import Any
from zlib import crc32

import msgspec
import torch
import torch.distributed as dist

from casnap import errors
from casnap.errors import CasnapError, RankError, StateError
from casnap.format.digest import digest_of
from casnap.format.records import encode
from casnap.ranks.link import PATIENCE, Link, LostError, Said, ranks_named
from casnap.runtime.torch_modes import plain
from casnap.runtime.typing import override

Part = bytes | memoryview

_FAILED = -1
DEFAULT_TIMEOUT = 600.0


class Comm(ABC):
    """The ranks that do one thing together; all call the same collectives in the same order.

    Attributes:
        rank: Who this is, counted within the group.
        size: How many there are.
        ranks: Who they are in the default process group.
        doing: What they do, for messages.
        timeout: Seconds that one rank waits for another.
        over: Whether it has ended, well or not.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    doing = ""
    timeout = DEFAULT_TIMEOUT
    over = False

    @abstractmethod
    def all_to_all(
        self, parts: Sequence[Part], room: memoryview | None = None, *, proven: bool = False
    ) -> list[memoryview]:
        """Send ``parts[i]`` to rank i; return what came from each. Sizes may differ, or be 0.

        Args:
            parts: The same object may go to several ranks; it is not copied.
            room: Warm memory for what comes from others, used if all of that fits.
            proven: Whoever receives it proves it by itself, so it needs no checksum.

        Raises:
            RankError: Another rank failed, is gone, or was not heard of within the deadline; or
                what came from it is not what it sent.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell all others, at their next collective, that this rank has failed."""

    @abstractmethod
    def leave(self) -> None:
        """End the operation, after the last collective; a later error is this rank's own."""

    @abstractmethod
    def at(self, phase: str) -> None:
        """Note what this rank does now, so that others can say where it was lost."""

    def await_end(self, rank: int) -> bool:
        """Wait until another rank has left this operation, well or not; return whether it has."""
        return self.rank == rank

    def check_awaited(self) -> None:
        """Raise if the other ranks have given up on this one, since it stood still for too long.

        Raises:
            RankError: They have, and so has this rank now.
        """
        return

    def all_gather(self, part: Part) -> list[memoryview]:
        """Return the part of every rank."""
        return self.all_to_all([part] * self.size)

    def gather(self, part: Part) -> list[memoryview]:
        """Return the part of every rank on rank 0, nothing elsewhere."""
        got = self.all_to_all([part, *[b""] * (self.size - 1)])
        return got if self.rank == 0 else []

    def scatter(self, parts: Sequence[Part] = ()) -> memoryview:
        """Return that one of rank 0's parts that is for this rank."""
        return self.all_to_all(parts if self.rank == 0 else [b""] * self.size)[0]

    def broadcast(self, part: Part = b"") -> memoryview:
        """Return rank 0's part."""
        return self.scatter([part] * self.size)

    def check_same(self, what: str, here: object, there: object) -> None:
        """Check that this rank was given what rank 0 was, which was broadcast.

        Raises:
            StateError: It was not.
        """
        if here != there:
            raise StateError(
                f"{what} must be the same on all ranks: {there} on rank 0, {here} on rank "
                f"{self.rank}"
            )

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Do something that the operation begins with; an error ends it."""
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
        """End the operation; an error is told to the others first."""
        try:
            if error is not None:
                self.fail(error)
        finally:
            self.leave()


class Alone(Comm):
    """A single process."""

    rank, size, ranks = 0, 1, (0,)

    @override
    def all_to_all(
        self, parts: Sequence[Part], room: memoryview | None = None, *, proven: bool = False
    ) -> list[memoryview]:
        return [memoryview(parts[0])]

    @override
    def fail(self, error: BaseException) -> None:
        """There is nobody to be told."""

    @override
    def leave(self) -> None:
        """There is nobody to be left."""

    @override
    def at(self, phase: str) -> None:
        """There is nobody to be told."""


class Group(Comm):
    """Ranks of a process group, for one operation.

    Args:
        link: What connects them; an operation that still uses it ends first.
        timeout: Seconds that one rank waits for another.
        doing: What they do, for messages.
    """

    def __init__(self, link: Link, timeout: float, doing: str) -> None:
        self._link = link
        link.hold(id(self))
        self.rank, self.size, self.ranks = link.rank, link.size, link.ranks
        self.timeout = timeout
        self.doing = doing
        self._phase = ""
        self._calls = 0
        self.over = False

    def __del__(self) -> None:
        # Whoever lost it, by an interrupt, would lock out all others.
        self.leave()

    @override
    def at(self, phase: str) -> None:
        self._phase = phase
        if self._calls:
            self._link.note("at", phase)

    @override
    def await_end(self, rank: int) -> bool:
        return self._link.await_end(rank, self.timeout)

    @override
    def check_awaited(self) -> None:
        lost = self._link.verdict()
        if lost is not None and self.rank in lost.ranks:
            self.over = True
            self._link.close()
            raise RankError(f"{self.doing}: {lost.why}", lost.ranks)

    @override
    @plain()
    def all_to_all(
        self, parts: Sequence[Part], room: memoryview | None = None, *, proven: bool = False
    ) -> list[memoryview]:
        if self.over:
            raise StateError(f"{self.doing}: it has ended already")
        sums = [0] * self.size if proven else self._checksums(parts)
        sizes, expected = self._sizes([len(part) for part in parts], sums)
        if _FAILED in sizes:
            self.over = True
            raise as_error(self.doing, self._errors(sizes, b""))
        came = self._carry(parts, sizes, room)
        if not proven:
            self._check(came, expected)
        return came

    def _checksums(self, parts: Sequence[Part]) -> list[int]:
        """Return a number for each part that goes to, or came from, another rank."""
        sums, known = [0] * self.size, dict[int, int]()
        for rank, part in enumerate(parts):
            if rank == self.rank:
                continue
            # The same object may go to several ranks.
            if id(part) not in known:
                known[id(part)] = int.from_bytes(digest_of(part)[:8], "little", signed=True)
            sums[rank] = known[id(part)]
        return sums

    def _check(self, came: Sequence[memoryview], expected: list[int]) -> None:
        """Check that what came is what was sent."""
        bad = [rank for rank, s in enumerate(self._checksums(came)) if s != expected[rank]]
        if bad:
            raise RankError(
                f"{self.doing}: what {ranks_named(bad)} sent came damaged to rank {self.rank}, so "
                "it was not used; a network card or some memory may be at fault",
                tuple(bad),
            )

    @override
    @plain()
    def fail(self, error: BaseException) -> None:
        if self.over:
            return
        if self._calls:
            # Those who are busy for longer read it where they find nobody any more.
            self.timeout = min(self.timeout, PATIENCE)
        said = told(error)
        with suppress(CasnapError):  # the own error is raised, whether or not all hear of it
            sizes, _ = self._sizes([_FAILED] * self.size, [0] * self.size, said)
            self._errors(sizes, encode(said))
        self.over = True

    @override
    def leave(self) -> None:
        self.over = True
        self._link.free(id(self))

    # --- talking ---

    def _sizes(
        self, sizes: list[int], sums: list[int], told: Said | None = None
    ) -> tuple[list[int], list[int]]:
        """Tell each rank how much follows, or that nothing will, and its checksum.

        Returns:
            What they tell.
        """
        told_sizes, told_sums, steps = self._exchange(sizes, sums, told)
        astray = [rank for rank, step in enumerate(steps) if step != steps[self.rank]]
        if astray:
            # Everybody sees that, so all say what they do.
            what = self._texts(self.doing.encode())[astray[0]].decode()
            self.over = True
            raise StateError(
                f"{self.doing}: {ranks_named(astray)} came to {what} meanwhile; all ranks of a "
                "process group must call the same operations in the same order"
            )
        return told_sizes, told_sums

    def _exchange(
        self, sizes: list[int], sums: list[int], told: Said | None = None
    ) -> tuple[list[int], list[int], list[int]]:
        """Tell each rank two numbers, and where this one is; return what they tell."""
        self._calls += 1
        # Who does something else would take what comes for what it is not.
        step = (crc32(self.doing.partition(" of ")[0].encode()) << 24) + self._calls
        said = [[*numbers, step] for numbers in zip(sizes, sums, strict=True)]
        mine = torch.tensor(said, device="cpu")
        theirs = torch.empty_like(mine)

        def exchange(seconds: float) -> None:
            options = dist.AllToAllOptions()
            options.timeout = timedelta(seconds=seconds)
            self._link.pg.alltoall_base(theirs, mine, [], [], options).wait()

        if self._calls == 1:
            self._talk(lambda: self._meet(exchange), told)
        else:
            self._talk(lambda: exchange(self.timeout), told)
        return theirs[:, 0].tolist(), theirs[:, 1].tolist(), theirs[:, 2].tolist()

    def _texts(self, mine: bytes) -> list[bytes]:
        """Return what each rank says."""
        lengths, _, _ = self._exchange([len(mine)] * self.size, [0] * self.size)
        return [bytes(text) for text in self._carry([mine] * self.size, lengths)]

    def _meet(self, exchange: Callable[[float], None]) -> None:
        """Talk for the first time, in the group of the operation before or in a new one."""
        until = time.monotonic() + self.timeout
        phase = self._phase or f"beginning {self.doing}"
        if self._link.pg is not None:
            self._link.begin(self.doing, phase)
            try:
                return exchange(self.timeout)
            except RuntimeError:
                if time.monotonic() >= until or not self._link.broke_before():
                    raise
        left = max(0.0, until - time.monotonic())
        self._link.connect(left, self.timeout, self.doing, phase)
        # All are here now.
        return exchange(min(self.timeout, max(PATIENCE, until - time.monotonic())))

    def _carry(
        self, parts: Sequence[Part], sizes: list[int], room: memoryview | None = None
    ) -> list[memoryview]:
        """Send and receive, each size being known."""
        theirs = [0 if rank == self.rank else size for rank, size in enumerate(sizes)]
        if room is None or sum(theirs) > len(room):
            got = [memoryview(bytearray(size)) for size in theirs]
        else:
            ends = accumulate(theirs)
            got = [room[end - size : end] for size, end in zip(theirs, ends, strict=True)]
        got[self.rank] = memoryview(parts[self.rank])
        pg, wait = self._link.pg, timedelta(seconds=self.timeout)
        tensors: dict[int, torch.Tensor] = {}

        def carry() -> None:
            # In another order on each rank, so that they do not all talk to the same one.
            order = [(self.rank + i) % self.size for i in range(1, self.size)]
            works = [pg.recv([_as_tensor(got[i])], i, 0) for i in reversed(order) if theirs[i]]
            for i in order:
                if len(parts[i]):
                    if id(parts[i]) not in tensors:
                        tensors[id(parts[i])] = _as_tensor(parts[i])
                    works.append(pg.send([tensors[id(parts[i])]], i, 0))
            for work in works:
                work.wait(wait)

        self._talk(carry)
        return got

    def _talk(self, talk: Callable[[], None], said: Said | None = None) -> None:
        """Talk; where that fails, find out who is at fault, and raise."""
        began = time.monotonic()
        try:
            talk()
        except LostError as e:
            self.over = True
            raise RankError(f"{self.doing}: {e.lost.why}", e.lost.ranks) from None
        except RuntimeError as e:
            self.over = True
            waited = time.monotonic() - began
            lost = self._link.mourn(said, waited, late=waited >= 0.9 * self.timeout)
            if lost.told is not None:
                raise as_error(self.doing, {lost.ranks[0]: lost.told}) from e
            raise RankError(f"{self.doing}: {lost.why}", lost.ranks) from e
        except BaseException as e:
            # An interrupt: this rank is out of step now.
            self.over = True
            self._link.mourn(told(e), 0, late=False)
            raise

    def _errors(self, sizes: list[int], mine: bytes) -> dict[int, Said]:
        """Hear what went wrong on the ranks that said so."""
        texts = self._texts(mine)
        return {
            rank: msgspec.msgpack.decode(texts[rank], type=Said)
            for rank, size in enumerate(sizes)
            if size == _FAILED and len(texts[rank])
        }


def _as_tensor(part: Part) -> torch.Tensor:
    # Torch warns of memory that may not be written to, though it is only read here.
    writable = part if isinstance(part, memoryview) and not part.readonly else bytearray(part)
    return torch.frombuffer(writable, dtype=torch.uint8)


def told(error: BaseException) -> Said:
    """Return what other ranks are told of an error: its type and what it says."""
    return type(error).__name__, str(error)


def as_error(doing: str, heard: dict[int, Said]) -> CasnapError:
    """Return the error of another rank as it is raised here: of the same type if it is casnap's."""
    rank, (name, text) = min(heard.items())
    kind = getattr(errors, name, None)
    if kind is RankError:
        return RankError(text, tuple(heard))
    if isinstance(kind, type) and issubclass(kind, CasnapError):
        return kind(f"rank {rank}: {text}")
    also = [r for r in heard if r != rank]
    others = f" (and {ranks_named(also)})" if also else ""
    return RankError(f"{doing}: rank {rank} failed{others}: {name}: {text}", tuple(heard))


_links: dict[tuple[int, ...], Link] = {}
# The parent's connections are not the child's.
os.register_at_fork(after_in_child=_links.clear)


def join(pg: Any, timeout: float | None, doing: str) -> Comm:
    """Begin something that all ranks of a process group do together.

    Args:
        pg: The process group; None for the world, or for this process alone where
            ``torch.distributed`` is not initialised.
        timeout: Seconds that one rank waits for another; None for ten minutes.
        doing: What is begun, for messages.

    Raises:
        StateError: This process is not in the group.
    """
    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    if not timeout > 0:
        raise ValueError(f"timeout is a number of seconds above 0, not {timeout!r}")
    if not (dist.is_available() and dist.is_initialized()):
        if pg is not None:
            raise StateError("pg= needs torch.distributed.init_process_group() first")
        return Alone()
    if pg is dist.GroupMember.NON_GROUP_MEMBER:
        raise StateError("this process is not in the process group pg; only its members take part")
    if pg is not None and not isinstance(pg, dist.ProcessGroup):
        raise StateError(
            f"pg= is a process group, as of torch.distributed.new_group(); got a "
            f"{type(pg).__name__}, which is no process group (of a mesh, pass mesh.get_group())"
        )
    ranks = tuple(dist.get_process_group_ranks(pg))
    if len(ranks) == 1:
        return Alone()
    home, rank = dist.distributed_c10d._get_default_group(), ranks.index(dist.get_rank())
    for known in [known for known, link in _links.items() if link.home is not home]:
        # Of a world that is gone: its group would keep two threads for ever.
        del _links[known]
    link = _links.get(ranks)
    if link is None:
        link = _links[ranks] = Link(home, dist.distributed_c10d._get_default_store(), ranks, rank)
    return Group(link, timeout, doing)
