"""A net in bfloat16, whose master weights in float32 are trained."""

import sys
import time

import torch

from casnap import StateDict, Store

torch.manual_seed(0)
torch.set_num_threads(1)
steps = int((sys.argv[2:] or ["12"])[0])
x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
model.bfloat16()
masters = torch.nn.ParameterList(p.detach().float() for p in model.parameters())
optimizer = torch.optim.AdamW(masters.parameters(), lr=0.001)
progress = StateDict(step=0)
state = {
    "model": model,
    "masters": masters,
    "optimizer": optimizer,
    "progress": progress,
}
store = Store(sys.argv[1])
last = store.latest()
if last is not None:
    last.restore(state)
# resumed
for step in range(progress["step"] + 1, steps + 1):
    model.zero_grad()
    torch.nn.functional.mse_loss(model(x), x).backward()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)
    progress["step"] = step
    store.take(state, f"step_{step:03d}")
    time.sleep(0.05)
