"""Each verb meets each fault, at one call after the other: nothing that was committed is lost.

After each case, as another process sees it, the store holds what it held before or what the verb
makes of it, each snapshot whole. Without a repair the next take and the next collection work, and
leave nothing over. A process that lives on got an error of the right type, or none if the verb was
done; it can use the same store, and holds no memory and no threads.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from casnap import Retention, Store
from casnap.backends import LocalBackend
from casnap.errors import (
    BackendError,
    CasnapError,
    DamagedError,
    NotAStoreError,
    StorageFullError,
    UnavailableError,
    UnclearCommitError,
    UnsupportedFormatError,
)
from casnap.format.records import pack_key
from casnap.maintenance.check import CheckReport
from casnap.maintenance.repair import RepairReport
from tests.support.damaged import change, flip, record_of
from tests.support.faults import (
    CHUNK,
    FILLING_CALLS,
    KEY,
    WRITING_CALLS,
    app_state,
    assert_equal,
    assert_given_back,
    assert_holds,
    assert_no_orphans,
    assert_packs_are_there,
    content,
    disk_full,
    files,
    in_child,
    interrupt,
    kill,
    littered_store,
    memory_folder,
    system_faults,
    take,
)
from tests.support.faulty import (
    Act,
    Call,
    Fault,
    FaultyBackend,
    after,
    before,
    fail,
    hold,
    lose_answer,
    repeat,
    short,
    stale,
    tear,
)
from tests.support.faulty import flip as flip_in_transit
from tests.support.sweep import spread
from tests.support.unavailable import EXHAUSTED

pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("collected_by_hand")]

# --- verbs ------------------------------------------------------------------------------------

Steps = dict[str, int]
"""The names of snapshots, and the steps whose state they hold."""

LITTERED = {"step_3": 3, "step_4": 4}


@dataclass(frozen=True)
class Verb:
    """Something that is done with a store.

    Attributes:
        do: Does it.
        result: What the store holds then; None: what it held before.
        base: Which store it is done with.
        writes: Whether it changes the store.
    """

    do: Callable[[Store], object]
    result: Steps | None = None
    base: str = "littered"
    writes: bool = True

    @property
    def mends(self) -> bool:
        """Whether the store is damaged before."""
        return self.base in ("unindexed", "wrecked")


def async_take(store: Store) -> None:
    store.async_take(app_state(9), "step_9", metadata={"step": 9}).wait()


def overwrite(store: Store) -> None:
    store.take(app_state(7), "step_3", metadata={"step": 7}, overwrite=True)


def copy_in(store: Store) -> None:
    source = Store("memory://source-of-copies", chunk_size=CHUNK)
    if "step_9" not in source:
        take(source, 9)
    source.copy(to=store)


def import_file(store: Store) -> None:
    file = Path(f"{store.uri}.pt")
    torch.save(content(9), file)
    store.import_file(file, "step_9", key=KEY, metadata={"step": 9})


def restore(store: Store) -> None:
    state = app_state(0)
    loaded: list[dict[str, Any]] = []
    state[KEY].load_state_dict = loaded.append  # type: ignore[method-assign]
    try:
        store["step_3"].restore(state)
    except BaseException:
        assert loaded == []
        raise
    assert_equal(loaded[0], content(3))


def read_object(store: Store) -> None:
    assert torch.equal(store["step_4"].read_object(f"{KEY}/weight"), content(4)["weight"])


def export(store: Store) -> None:
    target = Path(f"{store.uri}-exported/state.pt")
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir()
    try:
        store["step_4"].export(target)
    except BaseException:
        assert list(target.parent.iterdir()) == []
        raise
    assert_equal(torch.load(target)[KEY], content(4))


def copy_out(store: Store) -> None:
    place = Store(f"memory:/{store.uri}-{random.random()}", chunk_size=CHUNK)
    try:
        store.copy(to=place)
    finally:
        for snapshot in place.snapshots():
            assert_holds(snapshot, LITTERED[snapshot.name])
    assert {snapshot.name for snapshot in place.snapshots()} == {*LITTERED}


def all_well(report: CheckReport | RepairReport) -> None:
    if not report.ok:
        raise DamagedError("it says that there is damage")


NINE = LITTERED | {"step_9": 9}
VERBS = {
    "make": Verb(lambda store: store.make(), {}, base="none"),
    "take": Verb(lambda store: take(store, 9), NINE),
    # The content of a snapshot that was deleted, which no longer may be relied on.
    "take-again": Verb(lambda store: take(store, 0), LITTERED | {"step_0": 0}),
    "async-take": Verb(async_take, NINE),
    "overwrite": Verb(overwrite, LITTERED | {"step_3": 7}),
    "import": Verb(import_file, NINE),
    "copy-in": Verb(copy_in, NINE),
    "delete": Verb(lambda store: store.delete("step_3"), {"step_4": 4}),
    "prune": Verb(lambda store: store.prune(Retention(keep_last=1)), {"step_4": 4}),
    "tag": Verb(lambda store: store.tag("step_3", "best")),
    "configure": Verb(lambda store: store.configure(codec="zstd")),
    "gc": Verb(lambda store: store.gc(grace=0, repack=0.9)),
    "gc-with-grace": Verb(lambda store: store.gc(grace=3600, repack=0.9)),
    "repair": Verb(lambda store: all_well(store.repair()), LITTERED, base="unindexed"),
    "repair-some": Verb(lambda store: store.repair(), {"step_3": 3}, base="wrecked"),
    "restore": Verb(restore, writes=False),
    "read_object": Verb(read_object, writes=False),
    "list": Verb(lambda store: store.snapshots(), writes=False),
    "usage": Verb(lambda store: store.usage(), writes=False),
    "check": Verb(lambda store: all_well(store.check(data=True)), writes=False),
    "export": Verb(export, writes=False),
    "copy-out": Verb(copy_out, writes=False),
}


class Bases(NamedTuple):
    """The stores that cases work on copies of.

    Attributes:
        folder: Where they are; in memory, where that can be had.
        steps: What of each can be restored.
        counts: How many calls of some names a verb makes, once that was counted.
    """

    folder: Path
    steps: dict[str, Steps]
    counts: dict[tuple[str, tuple[str, ...], str], int]


@pytest.fixture(scope="module")
def bases() -> Iterator[Bases]:
    with memory_folder() as folder:
        littered = littered_store(folder / "littered")
        unindexed = shutil.copytree(littered, folder / "unindexed")
        shutil.rmtree(unindexed / "casnap-store/index")
        wreck(shutil.copytree(littered, folder / "wrecked"))
        names = {verb.base for verb in VERBS.values()}
        yield Bases(folder, {name: whole(folder / name) for name in names}, {})


def wreck(path: Path) -> None:
    """Damage a chunk of step 4, cut off the footer of a pack of step 3, and lose a segment."""
    _, lost = record_of(path, content(4)["weight"][: CHUNK // 4])
    _, torn = record_of(path, content(3)["weight"][: CHUNK // 4])
    inner = path / "casnap-store"
    change(inner / pack_key(lost.pack), flip(lost.offset + 11))
    change(inner / pack_key(torn.pack), lambda raw: raw[:-30])
    lists = [f for f in (inner / "index").iterdir() if bytes(torn.pack) not in f.read_bytes()]
    max(lists).unlink()


# --- faults -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """A way in which calls fail.

    Attributes:
        act: What is done in place of a call of the backend; or for a call of the system what is
            done before it.
        calls: The names of these calls; empty for all of the backend.
        of_system: Whether they are calls of the system.
        keys: A pattern for the keys of calls of the backend.
        lasting: Whether all later calls fail too.
        raises: What a verb may raise; nothing: it must succeed.
        dies: Whether the process dies of it.
        reads: Whether it also strikes at what only reads.
        alters: Whether what is read may look damaged.
        leaves: Whether what was begun may be left over.
        without: The verbs that make no such call, or cannot know better.
    """

    act: Any
    calls: tuple[str, ...] = ()
    of_system: bool = False
    keys: str = "*"
    lasting: bool = False
    raises: tuple[type[BaseException], ...] = ()
    dies: bool = False
    reads: bool = False
    alters: bool = False
    leaves: bool = True
    without: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def at(self, k: int, backend: FaultyBackend) -> AbstractContextManager[Any]:
        """Have one call after so many others fail, within a block."""
        if self.of_system:
            return system_faults(k, self.act, [*self.calls], lasting=self.lasting, **self.options)
        times = None if self.lasting else 1
        return backend.during(Fault(self.act, self.calls, self.keys, skip=k, times=times))


def power_cut(share: float) -> Act:
    """Lose the machine, and of what was not synced each change with some probability."""

    def act(call: Call) -> None:
        chance = random.Random(len(call.backend.log))
        call.backend.crash(losing_unsynced=lambda _: chance.random() < share)
        kill()

    return act


WRITING = tuple(WRITING_CALLS)
WRITE = ("write", "put_if_absent", "copy", "sync")
READ = ("read", "read_into", "size", "names")
MOVING = ("read", "read_into")
TWICE = ("put_if_absent", "sync", "delete", "tidy", "mark", "unmark", "keep_copy", *READ)
SYSTEM = ("open", "pwrite", "fsync", "link", "mkdir", "unlink", "chmod", "fchmod", "rmdir")
COMMITTING = (
    "write",
    "put_if_absent",
    "sync",
    "mark",
    "unmark",
    "keep_copy",
    "names",
    "delete",
    *MOVING,
)
FULL: dict[str, Any] = {"raises": (StorageFullError, UnclearCommitError), "leaves": False}
BROKEN: dict[str, Any] = {
    "raises": (DamagedError, NotAStoreError, UnsupportedFormatError),
    "reads": True,
    "alters": True,
    # What a repair reads is all that it knows of a pack whose footer is gone.
    "without": ("make", "repair-some"),
}
STOPPED: dict[str, Any] = {"raises": (KeyboardInterrupt,), "reads": True, "leaves": False}

FAILURES = {
    "killed": Failure(after(before(kill)), WRITING, dies=True),
    "power cut, all lost": Failure(after(power_cut(1)), WRITING, dies=True),
    "power cut, some lost": Failure(after(power_cut(0.5)), WRITING, dies=True),
    "interrupted": Failure(after(before(interrupt)), **STOPPED),
    "full once": Failure(fail(StorageFullError), WRITE, **FULL),
    "full": Failure(fail(StorageFullError), WRITE, lasting=True, **FULL),
    "ENOSPC once": Failure(disk_full, tuple(FILLING_CALLS), of_system=True, **FULL),
    "ENOSPC": Failure(disk_full, tuple(FILLING_CALLS), of_system=True, lasting=True, **FULL),
    "fails once": Failure(fail(), raises=(CasnapError,), reads=True),
    "fails": Failure(fail(), lasting=True, raises=(CasnapError,), reads=True),
    "no more files": Failure(fail(EXHAUSTED), READ, raises=(UnavailableError,), reads=True),
    "answer lost": Failure(lose_answer(), raises=(CasnapError,), reads=True),
    "answer to the root lost": Failure(
        lose_answer(), ("put_if_absent",), keys="roots/*", without=("make",)
    ),
    "done twice": Failure(repeat(), TWICE, lasting=True, reads=True),
    "seen late": Failure(hold(), ("write",), lasting=True, without=("make", "configure")),
    "torn": Failure(tear(100), ("write", "put_if_absent"), raises=(BackendError,)),
    "a bit flips": Failure(flip_in_transit(4301), MOVING, **BROKEN),
    "bits flip": Failure(flip_in_transit(), MOVING, lasting=True, **BROKEN),
    "cut short": Failure(short(100), MOVING, lasting=True, **BROKEN),
}
THOROUGH = {
    "killed before any call": Failure(before(kill), dies=True),
    "killed after any call": Failure(after(before(kill)), dies=True),
    "killed before a system call": Failure(kill, SYSTEM, of_system=True, dies=True),
    "killed after a system call": Failure(
        kill, SYSTEM, of_system=True, dies=True, options={"after": True}
    ),
    "interrupted before": Failure(before(interrupt), **STOPPED),
    "interrupted before a system call": Failure(interrupt, SYSTEM, of_system=True, **STOPPED),
    "interrupted after a system call": Failure(
        interrupt, SYSTEM, of_system=True, **STOPPED, options={"after": True}
    ),
}


# --- cases ------------------------------------------------------------------------------------


def whole(path: Path) -> Steps:
    """Return the names and steps of the snapshots of a store that can be restored."""
    if not (path / "casnap-store").exists():
        return {}
    steps = {}
    try:
        for snapshot in Store(path, create=False).snapshots():
            step = snapshot.metadata.user["step"]
            try:
                assert_holds(snapshot, step)
            except DamagedError:
                continue
            steps[snapshot.name] = step
    except (DamagedError, NotAStoreError):
        return {}
    return steps


class Cell:
    """A verb and a fault.

    Args:
        bases: The folder of the stores.
        verb: The verb.
        failure: The fault.
    """

    def __init__(self, bases: Bases, verb: Verb, failure: Failure) -> None:
        self._base = bases.folder / verb.base
        self._path = bases.folder / "copy"
        self._verb = verb
        self._failure = failure
        self._before = bases.steps[verb.base]
        self._result = self._before if verb.result is None else verb.result

    def fresh(self) -> FaultyBackend:
        shutil.rmtree(self._path, ignore_errors=True)
        if self._base.exists():
            shutil.copytree(self._base, self._path)
        return FaultyBackend(LocalBackend(self._path))

    def count(self) -> int:
        """Return how many calls there are to strike at."""
        backend = self.fresh()
        if self._failure.of_system:
            with system_faults(names=[*self._failure.calls]) as calls:
                self._verb.do(Store(backend, chunk_size=CHUNK))
            return calls.count
        counter = Fault(lambda call: call.go(), self._failure.calls, self._failure.keys, times=None)
        with backend.during(counter):
            self._verb.do(Store(backend, chunk_size=CHUNK))
        return counter.struck

    def strike(self, k: int) -> None:
        """Do it, with that call failing; check what comes of it."""
        backend = self.fresh()
        there = files(self._path)
        store = None if self._failure.dies else Store(backend, chunk_size=CHUNK)
        error = self._die(k, backend) if store is None else self._try(k, store, backend)
        present = whole(self._path)
        # A repair believes what it reads: only the next one finds that it was no damage.
        if error is None and not (self._verb.mends and self._failure.alters):
            assert present == self._result
        if not self._failure.leaves:
            self._assert_nothing_is_left(error, there, present)
        self._assert_goes_on(store, present)

    def _die(self, k: int, backend: FaultyBackend) -> str | None:
        def work() -> None:
            with self._failure.at(k, backend):
                self._verb.do(Store(backend, chunk_size=CHUNK))

        status = in_child(work)
        assert status in (0, -signal.SIGKILL)
        return "killed" if status else None

    def _try(self, k: int, store: Store, backend: FaultyBackend) -> BaseException | None:
        error = None
        with self._failure.at(k, backend):
            try:
                self._verb.do(store)
            except self._failure.raises as e:
                error = e
        assert_given_back()
        return error

    def _assert_nothing_is_left(self, error: object, there: set[str], present: Steps) -> None:
        if isinstance(error, UnclearCommitError):
            assert "may be lost" in str(error)
            assert present == self._result
        assert files(self._path, "tmp") <= files(self._base, "tmp")
        new = {Path(name).parts[1] for name in files(self._path) - there}
        # What a repair saves may stay: the next one, or a collection after it, deletes it.
        if "roots" not in new and not self._verb.mends:
            assert new.isdisjoint({"packs", "index"})

    def _assert_goes_on(self, store: Store | None, present: Steps) -> None:
        """Check that all is whole, that work goes on, and that nothing is left over."""
        if self._verb.mends:
            assert present.items() >= self._before.items()
            Store(self._path).repair()
            present = whole(self._path)
            assert present == self._result
        assert present in (self._before, self._result)
        if present:
            assert_packs_are_there(self._path)
        snapshot = take(store or Store(self._path, chunk_size=CHUNK), 20)
        if present and not self._failure.alters:
            # No other fault is taken for damage: what is there is not stored anew.
            assert snapshot.stats.new_bytes < 100_000
        Store(self._path).gc(grace=0, repack=0.9)
        assert_no_orphans(self._path)
        assert whole(self._path) == present | {"step_20": 20}


def cells(failures: dict[str, Failure]) -> list[Any]:
    """Return the verbs and faults that can meet."""
    return [
        pytest.param(verb, failure, number, id=f"{failure}-{verb}")
        for number, (failure, verb) in enumerate(
            (failure, verb)
            for failure in failures
            for verb in VERBS
            if VERBS[verb].writes or failures[failure].reads
            if verb not in failures[failure].without
        )
    ]


@pytest.mark.parametrize(("verb", "failure", "number"), cells(FAILURES))
def test_a_verb_meets_a_fault(
    bases: Bases, monkeypatch: pytest.MonkeyPatch, verb: str, failure: str, number: int
) -> None:
    meet(bases, monkeypatch, verb, FAILURES[failure], number)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("verb", "failure", "number"), cells(THOROUGH))
def test_a_verb_meets_a_fault_at_any_call(
    bases: Bases, monkeypatch: pytest.MonkeyPatch, verb: str, failure: str, number: int
) -> None:
    meet(bases, monkeypatch, verb, THOROUGH[failure], number)


def meet(
    bases: Bases, monkeypatch: pytest.MonkeyPatch, verb: str, failure: Failure, number: int
) -> None:
    cell = Cell(bases, VERBS[verb], failure)
    calls = verb, failure.calls, failure.keys
    count = bases.counts[calls] = bases.counts.get(calls) or cell.count()
    assert count > 0
    for k in spread(count, number, most=1):
        if failure.reads:
            # What is cached is not read.
            shutil.rmtree(bases.folder / "cache", ignore_errors=True)
            monkeypatch.setenv("CASNAP_CACHE_DIR", str(bases.folder / "cache"))
        cell.strike(k)


# --- several faults ---------------------------------------------------------------------------


def test_listings_are_stale(tmp_path: Path) -> None:
    """The newest root is found all the same, and takes go on from there."""
    backend = FaultyBackend(LocalBackend(tmp_path / "store"))
    take(Store(backend, chunk_size=CHUNK), 0)
    with backend.during(Fault(stale(), "names", times=None)) as (fault,):
        assert whole(tmp_path / "store") == {"step_0": 0}
        for step in range(1, 6):
            take(tmp_path / "store", step)
        store = Store(backend)
        assert len(store.snapshots()) == 6
        take(store, 6)
    assert fault.struck
    assert whole(tmp_path / "store") == {f"step_{step}": step for step in range(7)}


@pytest.mark.parametrize("seed", range(8))
def test_faults_at_random(tmp_path: Path, seed: int) -> None:
    """Takes and deletes, some of which fail: each one that returns has happened."""
    chance = random.Random(seed)
    path = tmp_path / "store"
    backend = FaultyBackend(LocalBackend(path))
    store = Store(backend, chunk_size=CHUNK)
    acts: list[tuple[Act, tuple[str, ...], str]] = [
        *((act, COMMITTING, "*") for act in (fail(), lose_answer(), repeat())),
        *((act, MOVING, "*") for act in (short(50), flip_in_transit(77))),
        (fail(FileNotFoundError), MOVING, "packs/*"),
    ]
    steps: Steps = {}
    for step in range(12):
        faults = [
            Fault(act, names, keys, times=None, chance=0.02, seed=chance.getrandbits(32))
            for act, names, keys in acts
        ]
        with backend.during(*faults):
            try:
                take(store, step)
                steps[f"step_{step}"] = step
                if chance.random() < 0.3:
                    gone = chance.choice(sorted(steps))
                    del steps[gone]
                    store.delete(gone)
            except CasnapError:
                # It may have happened, or not.
                steps = whole(path)
        assert whole(path) == steps
