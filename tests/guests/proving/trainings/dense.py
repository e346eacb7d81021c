"""A net with large products of matrices, in the precision of float32."""

import sys
import time

import torch

from casnap import StateDict, Store

torch.manual_seed(0)
torch.set_num_threads(1)
steps = int((sys.argv[2:] or ["12"])[0])
x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
progress = StateDict(step=0)
state = {"model": model, "optimizer": optimizer, "progress": progress}
store = Store(sys.argv[1])
last = store.latest()
if last is not None:
    last.restore(state)
# resumed
for step in range(progress["step"] + 1, steps + 1):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
    progress["step"] = step
    store.take(state, f"step_{step:03d}")
    time.sleep(0.05)
