"""Backends: they keep objects in a local folder, in this process's memory, or on a server.

This folder imports ``format``, ``runtime`` and ``errors``. Begin with ``base.py``, the contract of
a backend. ``local_files/`` lies below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casnap.backends.base import Backend
from casnap.backends.local.backend import LocalBackend
from casnap.runtime.environment import local_path
from casnap.runtime.lazy_imports import imported_later

if TYPE_CHECKING:
    from casnap.backends.memory import MemoryBackend as MemoryBackend

__all__ = ["Backend", "LocalBackend", "MemoryBackend", "backend_at"]


def backend_at(uri: str, storage_options: Mapping[str, Any] | None = None) -> Backend:
    """Return the backend for a URI or a path.

    Args:
        uri: A path, or ``memory://name``, ``s3://bucket/prefix``, ``gs://bucket/prefix``, or any
            other URI that fsspec knows.
        storage_options: For a remote place, the arguments of its file system in fsspec. The value
            of the key ``casnap`` is a dict of :class:`~casnap.backends.remote.retries.Retries`.

    Raises:
        NotAStoreError: No backend knows the URI's scheme.
        BackendError: A package that the scheme needs is not installed, or the options are wrong.
    """
    scheme, separator, path = uri.partition("://")
    if not separator or scheme.lower() == "file":
        return LocalBackend(Path(local_path(uri)))
    if scheme == "memory":
        from casnap.backends.memory import MemoryBackend

        return MemoryBackend(path)
    from casnap.backends.remote.schemes import (
        remote_backend,  # only here is anything remote imported
    )

    return remote_backend(uri, storage_options or {})


__getattr__, _ = imported_later(globals())
