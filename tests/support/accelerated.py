"""An Accelerator that has prepared a small model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from casnap import StateDict
from tests.support.accelerate_fsdp import use_fsdp

FROZEN = 4096 * 64 * 4


def prepared(
    project: Path, limit: int | None = 2, *, fsdp: tuple[int, str] | None = None
) -> tuple[Any, StateDict, Any, Any, Any]:
    """Return an Accelerator, the progress, and what it has prepared."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            str(project), automatic_checkpoint_naming=True, total_limit=limit
        ),
    )
    if fsdp is not None:
        use_fsdp(accelerator, *fsdp)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(4096, 64).requires_grad_(requires_grad=False),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(64, 8),
    )
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    # On several processes Accelerate gives the sampler a generator, whose state it does not keep.
    shuffle = "RANK" not in os.environ
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(32)), batch_size=8, shuffle=shuffle
    )
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = StateDict(epoch=0)
    accelerator.register_for_checkpointing(progress)
    return accelerator, progress, model, optimizer, (scheduler, loader)
