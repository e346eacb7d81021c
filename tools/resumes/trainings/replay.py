"""Values that are learned from a replay of the past, with a slow copy of the net as the target."""

import copy
import random
import sys

import numpy as np
import torch

from casnap import RNGState, StateDict, Store

torch.manual_seed(0)
random.seed(0)
torch.set_num_threads(1)
steps = int(sys.argv[2])
noise = np.random.default_rng(3)
net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
target = copy.deepcopy(net).requires_grad_(requires_grad=False)
optimizer = torch.optim.RMSprop(net.parameters(), lr=0.01, momentum=0.5)
world = StateDict(place=torch.zeros(4), past=[], episodes=0)
progress = StateDict(step=0)
state = {
    "net": net,
    "target": target,
    "optimizer": optimizer,
    "world": world,
    "noise": noise,
    "progress": progress,
    "rng": RNGState(),
}
store = Store(sys.argv[1])
if (last := store.latest()) is not None:
    last.restore(state)
for step in range(progress["step"] + 1, steps + 1):
    for _ in range(4):
        here = world["place"]
        greedy = random.random() > 0.2
        action = int(net(here).argmax()) if greedy else random.randrange(2)
        push = torch.from_numpy(noise.normal(2 * action - 1, 0.5, 4)).float()
        there = here * 0.9 + push
        reward = -float(there.abs().mean())
        world["past"] = [*world["past"][-39:], (here, action, reward, there)]
        world["place"] = there
        if float(there.abs().max()) > 4:
            world["place"], world["episodes"] = torch.zeros(4), world["episodes"] + 1
    sample = random.sample(world["past"], 4)
    here, action, reward, there = zip(*sample, strict=True)
    with torch.no_grad():
        wanted = torch.tensor(reward) + 0.9 * target(torch.stack(there)).max(1).values
    found = net(torch.stack(here)).gather(1, torch.tensor(action)[:, None])[:, 0]
    optimizer.zero_grad()
    torch.nn.functional.smooth_l1_loss(found, wanted).backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
            slow.lerp_(fast, 0.05)
    progress["step"] = step
    store.take(state, f"step_{step:04d}")
