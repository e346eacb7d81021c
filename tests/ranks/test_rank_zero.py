"""Rank 0 saves alone, as docs/guides/rank-zero.md says."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from casnap import Snapshot, StateDict, Store
from tests.support.ranks import Worlds


def save_alone(folder: Path) -> tuple[int, int, int]:
    """Save on rank 0; return what this rank restores, fills and reads."""
    rank = dist.get_rank()
    alone = dist.new_group([0])
    model, progress = torch.nn.Linear(8, 8), StateDict(step=100 + rank)
    torch.nn.init.constant_(model.bias, rank)
    app_state = {"model": model, "progress": progress}
    store = Store(folder)
    if rank == 0:
        assert store.take(app_state, "step_100", pg=alone).metadata.world_size == 1
        store.async_take(app_state, "step_101", pg=alone).wait()
        Snapshot(folder / "step_101", pg=alone).restore(app_state)
    dist.barrier()
    last = store.latest()
    assert last is not None
    assert last.name == "step_101"
    last.restore(app_state)
    filled = torch.nn.Linear(8, 8)
    if rank == 1:  # the other one does not call
        Snapshot(folder / "step_100").load_into(filled, "model")
        assert filled.bias.sum() == 0
    read = Snapshot(folder / "step_100").read_object("progress/step")
    return int(model.bias.sum()), progress["step"], read


def test_rank_0_saves_alone_and_all_restore(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(save_alone, tmp_path / "run1") == [(0, 100, 100)] * 2
