"""The snapshot table of a root: the rules for names and rows."""

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
        SnapshotNotFoundError: There is none. The error says what may be meant.
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
    """Check that a snapshot may be made under this name.

    Args:
        table: The table.
        name: The full name.
        overwrite: Whether it may replace a snapshot that has no tag.
        uri: The store, for errors.
        moved_tag: A tag that is moved to it, so that it does not count.

    Raises:
        SnapshotExistsError: The name is taken (and tagged, or not to be overwritten), or it is a
            folder of another name, or lies below one.
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
    """Check that a snapshot can have its folder: no file and no other store is there, or above it.

    Raises:
        SnapshotExistsError: There is one, to which the path of the snapshot leads.
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
            # What it leads to is not in this store.
            return
        if is_taken(place / STORE_FOLDER):
            raise SnapshotExistsError(
                f"{place} is a store itself, so {name!r} cannot be a snapshot of {backend.uri}; "
                "take it into that store, or choose another name"
            )
