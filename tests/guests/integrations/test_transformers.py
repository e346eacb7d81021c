"""The Trainer of Transformers saves and resumes through casnap, as its users know it."""

from __future__ import annotations

import inspect
import json
import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import Snapshot, Store
from casnap.errors import (
    EntryNotFoundError,
    SnapshotNotFoundError,
    StateError,
    StorageFullError,
)
from casnap.integrations.notices import is_notice
from tests.support.accelerate_fsdp import has_fsdp2
from tests.support.bitwise import assert_same
from tests.support.exports import assert_exports
from tests.support.faults import backend_faults, in_child, kill, start, wait
from tests.support.hf_trainer import FROZEN, trainer_of
from tests.support.launched import kill_all, launched
from tests.support.mounts import fill, tmpfs
from tests.support.pages import run_examples
from tests.support.trainer_contract import RunContract, TrainerContract
from tests.support.volumes import volume

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

GUIDE = Path(__file__).parents[3] / "docs/guides/transformers.md"


def run(
    folder: Path,
    end: Path,
    *,
    resume: bool | str | None = None,
    at: int | None = None,
    strike: Any = kill_all,
    **arguments: Any,
) -> None:
    """Train, and keep the weights and the state of the optimizer at the end."""
    import transformers

    class Striking(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == at:
                strike()

    trainer = trainer_of(folder, **arguments)
    trainer.add_callback(Striking)
    trainer.train(resume_from_checkpoint=resume)
    state = {"model": trainer.model.state_dict(), "optim": trainer.optimizer.state_dict()}
    torch.save({**state, "step": trainer.state.global_step}, end)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def trained(folder: Path, kill_at: int | None = None, **arguments: Any) -> dict[str, Any]:
    """Go on from the last checkpoint, if there is one; return the state at the end."""
    run(folder, end := Path(f"{folder}-{os.getpid()}"), resume="auto", at=kill_at, **arguments)
    state: dict[str, Any] = load(end)
    return state


class TestTrainer(TrainerContract):
    kill_at = 7
    kept = ("checkpoint-6", "checkpoint-8")
    least_bytes = most_new_bytes = FROZEN
    name = "checkpoint-2"
    nothing = ValueError

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        return trained(folder, kill_at)

    def load(self, folder: Path) -> object:
        elsewhere = trainer_of(folder.with_name("elsewhere"), max_steps=8)
        last = sorted(folder.glob("checkpoint-*"))[-1:]
        return elsewhere.train(resume_from_checkpoint=str(last[0]) if last else True)

    def check_last(self, snapshot: Snapshot, end: dict[str, Any], folder: Path) -> None:
        assert snapshot.metadata.user["loss"] > 0
        beside = {path.name for path in Path(snapshot.path).iterdir()}
        assert beside >= {"trainer_state.json", "config.json", "generation_config.json"}
        weights = {path for path in beside if path.endswith(".safetensors")}
        assert weights == {"model.safetensors"}
        model = trainer_of(folder / "out").model
        snapshot.restore({"model": model})
        assert_same(dict(model.state_dict()), dict(end["model"]))
        assert_exports(snapshot, folder, "model", end["model"], tied=model)

    def test_on_a_volume_that_gives_all_files_to_one_user(
        self, whole: Path, tmp_path: Path
    ) -> None:
        with volume(tmp_path / "volume", owner=4242) as disk:
            out = disk.path / "out"
            assert in_child(lambda: run(out, tmp_path / "end", at=7)) == -9
            assert in_child(lambda: run(out, tmp_path / "end", resume=True)) == 0
            assert self.names(out) == list(self.kept)
        assert_same(load(tmp_path / "end"), self.end(whole))


class TestTwoProcesses(RunContract):
    """With DDP; one process goes on with what two have saved."""

    ranks = 2
    kill_at = 5
    kept = TestTrainer.kept
    least_bytes = most_new_bytes = FROZEN

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        return trained(folder, kill_at)

    def check_last(self, snapshot: Snapshot, end: dict[str, Any], folder: Path) -> None:
        manifest = snapshot.get_manifest()
        assert manifest.is_global("1/model/transformer.wpe.weight")
        assert not manifest.is_global("1/rng/torch")
        out = folder / "alone"
        shutil.copytree(Path(snapshot.path).parent, out)
        assert in_child(lambda: run(out, folder / "end", resume=True, max_steps=9)) == 0


def test_ranks_that_begin_otherwise_than_rank_0_do_not_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a rank looks for the folder before another one has made it. And on CPUs."""
    # An Accelerate that is too old for FSDP2 refuses FSDP on CPUs itself.
    fsdp = {"fsdp": "full_shard"} if has_fsdp2() else {}

    def go() -> None:
        trainer = trainer_of(tmp_path, max_steps=2, **fsdp)
        resumes, rank = trainer.args.process_index == 0, trainer.args.process_index
        words = "resume_from_checkpoint= must be the same on all ranks: True on rank 0, False on"
        with pytest.raises(StateError, match=words):
            trainer.train(resume_from_checkpoint=resumes)
        said = [r.getMessage() for r in caplog.records if "trains without FSDP" in r.getMessage()]
        assert len(said) == (rank == 0 and bool(fsdp))

    assert launched(2, go) == [0, 0]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert in_child(lambda: run(folder / "out", folder / "end")) == 0
    return folder


@pytest.mark.parametrize("by_name", [False, True])
def test_resumes_from_a_name_or_the_last_whole_one(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, by_name: bool
) -> None:
    out = tmp_path / "out"
    assert in_child(lambda: run(out, tmp_path / "end", at=7)) == -9
    # One whose save was cut off is passed over, and refused if it is named.
    (out / "checkpoint-7").mkdir()
    (out / "checkpoint-7/trainer_state.json").write_text("{")
    with pytest.raises(SnapshotNotFoundError, match="cut off"):
        trainer_of(out).train(resume_from_checkpoint=str(out / "checkpoint-7"))
    # A snapshot that was copied from elsewhere has its small files in it.
    (out / "checkpoint-6/trainer_state.json").unlink()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    resume = "~/out/checkpoint-6" if by_name else True
    assert in_child(lambda: run(out, tmp_path / "end", resume=resume)) == 0
    assert_same(load(tmp_path / "end"), load(uninterrupted / "end"))
    assert not Path("~").exists()
    kept = {s.name for s in Store(out).snapshots()}
    assert "checkpoint-8" in kept
    assert kept == {path.name for path in out.glob("checkpoint-*")} - {"checkpoint-7"}


def test_a_resume_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"

    def go() -> None:
        caplog.set_level(logging.INFO, "casnap")
        trainer_of(out, max_steps=2).train(resume_from_checkpoint="auto")
        assert "resumes" not in caplog.text
        trainer_of(out, max_steps=4).train(resume_from_checkpoint="auto")
        assert f"resumes from {out / 'checkpoint-2'}, at step 2" in caplog.text

    assert in_child(go) == 0


def test_auto_begins_a_run_only_where_none_has_saved(tmp_path: Path) -> None:
    """A lost store, or checkpoints with NaN alone, are no reason to begin anew."""
    out = tmp_path / "runs/out"

    def again() -> None:
        with pytest.raises(SnapshotNotFoundError, match="the store of casnap is not there"):
            trainer_of(out).train(resume_from_checkpoint="auto")

    assert in_child(lambda: run(out, tmp_path / "end", resume="auto", max_steps=2)) == 0
    (out / "casnap-store").rename(tmp_path / "elsewhere")
    assert in_child(again) == 0


def test_small_files_that_were_edited_stay(
    uninterrupted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a user lowers the learning rate, or the best metric, before the run goes on."""
    out = tmp_path / "run/out"

    def resume() -> None:
        shutil.copytree(uninterrupted, tmp_path / "run")
        place = out / "checkpoint-6"
        state = json.loads((place / "trainer_state.json").read_text())
        (place / "trainer_state.json").write_text(json.dumps(state | {"best_metric": 0.125}))
        (place / "generation_config.json").unlink()
        trainer = trainer_of(out)
        trainer.train(resume_from_checkpoint=str(place))
        assert trainer.state.best_metric == 0.125
        assert (place / "generation_config.json").exists()
        said = [r.getMessage() for r in caplog.records if r.name == "casnap"]
        assert [text for text in said if "trainer_state.json" in text] == [
            f"{place}: files that are not as they were saved are used as they are (trainer_state"
            ".json); to have those of the snapshot, remove them before the run resumes"
        ]

    assert in_child(resume) == 0


def test_small_files_of_a_store_stay_in_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who can write to the store chooses their names."""
    from casnap.integrations.trainers import Value
    from casnap.integrations.transformers.small_files import put_back

    names = ["..", ".", "", "a/..", "../out", "a/b", ".bashrc", "a\nb", "casnap-snapshot.json"]
    files = {**dict.fromkeys(names, b"bad"), "config.json": b"good"}
    # Below another name, so that each of them is missing here.
    snapshot = Snapshot.take(tmp_path / "store/step", {"files": Value(files)})
    folder = tmp_path / "out"
    folder.mkdir()
    put_back(snapshot, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"config.json": b"good"}
    assert {path.name for path in tmp_path.iterdir()} == {"store", "out"}
    said = [record.getMessage() for record in caplog.records if record.name == "casnap"]
    assert len(said) == 1
    assert "'.bashrc'" in said[0]


def test_small_files_of_a_second_save_that_was_cut_off_are_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"

    def cut_off() -> None:
        with backend_faults(0, kill_all, names=["put_if_absent"]):
            trainer_of(out, max_steps=2, logging_steps=2).train()

    def resume() -> None:
        trainer = trainer_of(out, max_steps=3)
        trainer.train(resume_from_checkpoint=True)
        assert [entry.get("step") for entry in trainer.state.log_history[:2]] == [1, 2]
        assert (
            "files of a save that was cut off are replaced by those of the snapshot ("
            in caplog.text
        )

    assert in_child(lambda: run(out, tmp_path / "end", max_steps=2)) == 0
    assert in_child(cut_off) == -9
    assert in_child(resume) == 0


@pytest.mark.parametrize("leave", [0, 4096, 12288])
def test_a_full_disk_is_named_where_small_files_are_written(tmp_path: Path, leave: int) -> None:
    """By the Trainer, by Transformers and by torch, which raise other errors."""
    with tmpfs(tmp_path, "16M") as disk:
        out = disk / "out"

        def go() -> None:
            words = f"no space left to write the small files of {out}/checkpoint-4, .* then resume"
            with pytest.raises(StorageFullError, match=words):
                run(out, disk / "end", at=3, strike=lambda: fill(disk, leave), max_steps=4)

        assert in_child(go) == 0
        (disk / "fill").unlink()
        assert in_child(lambda: run(out, disk / "end", resume=True, max_steps=4)) == 0
        assert [s.name for s in Store(out).snapshots()] == ["checkpoint-2", "checkpoint-4"]


def test_a_thinned_checkpoint_is_not_resumed_with_a_fresh_optimizer(
    uninterrupted: Path, tmp_path: Path
) -> None:
    shutil.copytree(uninterrupted, tmp_path / "run")
    out = tmp_path / "run/out"
    assert Store(out).thin({"optimizer": 1})
    older = sorted(out.glob("checkpoint-*"))[0]
    trainer = trainer_of(out)
    with pytest.raises(EntryNotFoundError, match="thinned, and has lost optimizer"):
        trainer.train(resume_from_checkpoint=str(older))


def test_saves_before_preemption(tmp_path: Path) -> None:
    import transformers

    if not hasattr(transformers.TrainingArguments, "enable_jit_checkpoint"):
        pytest.skip("this Transformers does not save before a preemption")

    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    long: dict[str, Any] = {"max_steps": 100_000, "save_steps": 100_000, "dropout": 0.0}
    long |= {"lr_scheduler_type": "constant", "logging_steps": 100_000}
    out, end = tmp_path / "out", tmp_path / "end"
    pid = start(lambda: run(out, end, at=3, strike=terminate, enable_jit_checkpoint=True, **long))
    assert wait(pid) == 0
    (snapshot,) = Store(out, create=False).snapshots()
    step = int(snapshot.name.removeprefix("checkpoint-"))
    # The Trainer may save before the optimizer's step, and ends the step that it is in.
    assert load(end)["step"] - step in (0, 1)
    beside = json.loads((out / snapshot.name / "trainer_state.json").read_text())
    assert beside["global_step"] == step
    more = {**long, "max_steps": step + 3}
    assert in_child(lambda: run(out, end, resume=True, **more)) == 0
    assert in_child(lambda: run(tmp_path / "whole", tmp_path / "whole-end", **more)) == 0
    assert_same(load(end)["optim"]["state"], load(tmp_path / "whole-end")["optim"]["state"])


def test_the_best_model_is_kept_and_loaded(tmp_path: Path) -> None:
    def train() -> None:
        trainer = trainer_of(
            tmp_path / "out", eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
            metric_for_best_model="loss", greater_is_better=True, learning_rate=1e-2,
            save_total_limit=1,
        )  # fmt: skip
        trainer.train()
        best = trainer.state.best_model_checkpoint
        assert best.endswith("checkpoint-2"), best  # the loss only falls
        saved = Snapshot(best).get_state_dict_for_key("model")
        assert_same(dict(saved), dict(trainer.model.state_dict()))
        trainer.save_model(tmp_path / "best")

    assert in_child(train) == 0
    assert {s.name for s in Store(tmp_path / "out").snapshots()} == {"checkpoint-2", "checkpoint-8"}
    assert (tmp_path / "best/model.safetensors").exists()


def test_goes_on_from_the_checkpoints_of_the_trainer(uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert in_child(lambda: run(out, tmp_path / "end", at=5, plain=True)) == -9
    assert (out / "checkpoint-4/model.safetensors").exists()
    assert in_child(lambda: run(out, tmp_path / "end", resume=True)) == 0
    assert_same(load(tmp_path / "end"), load(uninterrupted / "end"))
    assert not (out / "checkpoint-4").exists()


def adapter_of(trainer: Any) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    return {k: v.detach().clone() for k, v in get_peft_model_state_dict(trainer.model).items()}


@pytest.mark.parametrize("how", ["wrapped", "two", "added"])
def test_an_adapter_stands_beside_its_snapshot_as_peft_saves_it(tmp_path: Path, how: str) -> None:
    if how == "added":
        from transformers.integrations import peft

        try:
            peft.check_peft_version(min_version=peft.MIN_PEFT_VERSION)
        except ValueError:
            pytest.skip(f"this Transformers adds adapters with PEFT {peft.MIN_PEFT_VERSION} alone")

    def train(name: str, **arguments: Any) -> Any:
        trainer = trainer_of(tmp_path / name, adapter=how, max_steps=4, **arguments)
        trainer.train()
        return trainer

    def both() -> None:
        from safetensors.torch import load_file

        ours, theirs = train("ours"), train("theirs", plain=True)
        assert_same(adapter_of(ours), adapter_of(theirs))
        own, plain = (tmp_path / name / "checkpoint-4" for name in ("ours", "theirs"))
        weights = {path.relative_to(plain) for path in plain.rglob("*.safetensors")}
        assert weights == {path.relative_to(own) for path in own.rglob("*.safetensors")}
        assert len(weights) == 1 + (how == "two")
        for name in weights:
            assert_same(load_file(own / name), load_file(plain / name))
            assert load_file(own / name)
        assert not list(own.rglob("*.partial"))
        if how == "added":
            return
        import peft

        base = trainer_of(tmp_path / "base").model
        loaded = peft.PeftModel.from_pretrained(base, own)
        assert_same(peft.get_peft_model_state_dict(loaded), adapter_of(theirs))

    assert in_child(both) == 0


def test_an_adapter_that_somebody_has_replaced_is_refused(tmp_path: Path) -> None:
    import transformers

    class Saving(transformers.TrainerCallback):
        """Saves the adapter once more, in a folder of its own, as users of PEFT do."""

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            place = Path(args.output_dir, f"checkpoint-{state.global_step}", "again")
            more["model"].save_pretrained(place)

    def train(steps: int, *, resume: bool) -> None:
        trainer = trainer_of(tmp_path, adapter="two", max_steps=steps)
        trainer.add_callback(Saving)
        trainer.train(resume_from_checkpoint=resume)

    def replaced() -> None:
        from safetensors.torch import load_file, save_file

        file = tmp_path / "checkpoint-4/other/adapter_model.safetensors"
        save_file({key: value + 1 for key, value in load_file(file).items()}, file)
        with pytest.raises(StateError, match=f"^{file}: these are not the weights of the snapsho"):
            train(4, resume=True)

    assert in_child(lambda: train(2, resume=False)) == 0
    assert in_child(lambda: train(4, resume=True)) == 0
    assert in_child(replaced) == 0
    # An adapter beside a snapshot that is gone is no checkpoint of the Trainer's own.
    shutil.rmtree(tmp_path / "checkpoint-4/again")
    shutil.rmtree(tmp_path / "checkpoint-4/other")
    Store(tmp_path).delete("checkpoint-4")
    assert (tmp_path / "checkpoint-4/adapter_model.safetensors").exists()
    with pytest.raises(SnapshotNotFoundError, match="holds no whole checkpoint"):
        trainer_of(tmp_path, adapter="two").train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-4")
        )


def test_a_save_with_an_adapter_that_is_killed_is_passed_over(tmp_path: Path) -> None:
    """Killed right before and right after the commit."""

    def train(name: str, *, resume: bool = False, **arguments: Any) -> None:
        (tmp_path / "tmp").mkdir(exist_ok=True)
        tempfile.tempdir = str(tmp_path / "tmp")
        run(
            tmp_path / name, tmp_path / f"{name}-end", resume=resume, adapter="wrapped", **arguments
        )

    def killed(name: str, when: str) -> None:
        from casnap.integrations import with_deepspeed

        taken = with_deepspeed.take

        def take(engine: Any, state: Any, path: Path, *args: Any) -> Any:
            if path.name == "checkpoint-6" and when == "before":
                kill()
            result = taken(engine, state, path, *args)
            if path.name == "checkpoint-6":
                kill()
            return result

        with_deepspeed.take = take
        train(name)

    def weights(name: str) -> list[Path]:
        return [*(tmp_path / name).glob("checkpoint-6/*.safetensors")]

    assert in_child(lambda: train("whole")) == 0
    for when, last in (("before", 4), ("after", 6)):
        assert in_child(lambda when=when: killed(when, when)) == -9
        assert (tmp_path / when / "checkpoint-6/adapter_config.json").exists()
        assert not weights(when)
        kept = [s.name for s in Store(tmp_path / when, create=False).snapshots()]
        assert kept[-1] == f"checkpoint-{last}"
        assert [*(tmp_path / when).glob("checkpoint-*/casnap-files/*.safetensors")]
        assert in_child(lambda when=when: train(when, resume=True)) == 0
        assert_same(load(tmp_path / f"{when}-end"), load(tmp_path / "whole-end"))
        assert not [*(tmp_path / when).glob("checkpoint-*/casnap-files")]
    assert not [*(tmp_path / "tmp").iterdir()]


def test_a_save_shows_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert in_child(lambda: trainer_of(tmp_path, max_steps=2).train()) == 0
    assert "Writing model shards" not in capfd.readouterr().err


def test_a_checkpoint_that_is_saved_again_has_no_weights_of_before(tmp_path: Path) -> None:
    def go() -> None:
        trainer_of(tmp_path / "out", plain=True, max_steps=2).train()
        trainer = trainer_of(tmp_path / "out", max_steps=2)
        trainer.casnap_weights = "none"
        trainer.train()

    assert in_child(go) == 0
    folder = tmp_path / "out/checkpoint-2"
    assert (folder / "config.json").exists()
    assert not (folder / "model.safetensors").exists()
    assert is_notice(folder / "optimizer.pt")
    assert is_notice(folder / "scheduler.pt")


def test_trials_share_the_store_of_the_output_dir(tmp_path: Path) -> None:
    """A search of hyperparameters has a folder for each trial."""

    def search() -> None:
        for trial in range(2):
            trainer = trainer_of(tmp_path / "out", max_steps=2)
            trainer._get_output_dir = lambda trial, run=trial: str(tmp_path / f"out/run-{run}")
            trainer.train()

    assert in_child(search) == 0
    first, second = Store(tmp_path / "out", create=False).snapshots()
    assert [first.name, second.name] == ["run-0/checkpoint-2", "run-1/checkpoint-2"]
    assert second.stats.new_bytes < first.stats.new_bytes // 4
    assert Snapshot(tmp_path / "out/run-1/checkpoint-2").commit_id == second.commit_id


class Extra:
    """A mixin of a tool: it has a file of its own, and reads random states by itself."""

    number = 0

    def _save_checkpoint(self, *args: Any) -> None:
        super()._save_checkpoint(*args)  # type: ignore[misc]
        self.number += 1
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")  # type: ignore[attr-defined]
        (folder / "extra.json").write_text(json.dumps(self.number))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            self.number = json.loads(Path(checkpoint, "extra.json").read_text())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and Path(checkpoint, "rng_state.pth").exists():
            raise AssertionError(checkpoint)


@pytest.mark.parametrize("installed", [False, True])
def test_what_a_subclass_adds_is_saved_and_loaded(
    uninterrupted: Path, tmp_path: Path, *, installed: bool
) -> None:
    def go(at: int | None = None) -> Any:
        import transformers

        from casnap.integrations.transformers import CasnapTrainerMixin, install

        class Tool(Extra, transformers.Trainer):
            pass

        class Ours(CasnapTrainerMixin, Tool):
            pass

        if installed:
            install()
        kind = Tool if installed else Ours
        run(tmp_path / "out", tmp_path / "end", at=at, resume=at is None, kind=kind)

    assert in_child(lambda: go(7)) == -9
    # A snapshot that was copied from elsewhere has it too.
    (tmp_path / "out/checkpoint-6/extra.json").unlink()
    assert in_child(go) == 0
    assert_same(load(tmp_path / "end"), load(uninterrupted / "end"))
    assert json.loads((tmp_path / "out/checkpoint-8/extra.json").read_text()) == 4


def test_a_load_that_a_subclass_replaces_gets_what_is_no_snapshot(tmp_path: Path) -> None:
    """Whichever way the checkpoint is given."""

    def go() -> None:
        import transformers

        from casnap.integrations.transformers import CasnapTrainerMixin

        class Own(CasnapTrainerMixin, transformers.Trainer):  # type: ignore[misc]
            def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
                own.append(resume_from_checkpoint)

        own: list[Any] = []
        trainer = trainer_of(tmp_path, kind=Own, max_steps=2)
        trainer.train()
        place, model = tmp_path / "checkpoint-2", trainer.model
        stored = dict(Snapshot(place).get_state_dict_for_key("model"))
        for args, named in (
            ([str(place), model], {}),
            ([place], {"model": model}),
            ([], {"model": model, "resume_from_checkpoint": str(place)}),
        ):
            torch.nn.init.zeros_(model.transformer.wpe.weight)
            trainer._load_from_checkpoint(*args, **named)
            assert_same(dict(model.state_dict()), stored)
        assert not own
        trainer._load_from_checkpoint(model=model, resume_from_checkpoint=str(tmp_path / "other"))
        assert own == [str(tmp_path / "other")]

    assert in_child(go) == 0


def test_what_casnap_replaces_has_the_arguments_of_the_trainers_own() -> None:
    import transformers

    from casnap.integrations.transformers.storing import StoringTrainer

    for name, method in vars(StoringTrainer).items():
        if inspect.isfunction(method):
            theirs = inspect.signature(getattr(transformers.Trainer, name)).parameters
            ours = inspect.signature(method).parameters
            assert [*ours] == [*theirs][: len(ours)], name
            assert all(
                theirs[more].default is not inspect._empty for more in [*theirs][len(ours) :]
            )


def test_a_subclass_that_saves_by_itself_is_refused(tmp_path: Path) -> None:
    import transformers

    class Alone(transformers.Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            torch.save(model.state_dict(), tmp_path / "mine")

    class Sometimes(transformers.Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if self.args.seed == 1:
                super()._save_checkpoint(model, trial)

    def go() -> None:
        from casnap.integrations.transformers import install

        install()
        with pytest.raises(StateError, match=r"Alone._save_checkpoint saves without calling"):
            trainer_of(tmp_path / "out", kind=Alone).train()
        assert not [*(tmp_path / "out").glob("checkpoint-*")]
        with pytest.raises(StateError, match=r"Sometimes has saved .*checkpoint-2 by itself"):
            trainer_of(tmp_path / "out", kind=Sometimes).train()

    assert in_child(go) == 0


def test_with_install_the_newest_checkpoint_that_a_tool_names_may_be_cut_off(
    uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / "checkpoint-7").mkdir(parents=True)
    shutil.copytree(uninterrupted / "out", out, dirs_exist_ok=True)
    Store(out).delete("checkpoint-8")
    shutil.rmtree(out / "checkpoint-8", ignore_errors=True)

    def go() -> None:
        from casnap.integrations.transformers import install

        lines: list[str] = []
        install(lines.append)
        run(out, tmp_path / "end", resume=str(out / "checkpoint-7"), plain=True)
        assert lines == [
            f"the checkpoints of Trainer in {out} are snapshots",
            f"Trainer resumes from {out / 'checkpoint-6'}, at step 6",
        ]

    assert in_child(go) == 0
    assert_same(load(tmp_path / "end"), load(uninterrupted / "end"))


@pytest.mark.parametrize("installed", [False, True])
def test_a_run_whose_first_save_was_cut_off_begins_anew(tmp_path: Path, *, installed: bool) -> None:
    out = tmp_path / "out"
    (out / "checkpoint-2").mkdir(parents=True)

    def go() -> None:
        from casnap.integrations.transformers import install

        if installed:
            install()
        resume = str(out / "checkpoint-2") if installed else True
        run(out, tmp_path / "end", resume=resume, plain=installed)

    assert in_child(go) == 0
    assert "checkpoint-8" in Store(out)
    # A checkpoint that was whole is not given up: its store may be elsewhere for a while.
    shutil.rmtree(out / "casnap-store")
    assert in_child(go) != 0


def test_what_is_refused(tmp_path: Path) -> None:
    import transformers

    from casnap.integrations.transformers import CasnapTrainerMixin

    with pytest.raises(TypeError, match="before Trainer"):

        class Late(transformers.Trainer, CasnapTrainerMixin):
            pass

    trainer = trainer_of(tmp_path / "out")
    trainer.args.push_to_hub = True
    words = "Mixin does not support pushing checkpoints to the hub"
    with pytest.raises(StateError, match=rf'{words} [(].*; take hub_strategy="end"[)]$'):
        trainer.train()
    shutil.rmtree(tmp_path / "out", ignore_errors=True)

    trainer = trainer_of(tmp_path / "out")
    trainer.args.output_dir = "s3://bucket/out"
    with pytest.raises(StateError, match="no folder of this machine"):
        trainer.train()

    class Wrapped(torch.Tensor):  # as torchao has them
        def __tensor_flatten__(self) -> None: ...

        @staticmethod
        def __tensor_unflatten__() -> None: ...

    trainer = trainer_of(tmp_path / "out")
    weight = torch.zeros(2).as_subclass(Wrapped)
    trainer.model.register_parameter("extra", torch.nn.Parameter(weight, requires_grad=False))
    with pytest.raises(StateError, match=r"does not support parameters of the type Wrapped$"):
        trainer.train()
    shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_child(lambda: run_examples(GUIDE, tmp_path / "work", monkeypatch)) == 0
