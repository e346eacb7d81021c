"""A last take after a signal, on one process and on ranks."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import casnap
from casnap import StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import CasnapError
from tests.support.faults import in_child, start
from tests.support.faulty.acts import Gate
from tests.support.faulty.backend import Fault, FaultyBackend
from tests.support.ranks import Worlds


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
    assert "still pending, so no last snapshot was taken" in caplog.text
    go.set()
    pending.wait()
    assert [s.name for s in store.snapshots()] == ["step_0"]


def test_a_last_take_that_outlasts_the_time_goes_on(
    tmp_path: Path, heard: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    backend, gate = FaultyBackend(LocalBackend(tmp_path / "store")), Gate()
    store, state = Store(backend).make(), StateDict(w=torch.zeros(1000))
    with (
        backend.during(Fault(gate, "put_if_absent", "roots/*")),
        casnap.on_preemption(store, {"s": state}, within=0.2) as preemption,
    ):
        terminate()
        assert preemption.step(1)
        assert gate.reached.wait(60)
        assert preemption.snapshot is None
        assert "goes on in the background" in caplog.text
        assert store.snapshots() == []
        state["w"] += 1
        gate.open()
        store.take({"s": state}, "after")  # waits for it
    last, after = store.snapshots()
    assert (last.name, after.name) == ("preempted_1", "after")
    assert torch.equal(last.read_object("s/w"), torch.zeros(1000))


def test_a_last_take_that_fails_raises(tmp_path: Path, heard: list[int]) -> None:
    store = Store(tmp_path / "store").make()
    store.take({"s": StateDict(x=1)}, "step_0")
    with casnap.on_preemption(store, {"s": StateDict(x=object())}) as preemption:
        terminate()
        with pytest.raises(casnap.CasnapError, match="s/x"):
            preemption.step(1)
        assert preemption.step(2)
    assert [s.name for s in store.snapshots()] == ["step_0"]


class Signalling(StateDict):
    """A state that is signalled while it is being taken."""

    def state_dict(self) -> dict[str, object]:
        terminate()
        return super().state_dict()


def test_a_second_signal_during_the_last_take(tmp_path: Path, heard: list[int]) -> None:
    store = Store(tmp_path / "store").make()
    with casnap.on_preemption(store, {"s": Signalling(x=1)}) as preemption:
        terminate()
        assert preemption.step(5)
    assert preemption.snapshot is not None
    assert heard == [signal.SIGTERM] * 2
    assert [s.name for s in store.snapshots()] == ["preempted_5"]


# --- an error after a signal ------------------------------------------------------------------


class Data(torch.utils.data.Dataset[int]):
    """Numbers. The one who fetches the fourth signals the whole job, once that is waited for."""

    def __init__(self) -> None:
        self.is_waited_for = torch.multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> int:
        if number == 4:
            self.is_waited_for.wait(60)
            os.killpg(0, signal.SIGTERM)
            time.sleep(0.1)
        return number


def read(data: Data, *, ignore: bool) -> Iterator[int]:
    def ignore_sigterm(worker: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    loader = torch.utils.data.DataLoader(
        data,
        batch_size=None,
        num_workers=2,
        worker_init_fn=ignore_sigterm if ignore else None,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    for number in range(len(data)):
        if number == 4:
            data.is_waited_for.set()
        yield next(batches)


@pytest.mark.parametrize("ignore", [False, True])
def test_a_signal_to_the_whole_job_and_the_workers_of_its_loader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, ignore: bool
) -> None:
    """The state after the last whole step is taken. Workers that ignore the signal go on."""

    def train() -> None:
        os.setpgrp()
        store, state = Store(tmp_path / "store").make(), StateDict(seen=-1)
        error = None
        try:
            with casnap.on_preemption(store, {"s": state}) as preemption:
                for step, batch in enumerate(preemption.batches(read(Data(), ignore=ignore))):
                    state["seen"] = batch
                    if preemption.step(step):
                        break
        except RuntimeError as e:
            error = str(e)
        assert preemption.snapshot is not None
        assert preemption.snapshot.read_object("s/seen") == step
        assert [s.name for s in store.snapshots()] == [f"preempted_{step}"]
        if ignore:
            assert step >= 4
            assert error is None
        else:
            assert step == 3
            assert "DataLoader worker" in str(error)
            assert "'preempted_3' is the state after the last whole step" in caplog.text

    assert in_child(train) == 0


def fetched(count: int) -> Iterator[int]:
    yield from range(count)
    terminate()
    raise RuntimeError("a worker died")


def ended_by_error(
    store: Store, state: StateDict, loop: Callable[[casnap.Preemption], object]
) -> casnap.Preemption:
    """Run a loop that an error ends; return what has watched for signals."""
    preemption = casnap.on_preemption(store, {"s": state})

    def watched() -> None:
        with preemption:
            loop(preemption)

    with pytest.raises(RuntimeError, match="a worker died"):
        watched()
    return preemption


@pytest.mark.parametrize(("batches", "each", "taken"), [(4, 1, [3]), (4, 2, [3]), (5, 2, [])])
def test_a_loader_that_fails_between_steps(
    tmp_path: Path,
    heard: list[int],
    caplog: pytest.LogCaptureFixture,
    batches: int,
    each: int,
    taken: list[int],
) -> None:
    """Not where a step has more batches than were read."""

    def loop(preemption: casnap.Preemption) -> None:
        for batch in preemption.batches(fetched(batches)):
            state["seen"] = batch
            if batch % each == each - 1:
                preemption.step(batch)

    store, state = Store(tmp_path / "store").make(), StateDict(seen=-1)
    ended_by_error(store, state, loop)
    assert [s.read_object("s/seen") for s in store.snapshots()] == taken
    not_taken = "No last snapshot was taken: the step after 3 may have begun"
    assert (not_taken in caplog.text) != bool(taken)


def test_an_error_within_a_step_takes_nothing_and_says_so(
    tmp_path: Path, heard: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(preemption: casnap.Preemption, steps: int = 2, *, signalled: bool = True) -> None:
        for step in range(steps):
            preemption.step(step)
        if signalled:
            terminate()
        raise RuntimeError("a worker died")

    store = Store(tmp_path / "store").make()
    ended_by_error(store, StateDict(x=1), partial(fail, signalled=False))
    assert caplog.text == ""
    ended_by_error(store, StateDict(x=1), partial(fail, steps=0))
    assert "no step had ended" in caplog.text
    ended_by_error(store, StateDict(x=1), fail)
    assert "an error ended the loop after a signal (RuntimeError: a worker died)" in caplog.text
    assert "No last snapshot was taken: the step after 1 may have begun" in caplog.text
    assert "worker_init_fn" in caplog.text
    assert store.snapshots() == []


def test_a_state_that_cannot_be_taken_after_an_error(
    tmp_path: Path, heard: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The error of the loop is the one that is raised."""

    def loop(preemption: casnap.Preemption) -> None:
        for batch in preemption.batches(fetched(3)):
            preemption.step(batch)

    store = Store(tmp_path / "store").make()
    ended_by_error(store, StateDict(x=object()), loop)
    assert "the state after step 2 cannot be taken: " in caplog.text
    assert "s/x" in caplog.text
    assert store.snapshots() == []


class Interrupted(StateDict):
    """A state whose first take is ended by a handler of another signal, as of a worker's death."""

    def state_dict(self) -> dict[str, object]:
        if self.pop("first", None):
            raise RuntimeError("a worker died")
        return super().state_dict()


def test_an_error_that_ends_the_last_take(tmp_path: Path, heard: list[int]) -> None:
    """It is taken again: no other step has begun."""

    def loop(preemption: casnap.Preemption) -> None:
        terminate()
        preemption.step(5)

    store = Store(tmp_path / "store").make()
    preemption = ended_by_error(store, Interrupted(first=True, x=1), loop)
    assert preemption.snapshot is not None
    assert preemption.snapshot.read_object("s/x") == 1
    assert [s.name for s in store.snapshots()] == ["preempted_5"]


def fail_on_ranks(path: str) -> str:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("casnap").addHandler(handler)
    store = Store(path)
    try:
        with casnap.on_preemption(store, {"s": StateDict(x=1)}, every=3600) as preemption:
            for batch in preemption.batches(fetched(3)):
                preemption.step(batch)
    except RuntimeError:
        return "".join(heard)
    return ""


def test_an_error_on_ranks_takes_nothing_and_says_so(world: Worlds, tmp_path: Path) -> None:
    store = Store(tmp_path / "store").make()
    for said in world(2).run(fail_on_ranks, store.uri):
        assert "No last snapshot was taken: the other ranks may have ended after another" in said
    assert store.snapshots() == []


def multiply() -> None:
    a = torch.ones(1500, 1500, dtype=torch.float64)
    a @ a


@pytest.mark.parametrize("work", [multiply, lambda: sum(range(4_000_000))], ids=["torch", "python"])
def test_a_signal_during_a_long_call_is_heard_at_its_end(
    tmp_path: Path, work: Callable[[], object]
) -> None:
    # After so much processor time, so that it comes in the call also on a busy machine.
    number = signal.SIGVTALRM
    store = Store(tmp_path / "store").make()
    with casnap.on_preemption(store, {"s": StateDict(x=1)}, signals=[number]) as preemption:
        assert not preemption.step(0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.005)
        work()
        assert preemption.signalled
        assert preemption.step(1)
    assert preemption.snapshot is not None
    assert signal.getsignal(number) == signal.SIG_DFL


def forked() -> int:
    """Return the process id of a child that sleeps, and ends well if no signal ends it."""
    return start(lambda: time.sleep(60))


def end_of(pid: int) -> int:
    os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_is_terminated(tmp_path: Path) -> None:
    """Also at once, before it has got as far as to have another handler."""
    with casnap.on_preemption(Store(tmp_path / "store"), {"s": StateDict(x=1)}) as preemption:
        ends = {end_of(forked()) for _ in range(10)}
        pids: list[int] = []
        thread = threading.Thread(target=lambda: pids.append(forked()))
        thread.start()
        thread.join()
        ends.add(end_of(pids[0]))
        assert not preemption.signalled
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        terminate()
        assert preemption.step(0)
    assert ends == {-signal.SIGTERM}


def test_a_forked_child_has_the_handler_of_before(tmp_path: Path, heard: list[int]) -> None:
    store, before = Store(tmp_path / "store"), signal.getsignal(signal.SIGTERM)
    outer = casnap.on_preemption(store, {})

    def check() -> None:
        assert signal.getsignal(signal.SIGTERM) == before
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        terminate()
        assert heard == [signal.SIGTERM]
        assert not inner.step(1)
        inner.close()

    with outer, casnap.on_preemption(store, {}, signals=(signal.SIGTERM, signal.SIGUSR1)) as inner:
        assert in_child(check) == 0
    assert not heard


def test_handlers_go_in_any_order(tmp_path: Path, heard: list[int]) -> None:
    store, before = Store(tmp_path / "store"), signal.getsignal(signal.SIGTERM)
    first, second = casnap.on_preemption(store, {}), casnap.on_preemption(store, {})
    first.close()
    terminate()
    assert (first.signalled, second.signalled, heard) == (False, True, [signal.SIGTERM])
    second.close()
    assert signal.getsignal(signal.SIGTERM) == before


def fork_on_ranks(path: str) -> tuple[int, bool]:
    with casnap.on_preemption(Store(path), {}, every=1e-6) as preemption:
        # Also by an exception, which leaves the block in the child.
        assert in_child(preemption.close) == 0
        return end_of(forked()), any(preemption.step(step) for step in range(5))


def test_forks_of_ranks(world: Worlds, tmp_path: Path) -> None:
    Store(tmp_path / "store").make()
    ends = world(2).run(fork_on_ranks, str(tmp_path / "store"))
    assert ends == [(-signal.SIGTERM, False)] * 2


def test_only_the_main_thread_hears_signals(tmp_path: Path) -> None:
    store, errors = Store(tmp_path / "store"), list[BaseException]()

    def watch() -> None:
        try:
            casnap.on_preemption(store, {})
        except CasnapError as e:
            errors.append(e)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="Invalid argument"):
        casnap.on_preemption(store, {}, signals=(signal.SIGTERM, signal.SIGKILL))
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(ValueError, match="within is a time above 0"):
        casnap.on_preemption(store, {}, within=0)


def train(path: str, signals: dict[int, int]) -> tuple[int, str, float]:
    """Train until a signal, which ranks send themselves after different steps."""
    rank = dist.get_rank()
    state = StateDict(own=torch.full((3000,), float(rank)), both=torch.zeros(5000))
    store = Store(path).make()
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


def count_agreements(path: str, steps: int) -> int:
    count, all_reduce = 0, dist.all_reduce

    def counted(*args: object, **named: object) -> object:
        nonlocal count
        count += 1
        return all_reduce(*args, **named)

    dist.all_reduce = counted
    try:
        with casnap.on_preemption(Store(path), {}, every=3600) as preemption:
            for step in range(steps):
                assert not preemption.step(step)
    finally:
        dist.all_reduce = all_reduce
    return count


def test_most_steps_only_count(world: Worlds, tmp_path: Path) -> None:
    # The ranks agree after step 1, 3, 7, …
    Store(tmp_path / "store").make()
    assert world(2).run(count_agreements, str(tmp_path / "store"), 4095) == [12, 12]
