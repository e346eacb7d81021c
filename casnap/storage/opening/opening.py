"""Open the store at a place, or make it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from casnap.backends import Backend
from casnap.backends.local_files import exists
from casnap.errors import PLACE_ERRORS, NotAStoreError, UnsupportedFormatError, shell_word
from casnap.format.names import STORE_FOLDER
from casnap.format.records import CONFIG_KEY, DEFAULT_CHUNK_SIZE, StoreConfig
from casnap.runtime.units import Size
from casnap.storage.commit_log.config import not_a_store_error, object_error
from casnap.storage.opening.location import Location, not_served_text
from casnap.storage.reading.chunk_cache import room_for
from casnap.storage.reading.repository import Repository

_log = logging.getLogger("casnap")


def open_at(
    place: Location,
    *,
    create: bool,
    is_explicit: bool = True,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    settings: Mapping[str, Any] | None = None,
    exclusive: bool = False,
    config: StoreConfig | None = None,
    look_ahead: bool = False,
    cache_bytes: Size | None = None,
    markers: bool = True,
) -> tuple[Repository, bool]:
    """Open a store, or make it.

    Args:
        place: The place of the store, or of a folder of snapshots in it.
        create: Whether to make the store if there is none.
        is_explicit: Whether the user named this very place as a store.
        chunk_size: The chunk size of a new store, in bytes.
        settings: The settings of a new store.
        exclusive: Whether the user vouches that no other process writes to the store.
        config: The store's ``casnap.json``, if it was read before.
        look_ahead: Whether the caller uses the store right away. If it does, the newest root of a
            remote store is read now.
        cache_bytes: The most bytes of chunks of remote stores that this host caches; 0 for no
            cache. With None, ``CASNAP_CACHE_BYTES`` has the limit.
        markers: Whether to put a marker, a file for people, for each snapshot.

    Returns:
        The open store, and whether it was made just now.

    Raises:
        NotAStoreError: There is no store, and ``create`` is False.
        UnsupportedFormatError: A newer casnap made the store, or this machine is big-endian.
        StoreError: A store cannot be made at this place, or the folder of the cache is not safe.
        ValueError: ``cache_bytes`` was given for a store on this machine.
    """
    backend = place.backend
    if sys.byteorder != "little":
        raise UnsupportedFormatError(
            f"{backend.uri} cannot be used on this machine: the bytes of tensors are "
            "little-endian, and this casnap does not swap them for a big-endian one"
        )
    room = room_for(backend, cache_bytes)
    backend.exclusive |= exclusive
    # With a name, the path lies below a store. That store is finished if its making was cut off. It
    # is not made if it is missing.
    may_make = create and (not place.name or bool(place.exists))
    open_here = partial(Repository, backend, marks=markers)
    store = open_here(config=config) if config is not None else None
    is_new = False
    if store is None and backend.costly_requests:
        store = _at(backend, or_none=may_make, look_ahead=look_ahead, marks=markers)
    if store is None and may_make:
        store, is_new = _made(backend, chunk_size, settings, open_here, is_explicit=is_explicit)
    elif store is None and place.exists is False:
        raise _absent_error(backend)
    store = store or open_here()
    if room is not None:
        store.chunk_cache = room.of(store.config, backend)
    return store, is_new


def _made(
    backend: Backend,
    chunk_size: int,
    settings: Mapping[str, Any] | None,
    open_here: Callable[..., Repository],
    *,
    is_explicit: bool,
) -> tuple[Repository, bool]:
    """Make a store, or finish one whose making was cut off; then open the store.

    Args:
        backend: The backend of the place.
        chunk_size: The chunk size of a new store, in bytes.
        settings: The settings of a new store.
        open_here: Opens the store.
        is_explicit: Whether the user named this very place as a store.

    Returns:
        The open store, and whether it was made just now.
    """
    from casnap.storage.opening.creation import create_store

    created = create_store(
        backend, chunk_size=chunk_size, is_explicit=is_explicit, settings=settings
    )
    if created.is_new and backend.folder and (narrow := not_served_text(backend.folder)):
        level = logging.INFO if is_explicit else logging.WARNING
        _log.log(level, "%s is a store of its own now%s", backend.uri, narrow)
    elif created.is_new and backend.folder and not is_explicit:
        _warn_of_neighbours(backend.folder)
    store = open_here(config=created.config)
    if created.root is not None:
        store.note_newest(created.root)
    return store, created.is_new


def _warn_of_neighbours(store: Path) -> None:
    """Log a warning, once, if takes to paths have made two stores in one folder.

    A take to the path ``run/step_5/model`` makes a store of ``run/step_5``. So a process that takes
    to such paths makes a store for each step, and the stores share no chunks.
    """
    first = _made_by_paths.setdefault(store.parent, store)
    if first is not None and first != store:
        _made_by_paths[store.parent] = None
        _log.warning(
            "%s and %s are two stores, and share no chunks: a path alone makes the folder of its "
            "snapshot a store. To have one store for all, name it (store=, or Store(%r)), or "
            "`casnap init %s` before the first take",
            first,
            store,
            str(store.parent),
            shell_word(store.parent),
        )


# The folder → the first store that this process made in it by a path alone; None after the warning.
_made_by_paths: dict[Path, Path | None] = {}


def _absent_error(backend: Backend) -> NotAStoreError:
    """Return the error to raise for a place without a store. It tells what the place is instead."""
    from casnap.storage.opening.no_store import no_store_error

    if error := Location(backend, "").only_marker_error() or _no_name_error(backend):
        return error
    folder = backend.folder
    return not_a_store_error(backend) if folder is None else no_store_error(folder)


def _no_name_error(backend: Backend) -> NotAStoreError | None:
    """Return the error to raise for a folder that is no store, but lies in the folder of a store.

    The message says that this store has no snapshot with the folder's name.

    Returns:
        The error; None if the folder above is not a store.
    """
    folder = backend.folder
    try:
        if folder is None or not exists(folder.parent / STORE_FOLDER / CONFIG_KEY):
            return None
    except PLACE_ERRORS:
        # The store above was skipped, since every user may write there.
        return None
    return NotAStoreError(
        f"{folder} is not a casnap store, and the store {folder.parent} has no snapshot "
        f"{folder.name!r}; `casnap ls {shell_word(folder.parent)}` lists those that it has"
        f"{not_served_text(folder)}"
    )


def _at(backend: Backend, *, or_none: bool, look_ahead: bool, marks: bool) -> Repository | None:
    """Open a remote store.

    Args:
        backend: The backend of the place.
        or_none: Whether to return None if there is no store.
        look_ahead: Whether to read the newest root now, instead of at its first use.
        marks: Whether to put a marker, a file for people, for each snapshot.

    Raises:
        NotAStoreError: There is no store, or its creation was cut off; not if ``or_none`` is set.
    """
    try:
        return Repository.at(backend, look_ahead=look_ahead, marks=marks)
    except NotAStoreError:
        if or_none:
            return None
        if backend.is_object():
            raise object_error(backend.uri) from None
        raise
