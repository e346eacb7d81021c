"""Each rank computes the momentum of some rows, as ZeRO does, on any number of ranks."""

import sys
import time

import torch
from torch import distributed as dist

from casnap import StateDict, Store

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
torch.set_num_threads(1)
steps = int((sys.argv[2:] or ["12"])[0])
model = torch.nn.Linear(8, 12, bias=False)
rows = slice(12 * rank // world, 12 * (rank + 1) // world)
moments = StateDict(momentum_buffer=torch.zeros(12, 8))
progress = StateDict(step=0)
state = {"model": model, "moments": moments, "progress": progress}
own_keys = []
store = Store(sys.argv[1])
last = store.latest()
if last is not None:
    last.restore(state, new_ranks="keep")
for step in range(progress["step"] + 1, steps + 1):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    torch.nn.functional.mse_loss(model(x), x.repeat(1, 2)[:, :12]).backward()
    kept = moments["momentum_buffer"]
    # Other rows are other ranks': a sum over all ranks has each row once.
    mine = torch.zeros(12, 8)
    mine[rows] = 0.9 * kept[rows] + model.weight.grad[rows]
    whole = mine.clone()
    dist.all_reduce(whole)
    kept.copy_(whole)
    with torch.no_grad():
        model.weight -= 0.5 * whole
    progress["step"] = step
    store.take(state, f"step_{step:03d}", per_rank=own_keys)
    time.sleep(0.1)
dist.destroy_process_group()
