"""How the ranks of a process group are connected, and whom they lost where a connection broke.

A :class:`Link` is a gloo group of casnap's own. It serves one operation after the other, and is
made anew once it broke. The ranks meet through the store of the default process group, where each
also notes what it does: whoever loses the connection leaves word there, and reads who is missing.
Nothing here waits for ever, even if nobody answers, the store included.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

from casnap.format.digest import digest_of
from casnap.format.names import rank_names
from casnap.format.records import encode

T = TypeVar("T")
ErrorText = tuple[str, str]
"""The type of an error, and what it says."""

PATIENCE = 10.0
"""Seconds that survivors wait for each other to say that they live, before they name the dead."""
_POLL = (0.001, 0.05)
# Seconds for others to leave word why they broke off, once that was felt; and to die, once one did.
_EXPLAIN_SECONDS, _DEATHS_SECONDS = 1.0, 0.1
# Seconds that the store may take to answer.
_STORE_SECONDS = 5.0
_STORE_SILENT = (
    "the store of the process group does not answer: the process that keeps it, rank 0 if no "
    "launcher does, died or hangs"
)


class Failure(msgspec.Struct, array_like=True):
    """Why an operation broke off.

    Attributes:
        ranks: Those at fault, as far as that is known.
        reason: What happened to them.
        error: The error, if it was one.
    """

    ranks: tuple[int, ...]
    reason: str
    error: ErrorText | None = None


class LinkFailedError(Exception):
    """Some ranks did not come.

    Attributes:
        failure: Who, and why.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class _Start(msgspec.Struct, array_like=True):
    """What rank 0 says when it has waited for all: whom it met, by what they said; who is lost."""

    met: list[str]
    failure: Failure | None = None


class _Process(NamedTuple):
    """A process, as others on its host can find it; where that cannot be known, all is 0."""

    host: int = 0
    pid: int = 0
    start: int = 0

    @classmethod
    def own(cls) -> _Process:
        """Return this one."""
        with suppress(OSError):
            # Process ids mean something within one boot of one machine, and one container.
            boot = Path("/proc/sys/kernel/random/boot_id").read_text()
            host = digest_of(f"{boot}{Path('/proc/self/ns/pid').readlink()}".encode())
            return cls(int.from_bytes(host[:7], "big"), os.getpid(), int(_stat(os.getpid())[19]))
        return cls()

    def is_gone(self, host: int) -> bool:
        """Whether it ended, which can be told on its own host alone."""
        if not host or self.host != host:
            return False
        try:
            stat = _stat(self.pid)
        except OSError:
            return True
        # One that nobody has waited for yet is still listed, as a zombie.
        return stat[0] in "ZX" or int(stat[19]) != self.start


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Link:
    """The connection between the ranks of a process group, for one operation at a time.

    Args:
        home: The default process group, which a link does not outlive.
        store: Its store.
        ranks: The global ranks of the group.
        rank: Which of them this is.

    Attributes:
        pg: The gloo group; None where there is none, as far as this rank knows.
    """

    def __init__(self, home: object, store: Any, ranks: tuple[int, ...], rank: int) -> None:
        self.home = home
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = rank
        self.pg: Any = None
        self._store = store
        self._base = f"casnap/{digest_of(encode(ranks)).hex()[:16]}"
        self._name = ""
        # How many operations this group has served, and which one it serves.
        self._number = 0
        self._operation = ""
        self._processes: list[_Process] = []
        self._turn = threading.Lock()
        self._holder: int | None = None
        # What the store was asked last.
        self._asked: Future[Any] = Future()
        self._asked.set_result(None)

    def acquire(self, holder: int) -> None:
        """Begin an operation, given its id; one that goes on in the background ends first."""
        self._turn.acquire()
        self._holder = holder

    def release(self, holder: int) -> None:
        """End an operation; more than once does no harm."""
        if self._holder == holder:
            self.note("ended", self._operation)
            self._holder = None
            self._turn.release()

    def begin(self, operation: str, phase: str) -> None:
        """Begin an operation in the group of the one before.

        Args:
            operation: What all ranks do; one that stayed away before does not take this for that.
            phase: What this rank does.
        """
        self._number += 1
        self._operation = f"{self._number} {digest_of(operation.encode()).hex()[:16]}"
        self.note("at", phase)

    def note(self, what: str, text: str) -> None:
        """Note something about this rank that others may want to know."""
        if self._name and self._asked.done():
            with suppress(RuntimeError):
                self._store.set(f"{self._name}/{what}/{self.rank}", text)

    def _read(self, key: str) -> str:
        """Return what the store holds, without waiting for it."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _within(self, work: Callable[[threading.Event], T], seconds: float) -> T:
        """Do something with the store on another thread, since it may never answer.

        The work gets an event that says that nobody waits for it any more.
        """
        given_up = threading.Event()
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work(given_up))
            except BaseException as e:  # noqa: BLE001 - raised by result
                done.set_exception(e)

        # Whatever still waits for an answer keeps all others from asking.
        wait([self._asked], seconds)
        if self._asked.done():
            self._asked = done
            threading.Thread(target=run, name="casnap-link", daemon=True).start()
            wait([done], seconds)
        given_up.set()
        if not done.done():
            raise LinkFailedError(Failure((), _STORE_SILENT))
        return done.result()

    # --- meeting ---

    def connect(self, seconds: float, timeout: float, operation: str, phase: str) -> None:
        """Make a group, once all ranks have come, and begin an operation.

        Args:
            seconds: How long to wait for them, still.
            timeout: How long that was in all.
            operation: See :meth:`begin`.
            phase: See there.

        Raises:
            LinkFailedError: Some did not come.
            RuntimeError: The connection broke.
        """
        self.close()
        until, rest = time.monotonic() + seconds, min(timeout, PATIENCE)

        def meet(given_up: threading.Event) -> str:
            pauses = _pauses(until, given_up)
            return (
                self._gather_ranks(pauses, timeout)
                if self.rank == 0
                else self._join_rank_0(pauses, timeout)
            )

        self._name, self._number = self._within(meet, seconds + _STORE_SECONDS), 0
        self.begin(operation, phase)

        def make(_: threading.Event) -> tuple[Any, list[_Process]]:
            store = dist.distributed_c10d.PrefixStore(self._name, self._store)
            pg = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=rest))
            return pg, self._exchange_processes(pg, rest)

        self.pg, self._processes = self._within(make, 2 * rest + _STORE_SECONDS)

    def _exchange_processes(self, pg: Any, seconds: float) -> list[_Process]:
        """Exchange who is who."""
        mine = torch.tensor([_Process.own()] * self.size, device="cpu")
        theirs = torch.empty_like(mine)
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=seconds)
        pg.alltoall_base(theirs, mine, [], [], options).wait()
        return [_Process(*process) for process in theirs.tolist()]

    def _gather_ranks(self, pauses: Iterable[None], seconds: float) -> str:
        """Wait, as rank 0, for all to come to a new group; return its name."""
        name = f"{self._base}/{os.urandom(8).hex()}"
        self._store.set(f"{self._base}/newest", name)
        missing, gone = list(range(1, self.size)), list[int]()
        for _ in pauses:
            while missing and (
                missing[-1] in gone or self._store.check([f"{name}/came/{missing[-1]}"])
            ):
                missing.pop()
            if not missing:
                break
            gone = self._dead_ranks() or _ranks(self._read(f"{name}/gone"))
        came = {rank: self._read(f"{name}/came/{rank}") for rank in range(1, self.size)}
        missing = [rank for rank, word in came.items() if not word]
        failure = None
        if missing:
            failure = _absent(missing, gone, seconds)
        # To each its own word: one that finds an old name in the store does not take it for ours.
        self._store.set(f"{name}/start", encode(_Start([w for w in came.values() if w], failure)))
        if failure is not None:
            self._store.set(f"{self._base}/newest", "")
            raise LinkFailedError(failure)
        return name

    def _join_rank_0(self, pauses: Iterable[None], seconds: float) -> str:
        """Come to the group that rank 0 makes; return its name."""
        word, name = os.urandom(8).hex(), ""
        gone: list[int] = []
        for _ in pauses:
            newest = self._read(f"{self._base}/newest")
            if newest not in ("", name, self._name):
                name = newest
                self._store.set(f"{name}/came/{self.rank}", word)
            if name and self._store.check([f"{name}/start"]):
                start = msgspec.msgpack.decode(self._store.get(f"{name}/start"), type=_Start)
                if word in start.met:
                    if start.failure is not None:
                        raise LinkFailedError(start.failure)
                    return name
            gone = self._dead_ranks()
            if 0 in gone:
                break
            if gone and name:
                # Rank 0 may be on another host.
                self._store.set(f"{name}/gone", " ".join(map(str, gone)))
        missing = [rank for rank in range(1, self.size) if not self._read(f"{name}/came/{rank}")]
        if 0 in gone or not name or not missing:
            missing = [0]
        raise LinkFailedError(_absent(missing, gone, seconds))

    # --- parting ---

    def close(self) -> None:
        """Break the connection; whoever waits in it hears of that at once."""
        pg, self.pg = self.pg, None
        if pg is None:
            return
        # To let go of the group would not do while an error, or what it carried, is kept. One
        # deadline that passes breaks all connections of a gloo group.
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                    pg.recv([nothing], peer, 1).wait(timedelta(milliseconds=1))

    def broke_before(self) -> bool:
        """Whether the connection broke in an operation that had ended well for this rank.

        Then all come to a new group.
        """

        def look(given_up: threading.Event) -> bool:
            for _ in _pauses(time.monotonic() + _EXPLAIN_SECONDS, given_up):
                # What is written in this order is read in the other one.
                broke = self._store.check([f"{self._name}/broke"])
                if self._dead_ranks() or self._store.check(
                    [f"{self._name}/{self._operation}/count"]
                ):
                    return False
                if broke or self._read(f"{self._base}/newest") not in ("", self._name):
                    return True
            return True

        try:
            return self._within(look, _EXPLAIN_SECONDS + _STORE_SECONDS)
        except (RuntimeError, LinkFailedError):
            return False

    def find_cause(self, told: ErrorText | None, waited: float, *, late: bool) -> Failure:
        """Break the connection, leave word, and find out who is at fault.

        Args:
            told: The error of this rank, if it has one.
            waited: For how many seconds nothing was heard.
            late: Whether that was all that it had.
        """
        self.close()
        within = f"{waited:.3g}"
        patience = min(PATIENCE, max(_EXPLAIN_SECONDS, waited))

        def find_out(given_up: threading.Event) -> Failure:
            return self._cause(told, within if late else "", patience, given_up)

        try:
            return self._within(find_out, patience + _STORE_SECONDS)
        except (RuntimeError, LinkFailedError):
            why = f"the connection between the ranks broke after {within} s; {_STORE_SILENT}"
            gone = self._dead_ranks()
            return Failure(tuple(gone), f"{rank_names(gone)} died") if gone else Failure((), why)

    def _cause(
        self, told: ErrorText | None, within: str, patience: float, given_up: threading.Event
    ) -> Failure:
        operation = f"{self._name}/{self._operation}"
        if told is not None:
            self._store.set(f"{operation}/why", encode(Failure((self.rank,), "", told)))
        if within:
            self._store.set(f"{operation}/waited", within)
        self._store.set(f"{operation}/stopped/{self.rank}", "")
        self._store.add(f"{operation}/count", 1)
        self._store.set(f"{self._name}/broke", "")
        for _ in _pauses(time.monotonic() + patience, given_up):
            # Whoever says why does so before being counted.
            complete = self._store.add(f"{operation}/count", 0) >= self.size
            if (failure := self._stored_cause()) is not None:
                # So all name the same, one that woke up late itself.
                return failure
            if self._dead_ranks():
                time.sleep(_DEATHS_SECONDS)
                break
            if complete:
                break
        failure = self._failure_of_dead(self._dead_ranks()) or self._failure_of_silent(operation)
        self._store.set(f"{operation}/why", encode(failure))
        return failure

    def _stored_cause(self) -> Failure | None:
        key = f"{self._name}/{self._operation}/why"
        if not self._store.check([key]):
            return None
        return msgspec.msgpack.decode(self._store.get(key), type=Failure)

    def cause_given_by_others(self) -> Failure | None:
        """Return why others broke off the operation that this rank is in, if they did."""
        try:
            return self._within(lambda _: self._stored_cause(), _STORE_SECONDS)
        except (RuntimeError, LinkFailedError):
            return None

    def _dead_ranks(self) -> list[int]:
        """Return the ranks on this host whose processes ended."""
        if not self._processes:
            return []
        here = self._processes[self.rank].host
        return [rank for rank, process in enumerate(self._processes) if process.is_gone(here)]

    def _failure_of_dead(self, gone: Sequence[int]) -> Failure | None:
        if not gone:
            return None
        return Failure(tuple(gone), f"{rank_names(gone)} died{self._last_seen(gone[0])}")

    def _failure_of_silent(self, operation: str) -> Failure:
        """Return who has not left word."""
        silent = [
            rank
            for rank in range(self.size)
            if not self._store.check([f"{operation}/stopped/{rank}"])
        ]
        if not silent:
            return Failure((), "the connection between the ranks broke")
        within = self._read(f"{operation}/waited")
        what = f"did not answer within {within} s" if within else "broke off the connection"
        where = self._last_seen(silent[0])
        return Failure(tuple(silent), f"{rank_names(silent)} {what}{where}")

    def _last_seen(self, rank: int) -> str:
        phase = self._read(f"{self._name}/at/{rank}")
        return f" (last seen {phase})" if phase else ""

    def await_end(self, rank: int, seconds: float) -> bool:
        """Wait until another rank has left the operation that this one is in, unless it died."""

        def look(given_up: threading.Event) -> bool:
            for _ in _pauses(time.monotonic() + seconds, given_up):
                died = rank in self._dead_ranks()
                if self._read(f"{self._name}/ended/{rank}") == self._operation:
                    return True
                if died:
                    break
            return False

        try:
            return self._within(look, seconds + _STORE_SECONDS)
        except (RuntimeError, LinkFailedError):
            return False


def _absent(missing: Sequence[int], gone: Sequence[int], seconds: float) -> Failure:
    what = "died" if set(missing) <= set(gone) else f"did not come within {seconds:g} s"
    return Failure(tuple(missing), f"{rank_names(missing)} {what}")


def _ranks(text: str) -> list[int]:
    return [int(rank) for rank in text.split()]


def _pauses(until: float, given_up: threading.Event) -> Iterator[None]:
    """Look again and again, after ever longer pauses, until the time is over."""
    pause, most = _POLL
    while time.monotonic() < until and not given_up.is_set():
        yield
        given_up.wait(pause)
        pause = min(2 * pause, most)
