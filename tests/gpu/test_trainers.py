"""Trainers on a GPU, in half precision: who goes on ends with the bits of who never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import RNGState

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda"


def assert_equal(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(tensors) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def lightning_run(folder: Path, epochs: int) -> list[torch.Tensor]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from casnap.integrations.lightning import CasnapCheckpointIO

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5))

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["rng"] = RNGState().state_dict()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            RNGState().load_state_dict(checkpoint["rng"])

    data = torch.utils.data.TensorDataset(torch.ones(32, 64))
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator=DEVICE,
        devices=1,
        precision="16-mixed",
        plugins=[CasnapCheckpointIO(async_save=True)],
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    last = folder / "last.ckpt"
    loader = torch.utils.data.DataLoader(data, 8)
    trainer.fit(model, loader, ckpt_path=last if last.exists() else None)
    return [p.detach().cpu() for p in model.parameters()]


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    whole = lightning_run(tmp_path / "whole", 4)
    lightning_run(tmp_path / "cut", 2)
    assert_equal(lightning_run(tmp_path / "cut", 4), whole)


def accelerate_run(folder: Path, steps: int) -> list[torch.Tensor]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from casnap.integrations.accelerate import load_state, save_state

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="fp16", cpu=DEVICE == "cpu")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    start = 0
    if folder.exists():
        load_state(accelerator, folder / "step")
        start = accelerator.step
    for step in range(start, steps):
        with accelerator.autocast():
            loss = model(torch.ones(8, 64, device=accelerator.device)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.step = step + 1
    save_state(accelerator, folder / "step")
    scale = 0.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
    return [*(p.detach().cpu() for p in model.parameters()), torch.tensor(scale)]


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    whole = accelerate_run(tmp_path / "whole", 6)
    accelerate_run(tmp_path / "cut", 3)
    assert_equal(accelerate_run(tmp_path / "cut", 6), whole)


def transformers_run(folder: Path, steps: int, resumes: bool) -> list[torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from casnap.integrations.transformers import CasnapTrainerMixin

    class OwnTrainer(CasnapTrainerMixin, Trainer):
        pass

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=512, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        lr_scheduler_type="constant",  # of which the number of steps is no part
        fp16=DEVICE != "cpu",
        use_cpu=DEVICE == "cpu",
        report_to=[],
        disable_tqdm=True,
    )
    ids = torch.arange(16)
    data = [{"input_ids": ids + i, "labels": ids + i} for i in range(64)]
    trainer = OwnTrainer(model=model, args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resumes)
    return [p.detach().cpu() for p in trainer.model.parameters()]


def test_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    whole = transformers_run(tmp_path / "whole", 6, resumes=False)
    transformers_run(tmp_path / "cut", 4, resumes=False)
    assert_equal(transformers_run(tmp_path / "cut", 6, resumes=True), whole)
