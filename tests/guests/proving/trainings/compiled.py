"""A compiled step that has the temperature as a constant: it is compiled anew when that changes."""

import sys
import time

import torch

from casnap import RNGState, StateDict, Store

torch.manual_seed(0)
torch.set_num_threads(1)
steps = int((sys.argv[2:] or ["12"])[0])
inputs = torch.randn(5, 16, 8, generator=torch.Generator().manual_seed(1))
y = torch.arange(16) % 8
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
progress = StateDict(step=0, temperature=1.0)
data = StateDict(position=0)
state = {
    "model": model,
    "optimizer": optimizer,
    "data": data,
    "progress": progress,
    "rng": RNGState(),
}


@torch.compiler.assume_constant_result
def temperature():
    """Return the temperature, which changes seldom."""
    return progress["temperature"]


@torch.compile(backend="eager")
def loss_of(x, y):
    """Return the loss; compiled without code for the machine, which none of this needs."""
    return torch.nn.functional.cross_entropy(model(x) / temperature(), y)


store = Store(sys.argv[1])
loss_of(inputs[0], y)  # to compile takes a while
last = store.latest()
if last is not None:
    last.restore(state)
    torch.compiler.reset()
for step in range(progress["step"] + 1, steps + 1):
    if step % 4 == 0:
        progress["temperature"] *= 0.5
        torch.compiler.reset()
    optimizer.zero_grad()
    x = torch.nn.functional.dropout(inputs[data["position"]], 0.2)
    loss_of(x, y).backward()
    optimizer.step()
    data["position"] = step % 5
    progress["step"] = step
    store.take(state, f"step_{step:03d}")
    time.sleep(0.05)
