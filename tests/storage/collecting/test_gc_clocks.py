"""Clocks that are ten years off change when garbage is deleted, never what is garbage."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from casnap import NewStore, Store
from casnap.storage.collecting.gc import GcReport
from tests.support.faults import (
    CHUNK,
    assert_no_orphans,
    assert_store,
    backend_faults,
    files,
    in_child,
    kill,
    take,
)

DAY = 86400.0
YEARS = 3652 * DAY
KILLED = -signal.SIGKILL

TAKERS = pytest.mark.parametrize("taker", [0.0, YEARS, -YEARS], ids=["right", "ahead", "behind"])
COLLECTORS = pytest.mark.parametrize(
    "collector", [0.0, YEARS, -YEARS], ids=["right", "ahead", "behind"]
)


@contextmanager
def clock(skew: float) -> Iterator[None]:
    """Let the clock be wrong by some seconds."""
    real = time.time
    with mock.patch.object(time, "time", side_effect=lambda: real() + skew):
        yield


def take_at(skew: float, path: Path, step: int) -> None:
    with clock(skew):
        take(path, step)


def collect_at(skew: float, path: Path, grace: float = DAY) -> GcReport:
    with clock(skew):
        return Store(path, create=NewStore(chunk_size=CHUNK)).gc(grace=grace, repack=0.9)


@pytest.fixture(scope="module")
def first_garbage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of one snapshot and garbage, deleted and never committed; do not change it."""
    path = tmp_path_factory.mktemp("garbage") / "store"
    for step in range(3):
        take(path, step)
    Store(path).delete("step_0")
    Store(path).delete("step_1")

    def killed() -> None:
        with backend_faults(0, kill, ["put_if_absent"]):
            take(path, 3)

    assert in_child(killed) == KILLED
    return path


@pytest.fixture
def garbage(first_garbage: Path, tmp_path: Path) -> Path:
    return shutil.copytree(first_garbage, tmp_path / "store")


@COLLECTORS
def test_what_another_clock_condemned_goes_within_a_grace(garbage: Path, collector: float) -> None:
    """A time in the future counts as the time when it was first seen."""
    assert collect_at(collector, garbage).condemned_packs > 0
    collect_at(0, garbage)
    report = collect_at(DAY + 3600, garbage)
    assert report.waiting_packs == 0
    assert_no_orphans(garbage)
    assert_store(garbage, {2})


@TAKERS
def test_what_a_killed_take_alone_left_goes_within_a_grace(tmp_path: Path, taker: float) -> None:
    """No collector puts a root that has a time of its own, since nothing is to be condemned."""
    path = tmp_path / "store"
    take(path, 0)

    def killed() -> None:
        with backend_faults(0, kill, ["put_if_absent"]):
            take(path, 3)

    assert in_child(killed) == KILLED
    take_at(taker, path, 1)
    for days in (0, 1, 2):
        with clock(days * (DAY + 3600)):
            Store(path).gc(grace=DAY, repack=0)
    assert_no_orphans(path)
    assert_store(path, {0, 1})


@TAKERS
def test_a_right_clock_waits_for_the_grace(garbage: Path, taker: float) -> None:
    """A collector with a right clock waits for the grace, whatever the clocks of takers say."""
    take_at(taker, garbage, 4)
    before = files(garbage, "packs")
    collect_at(0, garbage)
    collect_at(DAY - 3600, garbage)
    if taker >= 0:
        assert files(garbage, "packs") >= before


@pytest.mark.parametrize("age", [0, YEARS, -YEARS], ids=["new", "old", "of-the-future"])
def test_temporary_files_of_any_time(garbage: Path, age: float) -> None:
    left = garbage / "casnap-store/tmp" / ("0" * 24)
    left.write_bytes(bytes(5000))
    os.utime(left, times=(time.time() - age,) * 2)
    collect_at(0, garbage, grace=0)
    assert_no_orphans(garbage)
    assert_store(garbage, {2})


@pytest.mark.parametrize("age", [0, YEARS, -YEARS], ids=["new", "old", "of-the-future"])
def test_a_temporary_file_that_is_being_written(garbage: Path, age: float) -> None:
    """The file stays, whatever its time says, since its writer is alive."""
    being_written = garbage / "casnap-store/tmp" / ("0" * 24)
    with being_written.open("wb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        os.utime(being_written, times=(time.time() - age,) * 2)
        for grace in (0, DAY):
            collect_at(0, garbage, grace)
            assert being_written.exists()
    collect_at(0, garbage, grace=0)
    assert_no_orphans(garbage)
    assert_store(garbage, {2})
