"""A store on a faulty backend loses nothing and believes nothing."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from casnap import Store
from casnap.backends import Backend, LocalBackend, MemoryBackend
from casnap.errors import (
    BackendError,
    CasnapError,
    DamagedError,
    NotAStoreError,
    StorageFullError,
    UnsupportedFormatError,
)
from tests.support.faults import CHUNK, app_state, assert_holds, files, in_child, take
from tests.support.faulty import (
    Act,
    Crash,
    Fault,
    FaultyBackend,
    Gate,
    after,
    crash,
    fail,
    flip,
    hold,
    lose_answer,
    repeat,
    short,
    stale,
    tear,
)
from tests.support.sweep import sweep

pytestmark = pytest.mark.sweep

WRITES = ("write", "put_if_absent", "sync")
READS = ("read", "read_into")
# All that a take or delete does, cleaning up included.
COMMITTING = (
    "write",
    "put_if_absent",
    "sync",
    "mark",
    "unmark",
    "keep_copy",
    "names",
    "delete",
    *READS,
)


@pytest.fixture
def inner(tmp_path: Path) -> Backend:
    return MemoryBackend(str(tmp_path))


@pytest.fixture
def backend(inner: Backend) -> FaultyBackend:
    return FaultyBackend(inner)


@pytest.fixture
def local(tmp_path: Path) -> FaultyBackend:
    """Return a faulty backend around a store on disk that holds step 0."""
    backend = FaultyBackend(LocalBackend(tmp_path / "store"))
    take(Store(backend, chunk_size=CHUNK), 0)
    return backend


def assert_steps(backend: Backend, steps: set[int], maybe: int | None = None) -> set[int]:
    """Check that a store holds the snapshots of exactly these steps, each once and whole."""
    found = {s.metadata.user["step"]: s for s in Store(backend).snapshots()}
    assert set(found) - {maybe} == steps - {maybe}
    for step, snapshot in found.items():
        assert_holds(snapshot, step)
    return set(found)


def copied(backend: MemoryBackend, name: str) -> MemoryBackend:
    """Return a copy of a store in memory."""
    copy = MemoryBackend(name)
    copy._objects.update(backend._objects)
    return copy


# --- faults -----------------------------------------------------------------------------------


def test_the_answer_to_the_root_is_lost(local: FaultyBackend) -> None:
    """The take recognises its root: one snapshot, and no error."""
    store = Store(local)
    with local.during(Fault(lose_answer(), "put_if_absent", "roots/*")) as (fault,):
        take(store, 1)
    assert fault.struck == 1
    assert_steps(local.inner, {0, 1})
    assert store.objects.newest().seq == 2


def test_the_root_is_put_twice(local: FaultyBackend) -> None:
    """A retry within the backend answers that the key is taken: by ourselves."""
    store = Store(local)
    with local.during(Fault(repeat(), "put_if_absent", times=None)) as (fault,):
        take(store, 1)
        store.delete("step_0")
    assert fault.struck == 2
    assert_steps(local.inner, {1})
    assert store.objects.newest().seq == 3


def test_a_store_is_made_though_answers_are_lost(backend: FaultyBackend, inner: Backend) -> None:
    with backend.during(Fault(repeat(), "put_if_absent", times=None)):
        take(Store(backend, chunk_size=CHUNK), 0)
    assert_steps(inner, {0})


@pytest.mark.parametrize("act", [fail(), lose_answer(), tear(10), crash()])
def test_a_store_whose_making_fails_can_be_made(tmp_path: Path, act: Act) -> None:
    for k in itertools.count():
        inner = MemoryBackend(f"{tmp_path}/{k}")
        fault = Fault(act, ("put_if_absent",), skip=k)
        try:
            Store(FaultyBackend(inner, fault), chunk_size=CHUNK).make()
        except (BackendError, Crash):
            pass
        else:
            break
        take(Store(inner, chunk_size=CHUNK), 0)
        assert_steps(inner, {0})
    assert k == 2


def test_a_torn_pack(local: FaultyBackend) -> None:
    """The take fails, what it wrote is gone, and the next one works."""
    store, before_it = Store(local), files(local.uri)
    for act in (tear(100), tear(100, StorageFullError)):
        with local.during(Fault(act, "write", "packs/*")), pytest.raises(BackendError):
            take(store, 1)
        local.tidy(0)
        assert files(local.uri) == before_it
        assert_steps(local.inner, {0})
    take(store, 1)
    assert_steps(local.inner, {0, 1})


@pytest.mark.parametrize("times", [1, None], ids=["once", "lasting"])
def test_a_full_disk_at_each_write(local: FaultyBackend, times: int | None) -> None:
    """A typed error, no trace, and the same store works when there is space again."""
    store = Store(local)
    for k in itertools.count():
        before_it = files(local.uri, "packs")
        with local.during(Fault(fail(StorageFullError), WRITES, skip=k, times=times)) as (fault,):
            try:
                take(store, 1)
            except StorageFullError:
                assert files(local.uri, "packs") == before_it
                assert_steps(local.inner, {0})
            except BackendError as e:
                # The root stands, but cannot be made durable.
                if "may be lost" not in str(e):
                    raise
                break
            else:
                break
        assert fault.struck
        assert_steps(local.inner, {0})
    assert k >= 5
    assert_steps(local.inner, {0, 1})


@pytest.mark.parametrize("act", [fail(), lose_answer(), repeat()])
def test_each_call_of_a_take_once(tmp_path: Path, act: Act) -> None:
    """After a failed call, the take raises or has committed, and the next one works."""
    made = MemoryBackend(f"{tmp_path}")
    take(Store(made, chunk_size=CHUNK), 0)
    for k in sweep():
        backend = FaultyBackend(copied(made, f"{tmp_path}/{k}"))
        store = Store(backend)
        committed, maybe = {0}, 1
        with backend.during(Fault(act, skip=k)) as (fault,):
            try:
                take(store, 1)
                committed.add(1)
            except CasnapError:
                pass
        found = assert_steps(backend.inner, committed, maybe)
        take(store, 2)
        assert_steps(backend.inner, found | {2})
        if not fault.struck:
            break
    assert k > 10


def test_everything_fails_from_some_call_on(local: FaultyBackend) -> None:
    """The error is told, and no thread stays."""
    threads = set(threading.enumerate())
    for k in itertools.count():
        store = Store(local)
        with local.during(Fault(fail(), COMMITTING, skip=k, times=None)) as (fault,):
            try:
                take(store, 1)
            except CasnapError:
                for thread in set(threading.enumerate()) - threads:
                    thread.join(300)
                    assert not thread.is_alive()
            else:
                break
        assert fault.struck
        if 1 in assert_steps(local.inner, {0}, maybe=1):
            store.delete("step_1")
    assert k > 10


def test_the_root_is_put_late(local: FaultyBackend) -> None:
    """Another process commits first: the take looks again, and both stand."""
    store, gate, path = Store(local), Gate(), local.uri
    with local.during(Fault(gate, "put_if_absent", "roots/*")):
        pending = store.async_take(app_state(1), "step_1", metadata={"step": 1})
        assert gate.reached.wait(300)
        assert in_child(lambda: Store(path).delete("step_0")) == 0
        gate.open()
        pending.wait()
    assert_steps(local.inner, {1})
    assert Store(local.inner).objects.newest().seq == 3


def test_listings_are_stale(local: FaultyBackend) -> None:
    """The newest root is found all the same, and takes go on from there."""
    with local.during(Fault(stale(), "names", times=None)) as (fault,):
        assert Store(local).objects.newest().seq == 1
        for step in range(1, 6):
            take(Store(local.inner), step)
        store = Store(local)
        assert store.objects.newest().seq == 6
        take(store, 6)
    assert fault.struck
    assert_steps(local.inner, set(range(7)))


def test_writes_become_visible_late(local: FaultyBackend) -> None:
    """Up to the sync they may; no root names what is not there."""
    store = Store(local)
    with local.during(Fault(hold(), "write", times=None)) as (fault,):
        take(store, 1)
    assert fault.struck
    assert_steps(local.inner, {0, 1})


@pytest.mark.parametrize("act", [flip(), flip(4301), short(0), short(100)])
@pytest.mark.parametrize("keys", ["packs/*", "index/*", "roots/*", "casnap.json"])
def test_what_is_read_is_not_what_was_written(
    local: FaultyBackend, keys: str, act: Act, cache_dir: Path
) -> None:
    """A typed error or the right bytes, never others."""
    damaged = 0
    for times in (1, None):
        for k in itertools.count():
            shutil.rmtree(cache_dir, ignore_errors=True)
            with local.during(Fault(act, READS, keys, skip=k, times=times)) as (fault,):
                try:
                    assert_holds(Store(local)["step_0"], 0)
                except (DamagedError, NotAStoreError, UnsupportedFormatError):
                    damaged += 1
            if not fault.struck:
                break
        assert k
    assert damaged
    assert_steps(local.inner, {0})


# --- crashes ----------------------------------------------------------------------------------


def lost(how: int) -> bool | Callable[[str], bool]:
    """Return which changes that were not synced a crash of the machine loses."""
    if how < 2:
        return bool(how)
    chance = random.Random(how)
    return lambda key: chance.random() < 0.5


@pytest.mark.parametrize("moment", [lambda act: act, after], ids=["before", "after"])
@pytest.mark.parametrize("how", range(3))
def test_a_crash_at_each_call(tmp_path: Path, how: int, moment: Callable[[Act], Act]) -> None:
    """Committed snapshots are whole, and the next process needs no repair."""
    # In a child: a crash leaves threads behind, which end with their process.
    assert in_child(lambda: crash_at_each_call(str(tmp_path), lost(how), moment)) == 0


def crash_at_each_call(
    name: str, losing: bool | Callable[[str], bool], moment: Callable[[Act], Act]
) -> None:
    made = MemoryBackend(name)
    for step in (0, 1):
        take(Store(made, chunk_size=CHUNK), step)
    for k in sweep(times=2):
        inner = copied(made, f"{name}/{k}")
        backend = FaultyBackend(inner)
        store = Store(backend)
        backend.faults.append(Fault(moment(crash(losing_unsynced=losing)), skip=k))
        try:
            store.delete("step_0")
            take(store, 2)
        except Crash:
            pass
        else:
            break
        found = {s.metadata.user["step"] for s in Store(inner).snapshots()}
        assert {1} <= found <= {0, 1, 2}
        assert found & {0, 2} != {0, 2}
        for step in (3, 4):
            take(Store(inner), step)
        assert_steps(inner, found | {3, 4})
    assert k > 20


@pytest.mark.parametrize("seed", range(8))
def test_faults_at_random(tmp_path: Path, seed: int) -> None:
    """Takes and deletes, some of which fail: each one that returns has happened."""
    chance = random.Random(seed)
    inner = MemoryBackend(f"{tmp_path}")
    backend = FaultyBackend(inner)
    store = Store(backend, chunk_size=CHUNK)
    acts: list[tuple[Act, tuple[str, ...], str]] = [
        *((act, COMMITTING, "*") for act in (fail(), lose_answer(), repeat())),
        *((act, READS, "*") for act in (short(50), flip(77))),
        (fail(FileNotFoundError), READS, "packs/*"),
    ]
    steps: set[int] = set()
    for step in range(12):
        faults = [
            Fault(act, names, keys, times=None, chance=0.02, seed=chance.getrandbits(32))
            for act, names, keys in acts
        ]
        with backend.during(*faults):
            try:
                take(store, step)
                steps.add(step)
                if chance.random() < 0.3:
                    gone = chance.choice(sorted(steps))
                    steps.discard(gone)
                    store.delete(f"step_{gone}")
            except CasnapError:
                # It may have happened, or not.
                steps = {s.metadata.user["step"] for s in Store(inner).snapshots()}
        assert_steps(inner, steps)
