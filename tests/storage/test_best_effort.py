"""What goes on though the place refuses, or is away: nothing that is done depends on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from casnap import Store
from casnap.backends import LocalBackend, MemoryBackend
from casnap.backends.base import Backend
from casnap.errors import BackendError, PlaceError, StoreError, UnavailableError
from tests.support.faults import take
from tests.support.faulty import Fault, FaultyBackend, fail
from tests.support.unavailable import EXHAUSTED, UNREACHABLE, unavailable

ERRORS = pytest.mark.parametrize("error", [BackendError, UNREACHABLE], ids=["refused", "away"])


def test_an_outage_is_no_failure_of_an_object() -> None:
    """Who passes over an object that cannot be read stops in an outage."""
    assert not issubclass(UnavailableError, BackendError)
    assert issubclass(UnavailableError, StoreError)
    assert issubclass(BackendError, StoreError)


@ERRORS
def test_announcing_a_take(tmp_path: Path, error: Callable[[str], PlaceError]) -> None:
    backend = FaultyBackend(MemoryBackend(str(tmp_path)))
    broken = Fault(fail(error), ("write", "delete"), times=None)
    with backend.during(broken), Backend.announced(backend, 7, at_once=True):
        assert broken.struck == 1
    with Backend.announced(backend, 7, at_once=True):
        assert Backend.announced_bases(backend, 60) == [7]
        backend.faults.append(broken)
    assert broken.struck == 2


@ERRORS
def test_removing_what_dead_takes_left(tmp_path: Path, error: Callable[[str], PlaceError]) -> None:
    backend = FaultyBackend(MemoryBackend(str(tmp_path)))
    backend.write(f"tmp/take-{7:012x}-{int(time.time()) - 7200:010x}-{0:012x}", b"")
    broken = Fault(fail(error), "delete", times=None)
    with backend.during(broken):
        assert Backend.announced_bases(backend, 60) == []
    assert broken.struck == 1


@ERRORS
def test_looking_at_the_rules_of_a_bucket(
    tmp_path: Path, error: Callable[[str], PlaceError]
) -> None:
    rules = Fault(fail(error), "bucket_warnings", times=None)
    store = Store(FaultyBackend(LocalBackend(tmp_path), rules)).make()
    assert rules.struck == 1
    take(store, 0)
    take(store, 1)
    store.delete("step_0")
    report = store.gc(grace=0)
    assert report.freed_bytes
    assert report.warnings == []
    assert rules.struck == 2


def test_looking_for_markers_of_lost_commits(tmp_path: Path) -> None:
    """Others may keep one from being read; in an outage it does not count as absent."""
    store = Store(tmp_path).make()
    take(store, 0)
    refused = Fault(fail(), "read_marker", times=None)
    assert Store(FaultyBackend(LocalBackend(tmp_path), refused)).check().ok
    away = Fault(fail(EXHAUSTED), "read_marker", times=None)
    with unavailable("exhausted"):
        Store(FaultyBackend(LocalBackend(tmp_path), away)).check()
