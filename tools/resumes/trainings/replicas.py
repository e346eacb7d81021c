"""DistributedDataParallel: each rank has its own batches, dropout and place in the data."""

import sys

import torch
from torch import distributed as dist

from casnap import RNGState, StateDict, Store

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
steps = int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
data = torch.utils.data.TensorDataset(
    torch.randn(24, 8, generator=torch.Generator().manual_seed(2)), torch.arange(24) % 4
)
sampler = torch.utils.data.DistributedSampler(data, world, rank)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
progress = StateDict(step=0)
torch.manual_seed(rank + 1)
state = {
    "model": model,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "progress": progress,
    "rng": RNGState(),
}
store = Store(sys.argv[1])
if (last := store.latest()) is not None:
    last.restore(state)
while progress["step"] < steps:
    epoch, skipped = divmod(progress["step"], len(loader))
    sampler.set_epoch(epoch)
    numbers = torch.get_rng_state()
    batches = iter(loader)
    for _ in range(skipped):
        next(batches)
    torch.set_rng_state(numbers)
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        progress["step"] += 1
        store.take(state, f"step_{progress['step']:04d}")
        if progress["step"] == steps:
            break
dist.destroy_process_group()
