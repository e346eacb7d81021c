"""The store of a snapshot, by a path or URI; on many ranks the same for all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from casnap.errors import NotAStoreError
from casnap.format.records import Root, StoreConfig
from casnap.opened.open_store import OpenStore, open_store
from casnap.storage.location import locate_snapshot, locate_store
from casnap.storage.table import only_marker_error

if TYPE_CHECKING:
    from casnap.ranks.comm import Comm
    from casnap.store import Store


def store_above(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, **how: Any
) -> tuple[OpenStore, str]:
    """Return the store that the path of a snapshot is in, and the name there.

    Further arguments, and errors, are those of :func:`open_store`.
    """
    found = locate_snapshot(path, storage_options)
    try:
        opened = open_store(found._replace(name=""), asked=False, ahead=True, **how)
    except NotAStoreError as e:
        raise only_marker_error(found.backend, found.name) or e from None
    return opened, found.name


def find(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    store: Store | str | os.PathLike[str] | None,
    *,
    create: bool,
    cache_bytes: int | None = None,
) -> tuple[OpenStore, str]:
    """Return the store, and the name in it, that the arguments of a Snapshot name.

    Raises:
        ValueError: Storage options or ``cache_bytes`` are for a store that is open, or local.
    """
    if store is None:
        return store_above(path, storage_options, create=create, cache_bytes=cache_bytes)
    if isinstance(store, str | os.PathLike):
        store = OpenStore.store_class(
            store, create=create, storage_options=storage_options, cache_bytes=cache_bytes
        )
    elif not isinstance(store, OpenStore.store_class):
        raise TypeError(f"store= is a Store or its URI; got a {type(store).__name__}")
    elif storage_options:
        raise ValueError(f"{store.uri} is open already; give storage_options to Store(...)")
    elif cache_bytes is not None:
        raise ValueError(f"{store.uri} is open already; give cache_bytes to Store(...)")
    return (store.make() if create else store).opened, os.fspath(path)


class _FoundPath(msgspec.Struct, array_like=True):
    """Rank 0's message about the place of a new snapshot.

    Attributes:
        path: The path that it was given.
        uri: The store.
        name: The full name.
        config: The record of a remote store, which then no other rank reads.
        root: A recent root of it.
    """

    path: str
    uri: str
    name: str
    config: StoreConfig | None = None
    root: Root | None = None


def find_together(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    store: Store | str | os.PathLike[str] | None,
    comm: Comm,
) -> tuple[OpenStore, str]:
    """Return the store and the name that rank 0 finds. Rank 0 makes the store if there is none."""
    with comm.reporting_errors():
        if comm.rank == 0:
            opened, name = find(path, storage_options, store, create=True)
            objects = opened.objects
            said = _FoundPath(os.fspath(path), objects.backend.uri, opened.outer_name(name))
            if objects.backend.is_remote and comm.size > 1:
                said.config, said.root = objects.config, objects.recent()
            comm.broadcast_message(said, _FoundPath)
            return opened, name
        said = comm.broadcast_message(None, _FoundPath)
        comm.check_same("the path", os.fspath(path), said.path)
        # Each rank reaches the store in its own way, but never looks for another one.
        if isinstance(store, OpenStore.store_class) and store.objects.backend.uri == said.uri:
            return store.opened.whole(), said.name
        found = locate_store(said.uri, storage_options)
        opened = open_store(found, create=False, config=said.config)
        if said.root is not None:
            opened.objects.hear(said.root)
        return opened, said.name
