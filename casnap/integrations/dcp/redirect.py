"""Redirect saves and loads of DCP to casnap, in programs that give DCP only a path."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.distributed.checkpoint._async_process_executor import (
    _ProcessBasedAsyncCheckpointExecutor,
)
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from casnap import Store
from casnap.errors import InvalidNameError, StateError, StoreError
from casnap.extending import is_file
from casnap.integrations.dcp.place import name_below
from casnap.integrations.dcp.reader import CasnapReader
from casnap.integrations.dcp.staging import torch_copy, true_copy
from casnap.integrations.dcp.writer import CasnapWriter
from casnap.integrations.folders.missing import check_has_folders
from casnap.view import view_of

try:
    from torch.distributed.checkpoint.fsspec_filesystem import (  # type: ignore[import-not-found]
        FsspecReader,
        FsspecWriter,
    )
except ImportError:  # its name before torch 2.15, where that name warns
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

_log = logging.getLogger("casnap")

_WRITERS: tuple[type, ...] = (FileSystemWriter, FsspecWriter)
_READERS: tuple[type, ...] = (FileSystemReader, FsspecReader)


class _Installed(NamedTuple):
    """A store below which :func:`install` redirects paths, and the options of that call."""

    store: Store
    allow_pickle: bool
    dcp_files: bool


_installed: dict[str, _Installed] = {}


def install(
    store: Store | str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    dcp_files: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Use casnap for every checkpoint of DCP below a store, from now on, in this process.

    ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` with ``checkpoint_id=path``,
    ``FileSystemWriter(path)`` and ``FsspecWriter(path)`` use casnap if the path lies below the
    store, whichever module has imported these names. A path may be relative, go through links, or
    be a ``file://`` URI. Other paths work as before. Subclasses that another library has defined
    work as before, and a warning names them. But to load a snapshot, a reader of casnap replaces a
    reader of such a subclass. A writer for the store's own folder needs ``checkpoint_id=``.

    Args:
        store: A store, or its path or URI; it is made if there is none. If code deletes the folders
            of old checkpoints, the next save of this process deletes their snapshots.
        allow_pickle: As for :class:`CasnapWriter` and :class:`CasnapReader`.
        dcp_files: Whether to put files of DCP's names beside each snapshot, as
            :class:`CasnapWriter` does; by default if the store is in a folder.
        storage_options: How to reach a remote store, as :class:`casnap.Store` takes them.

    Returns:
        The names of torch's classes whose objects are replaced below the store.

    Raises:
        StoreError: ``dcp_files`` is True, but the store is in no folder, or was opened without
            markers.
    """
    if not isinstance(store, Store):
        store = Store(store, storage_options=storage_options)
    repository = view_of(store).make()
    has_folders = repository.backend.folder is not None and repository.marks
    if dcp_files and not has_folders:
        check_has_folders(repository.backend)
        raise StoreError(
            f"{store.uri} was opened with markers=False, so its snapshots have no folders that the "
            "files of DCP could lie in; leave markers=False out, or dcp_files=True"
        )
    if dcp_files is None:
        dcp_files = has_folders
    _installed[store.uri] = _Installed(store, allow_pickle, dcp_files)
    for kind in (FileSystemWriter, FileSystemReader):
        kind.__new__ = _new_of(kind)  # type: ignore[method-assign]
    _ProcessBasedAsyncCheckpointExecutor.execute_save = _execute_save  # type: ignore[method-assign]
    # With only a path, dcp.async_save copies the state before it makes a writer: replace that copy.
    StateDictStager._offload_tensor = true_copy  # type: ignore[method-assign]
    replaced = [f"{kind.__module__}.{kind.__qualname__}" for kind in (*_WRITERS, *_READERS)]
    _log.info("below %s, casnap replaces %s", store.uri, ", ".join(replaced))
    return replaced


def uninstall() -> None:
    """Undo every call of :func:`install`. Existing writers and readers stay as they are."""
    _installed.clear()
    # __new__ stays: if it were deleted, the class would refuse arguments.
    _ProcessBasedAsyncCheckpointExecutor.execute_save = _real_save  # type: ignore[method-assign]
    StateDictStager._offload_tensor = torch_copy  # type: ignore[method-assign]


def _new_of(kind: type) -> Callable[..., Any]:
    """Return the function that replaces ``__new__`` of one of torch's classes."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        """Return a writer or reader of casnap for a redirected path, else an object of ``cls``.

        Python does not call ``cls.__init__`` for an object of another class.
        """
        if cls in (*_WRITERS, *_READERS):
            instance = _construct(cls, args, kwargs)
        else:
            instance = _made_of_subclass(cls, _path_in(args, kwargs))
        if instance is not None:
            return instance
        parent_new: Any = super(kind, cls).__new__  # type: ignore[arg-type]
        return parent_new(cls) if parent_new is object.__new__ else parent_new(cls, *args, **kwargs)

    return new


def _made_of_subclass(cls: type, path: Any) -> CasnapReader | None:
    """Return a reader of casnap in place of a subclass of DCP's readers, or None.

    If a snapshot is at the path, no reader of DCP can read it. If none is there, the result is
    None.

    Args:
        cls: The subclass.
        path: The argument for the path.
    """
    place, name = _place_of(path)
    if place is None or not name or cls.__module__.startswith("torch."):
        return None
    if not issubclass(cls, FileSystemReader) or not _holds(place.store, name):
        _warn_of(cls, "which install() leaves alone: it neither saves nor loads snapshots")
        return None
    _warn_of(cls, "in place of which CasnapReader loads snapshots")
    reader = CasnapReader(place.store, allow_pickle=place.allow_pickle)
    reader.reset(path)
    return reader


def _holds(store: Store, name: str) -> bool:
    try:
        return name in store
    except InvalidNameError:
        return False


@functools.cache
def _warn_of(cls: type, message: str) -> None:
    _log.warning("%s.%s is a class of its own, %s", cls.__module__, cls.__qualname__, message)


def _path_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("path")


def _construct(
    cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> CasnapWriter | CasnapReader | None:
    """Return casnap's writer or reader in place of torch's; None to make torch's.

    Torch's is made if the path lies below no installed store, or has a checkpoint that DCP itself
    wrote.
    """
    path = _path_in(args, kwargs)
    place, name = _place_of(path)
    if place is None:
        return None
    store, allow_pickle, dcp_files = place
    if cls in _READERS and not name and is_file(f"{store.uri}/.metadata"):
        return None  # DCP itself has saved into the folder before
    # Bound by name, since the class also takes these arguments by position.
    arguments = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments  # type: ignore[misc]
    if arguments.get("_extensions"):
        raise StateError(
            f"{os.fspath(path)}: casnap stores no checkpoint through the _extensions= of "
            f"{cls.__name__}; save without them, or outside of {store.uri}"
        )
    instance: CasnapWriter | CasnapReader
    if cls in _READERS:
        instance = CasnapReader(store, allow_pickle=allow_pickle)
    else:
        overwrite = arguments.get("overwrite", True)
        instance = CasnapWriter(store, overwrite=overwrite, allow_pickle=allow_pickle)
        instance._has_files = dcp_files
    if name:
        instance.reset(path)
    return instance


def _place_of(path: Any) -> tuple[_Installed | None, str]:
    """Return the installed store above a path, and the name below the store; None for no store."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        return None, ""
    # A copy: another thread may install a store meanwhile.
    candidates = [(each, name_below(each.store, text)) for each in tuple(_installed.values())]
    names_below = [(each, name) for each, name in candidates if name is not None]
    return max(names_below, key=lambda place: len(place[0].store.uri), default=(None, ""))


_real_save = _ProcessBasedAsyncCheckpointExecutor.execute_save


@functools.wraps(_real_save)
def _execute_save(
    self: Any, *args: Any, checkpoint_id: Any = None, storage_writer: Any = None, **kwargs: Any
) -> Any:
    """Give casnap's writer to the process in which DCP saves: :func:`install` has no effect there.

    This replaces the method by which DCP starts such a save.
    """
    if storage_writer is None and _place_of(checkpoint_id)[0] is not None:
        # The writer has the absolute path: that process may have another working folder.
        storage_writer, checkpoint_id = FileSystemWriter(checkpoint_id), None
    return _real_save(
        self, *args, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **kwargs
    )
