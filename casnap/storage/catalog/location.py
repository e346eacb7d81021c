"""Finding the store and the snapshot name that a path means.

A local path is a store plus a name. The store is the nearest folder above that holds
``casnap-store/``, as ``git`` finds its repository. A store that was made unasked, by a path alone,
serves only the names right in its folder. ``uris.py`` says what a URI means.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from casnap.backends import Backend, LocalBackend, backend_at
from casnap.errors import (
    CasnapError,
    InvalidNameError,
    NotAStoreError,
    StoreError,
)
from casnap.format.names import STORE_FOLDER, check_name
from casnap.format.records import CONFIG_KEY, FOLDER_ONLY, root_key, serves_below
from casnap.runtime.environment import local_path
from casnap.storage.catalog.uris import Uri, snapshot_uri, store_uri
from casnap.storage.chunks.open_store import OpenStore
from casnap.storage.log.config import no_config_error, read_config
from casnap.storage.log.roots import newest_root

_log = logging.getLogger("casnap")


class Location(NamedTuple):
    """A place in a store.

    Attributes:
        backend: Where the store lives, or would.
        name: A name or prefix in the store; empty for the store itself.
        exists: Whether the store was found. A remote one never is: to read its record then
            costs no more.
    """

    backend: Backend
    name: str
    exists: bool


def locate_snapshot(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Location:
    """Return the store and the name that a snapshot's path means.

    Args:
        path: A path or URI.
        storage_options: How a remote place is reached.

    Raises:
        InvalidNameError: The path is a store itself, or no name.
        StoreError: The path holds something else, or a store that is not trusted.
        DamagedError: It lies in a store that has lost its ``casnap.json``.
        ValueError: A local path has storage options.
    """
    uri = snapshot_uri(path)
    if uri is not None:
        return _locate_uri(uri, storage_options)
    text, local = _local(path, storage_options)
    if not local.strip("/") or Path(local).name in ("", ".", ".."):
        raise InvalidNameError(f"{text!r} does not end in a snapshot's name")
    parent, name = Path(local).parent, Path(local).name
    folder = _resolved(parent) / name
    if exists(folder / STORE_FOLDER):
        raise InvalidNameError(
            f"{folder} is a store itself; a snapshot in it needs a name, like {folder}/step_100"
        )
    if exists(folder / ".snapshot_metadata"):
        raise StoreError(
            f"{folder} holds a snapshot of TorchSnapshot, which casnap does not touch; take to "
            "another path; `casnap import` imports it as a snapshot"
        )
    match = _find_store(parent)
    if match is None:
        return Location(LocalBackend(folder.parent), check_name(name), exists=False)
    store, inner = match
    if not inner and (refusal := _why_distrusted(store, is_parent=True)) is not None:
        raise _untrusted(store, refusal)
    return Location(LocalBackend(store), check_name(f"{inner}/{name}".lstrip("/")), exists=True)


def locate_store(
    uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Location:
    """Return the store that a URI means, and the prefix in it if it lies below.

    Args:
        uri: A path or URI.
        storage_options: How a remote place is reached.

    Raises:
        StoreError: A file is there, or the store is not trusted.
        DamagedError: The store has lost its ``casnap.json``.
        ValueError: A local path has storage options.
    """
    place = store_uri(uri)
    if place is not None:
        return _locate_uri(place, storage_options)
    _, local = _local(uri, storage_options)
    if not local:
        raise NotAStoreError("an empty path is not a store; for the current folder write '.'")
    folder = _resolved(Path(local))
    if exists(folder) and not folder.is_dir():
        raise NotAStoreError(f"{folder} is a file; a store is a folder")
    match = _find_store(Path(local))
    if match is None:
        return Location(LocalBackend(folder), "", exists=False)
    store, inner = match
    return Location(LocalBackend(store), check_name(inner) if inner else "", exists=True)


def _locate_uri(uri: Uri, storage_options: Mapping[str, Any] | None) -> Location:
    if uri.store.startswith("memory://"):
        _check_no_options(uri.store, storage_options)
    backend = backend_at(uri.store, storage_options)
    return Location(
        backend, uri.name, not backend.costly_requests and has_object(backend, CONFIG_KEY)
    )


def _local(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> tuple[str, str]:
    """Return a local path as it was given, and as the system knows it."""
    text = os.fspath(path)
    _check_no_options(text, storage_options)
    local = local_path(text)
    parts = Path(local).parts
    if STORE_FOLDER in parts:
        folder = str(Path(*parts[: parts.index(STORE_FOLDER)]))
        raise InvalidNameError(
            f"{text!r:.500} lies in {STORE_FOLDER}, where a store keeps its files; name the folder "
            f"above it, {folder!r:.500}"
        )
    return text, local


def _check_no_options(path: str, storage_options: Mapping[str, Any] | None) -> None:
    if storage_options:
        raise ValueError(
            f"storage_options say how to reach a remote store, but {path} is on this machine; "
            "leave them out"
        )


def _resolved(folder: Path) -> Path:
    try:
        return folder.resolve()
    except (OSError, RuntimeError, ValueError) as e:
        # A loop of links, a NUL, a character that the file system does not have.
        raise NotAStoreError(f"{str(folder)!r} is not a folder: {e}") from e


def exists(path: Path) -> bool:
    """Whether a file or folder is there and can be looked at."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


def has_object(backend: Backend, key: str) -> bool:
    """Whether an object exists. Listing its folder would be slow: it may hold many snapshots."""
    return backend.size_if_there(key) is not None


def as_written(folder: Path) -> Path:
    """Return an absolute path. Links stay as they are, unless ``..`` follows one."""
    place = Path(folder.anchor) if folder.is_absolute() else Path.cwd()
    for part in folder.parts:
        place = place.resolve().parent if part == ".." else place / part
    return place


def _find_store(folder: Path) -> tuple[Path, str] | None:
    """Return the nearest store at or above a folder, on the same mount, and the way down from it.

    It looks above the folder as it is written first, since below a store a link is a name like any
    other; then above the place that the folder resolves to.

    Raises:
        DamagedError: A store of this user lacks its ``casnap.json``.
        StoreError: The store lies above the folder, and is another user's.
    """
    for way in dict.fromkeys((as_written(folder), _resolved(folder))):
        nearest: Path | None = None
        for place in _mounted_above(way):
            is_named = place == way
            if nearest is not None:
                # A name below a store that leads to another one is a name of the first, if that
                # has such names: somebody may have put the link in the place of their folder.
                links = [p for p in _between(nearest, place) if p.is_symlink()]
                if not any(_has_below(place, str(link.relative_to(place))) for link in links):
                    continue
            if _holds_store(place, is_explicit=is_named) and (
                is_named or _is_usable(place, str(way.relative_to(place)))
            ):
                nearest = place
        if nearest is not None:
            return nearest.resolve(), "" if nearest == way else str(way.relative_to(nearest))
    return None


def _mounted_above(way: Path) -> Iterator[Path]:
    """Yield a folder and those above it, on the same mount."""
    device: int | None = None
    for place in (way, *way.parents):
        try:
            device_here = place.stat().st_dev
        except OSError:
            continue
        if device not in (None, device_here):
            return
        # The target of a link may be on another mount than the link.
        device = None if place.is_symlink() else device_here
        yield place


def _between(place: Path, ancestor: Path) -> Iterator[Path]:
    """Yield a folder, and those above it up to another one, without that."""
    while place != ancestor:
        yield place
        place = place.parent


def _has_below(place: Path, folder: str) -> bool:
    """Whether a store has a snapshot of a name, or below it; False for one that cannot be read."""
    try:
        store = OpenStore(LocalBackend(place))
        table = store.table(store.newest())
        return table.get(folder) is not None or any(True for _ in table.items_below(f"{folder}/"))
    except CasnapError:
        return False


def _holds_store(place: Path, *, is_explicit: bool) -> bool:
    """Whether a store is in a folder.

    Args:
        place: The folder.
        is_explicit: Whether the user named it, as a store or as the folder of a snapshot.

    Raises:
        DamagedError: It is this user's, and lacks its ``casnap.json``.
    """
    inner = place / STORE_FOLDER
    # In this order: a new store has its record before it has a root.
    has_roots = _has_roots(inner, is_explicit=is_explicit)
    if exists(inner / CONFIG_KEY) and not (inner / CONFIG_KEY).is_dir():
        return True
    # Where every user may write, any of them can put roots.
    if has_roots and (is_explicit or not place.stat().st_mode & stat.S_IWOTH):
        raise no_config_error(str(place))
    return False


def _is_usable(place: Path, inner: str) -> bool:
    """Whether a store above a path is to be used for it.

    Args:
        place: Its folder.
        inner: The way down from there.

    Raises:
        StoreError: It is another user's.
    """
    store = place.resolve()
    refusal = _why_distrusted(store, is_parent=False)
    if refusal is None:
        return _serves(store, inner)
    with suppress(CasnapError):
        if not _serves(store, inner):
            return False
    if place.stat().st_mode & stat.S_IWOTH:
        # Any user may put such a folder there. It must not stop the users of all folders below.
        _warn(f"{refusal}, where every user may write, so casnap skips it. {_ADVICE}")
        return False
    raise _untrusted(store, refusal)


def _serves(store: Path, inner: str) -> bool:
    """Whether a store serves a path below it: any, or only those of its own snapshots."""
    backend = LocalBackend(store)
    try:
        root = newest_root(backend)
        if serves_below(root):
            return True
        table, parts = OpenStore(backend).table(root), inner.split("/")
        # Nothing can be below a snapshot; the take says so.
        return any(table.get("/".join(parts[: n + 1])) is not None for n in range(len(parts)))
    except NotAStoreError:
        # It is being made, or its making was cut off: a take finishes that, as it was begun.
        return not read_config(backend).first_settings.get(FOLDER_ONLY)


def narrow_hint(folder: Path) -> str:
    """Return what a message about a folder is to say of a store above that does not serve it."""
    store = next((p for p in folder.parents if exists(p / STORE_FOLDER / CONFIG_KEY)), None)
    try:
        if store is None or serves_below(newest_root(LocalBackend(store))):
            return ""
    except CasnapError:
        return ""
    return (
        f". The store {store} serves only names right in its folder, since a path alone has made "
        f"it; `casnap init {store}` has it serve all paths below"
    )


def _has_roots(inner: Path, *, is_explicit: bool) -> bool:
    """Whether there are roots; of this user, unless the folder was named."""
    try:
        status = (inner / root_key(0)).lstat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and (is_explicit or status.st_uid == os.geteuid())


@cache
def _warn(text: str) -> None:
    _log.warning("%s", text)


_ADVICE = (
    "To use it, name it: store=..., or Store(...). If it is yours alone, `chown -R` its "
    f"{STORE_FOLDER} to you, and `chmod -R go-w` it"
)


def _untrusted(store: Path, reason: str) -> StoreError:
    return StoreError(f"{reason}, found by the path given. {_ADVICE}")


def _why_distrusted(store: Path, *, is_parent: bool) -> str | None:
    """Return why a store that a path leads to is not to be used; None if it is.

    All of it has to be this user's, or root's, and other users must not be able to write to it: one
    that somebody else has put there must not get the snapshots of all who take below.

    Args:
        store: The folder.
        is_parent: Whether the snapshot lies right in it, so that the path names it. Then others may
            write to it.
    """
    inner = store / STORE_FOLDER
    # Not followed: a link to a file of this user proves nothing.
    folder, record = inner.lstat(), (inner / CONFIG_KEY).lstat()
    if not {folder.st_uid, record.st_uid} <= {os.geteuid(), 0}:
        return f"{store} is a store of another user (uid {record.st_uid})"
    is_shared = folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if (is_shared and not is_parent) or not stat.S_ISDIR(folder.st_mode):
        return f"{store} is a store that other users may write to"
    return None
