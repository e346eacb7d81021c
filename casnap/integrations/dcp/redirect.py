"""Redirecting what saves or loads by a bare path, for programs that have no other door."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from casnap.integrations.dcp.place import name_below
from casnap.integrations.dcp.reader import CasnapReader
from casnap.integrations.dcp.writer import CasnapWriter
from casnap.store import Store

_log = logging.getLogger("casnap")

_WRITERS: tuple[type, ...] = (FileSystemWriter, FsspecWriter)
_READERS: tuple[type, ...] = (FileSystemReader, FsspecReader)
_stores: dict[str, Store] = {}


def install(
    store: Store | str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[str]:
    """Use casnap for every checkpoint of DCP below a store, from now on, in this process.

    ``dcp.save`` and ``dcp.load`` with ``checkpoint_id=path``, ``FileSystemWriter(path)`` and
    ``FsspecWriter(path)`` use casnap if the path lies below the store, whichever module has
    imported these names. Other paths, and subclasses, are as before.

    Args:
        store: A store, or its path or URI; it is made if there is none.
        storage_options: How to reach a remote store, as :class:`casnap.Store` takes them.

    Returns:
        The names of the classes of torch whose objects are replaced below the store.
    """
    if not isinstance(store, Store):
        store = Store(store, storage_options=storage_options)
    _stores[store.uri] = store
    for kind in (FileSystemWriter, FileSystemReader):
        kind.__new__ = _new  # type: ignore[method-assign]
    replaced = [f"{kind.__module__}.{kind.__qualname__}" for kind in (*_WRITERS, *_READERS)]
    _log.info("below %s, casnap replaces %s", store.uri, ", ".join(replaced))
    return replaced


def uninstall() -> None:
    """Undo every :func:`install`."""
    _stores.clear()
    for kind in (FileSystemWriter, FileSystemReader):
        # Not deleted: a class that has had its own __new__ refuses arguments from then on.
        kind.__new__ = _plain_new  # type: ignore[method-assign]


def _plain_new(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(cls)


def _new(cls: type, path: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return an object of casnap's, which then is not initialized again; or one of the class."""
    store = _store_of(path) if cls in (*_WRITERS, *_READERS) else None
    if store is None:
        return object.__new__(cls)
    made: CasnapWriter | CasnapReader
    if cls in _READERS:
        made = CasnapReader(store)
    else:
        made = CasnapWriter(store, overwrite=kwargs.get("overwrite", True))
    made.reset(path)
    return made


def _store_of(path: Any) -> Store | None:
    """Return the store that a path lies below."""
    if not isinstance(path, str | os.PathLike):
        return None
    text = os.fspath(path)
    below = (store for store in _stores.values() if name_below(store, text) is not None)
    return max(below, key=lambda store: len(store.uri), default=None)
