"""The connection between the ranks of a process group, and which rank is at fault when it breaks.

A :class:`Link` holds a gloo group of casnap's own, and serves one operation at a time. When the
gloo group breaks, the next operation makes a new one.

In this module, "the store" is torch's key-value store of the default process group. The ranks meet
through the store, and each rank notes there what it does. A rank whose connection breaks records
this in the store, and reads there which ranks have not reported. Every wait has a deadline, even
the wait for an answer of the store.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import msgspec

from casnap.format.decoding import decoder
from casnap.format.digest import digest_of
from casnap.format.names import rank_names
from casnap.format.records import encode
from casnap.ranks import gloo
from casnap.ranks.failures import STORE_SILENT, ErrorText, Failure, LinkFailedError
from casnap.ranks.processes import Process
from casnap.ranks.shared_memory import OwnMemory, SharedMemory
from casnap.ranks.topology import Transport, transport_of
from casnap.runtime.environment import team_ranks

T = TypeVar("T")

_log = logging.getLogger("casnap")

PATIENCE = 10.0
"""Seconds that ranks wait for each other's report before they name the silent ones."""
# The shortest and the longest pause between two looks at the store, in seconds.
_POLL = (0.001, 0.05)
# Seconds that other ranks get to record why they broke the connection.
_EXPLAIN_SECONDS = 1.0
# Seconds that the store may take to answer.
_STORE_SECONDS = 5.0
# Seconds after which the ranks that have not come to an operation are named.
_WARN_AFTER = 5.0
# The most ranks that look for the rank at fault.
_ASKING = 8
# The bytes of a token, which tells one arrival of a rank from another.
_TOKEN = 4
# How many ranks' tokens one value of the store holds.
_TOGETHER = 64
# About how many times a second all ranks together look at the store. Many ranks pause for longer.
_LOOKS = 20_000
_ALL_MUST_CALL = (
    "all ranks of the process group must make this call; for some of them alone, take(), "
    "async_take() and Snapshot() have pg="
)


class _Arrival(msgspec.Struct, array_like=True):
    """The note in the store by which a rank announces that it is ready for a new group.

    Attributes:
        process: The process of the rank.
        token: Random bytes. Rank 0 lists the tokens of the group's ranks; a rank that finds its own
            token in this list knows that rank 0 has seen its note.
    """

    process: Process
    token: bytes = b""


class _At(msgspec.Struct, array_like=True):
    """The note in the store that says which operation a rank is doing now.

    Attributes:
        number: The number of the operation, counted since the gloo group was made.
        phase: The phase of the operation, in words.
    """

    number: int
    phase: str


class _Start(msgspec.Struct, array_like=True):
    """The note in the store by which rank 0 says that a new group begins, or why there is none.

    Attributes:
        hosts: The hosts in the order of the ranks, as pairs: the number of a host (0 if it is not
            known), and the number of successive ranks on it.
        team_ranks: The most ranks of a team.
        failure: The reason why there is no group; None if the group begins.
    """

    hosts: list[tuple[int, int]]
    team_ranks: int
    failure: Failure | None = None


class Link:
    """The connection between the ranks of a process group, for one operation at a time.

    Args:
        home: The default process group. The link can be used as long as this group exists.
        store: The torch store of the default group.
        ranks: The numbers of the link's ranks in the default group.
        rank: The number of this rank in the link.
        suffix: Tells apart several links of the same ranks. It is "" for the first link, where
            operations begin.

    Attributes:
        transport: The connections; None while there are none, or once this rank knows that they
            broke.
        shared: The memory that the ranks of this host share; None while they share none. It is
            freed with the connections.
        memory: The memory that this rank contributes to ``shared``.
    """

    def __init__(
        self, home: object, store: Any, ranks: tuple[int, ...], rank: int, suffix: str = ""
    ) -> None:
        self.home = home
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = rank
        self.transport: Transport | None = None
        self.shared: SharedMemory | None = None
        self.memory: OwnMemory | None = None
        self._store = store
        self._base = f"casnap/{digest_of(encode(ranks)).hex()[:16]}{suffix}"
        # In the background a rank may well be late, though all have made the call: warn of none.
        self._warns = not suffix
        self._background: Link | None = None
        self._name = ""
        # The seconds that a rank may take to connect, or to notice that it cannot.
        self._connecting = 0.0
        # How many operations this group has served; the name of the present one in the store.
        self._number = 0
        self._operation = ""
        self._hosts = [0] * self.size
        self._own_host = 0
        # The processes of the ranks on this host.
        self._processes: dict[int, Process] = {}
        self._turn = threading.Lock()
        self._holder: int | None = None
        # The last question to the store.
        self._question: Future[Any] = Future()
        self._question.set_result(None)

    def background(self) -> Link:
        """Return a second link of the same ranks, which operations in the background use."""
        if self._background is None:
            self._background = Link(self.home, self._store, self.ranks, self.rank, "-background")
            # With these, the new link sees at once that a rank of this host dies before all meet.
            self._background._processes, self._background._hosts = self._processes, self._hosts
            self._background._own_host = self._own_host
        return self._background

    def acquire(self, holder: int) -> None:
        """Reserve the link for an operation.

        If another operation has reserved it, wait for its end.

        Args:
            holder: The id of the operation.
        """
        self._turn.acquire()
        self._holder = holder

    def release(self, holder: int) -> None:
        """Free the link at the end of an operation. A second call does nothing.

        Args:
            holder: The id of the operation.
        """
        if self._holder == holder:
            self._note("ended", self._operation)
            self._holder = None
            self._turn.release()

    def begin(self, operation: str, phase: str) -> None:
        """Begin an operation on the connections that the last operation used.

        Args:
            operation: The operation in words. The store's keys of the operation contain a hash of
                these words. So a rank that has skipped an operation does not mistake the next one
                for the skipped one.
            phase: The first phase of this rank, in words.
        """
        self._number += 1
        self._operation = f"{self._number} {digest_of(operation.encode()).hex()[:16]}"
        self.note_phase(phase)

    def note_phase(self, phase: str) -> None:
        """Note in the store which phase this rank is in, for other ranks to read."""
        self._note("at", _At(self._number, phase))

    def _note(self, topic: str, value: object) -> None:
        if self._name and self._question.done():
            with suppress(RuntimeError):
                self._set(f"{self._name}/{topic}/{self.rank}", value)

    @contextmanager
    def warning_of_absent(self, operation: str, timeout: float) -> Iterator[None]:
        """Log a warning if ranks are late, while the block waits for all to begin an operation.

        Args:
            operation: The operation in words.
            timeout: The seconds after which the block gives up, for the message.
        """
        timer = threading.Timer(_WARN_AFTER, self._warn_if_absent, (operation, timeout))
        timer.daemon = True
        if self._warns:
            with suppress(RuntimeError):  # if no thread can be started, only the warning is lost
                timer.start()
        try:
            yield
        finally:
            timer.cancel()
            if timer.ident is not None:
                timer.join()

    def _warn_if_absent(self, operation: str, timeout: float) -> None:
        def look(given_up: threading.Event) -> list[int]:
            if any(given_up.is_set() or self._has_begun(rank) for rank in range(self.rank)):
                return []  # a rank before this one has begun, and warns
            return [r for r in range(self.size) if not given_up.is_set() and not self._has_begun(r)]

        with suppress(RuntimeError, LinkFailedError):
            if absent := self._within(look, _STORE_SECONDS):
                _warn_of_absent(operation, absent, timeout)

    def _reminder(self, operation: str, timeout: float) -> Callable[[Iterable[int]], None]:
        """Return a function that logs a warning about absent ranks, once they are late.

        The argument of the function is the absent ranks. The function warns only once; until the
        ranks are late, a call does nothing.
        """
        warn_at = time.monotonic() + _WARN_AFTER if self._warns else math.inf

        def warn(absent: Iterable[int]) -> None:
            nonlocal warn_at
            if time.monotonic() >= warn_at and (ranks := list(absent)):
                warn_at = math.inf
                _warn_of_absent(operation, ranks, timeout)

        return warn

    def _has_begun(self, rank: int) -> bool:
        """Whether a rank has begun the operation that this rank does now."""
        at = self._get(f"{self._name}/at/{rank}", _At)
        return at is not None and at.number == self._number

    def _set(self, key: str, value: object) -> None:
        self._store.set(key, encode(value))

    def _first(self, key: str, value: T) -> T:
        """Set a key in the store unless the key is set; return the value that the key has then."""
        return decoder(type(value)).decode(gloo.first_in(self._store, key, encode(value)))

    def _get(self, key: str, kind: type[T]) -> T | None:
        """Return the value of a key in the store, without waiting; None if the key is not set."""
        value = gloo.value_in(self._store, key)
        return None if value is None else decoder(kind).decode(value)

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _pauses(self, until: float, given_up: threading.Event) -> Iterator[None]:
        """Yield until a time; pause before each further yield, longer and longer.

        A caller that polls the store does so after each yield.

        Args:
            until: The time at which to stop, by the monotonic clock.
            given_up: Stops the iteration once it is set.
        """
        pause, most = _POLL
        most = max(most, self.size / _LOOKS)
        while time.monotonic() < until and not given_up.is_set():
            yield
            given_up.wait(pause)
            pause = min(2 * pause, most)

    def _within(
        self, work: Callable[[threading.Event], T], seconds: float, reason: str = STORE_SILENT
    ) -> T:
        """Call a function that asks the store, on another thread, and wait for its result.

        Args:
            work: The function. It gets an event that is set once this call has stopped waiting.
            seconds: How long to wait.
            reason: The reason to give in the error if the time is over.

        Raises:
            LinkFailedError: The function did not return in time, so the store does not seem to
                answer.
        """
        given_up = threading.Event()
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(work(given_up))
            except BaseException as e:  # noqa: BLE001 - raised by result
                answer.set_exception(e)

        # The store answers one question at a time: while one is open, no other can be asked.
        wait([self._question], seconds)
        if self._question.done():
            self._question = answer
            threading.Thread(target=run, name="casnap-link", daemon=True).start()
            wait([answer], seconds)
        given_up.set()
        if not answer.done():
            raise LinkFailedError(self._failure_of_silence(reason))
        return answer.result()

    def _failure_of_silence(self, reason: str = STORE_SILENT) -> Failure:
        """Return the failure to report when the store does not answer.

        If ranks of this host have died, the failure names them. Otherwise the fault may lie with
        the process that keeps the store, rank 0 of the default group, or with its host. The failure
        names the ranks on that host, unless it is this host.

        Args:
            reason: The reason to give, in words.
        """
        if dead := self._dead_ranks():
            return Failure(tuple(dead), f"{rank_names(dead)} died")
        if 0 not in self.ranks or self.is_near(keeper := self.ranks.index(0)):
            return Failure((), reason)
        ranks = [rank for rank in range(self.size) if self._share_host(rank, keeper)]
        host = f"or its host, that of {rank_names(ranks)}, died or cannot be reached"
        return Failure(tuple(ranks), f"{reason}, {host}")

    # --- connecting ---

    @property
    def connected(self) -> Transport:
        """The connections. Use this only once an operation has begun."""
        assert self.transport is not None
        return self.transport

    def connect(self, seconds: float, timeout: float, operation: str, phase: str) -> None:
        """Wait for all ranks, connect them in a new gloo group, and begin an operation.

        Args:
            seconds: How long to wait for the other ranks from now on.
            timeout: For how many seconds this rank waits in all, for messages.
            operation: The operation in words, as for :meth:`begin`.
            phase: The first phase of this rank, as for :meth:`begin`.

        Raises:
            LinkFailedError: Some ranks did not come.
            RuntimeError: All ranks came, but could not be connected.
        """
        team_size = team_ranks()  # a wrong setting is an error on all ranks that have it
        self.close()
        # gloo waits for the address of a rank for this patience, and five times that to connect.
        until, patience = time.monotonic() + seconds, min(timeout, PATIENCE / 2)
        self._connecting = 5 * patience + _STORE_SECONDS

        def meet(given_up: threading.Event) -> tuple[str, _Start]:
            pauses = self._pauses(until, given_up)
            if self.rank == 0:
                return self._gather_ranks(pauses, operation, timeout, team_size)
            return self._come_to_rank_0(pauses, operation, timeout)

        self._name, start = self._within(meet, seconds + _STORE_SECONDS)
        self._number = 0
        self._hosts = [host for host, ranks in start.hosts for _ in range(ranks)]
        self._processes = self._of_this_host()
        self.begin(operation, phase)
        try:
            self.transport = self._within(
                lambda _: self._connected(patience, start.team_ranks),
                self._connecting,
                "the ranks could not be connected: one of them hangs, or cannot be reached, or "
                f"{STORE_SILENT}",
            )
        except RuntimeError:
            # Other ranks may be connected to this one. They read here why the connection breaks.
            with suppress(RuntimeError):
                self._set(f"{self._name}/apart", "")
            raise

    def _of_this_host(self) -> dict[int, Process]:
        """Return the processes of the ranks on this host, keyed by rank, as the store has them."""
        name, own = self._name, self._hosts[self.rank]
        near = [rank for rank, host in enumerate(self._hosts) if host == own != 0]
        arrivals = self._within(
            lambda _: [self._get(f"{name}/came/{rank}", _Arrival) for rank in near], _STORE_SECONDS
        )
        return {rank: a.process for rank, a in zip(near, arrivals, strict=True) if a is not None}

    def _connected(self, patience: float, team_size: int) -> Transport:
        transport = transport_of(
            lambda later: gloo.new_group(
                self._store, self._name, self.rank, self.size, patience, connects_later=later
            ),
            self.rank,
            self.hosts,
            team_size,
        )
        try:
            transport.connect(3 * patience)
        except RuntimeError:
            transport.close()
            raise
        return transport

    def _gather_ranks(
        self, pauses: Iterable[None], operation: str, timeout: float, team_size: int
    ) -> tuple[str, _Start]:
        """Announce a new group in the store, as rank 0, and wait until all ranks have come to it.

        Args:
            pauses: Yields before each look at the store; ends when the time is over.
            operation: The operation in words, for a warning.
            timeout: For how many seconds this rank waits in all, for messages.
            team_size: The most ranks of a team.

        Returns:
            The name of the group, and the note by which it begins.

        Raises:
            LinkFailedError: Some ranks did not come.
        """
        name = f"{self._base}/{os.urandom(8).hex()}"
        arrival = _Arrival(Process.current(), bytes(_TOKEN))
        self._set(f"{name}/came/0", arrival)
        self._set(f"{self._base}/newest", name)
        absent, dead = list(range(1, self.size)), list[int]()
        warn = self._reminder(operation, timeout)
        for _ in pauses:
            while absent and (absent[-1] in dead or self._has(f"{name}/came/{absent[-1]}")):
                absent.pop()
            if not absent:
                break
            dead = self._dead_ranks() or self._get(f"{name}/dead", list[int]) or []
            warn(r for r in absent if r not in dead and not self._has(f"{name}/came/{r}"))
        others = [self._arrival(name, rank) for rank in range(1, self.size)]
        absent = [rank for rank, arrived in enumerate(others, 1) if arrived is None]
        failure = _failure_to_come(absent, dead, timeout) if absent else None
        # Each rank looks for its own token. So a rank that finds the name of an older group in the
        # store does not take that group for this one.
        arrivals = [arrival, *others]
        self._own_host = arrival.process.host
        tokens = b"".join(a.token[:_TOKEN] if a else bytes(_TOKEN) for a in arrivals)
        for first in range(0, self.size, _TOGETHER):
            some = tokens[first * _TOKEN : (first + _TOGETHER) * _TOKEN]
            self._set(f"{name}/tokens/{first // _TOGETHER}", some)
        # All ranks read the note, so it is kept short.
        numbers = {0: 0}
        hosts = [numbers.setdefault(a.process.host, len(numbers)) if a else 0 for a in arrivals]
        runs = [(host, len([*ranks])) for host, ranks in groupby(hosts)]
        start = _Start(runs, team_size, failure)
        self._set(f"{name}/start", start)
        if failure is not None:
            self._set(f"{self._base}/newest", "")
            raise LinkFailedError(failure)
        return name, start

    def _token_in(self, name: str) -> bytes:
        """Return this rank's entry in the token list of a group in the store: the token's start.

        Args:
            name: The name of the group.
        """
        tokens = self._get(f"{name}/tokens/{self.rank // _TOGETHER}", bytes) or b""
        at = self.rank % _TOGETHER * _TOKEN
        return tokens[at : at + _TOKEN]

    def _arrival(self, name: str, rank: int) -> _Arrival | None:
        return self._get(f"{name}/came/{rank}", _Arrival)

    def _come_to_rank_0(
        self, pauses: Iterable[None], operation: str, timeout: float
    ) -> tuple[str, _Start]:
        """Come to the group that rank 0 announces in the store, and wait until the group begins.

        Args:
            pauses: Yields before each look at the store; ends when the time is over.
            operation: The operation in words, for a warning.
            timeout: For how many seconds this rank waits in all, for messages.

        Returns:
            The name of the group, and the note by which it begins.

        Raises:
            LinkFailedError: Rank 0 or other ranks did not come.
        """
        arrival, name = _Arrival(Process.current(), os.urandom(8)), ""
        self._own_host = arrival.process.host
        leader: Process | None = None
        dead: list[int] = []
        warn = self._reminder(operation, timeout)
        for _ in pauses:
            newest = self._get(f"{self._base}/newest", str)
            # Look for this after the name: rank 0 may have ended a wait, and begun the next one.
            start = self._get(f"{name}/start", _Start) if name else None
            if start is not None and self._token_in(name) == arrival.token[:_TOKEN]:
                if start.failure is not None:
                    raise LinkFailedError(start.failure)
                return name, start
            if newest and newest not in (name, self._name):
                name = newest
                self._set(f"{name}/came/{self.rank}", arrival)
                note = self._arrival(name, 0)
                leader = note.process if note is not None else None
                if leader is not None and leader.has_ended(arrival.process.host):
                    leader = None  # earlier processes of these ranks may have left this group
                continue
            dead = self._dead_ranks()
            if leader is not None and leader.has_ended(arrival.process.host):
                dead = [0]
            if 0 in dead:
                break
            if dead and name:
                # Rank 0 may be on another host, and then cannot see that these ranks died.
                self._set(f"{name}/dead", dead)
            # A group that has begun without this rank is an older one: rank 0 has not come yet.
            warn([0] if not name or start is not None else [])
        absent = [rank for rank in range(1, self.size) if self._arrival(name, rank) is None]
        if 0 in dead or not name or not absent:
            absent = [0]
        raise LinkFailedError(_failure_to_come(absent, dead, timeout))

    # --- a broken connection ---

    def close(self) -> None:
        """Break the connections. Every rank that waits for this one fails at once."""
        transport, self.transport = self.transport, None
        self.shared = self.memory = None
        if transport is not None:
            transport.close()

    def broke_before(self) -> bool:
        """Whether the connections broke in an earlier operation, which this rank had already ended.

        If they did, all ranks make a new gloo group, and begin the present operation again.
        """

        def look() -> bool | None:
            # A failing rank writes "count" before "broke", so read "broke" before "count".
            broke = self._has(f"{self._name}/broke")
            if self._dead_ranks() or self._has(f"{self._name}/{self._operation}/count"):
                return False
            newest = self._get(f"{self._base}/newest", str)
            return broke or newest not in (None, "", self._name) or None

        return self._await_answer(look, otherwise=True)

    def is_apart(self) -> bool:
        """Whether some ranks of a new gloo group could not be connected.

        If so, the call waits until every rank knows this; then all ranks make another group.

        Raises:
            LinkFailedError: Some ranks hang, or have died.
        """
        apart = f"{self._name}/apart"

        def look() -> bool | None:
            return self._has(apart) or (False if self._dead_ranks() else None)

        return self._await_answer(look, otherwise=False) and self._within(
            partial(self._all_come_again, apart), self._connecting + _STORE_SECONDS
        )

    def _all_come_again(self, apart: str, given_up: threading.Event) -> bool:
        """Wait until all ranks know that some ranks could not be connected, so that all try again.

        Args:
            apart: The key in torch's store below which each rank reports that it knows this.
            given_up: Set once nobody waits for this call any more. The wait then ends early.

        Returns:
            True: an error is raised if the ranks cannot try again.

        Raises:
            LinkFailedError: Some ranks have died, or have not reported in time.
        """

        def hear_of_failure() -> None:
            # All ranks give the same cause, even a slow rank that is named in it.
            if (failure := self._get(f"{apart}/cause", Failure)) is not None:
                raise LinkFailedError(failure)

        def failure_of(ranks: list[int], event: str) -> LinkFailedError:
            failure = Failure(tuple(ranks), f"{rank_names(ranks)} {event}")
            return LinkFailedError(self._first(f"{apart}/cause", failure))

        self._set(f"{apart}/{self.rank}", "")
        self._store.add(f"{apart}/count", 1)
        for _ in self._pauses(time.monotonic() + self._connecting, given_up):
            hear_of_failure()
            if dead := self._dead_ranks():
                raise failure_of(dead, "died")
            if self._store.add(f"{apart}/count", 0) >= self.size:
                return True
        # A rank asks the store about every rank. So only a few ranks ask, and the others wait for
        # the cause that these record.
        if self._store.add(f"{apart}/asking", 1) > _ASKING:
            for _ in self._pauses(time.monotonic() + _EXPLAIN_SECONDS, given_up):
                hear_of_failure()
        ranks = [rank for rank in range(self.size) if not given_up.is_set()]
        if silent := [rank for rank in ranks if not self._has(f"{apart}/{rank}")]:
            raise failure_of(silent, "could not be connected")
        return True

    def _await_answer(self, look: Callable[[], bool | None], *, otherwise: bool) -> bool:
        """Ask the store a question repeatedly, until other ranks have written what answers it.

        Args:
            look: Asks the store; returns the answer, or None as long as there is none.
            otherwise: The answer to return if the time is over.

        Returns:
            The answer; False if the store cannot be read.
        """

        def ask(given_up: threading.Event) -> bool:
            for _ in self._pauses(time.monotonic() + _EXPLAIN_SECONDS, given_up):
                if (answer := look()) is not None:
                    return answer
            return otherwise

        try:
            return self._within(ask, _EXPLAIN_SECONDS + _STORE_SECONDS)
        except (RuntimeError, LinkFailedError):
            return False

    def find_cause(self, error: ErrorText | None, seconds: float, *, is_late: bool) -> Failure:
        """Find out, after a failed exchange, which rank is at fault.

        This breaks the rank's connections, and reports that in the store.

        Args:
            error: The error of this rank, if the rank itself has failed.
            seconds: How many seconds this rank has waited for the others.
            is_late: Whether the rank has waited until its deadline.
        """
        self.close()
        within = f"{seconds:.3g}"
        patience = min(PATIENCE, max(_EXPLAIN_SECONDS, seconds))

        def find(given_up: threading.Event) -> Failure:
            return self._cause(error, within if is_late else "", patience, given_up)

        try:
            return self._within(find, patience + _STORE_SECONDS)
        except (RuntimeError, LinkFailedError):
            return self._failure_of_silence()

    def _cause(
        self, error: ErrorText | None, within: str, patience: float, given_up: threading.Event
    ) -> Failure:
        """Report in the store that this rank has stopped; return the failure that all ranks report.

        Args:
            error: The error of this rank, if the rank itself has failed.
            within: If this rank waited until its deadline, for how many seconds, as text; else "".
            patience: How many seconds to wait for the reports of other ranks.
            given_up: Set once the caller has stopped waiting for the result.
        """
        operation = f"{self._name}/{self._operation}"
        if error is not None:
            self._first(f"{operation}/cause", Failure((self.rank,), "", error))
        if within:
            self._set(f"{operation}/waited", within)
        self._set(f"{operation}/stopped/{self.rank}", "")
        self._store.add(f"{operation}/count", 1)
        self._set(f"{self._name}/broke", "")
        note_at = time.monotonic() + _EXPLAIN_SECONDS if within else math.inf
        for _ in self._pauses(time.monotonic() + patience, given_up):
            # A rank that records a cause does so before it counts itself, so read in this order.
            complete = self._store.add(f"{operation}/count", 0) >= self.size
            if (failure := self._recorded_failure()) is not None:
                # All ranks give the same cause, even a slow rank that is named in it.
                return failure
            if complete or self._dead_ranks():
                break
            if time.monotonic() >= note_at:
                # A rank that was stopped may go on later, and report too. Note now who is silent.
                note_at = math.inf
                if self._store.add(f"{operation}/noting", 1) <= _ASKING:
                    self._set(f"{operation}/silent", self._silent_ranks(operation, given_up))
        return self._failure_found_first(operation, given_up)

    def _failure_found_first(self, operation: str, given_up: threading.Event) -> Failure:
        """Return the failure that a rank has recorded in the store. If there is none, record one.

        The recorded failure names the ranks that died, or else those that have not reported.

        Args:
            operation: The key of the operation in the store.
            given_up: Set once the caller has stopped waiting for the result.
        """
        if self._store.add(f"{operation}/asking", 1) > _ASKING:
            # A rank asks the store about every rank. So only a few ranks ask, and the others wait
            # for the cause that these record.
            for _ in self._pauses(time.monotonic() + _EXPLAIN_SECONDS, given_up):
                if (told := self._recorded_failure()) is not None:
                    return told
        # A rank whose process has ended after its error looks dead, but has recorded its cause.
        return self._first(f"{operation}/cause", self._failure_by_silence(operation, given_up))

    def _failure_by_silence(self, operation: str, given_up: threading.Event) -> Failure:
        """Return a failure that names the dead ranks of this host.

        If there are none, it names the ranks that have not reported that they stopped.

        Args:
            operation: The key of the operation in the store.
            given_up: Set once the caller has stopped waiting for the result.
        """
        if ranks := self._dead_ranks():
            event = "died"
        elif (
            ranks := self._silent_ranks(operation, given_up)
            or self._get(f"{operation}/silent", list[int])
            or []
        ):
            within = self._get(f"{operation}/waited", str)
            event = f"did not answer within {within} s" if within else "broke off the connection"
        else:
            return Failure((), "the connection between the ranks broke")
        at = self._get(f"{self._name}/at/{ranks[0]}", _At)
        last_phase = f" (last seen {at.phase})" if at is not None else ""
        is_behind = at is not None and event.startswith("did not") and at.number < self._number
        advice = f"; {_ALL_MUST_CALL}" if is_behind else ""
        return Failure(tuple(ranks), f"{rank_names(ranks)} {event}{last_phase}{advice}")

    def _silent_ranks(self, operation: str, given_up: threading.Event) -> list[int]:
        """Return the ranks that have not reported in the store that they stopped.

        Args:
            operation: The key of the operation in the store.
            given_up: Stops the search once it is set.
        """
        return [
            rank
            for rank in range(self.size)
            if not given_up.is_set() and not self._has(f"{operation}/stopped/{rank}")
        ]

    def _recorded_failure(self) -> Failure | None:
        return self._get(f"{self._name}/{self._operation}/cause", Failure)

    def recorded_failure(self) -> Failure | None:
        """Return the failure that other ranks have recorded for this operation.

        Returns:
            The failure; None if there is none, or the store does not answer.
        """
        try:
            return self._within(lambda _: self._recorded_failure(), _STORE_SECONDS)
        except (RuntimeError, LinkFailedError):
            return None

    def forget(self) -> int:
        """Give the memory that this rank shares back to the system, unless the link is in use.

        Returns:
            The number of bytes that were given back.
        """
        background_bytes = 0 if self._background is None else self._background.forget()
        if not self._turn.acquire(blocking=False):
            return background_bytes
        try:
            return background_bytes + (self.memory.forget() if self.memory is not None else 0)
        finally:
            self._turn.release()

    @property
    def hosts(self) -> list[int]:
        """For each rank, a number that stands for its host and container; 0 if they are unknown."""
        return self._hosts

    def is_near(self, rank: int) -> bool:
        """Whether a rank's process runs on this host, in the same container as this process."""
        return self._share_host(self.rank, rank)

    def _share_host(self, one: int, other: int) -> bool:
        return one == other or self._hosts[one] == self._hosts[other] != 0

    def _dead_ranks(self) -> list[int]:
        """Return the ranks on this host whose processes have ended."""
        own = self._own_host
        return [rank for rank, process in self._processes.items() if process.has_ended(own)]

    def await_end(self, rank: int, seconds: float) -> bool:
        """Wait until another rank has left the operation of this rank.

        Args:
            rank: The other rank.
            seconds: How long to wait.

        Returns:
            Whether the other rank has left; False if it died before, or the time is over.
        """

        def look(given_up: threading.Event) -> bool:
            for _ in self._pauses(time.monotonic() + seconds, given_up):
                is_dead = rank in self._dead_ranks()
                if self._get(f"{self._name}/ended/{rank}", str) == self._operation:
                    return True
                if is_dead:
                    break
            return False

        try:
            return self._within(look, seconds + _STORE_SECONDS)
        except (RuntimeError, LinkFailedError):
            return False


def _failure_to_come(missing_ranks: list[int], dead: list[int], timeout: float) -> Failure:
    """Return the failure of a group to which some ranks did not come.

    Args:
        missing_ranks: The ranks that did not come.
        dead: The ranks that have died.
        timeout: How many seconds the others have waited.
    """
    if set(missing_ranks) <= set(dead):
        return Failure(tuple(missing_ranks), f"{rank_names(missing_ranks)} died")
    event = f"did not come within {timeout:g} s; {_ALL_MUST_CALL}"
    return Failure(tuple(missing_ranks), f"{rank_names(missing_ranks)} {event}")


def _warn_of_absent(operation: str, absent: list[int], timeout: float) -> None:
    """Log a warning that names the ranks that have not come to an operation yet.

    Args:
        operation: The operation in words.
        absent: The ranks.
        timeout: The seconds after which the wait fails.
    """
    _log.warning(
        "%s waits for %s, not here after %g s: %s. It goes on when all are here, and fails after "
        "%g s",
        operation,
        rank_names(absent),
        _WARN_AFTER,
        _ALL_MUST_CALL,
        timeout,
    )
