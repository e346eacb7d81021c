"""Open the stores and snapshots that the arguments of a command name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import click

from casnap.backends import Backend
from casnap.backends.local_files import exists
from casnap.backends.uris import joined, store_uri
from casnap.cli.output import CommandError, json_option, json_time, quote, say
from casnap.errors import (
    CasnapError,
    DamagedError,
    NotAStoreError,
    SnapshotNotFoundError,
    nearest,
)
from casnap.format.names import check_name, folder_of
from casnap.runtime.environment import local_path
from casnap.snapshot import Snapshot
from casnap.storage import Location, open_at
from casnap.store import Store
from casnap.view import View, repository_of, view_above

Command = TypeVar("Command", bound=Callable[..., Any])

_ELSEWHERE = re.compile(r"~?/|\.{1,2}/|[A-Za-z0-9+]+://")
_ENDPOINT, _EXCLUSIVE = "casnap.endpoint_url", "casnap.exclusive"


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    ctx.meta[f"casnap.{param.name}"] = value


_endpoint_option = click.option(
    "--endpoint-url",
    metavar="URL",
    expose_value=False,
    callback=_remember,
    help="The server of an s3:// or gs:// store, if it is not the usual one.",
)
_exclusive_option = click.option(
    "--exclusive",
    is_flag=True,
    expose_value=False,
    callback=_remember,
    help="No other process writes to the store: for servers that cannot tell writers apart.",
)


def reading_options(command: Command) -> Command:
    """Add to a command the options of all commands that read a store."""
    return _endpoint_option(json_option(command))


def writing_options(command: Command) -> Command:
    """Add to a command the options of all commands that write to a store."""
    return _exclusive_option(reading_options(command))


def options_for(uri: str) -> dict[str, Any] | None:
    """Return the storage options for a URI, as the command's flags give them; None without flags.

    Raises:
        click.UsageError: The command has such flags, but the URI is a local path.
    """
    url = click.get_current_context().meta.get(_ENDPOINT)
    if url is None:
        return None
    if store_uri(uri) is None:
        raise click.UsageError("--endpoint-url is for a store on a server, like s3://bucket/run1")
    if "://" not in url:
        raise click.UsageError(f"--endpoint-url is a URL, like http://{url}")
    return {"endpoint_url": url}


def options_of(uri: str) -> dict[str, Any] | None:
    """Return the storage options for a URI; None for a local path, even with flags.

    ``cp`` uses this: one of its two places may be a local path.
    """
    return None if store_uri(uri) is None else options_for(uri)


def is_exclusive() -> bool:
    """Whether the user has promised, by ``--exclusive``, that nobody else writes to the store."""
    return bool(click.get_current_context().meta.get(_EXCLUSIVE))


def open_store(store: str | None, **options: Any) -> Store:
    """Return the store at a folder or URI, or above it; by default at the current folder.

    Args:
        store: The folder or URI.
        options: Further arguments of :class:`casnap.Store`. With any, the call may make the store.

    Raises:
        StoreError: There is no store, or it cannot be used.
    """
    uri = store or "."
    if options:
        return Store(uri, storage_options=options_for(uri), exclusive=is_exclusive(), **options)
    place = Location.of_store(uri, options_for(uri), may_take=False, is_typed=True)
    repository, _ = open_at(place, create=False, exclusive=is_exclusive())
    return Store._of(View.of(repository, place.name))


def _open_place(
    uri: str, backends: list[Backend], *, is_destination: bool
) -> tuple[Store, str | None]:
    """Return the store that a URI lies in, and the name or folder in the store, or None.

    Args:
        uri: The URI.
        backends: A list that gets the backend in use, so that the caller can count its requests.
        is_destination: Whether snapshots are copied there. If so, this completes a store whose
            making was cut off.
    """
    place = Location.of_store(uri, options_of(uri), may_take=is_destination, is_typed=True)
    backends.append(place.backend)
    finish = is_destination and bool(place.exists)
    repository, is_new = open_at(place, create=finish, exclusive=is_exclusive())
    return Store._of(View.of(repository, is_new=is_new)), place.name or None


def open_or_above(
    uri: str, backends: list[Backend], *, is_destination: bool = False
) -> tuple[Store, str | None]:
    """Open the store at a URI as :func:`_open_place` does.

    If nothing is at a remote URI, open the store at its parent; the last part of the URI is then
    the name of a snapshot.

    Args:
        uri: The URI.
        backends: A list that gets the backends in use.
        is_destination: As for :func:`_open_place`.

    Raises:
        NotAStoreError: There is no store at either place.
    """
    open_place = partial(_open_place, backends=backends, is_destination=is_destination)
    try:
        return open_place(uri)
    except NotAStoreError:
        remote = store_uri(uri)
        if remote is None or remote.name or remote.is_bucket:
            raise
        snapshot = remote.as_snapshot()
        try:
            return open_place(snapshot.store)[0], snapshot.name
        except NotAStoreError:
            pass
        raise


def open_snapshot(path: str) -> Snapshot:
    """Return the snapshot at a path or URI.

    Raises:
        CasnapError: There is no such snapshot, or its store cannot be used.
    """
    return snapshot_at(path, options_for(path))


def snapshot_at(path: str, storage_options: dict[str, Any] | None) -> Snapshot:
    """Return the snapshot at a path or URI, reached by the given storage options."""
    view, name = view_above(
        path, storage_options, create=False, is_typed=True, exclusive=is_exclusive()
    )
    return Snapshot.of(view, check_name(name), view.row_of(name))


def open_part(path: str) -> tuple[Snapshot, str | None]:
    """Split a path into a snapshot and a path inside it; open the snapshot.

    Returns:
        The snapshot, and the path inside; None if nothing follows the snapshot.

    Raises:
        CasnapError: There is no such snapshot, or its store cannot be used.
    """
    place, inner = path, list[str]()
    while True:
        try:
            store = open_store(place)
            break
        except NotAStoreError:
            uri = store_uri(place)
            if uri is None or uri.name or uri.is_bucket:
                raise
            place = uri.parent[0]
            inner.insert(0, uri.parent[1])
    whole_store = store.whole()
    parts = [*(store.prefix.split("/") if store.prefix else []), *inner]
    for count in range(1, len(parts) + 1):
        name = "/".join(parts[:count])
        if name in whole_store:
            return whole_store[name], "/".join(parts[count:]) or None
    if not parts:
        raise CommandError(f"{whole_store.uri} is a store; name a snapshot in it")
    return whole_store["/".join(parts)], None


def open_whole_store(store: str | None) -> Store:
    """Return the store at or above a folder, for a command that works on the whole store.

    If the store is above the folder, a line on stderr says so.

    Args:
        store: The folder or URI; None for the current folder.

    Raises:
        StoreError: There is no store, or it cannot be used.
        CommandError: The folder was named, but does not exist.
    """
    place = open_store(store)
    backend = repository_of(place).backend
    is_local_path = store and place.prefix and backend.folder
    if is_local_path and not exists(local_path(str(store))):
        uri = backend.uri
        raise CommandError(
            f"{store} does not exist; if you mean the whole store above it, name {uri}"
        )
    if place.prefix:
        folder = store or "the current folder"
        command = click.get_current_context().info_name
        say(f"{folder} lies in {backend.uri}; {command} is for the whole store", err=True)
    return place


def snapshots_of(store: Store, prefix: str | None) -> list[Snapshot]:
    """Return the snapshots below a prefix, or the snapshot with that name, in the order of commits.

    Raises:
        CommandError: The store has snapshots, but none below the prefix.
    """
    snapshots = store.snapshots(prefix)
    outer = "/".join(part for part in (store.prefix, (prefix or "").strip("/")) if part)
    if snapshots or not outer:
        return snapshots
    whole_store = store.whole()
    names = [snapshot.name for snapshot in whole_store.snapshots()]
    if outer in names:
        return [whole_store[outer]]
    if not names:
        return []
    folders = set(map(folder_of, names)) - {""}
    backend = repository_of(whole_store).backend
    advice = Location(backend, outer).link_advice() or nearest(outer, [*folders, *names])
    raise CommandError(f"{whole_store.uri} holds no snapshot below {quote(outer)}{advice}")


def check_folder(store: Store, folder: str) -> None:
    """Check that a folder has snapshots, unless the store has none at all.

    Raises:
        CommandError: There are none below the folder, or it is a snapshot itself.
    """
    found = snapshots_of(store, folder)
    outer = "/".join(filter(None, (store.prefix, folder.strip("/"))))
    if [snapshot.contents.name for snapshot in found] == [outer]:
        raise CommandError(f"{found[0].path} is a snapshot, not a folder of snapshots")


def second_snapshot(path: str, neighbour: Snapshot) -> Snapshot:
    """Return the second snapshot of a command, for which a bare name is enough.

    Args:
        path: A path or URI. Or only a name, of a snapshot in the folder or the store of the first
            one.
        neighbour: The first snapshot.

    Raises:
        CasnapError: There is no such snapshot.
    """
    error: CasnapError | None = None
    elsewhere = _ELSEWHERE.match(path)
    try:
        if store_uri(path) is not None:
            return open_snapshot(path)
        if elsewhere or neighbour.contents.store.backend.folder:
            return snapshot_at(path, None)
    except CasnapError as e:
        if elsewhere:
            raise
        error = e
    sibling = f"{folder_of(neighbour.name)}/{path}".strip("/")
    for name in dict.fromkeys((sibling, path)):
        if name in neighbour.store:
            return neighbour.store[name]
    if isinstance(error, SnapshotNotFoundError):
        raise error
    return neighbour.store[sibling]


def store_fields(store: Store) -> dict[str, Any]:
    """Return, for JSON, the store's URI, and the prefix to which ``store`` is limited."""
    return {"store": repository_of(store).backend.uri, "prefix": store.prefix}


def metadata_of(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return the user's metadata of a snapshot, or None if they are damaged."""
    try:
        with snapshot.contents.reading():
            return snapshot.contents.metadata
    except DamagedError:
        return None


def identity(backend: Backend, full: str, commit: str | None) -> dict[str, Any]:
    """Return the fields that identify a snapshot, for JSON.

    Args:
        backend: Its store.
        full: Its full name in the store.
        commit: Its commit id; None for a snapshot that does not exist yet.
    """
    path = joined(backend.uri, full)
    return {"store": backend.uri, "name": full, "path": path, "commit": commit}


def identity_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return, for JSON, the fields that identify a snapshot that exists."""
    contents = snapshot.contents
    return identity(contents.store.backend, contents.name, snapshot.commit_id)


def snapshot_fields(snapshot: Snapshot, lacking: Collection[str]) -> dict[str, Any]:
    """Return, for JSON, the fields of a snapshot's row.

    Args:
        snapshot: The snapshot.
        lacking: The commit ids of the snapshots that the mirror lacks, and of the snapshot that has
            the followed tag in the store, but not at the mirror.
    """
    return {
        **identity_of(snapshot),
        "root": snapshot.seq,
        "time": json_time(snapshot.time),
        "world_size": snapshot.world_size,
        "logical_bytes": snapshot.stats.logical_bytes,
        "new_bytes": snapshot.stats.new_bytes,
        "entry_count": snapshot.stats.entries,
        "seconds": snapshot.stats.seconds,
        "metadata": metadata_of(snapshot),
        "tags": list(snapshot.tags),
        "unmirrored": snapshot.commit_id in lacking,
        "thinned": snapshot.row.is_thinned,
        "rewound": snapshot.row.is_rewound,
        "unhealthy": snapshot.unhealthy,
        "unknown_features": list(snapshot.row.unknown_features),
    }
