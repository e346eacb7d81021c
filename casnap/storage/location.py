"""Finding the store and the snapshot name that a path means.

A local path is a store plus a name. The store is the nearest folder above that holds
``casnap.json``, as ``git`` finds its repository. ``uris.py`` says what a URI means.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from casnap.backends import Backend, LocalBackend, backend_at
from casnap.errors import InvalidNameError, NotAStoreError, StoreError, UntrustedStoreError
from casnap.format.names import check_name
from casnap.format.records import CONFIG_KEY, root_key
from casnap.runtime.environment import crowded_folders, trust_file
from casnap.runtime.handlers import pass_on
from casnap.storage.config import no_config_error
from casnap.storage.uris import Uri, snapshot_uri, store_uri

_log = logging.getLogger("casnap")


class Location(NamedTuple):
    """A place in a store.

    Attributes:
        backend: Where the store lives, or would.
        name: A name or prefix in the store; empty for the store itself.
        exists: Whether the store was found. A remote one is not looked for: to read its record
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
        return _located(uri, storage_options)
    text, plain = _local(path, storage_options)
    if not plain.strip("/") or Path(plain).name in ("", ".", ".."):
        raise InvalidNameError(f"{text!r} does not end in a snapshot's name")
    above, last = Path(plain).parent, Path(plain).name
    folder = _resolved(above) / last
    if exists(folder / CONFIG_KEY):
        raise InvalidNameError(
            f"{folder} is a store itself; a snapshot in it needs a name, like {folder}/step_100"
        )
    if exists(folder / ".snapshot_metadata"):
        raise StoreError(
            f"{folder} holds a snapshot of TorchSnapshot, which casnap does not touch; take to "
            "another path; `casnap import` imports it as a snapshot"
        )
    found = _find_store(above)
    if found is None:
        return Location(LocalBackend(folder.parent), check_name(last), exists=False)
    store, below = found
    if not below and (why := _why_distrusted(store, is_parent=True)) is not None:
        raise _untrusted(store, why)
    return Location(LocalBackend(store), check_name(f"{below}/{last}"), exists=True)


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
        return _located(place, storage_options)
    _, plain = _local(uri, storage_options)
    if not plain:
        raise NotAStoreError("an empty path is not a store; for the current folder write '.'")
    folder = _resolved(Path(plain))
    if exists(folder) and not folder.is_dir():
        raise NotAStoreError(f"{folder} is a file; a store is a folder")
    found = _find_store(Path(plain))
    if found is None:
        return Location(LocalBackend(folder), "", exists=False)
    store, below = found
    return Location(LocalBackend(store), check_name(below) if below else "", exists=True)


def _located(uri: Uri, storage_options: Mapping[str, Any] | None) -> Location:
    if uri.store.startswith("memory://"):
        _check_no_options(uri.store, storage_options)
    backend = backend_at(uri.store, storage_options)
    return Location(backend, uri.name, backend.is_remote or holds(backend, CONFIG_KEY))


def _local(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> tuple[str, str]:
    """Return a local path as it was given, and without ``file://``."""
    text = os.fspath(path)
    _check_no_options(text, storage_options)
    return text, text.removeprefix("file://")


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
        pass_on(e)
        # A loop of links, a NUL, a character that the file system does not have.
        raise NotAStoreError(f"{str(folder)!r} is not a folder: {e}") from e


def exists(path: Path) -> bool:
    """Whether a file or folder is there and can be looked at."""
    try:
        path.stat()
    except (OSError, ValueError) as e:
        pass_on(e)
        return False
    return True


def holds(backend: Backend, key: str) -> bool:
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
        UntrustedStoreError: The store lies above the folder, and is another user's.
    """
    for way in dict.fromkeys((as_written(folder), _resolved(folder))):
        device: int | None = None
        for place in (way, *way.parents):
            try:
                here = place.stat().st_dev
            except OSError as e:
                pass_on(e)
                continue
            if device not in (None, here):
                break
            # The target of a link may be on another mount than the link.
            device = None if place.is_symlink() else here
            if _is_store(place, named=place == way):
                return place.resolve(), "" if place == way else str(way.relative_to(place))
    return None


def _is_store(place: Path, *, named: bool) -> bool:
    """Whether a folder is a store to be used.

    Args:
        place: The folder.
        named: Whether the user named it. Then it may belong to another user.
    """
    # In this order: a new store has its record before it has a root.
    has_roots = _has_own_roots(place)
    if not (place / CONFIG_KEY).is_file():
        if has_roots and (named or not _is_everyones(place.resolve())):
            raise no_config_error(str(place))
        return False
    why = None if named else _why_distrusted(place.resolve(), is_parent=False)
    if why is None:
        return True
    if place.stat().st_mode & stat.S_IWOTH:
        # Any user may put such a file there. It must not stop the users of all folders below.
        _warn(f"{why}, where every user may write, so casnap skips it. {_advice(place)}")
        return False
    raise _untrusted(place, why)


def _is_everyones(place: Path) -> bool:
    """Whether other users may create files in a folder, such as a temp folder."""
    folder = place.stat()
    others = folder.st_uid != os.geteuid() and folder.st_mode & stat.S_IWOTH
    return bool(others) or place in crowded_folders()


def _has_own_roots(place: Path) -> bool:
    try:
        # A snapshot may be called x/roots/0: its marker is in a folder of that name.
        first = (place / root_key(0)).lstat()
    except (OSError, ValueError) as e:
        pass_on(e)
        return False
    return stat.S_ISREG(first.st_mode) and first.st_uid == os.geteuid()


@cache
def _warn(text: str) -> None:
    _log.warning("%s", text)


def _advice(store: Path) -> str:
    return (
        f"If you want to use it, name it (store=...), or run `casnap trust {store.resolve()}` once"
    )


def _untrusted(store: Path, why: str) -> UntrustedStoreError:
    return UntrustedStoreError(f"{why}, found above the path given. {_advice(store)}")


def _is_trusted(store: Path) -> bool:
    path = trust_file()
    try:
        return path is not None and str(store) in path.read_text().splitlines()
    except OSError:
        return False


def _why_distrusted(store: Path, *, is_parent: bool) -> str | None:
    """Return why a store above a path is not to be used; None if it is.

    Its record has to be this user's. That proves nothing if another user can write to its folder,
    and so put a file of this user there (a link, or moved from elsewhere): then its roots have to
    be this user's too. A store in another user's folder that every user can write to is refused.

    Args:
        store: The folder.
        is_parent: Whether the snapshot lies right in it, so that the path names it. Then this
            user's folder may be writable for its group, and another user's for all users.
    """
    folder, me = store.stat(), os.geteuid()
    # Not followed: a link to a file of this user proves nothing.
    owner = (store / CONFIG_KEY).lstat().st_uid
    others = stat.S_IWOTH if is_parent and folder.st_uid == me else stat.S_IWGRP | stat.S_IWOTH
    if owner != me:
        why = f"{store} is a store of another user (uid {owner})"
    elif folder.st_uid in (me, 0) and not folder.st_mode & others:
        return None
    elif folder.st_uid != me and folder.st_mode & stat.S_IWOTH and not is_parent:
        why = f"{store} is a store in a folder of another user (uid {folder.st_uid})"
    elif _made_here(store):
        return None
    else:
        why = f"{store} is a store whose parts belong to several users, or are links"
    return None if _is_trusted(store) else why


def _made_here(store: Path) -> bool:
    """Whether the record and the roots of a store look as if this user had made them here."""
    config = (store / CONFIG_KEY).lstat()
    if not stat.S_ISREG(config.st_mode):
        return False
    if config.st_nlink > 1:
        # A file that is being made, or whose making was cut off, has another name in `tmp`.
        spare = sum(os.path.samestat(config, p.lstat()) for p in _entries(store / "tmp"))
        if (store / CONFIG_KEY).lstat().st_nlink > 1 + spare:
            return False
    try:
        roots = (store / "roots").lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(roots.st_mode) and roots.st_uid == os.geteuid()


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from (p for p in folder.iterdir() if exists(p))
    except OSError:
        return


def trust(store: Path) -> None:
    """Add a store to the list of those that this user trusts.

    Raises:
        StoreError: There is no folder for that list.
    """
    path = trust_file()
    if path is None:
        raise StoreError(
            "there is no home folder for the list of trusted stores; set HOME or XDG_CONFIG_HOME"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write(f"{store}\n")
