"""A run's disk is bounded by what it keeps: who lets snapshots go collects the garbage, unasked."""

from __future__ import annotations

import errno
import fcntl
import itertools
import math
import os
import random
import re
import statistics
import subprocess
import textwrap
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casnap import MirrorOptions, NewStore, Retention, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.backends.costs import REMOTE
from casnap.backends.local import file_locks
from casnap.cli.garbage import show_what_waits
from casnap.errors import BackendError
from casnap.format.records import pack_key
from casnap.storage.collecting import automatic
from casnap.storage.reading.repository import Repository
from tests.support.cli_calls import document, invoke
from tests.support.damaged import damage_everywhere, forget_cache
from tests.support.faults import backend_faults, in_child, start, stop, wait, while_stopped
from tests.support.garbage import collecting, forget_collectors, wait_for_collectors
from tests.support.mounts import tmpfs
from tests.support.ranks import World
from tests.support.remote import RemoteDouble
from tests.support.warm import run_python

STATE = 8 << 20
KEEP = Retention(keep_last=2)
# The bytes of roots, tables and indexes beside those of states.
SMALL = 4 << 20


@pytest.fixture(autouse=True)
def turned_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CASNAP_GC", "auto")
    # States so small cost no more processor time than a collection.
    monkeypatch.setattr(automatic, "SHARE", math.inf)
    yield
    wait_for_collectors()


def dense(step: int, nbytes: int = STATE) -> torch.Tensor:
    """Return a state of which nothing equals that of another step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-(2**62), 2**62, (nbytes // 8,), generator=generator)


def take(store: Store, step: int, how: str = "take", nbytes: int = STATE) -> Snapshot:
    state = {"s": StateDict(w=dense(step, nbytes))}
    if how == "take":
        return store.take(state, f"step_{step}", retention=KEEP)
    return store.async_take(state, f"step_{step}", retention=KEEP).wait()


def nbytes_of(path: Path) -> int:
    wait_for_collectors()
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def assert_newest(path: Path, step: int) -> None:
    snapshot = Store(path).latest()
    assert snapshot is not None
    assert snapshot.name == f"step_{step}"
    assert torch.equal(snapshot.read_object("s/w"), dense(step))


# --- a disk that holds little more than what is kept ---------------------------------------------


@pytest.mark.parametrize("how", ["take", "async_take"])
def test_a_disk_of_five_states(tmp_path: Path, how: str) -> None:
    with tmpfs(tmp_path, int(5.2 * STATE) + SMALL) as disk:
        for step in range(16):
            take(Store(disk / "run"), step, how)
        assert_newest(disk / "run", 15)
        assert Store(disk / "run").check(data=True).ok


def take_on_ranks(path: str, steps: int) -> None:
    store = Store(path)
    half = STATE // 16
    for step in range(steps):
        mine = dense(step)[dist.get_rank() * half :][:half].clone()
        store.take({"s": StateDict(w=mine)}, f"step_{step}", retention=KEEP, per_rank=["**"])


def test_a_disk_of_five_states_of_two_ranks(tmp_path: Path, world: World) -> None:
    with tmpfs(tmp_path, int(5.2 * STATE) + SMALL) as disk:
        world(2).run(take_on_ranks, str(disk / "run"), 12)
        newest = Store(disk / "run").latest()
        assert newest is not None
        assert newest.name == "step_11"
        assert torch.equal(newest.read_object("0/s/w"), dense(11)[: STATE // 16])


def test_a_nearly_full_disk_whose_garbage_cannot_be_collected(
    tmp_path: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tmpfs(tmp_path / "disk", 4 * STATE + SMALL) as disk:
        store = Store(disk / "run")
        for step in range(3):
            take(store, step)
        wait_for_collectors()
        damage_everywhere(disk / "run", store._view.row_of("step_1").manifest.digest)
        forget_cache(cache_dir)
        forget_collectors()
        store = Store(disk / "run")
        with caplog.at_level("WARNING", "casnap"):
            store.take({"s": StateDict(v=dense(1), w=dense(2))}, "other")
        assert "garbage is not collected" in caplog.text


# --- a disk with room ---------------------------------------------------------------------------


RUN = """
    import math, sys
    from casnap import Store
    from casnap.storage.collecting import automatic
    from tests.storage.collecting.test_automatic import STATE, take

    automatic.SHARE = math.inf
    store = Store(sys.argv[1])
    for step in range(int(sys.argv[2]), int(sys.argv[3])):
        take(store, step, sys.argv[4], 4 * STATE)
"""


@pytest.mark.parametrize("how", ["take", "async_take"])
def test_what_a_process_leaves_and_the_next_one_frees(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run"

    def states_after(first: int, end: int) -> float:
        done = run_python(textwrap.dedent(RUN), path, first, end, how)
        assert done.returncode == 0, done.stderr
        return nbytes_of(path) / (4 * STATE)

    assert states_after(0, 16) <= 8.1
    assert states_after(16, 20) <= 5.1
    assert Store(path).check(data=True).ok


def test_what_others_condemned_waits_for_a_cycle_too(tmp_path: Path) -> None:
    """The first collection of a process frees what was condemned before it took anything."""
    Store(tmp_path / "store").make()
    own, other = Store(tmp_path / "store/own"), Store(tmp_path / "store/other")

    def let_go(first: int) -> None:
        for step in range(first, first + 4):
            take(other, step)
            wait_for_collectors()

    assert in_child(lambda: let_go(0)) == 0
    before = set(own._view.repository.newest().condemned)
    take(own, 0)
    take(own, 1)
    assert in_child(lambda: let_go(4)) == 0
    meanwhile = set(own._view.repository.newest().condemned) - before
    assert before
    assert meanwhile
    for step in (2, 3):
        take(own, step)
        wait_for_collectors()
        condemned = own._view.repository.newest().condemned.keys()
        assert not before & condemned
        assert (meanwhile <= condemned) == (step == 2)


def test_a_state_that_changes_little_by_little(tmp_path: Path) -> None:
    """What is still needed of mostly dead packs is copied, beside takes that rely on it."""
    store = Store(tmp_path / "run", create=NewStore(chunk_size=64 << 10))
    state = {f"w{i}": dense(i, 64 << 10) for i in range(128)}
    pick = random.Random(1)
    sizes = []
    for step in range(100):
        for name in pick.sample(sorted(state), 2):
            state[name] = state[name] + 1
        store.take({"s": StateDict(**state)}, f"step_{step}", retention=Retention(keep_last=3))
        if step >= 45:
            wait_for_collectors()
        if step >= 50 and step % 5 == 0:
            sizes.append(nbytes_of(tmp_path / "run/casnap-store/packs"))
    needed = STATE + 4 * (64 << 10)
    assert statistics.median(sizes) <= 1.5 * needed
    assert max(sizes) <= 2 * needed
    assert store.check(data=True).ok


@pytest.mark.parametrize("how", ["take", "delete"])
def test_what_a_process_leaves_that_has_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """So many bytes wait for a collection, at most, and as many were condemned by the last one."""
    nbytes, most = STATE // 4, 2 * STATE
    monkeypatch.setattr(automatic, "SHARE", 0.0)
    monkeypatch.setattr(automatic, "MOST", most)
    automatic._spent.add(1.0)
    store = Store(tmp_path / "run")
    for step in range(50):
        store.take(
            {"s": StateDict(w=dense(step, nbytes))},
            f"step_{step}",
            retention=Retention(keep_last=5) if how == "take" else None,
        )
        wait_for_collectors()
    for step in range(45 if how == "delete" else 0):
        store.delete(f"step_{step}")
        wait_for_collectors()
    assert len(store.snapshots()) == 5
    assert most < nbytes_of(tmp_path / "run") <= 2 * most + (5 + 1) * nbytes


def test_collections_take_no_more_than_their_share(tmp_path: Path) -> None:
    """Of a process that does nothing but take; the first one has to look at all."""
    code = """
        import sys, time
        from casnap import Store
        from casnap.storage.collecting import automatic
        from tests.storage.collecting.test_automatic import take

        costs = []
        collect = automatic.collect

        def note(*arguments):
            report = collect(*arguments)
            costs.append(report.processor_seconds)
            return report

        automatic.collect = note
        store = Store(sys.argv[1])
        for step in range(60):
            take(store, step)
        print(sum(costs[1:-1]) / time.process_time(), len(costs))
        """
    done = run_python(textwrap.dedent(code), tmp_path / "store")
    share, count = done.stdout.split()
    assert float(share) <= 0.07
    assert int(count) > 2


def test_it_is_turned_off(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    assert store.configure(gc="off")
    for step in range(6):
        take(store, step)
    assert nbytes_of(tmp_path / "run") > 6 * STATE
    assert not store._view.repository.newest().condemned
    with pytest.raises(ValueError, match="'auto' or 'off'"):
        store.configure(gc="sometimes")


@pytest.mark.parametrize("let_go", ["delete", "prune", "overwrite"])
def test_each_way_to_let_snapshots_go(tmp_path: Path, let_go: str) -> None:
    store = Store(tmp_path / "run")
    for step in range(3):
        store.take({"s": StateDict(w=dense(step))}, f"step_{step}")
    if let_go == "delete":
        store.delete("step_0")
    elif let_go == "prune":
        store.prune(Retention(keep_last=2))
    else:
        store.take({"s": StateDict(w=dense(9))}, "step_0", overwrite=True)
    wait_for_collectors()
    assert store._view.repository.newest().condemned


def test_what_commands_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One collection condemns, and the next one frees; each is of a process of its own."""
    # As on a machine that has nothing else to do.
    monkeypatch.setattr(automatic, "_LAST_SECONDS", 60.0)
    path = tmp_path / "store"
    for step in range(5):
        Store(path).take({"s": StateDict(w=dense(step))}, f"step_{step}")

    def said(*arguments: object) -> str:
        forget_collectors()
        return invoke(*arguments).stdout.splitlines()[-1]

    by_hand = f"`casnap gc {path} --grace 0` frees them now"
    waits = "8.4 MB will be freed when a process next deletes snapshots"
    assert said("rm", path / "step_0", "--yes") == f"{waits}; {by_hand}"
    assert said("rm", path / "step_1", "--yes") == (
        f"8.4 MB of earlier garbage freed; {waits}; {by_hand}"
    )
    invoke("config", path, "gc=2h")
    text = said("prune", path, "--keep-last", 1, "--yes")
    assert re.fullmatch(
        rf"25.2 MB will be freed by a collection after 20[-0-9]+ [0-9:]+\S*; {by_hand}", text
    )
    invoke("gc", path, "--grace", 0)
    assert nbytes_of(path) < 1.5 * STATE


def test_what_commands_say_of_a_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that ends soon collects nothing there."""
    store = Store(RemoteDouble(tmp_path.name))
    for step in range(2):
        store.take({"s": StateDict(w=dense(step))}, f"step_{step}")
    store.delete("step_0")
    show_what_waits(store)
    assert capsys.readouterr().out == (
        "the bytes will be freed by a collection, 24 hours after they were found to be garbage; "
        f"`casnap gc {store.uri} --grace 0` frees them now\n"
    )


def test_stats_say_what_was_freed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    freed = []
    for step in range(8):
        how = "take" if step % 2 else "async_take"
        freed.append(take(store, step, how).stats.freed_bytes)
        wait_for_collectors()
    taken = 8 * STATE
    assert freed[:3] == [0, 0, 0]
    assert taken - 4.1 * STATE < sum(freed) < taken - 2 * STATE
    assert store["step_7"].stats.freed_bytes == 0


def test_short_processes(tmp_path: Path) -> None:
    """Each ends right after it has let a snapshot go, and still collects."""
    store = Store(tmp_path / "store")
    for step in range(5):
        store.take({"s": StateDict(w=dense(step))}, f"step_{step}")
    code = """
        import sys
        from casnap.cli import cli
        from casnap.storage.collecting import automatic

        # As on a machine that has nothing else to do.
        automatic._LAST_SECONDS = 60.0
        cli(["rm", sys.argv[1], "--yes"])
        """
    for step in range(4):
        done = run_python(textwrap.dedent(code), tmp_path / f"store/step_{step}")
        assert done.returncode == 0, done.stderr
    assert nbytes_of(tmp_path / "store") < 3.5 * STATE
    assert torch.equal(store["step_4"].read_object("s/w"), dense(4))


def test_beside_many_snapshots_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not change is looked at once: after that, a collection reads what came and went."""
    store = Store(tmp_path / "store")
    for step in range(200):
        store.take({"s": StateDict(w=torch.tensor(step))}, f"other/step_{step}")
    real, nodes = Repository.node, [0]

    def count(self: Repository, *arguments: Any) -> bytes:
        nodes[-1] += 1
        return real(self, *arguments)

    monkeypatch.setattr(Repository, "node", count)
    for step in range(20):
        take(Store(tmp_path / "store/run"), step)
        wait_for_collectors()
        nodes.append(0)
    assert max(nodes) > 200
    assert statistics.median(nodes) < 150
    assert nbytes_of(tmp_path / "store") <= 5.1 * STATE
    assert store.check(data=True).ok


def test_where_little_is_kept_collections_look_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So they find what a dead take left."""
    monkeypatch.setattr(automatic, "_A_SNAPSHOT", 4 << 20)  # or hundreds of MiB must be let go
    store = Store(tmp_path / "store", create=NewStore(chunk_size=64 << 10))
    keep = Retention(keep_last=1)
    orphan = tmp_path / "store/casnap-store" / pack_key(bytes(16))
    for step in range(60):
        state = {"s": StateDict(w=dense(step, 4 * STATE))}
        store.take(state, f"step_{step}", retention=keep)
        wait_for_collectors()
        if step == 2:
            orphan.parent.mkdir(exist_ok=True)
            orphan.write_bytes(b"what a dead take left")
        elif step > 2 and not orphan.exists():
            return
    pytest.fail("no collection has looked at all")


def test_collectors_of_many_stores(tmp_path: Path) -> None:
    """A process that opens one store after the other keeps those of the last few."""
    stores = [Store(tmp_path / "first")]
    for i in range(24):
        Store(tmp_path / f"store_{i}").take({"s": StateDict(x=i)}, "step")
    stores[0].take({"s": StateDict(x=1)}, "step")
    assert len(automatic._collectors) <= 18


def test_requests_to_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends soon asks nothing more; any other one for one collection an hour."""

    def requests_of_takes(gc: str, start: float = REMOTE.collection_start) -> list[int]:
        monkeypatch.setenv("CASNAP_GC", gc)
        monkeypatch.setattr(RemoteDouble, "costs", REMOTE._replace(collection_start=start))
        backend = RemoteDouble(f"{tmp_path.name}-{gc}-{start}")
        counts = [0]
        for step in range(8):
            take(Store(backend, environment=False), step, nbytes=1 << 20)
            wait_for_collectors()
            counts.append(backend.count)
        return [after - before for before, after in pairwise(counts)]

    without = requests_of_takes("off")
    assert requests_of_takes("auto") == without
    more = [auto - off for auto, off in zip(requests_of_takes("auto", 0.0), without, strict=True)]
    assert 10 <= more[2] <= 25
    assert more == [0, 0, more[2], 0, 0, 0, 0, 0]


def test_a_process_that_takes_while_it_ends(tmp_path: Path) -> None:
    """Python does not wait for threads that begin then, and ends while they run."""
    code = """
        import atexit, sys, threading
        from casnap import Store
        from tests.storage.collecting.test_automatic import take

        def late():
            for step in range(4):
                take(store, step)
                print([t.name for t in threading.enumerate() if t.name == "casnap-gc"])

        store = Store(sys.argv[1])
        atexit.register(late)
        """
    ended = run_python(textwrap.dedent(code), tmp_path / "store")
    assert ended.stdout == "[]\n" * 4
    assert ended.stderr == ""
    assert_newest(tmp_path / "store", 3)


@pytest.mark.parametrize("how", ["retention", "overwrite"])
def test_a_mirror_on_a_disk(tmp_path: Path, how: str) -> None:
    there, retention = tmp_path / "there", KEEP if how == "retention" else None
    store = Store(tmp_path / "here", mirror=MirrorOptions(there, retention=retention))
    for step in range(12):
        state = {"s": StateDict(w=dense(step))}
        name = f"step_{step}" if how == "retention" else "newest"
        store.take(state, name, retention=KEEP, overwrite=how == "overwrite")
        store.wait_mirrored(60)
        wait_for_collectors()
    assert nbytes_of(there) <= 5.1 * STATE
    assert Store(there).check(data=True).ok


def test_a_disk_that_turns_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told as it is, all can be read, and the run goes on once it can be written to."""
    monkeypatch.setattr(automatic, "_FAILURE_REST", 0.0)
    with tmpfs(tmp_path / "disk", str(12 * STATE)) as disk:
        store = Store(disk / "run")
        for step in range(4):
            take(store, step)
            wait_for_collectors()
        store.delete("step_2")
        wait_for_collectors()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for refused in (
            lambda: take(store, 4),
            lambda: store.gc(grace=0),
            lambda: store.delete("step_3"),
        ):
            with pytest.raises(BackendError, match="Read-only file system"):
                refused()
        collector = automatic.AutomaticCollector.of(store._view.repository)
        collector.note(store._view.repository, [store._view.row_of("step_3")])
        wait_for_collectors()
        assert "its garbage is not collected" in caplog.text
        assert_newest(disk / "run", 3)
        assert store.check(data=True).ok
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        for step in range(4, 10):
            take(store, step)
        assert nbytes_of(disk / "run") <= 5.1 * STATE
        assert_newest(disk / "run", 9)


def test_an_error_that_is_not_of_casnap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A backend may raise anything. It is told once, and takes go on."""

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(LocalBackend, "sizes", fail)
    for step in range(6):
        take(Store(tmp_path / "store"), step)
        wait_for_collectors()
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path / 'store'}: its garbage is not collected: on purpose"
    ]


# --- beside others ------------------------------------------------------------------------------


def test_async_takes_beside_collectors_without_grace(tmp_path: Path) -> None:
    """Each relies on what others let go meanwhile, and a collector frees at once what it may."""
    path = tmp_path / "store"
    store = Store(path, create=NewStore(chunk_size=64 << 10))
    shared = dense(0, 1 << 20)
    store.take({"s": StateDict(shared=shared)}, "first")
    with collecting(Store(path)):
        for step in range(15):
            state = {"s": StateDict(shared=shared, own=dense(step + 1, 1 << 20))}
            pending = store.async_take(state, f"step_{step}")
            # What the pending take relies on, no snapshot needs any more.
            store.delete("first" if step == 0 else f"step_{step - 1}")
            pending.wait()
    assert store.check(data=True).ok
    assert torch.equal(store["step_14"].read_object("s/shared"), shared)


def test_a_take_that_was_killed_holds_no_collector_up(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.take({"s": StateDict(w=dense(0))}, "kept")

    def announce() -> None:
        with store._view.repository.backend.announced(1):
            os.kill(os.getpid(), 9)

    assert wait(start(announce)) == -9
    tmp = tmp_path / "store/casnap-store/tmp"
    assert list(tmp.iterdir())
    assert store._view.repository.backend.announced_bases(60) == []
    assert list(tmp.iterdir()) == []


def test_children_of_a_take_that_was_killed_hold_no_collector_up(tmp_path: Path) -> None:
    """They inherit its files, and the kernel keeps the locks of these for them."""
    store = Store(tmp_path / "store")
    store.take({"s": StateDict(w=dense(0))}, "kept")
    waits, lives = os.pipe()

    def announce() -> None:
        os.close(lives)
        begun, begins = os.pipe()
        with store._view.repository.backend.announced(1):
            start(lambda: os.write(begins, b"1") and os.read(waits, 1))
            os.read(begun, 1)
            os.kill(os.getpid(), 9)

    assert wait(start(announce)) == -9
    try:
        assert store._view.repository.backend.announced_bases(60) == []
    finally:
        os.close(lives)
        os.close(waits)


def test_an_empty_store_is_collected_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It keeps no bytes, so that an eighth of them is none."""
    forget_collectors()
    store = Store(tmp_path / "store")
    store.take({"s": StateDict(w=dense(0))}, "gone")
    with caplog.at_level("INFO", "casnap"):
        store.delete("gone")
        (collector,) = automatic._collectors.values()
        while (worker := collector._worker) is not None and not worker.ended:
            assert caplog.text.count("collected garbage") <= 1
            time.sleep(0.01)
    assert caplog.text.count("collected garbage") == 1


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP])
def test_takes_are_seen_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refuse)
    store = Store(tmp_path / "store")
    store.take({"s": StateDict(w=dense(0))}, "gone")
    tmp = tmp_path / "store/casnap-store/tmp"
    with store._view.repository.backend.announced(store._view.repository.newest().seq):
        store.delete("gone")
        assert in_child(lambda: assert_nothing_is_freed(store)) == 0
        (left,) = tmp.iterdir()
        # As if its process had died: it counts for a day.
        (tmp / f"take-{0:012x}-{0:012x}").touch()
        os.utime(tmp / f"take-{0:012x}-{0:012x}", times=(time.time() - 90_000,) * 2)
        assert in_child(lambda: assert_nothing_is_freed(store)) == 0
        assert [*tmp.iterdir()] == [left]
    assert store.gc(grace=0).freed_bytes >= STATE


def test_a_take_that_a_collector_takes_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector locks a file that has no lock yet, and then may not delete it: it is another's.

    The take then announces itself by another file.
    """
    store = Store(tmp_path / "store")
    store.take({"s": StateDict(w=dense(0))}, "kept")
    real, calls = fcntl.flock, itertools.count()

    def busy(fd: int, operation: int) -> None:
        if next(calls) == 0:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked by a collector")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", busy)
    with store._view.repository.backend.announced(1):
        assert store._view.repository.backend.announced_bases(60) == [1]
    assert not list((tmp_path / "store/casnap-store/tmp").iterdir())


@pytest.mark.parametrize("how", ["take", "async_take"])
def test_a_take_that_is_stopped_holds_no_collector_up(tmp_path: Path, how: str) -> None:
    """When it goes on, it starts again."""
    path = tmp_path / "store"
    take(Store(path), 0)
    sizes: list[int] = []

    def take_there() -> None:
        state = {"s": StateDict(w=dense(99))}
        store = Store(path)
        # Not in the folder of the others: other threads may put its root before all have stopped.
        snapshot = store.take(state, "slow/1") if how == "take" else None
        snapshot = snapshot or store.async_take(state, "slow/1").wait()
        assert torch.equal(snapshot.read_object("s/w"), dense(99))

    def meanwhile() -> None:
        for step in range(1, 12):
            take(Store(path), step)
            sizes.append(nbytes_of(path))

    # At the put of its root.
    stopping = backend_faults(0, stop, names=["put_if_absent"])
    stopped, ended = while_stopped(take_there, stopping, meanwhile)
    assert stopped
    assert ended == 0
    assert max(sizes) < 7 * STATE
    assert Store(path).check(data=True).ok
    assert torch.equal(Store(path)["slow/1"].read_object("s/w"), dense(99))


def test_the_file_of_a_take_that_hangs_may_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of one in a paused container, which looks alive; when it goes on, it starts again."""
    monkeypatch.setattr(file_locks, "_is_held_by_stopped", lambda _: False)
    store = Store(tmp_path / "store")
    take(store, 0)
    take(store, 1)

    def meanwhile() -> None:
        store.delete("step_0")
        assert store.gc(grace=0).waiting_bytes > STATE
        (file,) = (tmp_path / "store/casnap-store/tmp").glob("take-*")
        file.unlink()
        assert store.gc(grace=0).freed_bytes > STATE

    stopping = backend_faults(0, stop, names=["put_if_absent"])
    again = {"s": StateDict(w=dense(0))}
    assert while_stopped(lambda: store.take(again, "again"), stopping, meanwhile) == (True, 0)
    assert torch.equal(store["again"].read_object("s/w"), dense(0))
    assert store.check(data=True).ok


def test_a_collector_waits_for_takes_under_way(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.take({"s": StateDict(w=dense(0))}, "gone")
    with store._view.repository.backend.announced(store._view.repository.newest().seq):
        store.delete("gone")
        assert in_child(lambda: assert_nothing_is_freed(store)) == 0
    assert store.gc(grace=0).freed_bytes >= STATE


def assert_nothing_is_freed(store: Store) -> None:
    report = Store(store.uri).gc(grace=0)
    assert report.freed_bytes == 0
    assert report.waiting_bytes >= STATE


def test_garbage_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = Store(path)
    for step in range(5):
        store.take({"s": StateDict(w=dense(step))}, f"step_{step}")
    store.prune(Retention(keep_last=1))
    wait_for_collectors()
    usage = document("du", path)
    assert usage["kept_bytes"] >= STATE
    assert usage["waiting_bytes"] >= STATE
    files = [file.stat() for file in (path / "casnap-store").rglob("*") if file.is_file()]
    on_disk = sum(file.st_blocks * 512 for file in files)
    parts = ("kept_bytes", "waiting_bytes", "orphaned_bytes", "other_bytes")
    assert sum(usage[part] for part in parts) == usage["stored_bytes"] == on_disk
    assert usage["other_bytes"] < STATE
    assert usage["waiting_until_time"] is None
    keys = (*parts, "stored_bytes", "waiting_until_time")
    of_page = document("report", path)
    assert {key: of_page[key] for key in keys} == {key: usage[key] for key in keys}
    store.configure(gc=43200)
    assert document("report", path)["waiting_until_time"] > "2026"
    store.configure(gc="auto")
    assert "of it will be freed when" in invoke("du", path).stdout
    assert "packs of garbage to be freed" in invoke("ls", path).stderr
    assert "frees it now" in invoke("gc", path).stdout
    report = document("gc", path)
    assert report["waiting_until_time"] > "2026"
    assert document("gc", path, "--grace", "0")["waiting_until_time"] is None
