"""AdamW with a schedule and a GradScaler, an average, tied weights, a frozen part, BatchNorm."""

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
