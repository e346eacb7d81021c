"""Exceptions of signal handlers: the caller gets each, whatever casnap does just then."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.runtime import descriptors, threads
from casnap.runtime.threads import Worker
from casnap.storage.packs import chunk_reads
from tests.support.faults import system_faults
from tests.support.sweep import spread

CHUNK = 64 << 10
# Several threads read so much, or make a take of it.
LARGE = 3_000_000


def numbers() -> torch.Tensor:
    """Return numbers that zstd makes smaller, but not so small that one thread reads them."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(LARGE, generator=generator).bfloat16().float()


def taken(store: Store) -> None:
    store.take({"s": StateDict(x=numbers() + 1)}, "another")


def restored(store: Store) -> None:
    store["step"].restore({"s": StateDict(x=torch.zeros(LARGE))})


def read(store: Store) -> None:
    store["step"].read_object("s/x")


def checked(store: Store) -> None:
    store.check(data=True)


# --- while a thread is started ----------------------------------------------------------------


class Starts:
    """The threads that casnap starts; a handler raises while the second one is started.

    Args:
        moment: ``before`` the system has started it, or ``after``, but before it runs.
    """

    def __init__(self, moment: str) -> None:
        self.made: list[Worker] = []
        self.late: list[str] = []
        self.go_on = threading.Event()
        starts = self

        class Struck(Worker):
            def __init__(self, work: Callable[[], None], name: str = "casnap") -> None:
                self.is_struck = len(starts.made) == 1
                starts.made.append(self)
                super().__init__(partial_of(work) if self.is_struck else work, name)

            def start(self) -> None:
                if self.is_struck and moment == "before":
                    raise RuntimeError("from the handler")
                super().start()
                if self.is_struck:
                    raise RuntimeError("from the handler")

            def run(self) -> None:
                if self.is_struck:
                    assert starts.go_on.wait(60)
                super().run()

        def partial_of(work: Callable[[], None]) -> Callable[[], None]:
            def noting() -> None:
                starts.late.append("it works after the call has ended")
                work()

            return noting

        self.kind = Struck


@pytest.mark.sampled
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("call", [taken, restored, read, checked])
def test_while_a_thread_is_started(
    tmp_path: Path,
    moment: str,
    codec: str,
    call: Callable[[Store], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not taken for a system that starts no more threads, and no thread works on after it."""
    for module in (threads, chunk_reads):
        monkeypatch.setattr(module, "cores", lambda: 4)
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK, codec=codec))
    store.take({"s": StateDict(x=numbers())}, "step")
    starts = Starts(moment)
    with monkeypatch.context() as patch:
        patch.setattr(threads, "Worker", starts.kind)
        with pytest.raises(RuntimeError, match="from the handler"):
            call(store)
    assert not [t for t in starts.made if t.is_alive() and not t.is_struck]
    starts.go_on.set()
    for thread in starts.made:
        if thread.ident is not None:
            thread.join(60)
    assert starts.late == []
    assert store.check(data=True).ok
    assert torch.equal(store["step"].read_object("s/x"), numbers())


# --- in a call of the system ------------------------------------------------------------------


def alarm() -> None:
    raise TimeoutError("from the handler")


# Python itself hides some errors of others, where it resolves links.
SYSTEM = ["open", "preadv", "posix_fadvise", "listdir", "scandir"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("call", "codec", "first"),
    [(restored, "raw", 0), (restored, "zstd", 1), (read, "raw", 2), (read, "zstd", 3)],
)
def test_an_alarm_in_a_call_of_the_system(
    tmp_path: Path,
    call: Callable[[Store], None],
    codec: str,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handler's TimeoutError is no error of the file system: nothing is tried again."""
    # What opens files at once is no function of os.
    monkeypatch.setattr("casnap.backends.local_files.safe_paths.has_openat2", lambda: False)
    Store(tmp_path, create=NewStore(chunk_size=CHUNK, codec=codec)).take(
        {"s": StateDict(x=numbers())}, "step"
    )
    with system_faults(names=SYSTEM) as counter:
        call(Store(tmp_path))
    assert counter.count > 10
    for k in spread(counter.count, first, most=8):
        with system_faults(k, alarm, SYSTEM) as calls:
            try:
                call(Store(tmp_path))
            except TimeoutError:
                continue
        assert not calls.struck, f"call {k} of {counter.count}"


# --- as soon as a file is open ----------------------------------------------------------------


class Interrupt:
    """A Ctrl-C as soon as a call has opened something, before the number is anywhere.

    Args:
        strike_at: At which of these calls, from 0; None for none.

    Attributes:
        count: How many there were.
    """

    def __init__(self, strike_at: int | None = None) -> None:
        self.count = 0
        self._strike_at = strike_at

    def _note(self, frame: FrameType, event: str, called: object) -> None:
        name = getattr(called, "__name__", "")
        # What C code calls is not told, so there the call that made it is.
        is_owned = frame.f_code.co_filename == descriptors.__file__ and name == "next"
        if event == "c_return" and (is_owned or called in (os.open, os.dup)):
            self.count += 1
            if self.count - 1 == self._strike_at:
                raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


def taken_over(store: Store) -> None:
    store.take({"s": StateDict(x=torch.arange(9.0))}, "step", overwrite=True)


def part_read(store: Store) -> None:
    store["step"].read_object("s/x", index=slice(3))


@pytest.mark.parametrize("call", [taken_over, part_read, checked])
def test_an_interrupt_as_a_file_is_opened(
    tmp_path: Path, call: Callable[[Store], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not stay open: a run that is interrupted often would end at the limit."""
    monkeypatch.setattr("casnap.backends.local_files.safe_paths.has_openat2", lambda: False)
    Store(tmp_path, create=NewStore(chunk_size=CHUNK)).take(
        {"s": StateDict(x=torch.arange(9.0))}, "step"
    )

    def open_files() -> int:
        gc.collect()
        return len([*Path("/proc/self/fd").iterdir()])

    def try_at(k: int | None) -> Interrupt:
        store = Store(tmp_path)
        with Interrupt(k) as calls, suppress(KeyboardInterrupt):
            call(store)
        return calls

    total = try_at(None).count
    assert total > 10
    before = open_files()
    for k in spread(total, 0, most=30):
        try_at(k)
        assert open_files() <= before, f"call {k} of {total}"
