"""FSDP2: parameters and moments are divided among the ranks, which take in the background."""

import sys

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from casnap import RNGState, StateDict, Store

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)
steps = int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(32, 16),
    *(torch.nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(2)),
    torch.nn.Linear(16, 32),
)
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model[1:3]:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
progress = StateDict(step=0)
torch.manual_seed(rank + 1)
state = {"model": model, "optimizer": optimizer, "progress": progress, "rng": RNGState()}
store = Store(sys.argv[1])
if (last := store.latest()) is not None:
    last.restore(state)
pending = None
for step in range(progress["step"] + 1, steps + 1):
    x = torch.randint(0, 32, (2, 6))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    optimizer.step()
    progress["step"] = step
    if pending is not None:
        pending.wait()
    pending = store.async_take(state, f"step_{step:04d}")
pending.wait()
dist.destroy_process_group()
