"""``casnap import`` and ``casnap export``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from casnap import StateDict, Store
from tests.support.cli_calls import document, failure, invoke


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"a": torch.randn(900), "b": torch.ones(2)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_in_and_out(file: Path, tmp_path: Path) -> None:
    there = tmp_path / "models/base/v1"
    dry = invoke("import", file, there, "--dry-run").stdout
    assert "2 tensors of 1 file (safetensors) would be imported\n" in dry
    assert not (tmp_path / "models").exists()
    output = invoke("import", file, there).stdout
    assert f"\n{there}: 2 tensors of 1 file (safetensors) imported\n3.6 kB, " in output
    out = tmp_path / "out.safetensors"
    output = invoke("export", there / "model", out).stdout
    assert output == f"{out}: 2 tensors, 3.6 kB, exported to 1 file\n"
    assert torch.equal(load_file(out)["a"], load_file(file)["a"])
    result = document("export", there, tmp_path / "sharded", "--max-shard-size", "1KB")
    assert (result["name"], result["entry"], result["tensor_count"]) == ("v1", None, 2)
    assert len(list((tmp_path / "sharded").iterdir())) == 3
    assert document("import", tmp_path / "sharded", tmp_path / "models/base/v2")["new_bytes"] < 999
    invoke("export", there, tmp_path / "s.pt")
    assert torch.load(tmp_path / "s.pt").keys() == {"model"}
    wrong = "a name that ends in .pt is for the format torch, not safetensors"
    assert wrong in failure("export", there, tmp_path / "t.pt", "--format", "safetensors")
    failure("export", there, tmp_path / "t.pt", "--max-shard-size", "1KB", status=2)
    assert not (tmp_path / "t.pt").exists()


def test_a_store_above(file: Path, tmp_path: Path) -> None:
    Store(tmp_path / "models").make()
    invoke("import", file, tmp_path / "models/run/7/v1", "--key", "net")
    invoke("export", tmp_path / "models/run/7/v1/net/a", tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors").keys() == {"a"}


def test_equal_tensors_are_named(tmp_path: Path) -> None:
    state = StateDict(a=torch.ones(90), b=torch.ones(90), c=torch.ones(90), step=1)
    Store(tmp_path / "store").take({"m": state}, "s")
    output = invoke("export", tmp_path / "store/s/m", tmp_path / "x", "--tensors-only").stdout
    assert "1 value left out\n" in output
    said = "b has the bytes of a; if they are tied, --tied b leaves it out (2 tensors like that)"
    assert output.count("warning: ") == output.count(f"warning: {said}") == 1
    invoke("export", tmp_path / "store/s/m", tmp_path / "y", "--tensors-only", "--tied", "b")
    assert load_file(tmp_path / "y").keys() == {"a", "c"}


def test_what_is_refused(file: Path, tmp_path: Path) -> None:
    there = tmp_path / "models/v1"
    assert "No such file" in failure("import", tmp_path / "no.pt", there)
    (tmp_path / "bad.safetensors").write_bytes(b"12345678{}")
    assert "is not a safetensors file" in failure("import", tmp_path / "bad.safetensors", there)
    assert not (tmp_path / "models").exists()
    invoke("import", file, there)
    message = failure("import", file, there)
    assert "holds a snapshot 'v1' already" in message
    assert "may also pass --overwrite\n" in message
    assert "exists already" in failure("export", there, file)
    assert "has no entry 'model/c'" in failure("export", there / "model/c", tmp_path / "x")
    assert "name a snapshot in it" in failure("export", tmp_path / "models", tmp_path / "x")
    assert "no snapshot 'v7'" in failure("export", tmp_path / "models/v7", tmp_path / "x")
    for wrong in (["--format", "torch", "--max-shard-size", "1GB"], ["--max-shard-size", "much"]):
        failure("export", there, tmp_path / "x", *wrong, status=2)
    assert not (tmp_path / "x").exists()


def test_all_snapshots_are_exported_and_an_export_goes_on(tmp_path: Path) -> None:
    store, out = Store(tmp_path / "store").make(), tmp_path / "left"
    for name in ("run1/a", "run1/b", "c"):
        store.take({"s": StateDict(w=torch.ones(10), name=name)}, name)
    assert "no --dry-run" in failure("export", store.uri, out, "--all", "--dry-run", status=2)
    assert not out.exists()
    invoke("export", f"{store.uri}/run1", out, "--all")
    assert sorted(path.name for path in out.iterdir()) == ["a.pt", "b.pt"]  # as the run names them
    (out / "b.pt").unlink()
    assert "1 snapshot there already" in invoke("export", f"{store.uri}/run1", out, "--all").stdout
    result = document("export", store.uri, tmp_path / "all", "--all")
    assert [each["name"] for each in result["exported"]] == ["run1/a", "run1/b", "c"]
    assert torch.load(tmp_path / "all/run1/b.pt")["s"]["name"] == "run1/b"
    assert document("export", store.uri, tmp_path / "all", "--all")["exported"] == []
    sharded = ("--all", "--tensors-only", "--format", "safetensors", "--max-shard-size", "1KB")
    result = document("export", store.uri, tmp_path / "sharded", *sharded)
    assert [file["file"] for file in result["exported"][2]["files"]]
    assert (tmp_path / "sharded/c").is_dir()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_many_are_imported_by_their_names_and_an_import_goes_on(tmp_path: Path) -> None:
    old, models = tmp_path / "old", tmp_path / "models"
    old.mkdir()
    base = torch.randn(50_000)
    torch.save({"model": {"w": base}, "step": 1}, old / "step_1.pt")
    save_file({"w": base}, old / "step_1.5.safetensors")
    dcp.save({"model": {"w": base}}, checkpoint_id=old / "step_2", no_dist=True)
    sources = sorted(old.iterdir())
    dry = invoke("import", *sources, models, "--dry-run").stdout
    assert dry.count("would be imported") == 3
    assert not models.exists()
    store = Store(models).make()
    invoke("import", sources[0], f"{models}/")  # as where a glob finds one
    output = invoke("import", *sources, models).stdout
    assert output.count("imported\n") == 2
    [said] = [line for line in output.splitlines() if "already" in line]
    assert said == f"{models}/step_1.5: there already, with the same content"
    assert sorted(s.name for s in store.snapshots()) == ["step_1", "step_1.5", "step_2"]
    assert sum(s.stats.new_bytes for s in store.snapshots()) < 1.1 * base.nbytes

    result = document("import", *sources, f"{models}/run1")
    assert [each["name"] for each in result["imported"]] == [
        f"run1/{name}" for name in ("step_1.5", "step_1", "step_2")
    ]
    result = document("import", *sources, f"{models}/run1")
    assert [len(result[key]) for key in ("imported", "present", "different")] == [0, 3, 0]
    assert invoke("import", *sources, models, "--overwrite").stdout.count("imported\n") == 3


def test_a_store_that_an_import_makes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name where no store is above is that of a store: the current folder becomes none."""
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.ones(3)}, "base.safetensors")
    dry = invoke("import", "base.safetensors", "models", "--dry-run").stdout.splitlines()
    assert dry[0] == f"{tmp_path}/models would become a new store"
    made = document("import", "base.safetensors", "models", "--dry-run")
    assert (made["made_store"], made["name"], made["commit"]) == (True, "base", None)
    lines = invoke("import", "base.safetensors", "models").stdout.splitlines()
    assert lines[0] == f"{tmp_path}/models is a new store"
    assert lines[1].startswith("models/base: 1 tensor ")
    assert {p.name for p in tmp_path.iterdir()} == {"base.safetensors", "models"}
    # The path of a store is read as such also where it is there, and it is told only once.
    save_file({"w": torch.ones(4)}, "v2.safetensors")
    lines = invoke("import", "v2.safetensors", "./models").stdout.splitlines()
    assert lines[0].startswith("./models/v2: ")
    assert document("import", "v2.safetensors", "models/v3")["made_store"] is False
    # In a store a name is one of its snapshots; a folder that is named becomes the store.
    monkeypatch.chdir("models")
    invoke("import", "../v2.safetensors", "v4")
    assert [s.name for s in Store(".").snapshots()] == ["base", "v2", "v3", "v4"]
    sources = ("../base.safetensors", "../v2.safetensors", "memory://told/models/")
    output = invoke("import", *sources, "--dry-run").stdout
    assert output.count("would become a new store") == 1
    assert invoke("import", *sources).stdout.count("is a new store") == 1
    lines = invoke("import", "../v2.safetensors", "../run/step_1").stdout.splitlines()
    assert lines[0] == f"{tmp_path}/run is a new store"


def test_what_cannot_be_imported_is_named_before_any_is_imported(tmp_path: Path) -> None:
    old, models = tmp_path / "old", tmp_path / "models"
    (old / "logs").mkdir(parents=True)
    (old / "README.md").write_text("# Checkpoints of the first run\n")
    for step in (1, 2):
        torch.save({"w": torch.ones(3)}, old / f"step_{step}.pt")
    whole = (old / "step_1.pt").read_bytes()
    (old / "step_3.pt").write_bytes(whole[: len(whole) // 2])
    message = failure("import", *sorted(old.iterdir()), models)
    named = ", ".join(str(old / name) for name in ("README.md", "logs", "step_3.pt"))
    assert f"nothing is imported, since 3 of 5 cannot be: leave out {named}." in message
    assert "README.md is neither a safetensors file nor one of torch.save" in message
    assert not models.exists()


def test_another_file_of_the_name_of_a_snapshot_is_not_passed_over(tmp_path: Path) -> None:
    old, other, models = tmp_path / "old", tmp_path / "other", Store(tmp_path / "models").make()
    weight = torch.randn(1_000_000)
    for folder in (old, other):
        folder.mkdir()
        save_file({"w": weight}, folder / "v1.safetensors", {"license": folder.name})
        save_file({"w": weight}, folder / "v2.safetensors")
        torch.save({"w": weight, "step": 1}, folder / "v3.pt")
    weight[-1] += 1
    torch.save({"w": weight, "step": 1}, other / "v3.pt")
    save_file({"w": weight}, other / "v4.safetensors")
    sources = sorted(other.iterdir())
    invoke("import", *sorted(old.iterdir()), models.uri)
    for options in (["--dry-run"], []):
        result = invoke("import", *sources, models.uri, *options, status=1)
        assert f"v2: there already, with the same content\n{models.uri}/v4: " in result.stdout
        pairs = ", ".join(f"{sources[i]} ({models.uri}/v{i + 1})" for i in (0, 2))
        assert f"holds something else: {pairs}; " in result.stderr
    result = json.loads(invoke("import", *sources, models.uri, "--json", status=1).stdout)
    assert result["present"] == [f"{models.uri}/v{i}" for i in (2, 4)]
    assert result["different"] == [f"{models.uri}/v{i}" for i in (1, 3)]
    assert torch.equal(models["v4"].read_object("model")["w"], weight)
    assert not torch.equal(models["v3"].read_object("w"), weight)


def test_many_that_would_be_one_are_refused_before_any_is_imported(tmp_path: Path) -> None:
    for name in ("a/v1.pt", "b/v1.pt"):
        (tmp_path / name).parent.mkdir()
        torch.save({"w": torch.ones(3)}, tmp_path / name)
    models = tmp_path / "models"
    message = failure("import", tmp_path / "a/v1.pt", tmp_path / "b/v1.pt", models)
    assert f"would both become {models}/v1" in message
    shards = [tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, shard in enumerate(shards):
        save_file({f"w{i}": torch.ones(3)}, shard)
    assert "name its folder" in failure("import", tmp_path / "a/v1.pt", *shards, models)
    torch.save({"w": torch.ones(3)}, tmp_path / "..pt")
    message = failure("import", tmp_path / "a/v1.pt", tmp_path / "..pt", f"{models}/run1")
    assert "has an empty, '.' or '..' component" in message
    assert not models.exists()


def test_a_folder_is_imported_by_its_own_name_however_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "old/logs").mkdir(parents=True)
    save_file({"w": torch.ones(3)}, tmp_path / "old/model.safetensors")
    (tmp_path / "best").symlink_to("old")
    store = Store(tmp_path / "models").make()
    invoke("import", tmp_path / "old/logs/..", tmp_path / "best", f"{store.uri}/run1")
    assert sorted(s.name for s in store.snapshots()) == ["run1/best", "run1/old"]
