"""A process that dies or is interrupted at any moment costs the store nothing that it held."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from casnap import Snapshot, Store
from casnap.runtime.buffers import SLOTS, shared_pool
from tests.support.faults import (
    CHUNK,
    WRITING_CALLS,
    Calls,
    app_state,
    assert_holds,
    assert_store,
    backend_faults,
    files,
    in_child,
    interrupt,
    kill,
    start,
    system_faults,
    take,
    wait,
)
from tests.support.sweep import sweep

pytestmark = pytest.mark.sweep

Faults = Callable[..., "Calls"]
KILLED = -signal.SIGKILL


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a store of two snapshots; each case works on a copy."""
    store = Store(tmp_path / "base", chunk_size=CHUNK).make()
    take(store, 0)
    take(store, 1)
    return tmp_path / "base"


def crash_everywhere(
    base: Path,
    work: Callable[[Path], object],
    check: Callable[[Path], object],
    faults: Faults,
    **options: bool,
) -> None:
    """Do some work on copies of a store, killed at each of its calls in turn; check each copy."""
    copy = base.parent / "copy"

    def fresh() -> Path:
        shutil.rmtree(copy, ignore_errors=True)
        if base.exists():
            shutil.copytree(base, copy)
        return copy

    for k in sweep():
        fresh()

        def crashing(k: int = k) -> None:
            with faults(k, kill, **options):
                work(copy)

        status = in_child(crashing)
        check(copy)
        if status == 0:
            # There are no more calls.
            assert k > (2 if faults is writing else 5)
            return
        assert status == KILLED


# Between two calls that write, what is on the disk stays the same.
writing = partial(backend_faults, names=WRITING_CALLS)
EACH_KILL = [
    pytest.param(writing, True, id="after-writing"),
    *(
        pytest.param(faults, after, id=name, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
        for faults, after, name in [
            (backend_faults, False, "before-backend"),
            (backend_faults, True, "after-backend"),
            (system_faults, False, "before-system"),
            (system_faults, True, "after-system"),
        ]
    ),
]
# A system call that ended well is soon followed by the next, before which is tested.
EACH_MOMENT = [
    pytest.param(backend_faults, False, id="before-backend"),
    pytest.param(backend_faults, True, id="after-backend"),
    pytest.param(system_faults, False, id="before-system", marks=pytest.mark.slow),
    pytest.param(system_faults, True, id="after-system", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("faults", "after"), EACH_KILL)
def test_a_take_killed_at_any_call(base: Path, faults: Faults, after: bool) -> None:
    def check(store: Path) -> None:
        found = assert_store(store, {0, 1}, maybe=2)
        take(store, 2, overwrite=2 in found)
        assert_store(store, {0, 1, 2})

    crash_everywhere(base, lambda store: take(store, 2), check, faults, after=after)


@pytest.mark.parametrize(("faults", "after"), EACH_KILL)
def test_an_overwriting_take_killed_at_any_call(base: Path, faults: Faults, after: bool) -> None:
    def overwrite(store: Path) -> None:
        Store(store).take(app_state(7), "step_1", metadata={"step": 7}, overwrite=True)

    def check(store: Path) -> None:
        snapshot = Store(store)["step_1"]
        step = snapshot.metadata.user["step"]
        assert step in (1, 7)
        assert_holds(snapshot, step)
        assert_holds(Store(store)["step_0"], 0)

    crash_everywhere(base, overwrite, check, faults, after=after)


@pytest.mark.parametrize(("faults", "after"), EACH_KILL)
def test_a_delete_killed_at_any_call(base: Path, faults: Faults, after: bool) -> None:
    def check(store: Path) -> None:
        found = assert_store(store, {0}, maybe=1)
        if 1 in found:
            Store(store).delete("step_1")
        take(store, 1)
        assert_store(store, {0, 1})

    crash_everywhere(base, lambda store: Store(store).delete("step_1"), check, faults, after=after)


@pytest.mark.parametrize(("faults", "after"), EACH_KILL)
def test_the_creation_of_a_store_killed_at_any_call(
    tmp_path: Path, faults: Faults, after: bool
) -> None:
    def check(store: Path) -> None:
        take(store, 0)
        assert_store(store, {0})

    crash_everywhere(
        tmp_path / "none", lambda store: Store(store).make(), check, faults, after=after
    )


@pytest.mark.parametrize(("faults", "after"), EACH_KILL)
def test_an_async_take_killed_at_any_call(base: Path, faults: Faults, after: bool) -> None:
    def work(store: Path) -> None:
        pending = Store(store).async_take(app_state(2), "step_2", metadata={"step": 2})
        pending.wait()

    def check(store: Path) -> None:
        found = assert_store(store, {0, 1}, maybe=2)
        take(store, 2, overwrite=2 in found)
        assert_store(store, {0, 1, 2})

    crash_everywhere(base, work, check, faults, after=after)


def takes_killed_at_random(tmp_path: Path, rounds: int, seed: int) -> None:
    """Kill a child that takes on and on; every snapshot it told of must be there."""
    path, told = tmp_path / "store", tmp_path / "told"
    told.touch()
    dice = random.Random(seed)

    def take_on_and_on() -> None:
        store = Store(path, chunk_size=CHUNK).make()
        latest = store.latest()
        step = latest.metadata.user["step"] + 1 if latest else 0
        with told.open("a", buffering=1) as f:
            while True:
                take(store, step)
                f.write(f"{step}\n")
                step += 1

    for _ in range(rounds):
        known, waits = told.read_text(), dice.random() < 0.9
        pid = start(take_on_and_on)
        # On a busy machine the first take of a child may come late. Some children die before it.
        while waits and told.read_text() == known:
            time.sleep(0.001)
        time.sleep(dice.uniform(0.01, 0.1))
        os.kill(pid, signal.SIGKILL)
        assert wait(pid) == KILLED
        latest = Store(path).latest()
        newest = -1 if latest is None else latest.metadata.user["step"]
        # The last one may have been committed without being told of.
        last = max(map(int, told.read_text().split()), default=-1)
        assert last <= newest <= last + 1
        if latest is not None:
            assert_holds(latest, newest)
        told.write_text("".join(f"{i}\n" for i in range(newest + 1)))
    assert_store(path, set(map(int, told.read_text().split())))


def test_takes_killed_at_random_moments(tmp_path: Path) -> None:
    takes_killed_at_random(tmp_path, rounds=12, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_takes_killed_at_many_random_moments(tmp_path: Path, seed: int) -> None:
    takes_killed_at_random(tmp_path, rounds=100, seed=seed)


# --- Ctrl-C -----------------------------------------------------------------------------------


def assert_no_slot_is_lost() -> None:
    pool = shared_pool(CHUNK + (64 << 10))
    assert len(pool._free) == pool._made <= SLOTS
    # Python never forgets a thread whose start was interrupted.
    # A daemon serves the connections of the whole process.
    left = [t for t in threading.enumerate() if t.name.startswith("casnap") and not t.daemon]
    assert not [t for t in left if t.is_alive()]


@pytest.mark.parametrize(("faults", "after"), EACH_MOMENT)
def test_a_take_interrupted_at_any_call(base: Path, faults: Faults, after: bool) -> None:
    steps, step = {0, 1}, 2
    with faults() as counter:
        take(base, step)
    steps.add(step)
    for k in range(counter.count):
        step += 1
        with faults(k, interrupt, after=after) as calls:
            try:
                take(base, step)
            except KeyboardInterrupt:
                assert calls.struck
            else:
                # Where a marker is written, or a root is: the take stands, whatever came after.
                steps.add(step)
        if step in Store(base).snapshots()[-1].metadata.user.values():
            steps.add(step)
        assert_no_slot_is_lost()
    assert_store(base, steps)
    take(base, step + 1)
    assert_store(base, steps | {step + 1})


def test_an_interrupted_take_deletes_its_packs(base: Path) -> None:
    before = files(base)
    store = Store(base).make()
    with (
        backend_faults(0, interrupt, names=["write"], after=True),
        pytest.raises(KeyboardInterrupt),
    ):
        take(store, 2)
    assert files(base) == before


class Alarm:
    """Sends SIGINT to this process after a while."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))

    def __enter__(self) -> Alarm:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()


def _seconds(work: Callable[[int], object], i: int) -> float:
    begun = time.monotonic()
    work(i)
    return time.monotonic() - begun


def interrupted_at_random(work: Callable[[int], object], rounds: int) -> int:
    """Do some work again and again with a SIGINT at some moment; return how many were cut off."""
    dice = random.Random(5)
    usual = min(_seconds(work, i) for i in range(5))
    interrupts = 0
    for i in range(5, rounds + 5):
        try:
            with Alarm(dice.uniform(0, usual)):
                # Less than before, if the machine was busy then.
                usual = min(usual, _seconds(work, i))
        except KeyboardInterrupt:
            interrupts += 1
    return interrupts


def test_takes_interrupted_by_signals(tmp_path: Path) -> None:
    def work() -> None:
        path = tmp_path / "store"
        assert interrupted_at_random(lambda i: take(path, i), 60) > 10
        assert_no_slot_is_lost()
        take(path, 1000)
        steps = {s.metadata.user["step"] for s in Store(path).snapshots()}
        assert steps >= {0, 1, 1000}
        assert_store(path, steps)

    assert in_child(work) == 0


def test_async_takes_interrupted_by_signals(tmp_path: Path) -> None:
    def work() -> None:
        store = Store(tmp_path / "store", chunk_size=CHUNK).make()

        def async_take(i: int) -> None:
            pending = store.async_take(app_state(i), f"step_{i}", metadata={"step": i})
            pending.wait()

        assert interrupted_at_random(async_take, 60) > 10
        take(store, 1000)
        assert_no_slot_is_lost()
        assert_store(store.uri, {s.metadata.user["step"] for s in store.snapshots()})

    assert in_child(work) == 0


def test_restores_interrupted_by_signals(base: Path) -> None:
    def work() -> None:
        snapshot = Store(base)["step_1"]
        interrupted_at_random(lambda _: assert_holds(snapshot, 1), 60)
        assert_no_slot_is_lost()
        assert_holds(snapshot, 1)

    assert in_child(work) == 0


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_restore_interrupted_at_any_call(base: Path, after: bool) -> None:
    snapshot = Store(base)["step_1"]
    assert_holds(snapshot, 1)
    with backend_faults() as counter:
        assert_holds(snapshot, 1)
    for k in range(counter.count):
        state = app_state(0)
        loaded: list[object] = []
        state["state"].load_state_dict = loaded.append  # type: ignore[method-assign]
        with backend_faults(k, interrupt, after=after), pytest.raises(KeyboardInterrupt):
            snapshot.restore(state)
        assert loaded == []
        assert_no_slot_is_lost()
    assert_holds(snapshot, 1)


class Gate:
    """Holds back a call until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(300)


def test_an_interrupted_take_waits_for_its_threads(base: Path) -> None:
    before, gate = files(base), Gate()

    def interrupt_soon() -> None:
        gate.reached.wait(300)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        gate.open.set()

    signals = threading.Thread(target=interrupt_soon)
    signals.start()
    with backend_faults(0, gate, names=["write"]), pytest.raises(KeyboardInterrupt):
        take(base, 2)
    signals.join()
    assert gate.open.is_set()
    assert_no_slot_is_lost()
    assert files(base) == before


def test_an_interrupted_wait_can_be_repeated(base: Path) -> None:
    gate = Gate()
    with backend_faults(0, gate, names=["write"]):
        pending = Store(base).async_take(app_state(2), "step_2", metadata={"step": 2})
        assert gate.reached.wait(300)
        for _ in range(2):
            # On a busy machine the signal may come before the wait begins.
            with pytest.raises(KeyboardInterrupt), Alarm(0.05):
                pending.wait()
        assert not pending.done()
        gate.open.set()
        snapshot = pending.wait()
    assert isinstance(snapshot, Snapshot)
    assert pending.done()
    assert_store(base, {0, 1, 2})
