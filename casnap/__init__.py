"""A content-addressed, deduplicating checkpoint store for PyTorch."""

from __future__ import annotations

from casnap import errors
from casnap.errors import CasnapError
from casnap.preemption import on_preemption
from casnap.runtime.buffers import release_memory
from casnap.snapshot import PendingSnapshot, Snapshot
from casnap.state.stateful import RNGState, StateDict, Stateful
from casnap.storage.catalog.retention import Retention
from casnap.store import Store
from casnap.version import __version__ as __version__

__all__ = [
    "CasnapError",
    "PendingSnapshot",
    "RNGState",
    "Retention",
    "Snapshot",
    "StateDict",
    "Stateful",
    "Store",
    "errors",
    "on_preemption",
    "release_memory",
]
