"""Read ``casnap.json``, the record of a store: its format, its id, its chunk size."""

from __future__ import annotations

import errno

import msgspec

from casnap.backends.base import Backend
from casnap.backends.local_files import is_of_the_place
from casnap.errors import (
    BackendError,
    DamagedError,
    NotAStoreError,
    UnsupportedFormatError,
    shell_word,
)
from casnap.format.decoding import json_decoder
from casnap.format.records import (
    CONFIG_KEY,
    DIGEST_NAME,
    FORMAT,
    MAX_CHUNK_SIZE,
    MAX_CONFIG_BYTES,
    MIN_CHUNK_SIZE,
    Root,
    StoreConfig,
    decode,
    encode,
    id_from_name,
)

_MADE_ANEW = "`casnap repair` makes it anew (--yes in a script)"


def no_config_error(uri: str) -> DamagedError:
    """Return the error to raise for a store that has roots, but no readable ``casnap.json``."""
    return DamagedError(
        f"{uri} is a damaged store: it has roots, but {CONFIG_KEY} is missing or unreadable. "
        f"`casnap repair {shell_word(uri)}` makes it anew (--yes in a script), or restore it from "
        "a backup"
    )


def object_error(uri: str) -> NotAStoreError:
    """Return the error to raise when the URI that was given for a store is that of an object."""
    return NotAStoreError(f"{uri} is an object; a store is a folder of them. Choose another")


def not_a_store_error(backend: Backend) -> NotAStoreError:
    """Return the error to raise for a place that holds no store."""
    uri = backend.uri
    advice = (
        ". No store is looked for above a remote place; to name one, end it with two slashes, like "
        "s3://bucket/ckpts//run1/step_100"
    )
    return NotAStoreError(
        f"{uri} is not a casnap store; make one with `casnap init {shell_word(uri)}` or "
        f"Store(...), or check the path{advice if backend.folder is None else ''}"
    )


def _config_bytes(backend: Backend) -> bytes:
    unread: BackendError | None = None
    # Try twice: another process may be making the store, and puts this record before any root.
    for is_first in (True, False):
        try:
            return backend.read(CONFIG_KEY, MAX_CONFIG_BYTES)
        except FileNotFoundError:
            unread = None
        except BackendError as e:
            unread = e
        if unread is not None and is_of_the_place(unread):
            # If the disk fails at this object, but can list the roots, this object is damaged.
            cause = unread.__cause__
            is_damage = isinstance(cause, OSError) and cause.errno == errno.EIO
            if not (is_damage and backend.names("roots/0")):
                raise unread
        # If the whole place fails, as with a wrong option, this listing fails too and raises.
        elif is_first and not backend.names("roots/0"):
            raise not_a_store_error(backend)
        elif is_first and unread is None:
            backend.appears(CONFIG_KEY, lambda: True)
    raise no_config_error(backend.uri) from unread


def read_config(backend: Backend) -> StoreConfig:
    """Read ``casnap.json`` of a store.

    Raises:
        NotAStoreError: There is no store.
        UnsupportedFormatError: A newer version of casnap made the store, or one before 1.0.
        DamagedError: The content is malformed, or the file is missing though there are roots.
    """
    place = backend.where(CONFIG_KEY)
    raw = _config_bytes(backend)
    try:
        version = json_decoder(dict).decode(raw).get("format", 0)
        if isinstance(version, int) and version > FORMAT:
            raise UnsupportedFormatError(
                f"{place} is of format {version}, this casnap reads up to {FORMAT}; update casnap"
            )
        config = json_decoder(StoreConfig).decode(raw)
    except (msgspec.DecodeError, RecursionError, ValueError) as e:
        raise DamagedError(f"{place} is damaged: {e}; {_MADE_ANEW}") from e
    if version != FORMAT or not _is_possible(config):
        raise DamagedError(
            f"{place} is damaged: format {version!r:.40}, chunk size {config.chunk_size}, id "
            f"{config.store_id!r:.80}; {_MADE_ANEW}"
        )
    if not config.digest:
        raise UnsupportedFormatError(
            f"{place} belongs to a store of a casnap before 1.0, which this one does not read: "
            "restore its snapshots with the casnap that took them, and take them into a new store"
        )
    if config.digest != DIGEST_NAME:
        raise UnsupportedFormatError(
            f"{place}: the store uses the digest {config.digest!r:.80}, which this casnap does not "
            "know; update casnap"
        )
    return config


def config_content(config: StoreConfig) -> bytes:
    """Return the content of ``casnap.json``."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"


def config_in(root: Root) -> StoreConfig | None:
    """Return the copy of ``casnap.json`` in a root; None if this version cannot use it.

    On a remote store, the copy spares a request. If ``casnap.json`` is lost, a repair takes the
    copy.
    """
    try:
        config = decode(encode(root.store), StoreConfig, CONFIG_KEY)
    except DamagedError:
        return None
    is_known = root.store.get("format") == FORMAT and config.digest == DIGEST_NAME
    return config if is_known and _is_possible(config) else None


def _is_possible(config: StoreConfig) -> bool:
    size = config.chunk_size
    power_of_two = MIN_CHUNK_SIZE <= size <= MAX_CHUNK_SIZE and not size & (size - 1)
    # The id names a folder of the cache.
    return power_of_two and id_from_name(config.store_id) is not None
