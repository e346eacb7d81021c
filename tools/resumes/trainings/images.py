"""A convolutional net: a shuffled DataLoader whose batches are skipped, noise by numpy."""

import sys

import numpy as np
import torch

from casnap import RNGState, StateDict, Store

torch.manual_seed(0)
np.random.seed(0)
torch.set_num_threads(1)
shuffle = torch.Generator().manual_seed(1)
images = torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(2))
data = torch.utils.data.TensorDataset(images, torch.arange(24) % 4)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=shuffle)
steps = int(sys.argv[2])
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3),
    torch.nn.BatchNorm2d(4),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Dropout(0.2),
    torch.nn.Linear(144, 4),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
progress = StateDict(step=0)
# The generator as it was when the epoch began: the order of its batches follows from it.
epoch = StateDict(shuffle=shuffle.get_state(), position=0)
state = {
    "model": model,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "progress": progress,
    "epoch": epoch,
    "rng": RNGState(),
}
store = Store(sys.argv[1])
batches = iter(())
if (last := store.latest()) is not None:
    last.restore(state)
    shuffle.set_state(epoch["shuffle"])
    skipped = epoch["position"]
    numbers = torch.get_rng_state()
    batches = iter(loader)
    for _ in range(skipped):
        next(batches)
    torch.set_rng_state(numbers)
for step in range(progress["step"] + 1, steps + 1):
    batch = next(batches, None)
    if batch is None:
        epoch["shuffle"], epoch["position"] = shuffle.get_state(), 0
        batches = iter(loader)
        batch = next(batches)
    epoch["position"] += 1
    x, y = batch
    x = x + torch.from_numpy(np.random.normal(0, 0.1, x.shape)).float()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    progress["step"] = step
    store.take(state, f"step_{step:04d}")
