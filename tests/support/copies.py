"""Copying snapshots in small parts, and comparing two stores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from casnap import MirrorOptions, NewStore, Store
from casnap.backends import Backend
from casnap.transfer.copy import copy_snapshots
from casnap.transfer.copy_jobs import CopyJob, CopyOptions, CopyReport
from tests.support.faults import CHUNK, app_state, assert_equal, content, take

Place = Store | str | Path | Backend


def opened(place: Place) -> Store:
    return (
        place
        if isinstance(place, Store)
        else Store(place, create=NewStore(chunk_size=CHUNK)).make()
    )


def filled(place: Place, steps: int = 3) -> Store:
    """Make a store of some steps, of which the second has a tag."""
    store = opened(place)
    for step in range(steps):
        take(store, step)
    store.tag("step_1", "best")
    return store


def copy_in_parts(source: Place, destination: Place, part_bytes: int = CHUNK) -> CopyReport:
    """Copy all snapshots, and commit what was sent after each few chunks."""
    here, there = opened(source)._view.repository, opened(destination)._view.repository
    table = here.table(here.newest())
    chosen = [CopyJob(name, name, row) for name, row in table.items_in()]
    options = CopyOptions(part_bytes=part_bytes, skip_gone=True)
    return copy_snapshots(here, there, chosen, options)


class _StopError(Exception):
    pass


def interrupted(
    source: Store, path: Path, after: int, part_bytes: int = CHUNK, part_seconds: float = 30
) -> None:
    """Copy one snapshot in small parts, until so many bytes were dealt with."""

    def stop(_what: str, done: int, _total: int) -> None:
        if done > after:
            raise _StopError

    chosen = [CopyJob("step_0", "step_0", source._view.row_of("step_0"))]
    options = CopyOptions(part_bytes=part_bytes, part_seconds=part_seconds)
    with pytest.raises(_StopError):
        copy_snapshots(
            source._view.repository, opened(path)._view.repository, chosen, options, stop
        )


def unfinished(place: Place) -> list[str]:
    """Return the commit ids of the snapshots that are being copied into a store."""
    return [commit.hex() for commit in opened(place)._view.repository.newest().copies]


def assert_copied(source: Place, destination: Place, names: set[str] | None = None) -> None:
    """Check that snapshots of a store are in another one: each bit, and what is known of them.

    Args:
        source: The store that was copied from.
        destination: The other one.
        names: Their names, those of all by default.
    """
    here, there = opened(source), opened(destination)
    for original in here.snapshots():
        if names is not None and original.name not in names:
            continue
        copy = there[original.name]
        for what in ("commit_id", "time", "world_size", "tags"):
            assert getattr(copy, what) == getattr(original, what), what
        assert copy.metadata.user == original.metadata.user
        assert copy.stats.logical_bytes == original.stats.logical_bytes
        step = original.metadata.user["step"]
        for snapshot in (copy, original):
            state = app_state(step + 1)
            snapshot.restore(state)
            assert_equal(dict(next(iter(state.values()))), content(step))
    for store in (here, there):
        assert store.check(data=True).ok


def mirrored(place: Path, mirror: Any, **options: Any) -> Store:
    """Return a store that has a mirror, with some :class:`casnap.MirrorOptions`."""
    return Store(place, create=NewStore(chunk_size=CHUNK), mirror=MirrorOptions(mirror, **options))


def await_failure(store: Store) -> None:
    """Wait until the mirror of a store has failed: on a busy machine its first try takes long."""
    assert store.mirror is not None
    while store.mirror.status().error is None:
        time.sleep(0.01)


def names(store: Store) -> list[str]:
    """Return the names of the snapshots of a store."""
    return [s.name for s in store.snapshots()]
