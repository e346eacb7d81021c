"""The stores and snapshots that the arguments of a command name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from casnap.cli.output import Failure, quoted
from casnap.errors import CasnapError, DamagedError, SnapshotNotFoundError, nearest
from casnap.snapshot import Snapshot
from casnap.store import Store

_ELSEWHERE = re.compile(r"/|\.{1,2}/|[a-z0-9+]+://")


def open_store(store: str | None) -> Store:
    """Return the store at, or above, a folder; by default the current one.

    Raises:
        StoreError: There is no store, or it cannot be used.
    """
    return Store(store or ".", create=False)


def open_whole_store(store: str | None) -> Store:
    """Return the store at or above a folder, for a command that works on the whole store.

    Raises:
        StoreError: There is no store, or it cannot be used.
        Failure: The folder was named, but does not exist.
    """
    place = open_store(store)
    if store and place.prefix and not Path(store.removeprefix("file://")).exists():
        uri = place.objects.backend.uri
        raise Failure(f"{store} does not exist; if you mean the whole store above it, name {uri}")
    return place


def snapshots_of(store: Store, prefix: str | None) -> list[Snapshot]:
    """Return the snapshots below a prefix, or the one of that name, in the order of commits.

    Raises:
        Failure: The store has snapshots, but none of them matches.
    """
    found = store.snapshots(prefix)
    outer = "/".join(part for part in (store.prefix, (prefix or "").strip("/")) if part)
    if found or not outer:
        return found
    whole = Store(store.objects.backend.uri, create=False)
    every = whole.snapshots()
    named = [snapshot for snapshot in every if snapshot.name == outer]
    if named or not every:
        return named
    folders = {name.rpartition("/")[0] for name in (s.name for s in every)} - {""}
    hint = nearest(outer, [*folders, *(s.name for s in every)])
    raise Failure(f"{whole.uri} holds no snapshot below {quoted(outer)}{hint}")


def second_snapshot(path: str, first: Snapshot) -> Snapshot:
    """Return the snapshot at a path, or of a name beside the first snapshot or in its store.

    Raises:
        CasnapError: There is no such snapshot.
    """
    try:
        return Snapshot(path)
    except CasnapError as e:
        if _ELSEWHERE.match(path):
            raise
        failed = e
    beside = f"{first.name.rpartition('/')[0]}/{path}".strip("/")
    for name in dict.fromkeys((beside, path)):
        if name in first.store:
            return first.store[name]
    if isinstance(failed, SnapshotNotFoundError):
        raise failed
    return first.store[beside]


def store_fields(store: Store) -> dict[str, Any]:
    """Return the store and the prefix, for JSON."""
    return {"store": store.objects.backend.uri, "prefix": store.prefix}


def metadata_of(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return the user's metadata, or None if they are damaged."""
    try:
        return snapshot.metadata.user
    except DamagedError:
        return None


def snapshot_fields(snapshot: Snapshot) -> dict[str, Any]:
    """Return the row of a snapshot, for JSON."""
    return {
        "name": snapshot.name,
        "path": snapshot.path,
        "commit": snapshot.commit_id,
        "seq": snapshot.seq,
        "time": snapshot.time,
        "world_size": snapshot.world_size,
        "logical_bytes": snapshot.stats.logical_bytes,
        "new_bytes": snapshot.stats.new_bytes,
        "entries": snapshot.stats.entries,
        "seconds": snapshot.stats.seconds,
        "metadata": metadata_of(snapshot),
        "tags": list(snapshot.tags),
    }
