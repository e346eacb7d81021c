"""Checks of a store after its garbage was collected."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from casnap import Snapshot, Store
from casnap.backends import LocalBackend
from casnap.format.records import pack_key, segment_key
from casnap.storage.collecting import automatic
from casnap.storage.reading.repository import Repository
from tests.support.faults import files


def wait_for_collectors() -> None:
    """Wait until no collection goes on in the background of this process."""
    for collector in list(automatic._collectors.values()):
        while collector._worker is not None and not collector._worker.ended:
            collector._worker.wait()


def forget_collectors() -> None:
    """Have this process know as little of what garbage there is as a new one."""
    automatic._collectors.clear()
    automatic._spent.seconds = 0.0


@contextmanager
def collecting(store: Store) -> Iterator[None]:
    """Collect without grace, one collection after the other, for a ``with`` block."""
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            store.gc(grace=0)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def assert_tidy(path: Path) -> None:
    """Check that no file is there that the newest root does not name, and none is missing."""
    view = Repository(LocalBackend(path)).view()
    named = {*map(pack_key, view.packs), *map(segment_key, view.segments)}
    assert files(path, "packs") | files(path, "index") | files(path, "tmp") == named


def places_of(store: Store, snapshot: Snapshot) -> list[Any]:
    """Return where the chunks of a snapshot lie."""
    view = store._view.repository.view()
    contents = snapshot.contents
    digests = [d for path, e in contents.entries() for d, _ in contents.chunks(path, e)]
    return [p for p in store._view.repository.index.find(view, digests) if p is not None]
