"""Where objects live: a local folder or this process's memory.

May import ``format`` and ``runtime``. Begin with ``base.py``, the contract of a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from casnap.backends.base import Backend
from casnap.backends.local import LocalBackend
from casnap.backends.memory import MemoryBackend
from casnap.errors import NotAStoreError

__all__ = ["Backend", "LocalBackend", "MemoryBackend", "backend_at"]


def backend_at(uri: str, storage_options: Mapping[str, Any] | None = None) -> Backend:
    """Return the backend that a URI or a path names.

    Raises:
        NotAStoreError: No backend knows the URI's scheme.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return LocalBackend(Path(uri))
    if scheme == "memory":
        return MemoryBackend(rest)
    if scheme == "file":
        return LocalBackend(Path(rest))
    raise NotAStoreError(
        f"{uri}: this version keeps stores on local disk (a path) or in memory (memory://name), "
        f"not on {scheme}://"
    )
