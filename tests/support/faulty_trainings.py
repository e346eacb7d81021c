"""A small training as users write it, and faults that can be planted in its resume.

Each fault replaces some lines of the script. ``FAULTS`` says what the cause is called that a proof
names first.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SCRIPT = '''\
import random
import sys
import time

import numpy as np
import torch
from casnap import RNGState, StateDict, Store

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
torch.set_num_threads(1)
steps = int((sys.argv[2:] or ["12"])[0])


class Batches:
    """Windows of numbers, in an order that follows from the epoch."""

    def __init__(self):
        self.data = torch.randint(0, 16, (12, 4), generator=torch.Generator().manual_seed(1))
        self.epoch, self.position = 0, 0

    def next(self):
        if self.position == len(self.data):
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch))
        batch = self.data[order[self.position : self.position + 3]]
        self.position += 3
        return batch

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(8, 8)
        self.embedding = torch.nn.Embedding(16, 8)
        self.norm = torch.nn.BatchNorm1d(8, momentum=None)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        y = torch.nn.functional.dropout(self.base(self.embedding(x)), 0.2)
        return self.head(self.norm(y.flatten(0, 1)))


model = Model()
model.base.requires_grad_(False)
ema = StateDict({name: p.detach().clone() for name, p in model.named_parameters()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
batches = Batches()
progress = StateDict(step=0)
state = {
    "model": model,
    "ema": ema,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "scaler": scaler,
    "batches": batches,
    "progress": progress,
    "rng": RNGState(),
}
store = Store(sys.argv[1])
last = store.latest()
if last is not None:
    last.restore(state)
# resumed
for step in range(progress["step"] + 1, steps + 1):
    x = batches.next()
    # forward
    loss = torch.nn.functional.cross_entropy(model(x), x.flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in ema:
                ema[name].lerp_(parameter, 0.1)
    progress["step"] = step
    store.take(state, f"step_{step:03d}")
    time.sleep(0.05)
'''


class Fault(NamedTuple):
    """What is wrong with a training.

    Attributes:
        role: What the cause that is named first is called.
        edits: The lines to replace, each with what it becomes.
    """

    role: str
    edits: tuple[tuple[str, str], ...]


def _after_restore(lines: str) -> tuple[tuple[str, str], ...]:
    """Return the edit that does something after the restore, and only then."""
    text = "\n".join(f"    {line}" for line in lines.splitlines())
    return (("# resumed\n", f"if last is not None:\n{text}\n"),)


FAULTS = {
    "fresh moments": Fault(
        "moments",
        _after_restore(
            "optimizer = torch.optim.AdamW(model.parameters(), lr=scheduler.get_last_lr()[0])\n"
            "state['optimizer'] = scheduler.optimizer = optimizer\n"
            "optimizer.param_groups[0]['initial_lr'] = 0.05"
        ),
    ),
    "optimizer left out": Fault("moments", (('    "optimizer": optimizer,\n', ""),)),
    "scheduler left out": Fault("scheduler", (('    "scheduler": scheduler,\n', ""),)),
    "scheduler made after the restore": Fault(
        "scheduler",
        _after_restore(
            "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)\n"
            "state['scheduler'] = scheduler"
        ),
    ),
    "epoch not set": Fault(
        "loader",
        (
            ('self.epoch, self.position = state["epoch"]', "self.position = state"),
            ('= state, state["position"]', '= state["position"]'),
        ),
    ),
    "position not loaded": Fault(
        "loader", (('self.epoch, self.position = state["epoch"], state["position"]', "pass"),)
    ),
    "loader left out": Fault("loader", (('    "batches": batches,\n', ""),)),
    "seeded again": Fault("generators", _after_restore("torch.manual_seed(0)")),
    "no generators": Fault("generators", (('    "rng": RNGState(),\n', ""),)),
    "a generator of its own": Fault(
        "weights",
        (
            ("batches = Batches()", "own = torch.Generator().manual_seed(5)\nbatches = Batches()"),
            (
                "    # forward\n",
                "    x = torch.where(torch.rand(3, 4, generator=own) < 0.2, 0, x)\n",
            ),
        ),
    ),
    "untied": Fault(
        "moments",  # of a parameter more
        _after_restore(
            "model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())\n"
            "optimizer.add_param_group({'params': [model.head.weight]})"
        ),
    ),
    "untied without training it": Fault(
        "weights",
        _after_restore(
            "model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())"
        ),
    ),
    "average begins anew": Fault(
        "weights",
        _after_restore("ema.update({n: p.detach().clone() for n, p in model.named_parameters()})"),
    ),
    "scaler begins anew": Fault(
        "scaler",
        _after_restore(
            "scaler = torch.amp.GradScaler('cpu', init_scale=2.0, growth_interval=2)\n"
            "state['scaler'] = scaler"
        ),
    ),
    "batches counted anew": Fault(
        "counters", _after_restore("model.norm.num_batches_tracked.zero_()")
    ),
    "frozen part trains": Fault("moments", _after_restore("model.base.requires_grad_(True)")),
    "renamed and not strict": Fault(
        "moments",
        (
            (
                "    last.restore(state)\n",
                "    model.embeddings, model.embedding = model.embedding, torch.nn.Identity()\n"
                "    model.embedding.forward = model.embeddings.forward\n"
                "    last.restore(state, strict=False)\n",
            ),
            *_after_restore("del optimizer.state[model.embeddings.weight]"),
        ),
    ),
    "accumulation cut": Fault(
        "weights",
        (
            ("    optimizer.zero_grad()\n", ""),
            (
                "    scaler.step(optimizer)\n    scaler.update()\n",
                "    if step % 2 == 0:\n"
                "        scaler.step(optimizer)\n"
                "        scaler.update()\n"
                "        optimizer.zero_grad()\n",
            ),
        ),
    ),
    "a hook that changes weights": Fault(
        "weights",
        (
            (
                "model = Model()\n",
                "model = Model()\n"
                "def half(module, keys):\n"
                "    with torch.no_grad():\n"
                "        module.norm.weight.mul_(0.5)\n"
                "model.register_load_state_dict_post_hook(half)\n",
            ),
        ),
    ),
    "order of hashes": Fault(
        "run", (("    # forward\n", "    x = x[[i % 3 for i in map(hash, map(str, range(3)))]]\n"),)
    ),
    "a set": Fault(
        "run", (("    # forward\n", "    x = x[[int(i) % 3 for i in set('0123456')][:3]]\n"),)
    ),
    "seeds by the clock": Fault(
        "run", (("torch.manual_seed(0)\n", "torch.manual_seed(time.time_ns())\n"),)
    ),
}


def write_script(path: Path, fault: Fault | None = None) -> Path:
    """Write the training, with a fault or without."""
    text = SCRIPT
    for old, new in () if fault is None else fault.edits:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)
    return path
