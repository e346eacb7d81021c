"""Make stores: put their first objects, and refuse places where no store can be made."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from casnap.backends import Backend, LocalBackend
from casnap.backends.announcement import NOTE
from casnap.backends.base import TEMPORARY
from casnap.backends.local_files import exists, is_folder, status
from casnap.backends.uris import store_uri
from casnap.errors import PLACE_ERRORS, NotAStoreError, StoreError, shell_word
from casnap.format.names import MARKER, STORE_FOLDER
from casnap.format.records import (
    CONFIG_KEY,
    DEFAULT_CHUNK_SIZE,
    DIGEST_NAME,
    FOLDER_ONLY,
    MAX_CHUNK_SIZE,
    MIN_CHUNK_SIZE,
    Root,
    StoreConfig,
    root_key,
)
from casnap.runtime.environment import crowded_folders
from casnap.runtime.units import parsed_size, whole_number
from casnap.storage.commit_log.config import (
    config_content,
    config_in,
    object_error,
    read_config,
)
from casnap.storage.commit_log.put_if_absent_probe import PutIfAbsent, honours_put_if_absent
from casnap.storage.commit_log.roots import WRITER, read_root, sealed_root
from casnap.storage.opening.location import has_object, is_ours

_log = logging.getLogger("casnap")
# Where all puts win: the seconds after which other processes have put their records.
_SETTLED = 1.0


class CreatedStore(NamedTuple):
    """The result of making a store.

    Attributes:
        is_new: Whether there was no store before.
        config: The store's ``casnap.json``.
        root: The store's first root, if this process has just put it; else None.
    """

    is_new: bool
    config: StoreConfig
    root: Root | None


def create_store(
    backend: Backend,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    is_explicit: bool,
    settings: Mapping[str, Any] | None = None,
) -> CreatedStore:
    """Make a store, or finish one whose making was cut off; do nothing if the store is complete.

    Args:
        backend: The backend of the place.
        chunk_size: The chunk size in bytes, a power of two from 64 KiB to 64 MiB.
        is_explicit: Whether the user named this very place as a store.
        settings: The settings of a new store.

    Raises:
        StoreError: No store can be made here.
        ValueError: The chunk size is not possible.
    """
    chunk_size = chunk_size_of(chunk_size)
    if isinstance(backend, LocalBackend):
        _check_folder(backend, is_explicit=is_explicit)
    backend.make()
    ours: StoreConfig | None = None
    # At a remote place, one listing answers more questions, and it is short.
    names = None if backend.costs.free_looks else set(backend.names(""))
    is_new = not has_object(backend, CONFIG_KEY) if names is None else CONFIG_KEY not in names
    if is_new:
        names = set(backend.names("")) if names is None else names
        ours = _put_config(backend, names, chunk_size, is_explicit=is_explicit)
    config = ours or read_config(backend)  # raises if a newer version began to make the store
    if not config.put_if_absent and (ours is not None or not has_object(backend, root_key(0))):
        config = _adopted_config(backend, is_ours=ours is not None)
        ours = config if config == ours else None
    # If a creation was cut off, folders may be there. If this process put the record, none were.
    is_complete = ours is None and (
        has_object(backend, root_key(0)) or any(map(backend.names, ("roots/0", "packs", "index")))
    )
    root: Root | None = None
    if not is_complete:
        root = _first_root(config, _first_settings(backend, settings, is_explicit=is_explicit))
        if not backend.put_if_absent(root_key(0), sealed_root(root)):
            root = None
    backend.sync()
    if is_new:
        _warn_of_rules(backend)
    return CreatedStore(is_new, config, root)


def chunk_size_of(size: object) -> int:
    """Return a chunk size that a user gave, in bytes. Here ``64k`` means 64 KiB.

    Raises:
        TypeError: The size is neither a number nor a text.
        ValueError: No store can have this chunk size.
    """
    nbytes = parsed_size(size, 1024) if isinstance(size, str) else whole_number(size)
    sizes = (1 << n for n in range(MIN_CHUNK_SIZE.bit_length() - 1, MAX_CHUNK_SIZE.bit_length()))
    if nbytes is not None and nbytes in sizes:
        return nbytes
    error = ValueError if isinstance(size, str | int | float) else TypeError
    raise error(
        "chunk_size is a power of two from 64 KiB to 64 MiB, such as 1_048_576 or '1MiB'; got "
        f"{size!r:.80}"
    )


def _first_settings(
    backend: Backend, settings: Mapping[str, Any] | None, *, is_explicit: bool
) -> dict[str, Any]:
    serves_all = is_explicit or backend.folder is None
    return {**(settings or {}), **({} if serves_all else {FOLDER_ONLY: True})}


def _first_root(config: StoreConfig, settings: dict[str, Any]) -> Root:
    commit, store = bytes.fromhex(config.store_id), msgspec.to_builtins(config)
    return Root(0, commit, time=0.0, settings=settings, store=store, writer=WRITER)


def _adopted_config(backend: Backend, *, is_ours: bool) -> StoreConfig:
    """Return the ``casnap.json`` on which all processes agree that are making the store now.

    At a place without put-if-absent, several processes may each put this file. They agree on the
    copy of it in root 0. While there is no root, they agree on the file that was put last.
    """
    time.sleep(_SETTLED)
    config = read_config(backend)
    if not has_object(backend, root_key(0)):
        return config
    config_of_root = config_in(read_root(backend, 0)) or config
    if is_ours and config_of_root != config:
        # This process was held up between its look and its put, so its put came after root 0.
        backend.delete(CONFIG_KEY)
        backend.put_if_absent(CONFIG_KEY, config_content(config_of_root))
    return config_of_root


def _warn_of_rules(backend: Backend) -> None:
    try:
        for text in backend.bucket_warnings():
            _log.warning("%s: %s", backend.uri, text)
    except PLACE_ERRORS as e:
        # `casnap check` reports this.
        _log.debug("%s: the rules of the bucket cannot be looked at: %s", backend.uri, e)


def _put_config(
    backend: Backend,
    names: set[str],
    chunk_size: int,
    *,
    is_explicit: bool,
) -> StoreConfig | None:
    """Put ``casnap.json`` of a new store. From then on the store exists.

    Args:
        backend: The backend of the place.
        names: The names that already exist in the folder ``casnap-store/``.
        chunk_size: The chunk size in bytes.
        is_explicit: Whether the user named this very place as a store.

    Returns:
        The record; None if another process was faster, or the folder already holds parts of a
        store.

    Raises:
        StoreError: No store can be made here.
        ValueError: The chunk size is too large for this place.
    """
    if chunk_size > backend.max_chunk_bytes:
        most = backend.max_chunk_bytes >> 20
        raise ValueError(f"chunk_size is at most {most} MiB at {backend.uri}; got {chunk_size}")
    _check_remote_place(backend, is_explicit=is_explicit)
    if _is_marked(backend):
        raise NotAStoreError(
            f"{backend.uri} is a snapshot of a store further up; name that store, or another place"
        )
    # A process that was killed while it made the store leaves only temporary files.
    others = names - {"tmp"}
    if backend.costs.free_looks and "tmp" in names:
        expire = (TEMPORARY, NOTE)
        left = (n for n in backend.names("tmp") if not any(e.fullmatch(n) for e in expire))
        others.update(f"tmp/{name}" for name in left)
    # Another process may have just made the store. If so, the store has a record: it comes first.
    if others and not has_object(backend, CONFIG_KEY):
        raise _foreign_error(backend, others)
    honoured = honours_put_if_absent(backend)
    if not honoured and not backend.exclusive:
        raise PutIfAbsent(backend).error()
    config = StoreConfig(
        digest=DIGEST_NAME,
        store_id=os.urandom(16).hex(),
        chunk_size=chunk_size,
        put_if_absent=honoured,
    )
    is_ours = backend.put_if_absent(CONFIG_KEY, config_content(config))
    backend.sync()
    return config if is_ours and not others else None


def _foreign_error(backend: Backend, names: set[str]) -> StoreError:
    listed = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
    return StoreError(
        f"{backend.where('')} holds {listed:.300}, but no {CONFIG_KEY}: it is no casnap store, or "
        "the rest of one, so nothing is put there. Choose another folder, or rename that one"
    )


def _is_marked(backend: Backend) -> bool:
    """Whether the place is the folder of a snapshot: it has a marker."""
    try:
        backend.read_marker(MARKER)
    except FileNotFoundError:
        return False
    return True


def _check_remote_place(backend: Backend, *, is_explicit: bool) -> None:
    uri = store_uri(backend.uri) if backend.costly_requests else None
    if uri is not None and uri.is_bucket and not is_explicit:
        raise StoreError(
            f"no store is made unasked at the root of a bucket, {backend.uri}. Take to a path "
            f"further down, like {backend.uri}/run1/step_100; or if the whole bucket is meant to "
            f"be one store, make it with `casnap init {shell_word(backend.uri)}`, or Store(...)"
        )
    if backend.is_object():
        raise object_error(backend.uri)


def _check_folder(backend: LocalBackend, *, is_explicit: bool) -> None:
    folder = backend.folder
    if exists(folder) and not is_folder(folder):
        raise NotAStoreError(f"{folder} is a file; a store is a folder")
    if exists(folder / STORE_FOLDER / CONFIG_KEY):
        return
    # Check this before the folder of the store is made.
    backend.check_changes()
    begun = None if is_explicit else status(folder / STORE_FOLDER, follow=False)
    if begun is not None and begun.st_uid != 0 and not is_ours(folder, begun.st_uid):
        raise StoreError(
            f"{folder / STORE_FOLDER} is a folder of another user (uid {begun.st_uid}); take to "
            "another place, or name it: `casnap init`, Store(...)"
        )
    if not is_explicit and folder in crowded_folders():
        raise StoreError(
            f"no store is made unasked in {folder}. Make one with `casnap init FOLDER`, or take to "
            f"a path further down, like {folder / 'ckpts' / 'step_100'}"
        )
