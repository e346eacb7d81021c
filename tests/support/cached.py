"""Readers of a far store that keep its chunks on this host, and what they keep."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from casnap import NewStore, StateDict, Store
from casnap.runtime.environment import cache_folder
from casnap.storage.reading.chunk_cache import FOLDER, cached_packs
from tests.support.far import FarFolder

CHUNK = 64 << 10
PLENTY = 1 << 40


def state(step: int = 0, chunks: int = 24, *, small: int = 20) -> dict[str, StateDict]:
    """Return tensors of so many chunks in all, and small ones; no other step has a chunk of them.

    Their names are of the step too, since the names of a dict are a chunk of their own.
    """
    drawn = torch.Generator().manual_seed(step)
    w, s = f"w{step}", f"s{step}"
    large = {f"{w}.{i}": torch.randn(8 * CHUNK // 4, generator=drawn) for i in range(chunks // 8)}
    many = {f"{s}.{i}": torch.randn(100, generator=drawn) for i in range(small)}
    return {"model": StateDict(large | many)}


def far_store(folder: Path, *steps: int, chunks: int = 24) -> Path:
    """Make a store of these steps, each of chunks of its own."""
    store = Store(FarFolder(folder), create=NewStore(chunk_size=CHUNK))
    for step in steps:
        store.take(state(step, chunks), f"step_{step}")
    return folder


class Reader:
    """A process that has just started: the store is open, and nothing was asked yet.

    Args:
        folder: The store.
        cache_bytes: What the cache may take up.
    """

    def __init__(self, folder: Path, cache_bytes: int | None = PLENTY) -> None:
        self.backend = FarFolder(folder)
        self.store = Store(self.backend, create=False, cache_bytes=cache_bytes)

    def restore(self, step: int = 0, chunks: int = 24) -> Reader:
        """Restore a step over other values, and compare it."""
        taken = state(step, chunks)
        found = {"model": StateDict({name: -value for name, value in taken["model"].items()})}
        self.store[f"step_{step}"].restore(found)
        for name, value in taken["model"].items():
            assert torch.equal(found["model"][name], value), name
        return self

    @property
    def gets(self) -> int:
        """How many requests have read packs of chunks since this was last asked."""
        log, self.backend.log = self.backend.log, []
        read = [key for kind, key in log if kind == "get" and key.startswith("packs/")]
        return sum(
            b"CASNAPp1" in (self.backend.folder / "casnap-store" / key).read_bytes()[-44:]
            for key in read
        )


def kept() -> Path:
    """Return the folder of the cached chunks."""
    folder = cache_folder()
    assert folder is not None
    return folder / FOLDER


def kept_files() -> list[Path]:
    return sorted(pack.path for pack in cached_packs(kept()))


def kept_bytes() -> int:
    return sum(pack.nbytes for pack in cached_packs(kept()))


def grow_old(paths: Iterator[Path] | list[Path] | None = None, seconds: float = 3600) -> None:
    """Have files count as not used for so long."""
    then = time.time() - seconds
    for path in kept_files() if paths is None else paths:
        os.utime(path, (then, then))
