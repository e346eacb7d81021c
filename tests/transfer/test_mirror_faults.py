"""A mirror, and ``casnap cp --follow``, that are killed, cut off or collected at any moment.

Nothing that was committed is lost on either side, what is copied is equal bit for bit, and a repeat
goes on where it stopped.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from casnap import MirrorOptions, NewStore, Retention, Store
from casnap.backends import LocalBackend
from casnap.errors import BackendError, MirrorError, NotAStoreError
from casnap.transfer.continuous import ContinuousCopier, Pair
from casnap.transfer.copy_jobs import CopyJob, CopyOptions
from tests.support.copies import assert_copied, await_failure, filled
from tests.support.faults import (
    CHUNK,
    app_state,
    assert_holds,
    assert_no_orphans,
    in_child,
    start,
    take,
    wait,
)
from tests.support.faulty import (
    Fault,
    FaultyBackend,
    FaultyProxy,
    Gate,
    HttpFault,
    fail,
    hang_up,
)
from tests.support.object_stores import IMPATIENT
from tests.support.servers import Bucket
from tests.support.unavailable import UNREACHABLE, unavailable
from tests.support.warm import run_python

DEAD = Fault(fail(UNREACHABLE), times=None)


def mirrored(folder: Path, mirror: Any = None, **options: Any) -> Store:
    mirror = MirrorOptions(mirror or folder / "there", **options)
    return Store(folder / "here", create=NewStore(chunk_size=CHUNK), mirror=mirror)


def committed(place: Path) -> int:
    """Return how many snapshots a store holds; 0 if there is none yet."""
    try:
        return len(Store(place, create=False).snapshots())
    except NotAStoreError:
        return 0


def assert_all_well(folder: Path, count: int) -> None:
    """Check that a new process brings all to the mirror, and that gc then leaves nothing over."""
    store = mirrored(folder)
    store.wait_mirrored(120)
    assert {s.metadata.user["step"] for s in store.snapshots()} == set(range(count))
    assert_copied(store, folder / "there")
    for side in ("here", "there"):
        Store(folder / side).gc(grace=0)
        assert_no_orphans(folder / side)


# --- killed ---------------------------------------------------------------------------------------


def test_the_source_is_collected_meanwhile(tmp_path: Path) -> None:
    """A snapshot is deleted, and its bytes are collected, while it is being copied."""
    there = FaultyBackend(LocalBackend(tmp_path / "there"))
    store = mirrored(tmp_path, there)
    take(store, 0)
    store.wait_mirrored(60)
    gate = Gate()
    with there.during(Fault(gate, "write", "packs/*")):
        take(store, 1)
        assert gate.reached.wait(60)
        store.delete("step_1")
        Store(tmp_path / "here").gc(grace=0)
        Store(tmp_path / "here").gc(grace=0)
        gate.open()
    take(store, 2)
    store.wait_mirrored(60)
    copy = Store(tmp_path / "there").make()
    assert {"step_0", "step_2"} <= {s.name for s in copy.snapshots()}
    assert copy.check(data=True).ok
    assert_copied(store, copy)


def test_a_link_that_is_cut_for_long(tmp_path: Path) -> None:
    """Takes go on with their retention; all that was taken meanwhile gets there in the end."""
    there = FaultyBackend(LocalBackend(tmp_path / "there"))
    store = mirrored(tmp_path, there)
    take(store, 0)
    store.wait_mirrored(60)
    with there.during(DEAD) as (cut,):
        for step in range(1, 12):
            take(store, step, retention=Retention(keep_last=2))
        await_failure(store)
        with pytest.raises(MirrorError, match="on purpose"):
            store.wait_mirrored(0.2)
        while cut.struck < 2:
            time.sleep(0.01)
    store.wait_mirrored(120)
    copy = Store(tmp_path / "there").make()
    assert [s.name for s in copy.snapshots()] == [f"step_{n}" for n in range(12)]
    assert_copied(store, copy)


def test_many_at_once(tmp_path: Path) -> None:
    """Several processes with one mirror: one at a time copies, and each can wait."""

    def work(first: int) -> None:
        store = mirrored(tmp_path)
        for step in range(first, first + 3):
            take(store, step)
        store.wait_mirrored(120)

    assert [wait(pid) for pid in [start(partial(work, 3 * n)) for n in range(3)]] == [0, 0, 0]
    assert_all_well(tmp_path, 9)


# --- processes ------------------------------------------------------------------------------------

SCRIPT = """
import sys, time, casnap.mirror.mirror, casnap.runtime.backoff
from tests.support.faults import take
from casnap import NewStore, Store
casnap.runtime.backoff._LONGEST = 0.05
store = Store(sys.argv[1], create=NewStore(chunk_size=1 << 16), mirror=sys.argv[2])
for step in range(3):
    take(store, step)
print("taken", flush=True)
"""


def test_exit_waits_while_the_mirror_works(tmp_path: Path) -> None:
    done = run_python(SCRIPT, tmp_path / "here", tmp_path / "there")
    assert (done.returncode, done.stderr) == (0, "")
    assert_copied(tmp_path / "here", tmp_path / "there")
    assert len(Store(tmp_path / "there").snapshots()) == 3


def test_exit_does_not_wait_for_a_mirror_that_fails(tmp_path: Path) -> None:
    """What it lacks is said, and kept."""
    script = SCRIPT.replace("mirror=sys.argv[2])", "mirror=sys.argv[2])\nbreak_it()").replace(
        "from casnap import NewStore, Store\n",
        "from casnap import NewStore, Store\n"
        "def break_it():\n"
        "    import os; store.wait_mirrored(60); os.rename(sys.argv[2], sys.argv[2] + '-gone')\n"
        "    open(sys.argv[2], 'w').close()\n",
    )
    done = run_python(script, tmp_path / "here", tmp_path / "there")
    assert done.returncode == 0
    expected = r"WARNING: .*there lacks 3 of the snapshots of .*here\. .* kept"
    assert re.search(expected, done.stderr), done.stderr
    (tmp_path / "there").unlink()
    (tmp_path / "there-gone").rename(tmp_path / "there")
    assert_all_well(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_the_process(tmp_path: Path, number: int) -> None:
    script = f"{SCRIPT}\nwhile True: take(store, 3, overwrite=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "here"), str(tmp_path / "there")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "taken\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -number, errors
    held = committed(tmp_path / "here")
    assert held >= 3
    assert_all_well(tmp_path, held)


def test_forks(tmp_path: Path) -> None:
    """A child of a process whose mirror works has a mirror of its own, and neither hangs."""
    store = mirrored(tmp_path)
    take(store, 0)
    for step in range(1, 4):

        def child(step: int = step) -> None:
            take(store, step)
            store.wait_mirrored(120)

        assert in_child(child) == 0
    take(store, 4)
    store.wait_mirrored(60)
    assert_all_well(tmp_path, 5)


def take_on_ranks(folder: str) -> str:
    store = mirrored(Path(folder))
    pending = store.async_take(app_state(1), "step_1", metadata={"step": 1})
    pending.wait()
    store.wait_mirrored(120)
    assert store.mirror is not None
    assert store.mirror.status().snapshots == 0
    dist.barrier()
    latest = store.latest()
    assert latest is not None
    return latest.commit_id


def test_many_ranks(world: Callable[[int], Any], tmp_path: Path) -> None:
    """Rank 0 copies; the others can wait."""
    commits = world(2).run(take_on_ranks, str(tmp_path))
    assert set(commits) == {Store(tmp_path / "there")["step_1"].commit_id}
    assert_holds(Store(tmp_path / "there")["step_1"], 1)


# --- casnap cp --follow ---------------------------------------------------------------------------


def copier(here: Any, there: Any) -> ContinuousCopier:
    def open_pair() -> Pair:
        source, target = (
            Store(here, create=NewStore(chunk_size=CHUNK)),
            Store(there, create=NewStore(chunk_size=CHUNK)).make(),
        )
        repository = source._view.repository

        def chosen() -> list[CopyJob]:
            rows = list(repository.table(repository.newest()).items_in())
            return [CopyJob(name, name, row) for name, row in rows]

        return Pair(repository, target._view.repository, chosen, CopyOptions(part_bytes=CHUNK))

    return ContinuousCopier(open_pair)


def follow(here: Any, there: Any, count: int) -> Iterator[str]:
    """Follow until so many snapshots were copied; yield their names."""
    for number, report in enumerate(copier(here, there).follow(0.001), 1):
        yield from report.copied
        if number == count:
            return


@pytest.mark.parametrize("side", ["there", pytest.param("here", marks=pytest.mark.slow)])
def test_follow_survives_failures_of_either_side(tmp_path: Path, side: str) -> None:
    filled(tmp_path / "here")
    filled(tmp_path / "there", steps=2)
    places = {n: FaultyBackend(LocalBackend(tmp_path / n)) for n in ("here", "there")}
    Store(tmp_path / "there").delete("step_0")
    Store(tmp_path / "there").delete("step_1")
    fault = Fault(fail(UNREACHABLE), times=200, chance=0.5, seed=1)
    with places[side].during(fault):
        assert sorted(follow(places["here"], places["there"], 3)) == [
            "step_0",
            "step_1",
            "step_2",
        ]
    assert fault.struck
    assert_copied(tmp_path / "here", tmp_path / "there")


def test_follow_copies_what_is_new_alone(tmp_path: Path) -> None:
    source = filled(tmp_path / "here")
    copy = Store(tmp_path / "there", create=NewStore(chunk_size=CHUNK)).make()
    copied = []
    for report in copier(tmp_path / "here", tmp_path / "there").follow(0.001):
        copied += report.copied
        if len(copied) == 3:
            # What is deleted there is not copied again; what is taken anew here replaces its own.
            copy.delete("step_0")
            take(copy, 4)
            take(source, 2, overwrite=True)
            take(source, 3)
            take(source, 4)
        if len(copied) == 5:
            break
    assert copied == ["step_0", "step_1", "step_2", "step_2", "step_3"]
    assert "step_0" not in copy
    assert copy["step_2"].commit_id == source["step_2"].commit_id
    assert copy["step_4"].commit_id != source["step_4"].commit_id


def test_follow_gives_up_in_the_end(tmp_path: Path) -> None:
    filled(tmp_path / "here")
    there = FaultyBackend(LocalBackend(tmp_path / "there"))
    with there.during(DEAD), unavailable("unreachable", match="on purpose"):
        next(copier(tmp_path / "here", there).follow(0.001, give_up_after=0.1))
    with there.during(Fault(fail(BackendError), times=None)), pytest.raises(BackendError):
        # A wrong argument would not get better.
        next(copier(tmp_path / "here", there).follow(0.001))


def test_threads_end_with_the_store(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = mirrored(tmp_path)
    take(store, 0)
    store.wait_mirrored(60)
    watchers = [t for t in set(threading.enumerate()) - before if t.name == "casnap-mirror"]
    assert len(watchers) == 1
    assert store.mirror is not None
    store.mirror.stop()
    watchers[0].join(60)
    assert not watchers[0].is_alive()


def test_a_mirror_that_was_stopped_is_not_waited_for(tmp_path: Path) -> None:
    """Nor for as long as it takes, which is forever."""
    there = FaultyBackend(LocalBackend(tmp_path / "there"))
    store = mirrored(tmp_path, there)
    assert store.mirror is not None
    with there.during(Fault(fail(), times=None)):
        take(store, 0)
        threading.Timer(1, store.mirror.stop).start()
        with pytest.raises(MirrorError, match="lacks step_0: it was stopped by this process"):
            store.wait_mirrored()
    with pytest.raises(MirrorError, match="it was stopped by this process"):
        store.wait_mirrored(60)
    mirrored(tmp_path, there).wait_mirrored(60)
    store.wait_mirrored()


@pytest.mark.servers
def test_the_link_to_a_bucket_is_cut(bucket: Bucket, tmp_path: Path) -> None:
    """While it is open, when it was never open, and in the middle of requests."""
    with FaultyProxy(bucket.server.endpoint) as proxy:
        options = {**bucket.storage_options, "endpoint_url": proxy.url, "casnap": IMPATIENT}
        how = {"storage_options": options}
        with proxy.during(HttpFault(hang_up(), times=None)) as (cut,):
            store = mirrored(tmp_path, f"{bucket.uri}/run", **how)
            take(store, 0, retention=Retention(keep_last=1))
            take(store, 1, retention=Retention(keep_last=1))
            await_failure(store)
            with pytest.raises(MirrorError, match="step_0, step_1"):
                store.wait_mirrored(1)
            assert cut.struck
        store.wait_mirrored(120)
        with proxy.during(HttpFault(hang_up(), skip=3, times=None)):
            for step in range(2, 5):
                take(store, step, retention=Retention(keep_last=1))
            with pytest.raises(MirrorError, match="step_2, step_3, step_4"):
                store.wait_mirrored(1)
        store.wait_mirrored(120)
        assert store.mirror is not None
        store.mirror.stop()
    copy = Store(f"{bucket.uri}/run", storage_options=bucket.storage_options).make()
    assert [s.name for s in copy.snapshots()] == [f"step_{n}" for n in range(5)]
    assert_copied(store, copy)
