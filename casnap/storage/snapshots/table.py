"""The table of snapshots: finding a row, and the rules for new names."""

from __future__ import annotations

from casnap.backends import Backend
from casnap.backends.local.local_paths import exists, is_folder, is_link, is_taken
from casnap.errors import (
    SnapshotExistsError,
    SnapshotNotFoundError,
    nearest,
)
from casnap.format.names import STORE_FOLDER
from casnap.format.records import Row
from casnap.format.tree import Tree

Table = Tree[Row]


def row_of(table: Table, name: str, backend: Backend) -> Row:
    """Return the row of a snapshot.

    Raises:
        SnapshotNotFoundError: There is no such snapshot. The message says what may be meant.
    """
    row = table.get(name)
    if row is None:
        from casnap.storage.opening.location import Location
        from casnap.storage.opening.no_store import ForeignCheckpoints

        advice = Location(backend, name).link_advice()
        if not advice and backend.folder is not None:
            advice = ForeignCheckpoints(backend.folder / name).advice()
        advice = advice or nearest(name, (full_name for full_name, _ in table.items_in()))
        raise SnapshotNotFoundError(f"{backend.uri} holds no snapshot {name!r}{advice}")
    return row


def check_free(table: Table, name: str, *, overwrite: bool, uri: str, moved_tag: str = "") -> None:
    """Check that a new snapshot may have a name.

    Args:
        table: The table.
        name: The full name of the new snapshot.
        overwrite: Whether it may replace a snapshot that has no tag.
        uri: The URI of the store, for messages.
        moved_tag: A tag that the commit moves to the new snapshot. It does not protect the old one.

    Raises:
        SnapshotExistsError: The name is taken, and may not be overwritten. Or the name is a folder
            of another snapshot, or lies below another snapshot.
    """
    row = table.get(name)
    if row is not None and not overwrite:
        raise SnapshotExistsError(
            f"{uri} holds a snapshot {name!r} already; choose another name, or delete it; a "
            "take may also pass overwrite=True"
        )
    tags = () if row is None else tuple(tag for tag in row.tags if tag != moved_tag)
    if tags:
        raise SnapshotExistsError(
            f"{uri}: the snapshot {name!r} is tagged ({', '.join(tags):.200}), so it is "
            "not overwritten; choose another name, or untag it first (`casnap tag --remove`)"
        )
    parts = name.split("/")
    for n in range(1, len(parts)):
        outer = "/".join(parts[:n])
        if table.get(outer) is not None:
            raise SnapshotExistsError(
                f"{uri}: {outer!r} is a snapshot, so nothing can be taken below it as {name!r}"
            )
    inner = next(table.items_below(f"{name}/"), None)
    if inner is not None:
        raise SnapshotExistsError(
            f"{uri}: {name!r} is the folder of the snapshot {inner[0]!r}; choose another name"
        )


def check_path_is_free(backend: Backend, name: str) -> None:
    """Check that a snapshot can have its folder: no file or other store is on the way to it.

    Raises:
        SnapshotExistsError: A file or a store is at the path of the snapshot, or above it.
    """
    place = backend.folder
    for part in name.split("/") if place is not None else ():
        assert place is not None
        place /= part
        if exists(place) and not is_folder(place):
            raise SnapshotExistsError(
                f"{place} is a file, which casnap leaves alone, so {name!r} cannot be a snapshot "
                f"of {backend.uri}; choose another name, or move the file away"
            )
        if is_link(place):
            # The target of a link is not in this store.
            return
        if is_taken(place / STORE_FOLDER):
            raise SnapshotExistsError(
                f"{place} is a store itself, so {name!r} cannot be a snapshot of {backend.uri}; "
                "take it into that store, or choose another name"
            )
