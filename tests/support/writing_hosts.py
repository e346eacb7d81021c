"""What hosts do that share a store: take, restore, collect, read; each in a process of its own."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from casnap import NewStore, Retention, Store
from casnap.errors import SnapshotNotFoundError
from tests.support.faults import CHUNK, app_state, assert_holds
from tests.support.warm import Forked, forked

KEPT = 3


def started(
    work: Callable[[Connection, str, str], None], host: str, place: Path, cache: Path
) -> tuple[Forked, Connection]:
    """Start what a host does in a store; its cache is its own.

    Args:
        work: What it does; gets our line to it, its name, and the store as it sees it.
        host: Its name.
        place: The store as this host sees it.
        cache: Where the caches of all hosts are.
    """
    return forked(_with_cache, work, host, str(place), str(cache / host))


def _with_cache(
    line: Connection,
    work: Callable[[Connection, str, str], None],
    host: str,
    place: str,
    cache: str,
) -> None:
    os.environ["CASNAP_CACHE_DIR"] = cache
    try:
        work(line, host, place)
    except BaseException:
        line.send(f"{host}: {traceback.format_exc()}")
        raise


def write(line: Connection, host: str, place: str, steps: int = 12) -> None:
    """Take, restore and collect; tell what has failed."""
    store = Store(place, create=NewStore(chunk_size=CHUNK))
    for step in range(steps):
        _take(store, host, step)
        assert_holds(store[f"{host}/{step}"], step)
        if step % 5 == 4:
            store.gc(grace=0)
    line.send("")


def write_for_ever(line: Connection, host: str, place: str) -> None:
    """Take until somebody ends this."""
    store = Store(place, create=NewStore(chunk_size=CHUNK))
    step = 0
    while True:
        _take(store, host, step)
        line.send("")
        step += 1


def _take(store: Store, host: str, step: int) -> None:
    store.take(
        app_state(step),
        f"{host}/{step}",
        metadata={"step": step},
        retention=Retention(keep_last=KEPT),
        overwrite=True,
    )
    latest = store.latest(host)
    assert latest is not None
    assert latest.name == f"{host}/{step}"


def read(line: Connection, host: str, place: str) -> None:
    """Restore what is there until the line is closed. A snapshot may be deleted meanwhile."""
    store = Store(place)
    while not line.poll():
        for snapshot in store.snapshots():
            try:
                assert_holds(snapshot, int(snapshot.name.rpartition("/")[2]))
            except SnapshotNotFoundError:
                continue
    line.send("")


def fill(place: Path, spare: int) -> Path:
    """Leave a file system so many bytes; return the file that takes up the rest."""
    ballast = place / "ballast"
    # Btrfs is full before it says so.
    with suppress(OSError), ballast.open("wb") as file:
        while shutil.disk_usage(place).free > spare:
            file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    return ballast
