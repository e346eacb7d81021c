"""What each rank sees when one of them raises, dies, or hangs, wherever that happens.

``python -m tests.rank_faults`` runs all cases and prints the table of ``docs/reliability.md``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from casnap import RNGState, Snapshot, StateDict, Stateful, Store
from casnap.backends import LocalBackend
from casnap.comm import Comm, Group, join
from casnap.testing import Call, Fault, FaultyBackend, after, before, fail, open_store
from tests.faults import CHUNK, assert_no_orphans, memory_folder
from tests.ranks import Pool, RankDied, World


class OnPurposeError(Exception):
    """No error of casnap's."""


class Seen(NamedTuple):
    """How something ended on a rank.

    Attributes:
        error: The type of what was raised; empty if nothing was.
        text: What it says.
        ranks: Whom it blames.
        seconds: How long that took.
        value: What was returned.
    """

    error: str
    text: str
    ranks: tuple[int, ...]
    seconds: float
    value: Any

    def __str__(self) -> str:
        return f"{self.error}: {self.text}" if self.error else "returned"


def watch(work: Callable[[], Any]) -> Seen:
    """Do something, and return how it ended."""
    began = time.monotonic()
    error: BaseException | None = None
    value = None
    try:
        value = work()
    except BaseException as e:  # noqa: BLE001 - it is what is looked at
        error = e
    seconds = time.monotonic() - began
    if error is None:
        return Seen("", "", (), seconds, value)
    return Seen(type(error).__name__, str(error), getattr(error, "ranks", ()), seconds, None)


def nothing_hangs() -> None:
    """Check that no thread still waits for the store of the process group."""
    for thread in threading.enumerate():
        if thread.name == "casnap-link":
            thread.join(5)
            assert not thread.is_alive()


# --- one rank stands still until all others are done ------------------------------------------


class Yard:
    """A folder where ranks leave word for each other, whatever becomes of their connections."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)

    def leave(self, word: str, text: str = "") -> None:
        part = self.folder / f"{word}.{os.getpid()}.{threading.get_ident()}"
        part.write_text(text)
        part.rename(self.folder / word)

    def wait(self, *words: str) -> str:
        """Wait for one of some words that other processes leave."""
        until = time.monotonic() + 60
        while not (left := [word for word in words if (self.folder / word).exists()]):
            if time.monotonic() > until:
                raise TimeoutError(f"nobody left any of {words}")
            time.sleep(0.005)  # there is no event between processes that may be killed
        return left[0]

    def text(self, word: str) -> str:
        return (self.folder / word).read_text() if (self.folder / word).exists() else ""

    def stand_still(self) -> None:
        """Stop this process until all others are done."""
        self.leave("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    def stand_in_thread(self) -> None:
        """Stop this thread until all others are done."""
        self.leave("stopped", "")
        self.wait("go")

    def done(self, victim: int) -> None:
        """Note that this rank has seen enough; the first survivor lets the victim go on."""
        rank, size = dist.get_rank(), dist.get_world_size()
        survivors = [r for r in range(size) if r != victim]
        self.leave(f"done-{rank}")
        if rank != survivors[0]:
            return
        for other in survivors:
            self.wait(f"done-{other}")
        if self.wait("stopped", "spared") == "stopped":
            self.leave("go")
            if pid := self.text("stopped"):
                os.kill(int(pid), signal.SIGCONT)
            (self.folder / "stopped").unlink()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def talk(
    timeout: float, calls: int = 1, strike: Callable[[int, Comm], None] | None = None, **group: Any
) -> list[bytes]:
    """Hold some collectives; ``strike`` is called before each, with its number."""
    with join(group.get("pg"), timeout, group.get("doing", "the talk of ranks")) as comm:
        heard: list[bytes] = []
        for i in range(calls):
            comm.at(f"call {i}")
            if strike is not None:
                strike(i, comm)
            heard = [bytes(part) for part in comm.all_gather(b"%d" % comm.rank)]
        if strike is not None:
            strike(calls, comm)
        return heard


# --- what is taken ----------------------------------------------------------------------------

RANKS = 3
_ROWS, _COLUMNS = 1001, 97  # no shard edge is a cell edge


def _numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Acting(StateDict):
    """A state that calls something when it is read, and when it is loaded."""

    def __init__(self, reading: Callable[[], None], loading: Callable[[], None], **values: Any):
        super().__init__(**values)
        self._reading, self._loading = reading, loading

    def state_dict(self) -> dict[str, Any]:
        self._reading()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loading()
        super().load_state_dict(state)


def nothing() -> None:
    """Do nothing."""


def app_state(
    step: int, reading: Callable[[], None] = nothing, loading: Callable[[], None] = nothing
) -> dict[str, Stateful]:
    """Return what this rank holds at a step: half of it never changes."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (RANKS,))
    whole = _numbers(step, _ROWS, _COLUMNS)
    own = whole.chunk(RANKS)[rank].clone()
    sharded = DTensor.from_local(
        own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return {
        "sharded": StateDict(weight=sharded),
        "equal": StateDict(frozen=_numbers(1000, 60_000), moving=_numbers(2000 + step, 40_000)),
        "declared": StateDict(bias=_numbers(3000 + step, 70_000)),
        "mine": Acting(reading, loading, x=_numbers(4000 + 10 * step + rank, 50_000), step=step),
        "rng": RNGState(),
    }


def assert_whole(snapshot: Snapshot, step: int) -> None:
    """Compare a snapshot, read by one process, with what was taken at a step."""
    expected = {
        "0/sharded/weight": _numbers(step, _ROWS, _COLUMNS),
        "0/equal/frozen": _numbers(1000, 60_000),
        "0/equal/moving": _numbers(2000 + step, 40_000),
        "0/declared/bias": _numbers(3000 + step, 70_000),
        **{f"{r}/mine/x": _numbers(4000 + 10 * step + r, 50_000) for r in range(RANKS)},
    }
    for path, tensor in expected.items():
        assert torch.equal(snapshot.read_object(path), tensor), path
    assert snapshot.read_object("1/mine/step") == step
    assert snapshot.contents.manifest.shared.keys() == {"sharded", "equal", "declared", "mine"}


# --- faults -----------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a rank is hurt.

    Attributes:
        how: ``call`` (before a collective), ``inside`` (one, between its two halves), ``before``
            or ``after`` (a call of the backend), ``reading``, ``loading``, ``progress``, ``end``.
        what: For collectives the phase, for the backend the call and a pattern for its key.
        number: Which of them, from 0.
    """

    how: str
    what: str = ""
    number: int = 0

    def __str__(self) -> str:
        number = f" {self.number}" if self.number else ""
        return f"{self.how} {self.what}".strip() + number


class Case(NamedTuple):
    """What is done, and who is hurt where and how.

    Attributes:
        verb: ``take``, ``async_take`` or ``restore``.
        place: Where.
        kind: ``raise``, ``kill``, ``stop`` (the process), ``hang`` (a thread).
        rank: Who.
    """

    verb: str
    place: Place
    kind: str
    rank: int

    def __str__(self) -> str:
        return f"{self.verb}: rank {self.rank}: {self.kind}: {self.place}"


class Outcome(NamedTuple):
    """What a rank saw.

    Attributes:
        seen: Of the operation.
        again: Of the next one; None if one rank is dead.
    """

    seen: Seen
    again: Seen | None


class _Arms:
    """Strikes this rank, once."""

    def __init__(self, case: Case, yard: Yard) -> None:
        self._struck = False
        self._case = case
        self._yard = yard
        self._left = case.place.number
        self._now = "beginning"
        self._faults: tuple[FaultyBackend, list[Fault]] | None = None
        self._lock = threading.Lock()

    def strike(self, *_: object) -> None:
        with self._lock:
            if self._struck or self._left:
                self._left -= 1
                return
            self._struck = True
        self._yard.leave("struck", self._now)
        kind = self._case.kind
        if kind == "raise":
            raise OnPurposeError("on purpose")
        if kind == "kill":
            kill()
        if kind == "stop":
            self._yard.stand_still()
        if kind == "hang":
            self._yard.stand_in_thread()

    def _reach(self, how: str) -> None:
        place = self._case.place
        if how == place.how and place.what in ("", self._now):
            self.strike()

    def at(self, how: str) -> Callable[[], None]:
        """Return what strikes at places of some kind."""
        return self.strike if self._case.place.how == how else nothing

    def backend(self, path: str) -> FaultyBackend:
        """Return a backend that strikes at one of its calls."""
        place = self._case.place
        backend = FaultyBackend(LocalBackend(Path(path)))
        if place.how in ("before", "after"):
            call, _, keys = place.what.partition(" ")
            act = fail() if self._case.kind == "raise" else before(self.strike)
            if place.how == "after":
                act = after(fail()) if self._case.kind == "raise" else after(before(self.strike))
            skip, self._left = self._left, 0

            def strike(call: Call) -> object:
                if self._case.kind == "raise":
                    self._yard.leave("struck", self._now)
                return act(call)

            self._faults = backend, [Fault(strike, call, keys or "*", skip=skip)]
        return backend

    @contextmanager
    def up(self) -> Iterator[None]:
        """Be ready to strike."""
        at, all_to_all, carry, leave = Group.at, Group.all_to_all, Group._carry, Group.leave

        def noting(group: Group, phase: str) -> None:
            self._now = phase
            at(group, phase)

        def calling(group: Group, *args: Any) -> Any:
            self._reach("call")
            return all_to_all(group, *args)

        def carrying(group: Group, *args: Any) -> Any:
            group._talk(lambda: self._reach("inside"))
            return carry(group, *args)

        def leaving(group: Group) -> None:
            if not group.over:
                self._reach("end")
            leave(group)

        with ExitStack() as patches:
            for name, new in [
                ("at", noting),
                ("all_to_all", calling),
                ("_carry", carrying),
                ("leave", leaving),
            ]:
                patches.enter_context(mock.patch.object(Group, name, new))
            if self._faults is not None:
                backend, faults = self._faults
                patches.enter_context(backend.during(*faults))
            yield


def suffer(folder: str, case: Case, timeout: float) -> Outcome:
    """Do something on this rank, where one of them is hurt, and once more."""
    path, rank = f"{folder}/store", dist.get_rank()
    yard, hurt = Yard(f"{folder}/yard"), rank == case.rank
    arms = _Arms(case, yard)
    plain = open_store(LocalBackend(Path(path)))
    store = open_store(arms.backend(path)) if hurt else plain
    state = app_state(1, *((arms.at("reading"), arms.at("loading")) if hurt else ()))
    progress = arms.at("progress") if hurt else nothing
    talk(60)  # in a first operation nobody could tell a rank that died from one that is late
    with arms.up() if hurt else nullcontext():
        seen = watch(lambda: do(store, case.verb, "new", state, timeout, progress))
    if hurt:
        yard.leave("spared")
    elif case.kind in ("stop", "hang"):
        yard.done(case.rank)
    if case.kind == "kill" and yard.wait("struck", "spared") == "struck":
        return Outcome(seen, None)
    dist.barrier()
    return Outcome(seen, watch(lambda: do(plain, case.verb, "again", app_state(2), 60)))


def do(
    store: Store,
    verb: str,
    name: str,
    state: dict[str, Stateful],
    timeout: float,
    progress: Callable[[], None] = nothing,
) -> str:
    """Take a snapshot, or restore the one that is there; return its commit id."""

    def report(done: int, total: int) -> None:
        progress()

    if verb == "restore":
        snapshot = store["base"]
        snapshot.restore(state, progress=report, timeout=timeout)
        assert_holds(state, 0)
        return snapshot.commit_id
    how: dict[str, Any] = {"replicated": ["declared/**"], "progress": report, "timeout": timeout}
    if verb == "take":
        return store.take(state, name, **how).commit_id
    pending = store.async_take(state, name, **how)
    try:
        return pending.wait().commit_id
    finally:
        assert pending.done()


def assert_holds(state: dict[str, Stateful], step: int) -> None:
    """Compare the state of this rank with what was taken at a step."""
    expected = app_state(step)
    for key, stateful in expected.items():
        found = state[key].state_dict()
        for name, value in stateful.state_dict().items():
            if key == "rng":
                continue
            other = found[name]
            if isinstance(value, DTensor):
                value, other = value.to_local(), other.to_local()
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other), f"{key}/{name}"
            else:
                assert value == other, f"{key}/{name}"


# --- a case, from the start to the last look at the store -------------------------------------


class Result(NamedTuple):
    """What came of a case.

    Attributes:
        phase: In which phase the rank was hurt; empty if it was not, after so many calls.
        outcomes: What each rank saw; None for one that died.
        committed: Whether the snapshot is there.
    """

    phase: str
    outcomes: list[Outcome | None]
    committed: bool


def take_base(folder: str) -> None:
    do(Store(folder, chunk_size=CHUNK), "take", "base", app_state(0), 60)


def run_case(
    world: Callable[[int], World], template: Path, folder: Path, case: Case, timeout: float
) -> Result:
    """Run a case on a copy of a store with a snapshot; check all that must be true after it."""
    store = folder / "store"
    folder.mkdir()
    shutil.copytree(template, store)
    yard = Yard(folder / "yard")
    ranks = world(RANKS)
    outcomes = ranks.run(suffer, str(folder), case, timeout, expect_errors=True, timeout=100)
    phase = yard.text("struck")
    if case.kind == "kill" and phase:
        assert isinstance(outcomes[case.rank], RankDied), outcomes[case.rank]
        outcomes[case.rank] = None
        again = ranks.run(suffer_nothing, str(store), case.verb)
        assert all(seen.error == "" for seen in again), again
    for outcome in outcomes:
        assert outcome is None or isinstance(outcome, Outcome), outcome
        if outcome is not None and outcome.again is not None:
            assert outcome.again.error == "", f"{case}: {outcome.again}"
    committed = check_store(store, case)
    check_seen(case, phase, outcomes, committed, timeout)
    shutil.rmtree(folder)
    return Result(phase, outcomes, committed)


def suffer_nothing(path: str, verb: str) -> Seen:
    store = open_store(LocalBackend(Path(path)))
    return watch(lambda: do(store, verb, "again", app_state(2), 60))


def check_store(path: Path, case: Case) -> bool:
    """Check that all that is there is whole, and all else can be collected."""
    store = Store(path, create=False)
    found = {snapshot.name: snapshot for snapshot in store.snapshots()}
    expected = {"base"} if case.verb == "restore" else {"base", "again"}
    assert found.keys() - {"new"} == expected
    for name, step in (("base", 0), ("new", 1), ("again", 2)):
        if name in found:
            assert_whole(found[name], step)
    store.gc(grace=0)
    assert_no_orphans(path)
    report = store.check(data=True)
    assert report.ok, report
    assert report.orphans == 0
    return "new" in found


CAUSES = {
    "raise": ("on purpose",),
    "kill": ("died",),
    "stop": ("did not answer within", "did not come within", "did not go on for"),
    "hang": ("did not answer within", "did not come within", "did not go on for"),
}


def check_seen(
    case: Case, phase: str, outcomes: list[Outcome | None], committed: bool, timeout: float
) -> None:
    """Check what the survivors saw: who it was, why, and in time."""
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        seen = outcome.seen
        assert seen.seconds < SLACK + (timeout if case.kind in ("stop", "hang") else 0), (
            f"{case}: rank {rank} needed {seen.seconds:.1f} s: {seen}"
        )
        if not phase:
            assert seen.error == "", f"{case}: rank {rank}: {seen}"
        if not seen.error:
            assert committed or case.verb == "restore", f"{case}: rank {rank} returned"
        elif rank != case.rank:
            assert any(cause in seen.text for cause in CAUSES[case.kind]), f"{case}: {seen}"
            assert f"rank {case.rank}" in seen.text, f"{case}: {seen}"
            assert seen.error in ("RankError", "BackendError"), f"{case}: {seen}"
            if seen.error == "RankError":
                assert seen.ranks == (case.rank,), f"{case}: {seen}"


SLACK = 12.0
"""Seconds that all may take beyond the timeout, on a machine that is busy."""


# --- all cases --------------------------------------------------------------------------------

TAKING = (
    "beginning a take",
    "sharing out the work",
    "hashing and writing",
    "settling what is whose",
    "committing",
)
PHASES = {
    "take": TAKING,
    "async_take": TAKING,
    "restore": ("beginning a restore", "reading", "loading states"),
}
CALLS = {
    "take": ("write packs/*", "sync", "put_if_absent", "mark"),
    "async_take": ("write packs/*", "sync", "put_if_absent", "mark"),
    "restore": ("read_into",),
}


MOST = {"reading": 1, "loading": 1, "progress": 2}
"""How many places are tried of sequences that are long, or that the checks go on with."""


def sequences(verb: str, kind: str) -> Iterator[Place]:
    """Yield the first place of each sequence of places."""
    if kind != "hang":
        for phase in PHASES[verb]:
            yield Place("call", phase)
            yield Place("inside", phase)
    for call in CALLS[verb]:
        yield Place("before", call)
        if verb != "restore":
            yield Place("after", call)
    yield Place("reading")
    yield Place("progress")
    if verb == "restore":
        yield Place("loading")
    if kind in ("kill", "stop"):
        yield Place("end")


def all_results(
    world: Callable[[int], World],
    template: Path,
    folder: Path,
    timeout: float,
    *,
    every: int = 1,
    verbs: Sequence[str] = tuple(PHASES),
    kinds: Sequence[str] = tuple(CAUSES),
) -> Iterator[tuple[Case, Result]]:
    """Run all cases, or of each sequence of places only one of so many."""
    turn = itertools.count()
    for verb, kind, rank in itertools.product(verbs, kinds, (0, 1)):
        for place in sequences(verb, kind):
            most = MOST.get(place.how, 1000)
            for number in range(next(turn) % every % most, most, every):
                case = Case(verb, place._replace(number=number), kind, rank)
                result = run_case(world, template, folder / "case", case, timeout)
                if not result.phase:
                    break
                yield case, result


def saw(case: Case, result: Result) -> set[str]:
    """Return what the survivors saw, in words that are the same for all ranks."""
    texts = set()
    for rank, outcome in enumerate(result.outcomes):
        if outcome is None or rank == case.rank:
            continue
        text = outcome.seen.text.replace(f"rank {case.rank}", "rank *r*")
        text = re.sub(r"^the \w+ of '\w+': ", "", text)
        text = re.sub(r"within [\d.]+ s", "within *T* s", text)
        text = re.sub(r"for [\d.]+ s", "for *T* s", text)
        text = re.sub(r"\. When this rank looked.*", "", text)
        text = re.sub(r"\w+\([^)]*\) failed", "*call* failed", text)
        texts.add(text or "returned")
    return texts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hurt ranks at all places, and print a table.")
    parser.add_argument("--timeout", type=float, default=2.0, help="what ranks wait for each other")
    parser.add_argument("--every", type=int, default=1, help="run only one case of so many")
    parser.add_argument("--verbs", nargs="*", default=list(PHASES))
    parser.add_argument("--kinds", nargs="*", default=list(CAUSES))
    options = parser.parse_args(arguments)
    rows: dict[tuple[str, str, str], list[tuple[Case, Result]]] = {}
    with memory_folder() as folder, Pool() as pool:
        os.environ["CASNAP_CACHE_DIR"] = str(folder / "cache")
        pool.world(RANKS).run(take_base, str(folder / "base"))
        for case, result in all_results(
            pool.world,
            folder / "base",
            folder,
            options.timeout,
            every=options.every,
            verbs=options.verbs,
            kinds=options.kinds,
        ):
            rows.setdefault((case.verb, result.phase, case.kind), []).append((case, result))
            print(case, saw(case, result), file=sys.stderr, flush=True)
    print("| | hurt while | how | cases | the survivors saw | longest | committed | lost |")
    print("|---|---|---|---|---|---|---|---|")
    for (verb, phase, kind), cases in rows.items():
        texts = sorted(set().union(*(saw(*one) for one in cases)))
        seconds = max(
            outcome.seen.seconds
            for case, result in cases
            for rank, outcome in enumerate(result.outcomes)
            if outcome is not None and rank != case.rank
        )
        committed = sum(result.committed for _, result in cases)
        print(
            f"| {verb} | {phase} | {kind} | {len(cases)} | {'; '.join(texts)} | {seconds:.1f} s "
            f"| {committed} | 0 |"
        )
    print(f"\n{sum(map(len, rows.values()))} cases")


if __name__ == "__main__":
    main()
