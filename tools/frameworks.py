"""What a frozen base costs each framework to save: ``python -m tools.frameworks NAME...``.

Each saves a frozen layer of 64 MiB and a head that is trained, a step apart, by its own means and
by casnap in turn. It prints the bytes of all saves, and the median seconds of those after the
first; those of the framework's own end when ``sync`` has returned, since casnap's are durable.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_SAVES, _WIDTH, _OUT = 6, 4096, 64
Save = Callable[[Path], object]


def _model() -> torch.nn.Sequential:
    base = torch.nn.Linear(_WIDTH, _WIDTH, bias=False).requires_grad_(requires_grad=False)
    return torch.nn.Sequential(base, torch.nn.Linear(_WIDTH, _OUT))


def _stepper(model: Any, optimizer: Any) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, _WIDTH)).square().mean().backward()
        optimizer.step()

    return step


def _dcp() -> tuple[Callable[[], None], Save, Save]:
    import torch.distributed.checkpoint as dcp

    from casnap.integrations.dcp import CasnapWriter

    model = _model()
    optimizer = torch.optim.AdamW(model[1].parameters())

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    return (
        _stepper(model, optimizer),
        lambda path: dcp.save(state(), checkpoint_id=path, no_dist=True),
        lambda path: dcp.save(state(), storage_writer=CasnapWriter(path), no_dist=True),
    )


def _torch_checkpointing() -> tuple[Callable[[], None], Save, Save]:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    from casnap.integrations.torch_checkpointing import CasnapCheckpointManager

    model = _model()
    optimizer = torch.optim.AdamW(model[1].parameters())
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    own = CheckpointManager(config)
    ours = CasnapCheckpointManager(CasnapCheckpointManager.Config.with_sync_save())

    def save(manager: Any, path: Path) -> None:
        items = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        manager.save(str(path), items)

    return (
        _stepper(model, optimizer),
        lambda path: save(own, path),
        lambda path: save(ours, path),
    )


def _accelerate() -> tuple[Callable[[], None], Save, Save]:
    from accelerate import Accelerator

    from casnap.integrations.accelerate import save_state

    accelerator, model = Accelerator(cpu=True), _model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model[1].parameters()))
    return (
        _stepper(model, optimizer),
        lambda path: accelerator.save_state(str(path)),
        lambda path: save_state(accelerator, path),
    )


def _lightning() -> tuple[Callable[[], None], Save, Save]:
    import lightning

    from casnap.integrations.lightning import CasnapCheckpointIO

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _model()

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.layers[1].parameters())

    model = Model()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, _WIDTH)))
    trainers = []
    for plugins in ([], [CasnapCheckpointIO()]):
        quiet: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = lightning.Trainer(accelerator="cpu", max_steps=1, plugins=plugins, **quiet)
        trainer.fit(model, data)
        trainers.append(trainer)

    def step() -> None:
        for trainer in trainers:
            _stepper(model.layers, trainer.optimizers[0])()

    return step, *(lambda path, t=trainer: t.save_checkpoint(path) for trainer in trainers)  # type: ignore[return-value]


def _transformers() -> tuple[Callable[[], None], Save, Save]:
    import transformers

    from casnap.integrations.transformers import CasnapTrainerMixin

    class Ours(CasnapTrainerMixin, transformers.Trainer):
        pass

    class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i}

    folder = tempfile.mkdtemp()
    config = transformers.GPT2Config(
        vocab_size=_WIDTH * 4, n_embd=_WIDTH // 4, n_layer=0, n_head=1, n_positions=256
    )
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.wte.requires_grad_(requires_grad=False)
    trainers = []
    for kind in (transformers.Trainer, Ours):
        args = transformers.TrainingArguments(
            folder, max_steps=1, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True
        )
        trainer = kind(model=model, args=args, train_dataset=Numbers())
        trainer.casnap_weights = "none"
        trainer.train()
        trainers.append(trainer)
    shutil.rmtree(folder)
    batch = torch.arange(32).reshape(4, 8)

    def step() -> None:
        for trainer in trainers:
            trainer.optimizer.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
            trainer.optimizer.step()

    def save(trainer: Any, path: Path) -> None:
        trainer.args.output_dir = str(path.parent)
        trainer.state.global_step = int(path.name.rpartition("_")[2])
        trainer._save_checkpoint(model, None)

    return step, *(lambda path, t=trainer: save(t, path) for trainer in trainers)  # type: ignore[return-value]


def _deepspeed() -> tuple[Callable[[], None], Save, Save]:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    from casnap.integrations.deepspeed import save_checkpoint
    from tests.support.deepspeed_on_cpus import import_deepspeed

    deepspeed = import_deepspeed()
    deepspeed.init_distributed(dist_backend="gloo")
    model = _model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model[1].parameters()),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step() -> None:
        engine.backward(engine(torch.randn(4, _WIDTH)).square().mean())
        engine.step()

    return (
        step,
        lambda path: engine.save_checkpoint(str(path.parent), path.name),
        lambda path: save_checkpoint(engine, path.parent, path.name),
    )


def _megatron() -> tuple[Callable[[], None], Save, Save]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29519", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo")
    # Megatron's own save calls these on CPUs, too.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    import casnap.integrations.megatron  # noqa: F401

    model = _model()
    optimizer = torch.optim.AdamW(model[1].parameters())

    def save(path: Path, strategy: tuple[str, int]) -> None:
        tensors = dict(model.state_dict())
        for number, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{number}.{name}": value for name, value in state.items()}
        sharded = {k: ShardedTensor.from_rank_offsets(k, v) for k, v in tensors.items()}
        path.mkdir()
        dist_checkpointing.save(sharded, str(path), strategy)

    return (
        _stepper(model, optimizer),
        lambda path: save(path, ("torch_dist", 1)),
        lambda path: save(path, ("casnap", 1)),
    )


FRAMEWORKS: dict[str, Callable[[], tuple[Callable[[], None], Save, Save]]] = {
    "dcp": _dcp,
    "lightning": _lightning,
    "transformers": _transformers,
    "accelerate": _accelerate,
    "torch_checkpointing": _torch_checkpointing,
    "deepspeed": _deepspeed,
    "megatron": _megatron,
}


def _nbytes(folder: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


def measure(name: str, folder: Path) -> str:
    """Return a row of the table.

    Args:
        name: The framework.
        folder: An empty folder, on the disk to measure.
    """
    step, own, ours = FRAMEWORKS[name]()
    seconds: dict[str, list[float]] = {"own": [], "casnap": []}
    for number in range(_SAVES):
        step()
        for how, save in (("own", own), ("casnap", ours)):
            place = folder / how
            place.mkdir(exist_ok=True)
            os.sync()
            start = time.perf_counter()
            save(place / f"step_{number}")
            if how == "own":
                os.sync()
            seconds[how].append(time.perf_counter() - start)
    cells = [
        f"{_nbytes(folder / how) / 1e6:,.0f} MB, {statistics.median(times[1:]):.2f} s"
        for how, times in seconds.items()
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Measure the frameworks that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=FRAMEWORKS, metavar="NAME")
    parser.add_argument(
        "--folder", type=Path, help="where to save [the folder for temporary files]"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in options.names:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(measure(name, Path(folder)), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
