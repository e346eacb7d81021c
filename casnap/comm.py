"""What the ranks of one operation tell each other: collectives that carry errors, with a deadline.

All run on a gloo group of casnap's own, made through the store of the default process group, and
never on the trainer's. Each begins by telling all others how much follows. A rank that has failed
tells them that instead, whichever collective they are in; so an error on one rank is raised on
all, and the group stays in step. A rank that is killed or hangs breaks the group: whoever waits
for it hears of that from gloo, says so to the others, and the next operation makes a new group.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist

from casnap import errors
from casnap.digest import digest_of
from casnap.errors import CasnapError, RankError, StateError
from casnap.format import encode

T = TypeVar("T")
Part = bytes | memoryview

_FAILED = -1
_POLL = (0.001, 0.05)
# Seconds that survivors wait for each other to say that they live, before they name the dead.
_PATIENCE = 10.0
DEFAULT_TIMEOUT = 600.0


class Comm(ABC):
    """The ranks that do one thing together; all call the same collectives in the same order.

    Attributes:
        rank: Who this is, counted within the group.
        size: How many there are.
    """

    rank: int
    size: int
    over = False
    """Whether it has ended, well or not."""

    @abstractmethod
    def all_to_all(self, parts: Sequence[Part], room: memoryview | None = None) -> list[memoryview]:
        """Send ``parts[i]`` to rank i; return what came from each. Sizes may differ, or be 0.

        Args:
            parts: The same object may go to several ranks; it is not copied.
            room: Warm memory for what comes from others, used if all of that fits.

        Raises:
            RankError: Another rank failed, is gone, or was not heard of within the deadline.
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

    rank, size = 0, 1

    def all_to_all(self, parts: Sequence[Part], room: memoryview | None = None) -> list[memoryview]:
        """Return the one part."""
        return [memoryview(parts[0])]

    def fail(self, error: BaseException) -> None:
        """There is nobody to be told."""

    def leave(self) -> None:
        """There is nobody to be left."""

    def at(self, phase: str) -> None:
        """There is nobody to be told."""


class Group(Comm):
    """Ranks of a process group, for one operation."""

    def __init__(self, link: _Link, timeout: float, doing: str) -> None:
        self.rank, self.size = link.rank, len(link.ranks)
        self._link = link
        self._timeout = timeout
        self._doing = doing
        self._phase = ""
        self._first = True
        self.over = False

    def at(self, phase: str) -> None:
        """Note what this rank does now, so that others can say where it was lost."""
        self._phase = phase
        if self._link.connected:
            with suppress(Exception):
                self._link.note("at", phase)

    def all_to_all(self, parts: Sequence[Part], room: memoryview | None = None) -> list[memoryview]:
        """Send ``parts[i]`` to rank i; return what came from each."""
        if self.over:
            raise StateError(f"{self._doing}: it has ended already")
        sizes = self._sizes([len(part) for part in parts])
        if _FAILED in sizes:
            self._raise_theirs(sizes)
        return self._carry(parts, sizes, room)

    def fail(self, error: BaseException) -> None:
        """Tell all others, at their next collective, that this rank has failed."""
        if self.over:
            return
        said = told(error)
        with suppress(RankError):  # the own error is raised, whether or not all others hear of it
            sizes = self._sizes([_FAILED] * self.size, said)
            self._errors(sizes, encode(said))
        self.over = True

    def leave(self) -> None:
        """End the operation, after the last collective; a later error is this rank's own."""
        self.over = True
        self._link.free(self)

    def _sizes(self, sizes: list[int], told: tuple[str, str] | None = None) -> list[int]:
        mine, theirs = torch.tensor(sizes), torch.empty(self.size, dtype=torch.int64)
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=self._timeout)

        def exchange() -> None:
            self._link.pg.alltoall_base(theirs, mine, [], [], options).wait()

        if self._first:
            self._begin(exchange, told)
        else:
            self._guarded(exchange, told)
        return theirs.tolist()

    def _begin(self, exchange: Callable[[], None], told: tuple[str, str] | None) -> None:
        """Talk for the first time, in the group of the last operation or in a new one."""
        self._first = False
        began = time.monotonic()
        until = began + self._timeout
        if self._link.connected:
            try:
                return exchange()
            except RuntimeError:
                # It may have broken for others, in an operation that ended well for us: then they
                # come to a new one.
                if time.monotonic() < until:
                    self._link.close()
        try:
            self._link.connect(until, self._timeout, self._phase or self._doing)
        except _LostError as e:
            self.over = True
            raise RankError(f"{self._doing}: {e}", e.ranks) from None
        return self._guarded(exchange, told, began)

    def _carry(
        self, parts: Sequence[Part], sizes: list[int], room: memoryview | None = None
    ) -> list[memoryview]:
        """Send and receive, each size being known."""
        ends = list(accumulate(n if rank != self.rank else 0 for rank, n in enumerate(sizes)))
        if room is None or ends[-1] > len(room):
            room = memoryview(bytearray(ends[-1]))
        got = [room[end - n : end] for n, end in zip(sizes, ends, strict=True)]
        got[self.rank] = memoryview(parts[self.rank])
        pg, wait = self._link.pg, timedelta(seconds=self._timeout)
        tensors: dict[int, torch.Tensor] = {}

        def carry() -> None:
            # In another order on each rank, so that they do not all talk to the same one.
            order = [(self.rank + i) % self.size for i in range(1, self.size)]
            works = [pg.recv([_as_tensor(got[i])], i, 0) for i in reversed(order) if sizes[i]]
            for i in order:
                if len(parts[i]):
                    if id(parts[i]) not in tensors:
                        tensors[id(parts[i])] = _as_tensor(parts[i])
                    works.append(pg.send([tensors[id(parts[i])]], i, 0))
            for work in works:
                work.wait(wait)

        self._guarded(carry)
        return got

    def _guarded(
        self,
        talk: Callable[[], None],
        told: tuple[str, str] | None = None,
        began: float | None = None,
    ) -> None:
        """Talk; where that fails, find out who is gone, and raise."""
        began = time.monotonic() if began is None else began
        try:
            talk()
        except RuntimeError as e:
            self.over = True
            ranks, why = self._link.mourn(told, time.monotonic() - began)
            raise RankError(f"{self._doing}: {why}", ranks) from e

    # --- errors of other ranks ---

    def _errors(self, sizes: list[int], mine: bytes) -> dict[int, tuple[str, str]]:
        """Hear what went wrong on the ranks that said so."""
        lengths = self._sizes([len(mine)] * self.size)
        texts = self._carry([mine] * self.size, lengths)
        return {
            rank: msgspec.msgpack.decode(texts[rank], type=tuple[str, str])
            for rank, size in enumerate(sizes)
            if size == _FAILED and len(texts[rank])
        }

    def _raise_theirs(self, sizes: list[int]) -> NoReturn:
        self.over = True
        raise as_error(self._doing, self._errors(sizes, b""))


def _as_tensor(part: Part) -> torch.Tensor:
    # Torch warns of memory that may not be written to, though it is only read here.
    writable = part if isinstance(part, memoryview) and not part.readonly else bytearray(part)
    return torch.frombuffer(writable, dtype=torch.uint8)


def told(error: BaseException) -> tuple[str, str]:
    """Return what other ranks are told of an error: its type and what it says."""
    return type(error).__name__, str(error)


def as_error(doing: str, heard: dict[int, tuple[str, str]]) -> CasnapError:
    """Return the error of another rank as it is raised here: of the same type if it is casnap's."""
    rank, (name, text) = min(heard.items())
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, CasnapError) and kind is not RankError:
        return kind(f"rank {rank}: {text}")
    others = f" (and on ranks {_listed([r for r in heard if r != rank])})" if len(heard) > 1 else ""
    if kind is RankError:
        return RankError(text, tuple(heard))
    return RankError(f"{doing}: rank {rank} failed{others}: {name}: {text}", tuple(heard))


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


# --- groups -----------------------------------------------------------------------------------


class _LostError(Exception):
    """Some ranks did not come."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class _Link:
    """A gloo group of ours over the ranks of a process group, made anew whenever it broke."""

    def __init__(self, home: object, store: Any, ranks: tuple[int, ...], rank: int) -> None:
        self.home = home
        self.ranks = ranks
        self.rank = rank
        self.pg: Any = None
        self._store = store
        self._base = f"casnap/{digest_of(encode(ranks)).hex()[:16]}"
        self._name = ""
        self._dead: set[str] = set()
        self._turn = threading.Lock()
        self._holder: object = None

    @property
    def connected(self) -> bool:
        return self.pg is not None

    def hold(self, holder: Callable[[_Link], Group]) -> Group:
        """Begin an operation; one that goes on in the background ends first."""
        self._turn.acquire()
        group = holder(self)
        self._holder = group
        return group

    def free(self, holder: object) -> None:
        """End an operation."""
        if self._holder is holder:
            self._holder = None
            self._turn.release()

    def close(self) -> None:
        """Drop a group that broke; whoever waits in it hears of that at once."""
        self.pg = None
        if self._name:
            self._dead.add(self._name)
            if self.rank == 0:
                with suppress(Exception):
                    self._store.delete_key(f"{self._base}/newest")

    def note(self, what: str, text: str) -> None:
        self._store.set(f"{self._name}/{what}/{self.rank}", text)

    def _noted(self, what: str, rank: int) -> str | None:
        """Return what another rank noted, without waiting for it."""
        key = f"{self._name}/{what}/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def connect(self, until: float, timeout: float, phase: str) -> None:
        """Make a group, once all ranks have come, unless there is one."""
        if self.pg is not None:
            return
        if self.rank == 0:
            self._name = f"{self._base}/{os.urandom(8).hex()}"
            self._store.set(f"{self._base}/newest", self._name)
            self._come(phase)
            self._await_all(until, timeout)
        else:
            self._follow(until, timeout, phase)
        self.pg = dist.ProcessGroupGloo(
            dist.distributed_c10d.PrefixStore(self._name, self._store),
            self.rank,
            len(self.ranks),
            timedelta(seconds=timeout),
        )

    def _come(self, phase: str) -> None:
        self.note("at", phase)
        self.note("came", f"{socket.gethostname()} {os.getpid()}")

    def _await_all(self, until: float, timeout: float) -> None:
        missing = [r for r in range(len(self.ranks)) if r != self.rank]
        for pause in _pauses(until):
            while missing and self._store.check([f"{self._name}/came/{missing[-1]}"]):
                missing.pop()
            if not missing:
                self._store.set(f"{self._name}/go", "1")
                return
            time.sleep(pause)
        missing = [r for r in missing if self._noted("came", r) is None]
        why = f"{_ranks(missing)} did not come within {timeout:g} s"
        self._store.set(f"{self._name}/given-up", why)
        self.close()
        raise _LostError(why, tuple(missing))

    def _follow(self, until: float, timeout: float, phase: str) -> None:
        """Come to the group that rank 0 makes."""
        newest = f"{self._base}/newest"
        for pause in _pauses(until):
            if self._store.check([newest]):
                name = self._store.get(newest).decode()
                if name != self._name and name not in self._dead:
                    self._name = name
                    self._come(phase)
            if self._name and self._name not in self._dead:
                if self._store.check([f"{self._name}/go"]):
                    return
                if self._store.check([f"{self._name}/given-up"]):
                    why = self._store.get(f"{self._name}/given-up").decode()
                    self.close()
                    raise _LostError(why, ())
            time.sleep(pause)
        self.close()
        raise _LostError(f"rank 0 did not come within {timeout:g} s", (0,))

    def mourn(self, told: tuple[str, str] | None, waited: float) -> tuple[tuple[int, ...], str]:
        """Close a group that broke, find out who is gone or hangs, and return that and why."""
        self.note("stopped", " ".join(told) if told else "")
        self.close()
        missing = set(range(len(self.ranks))) - {self.rank}
        gone: set[int] = set()
        for pause in _pauses(time.monotonic() + min(_PATIENCE, max(1.0, waited))):
            for rank in sorted(missing):
                cause = self._noted("stopped", rank)
                if cause:
                    return (rank,), f"rank {rank} failed: {cause}"
                if cause is not None:
                    missing.discard(rank)
                elif self._is_gone(rank):
                    gone.add(rank)
            if missing <= gone:
                break
            time.sleep(pause)
        lost = tuple(sorted(gone or missing))
        if not lost:
            return (), f"the connection between the ranks broke after {waited:.1f} s"
        phase = self._noted("at", lost[0])
        where = f" (last seen {phase})" if phase else ""
        if gone:
            return lost, f"{_ranks(lost)} died{where}"
        return lost, f"{_ranks(lost)} did not answer within {waited:.0f} s{where}"

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank's process ended, which can be told for those on this host alone."""
        host, _, pid = (self._noted("came", rank) or "").partition(" ")
        if host != socket.gethostname() or not Path("/proc/self/stat").exists():
            return False
        try:
            # One that nobody has waited for yet is still listed, as a zombie.
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_listed(ranks)}"


def _pauses(until: float) -> Any:
    """Yield how long to sleep between two looks, until the time is over."""
    pause, most = _POLL
    while time.monotonic() < until:
        yield pause
        pause = min(2 * pause, most)


_links: dict[tuple[int, ...], _Link] = {}


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
    ranks = tuple(dist.get_process_group_ranks(pg))
    if len(ranks) == 1:
        return Alone()
    home, rank = dist.distributed_c10d._get_default_group(), ranks.index(dist.get_rank())
    link = _links.get(ranks)
    if link is None or link.home is not home:
        link = _links[ranks] = _Link(home, dist.distributed_c10d._get_default_store(), ranks, rank)
    return link.hold(lambda held: Group(held, timeout, doing))


def forget_after_fork() -> None:
    """Forget all groups: the parent's connections are not the child's."""
    _links.clear()


os.register_at_fork(after_in_child=forget_after_fork)
