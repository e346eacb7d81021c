"""Samples with noise, from a loader with two workers: the noise follows from epoch and sample."""

import sys
import time

import torch

from casnap import RNGState, StateDict, Store

torch.manual_seed(0)
torch.set_num_threads(1)
steps = int((sys.argv[2:] or ["12"])[0])


class Noisy(torch.utils.data.Dataset):
    """Numbers, and noise that a worker adds."""

    epoch = 0

    def __len__(self):
        return 20

    def __getitem__(self, index):
        own = torch.Generator().manual_seed(100 * self.epoch + index)
        return index / 20 + torch.randn(8, generator=own), index % 4


class Order(torch.utils.data.Sampler):
    """All samples in the order of the epoch, from a place on."""

    epoch, position = 0, 0

    def __iter__(self):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order[self.position :].tolist())

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


data, sampler = Noisy(), Order()
loader = torch.utils.data.DataLoader(
    data, batch_size=4, sampler=sampler, num_workers=2, generator=torch.Generator()
)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
progress = StateDict(step=0)
state = {
    "model": model,
    "optimizer": optimizer,
    "sampler": sampler,
    "progress": progress,
    "rng": RNGState(),
}
store = Store(sys.argv[1])
if (last := store.latest()) is not None:
    last.restore(state)
while progress["step"] < steps:
    data.epoch = sampler.epoch
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        progress["step"] += 1
        sampler.position += len(x)
        store.take(state, f"step_{progress['step']:03d}")
        time.sleep(0.05)
        if progress["step"] == steps:
            break
    sampler.epoch, sampler.position = sampler.epoch + 1, 0
