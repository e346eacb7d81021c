"""Each verb meets each fault, at one call after the other: nothing that was committed is lost.

After each case, as another process sees it, the store holds what it held before or what the verb
makes of it, each snapshot whole. Without a repair the next take and the next collection work, and
leave nothing over. A process that lives on got an error of the right type, or none if the verb was
done; it can use the same store, and holds no memory and no threads.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import casnap.mirror.mirror
import casnap.runtime.backoff
from casnap import NewStore, Store
from casnap.backends import LocalBackend
from casnap.backends.local import store_folder
from casnap.errors import (
    PLACE_ERRORS,
    BackendError,
    CasnapError,
    DamagedError,
    NotAStoreError,
    StorageFullError,
    UnavailableError,
    UnclearCommitError,
    UnsupportedFormatError,
)
from tests.support.faults import (
    CHUNK,
    FILLING_CALLS,
    SYSTEM_CALLS,
    WRITING_CALLS,
    assert_given_back,
    assert_no_orphans,
    assert_packs_are_there,
    disk_full,
    files,
    in_child,
    interrupt,
    kill,
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
from tests.support.power import Disk, Journal
from tests.support.sweep import STEP, spread
from tests.support.unavailable import EXHAUSTED, unavailable
from tests.support.verbs import VERBS, States, make_bases, whole

pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("collected_by_hand")]


class Bases(NamedTuple):
    """The stores that cases work on copies of.

    Attributes:
        folder: Where they are; in memory, where that can be had.
        states: What of each can be restored.
        counts: How many calls of some names a verb makes, once that was counted.
    """

    folder: Path
    states: dict[str, States]
    counts: dict[tuple[str, str], int]


@pytest.fixture(scope="module")
def bases() -> Iterator[Bases]:
    with memory_folder() as folder, pytest.MonkeyPatch.context() as patch:
        made = make_bases(folder)
        patch.setenv("CASNAP_CACHE_DIR", str(folder / "cache"))
        yield Bases(folder, {name: whole(path / "store") for name, path in made.items()}, {})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have mirrors try again soon."""
    monkeypatch.setattr(casnap.runtime.backoff, "_FIRST", 0.02)
    monkeypatch.setattr(casnap.mirror.mirror, "_LOOK", 0.05)


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
        reads: Whether it also strikes at what does not write to the store.
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

    def meets(self, verb: str) -> bool:
        """Whether a verb makes calls that can fail so."""
        changes = VERBS[verb].changes
        if verb == "mirror" and self.lasting and self.raises:
            # It goes on until its place is well again; tests/transfer has it wait for that.
            return False
        if verb == "first-pull" and not self.of_system:
            # It reads as the other pull does.
            return False
        struck = changes == "store" or self.reads or (self.of_system and changes == "files")
        return struck and verb not in self.without

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


def collector_passes(call: Call) -> object:
    """Have another process collect without grace, and move what little of a pack is needed."""
    assert in_child(lambda: Store(call.backend.inner).gc(grace=0, repack=0.9)) == 0
    return call.go()


WRITING = tuple(WRITING_CALLS)
WRITE = ("write", "put_if_absent", "copy", "sync")
READ = ("read", "read_into", "size", "names")
MOVING = ("read", "read_into")
TWICE = ("put_if_absent", "sync", "delete", "tidy", "mark", "unmark", "keep_copy", *READ)
FOLDERS = ("posix_fallocate", "ftruncate", "symlink", "rename", "replace")
SYSTEM = (*SYSTEM_CALLS, *FOLDERS)
FILLING = (*FILLING_CALLS, *FOLDERS)
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
STOPPED: dict[str, Any] = {
    "raises": (KeyboardInterrupt,),
    "reads": True,
    "leaves": False,
    # The thread of a mirror gets no signals.
    "without": ("mirror",),
}

FAILURES = {
    "killed": Failure(after(before(kill)), WRITING, dies=True),
    "killed in the system": Failure(kill, SYSTEM, of_system=True, dies=True),
    "interrupted": Failure(after(before(interrupt)), **STOPPED),
    "full once": Failure(fail(StorageFullError), WRITE, **FULL),
    "full": Failure(fail(StorageFullError), WRITE, lasting=True, **FULL),
    "ENOSPC once": Failure(disk_full, FILLING, of_system=True, **FULL),
    "ENOSPC": Failure(disk_full, FILLING, of_system=True, lasting=True, **FULL),
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
# Of a cut of the power, `test_the_power_fails` tells more.
THOROUGH = {
    "power cut, all lost": Failure(after(power_cut(1)), WRITING, dies=True),
    "power cut, some lost": Failure(after(power_cut(0.5)), WRITING, dies=True),
    "killed before any call": Failure(before(kill), dies=True),
    "killed after any call": Failure(after(before(kill)), dies=True),
    "killed after a system call": Failure(
        kill, SYSTEM, of_system=True, dies=True, options={"after": True}
    ),
    "interrupted before": Failure(before(interrupt), **STOPPED),
    "interrupted before a system call": Failure(interrupt, SYSTEM, of_system=True, **STOPPED),
    "interrupted after a system call": Failure(
        interrupt, SYSTEM, of_system=True, **STOPPED, options={"after": True}
    ),
}
# What is damaged before no collector goes over.
LATE: dict[str, Any] = {"without": ("make", "repair", "repair-some")}
OVERTAKEN = {
    "overtaken as it commits": Failure(
        collector_passes, ("put_if_absent",), keys="roots/*", **LATE
    ),
}
OVERTAKEN_ANYWHERE = {"overtaken": Failure(collector_passes, reads=True, **LATE)}


# --- cases ------------------------------------------------------------------------------------


class Case:
    """A verb, to be done with copies of a store.

    Args:
        bases: The folder of the stores.
        verb: The verb.
    """

    def __init__(self, bases: Bases, verb: str) -> None:
        self.verb = VERBS[verb]
        self.stages = self.verb.stages(bases.states[self.verb.base])
        self.folder = bases.folder / "case"
        self.path = self.folder / "store"
        self._base = bases.folder / self.verb.base

    def fresh(self) -> FaultyBackend:
        # A copy has a cache of its own, and would look at those of the copies before.
        for left in (*self.folder.parent.glob("case*"), self.folder.with_name("cache")):
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(self._base, self.folder, symlinks=True)
        return FaultyBackend(LocalBackend(self.path))

    def do(self, place: FaultyBackend | Store) -> None:
        store = (
            place if isinstance(place, Store) else Store(place, create=NewStore(chunk_size=CHUNK))
        )
        self.verb.do(store, self.folder)

    def assert_goes_on(self, store: Store | Path, present: States, *, alters: bool = False) -> None:
        """Check that all is whole, that work goes on, and that nothing is left over.

        Args:
            store: The store.
            present: What of it is whole now.
            alters: Whether what was read may have looked damaged.
        """
        path = Path(store.uri) if isinstance(store, Store) else store
        if self.verb.mends:
            assert present.items() >= self.stages[0].items()
            Store(path).repair()
            present = whole(path)
            assert present == self.stages[-1]
        assert present in self.stages
        if self.verb.ends is not None:
            self.verb.ends(path, path.parent)
            present = whole(path)
        if present:
            assert_packs_are_there(path)
        snapshot = take(store, 20)
        if present and not alters:
            # No other fault is taken for damage: what is there is not stored anew.
            assert snapshot.stats.new_bytes < 100_000
        Store(path).gc(grace=0, repack=0.9)
        assert_no_orphans(path)
        assert whole(path) == {**present, "step_20": 20}
        assert self.verb.mends or Store(path).check(data=True).ok


class Cell(Case):
    """A verb and a fault.

    Args:
        bases: The folder of the stores.
        verb: The verb.
        failure: The fault.
    """

    def __init__(self, bases: Bases, verb: str, failure: Failure) -> None:
        super().__init__(bases, verb)
        self._failure = failure

    def count(self) -> int:
        """Return how many calls there are to strike at."""
        backend = self.fresh()
        if self._failure.of_system:
            with system_faults(names=[*self._failure.calls]) as calls:
                self.do(backend)
            return calls.count
        counter = Fault(lambda call: call.go(), self._failure.calls, self._failure.keys, times=None)
        with backend.during(counter):
            self.do(backend)
        return counter.struck

    def strike(self, k: int) -> None:
        """Do it, with that call failing; check what comes of it."""
        backend = self.fresh()
        there = files(self.path)
        store = None if self._failure.dies else Store(backend, create=NewStore(chunk_size=CHUNK))
        error = self._die(k, backend) if store is None else self._try(k, store, backend)
        present = whole(self.path)
        # A repair believes what it reads: only the next one finds that it was no damage.
        if error is None and not (self.verb.mends and self._failure.alters):
            assert present == self.stages[-1]
        if not self._failure.leaves:
            self._assert_nothing_is_left(error, there, present)
        self.assert_goes_on(store or self.path, present, alters=self._failure.alters)

    def _die(self, k: int, backend: FaultyBackend) -> str | None:
        def work() -> None:
            with self._failure.at(k, backend):
                self.do(backend)

        status = in_child(work)
        assert status in (0, -signal.SIGKILL)
        return "killed" if status else None

    def _try(self, k: int, store: Store, backend: FaultyBackend) -> BaseException | None:
        error = None
        with self._failure.at(k, backend):
            try:
                self.do(store)
            except self._failure.raises as e:
                error = e
        assert_given_back()
        return error

    def _assert_nothing_is_left(self, error: object, there: set[str], present: States) -> None:
        if isinstance(error, UnclearCommitError):
            assert "may be lost" in str(error)
            assert present in self.stages[1:]
        assert files(self.path, "tmp") <= files(self._base / "store", "tmp")
        new = {Path(name).parts[1] for name in files(self.path) - there}
        # What a repair saves may stay: the next one, or a collection after it, deletes it.
        if "roots" not in new and not self.verb.mends:
            assert new.isdisjoint({"packs", "index"})


# Of faults that differ in how long they last, in how much is lost, or in who tells them, each verb
# meets one; of verbs that commit by the same code each fault meets one. ``make soak`` has them all.
ALIKE = [
    ("killed", "killed in the system"),
    ("full once", "ENOSPC", "full", "ENOSPC once"),
    ("fails once", "fails"),
    ("a bit flips", "bits flip"),
    ("done twice", "answer lost"),
    ("torn", "cut short"),
]
VERBS_ALIKE = [
    ("tag", "publish", "rewind"),
    ("delete", "prune", "configure"),
    ("take-again", "overwrite", "import"),
    ("gc", "gc-with-grace"),
    ("repair", "repair-some"),
    ("first-pull", "pull"),
]


def left_out(verbs: Iterable[str], turn: int = 0) -> set[str]:
    """Return all but one of the verbs of each family."""
    families = [[verb for verb in family if verb in verbs] for family in VERBS_ALIKE]
    return {v for family in families for v in family if v != family[turn % len(family)]}


def seldom(*values: Any, is_seldom: bool, **options: Any) -> Any:
    return pytest.param(*values, marks=[pytest.mark.slow] * is_seldom, **options)


def cells(failures: dict[str, Failure]) -> list[Any]:
    """Return the verbs and faults that can meet."""
    met = [(f, v) for f in failures for v in VERBS if failures[f].meets(v)]
    left = set()
    for turn, verb in enumerate(VERBS):
        for group in ALIKE:
            some = [f for f in group if (f, verb) in met]
            left |= {(f, verb) for f in some if f != some[turn % len(some)]}
    for turn, failure in enumerate(failures):
        verbs = [v for f, v in met if f == failure and (f, v) not in left]
        left |= {(failure, v) for v in left_out(verbs, turn)}
    return [
        seldom(v, f, number, is_seldom=(f, v) in left, id=f"{f}-{v}")
        for number, (f, v) in enumerate(met)
    ]


@pytest.mark.parametrize(("verb", "failure", "number"), cells(FAILURES))
def test_a_verb_meets_a_fault(bases: Bases, verb: str, failure: str, number: int) -> None:
    meet(bases, verb, FAILURES[failure], number)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("verb", "failure", "number"), cells(THOROUGH))
def test_a_verb_meets_a_fault_at_any_call(
    bases: Bases, verb: str, failure: str, number: int
) -> None:
    meet(bases, verb, THOROUGH[failure], number)


@pytest.mark.usefixtures("unannounced")
@pytest.mark.parametrize(("verb", "failure", "number"), cells(OVERTAKEN))
def test_a_verb_that_a_collector_overtakes(
    bases: Bases, verb: str, failure: str, number: int
) -> None:
    meet(bases, verb, OVERTAKEN[failure], number)


@pytest.mark.slow
@pytest.mark.usefixtures("unannounced")
@pytest.mark.parametrize(("verb", "failure", "number"), cells(OVERTAKEN_ANYWHERE))
def test_a_verb_that_a_collector_overtakes_at_any_call(
    bases: Bases, verb: str, failure: str, number: int
) -> None:
    meet(bases, verb, OVERTAKEN_ANYWHERE[failure], number)


def meet(bases: Bases, verb: str, failure: Failure, number: int) -> None:
    cell = Cell(bases, verb, failure)
    calls = verb, f"{failure.calls} {failure.keys}"
    count = bases.counts[calls] = bases.counts.get(calls) or cell.count()
    assert count > 0
    for k in spread(count, number, most=1):
        cell.strike(k)


# --- the disk, its power, and what a process may open ---------------------------------------------

WRITERS = [(n, v) for n, v in enumerate(VERBS) if VERBS[v].changes == "store"]


# What was done in part cannot be done again as one, and a mirror does so by itself.
AT_ONCE = [(number, verb) for number, verb in WRITERS if verb not in ("several", "mirror")]


def some_of(verbs: list[tuple[int, str]], turn: int) -> list[Any]:
    left = left_out([verb for _, verb in verbs], turn)
    return [seldom(number, verb, is_seldom=verb in left) for number, verb in verbs]


@pytest.mark.parametrize(("number", "verb"), some_of(AT_ONCE, 0))
def test_a_sync_fails_once(bases: Bases, number: int, verb: str) -> None:
    """It passes when it is called again, though what it was to write is not on the disk.

    What has returned survives a crash. What has failed is done again, and then survives one too.
    """
    case = Case(bases, verb)
    with system_faults(names=["fsync"]) as syncs:
        case.do(case.fresh())
    for k in spread(syncs.count, number, most=4 if verb == "make" else 2):
        store = Store(case.fresh(), create=NewStore(chunk_size=CHUNK))
        with Disk(case.folder, fail_at=k).used() as disk:
            try:
                case.do(store)
            except PLACE_ERRORS:
                if k % 2:
                    store = Store(case.path, create=NewStore(chunk_size=CHUNK))
                if whole(case.path) != case.stages[-1] or case.stages[0] == case.stages[-1]:
                    case.do(store)
                else:
                    # A root that was put, but may be lost, is on the disk with the next one.
                    take(store, 19)
            crashed = disk.after_a_crash(case.folder.with_name("case-crashed")) / "store"
            found = whole(crashed)
            found.pop("step_19", None)
            assert found == case.stages[-1]
            take(store, 20)
            crashed = disk.after_a_crash(crashed.parent) / "store"
            assert whole(crashed).items() >= {**case.stages[-1], "step_20": 20}.items()


SHARES = (0, 0.5, 1)


@pytest.mark.parametrize(("number", "verb"), some_of(WRITERS, 1))
def test_the_power_fails(bases: Bases, number: int, verb: str) -> None:
    """Of what was not synced, any part may be lost."""
    case = Case(bases, verb)
    store = Store(case.fresh(), create=NewStore(chunk_size=CHUNK))
    # What another process has synced is not known to this one.
    store_folder._durable.clear()
    journal = Journal(case.folder)
    with journal.kept():
        case.do(store)
    last = len(journal.moments) - 1
    dice = random.Random(number)
    for share in SHARES if STEP == 1 else SHARES[number % 3 :][:1]:
        for moment in [*spread(last, number, most=1), last]:
            place = case.folder.with_name("case-crashed")
            crashed = journal.after_a_cut(moment, share, dice, place) / "store"
            present = whole(crashed)
            if moment == last:
                assert present == case.stages[-1]
            case.assert_goes_on(crashed, present)


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no file any more."""
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = max(int(fd) for fd in os.listdir("/proc/self/fd"))  # noqa: PTH208
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(top)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, most))
    while True:
        try:
            held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            break
    try:
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))


# What the system says of a file that is to be imported is Python's own error. Most verbs open what
# others open.
OPENING = ("make", "take", "async-take", "mirror", "delete", "gc", "repair", "copy-out", "restore")


@pytest.mark.parametrize(
    "verb",
    [seldom(v, is_seldom=v not in (*OPENING, "pull", "list")) for v in VERBS if v != "import"],
)
def test_a_process_that_may_open_no_more_files(bases: Bases, verb: str) -> None:
    """It says so, and takes nothing for damaged or missing."""
    case = Case(bases, verb)
    # What is imported at its first use cannot be where no file may be opened.
    case.do(case.fresh())
    store = Store(case.fresh(), create=NewStore(chunk_size=CHUNK))

    def work() -> None:
        assert whole(case.path) == case.stages[0]
        with no_more_files(), unavailable("exhausted", match="too many files open"):
            case.do(store)
        present = whole(case.path)
        assert present == case.stages[0]
        case.assert_goes_on(store, present)

    assert in_child(work) == 0


# --- several faults ---------------------------------------------------------------------------


def test_listings_are_stale(tmp_path: Path) -> None:
    """The newest root is found all the same, and takes go on from there."""
    backend = FaultyBackend(LocalBackend(tmp_path / "store"))
    take(Store(backend, create=NewStore(chunk_size=CHUNK)), 0)
    with backend.during(Fault(stale(), "names", times=None)) as (fault,):
        assert whole(tmp_path / "store") == {"step_0": 0}
        for step in range(1, 6):
            take(tmp_path / "store", step)
        store = Store(backend)
        assert len(store.snapshots()) == 6
        take(store, 6)
    assert fault.struck
    assert whole(tmp_path / "store") == {f"step_{step}": step for step in range(7)}


@pytest.mark.parametrize("seed", range(4))
def test_faults_at_random(tmp_path: Path, seed: int) -> None:
    """Takes and deletes, some of which fail: each one that returns has happened."""
    chance = random.Random(seed)
    path = tmp_path / "store"
    backend = FaultyBackend(LocalBackend(path))
    store = Store(backend, create=NewStore(chunk_size=CHUNK))
    acts: list[tuple[Act, tuple[str, ...], str]] = [
        *((act, COMMITTING, "*") for act in (fail(), lose_answer(), repeat())),
        *((act, MOVING, "*") for act in (short(50), flip_in_transit(77))),
        (fail(FileNotFoundError), MOVING, "packs/*"),
    ]
    steps: dict[str, int] = {}
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
