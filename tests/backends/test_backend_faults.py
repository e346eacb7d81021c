"""The faulty backend does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from casnap.backends import Backend, MemoryBackend
from casnap.errors import BackendError
from tests.support.faulty import (
    Crash,
    Fault,
    FaultyBackend,
    crash,
    fail,
    hold,
)


@pytest.fixture
def inner(tmp_path: Path) -> Backend:
    return MemoryBackend(str(tmp_path))


@pytest.fixture
def backend(inner: Backend) -> FaultyBackend:
    return FaultyBackend(inner)


def test_every_call_is_wrapped() -> None:
    """A method that a backend gains must not go past the faults."""
    # By default these make calls that are wrapped.
    composed = {"size_if_there", "sizes", "delete_all", "filled", "appears"}
    calls = {name for name in dir(Backend) if callable(getattr(Backend, name))}
    public = {name for name in calls if not name.startswith("_")}
    assert public - composed <= vars(FaultyBackend).keys()


def struck(backend: FaultyBackend, keys: list[str]) -> list[str]:
    """Return those keys at which a read fails."""
    failed = []
    for key in keys:
        try:
            backend.read(key)
        except FileNotFoundError:
            continue
        except BackendError:
            failed.append(key)
    return failed


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["a/0"]),
        ({"skip": 2}, ["b/1"]),
        ({"times": None}, ["a/0", "b/0", "b/1", "b/2/x"]),
        ({"keys": "b/*"}, ["b/0"]),
        ({"keys": "b/*", "skip": 1, "times": None}, ["b/1", "b/2/x"]),
        ({"keys": "*/[12]*", "times": 2}, ["b/1", "b/2/x"]),
        ({"calls": "write", "times": None}, []),
        ({"calls": ("write", "read"), "times": 1}, ["a/0"]),
        ({"chance": 0.0, "times": None}, []),
    ],
)
def test_which_calls_a_fault_strikes_at(
    backend: FaultyBackend, options: dict[str, object], expected: list[str]
) -> None:
    fault = Fault(fail(), **options)
    with backend.during(fault):
        assert struck(backend, ["a/0", "b/0", "b/1", "b/2/x"]) == expected
    assert fault.struck == len(expected)
    assert struck(backend, ["a/0", "b/0", "b/1", "b/2/x"]) == []


def test_a_dead_process_does_nothing_more(backend: FaultyBackend, inner: Backend) -> None:
    backend.write("a", b"1")
    backend.faults += [Fault(hold(), keys="c"), Fault(crash(), keys="b"), Fault(hold(), keys="d")]
    backend.write("c", b"held back for ever")
    with pytest.raises(Crash, match=r"write\(b\)"):
        backend.write("b", b"2")
    for call in (backend.sync, lambda: backend.read("a"), lambda: backend.delete("a")):
        with pytest.raises(Crash):
            call()
    assert inner.names("") == ["a"]


def test_a_dead_machine_forgets_what_was_not_synced(backend: FaultyBackend, inner: Backend) -> None:
    backend.write("old", b"old")
    backend.write("gone", b"gone")
    backend.sync()
    backend.put_if_absent("new", b"new")
    assert backend.put_if_absent("old", b"") is False
    backend.copy("old", "copy")
    backend.delete("gone")
    backend.write("twice", b"1")
    backend.delete("twice")
    backend.crash(losing_unsynced=True)
    assert sorted(inner.names("")) == ["gone", "old"]
    assert inner.read("gone") == b"gone"
