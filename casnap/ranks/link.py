"""The connection between the ranks of a process group, and which rank is at fault if it breaks.

A :class:`Link` holds a gloo group of casnap's own. It serves one operation after the other. When
the group breaks, the next operation makes a new one. The ranks meet through the store of the
default process group, where each rank also notes what it does. A rank whose connection breaks
records that in the store, and reads there which ranks are missing. Every wait here has a deadline,
also that for an answer of the store.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from casnap.format.decoding import decoder
from casnap.format.digest import digest_of
from casnap.format.names import rank_names
from casnap.format.records import encode
from casnap.ranks import gloo
from casnap.ranks.failures import STORE_SILENT, Failure, LinkFailedError, not_come, parsed_ranks
from casnap.ranks.processes import Process
from casnap.ranks.remote_errors import ErrorText
from casnap.ranks.shared_memory import OwnMemory, SharedMemory

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds that the surviving ranks wait for each other's report before they name the dead ones."""
# The shortest and the longest pause between two looks at the store, in seconds.
_POLL = (0.001, 0.05)
# Seconds between two looks whether all ranks live.
_LOOK = 0.2
# Seconds that other ranks get to record why they broke the connection.
_EXPLAIN_SECONDS = 1.0
# Once one rank has died: seconds in which others that die are named together with it.
_DEATHS_SECONDS = 0.1
# Seconds that the store may take to answer.
_STORE_SECONDS = 5.0


class _Came(msgspec.Struct, array_like=True):
    """The note of a rank that comes to a new group.

    Attributes:
        process: The process of the rank.
        token: A random token.
    """

    process: Process
    token: bytes = b""

    def is_gone(self, own: _Came) -> bool:
        """Whether the process has ended, as far as another one of its host can tell."""
        return self.process.is_gone(own.process.host)


class _Start(msgspec.Struct, array_like=True):
    """What rank 0 writes when it ends its wait for the others: the new group begins, or failed.

    Attributes:
        came: What each rank has written that came, in their order.
        failure: Why there is no group, if some did not come.
    """

    came: list[_Came]
    failure: Failure | None = None


class Link:
    """The connection between the ranks of a process group, for one operation at a time.

    Args:
        home: The default process group; a link does not outlive it.
        store: The store of the default group.
        ranks: The ranks of this group, as numbered in the default group.
        rank: This rank, as numbered in this group.
        suffix: Tells links of the same ranks apart.

    Attributes:
        pg: The gloo group; None if there is none yet, or this rank knows that it broke.
        shared: The memory that the ranks share, once they do; it goes with the group.
        memory: What this rank gives of it.
    """

    def __init__(
        self, home: object, store: Any, ranks: tuple[int, ...], rank: int, suffix: str = ""
    ) -> None:
        self.home = home
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = rank
        self.pg: Any = None
        self.shared: SharedMemory | None = None
        self.memory: OwnMemory | None = None
        self._store = store
        self._base = f"casnap/{digest_of(encode(ranks)).hex()[:16]}{suffix}"
        self._behind: Link | None = None
        self._name = ""
        # How many operations this group has served, and the name of the present one in the store.
        self._number = 0
        self._operation = ""
        self._processes: list[Process] = []
        self._turn = threading.Lock()
        self._holder: int | None = None
        # The last question to the store.
        self._asked: Future[Any] = Future()
        self._asked.set_result(None)

    def behind(self) -> Link:
        """Return another link of the same ranks, for what goes on in the background."""
        if self._behind is None:
            self._behind = Link(self.home, self._store, self.ranks, self.rank, "-behind")
            # So a death before all have met there is seen at once.
            self._behind._processes = self._processes
        return self._behind

    def acquire(self, holder: int) -> None:
        """Begin an operation, given its id; wait for an operation in the background to end."""
        self._turn.acquire()
        self._holder = holder

    def release(self, holder: int) -> None:
        """End an operation; a second call does nothing."""
        if self._holder == holder:
            self.note("ended", self._operation)
            self._holder = None
            self._turn.release()

    def begin(self, operation: str, phase: str) -> None:
        """Begin an operation in the group of the operation before.

        Args:
            operation: What all ranks do. A rank that missed an operation cannot mistake this one
                for it.
            phase: What this rank does.
        """
        self._number += 1
        self._operation = f"{self._number} {digest_of(operation.encode()).hex()[:16]}"
        self.note("at", phase)

    def note(self, what: str, text: str) -> None:
        """Note something about this rank in the store, for other ranks to read."""
        if self._name and self._asked.done():
            with suppress(RuntimeError):
                self._store.set(f"{self._name}/{what}/{self.rank}", text)

    def _read(self, key: str) -> str:
        """Return the text of a key in the store; empty if there is none. Does not wait for it."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _within(
        self, work: Callable[[threading.Event], T], seconds: float, *, of_all: str = ""
    ) -> T:
        """Do some work with the store on another thread, and wait for it for some seconds.

        Args:
            work: It gets an event that is set once this call has stopped waiting.
            seconds: How long to wait.
            of_all: For work that needs all ranks, so that a death ends the wait: what to say if it
                takes longer.

        Raises:
            LinkFailedError: The store does not answer, or a rank died.
        """
        given_up = threading.Event()
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work(given_up))
            except BaseException as e:  # noqa: BLE001 - raised by result
                done.set_exception(e)

        # The store answers one question at a time: while one is open, no other can be asked.
        wait([self._asked], seconds)
        if self._asked.done():
            self._asked = done
            threading.Thread(target=run, name="casnap-link", daemon=True).start()
            until = time.monotonic() + seconds
            while not done.done() and (left := until - time.monotonic()) > 0:
                wait([done], min(left, _LOOK) if of_all else left)
                if of_all and self._dead_ranks():
                    until = min(until, time.monotonic() + _DEATHS_SECONDS)
        given_up.set()
        if not done.done():
            raise LinkFailedError(self._failure_of_silence(of_all))
        return done.result()

    def _failure_of_silence(self, reason: str = "") -> Failure:
        """Return which ranks died, as known without the store.

        If none did on this host, it is this reason; without a reason, that the store is silent. The
        store lies on the host of the world's rank 0.
        """
        if gone := self._dead_ranks():
            return Failure(tuple(gone), f"{rank_names(gone)} died")
        if reason or 0 not in self.ranks or self.is_near(keeper := self.ranks.index(0)):
            return Failure((), reason or STORE_SILENT)
        far = [rank for rank in range(self.size) if self._share_host(rank, keeper)]
        where = f"or its host, that of {rank_names(far)}, died or cannot be reached"
        return Failure(tuple(far), f"{STORE_SILENT}, {where}")

    # --- connecting ---

    def connect(self, seconds: float, timeout: float, operation: str, phase: str) -> None:
        """Make a new group once all ranks have come, and begin an operation.

        Args:
            seconds: How long to wait for the other ranks from now on.
            timeout: How long this rank has waited in the end, for messages.
            operation: See :meth:`begin`.
            phase: See :meth:`begin`.

        Raises:
            LinkFailedError: Some ranks did not come.
            RuntimeError: The ranks came, but could not be connected.
        """
        self.close()
        # gloo waits as long for the address of a rank, and five times as long for it to connect.
        until, rest = time.monotonic() + seconds, min(timeout, PATIENCE / 2)

        def meet(given_up: threading.Event) -> tuple[str, list[_Came]]:
            pauses = _pauses(until, given_up)
            if self.rank == 0:
                return self._gather_ranks(pauses, timeout)
            return self._come_to_rank_0(pauses, timeout)

        (self._name, came), self._number = self._within(meet, seconds + _STORE_SECONDS), 0
        self._processes = [each.process for each in came]
        self.begin(operation, phase)
        store, name, most = self._store, self._name, 5 * rest + _STORE_SECONDS
        try:
            self.pg = self._within(
                lambda _: gloo.new_group(store, name, self.rank, self.size, rest),
                most,
                of_all=f"the ranks could not be connected within {most:g} s",
            )
        except RuntimeError:
            # Others may be connected to this one, and learn by this why that breaks off.
            with suppress(RuntimeError):
                store.set(f"{name}/apart", "")
            raise

    def _gather_ranks(self, pauses: Iterable[None], timeout: float) -> tuple[str, list[_Came]]:
        """Wait, as rank 0, until all ranks have come to a new group; return its name, and them."""
        name = f"{self._base}/{os.urandom(8).hex()}"
        own = _Came(Process.own())
        self._store.set(f"{name}/came/0", encode(own))
        self._store.set(f"{self._base}/newest", name)
        missing, gone = list(range(1, self.size)), list[int]()
        for _ in pauses:
            while missing and (
                missing[-1] in gone or self._store.check([f"{name}/came/{missing[-1]}"])
            ):
                missing.pop()
            if not missing:
                break
            gone = self._dead_ranks() or parsed_ranks(self._read(f"{name}/gone"))
        came = {rank: self._came(name, rank) for rank in range(1, self.size)}
        missing = [rank for rank, found in came.items() if found is None]
        failure = not_come(missing, gone, timeout) if missing else None
        # Each rank looks for its own token: a rank that finds the name of an older group in the
        # store does not take that for this group.
        start = _Start([own, *(found for found in came.values() if found)], failure)
        self._store.set(f"{name}/start", encode(start))
        if failure is not None:
            self._store.set(f"{self._base}/newest", "")
            raise LinkFailedError(failure)
        return name, start.came

    def _came(self, name: str, rank: int) -> _Came | None:
        key = f"{name}/came/{rank}"
        return decoder(_Came).decode(self._store.get(key)) if self._store.check([key]) else None

    def _come_to_rank_0(self, pauses: Iterable[None], timeout: float) -> tuple[str, list[_Came]]:
        """Come to the group that rank 0 makes; return its name, and who came."""
        own, name = _Came(Process.own(), os.urandom(8)), ""
        leader: _Came | None = None
        gone: list[int] = []
        for _ in pauses:
            newest = self._read(f"{self._base}/newest")
            # Asked after that: rank 0 may have ended its wait, and begun the next one already.
            if name and self._store.check([f"{name}/start"]):
                start = decoder(_Start).decode(self._store.get(f"{name}/start"))
                if own in start.came:
                    if start.failure is not None:
                        raise LinkFailedError(start.failure)
                    return name, start.came
            if newest not in ("", name, self._name):
                name = newest
                self._store.set(f"{name}/came/{self.rank}", encode(own))
                found = self._came(name, 0)
                # If it is gone already, this may be a group that processes before these have left.
                leader = None if found is None or found.is_gone(own) else found
                continue
            gone = self._dead_ranks()
            if leader is not None and leader.is_gone(own):
                gone = [0]
            if 0 in gone:
                break
            if gone and name:
                # Rank 0 may be on another host, and cannot see that they died.
                self._store.set(f"{name}/gone", " ".join(map(str, gone)))
        missing = [rank for rank in range(1, self.size) if self._came(name, rank) is None]
        if 0 in gone or not name or not missing:
            missing = [0]
        raise LinkFailedError(not_come(missing, gone, timeout))

    # --- a broken connection ---

    def close(self) -> None:
        """Break the connection; every rank that waits in it fails at once."""
        pg, self.pg = self.pg, None
        self.shared = self.memory = None
        if pg is not None:
            gloo.break_connections(pg, self.rank, self.size)

    def broke_before(self) -> bool:
        """Whether the connection broke in an earlier operation, which ended well on this rank.

        Then all ranks come to a new group.
        """

        def look() -> bool | None:
            # A failing rank writes "count" before "broke"; so this reads "broke" first.
            broke = self._store.check([f"{self._name}/broke"])
            failed = self._store.check([f"{self._name}/{self._operation}/count"])
            if self._dead_ranks() or failed:
                return False
            return broke or self._read(f"{self._base}/newest") not in ("", self._name) or None

        return self._learns(look, otherwise=True)

    def is_apart(self) -> bool:
        """Whether some ranks could not be connected in this new group. Then all make another."""

        def look() -> bool | None:
            apart = self._store.check([f"{self._name}/apart"])
            return apart or (False if self._dead_ranks() else None)

        return self._learns(look, otherwise=False)

    def _learns(self, look: Callable[[], bool | None], *, otherwise: bool) -> bool:
        """Return what a look at the store tells, which other ranks may be about to write."""

        def learn(given_up: threading.Event) -> bool:
            for _ in _pauses(time.monotonic() + _EXPLAIN_SECONDS, given_up):
                if (told := look()) is not None:
                    return told
            return otherwise

        try:
            return self._within(learn, _EXPLAIN_SECONDS + _STORE_SECONDS)
        except (RuntimeError, LinkFailedError):
            return False

    def find_cause(self, error: ErrorText | None, waited: float, *, late: bool) -> Failure:
        """Break the connection, record that in the store, and find out which rank is at fault.

        Args:
            error: The error of this rank, if it has one.
            waited: How many seconds this rank has heard nothing.
            late: Whether that was its whole deadline.
        """
        self.close()
        within = f"{waited:.3g}"
        patience = min(PATIENCE, max(_EXPLAIN_SECONDS, waited))

        def find(given_up: threading.Event) -> Failure:
            return self._cause(error, within if late else "", patience, given_up)

        try:
            return self._within(find, patience + _STORE_SECONDS)
        except (RuntimeError, LinkFailedError):
            return self._failure_of_silence()

    def _cause(
        self, error: ErrorText | None, within: str, patience: float, given_up: threading.Event
    ) -> Failure:
        """Report to the store that this rank has stopped; wait for the reports of the others."""
        operation = f"{self._name}/{self._operation}"
        if error is not None:
            self._store.set(f"{operation}/why", encode(Failure((self.rank,), "", error)))
        if within:
            self._store.set(f"{operation}/waited", within)
        self._store.set(f"{operation}/stopped/{self.rank}", "")
        self._store.add(f"{operation}/count", 1)
        self._store.set(f"{self._name}/broke", "")
        noted = time.monotonic() + _EXPLAIN_SECONDS if within else math.inf
        for _ in _pauses(time.monotonic() + patience, given_up):
            # A rank that records a cause does so before it is counted.
            complete = self._store.add(f"{operation}/count", 0) >= self.size
            if (failure := self._recorded_failure()) is not None:
                # All ranks give the same cause, also a slow rank that is named in it.
                return failure
            if self._dead_ranks():
                time.sleep(_DEATHS_SECONDS)
                break
            if complete:
                break
            if time.monotonic() >= noted:
                # A rank that stood still may go on, and report too.
                noted = math.inf
                self._store.set(f"{operation}/silent", " ".join(map(str, self._silent(operation))))
        failure = self._failure_of_dead(self._dead_ranks()) or self._failure_of_silent(operation)
        self._store.set(f"{operation}/why", encode(failure))
        return failure

    def _recorded_failure(self) -> Failure | None:
        key = f"{self._name}/{self._operation}/why"
        if not self._store.check([key]):
            return None
        return decoder(Failure).decode(self._store.get(key))

    def recorded_failure(self) -> Failure | None:
        """Return why other ranks ended the operation that this rank is in, if they did."""
        try:
            return self._within(lambda _: self._recorded_failure(), _STORE_SECONDS)
        except (RuntimeError, LinkFailedError):
            return None

    def forget(self) -> int:
        """Give the pages of memory for other ranks back, if no operation uses it."""
        behind = 0 if self._behind is None else self._behind.forget()
        if not self._turn.acquire(blocking=False):
            return behind
        try:
            return behind + (self.memory.forget() if self.memory is not None else 0)
        finally:
            self._turn.release()

    @property
    def hosts(self) -> list[int]:
        """A number of each rank's host and container; 0 where that is not known."""
        return [process.host for process in self._processes] or [0] * self.size

    def is_near(self, rank: int) -> bool:
        """Whether another rank, or this one, is a process of this host and container."""
        return self._share_host(self.rank, rank)

    def _share_host(self, one: int, other: int) -> bool:
        hosts = self.hosts
        return one == other or hosts[one] == hosts[other] != 0

    def _dead_ranks(self) -> list[int]:
        """Return the ranks on this host whose processes have ended."""
        if not self._processes:
            return []
        here = self._processes[self.rank].host
        return [rank for rank, process in enumerate(self._processes) if process.is_gone(here)]

    def _failure_of_dead(self, gone: Sequence[int]) -> Failure | None:
        if not gone:
            return None
        return Failure(tuple(gone), f"{rank_names(gone)} died{self._last_seen(gone[0])}")

    def _failure_of_silent(self, operation: str) -> Failure:
        """Return a failure that names the ranks that have not reported to the store."""
        silent = self._silent(operation) or parsed_ranks(self._read(f"{operation}/silent"))
        if not silent:
            return Failure((), "the connection between the ranks broke")
        within = self._read(f"{operation}/waited")
        what = f"did not answer within {within} s" if within else "broke off the connection"
        where = self._last_seen(silent[0])
        return Failure(tuple(silent), f"{rank_names(silent)} {what}{where}")

    def _silent(self, operation: str) -> list[int]:
        """Return the ranks that have not reported to the store."""
        stopped = f"{operation}/stopped"
        return [rank for rank in range(self.size) if not self._store.check([f"{stopped}/{rank}"])]

    def _last_seen(self, rank: int) -> str:
        phase = self._read(f"{self._name}/at/{rank}")
        return f" (last seen {phase})" if phase else ""

    def await_end(self, rank: int, seconds: float) -> bool:
        """Wait until another rank has left the operation of this one; False if it died first."""

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


def _pauses(until: float, given_up: threading.Event) -> Iterator[None]:
    """Yield again and again, with ever longer pauses, until the time is over."""
    pause, most = _POLL
    while time.monotonic() < until and not given_up.is_set():
        yield
        given_up.wait(pause)
        pause = min(2 * pause, most)
