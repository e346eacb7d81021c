"""What a forked child of a process that is in the middle of something can do."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch

from casnap import StateDict, Store
from casnap.runtime import fork
from casnap.runtime.descriptors import opened
from casnap.serving import Follower
from tests.support.faults import in_child, start, wait
from tests.support.servers import Bucket

# Those that begin anew in a child in another way.
_OTHERS = {"casnap.format.decoding._making"}
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a test lists."""
    monkeypatch.setattr(fork, "_calls", fork._calls[:])


def locks_of(thing: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the locks that something of casnap keeps, and the way to each."""
    # A child makes the value of a PerProcess anew.
    if id(thing) in seen or isinstance(thing, FunctionType | MethodType | type | fork.PerProcess):
        return
    seen.add(id(thing))
    if isinstance(thing, _LOCKS):
        yield path, thing
    elif isinstance(thing, dict):
        for key, value in list(thing.items()):
            yield from locks_of(value, f"{path}.{key}", seen)
    elif isinstance(thing, list | tuple | set):
        for value in list(thing):
            yield from locks_of(value, path, seen)
    elif type(thing).__module__.startswith("casnap.") or isinstance(thing, ModuleType):
        yield from locks_of(getattr(thing, "__dict__", {}), path, seen)
        for base in type(thing).__mro__:
            for slot in getattr(base, "__slots__", ()):
                yield from locks_of(getattr(thing, slot, None), f"{path}.{slot}", seen)


def test_no_lock_that_is_kept_stays_held_in_a_child(tmp_path: Path, bucket: Bucket) -> None:
    kept: list[Any] = [m for name, m in sys.modules.items() if name.split(".")[0] == "casnap"]
    remote = Store(f"{bucket.uri}/store", storage_options=bucket.storage_options)
    for store in (Store(tmp_path / "store", mirror=tmp_path / "mirror"), remote):
        store.take({"s": StateDict(x=1)}, "a").restore({"s": StateDict()})
        kept.append(store)
    weights = {"w": torch.ones(9)}
    Store(tmp_path / "served").take({"model": StateDict(weights)}, "a")
    kept.append(Follower(tmp_path / "served", weights, interval=None))
    # Modules among the values of a module are casnap's as well, or of no interest.
    seen = {id(m) for name, m in sys.modules.items() if name.split(".")[0] != "casnap"}
    locks = {
        path: lock
        for each in kept
        for path, lock in locks_of(each, getattr(each, "__name__", "store"), seen)
    }
    assert "casnap.take.pending.turn" in locks
    assert {path for path, lock in locks.items() if lock not in fork._locks} == _OTHERS


def test_a_fork_while_a_thread_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread stands still where a take makes the names of its files durable."""
    store = Store(tmp_path / "store").make()
    store.take({"s": StateDict(x=1)}, "first")
    standing, go_on, sync = threading.Event(), threading.Event(), os.fsync

    def stand(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) and not standing.is_set():
            standing.set()
            go_on.wait(60)
        sync(fd)

    monkeypatch.setattr(os, "fsync", stand)
    pending = store.async_take({"s": StateDict(x=2)}, "second")
    assert standing.wait(60)

    def use() -> None:
        signal.alarm(60)  # for one that waits for ever for a lock
        store.take({"s": StateDict(x=3)}, "third")
        assert store["first"].read_object("s/x") == 1

    assert in_child(use) == 0
    go_on.set()
    pending.wait()
    assert [s.read_object("s/x") for s in store.snapshots()] == [1, 3, 2]


def test_an_open_file_does_not_keep_its_lock_in_a_child(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    file = opened(path, os.O_CREAT | os.O_RDWR)
    reader, writer = os.pipe()
    with fork.locked_file(file) as is_open:
        fcntl.flock(file.fd, fcntl.LOCK_EX)

        def linger() -> None:
            assert not is_open()
            os.close(writer)
            os.read(reader, 1)

        pid = start(linger)
        assert is_open()
    os.close(reader)
    other = os.open(path, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    os.close(writer)
    assert wait(pid) == 0


@pytest.mark.usefixtures("calls")
def test_what_begins_anew_in_a_child() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0
            fork.in_child(self.rise)

        def rise(self) -> None:
            self.count += 1

    def fail() -> None:
        raise OSError("it is broken")

    listed = len(fork._calls)
    counter, gone = Counter(), Counter()
    fork.in_child(fail)
    late = Counter()
    del gone
    assert len(fork._calls) == listed + 3

    def check() -> None:
        assert (counter.count, late.count) == (1, 1)

    assert in_child(check) == 0
    assert counter.count == 0


FORK_IN_A_HANDLER = """
import os, signal

def fork():
    if pid := os.fork():
        return os.waitpid(pid, 0)
    os._exit(0)

sent = []

def send():
    if not sent:
        sent.append(1)
        os.kill(os.getpid(), signal.SIGUSR1)

# What was registered before casnap's is called after it.
os.register_at_fork(before=send)
import casnap

with casnap.on_preemption(casnap.Store(), {}):
    signal.signal(signal.SIGUSR1, lambda *_: fork())
    fork()
    assert sent
    print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_a_handler_that_forks_while_its_process_forks(tmp_path: Path) -> None:
    """The signals that wait while it forks come through afterwards."""
    script = FORK_IN_A_HANDLER.replace("Store()", f"Store({str(tmp_path / 'store')!r})")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("set()\n", 0), done.stderr
