"""What readers that know nothing of casnap give for the folder of a checkpoint.

Right values, or an error: nothing passes for weights that is not. docs/compatibility.md has the
table, and is compared with what the readers did here.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from casnap import Snapshot
from casnap.errors import StateError
from casnap.integrations.notices import is_notice
from tests.support.faults import in_child

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

PAGE = Path(__file__).parents[3] / "docs/compatibility.md"
HEAD = "| reader | folder of | gives |\n|---|---|---|\n"

Case = Callable[[Path], bool]
CASES: dict[tuple[str, str], Case] = {}


def case(reader: str, folder: str) -> Callable[[Case], Case]:
    """Add a reader of a folder: it says whether the values are right, or raises."""

    def add(read: Case) -> Case:
        CASES[reader, folder] = read
        return read

    return add


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# --- the checkpoints --------------------------------------------------------------------------


def language_model(seed: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    )


def with_adapter(base: Any) -> Any:
    import peft

    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn"]))


def trainer(output: Path, model: Any, *, plain: bool = False, **arguments: Any) -> Any:
    import transformers

    from casnap.integrations.transformers import CasnapTrainerMixin

    class Ours(CasnapTrainerMixin, transformers.Trainer):
        pass

    ids = torch.arange(8)
    arguments = {"max_steps": 2, "save_steps": 2, "learning_rate": 0.1} | arguments
    return (transformers.Trainer if plain else Ours)(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(output), use_cpu=True, report_to=[], disable_tqdm=True, **arguments
        ),
        train_dataset=[{"input_ids": ids, "labels": ids}] * 16,
    )


def module() -> Any:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model


def fabric(plugins: list[Any]) -> tuple[Any, Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugins)
    return fabric, fabric.setup(torch.nn.Linear(4, 3))


def fit(folder: Path, model: Any, ckpt_path: str | None, plugins: list[Any]) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    lightning.Trainer(
        max_epochs=1, accelerator="cpu", plugins=plugins, logger=False, enable_progress_bar=False,
        callbacks=[ModelCheckpoint(folder, filename="best", save_last=True)],
        enable_model_summary=False,
    ).fit(model, torch.utils.data.DataLoader(data, 4), ckpt_path=ckpt_path)  # fmt: skip


def accelerated() -> tuple[Any, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return accelerator, accelerator.prepare(torch.nn.Linear(4, 3))


def make(top: Path) -> None:
    """Save a checkpoint with each integration, and what it holds."""
    from casnap.integrations.accelerate import save_state
    from casnap.integrations.dcp import CasnapWriter, install, uninstall
    from casnap.integrations.lightning import CasnapCheckpointIO

    made = trainer(top / "full", language_model(0), save_steps=1)
    made.train()
    torch.save(made.model.state_dict(), top / "full.pt")
    language_model(0).save_pretrained(top / "base")
    base = type(language_model(0)).from_pretrained(top / "base")
    made = trainer(top / "adapter", with_adapter(base))
    made.train()
    torch.save(made.model.state_dict(), top / "adapter.pt")
    torch.save(made.model.merge_and_unload().state_dict(), top / "merged.pt")

    model = module()()
    fit(top / "lightning", model, None, [CasnapCheckpointIO()])
    torch.save(model.state_dict(), top / "lightning.pt")

    through, linear = fabric([CasnapCheckpointIO()])
    through.save(top / "fabric/step_2", {"model": linear})

    accelerator, linear = accelerated()
    save_state(accelerator, top / "accelerate/step_2")
    torch.save(linear.state_dict(), top / "accelerate.pt")

    state = {"x": torch.arange(5.0)}
    install(top / "installed")
    dcp.save(state, checkpoint_id=top / "installed/step_2")
    uninstall()
    dcp.save(state, storage_writer=CasnapWriter(top / "writer/step_2"))
    Snapshot.take(top / "taken/step_2", {"model": torch.nn.Linear(4, 3)})


FOLDERS = {
    "Transformers": "full/checkpoint-2",
    "Transformers, an older one": "full/checkpoint-1",
    "Transformers, PEFT": "adapter/checkpoint-2",
    "Lightning": "lightning/best.ckpt",
    "Fabric": "fabric/step_2",
    "Accelerate": "accelerate/step_2",
    "DCP, `install()`": "installed/step_2",
    "DCP, `CasnapWriter`": "writer/step_2",
    "`Snapshot.take`": "taken/step_2",
}


# --- the readers ------------------------------------------------------------------------------


@case("`AutoModelForCausalLM.from_pretrained`", "Transformers")
def _(top: Path) -> bool:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(top / FOLDERS["Transformers"])
    return same(model.state_dict(), torch.load(top / "full.pt"))


@case("`AutoModelForCausalLM.from_pretrained`", "Transformers, an older one")
def _(top: Path) -> bool:
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(top / FOLDERS["Transformers, an older one"])
    return False


@case("`AutoModelForCausalLM.from_pretrained`", "Transformers, PEFT")
def _(top: Path) -> bool:
    import transformers

    folder = top / FOLDERS["Transformers, PEFT"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    stored = torch.load(top / "adapter.pt")
    found = {k.replace(".default", ""): v for k, v in model.state_dict().items() if "lora" in k}
    wanted = {
        k.replace(".default", "").removeprefix("base_model.model."): v
        for k, v in stored.items()
        if "lora" in k
    }
    return bool(found) and same(found, wanted)


@case("`AutoPeftModelForCausalLM.from_pretrained`", "Transformers, PEFT")
def _(top: Path) -> bool:
    import peft

    folder = top / FOLDERS["Transformers, PEFT"]
    model = peft.AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()
    return same(model.state_dict(), torch.load(top / "merged.pt"))


@case("`PeftModel.from_pretrained`", "Transformers")
def _(top: Path) -> bool:
    import peft

    peft.PeftModel.from_pretrained(language_model(0), top / FOLDERS["Transformers"])
    return False


@case("`PeftModel.from_pretrained`", "Transformers, PEFT")
def _(top: Path) -> bool:
    import peft

    folder = top / FOLDERS["Transformers, PEFT"]
    model = peft.PeftModel.from_pretrained(language_model(0), folder).merge_and_unload()
    return same(model.state_dict(), torch.load(top / "merged.pt"))


@case("resume of a plain `Trainer`", "Transformers")
def _(top: Path) -> bool:
    plain = trainer(top / "full", language_model(1), plain=True, max_steps=3)
    plain.train(resume_from_checkpoint=True)
    return False


@case("resume of a plain `Trainer`", "Transformers, PEFT")
def _(top: Path) -> bool:
    plain = trainer(top / "adapter", with_adapter(language_model(0)), plain=True, max_steps=3)
    plain.train(resume_from_checkpoint=True)
    return False


def _loaded_by_lightning(top: Path) -> bool:
    model = module().load_from_checkpoint(top / FOLDERS["Lightning"])
    return same(model.state_dict(), torch.load(top / "lightning.pt"))


@case("`load_from_checkpoint`", "Lightning")
def _(top: Path) -> bool:
    from lightning.pytorch.core import saving

    ours = sys.modules.get("casnap.integrations.lightning")
    if ours is not None:  # imported by another test
        saving.pl_load = saving.pl_load.__wrapped__
    return _loaded_by_lightning(top)


@case("`load_from_checkpoint`, after `import casnap.integrations.lightning`", "Lightning")
def _(top: Path) -> bool:
    import casnap.integrations.lightning  # noqa: F401

    return _loaded_by_lightning(top)


@case("`Trainer.fit(ckpt_path=...)` without the plugin", "Lightning")
def _(top: Path) -> bool:
    fit(top / "more", module()(), str(top / FOLDERS["Lightning"]), [])
    return False


@case('`Trainer.fit(ckpt_path="last")` without the plugin', "Lightning")
def _(top: Path) -> bool:
    fit(top / "lightning", module()(), "last", [])
    return False


@case("`fabric.load` without the plugin", "Fabric")
def _(top: Path) -> bool:
    through, linear = fabric([])
    through.load(top / FOLDERS["Fabric"], {"model": linear})
    return False


@case("`load_checkpoint_in_model` of Accelerate", "Accelerate")
def _(top: Path) -> bool:
    from accelerate import load_checkpoint_in_model

    load_checkpoint_in_model(torch.nn.Linear(4, 3), top / FOLDERS["Accelerate"])
    return False


@case("`load_checkpoint_in_model` of Accelerate", "Transformers")
def _(top: Path) -> bool:
    from accelerate import load_checkpoint_in_model

    model = language_model(1)
    load_checkpoint_in_model(model, top / FOLDERS["Transformers"])
    return same(model.state_dict(), torch.load(top / "full.pt"))


@case("`load_checkpoint_in_model` of Accelerate", "Transformers, an older one")
def _(top: Path) -> bool:
    from accelerate import load_checkpoint_in_model

    load_checkpoint_in_model(language_model(1), top / FOLDERS["Transformers, an older one"])
    return False


@case("`accelerator.load_state`", "Accelerate")
def _(top: Path) -> bool:
    accelerator, _ = accelerated()
    accelerator.load_state(str(top / FOLDERS["Accelerate"]))
    return False


@case("`dcp.load`", "DCP, `install()`")
def _(top: Path) -> bool:
    return dcp_loads(top / FOLDERS["DCP, `install()`"])


@case("`dcp.load`", "DCP, `CasnapWriter`")
def _(top: Path) -> bool:
    return dcp_loads(top / FOLDERS["DCP, `CasnapWriter`"])


@case("`dcp_to_torch_save`", "DCP, `CasnapWriter`")
def _(top: Path) -> bool:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(top / FOLDERS["DCP, `CasnapWriter`"], top / "out.pt")
    return False


@case("`dcp.load`", "`Snapshot.take`")
def _(top: Path) -> bool:
    return dcp_loads(top / FOLDERS["`Snapshot.take`"])


def dcp_loads(folder: Path) -> bool:
    dcp.load({"x": torch.zeros(5)}, checkpoint_id=folder)
    return False


@case("`torch.load`", "any")
def _(top: Path) -> bool:
    for folder in list(FOLDERS.values())[1:]:
        with pytest.raises(IsADirectoryError):
            torch.load(top / folder)
    torch.load(top / FOLDERS["Transformers"])
    return False


@case("`torch.load` of a file in it", "any")
def _(top: Path) -> bool:
    every = [path for folder in FOLDERS.values() for path in (top / folder).iterdir()]
    notices = [path for path in every if is_notice(path)]
    names = {"pytorch_model.bin", "optimizer.pt", "scheduler.pt", ".metadata", "__0_0.distcp"}
    assert {path.name for path in notices} == names
    for path in notices[1:]:
        for safely in (True, False):
            with pytest.raises(KeyError, match=r"^'casnap: "):
                torch.load(path, weights_only=safely)
    torch.load(notices[0])
    return False


# --- the table --------------------------------------------------------------------------------


def outcome(read: Case, top: Path, out: Path) -> None:
    """Note what a reader gives: whether the values are right, or the error."""
    try:
        gives = "right values" if read(top) else "WRONG VALUES"
    except BaseException as e:  # noqa: BLE001  (DCP's is no Exception)
        # DCP's error has a traceback, with the paths of this environment.
        says = str(e).replace(str(top), "").replace(str(Path(torch.__file__).parents[1]), "")
        gives = f"`{type(e).__name__}`"
        if "casnap" in says:
            how = "begins with" if says.startswith("'casnap: ") else "says"
            gives += f", which {how} casnap"
    out.write_text(json.dumps(gives))


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readers")
    assert in_child(lambda: make(folder)) == 0
    return folder


def test_every_reader_gives_right_values_or_an_error(top: Path) -> None:
    rows = []
    for (reader, folder), read in CASES.items():
        out = top / "outcome.json"
        assert in_child(lambda read=read, out=out: outcome(read, top, out)) == 0
        gives = json.loads(out.read_text())
        assert gives != "WRONG VALUES", (reader, folder)
        rows.append(f"| {reader} | {folder} | {gives} |\n")
    assert HEAD + "".join(rows) + "\n" in PAGE.read_text(), HEAD + "".join(rows)


def test_no_file_passes_for_weights(top: Path) -> None:
    """What is called weights is an adapter, with tensors, or the newest model."""
    from safetensors.torch import load_file

    for folder in FOLDERS.values():
        for path in (top / folder).rglob("*"):
            if path == top / FOLDERS["Transformers"] / "model.safetensors":
                model = torch.load(top / "full.pt", weights_only=True)
                assert same(load_file(path), {k: model[k] for k in model if k != "lm_head.weight"})
            elif path.suffix == ".safetensors":
                assert path.name == "adapter_model.safetensors"
                assert any(tensor.any() for key, tensor in load_file(path).items() if "_B" in key)
            elif path.name != "training_args.bin":
                assert path.suffix not in (".bin", ".ckpt", ".pt", ".distcp") or is_notice(path)


def test_what_was_written_over_a_snapshot_is_an_error(tmp_path: Path) -> None:
    """Who forgot casnap once has two states under one name: none of them is chosen."""

    def work() -> None:
        from casnap.integrations.accelerate import load_state, save_state
        from casnap.integrations.dcp import CasnapReader, CasnapWriter

        trainer(tmp_path / "run", language_model(0)).train()
        trainer(tmp_path / "run", language_model(1), plain=True).train()
        with pytest.raises(StateError, match="the Trainer itself has written there later"):
            trainer(tmp_path / "run", language_model(0), max_steps=3).train(True)

        accelerator, _ = accelerated()
        folder = tmp_path / "accelerate/step_2"
        save_state(accelerator, folder)
        accelerator.save_state(str(folder))
        with pytest.raises(StateError, match="the Accelerator itself has written there later"):
            load_state(accelerator, folder)

        folder = tmp_path / "dcp/step_2"
        dcp.save({"x": torch.zeros(5)}, storage_writer=CasnapWriter(folder))
        dcp.save({"x": torch.ones(5)}, checkpoint_id=folder)
        with pytest.raises(CheckpointException, match="DCP itself has written there later"):
            dcp.load({"x": torch.zeros(5)}, storage_reader=CasnapReader(folder))

    assert in_child(work) == 0


def test_notices_go_with_their_snapshot(top: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(top, copy)
    for folder in FOLDERS.values():
        snapshot = Snapshot(copy / folder)
        mine = copy / folder / "notes.txt"
        mine.write_text("mine")
        snapshot.store.delete(snapshot.name)
        assert mine.read_text() == "mine"
        left = {path.name for path in (copy / folder).iterdir()}
        assert not left & {"casnap-snapshot.json", "pytorch_model.bin", ".metadata"}
        assert not any(is_notice(copy / folder / name) for name in left)
