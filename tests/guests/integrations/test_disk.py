"""What trainers let go by their own rules frees its disk space, unasked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.accelerate_fsdp import use_fsdp
from tests.support.disk import SAVES, WIDTH, assert_bounded, dense
from tests.support.faults import in_child
from tests.support.launched import launched

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]


def by_lightning(folder: Path, **how: Any) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from casnap.integrations.lightning import CasnapCheckpointIO

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = dense()

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    lightning.Trainer(
        max_epochs=SAVES,
        plugins=[CasnapCheckpointIO(**how)],
        callbacks=[ModelCheckpoint(folder, monitor="loss", save_top_k=2)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(
        Model(),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, WIDTH)), 8),
    )


def by_lightning_in_the_background(folder: Path) -> None:
    by_lightning(folder, async_save=True)


def by_transformers(folder: Path) -> None:
    import transformers

    from casnap.integrations.transformers import CasnapTrainerMixin

    class Ours(CasnapTrainerMixin, transformers.Trainer):
        pass

    config = transformers.GPT2Config(
        vocab_size=WIDTH, n_positions=8, n_embd=WIDTH, n_layer=0, n_head=2
    )
    ids = torch.arange(8)
    Ours(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(
            output_dir=str(folder), max_steps=SAVES, save_steps=1, save_total_limit=2,
            use_cpu=True, report_to=[], disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": ids + i, "labels": ids + i} for i in range(16)],
    ).train()  # fmt: skip


def by_accelerate(folder: Path, *, fsdp: bool = False) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from casnap.integrations.accelerate import save_state
    from casnap.integrations.dcp import install

    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    if fsdp:
        use_fsdp(accelerator)
        install(folder)
    model = dense()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(SAVES):
        accelerator.backward(model(torch.randn(8, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if fsdp:
            accelerator.save_state()
        else:
            save_state(accelerator)


def test_a_disk_of_accelerate_with_fsdp(tmp_path: Path) -> None:
    """A checkpoint is a folder of two snapshots. The oldest goes before the next one is saved."""

    def go() -> None:
        assert_bounded(tmp_path / "run", partial(by_accelerate, fsdp=True), parts=2)

    assert launched(1, go) == [0]


@pytest.mark.parametrize(
    "train", [by_lightning, by_lightning_in_the_background, by_transformers, by_accelerate]
)
def test_a_disk_holds_what_the_trainer_keeps_and_one_state(
    tmp_path: Path, train: Callable[[Path], None]
) -> None:
    # Its newest folder has the weights too: a third of a state that Adam trains.
    more = 1 + 1 / 3 if train is by_transformers else 1
    assert in_child(lambda: assert_bounded(tmp_path / "run", train, more=more)) == 0
