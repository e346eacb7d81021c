"""Tools to write a backend, and to test against a failing one.

- :class:`FaultyBackend` wraps any backend and makes it fail as each :class:`Fault` says.
- ``casnap.testing.backend_suite`` has tests, for pytest, that every backend must pass; it says
  how to run them on your own backend.
- :func:`open_store` opens a store on any backend, a faulty one too.
"""

from __future__ import annotations

import sys

from casnap.backends import Backend, LocalBackend
from casnap.format.codec import Codec
from casnap.format.records import DEFAULT_CHUNK_SIZE
from casnap.storage.location import Location
from casnap.store import Store
from casnap.testing.acts import (
    Gate,
    after,
    alter,
    before,
    crash,
    delay,
    fail,
    flip,
    hold,
    lose_answer,
    repeat,
    short,
    stale,
    tear,
)
from casnap.testing.faults import Act, Call, Crash, Fault, FaultyBackend

__all__ = [
    "Act",
    "Call",
    "Crash",
    "Fault",
    "FaultyBackend",
    "Gate",
    "after",
    "alter",
    "before",
    "crash",
    "delay",
    "fail",
    "flip",
    "hold",
    "lose_answer",
    "open_store",
    "repeat",
    "short",
    "stale",
    "tear",
]


if "pytest" in sys.modules:
    # So that failing tests of the suite show what they compared.
    sys.modules["pytest"].register_assert_rewrite("casnap.testing.backend_suite")


def open_store(backend: Backend, *, chunk_size: int = DEFAULT_CHUNK_SIZE) -> Store:
    """Open the store that lies at a backend; make one there if there is none.

    Args:
        backend: Where to; all that the store does goes through it.
        chunk_size: For a new store: bytes, a power of two from 64 KiB to 64 MiB.
    """
    bare = backend
    while isinstance(bare, FaultyBackend):
        bare = bare.inner
    if isinstance(bare, LocalBackend):
        bare.make()
    store = Store.__new__(Store)
    store._codec = Codec.RAW
    here = Location(backend, "", exists=True)
    store._open(here, create=True, asked=True, chunk_size=chunk_size)
    return store
