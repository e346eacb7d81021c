"""A Trainer of Lightning that saves at each end of an epoch, with random states by its hooks."""

import sys
import warnings
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from casnap import RNGState
from casnap.integrations.lightning import CasnapCheckpointIO

warnings.simplefilter("ignore")
seed_everything(0, verbose=False)
torch.set_num_threads(1)


class Model(LightningModule):
    """Learns with dropout, and keeps the random states in its checkpoints."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["rng"] = RNGState().state_dict()

    def on_load_checkpoint(self, checkpoint):
        RNGState().load_state_dict(checkpoint["rng"])


x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
data = torch.utils.data.TensorDataset(x, torch.arange(16) % 4)
# Else an epoch that a kill cut off before last.ckpt is there has another name after the resume.
saver = ModelCheckpoint(
    Path(sys.argv[1]),
    "{epoch:04d}",
    save_top_k=-1,
    save_last=True,
    enable_version_counter=False,
)
trainer = Trainer(
    max_epochs=int(sys.argv[2]),
    plugins=[CasnapCheckpointIO()],
    callbacks=[saver],
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(data, 8, shuffle=True), ckpt_path="last")
