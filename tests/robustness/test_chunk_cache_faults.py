"""A read cache that is torn, deleted, full, or shared by processes that die: reads stay right."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from casnap.errors import DamagedError
from casnap.runtime.host_locks import locked
from tests.support.cached import (
    CHUNK,
    PLENTY,
    Reader,
    far_store,
    grow_old,
    kept,
    kept_bytes,
    kept_files,
)
from tests.support.damaged import change, damages
from tests.support.faults import faults, in_child, start, wait
from tests.support.mounts import tmpfs

STEPS = range(4)


@pytest.fixture
def far(tmp_path: Path, cache_dir: Path) -> Path:
    return far_store(tmp_path / "far", *STEPS)


# --- files that are not what was written ---


def garble(path: Path, draw: random.Random) -> None:
    start = draw.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(draw.randbytes(draw.randrange(1, 4 * CHUNK)))


def punch(path: Path, draw: random.Random) -> None:
    """Leave a hole, as a crash of the machine does."""
    content, size = path.read_bytes(), path.stat().st_size
    start = draw.randrange(size)
    stop = draw.randrange(start, size) + 1
    path.unlink()
    with path.open("wb") as file:
        file.write(content[:start])
        file.seek(stop)
        file.write(content[stop:])
        file.truncate(size)


def mix_up(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.choice(kept_files()).read_bytes())


def hurt(path: Path, draw: random.Random) -> None:
    """Flip a bit, cut it off, lengthen it, or delete it."""
    change(path, draw.choice(list(damages(path, draw))))


DAMAGES = [hurt, hurt, garble, punch, mix_up]


def damage_and_read(far: Path, seeds: range) -> None:
    """Damage what is kept, read it, and see that it was put right."""
    for step in STEPS:
        Reader(far).restore(step)
    for seed in seeds:
        draw = random.Random(seed)
        for path in draw.sample(kept_files(), draw.randint(1, 3)):
            draw.choice(DAMAGES)(path, draw)
        for step in STEPS:
            Reader(far).restore(step)
        for step in STEPS:
            assert Reader(far).restore(step).gets == 0, seed


def test_damaged_files(far: Path) -> None:
    damage_and_read(far, range(8))


@pytest.mark.slow
def test_many_damaged_files(far: Path) -> None:
    damage_and_read(far, range(100, 1100))


def test_damage_here_and_in_the_store(far: Path) -> None:
    Reader(far).restore()
    for path in (*kept_files(), *far.glob("casnap-store/packs/*/*")):
        path.chmod(0o600)
        for seed in range(3):
            garble(path, random.Random(seed))
    with pytest.raises(DamagedError):
        Reader(far).restore()


def test_deleted_under_readers(far: Path) -> None:
    """Also with the folders, and with all else that the host has noted."""
    process = threading.Event()
    base = kept().parent

    def delete_all() -> None:
        draw = random.Random(0)
        while not process.is_set():
            time.sleep(0.003)
            shutil.rmtree(
                draw.choice([base, kept(), *kept().glob("*/packs/*")]), ignore_errors=True
            )

    thread = threading.Thread(target=delete_all)
    thread.start()
    try:
        for _ in range(3):
            for step in STEPS:
                Reader(far).restore(step)
    finally:
        process.set()
        thread.join()
    Reader(far).restore()
    assert Reader(far).restore().gets == 0


# --- a disk that fails ---


def assert_stops(far: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Read through a cache that cannot be written: right, with one warning."""
    reader = Reader(far)
    with caplog.at_level(logging.WARNING, "casnap"):
        for step in STEPS:
            reader.restore(step)
    assert caplog.text.count("cannot be written") == 1, caplog.text
    caplog.clear()


@pytest.mark.parametrize(
    "code",
    [
        *("ENOSPC", "EIO", "EACCES"),
        *(pytest.param(code, marks=pytest.mark.slow) for code in ("EDQUOT", "EROFS", "EFBIG")),
    ],
)
def test_a_write_that_fails(far: Path, code: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError(getattr(errno, code), code)

    for k in (0, 3):
        with faults(os, ["pwrite"], k, fail):
            assert_stops(far, caplog)
        Reader(far).restore()
        assert Reader(far).restore().gets == 0
        shutil.rmtree(kept())


def test_a_full_disk(far: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Reader(far).restore()
    shutil.rmtree(kept())
    with tmpfs(kept(), "2M"):
        assert_stops(far, caplog)
        assert Reader(far).restore(0).gets <= Reader(far, 0).restore(0).gets


def test_a_limit_on_files(far: Path, caplog: pytest.LogCaptureFixture) -> None:
    Reader(far, 0).restore()  # the index is there now, and larger

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * CHUNK, 8 * CHUNK))
        assert_stops(far, caplog)

    with mock.patch.dict(os.environ, {"CASNAP_CACHE_DIR": str(kept().parent / "limited")}):
        assert in_child(limited) == 0


def test_reads_that_fail(far: Path) -> None:
    """A file that cannot be read is read from the store."""
    Reader(far).restore()
    real, top, failed = os.preadv, str(kept()), 0

    def preadv(fd: int, *args: object) -> int:
        nonlocal failed
        if os.readlink(f"/proc/self/fd/{fd}").startswith(top):  # noqa: PTH115
            failed += 1
            raise OSError(draw.choice([errno.EIO, errno.ENOMEM]), "on purpose")
        return real(fd, *args)  # type: ignore[arg-type]

    draw = random.Random(0)
    with mock.patch.object(os, "preadv", preadv):
        assert Reader(far).restore().gets > 0
    assert failed > 0
    assert Reader(far).restore().gets == 0


# --- many processes ---


@contextlib.contextmanager
def readers(work: Callable[[random.Random], object], count: int) -> Iterator[list[int]]:
    """Run some work in children, each with its own chance; kill those that still run at the end."""
    pids = [start(lambda seed=seed: work(random.Random(seed))) for seed in range(count)]  # type: ignore[misc]
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                wait(pid)


def crowded(far: Path, bound: int, rounds: int, count: int = 8) -> int:
    """Have processes read that push each other's packs out; return the most bytes ever kept."""

    def read(draw: random.Random) -> None:
        for _ in range(rounds):
            Reader(far, bound).restore(draw.choice(STEPS))

    most = 0
    with readers(read, count) as pids:
        left = set(pids)
        while left:
            if (kept() / "used").exists():
                # Otherwise a file may go, and another come, while they are counted.
                with locked(kept() / "used", 60.0):
                    most = max(most, kept_bytes())
            for pid in list(left):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    left.remove(pid)
                    assert os.waitstatus_to_exitcode(status) == 0
    return most


def test_processes_that_push_each_other_out(far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("casnap.storage.reading.chunk_cache._YOUNG", 0.0)
    bound = 40 * CHUNK
    assert 0 < crowded(far, bound, rounds=2) <= bound


@pytest.mark.slow
def test_processes_that_push_each_other_out_for_long(
    far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casnap.storage.reading.chunk_cache._YOUNG", 0.0)
    for bound in (CHUNK, 10 * CHUNK, 40 * CHUNK, 80 * CHUNK):
        assert 0 < crowded(far, bound, rounds=60) <= bound


def test_a_writer_that_stands_still(far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for it a little, once, and read on."""
    monkeypatch.setattr("casnap.storage.reading.chunk_cache._PATIENCE", 0.05)
    Reader(far).restore()
    with locked(kept() / "used", 60.0):
        assert Reader(far).restore(0).gets == 0
        waiting = Reader(far).restore(1).restore(2)
        assert waiting.gets > 0
        assert Reader(far).restore(1).gets > 0
    # From here on, threads of one reader wait for each other, however busy the machine is.
    monkeypatch.setattr("casnap.storage.reading.chunk_cache._PATIENCE", 60.0)
    assert Reader(far).restore(1).gets > 0
    assert Reader(far).restore(1).gets == 0


def test_hosts_that_do_not_see_each_others_locks(
    far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network folder that does not say so: the bound may be passed, the bytes are right."""

    @contextlib.contextmanager
    def unlocked(path: Path, patience: float) -> Iterator[None]:
        path.touch()
        yield

    monkeypatch.setattr("casnap.storage.reading.chunk_cache._YOUNG", 0.0)
    monkeypatch.setattr("casnap.storage.reading.chunk_cache.locked", unlocked)
    crowded(far, 40 * CHUNK, rounds=3, count=4)


def kill_readers(far: Path, seeds: range) -> None:
    """Kill readers at any moment; what is left is read right, and stays within the bound."""
    bound = 60 * CHUNK

    def read(draw: random.Random) -> None:
        while True:
            Reader(far, bound).restore(draw.choice(STEPS))

    for seed in seeds:
        draw = random.Random(seed)
        grow_old()
        with readers(read, 4) as pids:
            for pid in pids:
                time.sleep(draw.uniform(0, 0.1))
                os.kill(pid, signal.SIGKILL)
        for step in STEPS:
            Reader(far, bound).restore(step)
        assert kept_bytes() <= bound
    grow_old()
    for _ in range(2):
        assert Reader(far, PLENTY).restore().gets >= 0
    assert Reader(far).restore().gets == 0


def test_readers_that_are_killed(far: Path) -> None:
    kill_readers(far, range(2))


@pytest.mark.slow
def test_many_readers_that_are_killed(far: Path) -> None:
    kill_readers(far, range(100, 350))
