"""A trainer whose checkpoints share nothing, and what they take up on a disk."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from casnap import Store
from casnap.storage.collecting import automatic
from casnap.storage.reading.repository import Repository

SAVES = 10
WIDTH = 512
STATE = 3 * 4 * WIDTH * WIDTH
"""The bytes of the weights of `dense`, and of what AdamW keeps of them."""

# The bytes of roots, tables and indexes, and of the files that trainers put beside snapshots.
_SMALL = STATE // 3


def dense() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())


def assert_bounded(
    folder: Path, train: Callable[[Path], None], kept: int = 2, more: float = 1, parts: int = 1
) -> None:
    """Have a trainer save in this process, which is a child; look at what is left on the disk.

    Args:
        folder: Where it saves.
        train: Saves as often as `SAVES`.
        kept: How many states are left.
        more: How many states more there are on the disk, at most.
        parts: How many snapshots a state is.
    """
    os.environ["CASNAP_GC"] = "auto"
    automatic.SHARE = math.inf  # states so small cost no more processor time than a collection
    start = automatic.AutomaticCollector._start

    def start_and_wait(self: automatic.AutomaticCollector, store: Repository) -> None:
        # However busy the machine is, as between the steps of a training.
        start(self, store)
        if (worker := self._worker) is not None:
            worker.wait()

    automatic.AutomaticCollector._start = start_and_wait  # type: ignore[method-assign]
    train(folder)
    top = next(folder.rglob("casnap-store")).parent
    snapshots = Store(top, create=False).snapshots()
    assert len(snapshots) == kept * parts, snapshots
    sizes = [snapshot.stats.new_bytes for snapshot in snapshots]
    assert min(sum(sizes[i : i + parts]) for i in range(0, len(sizes), parts)) > 0.9 * STATE
    files = (path for path in folder.rglob("*") if path.is_file())
    assert sum(path.stat().st_size for path in files) < (kept + more) * STATE + _SMALL
