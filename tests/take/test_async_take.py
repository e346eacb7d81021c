"""Taking in the background: the snapshot is that of the call, and no error is lost."""

from __future__ import annotations

import gc
import sys
import time
from itertools import repeat
from pathlib import Path

import pytest
import torch

from casnap import (
    NewStore,
    RNGState,
    Snapshot,
    StateDict,
    Store,
    on_preemption,
    release_memory,
)
from casnap.errors import BackendError, SnapshotExistsError, StorageFullError
from casnap.runtime.buffers import SLOTS, _all_pools, shared_pool
from casnap.take.staging import StagedCopies
from tests.support.bitwise import assert_same
from tests.support.blocks import LEAST, small_blocks
from tests.support.gates import Gate
from tests.support.warm import run_python


@pytest.fixture
def coarse_store(tmp_path):
    """Return a store for hundreds of megabytes, with large chunks since these take less time."""
    return Store(tmp_path / "coarse", create=NewStore(chunk_size=4 << 20)).make()


def state():
    return {
        "model": torch.nn.Linear(300, 200),
        "s": StateDict(
            big=torch.randn(1000, 700),
            strided=torch.randn(1000, 700)[::3, ::2],
            turned=torch.randn(300, 200).t(),
            tiny=torch.randn(3),
            scalar=torch.tensor(1.5),
            array=torch.randn(90, 90).numpy(),
            deep=[1, {"x": torch.arange(50_000), "list": [1, 2]}],
            number=1,
            octets=bytearray(b"abc" * 100),
        ),
    }


def scramble(app_state):
    """Change everything in a state in place."""
    with torch.no_grad():
        for parameter in app_state["model"].parameters():
            parameter.fill_(float("nan"))
    s = app_state["s"]
    for name in ("big", "strided", "turned", "tiny", "scalar"):
        s[name].fill_(-1)
    s["array"][:] = -1
    s["deep"][1]["x"].zero_()
    s["deep"][1]["list"].append(3)
    s["deep"][0] = 9
    s["number"] = 2
    s["octets"][:] = b"x" * 300
    s["new"] = torch.ones(3)


def content(app_state):
    import copy

    return copy.deepcopy({k: dict(v.state_dict()) for k, v in app_state.items()})


def check(snapshot, expected):
    for key, taken in expected.items():
        assert_same(dict(snapshot.get_state_dict_for_key(key)), taken, key)


# --- the moment of the call -------------------------------------------------------------------


@pytest.mark.parametrize("max_staging_bytes", [None, 1, 1 << 30])
def test_later_changes_do_not_show(store, max_staging_bytes):
    live = state()
    expected = content(live)
    gate = Gate(store)
    if max_staging_bytes == 1:
        gate.open.set()
    pending = store.async_take(live, "step", max_staging_bytes=max_staging_bytes)
    scramble(live)
    if max_staging_bytes != 1:
        assert not pending.done()
        assert "step" not in store
    gate.open.set()
    snapshot = pending.wait()
    assert pending.done()
    check(snapshot, expected)
    check(Store(store.uri)["step"], expected)


def test_more_than_the_staging_memory_holds(store):
    """The call then blocks until enough is stored; no later change shows in the snapshot."""
    with small_blocks() as pool:
        big = torch.arange(3 * LEAST * pool.slot_bytes // 8)
        live = StateDict(a=big, b=torch.arange(100))
        pending = store.async_take({"s": live}, "step", max_staging_bytes=1)
        expected = big.clone()
        big.zero_()
        live["b"].zero_()
        snapshot = pending.wait()
        assert pool._made == LEAST
    assert torch.equal(snapshot.read_object("0/s/a"), expected)
    assert_same(snapshot.read_object("0/s/b"), torch.arange(100))


def test_a_training_loop_goes_on(store):
    """Each snapshot holds the step it was taken at, though the next step has begun."""
    model = torch.nn.Linear(400, 300)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    progress = StateDict(step=0)
    expected, pending = [], []
    for step in range(5):
        progress["step"] = step
        expected.append(model.weight.detach().clone())
        pending.append(store.async_take({"m": model, "o": optim, "p": progress}, f"step_{step}"))
        model(torch.randn(3, 400)).sum().backward()
        optim.step()
    for step, (weight, take) in enumerate(zip(expected, pending, strict=True)):
        snapshot = take.wait()
        assert_same(snapshot.read_object("0/m/weight").detach(), weight)
        assert snapshot.read_object("0/p/step") == step


def test_the_state_is_let_go_of(store):
    """The staged bytes are a copy: once they are stored, nothing keeps the tensors alive."""
    import gc
    import weakref

    tensor = torch.randn(500, 500)
    gone = weakref.ref(tensor)
    pending = store.async_take({"s": StateDict(x=tensor)}, "step")
    snapshot = pending.wait()
    del tensor, pending
    gc.collect()
    assert gone() is None
    assert snapshot.read_object("0/s/x").shape == (500, 500)


# --- names and order --------------------------------------------------------------------------


def test_a_taken_name_raises_at_the_call(store):
    store.take({"s": StateDict(x=1)}, "step")
    for name in ("step", "step/below"):
        with pytest.raises(SnapshotExistsError):
            store.async_take({"s": StateDict(x=2)}, name)
    assert store.async_take({"s": StateDict(x=2)}, "step", overwrite=True).wait()
    assert store["step"].read_object("s/x") == 2


def test_a_name_that_a_pending_take_has_raises_at_the_call(store):
    pending = store.async_take({"s": StateDict(x=torch.randn(300_000))}, "step")
    with pytest.raises(SnapshotExistsError):
        store.async_take({"s": StateDict(x=2)}, "step")
    assert pending.wait().read_object("s/x").shape == (300_000,)


# --- errors -----------------------------------------------------------------------------------


def test_an_error_surfaces_in_wait(store):
    before = store.take({"s": StateDict(x=torch.ones(50_000))}, "before")
    gate = Gate(store, repeat(BackendError("on purpose")))
    pending = store.async_take({"s": StateDict(x=torch.randn(500_000))}, "step")
    gate.open.set()
    for _ in range(2):
        with pytest.raises(BackendError, match="on purpose"):
            pending.wait()
    assert pending.done()
    gate.errors = iter(())
    assert [s.name for s in store.snapshots()] == ["before"]
    assert_same(before.read_object("s/x"), torch.ones(50_000))
    # Neither the name nor the memory is lost.
    for i in range(3):
        store.async_take({"s": StateDict(x=torch.randn(500_000))}, f"step_{i}").wait()
    store.take({"s": StateDict(x=1)}, "step")


# --- exit -------------------------------------------------------------------------------------

SCRIPT = """
import sys, threading
import torch
from casnap import Snapshot, StateDict, Store
from casnap.errors import StorageFullError

store = Store(sys.argv[1]).make()
backend = store._view.repository.backend
through = backend.write

ending = threading.Event()

def late(key, content):
    assert ending.wait(60)
    return through(key, content)

def full(key, content):
    raise StorageFullError("no space left, on purpose")
"""


def script(store, code):
    return run_python(SCRIPT + code, store.uri)


def test_the_interpreter_waits_for_what_is_pending(store):
    """For all takes, and also after an exception, when the last steps matter most."""
    done = script(
        store,
        """
x = torch.arange(300_000)
backend.write = late
store.async_take({"s": StateDict(x=x)}, "step_1", max_pending=2)
x.zero_()
store.async_take({"s": StateDict(x=x)}, "step_2", max_pending=2)
threading.Timer(0.3, ending.set).start()
raise SystemExit(3)
""",
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert_same(store["step_1"].read_object("s/x"), torch.arange(300_000))
    assert not store["step_2"].read_object("s/x").any()


def test_an_error_that_is_not_waited_for_is_loud_at_exit(store):
    done = script(
        store,
        """
backend.write = full
seen = store.async_take({"s": StateDict(x=torch.randn(300_000))}, "seen")
try:
    seen.wait()
except StorageFullError:
    pass
store.async_take({"s": StateDict(x=torch.randn(300_000))}, "unseen")
""",
    )
    assert "WARNING" in done.stderr
    assert "'unseen'" in done.stderr
    assert "no space left, on purpose" in done.stderr
    assert "StorageFullError" in done.stderr
    logged, warning = done.stderr.splitlines()[-2:]
    assert logged in warning
    assert "'seen'" not in warning
    assert store.snapshots() == []


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no thread can be started at exit")
def test_what_a_handler_at_exit_begins_is_waited_for(store):
    done = script(
        store,
        """
import atexit, time
def slow(key, content):
    time.sleep(0.2)
    return whole(key, content)
def last():
    store.async_take({"s": StateDict(x=torch.arange(300_000))}, "last")
whole, backend.write = backend.write, slow
first = store.async_take({"s": StateDict(x=torch.arange(9))}, "first")
first.wait()
atexit.register(last)
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [s.name for s in store.snapshots()] == ["first", "last"]


def begin_to_fail(store, name, **options):
    """Begin a take whose first write fails; return it once it has ended."""
    gate = Gate(store, [StorageFullError("no space left, on purpose")])
    pending = store.async_take({"s": StateDict(x=torch.randn(30_000))}, name, **options)
    gate.open.set()
    while not pending.done():
        time.sleep(0.001)
    return pending


def test_a_failure_is_logged_at_once(store, caplog):
    pending = begin_to_fail(store, "a")
    [record] = caplog.records
    assert (record.name, record.levelname) == ("casnap", "ERROR")
    assert "the snapshot 'a' was NOT stored: StorageFullError" in record.getMessage()
    with pytest.raises(StorageFullError):
        pending.wait()


@pytest.mark.parametrize("call", ["take", "async_take", "Snapshot.take"])
def test_the_next_take_raises_a_failure_that_nobody_waited_for(store, call):
    state = {"s": StateDict(x=torch.arange(30_000))}
    begin_to_fail(store, "a")
    take = {
        "take": lambda name: store.take(state, name),
        "async_take": lambda name: store.async_take(state, name).wait(),
        "Snapshot.take": lambda name: Snapshot.take(f"{store.uri}/{name}", state),
    }[call]
    Store("memory://another").take(state, "not concerned", overwrite=True)
    with pytest.raises(StorageFullError, match=r"'a' was NOT stored.* 'b' has not begun") as e:
        take("b")
    assert isinstance(e.value.__cause__, StorageFullError)
    assert store.snapshots() == []
    take("b")
    take("c")
    assert [s.name for s in store.snapshots()] == ["b", "c"]


def test_the_wait_for_a_later_take_raises_a_failure_too(store):
    first = begin_to_fail(store, "a", max_pending=3)
    state = {"s": StateDict(x=torch.arange(30_000))}
    with pytest.raises(StorageFullError):
        store.take(state, "b")
    gate = Gate(store, [StorageFullError("on purpose")])
    pending = [store.async_take(state, name, max_pending=3) for name in "bcd"]
    gate.open.set()
    with pytest.raises(StorageFullError, match=r"'b' was NOT stored.*\('d' is stored\)"):
        pending[2].wait()
    assert [p.wait().name for p in pending[1:]] == ["c", "d"]
    for failed in first, pending[0]:
        with pytest.raises(StorageFullError):
            failed.wait()


def test_a_last_take_after_a_signal_is_made_in_spite_of_a_failure(store):
    state = {"s": StateDict(x=torch.arange(30_000))}
    with on_preemption(store, state, within=60) as preemption:
        begin_to_fail(store, "a")
        preemption._hear(15, None)
        assert preemption.step(7)
        assert preemption.snapshot.name == "preempted_7"
    with pytest.raises(StorageFullError, match="'a' was NOT stored"):
        store.take(state, "b")


# --- memory -----------------------------------------------------------------------------------


def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_buffers_are_used_again(coarse_store):
    """How many there are depends on which threads are fast; all are kept, and there is no more."""
    x = torch.randint(0, 255, (96 << 20,), dtype=torch.uint8)
    release_memory()
    before = anonymous()
    for i in range(3):
        x[:100] = i
        coarse_store.async_take({"s": StateDict(x=x)}, "step", overwrite=True).wait()
        sizes = [anonymous() - before, kept(), x.nbytes]
        assert sizes[0] < kept() + (64 << 20), sizes
        assert kept() < SLOTS * shared_pool(1).slot_bytes + 1.5 * x.nbytes, sizes


def kept():
    return sum(pool._made * pool.slot_bytes for pool in _all_pools)


def test_memory_can_be_given_back(coarse_store):
    coarse_store.async_take({"s": StateDict(x=torch.randn(1 << 20))}, "step").wait()
    gc.collect()  # pools of tests before, which nobody uses any more
    before = kept()
    assert release_memory() == before > 64 << 20
    assert kept() == release_memory() == 0
    # What a pending take has in use stays, and its bytes with it.
    gate = Gate(coarse_store)
    x = torch.randn(1 << 20)
    expected = x.clone()
    pending = coarse_store.async_take({"s": StateDict(x=x)}, "later")
    x.zero_()
    release_memory()
    assert kept() >= x.nbytes
    gate.open.set()
    assert_same(pending.wait().read_object("s/x"), expected)


# --- random states ----------------------------------------------------------------------------


class Drawing(StateDict):
    def state_dict(self):
        torch.rand(5)
        return super().state_dict()


@pytest.mark.parametrize("draws", [False, True])
def test_what_others_draw_during_a_take_is_not_drawn_again(store, draws):
    """The random state is reset after the states are read, and only if reading drew from it."""
    drawn = []

    def progress(what, done, total):
        drawn.append(torch.rand(3))

    state = {"rng": RNGState(), "s": (Drawing if draws else StateDict)(x=torch.randn(100_000))}
    torch.manual_seed(7)
    expected = [torch.rand(3) for _ in range(20)]
    for verb in (store.take, lambda *a, **k: store.async_take(*a, **k).wait()):
        torch.manual_seed(7)
        drawn.clear()
        snapshot = verb(state, "step", overwrite=True, progress=progress)
        drawn += [torch.rand(3) for _ in range(3)]
        assert len(drawn) > 3
        assert_same(drawn, expected[: len(drawn)])
        snapshot.restore({"rng": RNGState()})
        assert_same(torch.rand(3), expected[0])


def test_copies_of_which_none_was_begun_can_be_given_back() -> None:
    """An interrupt may come before: nobody waits for copies then."""
    assert next(StagedCopies(None).batches(), None) is None
