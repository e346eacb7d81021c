"""Choose the snapshots of a copy and their new names; check the two stores before it begins."""

from __future__ import annotations

from casnap.backends import Backend, LocalBackend
from casnap.errors import SnapshotNotFoundError, StoreError, nearest
from casnap.format.names import check_name
from casnap.format.records import Row
from casnap.storage import Location, Repository, Table
from casnap.transfer.copy_jobs import CopyJob


def choose(source: Repository, prefix: str, name: str | None, rename: str | None) -> list[CopyJob]:
    """Return a job for each snapshot that ``name`` means, with its new name at the destination.

    Args:
        source: The store.
        prefix: The folder below which names are looked for; new names do not have it. "" for the
            whole store.
        name: A snapshot, or a folder of snapshots; None for all.
        rename: The new name of that snapshot or folder; without ``name``, the folder at the
            destination that all snapshots go into.

    Raises:
        SnapshotNotFoundError: There is neither a snapshot nor a folder called ``name``.
        InvalidNameError: The name, or a new name, is not valid.
    """
    inner = "" if name is None else check_name(name)
    outer = "/".join(part for part in (prefix, inner) if part)

    def look(table: Table) -> list[tuple[str, Row]]:
        row = table.get(check_name(outer)) if inner else None
        rows = [(outer, row)] if row is not None else list(table.with_witnesses(outer))
        if outer and not rows:
            advice = Location(source.backend, outer).link_advice()
            advice = advice or nearest(outer, (full for full, _ in table.items_in()))
            raise SnapshotNotFoundError(
                f"{source.backend.uri} holds no snapshot {outer!r}, nor any below it{advice}"
            )
        return rows

    matches = source.read_at_newest(lambda root: look(source.table(root)))
    inner_start = len(prefix) + 1 if prefix else 0
    return [
        CopyJob(full, _renamed(full[inner_start:], inner, rename), row) for full, row in matches
    ]


def _renamed(name: str, folder: str, rename: str | None) -> str:
    if rename is None:
        return name
    suffix = name[len(folder) :] if folder else f"/{name}"
    return check_name(check_name(rename) + suffix)


def check_pair(source: Repository, destination: Repository) -> None:
    """Check that the snapshots of one store can be copied into another.

    Raises:
        StoreError: Both are the same store, or they have chunks of different sizes.
        UnsupportedFormatError: The destination's codec is unknown to this casnap.
    """
    source_backend, destination_backend = source.backend, destination.backend
    is_same_id = source.config.store_id == destination.config.store_id
    if is_same_id and _is_same_place(source_backend, destination_backend):
        raise StoreError(
            f"{destination_backend.uri} is the store that is copied from; a copy goes into "
            "another store"
        )
    ours, theirs = source.config.chunk_size >> 10, destination.config.chunk_size >> 10
    if ours != theirs:
        raise StoreError(
            f"{source_backend.uri} has chunks of {ours:,} KiB, {destination_backend.uri} of "
            f"{theirs:,} KiB. A snapshot "
            "names its chunks by their digests, so it can be copied only between stores with "
            f"chunks of one size: make the other store with `casnap init --chunk-size {ours}K`; or "
            "restore from the one and take into the other"
        )
    # Raises for a codec that this casnap does not know.
    _ = destination.settings(destination.recent()).codec


def _is_same_place(source: Backend, destination: Backend) -> bool:
    if isinstance(source, LocalBackend) and isinstance(destination, LocalBackend):
        return source.folder.samefile(destination.folder)
    return source.identity == destination.identity
