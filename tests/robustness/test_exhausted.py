"""A process that may open no more files says so, and takes nothing for damaged or missing."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# What is imported at its first use cannot be where no file may be opened.
import casnap.maintenance.gc
import casnap.maintenance.repair  # noqa: F401
from casnap import Store
from tests.support.faults import assert_holds, files, in_child, take
from tests.support.unavailable import unavailable


@pytest.fixture
def path(tmp_path: Path, cache_dir: Path) -> Path:
    """Return a store of two steps."""
    for step in range(2):
        take(tmp_path / "store", step)
    return tmp_path / "store"


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no file any more."""
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = max(int(fd) for fd in os.listdir("/proc/self/fd"))  # noqa: PTH208
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(top)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, most))
    while True:
        try:
            held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            break
    try:
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))


VERBS: dict[str, Callable[[Store], object]] = {
    "restore": lambda s: assert_holds(s["step_0"], 0),
    "take": lambda s: take(s, 2),
    "check": lambda s: s.check(data=True),
    "repair": lambda s: s.repair(),
    "gc": lambda s: s.gc(grace=0),
    "open": lambda s: Store(s.uri),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_process_that_may_open_no_more_files(path: Path, verb: str) -> None:
    def work() -> None:
        store = Store(path)
        assert_holds(store["step_0"], 0)
        with no_more_files(), unavailable("exhausted", match="too many files open"):
            VERBS[verb](store)
        before = len(files(path, "packs"))
        # All is known still.
        assert take(store, 3).stats.new_bytes < 120_000
        assert len(files(path, "packs")) == before + 2
        assert store.check(data=True).ok

    assert in_child(work) == 0
