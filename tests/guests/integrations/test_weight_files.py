"""Beside its snapshot, a checkpoint has weights that every program opens: whole, or none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import Snapshot, Store
from casnap.errors import SnapshotNotFoundError, StateError
from casnap.extending import WeightFiles
from casnap.integrations.notices import is_notice
from tests.support.bitwise import assert_same
from tests.support.cli_calls import COMMAND, invoke
from tests.support.faults import disk_full, in_child, kill
from tests.support.hf_trainer import loaded, stored, trainer_of, with_weights
from tests.support.launched import launched
from tests.support.mounts import fill, tmpfs

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]


def test_the_last_folder_is_as_the_trainer_saves_it(tmp_path: Path) -> None:
    def go() -> None:
        from transformers import AutoModelForCausalLM

        ours = trainer_of(tmp_path / "ours")
        ours.train()
        trainer_of(tmp_path / "plain", plain=True).train()
        last = tmp_path / "ours/checkpoint-8"
        assert_same(loaded(last), loaded(tmp_path / "plain/checkpoint-8"))
        model = AutoModelForCausalLM.from_pretrained(last)
        assert_same(dict(model.state_dict()), dict(ours.model.state_dict()))
        assert with_weights(tmp_path / "ours") == ["checkpoint-8"]
        # An older one says how to get its weights, and so it is done.
        older = tmp_path / "ours/checkpoint-6"
        with pytest.raises(KeyError, match=r"^'casnap: .* weights, `casnap pull FOLDER NEW`, with"):
            AutoModelForCausalLM.from_pretrained(older)
        invoke("pull", older, tmp_path / "new")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
        weights = Snapshot(older).get_state_dict_for_key("model")
        assert_same(dict(model.state_dict()), dict(weights))
        # It has all but the optimizer, with which a plain Trainer would go on anew.
        with pytest.raises(KeyError, match=r"^'casnap: This checkpoint is a snapshot of casnap"):
            trainer_of(tmp_path / "ours", plain=True).train(resume_from_checkpoint=True)

    assert in_child(go) == 0


@pytest.mark.parametrize("weights", ["last", "all", "none"])
def test_whose_folders_have_weights(tmp_path: Path, weights: str) -> None:
    """The best one too: it is what `load_best_model_at_end` keeps."""

    def go() -> None:
        trainer = trainer_of(
            tmp_path, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
            metric_for_best_model="loss", greater_is_better=True, learning_rate=1e-2,
            save_total_limit=3,
        )  # fmt: skip
        trainer.casnap_weights = weights
        trainer.train()
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")

    assert in_child(go) == 0
    kept = [f"checkpoint-{step}" for step in (2, 6, 8)]
    assert [s.name for s in Store(tmp_path, create=False).snapshots()] == kept
    expected = {"last": ["checkpoint-2", "checkpoint-8"], "all": kept, "none": []}
    assert with_weights(tmp_path) == expected[weights]
    for folder in expected[weights]:
        assert_same(loaded(tmp_path / folder), stored(Snapshot(tmp_path / folder)))


def test_two_processes_put_them_once(tmp_path: Path) -> None:
    assert launched(2, lambda: trainer_of(tmp_path, max_steps=4).train()) == [0, 0]
    assert with_weights(tmp_path) == ["checkpoint-4"]
    last = tmp_path / "checkpoint-4"
    assert_same(loaded(last), stored(Snapshot(last)))


def test_a_resume_never_trusts_them(tmp_path: Path) -> None:
    def train(name: str, *, resume: bool = False, steps: int = 4) -> None:
        trainer = trainer_of(tmp_path / name, max_steps=steps)
        trainer.train(resume_from_checkpoint=resume)
        torch.save(trainer.model.state_dict(), tmp_path / f"{name}.pt")

    def spoil() -> None:
        path = tmp_path / "run/checkpoint-4/model.safetensors"
        info = path.stat()
        path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))

    long = {"steps": 6}
    assert in_child(lambda: train("whole", **long)) == 0
    assert in_child(lambda: train("run", **long)) == 0
    shutil.rmtree(tmp_path / "run/checkpoint-6")
    Store(tmp_path / "run").delete("checkpoint-6")
    put_weights(Snapshot(tmp_path / "run/checkpoint-4"))
    spoil()
    assert in_child(lambda: train("run", resume=True, **long)) == 0
    ends = [torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("run", "whole")]
    assert_same(ends[0], ends[1])

    # Without the snapshot, they are no checkpoint.
    for snapshot in Store(tmp_path / "run").snapshots():
        snapshot.store.delete(snapshot.name)
    last = tmp_path / "run/checkpoint-6"
    assert (last / "model.safetensors").exists()
    with pytest.raises(SnapshotNotFoundError, match="holds no whole checkpoint"):
        trainer_of(tmp_path / "run").train(resume_from_checkpoint=str(last))


def test_a_resume_refuses_weights_that_somebody_else_has_put_there(tmp_path: Path) -> None:
    """As a plain Trainer with `save_only_model` does; copies of the run are none."""
    out, copy = tmp_path / "out", tmp_path / "copy"
    place = out / "checkpoint-4"

    def resume(folder: Path) -> None:
        trainer_of(folder, max_steps=5).train(resume_from_checkpoint=str(folder / place.name))

    def put() -> None:
        trainer_of(out, max_steps=4).train()
        shutil.copytree(out, copy, copy_function=shutil.copyfile)
        resume(copy)
        # As Transformers itself writes them, with the same bytes.
        again = {"max_steps": 4, "plain": True, "save_only_model": True}
        trainer_of(out, **again).train()
        resume(out)
        shutil.rmtree(out / "checkpoint-5")
        trainer_of(out, **again, learning_rate=1e-3).train()

    def is_refused() -> None:
        words = f"^{place}/model.safetensors: these are not the weights .* delete these files"
        with pytest.raises(StateError, match=words):
            resume(out)

    assert in_child(put) == 0
    assert launched(2, is_refused) == [0, 0]
    (place / "model.safetensors").unlink()
    assert in_child(lambda: resume(out)) == 0


def test_the_best_model_is_that_of_the_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error would end a training that is done."""

    def go() -> None:
        trainer = trainer_of(
            tmp_path, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, max_steps=4,
            metric_for_best_model="loss", greater_is_better=True, learning_rate=1e-2,
        )  # fmt: skip
        trainer.add_callback(replacing("checkpoint-2", tmp_path))
        trainer.train()
        assert "The best model is that of the snapshot" in caplog.text
        best = Snapshot(tmp_path / "checkpoint-2").get_state_dict_for_key("model")
        assert_same(dict(best), dict(trainer.model.state_dict()))

    assert in_child(go) == 0


def replacing(name: str, run: Path) -> Any:
    """Return a callback that replaces the weights of a checkpoint at the end of the training."""
    import transformers
    from safetensors.torch import save_file

    class Replacing(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == args.max_steps:
                weights = {key: value + 1 for key, value in loaded(run / name).items()}
                save_file(weights, run / name / "model.safetensors")

    return Replacing


def test_names_are_those_of_published_models(tmp_path: Path) -> None:
    """Transformers 5 fuses the experts of a mixture, and saves each as it was published."""

    def go() -> None:
        import transformers

        for plain in (False, True):
            trainer = trainer_of(tmp_path / str(plain), plain=plain, max_steps=2)
            torch.manual_seed(0)
            config = transformers.MixtralConfig(
                vocab_size=4096, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1, num_local_experts=2,
            )  # fmt: skip
            trainer.model = trainer.model_wrapped = transformers.MixtralForCausalLM(config)
            trainer.train()
        ours, plain_ones = (loaded(tmp_path / f"{plain}/checkpoint-2") for plain in (False, True))
        assert "model.layers.0.block_sparse_moe.experts.1.w2.weight" in ours
        assert_same(ours, plain_ones)
        remove_weights(tmp_path / "False/checkpoint-2")
        assert with_weights(tmp_path / "False") == []

    assert in_child(go) == 0


def test_a_subclass_that_writes_weights_in_its_own_form(tmp_path: Path) -> None:
    """As the Trainer of sentence-transformers: a folder for each module, under its own names."""

    def go() -> None:
        import transformers
        from safetensors.torch import load_file, save_file

        from casnap.integrations.transformers import CasnapTrainerMixin

        class Own(CasnapTrainerMixin, transformers.Trainer):  # type: ignore[misc]
            def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
                place, layers = Path(output_dir), dict(self.model.state_dict())
                (place / "head").mkdir(parents=True)
                save_file({"all": layers["transformer.wpe.weight"]}, place / "model.safetensors")
                save_file(
                    {"w": layers["transformer.ln_f.weight"]}, place / "head/model.safetensors"
                )
                (place / "config.json").write_text("{}")

        def trainer(steps: int) -> Any:
            return trainer_of(tmp_path, kind=Own, max_steps=steps)

        trainer(4).train()
        trained = trainer(6)
        trained.train(resume_from_checkpoint=True)
        layers = dict(trained.model.state_dict())
        last = tmp_path / "checkpoint-6"
        assert_same(
            load_file(last / "model.safetensors"), {"all": layers["transformer.wpe.weight"]}
        )
        inner = load_file(last / "head/model.safetensors")
        assert_same(inner, {"w": layers["transformer.ln_f.weight"]})
        older = tmp_path / "checkpoint-4"
        assert not list(older.rglob("*.safetensors"))
        assert (older / "config.json").exists()

    assert in_child(go) == 0


@pytest.mark.parametrize(
    ("until", "adapter"), [("room", None), ("ever", None), ("ever", "wrapped")]
)
def test_no_weights_without_the_notice_that_stops_a_plain_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: str, adapter: str | None
) -> None:
    """It would go on from the weights alone, with a fresh optimizer, and say nothing."""
    older, replace = tmp_path / "checkpoint-2/model.safetensors", os.replace

    def full(source: Any, target: Any) -> None:
        in_the_way = until == "ever" or older.exists()
        if str(target).endswith("checkpoint-4/scheduler.pt") and in_the_way:
            disk_full()
        replace(source, target)

    def go() -> None:
        monkeypatch.setattr(os, "replace", full)
        trainer_of(tmp_path, max_steps=4, adapter=adapter).train()

    def go_on_without_casnap() -> None:
        trainer = trainer_of(tmp_path, max_steps=6, adapter=adapter, plain=True)
        with pytest.raises((KeyError, ValueError), match=r"^'casnap|find a valid checkpoint"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))

    assert in_child(go) == 0
    snapshots = Store(tmp_path, create=False).snapshots()
    assert [s.name for s in snapshots] == ["checkpoint-2", "checkpoint-4"]
    assert in_child(go_on_without_casnap) == 0


# --- kills, links, and places that fail: on a snapshot alone, without a Trainer -----------------


@pytest.fixture
def taken(tmp_path: Path) -> list[Snapshot]:
    """Return two snapshots of layers, of which two are equal."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    store = Store(tmp_path / "run")
    first = store.take({"model": model}, "step_1")
    with torch.no_grad():
        model[0].weight.add_(1)
    return [first, store.take({"model": model}, "step_2")]


def put_weights(snapshot: Snapshot, **options: Any) -> None:
    WeightFiles(folder_of(snapshot)).put(snapshot.contents, **options)


def remove_weights(folder: Path) -> None:
    WeightFiles(folder).remove()


def folder_of(snapshot: Snapshot) -> Path:
    return Path(snapshot.path)


def test_equal_files_are_links(taken: list[Snapshot]) -> None:
    one, two = map(folder_of, taken)
    size = 64 * 64 * 4 + 64 * 4
    put_weights(taken[0], max_shard_size=size)
    put_weights(taken[1], max_shard_size=size, others=[one])
    assert_same(loaded(two), stored(taken[1]))
    links = {path.name: path.stat().st_nlink for path in two.glob("*.safetensors")}
    assert sorted(links.values()) == [1, 2, 2]
    remove_weights(one)
    assert_same(loaded(two), stored(taken[1]))
    assert [path.name for path in one.iterdir()] == ["casnap-snapshot.json"]


@contextmanager
def killed_at(number: int) -> Iterator[list[int]]:
    """Kill this process before the change of a folder that has a number."""
    count = [0]
    changes = ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "utime", "fsync")
    before = {name: getattr(os, name) for name in changes}

    def replaced(name: str) -> Any:
        def change(*args: Any, **kw: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                kill()
            return before[name](*args, **kw)

        return change

    for name in changes:
        setattr(os, name, replaced(name))
    try:
        yield count
    finally:
        for name in changes:
            setattr(os, name, before[name])


@pytest.mark.parametrize("shards", [1, 3])
def test_killed_anywhere_the_weights_are_whole_or_none(taken: list[Snapshot], shards: int) -> None:
    one, two = map(folder_of, taken)
    size = 64 * 64 * 4 + 64 * 4 if shards > 1 else "1GB"
    values = [stored(each) for each in taken]

    def read(folder: Path) -> dict[str, torch.Tensor] | None:
        """Return what there is; a set of files of which one cannot be loaded is none."""
        files = [*folder.glob("*.safetensors")]
        if not files or any(map(is_notice, files)):
            return None
        return loaded(folder)

    def save() -> None:
        put_weights(taken[1], max_shard_size=size, others=[one])
        remove_weights(one)

    for number in range(1, 200):
        put_weights(taken[0], max_shard_size=size)

        def until(number: int = number) -> None:
            with killed_at(number):
                save()

        how = in_child(until)
        for folder, value in zip((one, two), values, strict=True):
            if (found := read(folder)) is not None:
                assert_same(found, value)
        if how == 0:
            break
        assert read(one) is not None or read(two) is not None
        # The next save has both as they are to be, and leaves nothing of this one.
        save()
        assert read(one) is None
        assert_same(read(two), values[1])
        left = {path.name.split("-0")[0] for path in two.iterdir()}
        assert not left - {
            *("casnap-snapshot.json", "casnap-version.json", "casnap-chunks"),
            *("model", "model.safetensors", "model.safetensors.index.json"),
        }
        assert [path.name for path in one.iterdir()] == ["casnap-snapshot.json"]
    assert number > 10


def test_files_that_were_changed_stay(taken: list[Snapshot]) -> None:
    put_weights(taken[0])
    folder = folder_of(taken[0])
    (folder / "model.safetensors").write_bytes(b"mine")
    before = folder.stat().st_mtime_ns
    remove_weights(folder)
    assert (folder / "model.safetensors").read_bytes() == b"mine"
    assert folder.stat().st_mtime_ns == before
    assert not (folder / "casnap-version.json").exists()


def test_where_they_cannot_be_put_there_are_none(
    taken: list[Snapshot], caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(taken[0])
    (folder / "model.safetensors").mkdir()
    put_weights(taken[0])
    assert "is committed, but its weights cannot be put beside it" in caplog.text
    assert "casnap pull" in caplog.text
    assert {path.name for path in folder.iterdir()} == {"casnap-snapshot.json", "model.safetensors"}


def test_on_a_full_disk_older_weights_make_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tmpfs(tmp_path, "8M") as disk:
        store = Store(disk / "run")
        model = torch.nn.Linear(256, 256)
        one = store.take({"model": model}, "step_1")
        with torch.no_grad():
            model.weight.add_(1)
        two = store.take({"model": model}, "step_2")
        put_weights(one)
        fill(disk, leave=100_000)
        put_weights(two)
        assert caplog.text.count("is committed, but its weights cannot be put beside it") == 1
        assert [path.name for path in folder_of(two).iterdir()] == ["casnap-snapshot.json"]
        assert_same(loaded(folder_of(one)), stored(one))
        put_weights(two, make_room=lambda: remove_weights(folder_of(one)))
        assert caplog.text.count("cannot be put") == 1
        assert_same(loaded(folder_of(two)), stored(two))


def test_a_setting_that_there_is_not(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "out")
    trainer.casnap_weights = "newest"
    with pytest.raises(StateError, match="casnap_weights is one of 'last', 'all', 'none'; got 'ne"):
        trainer.train()
    shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.mark.parametrize("options", [[], ["--weights", "all"]])
def test_casnap_run_says_whose_folders_have_weights(tmp_path: Path, options: list[str]) -> None:
    """In the processes that a command starts, too. An option wins, and what a class sets itself.

    The program may import casnap before the Trainer, or after it.
    """
    file = tmp_path / "casnap.toml"
    file.write_text('weights = "none"' if options else 'weights = "all"')
    imports = [
        "from transformers import Trainer\n",
        "from casnap.integrations.transformers import CasnapTrainerMixin\n",
    ]
    script = "".join(imports[:: -1 if options else 1]) + (
        "from tests.support.hf_trainer import trainer_of\n"
        'class Own(CasnapTrainerMixin, Trainer): casnap_weights = "last"\n'
        "for kind in (Trainer, Own): trainer_of(kind.__name__, kind=kind, max_steps=4).train()"
    )
    command = ["sh", "-c", 'for again in 1; do "$@"; done', "sh", sys.executable, "-c", script]
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [*COMMAND, "run", "--config", file, *options, "--", *command],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert with_weights(tmp_path / "Trainer") == ["checkpoint-2", "checkpoint-4"]
    assert with_weights(tmp_path / "Own") == ["checkpoint-4"]


def test_install_says_whose_folders_have_weights(tmp_path: Path) -> None:
    def go() -> None:
        from casnap.integrations.transformers import install

        install(weights="none")
        install()
        trainer_of(tmp_path, plain=True, max_steps=2).train()

    assert in_child(go) == 0
    assert with_weights(tmp_path) == []
