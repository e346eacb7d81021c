"""Tools for the tests of a backend: contents to write, threads and processes to run."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from casnap.backends.base import Backend

SECONDS = 60


def pattern(nbytes: int, seed: int = 1) -> bytes:
    """Return ``nbytes`` bytes that differ from place to place, and from those of another seed."""
    unit = b"".join((i * 2654435761 + seed).to_bytes(8, "little") for i in range(4096))
    return (unit * (nbytes // len(unit) + 1))[:nbytes]


def only(byte: int, nbytes: int) -> bytes:
    """Return ``nbytes`` equal bytes, so that a test notices a mix of two such objects."""
    return bytes([byte]) * nbytes


def assert_absent(backend: Backend, key: str) -> None:
    """Check that every method reports an object as absent."""
    with pytest.raises(FileNotFoundError):
        backend.read(key)
    with pytest.raises(FileNotFoundError):
        backend.read_into(key, [(0, memoryview(bytearray(8)))])
    with pytest.raises(FileNotFoundError):
        backend.size(key)
    with pytest.raises(FileNotFoundError):
        backend.copy(key, f"{key}-copy")
    folder, _, name = key.rpartition("/")
    assert name not in backend.names(folder)
    assert f"{name}-copy" not in backend.names(folder)


@contextmanager
def in_background(work: Callable[[], object]) -> Iterator[None]:
    """Within this ``with`` block, repeat ``work`` on another thread; raise its error.

    The work is done at least once.
    """
    end, start = threading.Event(), threading.Event()

    def loop() -> None:
        try:
            while not end.is_set():
                work()
                start.set()
        finally:
            start.set()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(loop)
        try:
            assert start.wait(SECONDS)
            yield
        finally:
            end.set()
        future.result(SECONDS)


@contextmanager
def processes(*works: Callable[[], object]) -> Iterator[list[Any]]:
    """Within this ``with`` block, run each function in a fresh process.

    Processes that still run at its end are killed.
    """
    spawn = multiprocessing.get_context("spawn")
    started = [spawn.Process(target=work, daemon=True) for work in works]
    for process in started:
        process.start()
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.join(SECONDS)
            process.close()
