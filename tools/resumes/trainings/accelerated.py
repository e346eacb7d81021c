"""A loop with Accelerate, which saves at each end of an epoch."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

from casnap import StateDict
from casnap.integrations.accelerate import load_state, save_state

set_seed(0)
torch.set_num_threads(1)
project = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=2)
x = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))
data = torch.utils.data.TensorDataset(x, torch.arange(32) % 4)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
progress = StateDict(epoch=0)
accelerator.register_for_checkpointing(progress)
if any(Path(sys.argv[1], "checkpoints").glob("*")):
    load_state(accelerator)
for epoch in range(progress["epoch"], int(sys.argv[2])):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    progress["epoch"] = epoch + 1
    save_state(accelerator)
