"""``dcp.save`` and ``dcp.load`` of several ranks through casnap."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from casnap import Store
from casnap.integrations.dcp import CasnapReader, CasnapWriter
from tests.support.ranks import RankDied, World
from tests.support.sharded import LAYOUTS, Training, assert_same, expected, full_state, training

Worlds = Callable[[int], World]

CHUNK = 64 << 10
WORLDS = {1: ("plain",), 2: ("fsdp2",), 4: LAYOUTS}
SOURCES = tuple(f"{layout} on {size}" for size, layouts in WORLDS.items() for layout in layouts)


def save(folder: str, layouts: tuple[str, ...]) -> list[int]:
    """Save a training state in some layouts, by DCP and natively; return the new bytes of each."""
    store, new = Store(folder), []
    for layout in layouts:
        given, name = training(layout, 1), f"{layout} on {dist.get_world_size()}"
        writer = CasnapWriter(store)
        dcp.save({"train": given, "epoch": 3}, checkpoint_id=name, storage_writer=writer)
        assert writer.snapshot is not None
        native = store.take({"train": given}, f"native {name}")
        new += [writer.snapshot.stats.new_bytes, native.stats.new_bytes]
    return new


def load(folder: str, layout: str, sources: list[str]) -> None:
    """Load each source into a layout, by DCP from what both saved, and natively."""
    store, given = Store(folder), training(layout, 2)
    for source in sources:
        for name in (source, f"native {source}"):
            spoil(given)
            dcp.load({"train": given}, checkpoint_id=name, storage_reader=CasnapReader(store))
            assert_same(full_state(given.state_dict()), expected(1))
        spoil(given)
        store[source].restore({"train": given})
        assert_same(full_state(given.state_dict()), expected(1))


def spoil(given: Training) -> None:
    moments = [t for state in given.optimizer.state.values() for t in state.values()]
    with torch.no_grad():
        for tensor in (*given.model.parameters(), *given.model.buffers(), *moments):
            tensor.fill_(-1.0)


@pytest.fixture(scope="module")
def saved(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("dcp") / "store")
    Store(folder, chunk_size=CHUNK)
    for size, layouts in WORLDS.items():
        new = world(size).run(save, folder, layouts)[0]
        # A native take has the same chunks; only the specs of containers are others.
        assert all(nbytes < 16 << 10 for nbytes in new[1::2]), new
        # So have all layouts but the last one, which stores some tensors as boxes.
        assert size == 1 or all(nbytes < 16 << 10 for nbytes in new[: 2 * len(layouts) - 2])
    return folder


@pytest.mark.parametrize("size", WORLDS)
def test_what_was_saved_on_some_ranks_is_loaded_on_others(
    world: Worlds, saved: str, size: int
) -> None:
    for layout in WORLDS[size][:2]:
        world(size).run(load, saved, layout, list(SOURCES))
