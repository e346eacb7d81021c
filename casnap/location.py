"""Which store, and which name in it, a path means; and making stores.

A local path is a store plus a name, as ``git`` finds its repository: the nearest folder above
that holds ``casnap.json``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from casnap.backends import Backend, LocalBackend, backend_at
from casnap.environment import crowded_folders, trust_file
from casnap.errors import (
    InvalidNameError,
    NotAStoreError,
    StoreError,
    UntrustedStoreError,
)
from casnap.format import (
    CONFIG_KEY,
    DEFAULT_CHUNK_SIZE,
    MAX_CHUNK_SIZE,
    MIN_CHUNK_SIZE,
    Root,
    StoreConfig,
    check_name,
    encode,
    root_key,
    seal,
)
from casnap.objects import headless, read_config


class Location(NamedTuple):
    """A place in a store.

    Attributes:
        backend: Where the store lives, or would.
        name: The name, or the prefix, in it; empty for the store itself.
        exists: Whether the store was found.
    """

    backend: Backend
    name: str
    exists: bool


def locate_snapshot(path: str | os.PathLike[str]) -> Location:
    """Return the store and the name that a snapshot's path means.

    Raises:
        InvalidNameError: The path is a store itself, or no name.
        StoreError: The path holds something else, or a store that is not trusted.
        DamagedError: It lies in a store that has lost its ``casnap.json``.
    """
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        scheme, _, rest = text.partition("://")
        parent, slash, name = rest.strip("/").rpartition("/")
        if not slash:
            raise InvalidNameError(f"{text} names a store, not a snapshot in it; add a name")
        backend = backend_at(f"{scheme}://{parent}")
        return Location(backend, check_name(name), CONFIG_KEY in backend.names(""))
    plain = text.removeprefix("file://")
    if not plain.strip("/") or Path(plain).name in ("", ".", ".."):
        raise InvalidNameError(f"{text!r} does not end in a snapshot's name")
    where = _resolved(Path(plain).parent)
    folder = where / Path(plain).name
    if _exists(folder / CONFIG_KEY):
        raise InvalidNameError(
            f"{folder} is a store itself; a snapshot in it needs a name, like {folder}/step_100"
        )
    if _exists(folder / ".snapshot_metadata"):
        raise StoreError(
            f"{folder} holds a snapshot of TorchSnapshot, which casnap does not touch; take to "
            "another path, or restore it with torchsnapshot and take it again"
        )
    found = find_store(where)
    if found is None:
        return Location(LocalBackend(where), check_name(folder.name), exists=False)
    _check_trusted(found)
    return Location(LocalBackend(found), check_name(str(folder.relative_to(found))), True)


def locate_store(uri: str | os.PathLike[str]) -> Location:
    """Return the store that a URI means, and the prefix in it if it lies below.

    Raises:
        StoreError: A file is there, or the store is not trusted.
        DamagedError: The store has lost its ``casnap.json``.
    """
    text = os.fspath(uri)
    if "://" in text and not text.startswith("file://"):
        backend = backend_at(text.rstrip("/"))
        return Location(backend, "", CONFIG_KEY in backend.names(""))
    plain = text.removeprefix("file://")
    if not plain:
        raise NotAStoreError("an empty path is no store; for the current folder write '.'")
    folder = _resolved(Path(plain))
    if _exists(folder) and not folder.is_dir():
        raise NotAStoreError(f"{folder} is a file; a store is a folder")
    found = find_store(folder)
    if found is None:
        return Location(LocalBackend(folder), "", exists=False)
    if found == folder:
        return Location(LocalBackend(found), "", exists=True)
    _check_trusted(found)
    return Location(LocalBackend(found), check_name(str(folder.relative_to(found))), exists=True)


def _resolved(folder: Path) -> Path:
    try:
        return folder.resolve()
    except (OSError, RuntimeError, ValueError) as e:
        # A loop of links, a NUL, what the file system has no letters for.
        raise NotAStoreError(f"{str(folder)!r} is no folder: {e}") from e


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


def find_store(folder: Path) -> Path | None:
    """Return the nearest store at or above a folder, on the same mount.

    Raises:
        DamagedError: It has roots, but lacks its ``casnap.json``.
    """
    device: int | None = None
    for place in (folder, *folder.parents):
        try:
            here = place.stat().st_dev
        except OSError:
            continue
        if device is not None and here != device:
            return None
        device = here
        # In this order: whoever makes a store puts the record of it before there is a root.
        has_roots = _exists(place / "roots/0")
        if (place / CONFIG_KEY).is_file():
            return place
        if has_roots:
            raise headless(str(place))
    return None


def _check_trusted(store: Path) -> None:
    # Not followed: a link to a file of ours proves nothing.
    owner = (store / CONFIG_KEY).lstat().st_uid
    if owner == os.geteuid():
        return
    try:
        trusted = trust_file().read_text().splitlines()
    except OSError:
        trusted = []
    if str(store) not in trusted:
        raise UntrustedStoreError(
            f"{store} is a store of another user (uid {owner}), found above the path given. If "
            f"you want to use it, name it (store=...), or run `casnap trust {store}` once"
        )


def trust(store: Path) -> None:
    """Add a store to those that may be found by walking up."""
    path = trust_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write(f"{store}\n")


def create_store(backend: Backend, *, chunk_size: int = DEFAULT_CHUNK_SIZE, asked: bool) -> None:
    """Make a store, or finish making one; harmless where it is there.

    Args:
        backend: Where to.
        chunk_size: Bytes; a power of two from 64 KiB to 64 MiB.
        asked: Whether the user named this very place as a store.

    Raises:
        StoreError: This is no place for a store.
        ValueError: The chunk size is none.
    """
    if not MIN_CHUNK_SIZE <= chunk_size <= MAX_CHUNK_SIZE or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size is a power of two from 64 KiB to 64 MiB; got {chunk_size}")
    if isinstance(backend, LocalBackend):
        if _exists(backend.folder) and not backend.folder.is_dir():
            raise NotAStoreError(f"{backend.folder} is a file; a store is a folder")
        _check_place(backend.folder, asked=asked)
        backend.make()
    foreign = {"roots", "packs", "index"} & set(backend.names(""))
    if CONFIG_KEY not in backend.names(""):
        if foreign:
            raise StoreError(
                f"{backend.uri} holds {', '.join(sorted(foreign))}, but no {CONFIG_KEY}: part of "
                "something else, or of a damaged store. Choose another folder"
            )
        config = StoreConfig(os.urandom(16).hex(), chunk_size)
        content = msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"
        backend.put_if_absent(CONFIG_KEY, content)
        backend.sync()
    config = read_config(backend)  # a newer format is not ours to finish
    if config.unknown_to_writers():
        return
    # Folders may be there already, where a creation was cut off.
    if not any(map(backend.names, ("roots/0", "packs", "index"))):
        root = Root(seq=0, commit=os.urandom(16), time=0.0)
        backend.put_if_absent(root_key(0), seal(b"r", encode(root)))
    backend.sync()


def _check_place(folder: Path, *, asked: bool) -> None:
    if _exists(folder / CONFIG_KEY):
        return
    if not asked and folder in crowded_folders():
        raise StoreError(
            f"no store is made unasked in {folder}. Make one with `casnap init FOLDER`, or take to "
            f"a path further down, like {folder / 'ckpts' / 'step_100'}"
        )
