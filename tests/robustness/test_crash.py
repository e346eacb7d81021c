"""A process that dies or is interrupted at any moment costs the store nothing that it held."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.runtime.threads import Worker, python_gc_paused
from tests.support.faults import (
    CHUNK,
    app_state,
    assert_given_back,
    assert_holds,
    assert_store,
    backend_faults,
    files,
    in_child,
    take,
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a store of two snapshots."""
    store = Store(tmp_path / "base", create=NewStore(chunk_size=CHUNK)).make()
    take(store, 0)
    take(store, 1)
    return tmp_path / "base"


# --- Ctrl-C -----------------------------------------------------------------------------------


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


def async_take(store: Store, step: int) -> None:
    store.async_take(app_state(step), f"step_{step}", metadata={"step": step}).wait()


def restore(store: Store, _: int) -> None:
    assert_holds(store["step_1"], 1)


@pytest.mark.parametrize("work", [take, async_take, restore])
def test_interrupted_by_signals(base: Path, work: Callable[[Store, int], object]) -> None:
    def interrupted() -> None:
        store = Store(base)
        # A restore may be done before the signal comes.
        interrupts = interrupted_at_random(lambda i: work(store, i + 2), 30)
        assert interrupts > 5 or work is restore
        take(store, 1000)
        assert_given_back()
        steps = {s.metadata.user["step"] for s in Store(base).snapshots()}
        assert steps >= {0, 1, 1000}
        assert_store(base, steps)

    assert in_child(interrupted) == 0


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
    assert_given_back()
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


# --- at the moments that leave the most behind -----------------------------------------------


def interrupted_at(moment: str) -> type[Worker]:
    """Return a class of threads; one interrupt comes while one of them is made or started."""
    met: list[str] = []

    def here(now: str) -> None:
        if now == moment and not met:
            met.append(now)
            raise KeyboardInterrupt

    class Interrupted(Worker):
        def __init__(self, *args: Any) -> None:
            here("made")
            super().__init__(*args)

        def start(self) -> None:
            here("before it starts")
            super().start()
            here("after it started")

    return Interrupted


@pytest.mark.parametrize("moment", ["made", "before it starts", "after it started"])
def test_an_async_take_whose_thread_begins(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=64 << 10))
    state = {"s": StateDict(x=torch.randn(100_000))}
    monkeypatch.setattr("casnap.take.pending.Worker", interrupted_at(moment))
    with pytest.raises(KeyboardInterrupt):
        store.async_take(state, "step_1")
    store.async_take(state, "step_2").wait()
    store.take(state, "step_3")
    names = {s.name for s in store.snapshots()}
    assert names - {"step_1"} == {"step_2", "step_3"}
    for name in names:
        assert torch.equal(store[name].read_object("s/x"), state["s"]["x"])


def test_the_collector_of_python_is_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    disable = gc.disable

    def interrupted() -> None:
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    with pytest.raises(KeyboardInterrupt), python_gc_paused():
        pass
    assert gc.isenabled()
