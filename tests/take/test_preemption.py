"""A last take after a signal, on one process and on ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import casnap
from casnap import StateDict, Store
from casnap.errors import PreemptionError
from tests.support.ranks import World

Worlds = Callable[[int], World]


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Note the signals that an earlier handler gets."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_the_loop_with_a_last_take(tmp_path: Path, heard: list[int]) -> None:
    store, state = Store(tmp_path / "store"), StateDict(w=torch.zeros(1000), step=0)
    ours = signal.getsignal(signal.SIGTERM)
    with casnap.on_preemption(store, {"s": state}) as preemption:
        pending = None
        for step in range(100):
            state["w"] += 1
            state["step"] = step
            if step == 3:
                pending = store.async_take({"s": state}, "step_3")
                terminate()
                terminate()  # a second one changes nothing
            if preemption.step(step):
                break
        assert preemption.signalled
        assert preemption.step(77)
        assert signal.getsignal(signal.SIGTERM) != ours
    assert signal.getsignal(signal.SIGTERM) == ours
    assert heard == [signal.SIGTERM] * 2
    assert pending is not None
    assert pending.done()
    assert [s.name for s in store.snapshots()] == ["step_3", "preempted_3"]
    last = store.latest()
    assert last is not None
    assert preemption.snapshot is not None
    assert last.commit_id == preemption.snapshot.commit_id
    assert last.metadata.user == {"step": 3, "preempted": True}
    assert torch.equal(last.read_object("s/w"), torch.full((1000,), 4.0))


def test_a_take_that_is_not_done_in_time(
    tmp_path: Path, heard: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    store, state = Store(tmp_path / "store"), StateDict(w=torch.zeros(1000))
    go = threading.Event()

    def wait(*_: object) -> None:
        go.wait(60)

    pending = store.async_take({"s": state}, "step_0", progress=wait)
    with casnap.on_preemption(store, {"s": state}, within=0.1) as preemption:
        terminate()
        assert preemption.step(1)
    assert preemption.snapshot is None
    assert "still pending, so no last one was made" in caplog.text
    go.set()
    pending.wait()
    assert [s.name for s in store.snapshots()] == ["step_0"]


def test_only_the_main_thread_hears_signals(tmp_path: Path) -> None:
    store, errors = Store(tmp_path / "store"), list[BaseException]()

    def watch() -> None:
        try:
            casnap.on_preemption(store, {})
        except PreemptionError as e:
            errors.append(e)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="Invalid argument"):
        casnap.on_preemption(store, {}, signals=(signal.SIGTERM, signal.SIGKILL))
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(ValueError, match="within is a number of seconds above 0"):
        casnap.on_preemption(store, {}, within=0)


def train(path: str, signals: dict[int, int]) -> tuple[int, str, float]:
    """Train until a signal, which ranks send themselves after different steps."""
    rank = dist.get_rank()
    state = StateDict(own=torch.full((3000,), float(rank)), both=torch.zeros(5000))
    store = Store(path)
    with casnap.on_preemption(store, {"s": state}, every=0.02) as preemption:
        for step in range(100_000):
            state["own"] += 1
            state["both"] += 2
            if signals.get(rank) == step:
                terminate()
            if preemption.step(step):
                break
    assert preemption.snapshot is not None
    found = StateDict()
    preemption.snapshot.restore({"s": found})
    assert torch.equal(found["own"], state["own"])
    assert torch.equal(found["both"], state["both"])
    return step, preemption.snapshot.name, state["both"][0].item()


@pytest.mark.parametrize("signals", [{1: 3}, {0: 40, 1: 7}], ids=str)
def test_ranks_stop_after_the_same_step(
    world: Worlds, tmp_path: Path, signals: dict[int, int]
) -> None:
    first, second = world(2).run(train, str(tmp_path / "store"), signals)
    assert first == second
    step, name, both = first
    assert step >= min(signals.values())
    assert name == f"preempted_{step}"
    assert both == 2.0 * (step + 1)
