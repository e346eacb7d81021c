"""Markers: on a disk, a file in the folder of each snapshot, for ``ls``, ``glob`` and ``exists``.

A marker is written after the commit of its snapshot, and removed with the snapshot. Casnap does not
rely on markers: they only tell people which snapshot a folder stands for, or once stood for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from casnap.backends.base import Backend
from casnap.backends.local_files import folder_at, is_of_the_place, translated
from casnap.errors import BackendError, DamagedError
from casnap.format.decoding import json_decoder
from casnap.format.names import MARKER, STORE_FOLDER, folder_of
from casnap.format.records import Root, Row
from casnap.storage.reading.repository import Repository

_log = logging.getLogger("casnap")
_OWN = {STORE_FOLDER}
_MOST_NAMES = 10_000


def mark(store: Repository, name: str, row: Row) -> None:
    """Write the marker of a snapshot that was just committed.

    An error is only logged as a warning, since the snapshot is committed. On a disk, this also
    looks whether the snapshot was deleted or overwritten meanwhile. Its marker is then removed, or
    replaced by that of the snapshot that has the name now.

    Args:
        store: The store.
        name: The full name of the snapshot.
        row: The row of the snapshot.
    """
    if not store.marks or row.is_witness:
        return
    content = {
        "casnap": "snapshot",
        "name": name,
        "commit": row.commit.hex(),
        "store": store.backend.uri,
        "note": f"Only a marker. All bytes are in {'../' * (name.count('/') + 1)}{STORE_FOLDER}; "
        "`casnap cp` copies snapshots.",
    }
    try:
        store.backend.mark(f"{name}/{MARKER}", msgspec.json.encode(content))
        now = _row_now(store, name, row) if store.backend.costs.free_looks else row
    except Exception as e:  # noqa: BLE001
        _log.warning("%s is committed, but its marker file cannot be written: %s", name, e)
        return
    if now is None or now.commit != row.commit:
        unmark(store, {name: row.commit})
        if now is not None:
            mark(store, name, now)


def _row_now(store: Repository, name: str, row: Row) -> Row | None:
    """Return the row that a name has in the newest root; None if no snapshot has the name now.

    Args:
        store: The store.
        name: The name.
        row: The row that was just committed under this name.
    """

    def newest(root: Root) -> Row | None:
        return row if root.seq == row.seq else store.table(root).get(name)

    return store.read_at_newest(newest)


class _Marker(msgspec.Struct):
    """The only field of a marker that this module reads."""

    commit: str


def commit_in(marker: bytes) -> bytes | None:
    """Return the commit id that a marker contains; None if the bytes are not a marker."""
    try:
        return bytes.fromhex(json_decoder(_Marker).decode(marker).commit)
    except (ValueError, RecursionError):
        return None


def unmark(store: Repository, deleted: Mapping[str, bytes]) -> None:
    """Remove the markers of deleted snapshots. If the store has no markers, do nothing.

    A marker with another commit id stays, since a new snapshot has taken the name meanwhile. An
    error is only logged.

    Args:
        store: The store.
        deleted: The name of each deleted snapshot → its commit id.
    """
    if not store.marks:
        return
    keys = {f"{name}/{MARKER}": name for name in deleted}

    def is_stale(key: str, marker: bytes) -> bool:
        return commit_in(marker) == deleted[keys[key]]

    try:
        errors: Mapping[str, Exception] = store.backend.unmark(keys, is_stale)
    except Exception as e:  # noqa: BLE001 - the snapshots are deleted, whatever the error was
        errors = dict.fromkeys([next(iter(keys), "")], e)
    for key, error in errors.items():
        text = "%.200r is deleted, but its marker file cannot be: %.500s"
        _log.warning(text, keys.get(key), error)


class Markers:
    """The markers of a store.

    Args:
        store: The store.

    Attributes:
        FILE: The file name of a marker.
    """

    FILE = MARKER

    def __init__(self, store: Repository) -> None:
        self._store = store

    def commit_in(self, folder: str) -> bytes | None:
        """Return the commit id that the marker in a folder contains; None if there is no marker.

        Raises:
            PlaceError: The folder cannot be looked at.
        """
        return _marked_commit(self._store.backend, folder)

    def replace(self, name: str, row: Row, removed_rows: Mapping[str, Row]) -> None:
        """Write the marker of a new snapshot; remove the markers of snapshots it has replaced.

        Args:
            name: The name of the new snapshot.
            row: The row of the new snapshot.
            removed_rows: The rows of the removed snapshots, by name. One of them may have the same
                name, if the new snapshot has replaced it.
        """
        mark(self._store, name, row)
        deleted = {
            other_name: its_row.commit
            for other_name, its_row in removed_rows.items()
            if other_name != name
        }
        if deleted:
            unmark(self._store, deleted)


def _marked_commit(backend: Backend, folder: str) -> bytes | None:
    try:
        return commit_in(backend.read_marker(f"{folder}/{MARKER}"))
    except (FileNotFoundError, DamagedError):
        return None
    except BackendError as e:
        if is_of_the_place(e):
            raise
        return None


class Listing(NamedTuple):
    """The names in the folder of a run.

    Attributes:
        backend: The backend of the store.
        run: The full name of the folder.
        names: The names in the folder.
    """

    backend: Backend
    run: str
    names: frozenset[str]

    def commit_of(self, name: str) -> bytes | None:
        """Return the commit id in the marker of a subfolder of the run; None without a marker."""
        return _marked_commit(self.backend, "/".join(part for part in (self.run, name) if part))


def listing_of(backend: Backend, run: str) -> Listing | None:
    """List the folder of a run; return None if the folder does not exist.

    Args:
        backend: The backend of a store on this machine.
        run: The full name of the folder; "" for the store's own folder.
    """
    assert backend.folder is not None
    path = str(backend.folder / run)
    with translated(path):
        try:
            with folder_at(path, listed=True) as fd:
                names = os.listdir(fd)
        except (FileNotFoundError, NotADirectoryError):
            return None
    return Listing(backend, run, frozenset(names))


def unknown_markers(store: Repository) -> dict[str, bytes]:
    """Return the markers with commit ids that no snapshot has; nothing for a remote store.

    A marker is written after its commit, and removed with its snapshot. So if no snapshot has its
    commit id, the root of the commit was lost, or a user has copied the folder from elsewhere.

    The function looks at the folders of all runs that have a snapshot, and at the folders right in
    the store's own folder. It skips links, and folders with very many names.

    Returns:
        The name of each folder with such a marker → the commit id in the marker.
    """
    backend = store.backend
    if backend.folder is None:
        return {}
    rows = store.read_at_newest(lambda root: dict(store.table(root).items_in()))
    top = listing_of(backend, "")
    runs = set(map(folder_of, rows)) | {""} | (top.names if top else set())
    markers: dict[str, bytes] = {}
    for run in sorted(runs - _OWN):
        try:
            listing = listing_of(backend, run)
        except BackendError:
            continue
        if listing is None or len(listing.names) > _MOST_NAMES:
            continue
        for name in sorted(listing.names):
            commit = None
            # Another user may have put a folder there that this user cannot look into.
            with suppress(BackendError):
                commit = listing.commit_of(name)
            if commit is not None:
                markers[f"{run}/{name}".strip("/")] = commit
    # A take may have committed meanwhile.
    rows = store.read_at_newest(lambda root: dict(store.table(root).items_in()))
    commits = {row.commit for row in rows.values()}
    return {name: commit for name, commit in markers.items() if commit not in commits}
