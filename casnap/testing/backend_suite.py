"""Tests, for pytest, that every backend must pass: they test the contract of :class:`Backend`.

Subclass a suite in a test module, and override its fixture::

    import pytest
    from casnap.testing.backend_suite import BackendSuite, SharedBackendSuite

    class TestMine(BackendSuite):
        @pytest.fixture
        def backend(self, tmp_path):
            return MyBackend(tmp_path)

The backend is empty for each test. :class:`SharedBackendSuite` is for backends that several
processes can use at once. Instead of ``backend`` it needs the fixture ``opener``, which returns a
function that opens the same place at each call, in any process::

    class TestMine(SharedBackendSuite):
        @pytest.fixture
        def opener(self, tmp_path):
            return functools.partial(MyBackend, tmp_path)

:class:`BrokenBackendSuite` tests the errors of a backend. Its fixture ``broken`` returns a backend
that cannot reach its objects.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from casnap.backends.base import Backend
from casnap.errors import PLACE_ERRORS, BackendError, DamagedError
from casnap.testing.suite_tools import (
    SECONDS,
    assert_absent,
    in_background,
    only,
    pattern,
    processes,
)

_MIB = 1 << 20
_THREADS = 8
_PROCESSES = 3

Opener = Callable[[], Backend]


class BackendSuite:
    """The tests of every backend; override the fixture ``backend``."""

    @pytest.fixture
    def backend(self) -> Backend:
        """Return an empty backend."""
        raise NotImplementedError("override the fixture `backend`")

    # --- whole objects ---

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, _MIB + 1, 5 * _MIB])
    def test_what_is_written_is_read(self, backend: Backend, nbytes: int) -> None:
        """Objects of any size come back as they were."""
        content = pattern(nbytes)
        backend.write("packs/ab/written", content)
        assert backend.put_if_absent("packs/ab/put", content) is True
        backend.sync()
        for key in ("packs/ab/written", "packs/ab/put"):
            assert backend.read(key) == content
            assert backend.read(key, nbytes) == content
            assert backend.size(key) == nbytes
            target = bytearray(nbytes)
            assert backend.read_into(key, [(0, memoryview(target))]) == [nbytes]
            assert target == content

    @pytest.mark.parametrize("start", [0, 1, 8, 4096])
    @pytest.mark.parametrize("readonly", [False, True])
    def test_any_buffer_is_written(self, backend: Backend, start: int, readonly: bool) -> None:
        """A buffer need be neither aligned nor writable; the caller may change it afterwards."""
        content = pattern(2 * _MIB + 4097)
        memory = bytearray(content)
        view = memoryview(bytes(memory) if readonly else memory)[start:]
        backend.write("packs/ab/x", view)
        memory[:] = bytes(len(memory))
        assert backend.read("packs/ab/x") == content[start:]

    def test_what_is_missing(self, backend: Backend) -> None:
        """A missing object raises ``FileNotFoundError``; deleting it is not an error."""
        for key in ("top", "packs/ab/x", "a/b/c/d/e"):
            assert_absent(backend, key)
            backend.delete(key)
            assert_absent(backend, key)

    def test_what_is_deleted_is_gone(self, backend: Backend) -> None:
        """A delete removes one object; its key may be used again."""
        backend.write("packs/ab/x", b"x")
        backend.write("packs/ab/xy", b"xy")
        backend.delete("packs/ab/x")
        backend.delete("packs/ab/x")
        assert_absent(backend, "packs/ab/x")
        assert backend.read("packs/ab/xy") == b"xy"
        assert backend.put_if_absent("packs/ab/x", b"again") is True
        assert backend.read("packs/ab/x") == b"again"

    def test_what_is_deleted_together(self, backend: Backend) -> None:
        """Missing objects are not an error, and no other object is deleted."""
        keys = [f"packs/{n % 3:02x}/größe {n}&<{n}>" for n in range(40)]
        for key in keys:
            backend.write(key, key.encode())
        assert backend.delete_all([]) == {}
        assert backend.delete_all([*keys[1:], "packs/aa/never", keys[1]]) == {}
        assert backend.sizes("") == {keys[0]: len(keys[0].encode())}
        assert backend.delete_all(iter(keys)) == {}
        assert backend.sizes("packs") == {}

    def test_a_key_that_is_written_twice(self, backend: Backend) -> None:
        """A second write of a key is refused, or replaces the whole object.

        casnap writes no key twice.
        """
        backend.write("packs/ab/x", only(1, 3 * _MIB))
        expected = only(2, _MIB)
        try:
            backend.write("packs/ab/x", expected)
        except BackendError:
            expected = only(1, 3 * _MIB)
        assert backend.read("packs/ab/x") == expected

    def test_keys_of_many_levels(self, backend: Backend) -> None:
        """Folders come and go with their objects; nobody makes them."""
        keys = ["top", "a/b", "a/c/d", "a/c/e/f/g/h/i", "roots/0/0", f"packs/ff/{'0' * 32}"]
        for key in keys:
            backend.write(key, key.encode())
        backend.sync()
        for key in keys:
            assert backend.read(key) == key.encode()
            backend.delete(key)
            assert_absent(backend, key)

    # --- put if absent ---

    @pytest.mark.parametrize("how", ["write", "put_if_absent", "copy"])
    def test_a_taken_key_is_not_put(self, backend: Backend, how: str) -> None:
        """An existing object stays, whichever call has made it.

        If it has the same bytes, a backend may report success: the answer to its own earlier
        attempt may have been lost.
        """
        backend.write("source", b"first")
        if how == "copy":
            backend.copy("source", "roots/0/1")
        else:
            getattr(backend, how)("roots/0/1", b"first")
        for content in (b"second", b"first", b""):
            created = backend.put_if_absent("roots/0/1", content)
            assert not created or content == b"first"
            assert backend.read("roots/0/1") == b"first"

    def test_threads_that_put_one_key(self, backend: Backend) -> None:
        """Exactly one put wins, and its bytes are there."""
        barrier = threading.Barrier(_THREADS)
        rounds = 20

        def put(me: int) -> list[bool]:
            won = []
            for i in range(rounds):
                barrier.wait(SECONDS)
                won.append(backend.put_if_absent(f"roots/0/{i}", only(me, 2000)))
            return won

        with ThreadPoolExecutor(_THREADS) as pool:
            answers = list(pool.map(put, range(_THREADS)))
        for i in range(rounds):
            (winner,) = [me for me in range(_THREADS) if answers[me][i]]
            assert backend.read(f"roots/0/{i}") == only(winner, 2000)
        assert backend.names("tmp") == []

    # --- parts of objects ---

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [(0, 10), (1, 4096), (4096, 8192), (4095, 2 * _MIB), (2 * _MIB, _MIB), (3 * _MIB, 1)],
    )
    def test_a_run_is_read(self, backend: Backend, offset: int, nbytes: int) -> None:
        """A backend reads any run of an object, into any buffer."""
        content = pattern(3 * _MIB + 5)
        backend.write("packs/ab/x", content)
        for unaligned in (0, 3):
            memory = bytearray(nbytes + unaligned)
            target = memoryview(memory)[unaligned:]
            assert backend.read_into("packs/ab/x", [(offset, target)]) == [nbytes]
            assert target == content[offset : offset + nbytes]
            assert memory[:unaligned] == bytes(unaligned)

    def test_a_run_over_the_end(self, backend: Backend) -> None:
        """A read over the end of an object returns how many bytes there were."""
        content = pattern(10_000)
        backend.write("packs/ab/x", content)
        for offset, expected in [(0, 10_000), (9_999, 1), (4096, 5904), (10_000, 0), (1 << 40, 0)]:
            target = bytearray(16_384)
            [nbytes_read] = backend.read_into("packs/ab/x", [(offset, memoryview(target))])
            assert nbytes_read == expected
            assert target[:nbytes_read] == content[offset : offset + nbytes_read]
        nothing = [(5, memoryview(bytearray()))]
        assert backend.read_into("packs/ab/x", nothing) == [0]

    def test_several_runs_are_read_at_once(self, backend: Backend) -> None:
        """Runs may come in any order, touch, overlap, or lie past the end."""
        content = pattern(2 * _MIB + 5)
        backend.write("packs/ab/x", content)
        runs = [(_MIB, 4096), (0, 10), (10, 10), (5, 10), (2 * _MIB, 4096), (3 * _MIB, 1), (7, 0)]
        targets = [(offset, memoryview(bytearray(nbytes))) for offset, nbytes in runs]
        lengths = backend.read_into("packs/ab/x", targets)
        assert lengths == [4096, 10, 10, 10, 5, 0, 0]
        for (offset, target), n in zip(targets, lengths, strict=True):
            assert target[:n] == content[offset : offset + n]
        assert backend.read_into("packs/ab/x", []) == []
        again = [(offset, memoryview(bytearray(len(target)))) for offset, target in targets]
        full: list[int] = []
        backend.filled("packs/ab/x", again, full.append)
        assert sorted(full) == [0, 1, 2, 3, 6]
        assert [bytes(target) for _, target in again] == [bytes(target) for _, target in targets]
        with pytest.raises(FileNotFoundError):
            backend.filled("packs/ab/y", again, full.append)

    # --- listings ---

    def test_names_are_those_of_one_level(self, backend: Backend) -> None:
        """The names directly below a folder come once each; an absent folder has none."""
        assert backend.names("packs") == []
        assert backend.names("") == []
        keys = ["packs/aa/1", "packs/aa/2", "packs/ab/3", "packsx/4", "packs-", "index/5"]
        for key in keys:
            backend.write(key, b"")
        assert sorted(backend.names("packs")) == ["aa", "ab"]
        assert sorted(backend.names("packs/aa")) == ["1", "2"]
        assert backend.names("packs/a") == []
        assert backend.names("packs/aa/1/2") == []
        assert backend.sizes("packs") == {"packs/aa/1": 0, "packs/aa/2": 0, "packs/ab/3": 0}
        assert backend.sizes("packs/a") == {}
        backend.write("packs/aa/5", b"12345")
        assert backend.sizes("packs/aa") == {"packs/aa/1": 0, "packs/aa/2": 0, "packs/aa/5": 5}
        backend.delete("packs/aa/5")
        assert backend.sizes("") == dict.fromkeys(keys, 0)
        top = sorted(set(backend.names("")) - {"tmp"})
        assert top == ["index", "packs", "packs-", "packsx"]
        assert backend.names("tmp") == []

    def test_a_longer_object_is_not_read(self, backend: Backend) -> None:
        """The caller bounds the bytes that it takes; a longer object raises an error, unread."""
        backend.write("packs/ab/x", pattern(_MIB))
        with pytest.raises(DamagedError, match="1,048,576 bytes"):
            backend.read("packs/ab/x", _MIB - 1)
        assert backend.read("packs/ab/x", _MIB) == pattern(_MIB)

    # --- copies ---

    def test_a_copy_outlives_its_source(self, backend: Backend) -> None:
        """After a copy the bytes have two names, and each can be deleted."""
        content = pattern(_MIB)
        backend.write("packs/ab/x", content)
        backend.copy("packs/ab/x", "packs/cd/deeper/y")
        backend.sync()
        assert backend.read("packs/ab/x") == content
        backend.delete("packs/ab/x")
        assert_absent(backend, "packs/ab/x")
        assert backend.read("packs/cd/deeper/y") == content
        backend.copy("packs/cd/deeper/y", "packs/ab/x")
        backend.delete("packs/cd/deeper/y")
        assert backend.read("packs/ab/x") == content

    # --- several at once ---

    def test_readers_see_whole_objects_only(self, backend: Backend) -> None:
        """While an object is written, readers see it whole or absent; once listed, it is whole."""
        nbytes, count = 3 * _MIB, 6
        expected = {f"{n}": only(n + 1, nbytes) for n in range(count)}

        def read() -> None:
            for name in backend.names("packs/ab"):
                assert backend.read(f"packs/ab/{name}") == expected[name]
            for name, content in expected.items():
                target = bytearray(nbytes)
                try:
                    size = backend.size(f"packs/ab/{name}")
                    [nbytes_read] = backend.read_into(f"packs/ab/{name}", [(0, memoryview(target))])
                except FileNotFoundError:
                    continue
                assert (size, nbytes_read) == (nbytes, nbytes)
                assert target == content

        with in_background(read):
            for name, content in expected.items():
                if int(name) % 2:
                    backend.put_if_absent(f"packs/ab/{name}", content)
                else:
                    backend.write(f"packs/ab/{name}", content)
        read()

    def test_sync_at_any_time(self, backend: Backend) -> None:
        """Sync works with nothing to do, on several threads, and after a delete."""

        def write(me: int) -> None:
            for i in range(5):
                key = f"packs/{me:02x}/{i}"
                backend.write(key, key.encode())
                backend.sync()
                if i % 2:
                    backend.delete(key)
                backend.sync()

        backend.sync()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
        backend.sync()
        for me in range(4):
            assert sorted(backend.names(f"packs/{me:02x}")) == ["0", "2", "4"]

    def test_tidying_leaves_the_notes_of_followers(self, backend: Backend) -> None:
        """Tidying keeps a note that was just put: its follower is alive."""
        key = "tmp/follower-0123456789ab-0123456789ab"
        backend.write(key, b"alive")
        backend.tidy(0)
        assert backend.read(key) == b"alive"
        backend.delete(key)

    def test_tidying_leaves_what_is_used(self, backend: Backend) -> None:
        """Tidying keeps whole objects, and does not disturb living writers."""
        backend.write("packs/ab/old", b"old")
        with in_background(lambda: backend.tidy(0)):
            for n in range(5):
                backend.write(f"packs/ab/{n}", only(n, 2 * _MIB))
                assert backend.put_if_absent(f"roots/0/{n}", only(n, 100))
        assert backend.tidy(0) == 0
        assert backend.read("packs/ab/old") == b"old"
        for n in range(5):
            assert backend.read(f"packs/ab/{n}") == only(n, 2 * _MIB)
            assert backend.read(f"roots/0/{n}") == only(n, 100)

    def test_markers_come_and_go(self, backend: Backend) -> None:
        """Markers may be put again and removed twice, and change nothing else."""
        backend.write("roots/0/0", b"root")
        before = backend.sizes(""), backend.names("")
        for key in ("step_1/marker", "run 1/größe/step_2/marker"):
            backend.mark(key, b"first")
            backend.mark(key, b"second")
            backend.sync()
            size_of_marker = backend.size_if_there(key)
            assert backend.unmark([key], lambda _, content: content == b"first") == {}
            assert size_of_marker is None or backend.read(key) == b"second"
            assert backend.unmark([key, "no/marker"], lambda _, content: content == b"second") == {}
            assert backend.unmark([key], lambda _, content: content == b"second") == {}
            backend.sync()
        assert backend.sizes("") == before[0]
        # Some servers list empty folders for a while, so they are not checked.
        assert backend.costly_requests or sorted(backend.names("")) == sorted(before[1])
        assert backend.read("roots/0/0") == b"root"


class BrokenBackendSuite:
    """The tests of a backend's errors; override the fixture ``broken``."""

    @pytest.fixture
    def broken(self) -> Backend:
        """Return a backend that cannot reach the place where its objects are."""
        raise NotImplementedError("override the fixture `broken`")

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("write", ("a/b", b"x")),
            ("put_if_absent", ("a/b", b"x")),
            ("read", ("a/b",)),
            ("read_into", ("a/b", [(0, memoryview(bytearray(1)))])),
            ("size", ("a/b",)),
            ("copy", ("a/b", "a/c")),
            ("delete", ("a/b",)),
            ("delete_all", (["a/b", "a/c"],)),
            ("mark", ("a/b", b"x")),
        ],
    )
    def test_errors_are_typed(self, broken: Backend, name: str, arguments: tuple[Any, ...]) -> None:
        """Any failure but a missing object is a ``BackendError`` or ``UnavailableError``."""
        with pytest.raises(PLACE_ERRORS) as caught:
            getattr(broken, name)(*arguments)
        assert broken.uri in str(caught.value)


# --- several processes ------------------------------------------------------------------------


class SharedBackendSuite(BackendSuite):
    """The tests of a backend that several processes use; override the fixture ``opener``."""

    @pytest.fixture
    def opener(self) -> Opener:
        """Return a function that opens the same place, and can be pickled, such as a partial."""
        raise NotImplementedError("override the fixture `opener`")

    @pytest.fixture
    def backend(self, opener: Opener) -> Backend:
        """Return an empty backend."""
        return opener()

    def test_processes_that_put_one_key(self, opener: Opener) -> None:
        """Exactly one put wins, and its bytes are there."""
        spawn = multiprocessing.get_context("spawn")
        barrier, answers = spawn.Barrier(_PROCESSES), spawn.SimpleQueue()
        with processes(
            *(partial(_put, opener, barrier, answers, n) for n in range(_PROCESSES))
        ) as started:
            answer_by_process = dict(answers.get() for _ in range(_PROCESSES))
            for process in started:
                process.join(SECONDS)
                assert process.exitcode == 0
        for i in range(_ROUNDS):
            (winner,) = [me for me, won in answer_by_process.items() if won[i]]
            assert opener().read(f"roots/0/{i}") == only(winner, 2000)
        assert opener().names("tmp") == []

    def test_takes_that_are_announced(self, opener: Opener) -> None:
        """Another process sees the roots on which running takes are based, until they end."""
        backend = opener()
        with backend.announced(3, at_once=True) as renew, backend.announced(1 << 40, at_once=True):
            renew()
            assert sorted(opener().announced_bases(60)) == [3, 1 << 40]
        assert opener().announced_bases(60) == []

    def test_a_writer_that_is_killed(self, opener: Opener) -> None:
        """Objects of a killed writer are whole or absent. ``tidy`` deletes only its old files."""
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        with processes(partial(_write_on, opener, answers)) as (process,):
            answers.get()
            os.kill(process.pid, signal.SIGKILL)
            process.join(SECONDS)
        backend = opener()
        assert backend.tidy(3600) == 0
        backend.tidy(0)
        assert backend.names("tmp") == []
        assert backend.tidy(0) == 0
        names = backend.names("packs/ab")
        assert names
        for name in names:
            assert backend.read(f"packs/ab/{name}") == only(int(name) % 256, _MIB)

    def test_tidying_beside_another_process(self, opener: Opener) -> None:
        """Tidying does not disturb a writer in another process."""
        backend = opener()
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        with processes(partial(_write_on, opener, answers, 40)) as (process,):
            answers.get()
            while process.is_alive():
                backend.tidy(0)
            assert process.exitcode == 0
        assert len(backend.names("packs/ab")) == 40
        for n in range(40):
            assert backend.read(f"packs/ab/{n}") == only(n, _MIB)


_ROUNDS = 10


def _put(opener: Opener, barrier: Any, answers: Any, me: int) -> None:
    backend = opener()
    won = []
    for i in range(_ROUNDS):
        barrier.wait(SECONDS)
        won.append(backend.put_if_absent(f"roots/0/{i}", only(me, 2000)))
    answers.put((me, won))


def _write_on(opener: Opener, answers: Any, count: int = 2000) -> None:
    backend = opener()
    for n in range(count):
        backend.write(f"packs/ab/{n}", only(n % 256, _MIB))
        if n == 0:
            answers.put(n)
