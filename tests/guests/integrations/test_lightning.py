"""Lightning's Trainer saves and resumes through casnap, as its users know it."""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import os
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from casnap import RNGState, Snapshot, Store
from casnap.errors import (
    InvalidNameError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StateError,
    UnsupportedTypeError,
)
from tests.support.bitwise import assert_same
from tests.support.dcp_saves import files_of_dcp
from tests.support.exports import assert_exports
from tests.support.faults import backend_faults, in_child
from tests.support.launched import kill_all, launched
from tests.support.pages import run_examples
from tests.support.trainer_contract import TrainerContract
from tests.support.versioned import versioned

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

GUIDE = Path(__file__).parents[3] / "docs/guides/lightning.md"
FROZEN = 4096 * 64 * 4


def package_of(name: str) -> Any:
    """Return the Trainer's package of ``lightning``, or that of ``pytorch_lightning``."""
    return importlib.import_module("lightning.pytorch" if name == "lightning" else name)


def make_model(kill_at: int | None, sharded: str = "", package: str = "lightning") -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    class Model(package_of(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.base = torch.nn.Embedding(4096, 64).requires_grad_(requires_grad=False)
            self.head = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(64, 8))

        def configure_model(self) -> None:
            if sharded == "parallel":
                fully_shard(self.head, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.base, mesh=self.device_mesh["data_parallel"])
            elif sharded == "fsdp" and not isinstance(self.base, FullyShardedDataParallel):
                wrap = partial(
                    FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True
                )
                self.base, self.head = wrap(self.base), wrap(self.head)

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            if self.global_step == kill_at:
                kill_all()
            loss = self.head(self.base(batch[0])).square().mean()
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.head.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        # Lightning itself does not keep the random state.
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["rng"] = RNGState().state_dict()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            RNGState().load_state_dict(checkpoint["rng"])

    return Model()


def strategy(sharded: str, devices: int) -> Any:
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    class OnCpus(FSDPStrategy):
        """What the Trainer does not know by its class: that one it refuses without a GPU."""

    if sharded == "fsdp":
        return OnCpus(state_dict_type="sharded")
    return ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)


def plugin_of(io: str, package: str = "lightning") -> Any:
    """Return a plugin that saves at once, in the background, or through one of Lightning's."""
    ours = importlib.import_module(f"casnap.integrations.{package}").CasnapCheckpointIO
    around = package_of(package).plugins.io.AsyncCheckpointIO
    return {
        "plain": ours,
        "async": partial(ours, async_save=True),
        "wrapped": lambda: around(ours()),
    }[io]()


def loader_of() -> Any:
    """Return batches in a random order, where Lightning keeps to it when it resumes."""
    from lightning.pytorch.loops.fit_loop import _FitLoop

    # Older versions begin an epoch's order twice, also from their own checkpoints.
    keeps = hasattr(_FitLoop, "is_resuming")
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(32)),
        batch_size=8,
        shuffle=keeps,
        generator=None if keeps else torch.Generator(),
    )


def train(
    folder: Path,
    kill_at: int | None = None,
    io: str = "plain",
    *,
    sharded: str = "",
    devices: int = 2,
    ckpt_path: str | None = "last",
    package: str = "lightning",
) -> dict[str, Any]:
    """Train, from the last checkpoint on; return what this rank has at the end."""
    from casnap.integrations.dcp import install

    pl, plugin = package_of(package), plugin_of(io, package)
    parallel: dict[str, Any] = {}
    if sharded:
        parallel = {"devices": devices, "strategy": strategy(sharded, devices)}
        parallel["use_distributed_sampler"] = False
        install(folder)
    torch.manual_seed(1)
    loader = loader_of()
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        **parallel,
        plugins=[plugin],
        callbacks=[
            pl.callbacks.ModelCheckpoint(folder, monitor="loss", save_top_k=2, save_last=True)
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    model = make_model(kill_at, sharded, package)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    optimizer = trainer.optimizers[0].state_dict()
    if sharded:
        return own({"model": dict(model.named_parameters()), "optim": optimizer})
    return {"model": model.state_dict(), "optim": optimizer}


def own(state: Any) -> Any:
    """Return a state with this rank's parts of tensors. FSDP gives it in an order of its own."""
    if isinstance(state, dict):
        named = {str(k).replace("_fsdp_wrapped_module.", ""): own(v) for k, v in state.items()}
        return dict(sorted(named.items()))
    if isinstance(state, torch.nn.Parameter):
        state = state.detach().clone()
    return state.to_local() if hasattr(state, "to_local") else state


class TestTrainer(TrainerContract):
    package = "lightning"
    ways = ("plain", "async", "wrapped")
    unordered = ("async", "wrapped")
    kill_at = 11
    kept = 3
    least_bytes = FROZEN
    most_new_bytes = FROZEN // 10
    name = "last.ckpt"
    nothing = SnapshotNotFoundError
    other = None  # Fabric saves anything

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        return train(folder, kill_at, way or "plain", package=self.package)

    def load(self, folder: Path) -> object:
        return plugin_of("plain", self.package).load_checkpoint(folder / "last.ckpt")

    def check_last(self, snapshot: Snapshot, end: dict[str, Any], folder: Path) -> None:
        assert snapshot.name == "last.ckpt"
        assert snapshot.metadata.user["loss"] > 0
        model = make_model(None, package=self.package)
        snapshot.restore({"state_dict": model})
        assert_same(model.state_dict(), end["model"])
        assert_exports(snapshot, folder, "state_dict", end["model"])


class TestPytorchLightning(TestTrainer):
    """The same by the other package of Lightning."""

    package = "pytorch_lightning"
    ways = ("plain",)


@pytest.mark.parametrize("sharded", ["parallel", "fsdp"])
def test_a_sharded_strategy_resumes_through_the_redirect(tmp_path: Path, sharded: str) -> None:
    def go(name: str, kill_at: int | None = None, devices: int = 2) -> None:
        state = train(tmp_path / name, kill_at, sharded=sharded, devices=devices)
        torch.save(state, tmp_path / f"{name}-{devices}-{os.environ['RANK']}")

    def end(name: str, devices: int = 2) -> list[Any]:
        files = [tmp_path / f"{name}-{devices}-{rank}" for rank in range(devices)]
        return [torch.load(file, weights_only=True) for file in files]

    assert launched(2, lambda: go("whole")) == [0, 0]
    assert launched(2, lambda: go("run", 11)) == [-9, -9]
    assert launched(2, lambda: go("run")) == [0, 0]
    assert_same(end("run"), end("whole"))
    snapshots = Store(tmp_path / "run", create=False).snapshots()
    assert {s.name for s in snapshots} == {p.name for p in (tmp_path / "run").glob("*.ckpt")}
    assert [s.world_size for s in snapshots] == [2, 2, 2]  # save_top_k, save_last
    for snapshot in snapshots:
        assert snapshot.stats.logical_bytes > FROZEN
        if "epoch=0" not in snapshot.name:
            assert snapshot.stats.new_bytes < FROZEN // 10
    assert files_of_dcp(tmp_path / "run") == []

    # One process loads it, too: all epochs are done.
    assert launched(1, lambda: go("run", devices=1)) == [0]
    for name, weight in end("run", 1)[0]["model"].items():
        parts = [part["model"][name].flatten() for part in end("run")]
        assert torch.equal(weight.flatten(), torch.cat(parts)), name


def test_a_failed_save_in_the_background_removes_nothing(tmp_path: Path) -> None:
    from casnap.integrations.lightning import CasnapCheckpointIO

    io = CasnapCheckpointIO(async_save=True)
    io.save_checkpoint({"epoch": 0, "state_dict": {"w": torch.ones(3)}}, tmp_path / "a.ckpt")
    io.save_checkpoint({"epoch": 1, "state_dict": {"w": torch.zeros(3)}}, tmp_path / "b.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    assert io.load_checkpoint(tmp_path / "b.ckpt")["epoch"] == 1  # waits
    assert not (tmp_path / "a.ckpt").exists()

    store = Store(tmp_path)
    store.tag("b.ckpt", "keep")
    with pytest.raises(SnapshotExistsError, match="tag"):
        _save_and_remove(io, tmp_path / "b.ckpt")
    assert io.load_checkpoint(tmp_path / "b.ckpt")["epoch"] == 1


def _save_and_remove(io: Any, path: Path) -> None:
    io.save_checkpoint({"epoch": 2}, path)
    io.remove_checkpoint(path)
    io.teardown()


class Requeue:
    """A handler that saves a checkpoint, as Lightning's does before SLURM requeues the job."""

    def __init__(self, io: Any, path: Path) -> None:
        self._io, self._path = io, path
        self._has_ended = threading.Event()
        signal.signal(signal.SIGUSR1, self)

    def __call__(self, *_: object) -> None:
        try:
            self._io.save_checkpoint({"epoch": 7, "state_dict": {"w": torch.ones(3)}}, self._path)
        finally:
            self._has_ended.set()

    def send(self) -> None:
        """Send the signal; in another thread than the main one, wait for the end of the handler."""
        self._has_ended.clear()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert self._has_ended.wait(30)


class Signalled:
    """A value that sends the signal while it is pickled."""

    def __init__(self, requeue: Requeue) -> None:
        self._requeue = requeue

    def __reduce__(self) -> Any:
        self._requeue.send()
        return (int, ())


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", ["hpc_ckpt_1.ckpt", "step.ckpt"])
def test_a_checkpoint_within_a_save_is_a_file(tmp_path: Path, later: bool, name: str) -> None:
    from casnap.integrations.lightning import CasnapCheckpointIO

    def save() -> None:
        io = CasnapCheckpointIO(async_save=later, allow_pickle=True)
        requeue = Requeue(io, tmp_path / name)
        io.save_checkpoint({"epoch": 3, "x": Signalled(requeue)}, tmp_path / "step.ckpt")
        names = {"hpc_ckpt_1.ckpt": name, "step.ckpt": "step.saved-within-a-call.ckpt"}
        assert (tmp_path / names[name]).is_file()
        assert io.load_checkpoint(tmp_path / names[name])["epoch"] == 7
        assert io.load_checkpoint(tmp_path / "step.ckpt", weights_only=False)["epoch"] == 3
        # Between two saves it is a snapshot.
        signal.raise_signal(signal.SIGUSR1)
        if name == "hpc_ckpt_1.ckpt":
            assert io.load_checkpoint(tmp_path / name)["epoch"] == 7
            assert (tmp_path / name).is_dir()
        io.remove_checkpoint(tmp_path / names[name])
        io.remove_checkpoint(tmp_path / "step.ckpt")
        io.teardown()
        assert not Store(tmp_path).snapshots()
        assert not list(tmp_path.glob("*.ckpt"))

    assert in_child(save) == 0


def test_a_checkpoint_is_removed_within_a_save(tmp_path: Path) -> None:
    from casnap.integrations.lightning import CasnapCheckpointIO

    def save() -> None:
        io = CasnapCheckpointIO()
        io.save_checkpoint({"epoch": 1}, tmp_path / "a.ckpt")
        heard: list[int] = []

        def remove(number: int, _: object) -> None:
            io.remove_checkpoint(tmp_path / "a.ckpt")
            heard.append(number)

        signal.signal(signal.SIGUSR1, remove)

        def send() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            while not heard:
                time.sleep(0.001)

        with backend_faults(0, send, names=["write"]):
            io.save_checkpoint({"epoch": 2}, tmp_path / "b.ckpt")
        assert len(heard) == 1
        io.wait()
        assert [s.name for s in Store(tmp_path).snapshots()] == ["b.ckpt"]

    assert in_child(save) == 0


SCONTROL = """#!/bin/sh
echo "$@" >> "{}/requeued"
"""


def test_slurm_requeues_a_job_that_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes while a checkpoint is written; the job goes on from what it then saves."""
    (tmp_path / "scontrol").write_text(SCONTROL.format(tmp_path))
    (tmp_path / "scontrol").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in SLURM.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    folder = tmp_path / "ckpts"

    def run() -> None:
        signal.alarm(120)
        told: list[int] = []

        def send() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            while not (tmp_path / "requeued").exists():
                time.sleep(0.001)
            told.append(1)

        with backend_faults(0, send, names=["write"]):
            train(folder, ckpt_path=None)
        assert told

    assert in_child(run) == 0
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    names = {path.name for path in folder.iterdir()}
    assert "hpc_ckpt_1.ckpt" in names

    def resume() -> None:
        from casnap.integrations.lightning import CasnapCheckpointIO

        saved = CasnapCheckpointIO().load_checkpoint(folder / "hpc_ckpt_1.ckpt")
        assert saved["global_step"] == 4
        end = train(folder, ckpt_path=None)
        assert end["optim"]["state"][0]["step"] == 16

    assert in_child(resume) == 0


SLURM = {
    "JOB_ID": "17",
    "JOB_NAME": "train",
    "NTASKS": "1",
    "PROCID": "0",
    "LOCALID": "0",
    "NODEID": "0",
}


def test_links_files_and_what_is_missing(tmp_path: Path) -> None:
    from casnap.integrations.lightning import CasnapCheckpointIO

    io = CasnapCheckpointIO()
    state = {"state_dict": {"w": torch.ones(30_000)}, "a/b%": {"x": [1, (2,)]}, "epoch": 7}
    io.save_checkpoint(state, tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")  # as save_last="link" makes it
    assert_same(io.load_checkpoint(tmp_path / "last.ckpt", "cpu"), state)
    io.remove_checkpoint(tmp_path / "last.ckpt")
    assert "a.ckpt" in Store(tmp_path)

    torch.save(state, tmp_path / "old.ckpt")
    assert_same(io.load_checkpoint(tmp_path / "old.ckpt"), state)
    io.remove_checkpoint(tmp_path / "old.ckpt")
    assert not (tmp_path / "old.ckpt").exists()
    with pytest.raises(SnapshotNotFoundError, match=r"no checkpoint at .*old\.ckpt"):
        io.load_checkpoint(tmp_path / "old.ckpt")

    # As a sharded strategy does later, without the plugin.
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "a.ckpt")
    with pytest.raises(StateError, match=r"and a checkpoint that torch[.]distributed[.]checkpoint"):
        io.load_checkpoint(tmp_path / "a.ckpt")


def configured(package: str = "lightning") -> Any:
    """Return a class of modules with hyperparameters."""

    class Configured(package_of(package).LightningModule):  # type: ignore[misc]
        def __init__(self, width: int, options: Any = None, scale: float = 1.0) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(4, width)

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Configured


def fit(
    folder: Path,
    model: Any,
    epochs: int = 1,
    *,
    own: bool = False,
    save_last: Any = True,
    package: str = "lightning",
    **options: Any,
) -> str:
    """Train a module, and return the path of its last checkpoint; ``own``: without the plugin."""
    ours, pl = importlib.import_module(f"casnap.integrations.{package}"), package_of(package)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    kept = pl.callbacks.ModelCheckpoint(folder, save_last=True)
    plugins = [] if own else [ours.CasnapCheckpointIO(**options)]
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", plugins=plugins,
        callbacks=[kept], logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, 4), ckpt_path="last")
    return str(kept.last_model_path)


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_load_from_checkpoint_reads_snapshots_and_their_hyperparameters(
    tmp_path: Path, package: str
) -> None:
    def work() -> None:
        kind = configured(package)
        model = kind(3, {"deep": [1, 2]}, scale=0.5)
        path = fit(tmp_path / "ckpts", model, package=package)
        for at in (path, Path(path)):
            again = kind.load_from_checkpoint(at, scale=2.0)
            assert again.hparams == {"width": 3, "options": {"deep": [1, 2]}, "scale": 2.0}
            assert_same(again.state_dict(), model.state_dict())
        assert kind.load_from_checkpoint(path, map_location="cpu").hparams["scale"] == 0.5
        with pytest.raises(FileNotFoundError, match="missing"):
            kind.load_from_checkpoint(tmp_path / "missing.ckpt")
        with pytest.raises(InvalidNameError, match="is a store itself"):
            kind.load_from_checkpoint(tmp_path / "ckpts")
        # A file is read as before.
        trainer = package_of(package).Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False
        )
        trainer.strategy.connect(model)
        trainer.save_checkpoint(tmp_path / "own.ckpt", weights_only=True)
        assert kind.load_from_checkpoint(tmp_path / "own.ckpt").hparams["scale"] == 0.5
        Snapshot.take(tmp_path / "other/a", {"state_dict": model})
        with pytest.raises(StateError, match="sharded strategy"):
            kind.load_from_checkpoint(tmp_path / "other/a")

    assert in_child(work) == 0


def test_load_from_checkpoint_keeps_the_versions_of_modules(tmp_path: Path) -> None:
    def work() -> None:
        kind = configured()

        class Versioned(kind):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__(3)
                self.more = versioned(spectral=True)

        model = Versioned()
        path = fit(tmp_path / "ckpts", model)
        for map_location in (None, "cpu", torch.device("cpu")):
            again = Versioned.load_from_checkpoint(path, map_location=map_location)
            assert_same(again.state_dict(), model.state_dict())

    assert in_child(work) == 0


def test_hyperparameters_without_a_safe_encoding_are_pickled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, folder = configured(), tmp_path / "ckpts"
    options = argparse.Namespace(lr=0.1, loss=torch.nn.functional.mse_loss)
    with caplog.at_level(logging.WARNING, "casnap"):
        path = fit(folder, kind(3, options), epochs=2)
    assert caplog.text.count("It is stored by pickle, as Lightning does") == 1
    with pytest.raises(UnsupportedTypeError, match=r"options.* allow_pickle=True"):
        fit(folder, kind(3, options), epochs=3)
    fit(folder, kind(3, options), epochs=3, allow_pickle=True)
    if "weights_only" in inspect.signature(kind.load_from_checkpoint).parameters:
        again = kind.load_from_checkpoint(path, weights_only=False)
        assert again.hparams["options"] == options
    with pytest.raises(UnsupportedTypeError, match="allow_pickle=True"):
        kind.load_from_checkpoint(path)


@pytest.mark.parametrize("suffix", [".ckpt", ""])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_that_changes_over_goes_on_from_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, *, async_save: bool
) -> None:
    """A save replaces Lightning's own file of its name; else that would be loaded."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from casnap.integrations.lightning import CasnapCheckpointIO

    monkeypatch.setattr(ModelCheckpoint, "FILE_EXTENSION", suffix)
    kind, folder = configured(), tmp_path / "ckpts"
    last = folder / f"last{suffix}"
    fit(folder, kind(3), own=True)
    assert last.is_file()
    assert in_child(lambda: _kill_while_saving(folder, kind(3))) == -signal.SIGKILL
    assert CasnapCheckpointIO().load_checkpoint(last)["epoch"] == 0
    for epochs in (2, 3):
        assert fit(folder, kind(3), epochs, async_save=async_save) == str(last)
        assert CasnapCheckpointIO().load_checkpoint(last)["epoch"] == epochs - 1
        assert last.is_dir()
    assert not list(folder.glob("*replaced*"))


def _kill_while_saving(folder: Path, model: Any) -> None:
    with backend_faults(0, names=["put_if_absent"]):
        fit(folder, model, 2)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize(
    ("package", "call"),
    [("lightning", "put_if_absent"), ("lightning", "mark"), ("pytorch_lightning", "mark")],
)
def test_a_run_that_is_killed_around_the_commit_of_its_first_last_checkpoint(
    tmp_path: Path, package: str, call: str, *, replaces: bool
) -> None:
    """Lightning looks for the folder, whose marker comes after the commit.

    Or it finds its own file, which is replaced, and kept until then under another name.
    """
    kind, folder, began = configured(package), tmp_path / "ckpts", list[int]()
    last, before = folder / "last.ckpt", int(replaces)
    if replaces:
        fit(folder, kind(3), own=True, package=package)

    def saves_last() -> bool:
        return not last.is_file() and any(folder.glob("last*"))

    def killed() -> None:
        with backend_faults(0, names=[call], counts=saves_last):
            fit(folder, kind(3), before + 1, package=package)

    assert in_child(killed) == -signal.SIGKILL
    is_committed = "last.ckpt" in [snapshot.name for snapshot in Store(folder).snapshots()]
    assert is_committed == (call == "mark")
    model = kind(3)
    model.on_train_start = lambda: began.append(model.current_epoch)
    assert fit(folder, model, before + 2, package=package) == str(last)
    assert began == [before + is_committed]
    assert not list(folder.glob("*replaced*"))


@pytest.mark.parametrize(("suffix", "is_link"), [(".ckpt", False), (".ckpt", True), ("", False)])
@pytest.mark.parametrize("call", ["put_if_absent", "mark"])
def test_a_file_over_a_snapshot_outlives_a_save_that_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, suffix: str, *, is_link: bool
) -> None:
    """The file is newer than the snapshot, which only the commit of the next save replaces."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from casnap.integrations.lightning import CasnapCheckpointIO

    monkeypatch.setattr(ModelCheckpoint, "FILE_EXTENSION", suffix)
    kind, folder, began = configured(), tmp_path / "ckpts", list[int]()
    last = folder / f"last{suffix}"
    fit(folder, kind(3))
    shutil.rmtree(last)
    fit(folder, kind(3), 2, own=True)
    checkpoint = torch.load(last, weights_only=False)
    checkpoint["metadata"] = call
    if is_link:
        last.rename(folder / "kept.ckpt")
        last.symlink_to("kept.ckpt")

    def killed() -> None:
        with backend_faults(0, names=[call]):
            CasnapCheckpointIO(allow_pickle=True).save_checkpoint(checkpoint, last)

    assert in_child(killed) == -signal.SIGKILL
    if call == "put_if_absent":
        with pytest.raises(StateError, match=rf"has a snapshot 'last{suffix}' as well"):
            CasnapCheckpointIO().load_checkpoint(last)
    model = kind(3)
    model.on_train_start = lambda: began.append(model.current_epoch)
    assert fit(folder, model, 4, allow_pickle=True) == str(last)
    assert began == [2]
    assert CasnapCheckpointIO(allow_pickle=True).load_checkpoint(last)["epoch"] == 3
    assert not list(folder.glob("*replaced*"))


@pytest.mark.parametrize("io", ["plain", "async", "wrapped"])
def test_names_with_slashes_share_the_store_of_the_callback(tmp_path: Path, io: str) -> None:
    """As those of metrics, which loggers group by slashes; also of weights alone."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def run(epochs: int, resume: str | None = None) -> None:
        callbacks = [
            ModelCheckpoint(
                tmp_path / "run/ckpts",
                filename="{epoch}-{val/loss:.9f}",
                monitor="val/loss",
                mode="max",
                save_top_k=2,
                save_last=True,
            ),
            ModelCheckpoint(
                tmp_path / "run/best", filename="{epoch}/weights", save_weights_only=True
            ),
        ]
        fit_with(callbacks, epochs, io, resume)

    assert in_child(lambda: run(1)) == 0
    assert in_child(lambda: run(5, str(tmp_path / "run/ckpts/last.ckpt"))) == 0
    assert len(list(tmp_path.rglob("casnap-store"))) == 2
    weights = Store(tmp_path / "run/best", create=False).snapshots()
    assert weights[-1].name == "epoch=4/weights.ckpt"
    snapshots = Store(tmp_path / "run/ckpts", create=False).snapshots()
    assert all(s.stats.new_bytes < FROZEN // 10 for s in (*snapshots, *weights) if s.row.seq > 1)
    if io != "wrapped":  # that one removes a checkpoint that it may still be saving
        folders = {"epoch=3-val", "epoch=4-val", "last.ckpt"}
        assert {s.name.partition("/")[0] for s in snapshots} == folders
        assert {path.name for path in (tmp_path / "run/ckpts").iterdir()} == {
            *folders,
            "casnap-store",
        }


def test_a_run_goes_on_in_the_stores_of_its_names_with_slashes(tmp_path: Path) -> None:
    """Where each folder that a name has made is a store of its own."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def run(epochs: int, resume: str | None = None) -> None:
        callback = ModelCheckpoint(tmp_path / "ckpts", filename="val/{epoch}", save_top_k=-1)
        fit_with([callback], epochs, "plain", resume)

    Store(tmp_path / "ckpts/val").make()
    assert in_child(lambda: run(1)) == 0
    assert in_child(lambda: run(2, str(tmp_path / "ckpts/val/epoch=0.ckpt"))) == 0
    names = [s.name for s in Store(tmp_path / "ckpts/val").snapshots()]
    assert names == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert not (tmp_path / "ckpts/casnap-store").exists()


def fit_with(callbacks: list[Any], epochs: int, io: str, resume: str | None) -> None:
    """Train with some callbacks; ``val/loss`` is the number of the epoch."""
    import lightning

    model = make_model(None)
    model.on_train_epoch_end = lambda: model.log("val/loss", float(model.current_epoch))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(32)), batch_size=8
    )
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        plugins=[plugin_of(io)],
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path=resume)


def test_a_file_of_the_users_is_not_replaced(tmp_path: Path) -> None:
    from casnap.integrations.lightning import CasnapCheckpointIO

    io, notes, last = CasnapCheckpointIO(), tmp_path / "notes.ckpt", tmp_path / "last.ckpt"
    notes.write_text("mine")
    with pytest.raises(
        SnapshotExistsError, match=r"notes\.ckpt is a file, which casnap leaves alone"
    ):
        io.save_checkpoint({"epoch": 0}, notes)
    assert notes.read_text() == "mine"
    # A save that fails leaves the file that it was to replace.
    torch.save({"epoch": 1}, last)
    with pytest.raises(UnsupportedTypeError, match="cannot be stored"):
        io.save_checkpoint({"value": lambda: 2}, last)
    assert io.load_checkpoint(last)["epoch"] == 1
    # In the place of a link there is the new one.
    (tmp_path / "link.ckpt").symlink_to("last.ckpt")
    io.save_checkpoint({"epoch": 3}, tmp_path / "link.ckpt")
    assert io.load_checkpoint(tmp_path / "link.ckpt")["epoch"] == 3
    assert io.load_checkpoint(last)["epoch"] == 1
    # A file that was put beside a snapshot: neither is chosen.
    io.save_checkpoint({"epoch": 2}, last)
    shutil.rmtree(last)
    torch.save({"epoch": 1}, last)
    with pytest.raises(StateError, match=r"has a snapshot 'last\.ckpt' as well"):
        io.load_checkpoint(last)


def test_the_tuner_saves_where_no_store_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the current folder, HOME say: a path that the user has not given."""
    import lightning
    from lightning.pytorch.tuner import Tuner

    from casnap.integrations.lightning import CasnapCheckpointIO

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = make_model(None, "")
    model.lr = 0.1
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        plugins=[CasnapCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(32)), batch_size=8
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = Tuner(trainer).lr_find(model, loader, num_training=5, update_attr=False)
    assert found is not None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {p.name for p in tmp_path.iterdir()} <= {"casnap-cache"}


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    def work() -> None:
        from lightning.fabric import Fabric

        from casnap.integrations.lightning import CasnapCheckpointIO

        fabric = Fabric(accelerator="cpu", devices=1, plugins=[CasnapCheckpointIO()])
        model = torch.nn.Linear(40, 30)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        for step in (1, 2):
            fabric.backward(model(torch.randn(2, 40)).sum())
            optimizer.step()
            state = {"model": model, "optimizer": optimizer, "step": step}
            fabric.save(tmp_path / f"step_{step}", state)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        model.weight.data.zero_()
        found = {"model": model, "optimizer": optimizer, "step": 0}
        assert fabric.load(tmp_path / "step_2", found) == {}
        assert found["step"] == 2
        assert_same(dict(model.state_dict()), before)
        assert fabric.load(tmp_path / "step_1")["step"] == 1
        assert [s.name for s in Store(tmp_path, create=False).snapshots()] == ["step_1", "step_2"]

    assert in_child(work) == 0


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_child(lambda: run_examples(GUIDE, tmp_path / "work", monkeypatch)) == 0


def test_a_resume_says_what_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from casnap.integrations.lightning import CasnapCheckpointIO

    path = fit(tmp_path / "ckpts", configured()(3))
    io = CasnapCheckpointIO()
    io.load_checkpoint(path)
    assert "since the take" not in caplog.text
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    io.load_checkpoint(path)
    text = f"{path}: since the take: cudnn_deterministic off → on. So the training may compute"
    assert text in caplog.text
