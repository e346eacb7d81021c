"""The faulty backend does what it says."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from casnap import Store
from casnap.backends import Backend, LocalBackend, MemoryBackend
from casnap.errors import BackendError, NotAStoreError, StorageFullError
from tests.support.faults import CHUNK, files, in_child
from tests.support.faulty import (
    Crash,
    Fault,
    FaultyBackend,
    alter,
    before,
    crash,
    fail,
    flip,
    hold,
    lose_answer,
    repeat,
    short,
    stale,
    tear,
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
    composed = {"size_if_there", "sizes", "delete_all", "filled"}
    calls = {name for name in dir(Backend) if callable(getattr(Backend, name))}
    public = {name for name in calls if not name.startswith("_")}
    assert public - composed <= vars(FaultyBackend).keys()


def test_calls_are_logged(backend: FaultyBackend) -> None:
    backend.write("a/b", b"1")
    backend.copy("a/b", "a/c")
    backend.sync()
    backend.faults.append(Fault(fail(), "read"))
    with pytest.raises(BackendError):
        backend.read("a/b")
    assert backend.log == [("write", "a/b"), ("copy", "a/b"), ("sync", ""), ("read", "a/b")]


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


@pytest.mark.parametrize(
    "error", [BackendError, StorageFullError, FileNotFoundError, lambda what: OSError(5, what)]
)
def test_a_call_that_fails_is_not_done(backend: FaultyBackend, error: type[Exception]) -> None:
    expected = type(error("x"))
    with backend.during(Fault(fail(error))), pytest.raises(expected, match=r"write\(a\)"):
        backend.write("a", b"1")
    assert backend.names("") == []


def test_a_lost_answer(backend: FaultyBackend) -> None:
    with backend.during(Fault(lose_answer())), pytest.raises(BackendError):
        backend.put_if_absent("a", b"1")
    assert backend.read("a") == b"1"


def test_a_repeated_call_answers_as_the_last(backend: FaultyBackend) -> None:
    with backend.during(Fault(repeat())):
        assert backend.put_if_absent("a", b"1") is False
    assert backend.read("a") == b"1"


def test_a_torn_write_leaves_nothing_in_place(tmp_path: Path) -> None:
    backend = FaultyBackend(LocalBackend(tmp_path), Fault(tear(4), times=2))
    for write in (backend.write, backend.put_if_absent):
        with pytest.raises(BackendError, match="after 4 bytes"):
            write("packs/a", b"123456")
    assert not backend.names("packs")
    assert len(backend.names("tmp")) == 2
    assert backend.tidy(3600) == 0
    assert backend.tidy(0) == 8
    assert backend.names("tmp") == []


def test_bytes_change_on_their_way(backend: FaultyBackend) -> None:
    backend.write("a", b"\x00\x01\x02\x03")
    target = bytearray(b"....")
    with backend.during(Fault(flip(9), times=None)):
        assert backend.read("a") == b"\x00\x03\x02\x03"
        assert backend.read_into("a", [(1, memoryview(target))]) == [3]
        assert target == b"\x01\x00\x03."
        backend.write("b", b"\x00\x00")
    with backend.during(Fault(short(2), times=None)):
        assert backend.read("a") == b"\x00\x01"
        assert backend.read_into("a", [(0, memoryview(target))]) == [2]
        assert target == b"\x00\x01\x00\x00"
        assert backend.put_if_absent("c", b"123") is True
    with backend.during(Fault(alter(bytes.upper))):
        backend.write("d", memoryview(b"abc"))
    assert backend.read("a") == b"\x00\x01\x02\x03"
    assert [backend.read(key) for key in "bcd"] == [b"\x00\x02", b"12", b"ABC"]


def test_a_stale_listing(backend: FaultyBackend) -> None:
    backend.write("a/1", b"")
    with backend.during(Fault(stale(), times=None, calls="names")):
        assert backend.names("a") == ["1"]
        backend.names("a").append("not seen by others")
        backend.write("a/2", b"")
        backend.delete("a/1")
        assert backend.names("a") == ["1"]
        assert backend.read("a/2") == b""
    assert backend.names("a") == ["2"]


def test_a_write_that_others_overtake(backend: FaultyBackend) -> None:
    memory = bytearray(b"held")
    with backend.during(Fault(hold(2))):
        backend.write("a", memoryview(memory))
    memory[:] = b"used"
    backend.write("b", b"")
    assert backend.names("") == ["b"]
    assert sorted(backend.names("")) == ["a", "b"]
    assert backend.read("a") == b"held"


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


def test_a_real_death(tmp_path: Path) -> None:
    def die() -> None:
        kill = before(lambda: os.kill(os.getpid(), signal.SIGKILL))
        backend = FaultyBackend(LocalBackend(tmp_path), Fault(kill, "write", skip=1))
        backend.write("a", b"1")
        backend.write("b", b"2")

    assert in_child(die) == -signal.SIGKILL
    assert files(tmp_path) == {"casnap-store/a"}


def test_a_store_on_a_backend() -> None:
    backend = MemoryBackend("a store on a backend")
    with pytest.raises(NotAStoreError):
        Store(backend, create=False)
    store = Store(backend, chunk_size=CHUNK).make()
    assert Store(backend, create=False).id == store.id
    assert store.chunk_size == CHUNK
