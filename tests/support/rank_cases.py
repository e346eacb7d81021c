"""A rank that raises, dies or hangs at some place of a take or a restore, as all ranks run it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from casnap import PendingSnapshot, RNGState, Snapshot, StateDict, Stateful, Store
from casnap.backends import LocalBackend
from casnap.ranks.group import Group
from tests.support.faults import kill
from tests.support.faulty import Call, Fault, FaultyBackend, after, before, fail
from tests.support.yard import OnPurposeError, Seen, Yard, talk, watch

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loading()
        super().load_state_dict(state_dict)


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
        at, all_to_all, carry, leave = (
            Group.enter_phase,
            Group.all_to_all,
            Group._transfer,
            Group.leave,
        )

        def noting(group: Group, phase: str) -> None:
            self._now = phase
            at(group, phase)

        def calling(group: Group, *args: Any, **options: Any) -> Any:
            self._reach("call")
            return all_to_all(group, *args, **options)

        def carrying(group: Group, *args: Any) -> Any:
            group._communicate(lambda: self._reach("inside"))
            return carry(group, *args)

        def leaving(group: Group) -> None:
            if not group.ended:
                self._reach("end")
            leave(group)

        with ExitStack() as patches:
            calls: list[tuple[str, Callable[..., Any]]] = [
                ("enter_phase", noting),
                ("all_to_all", calling),
                ("_transfer", carrying),
                ("leave", leaving),
            ]
            for name, new in calls:
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
    plain = Store(LocalBackend(Path(path)))
    store = Store(arms.backend(path)) if hurt else plain
    state = app_state(1, *((arms.at("reading"), arms.at("loading")) if hurt else ()))
    progress = arms.at("progress") if hurt else nothing
    talk(60)  # in a first operation, a rank that died looks like one that is late
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

    def report(what: str, done: int, total: int) -> None:
        progress()

    if verb == "restore":
        snapshot = store["base"]
        snapshot.restore(state, progress=report, read_once=True, timeout=timeout)
        assert_holds(state, 0)
        return snapshot.commit_id
    how: dict[str, Any] = {"replicated": ["declared/**"], "progress": report, "timeout": timeout}
    if verb == "take":
        taken: Snapshot = store.take(state, name, **how)
        return taken.commit_id
    pending: PendingSnapshot = store.async_take(state, name, **how)
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
