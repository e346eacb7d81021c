"""Weights beside a snapshot that are not its own are found, whoever has written them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from casnap import Snapshot, Store
from casnap.extending import WeightFiles

SIZE = 64 * 64 * 4 + 64 * 4
"""The bytes of a layer."""


@pytest.fixture
def taken(tmp_path: Path) -> Snapshot:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    other = torch.optim.AdamW(model.parameters())
    return Store(tmp_path / "run").take({"model": model, "optim": other}, "step_1")


def weights_of(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    return dict(snapshot.get_state_dict_for_key("model"))


def others(snapshot: Snapshot) -> list[str]:
    folder = Path(snapshot.path)
    paths = [p for p in sorted(folder.rglob("*")) if p.suffix in (".safetensors", ".bin")]
    paths += folder.glob("*.index.json")
    found = WeightFiles.others_than(snapshot.contents, paths)
    return [str(path.relative_to(folder)) for path in found]


@pytest.mark.parametrize("size", [SIZE, 1 << 30], ids=["shards", "one file"])
def test_those_that_were_put_are_its_own_in_a_copy_too(
    taken: Snapshot, tmp_path: Path, size: int
) -> None:
    WeightFiles(Path(taken.path)).put(taken.contents, max_shard_size=size)
    assert others(taken) == []
    # Other times, and no record that tells whose they are.
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copyfile)
    copy = Store(tmp_path / "copy", create=False)["step_1"]
    assert others(copy) == []
    folder = WeightFiles(Path(copy.path))
    put = {path.name for path in folder.folder.glob("model*")}
    assert folder.names() == put
    (folder.folder / "casnap-version.json").unlink()
    assert others(copy) == []


def test_a_copy_gives_up_its_weights_like_the_first_one(taken: Snapshot, tmp_path: Path) -> None:
    WeightFiles(Path(taken.path)).put(taken.contents, max_shard_size=SIZE)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copyfile)
    copy = tmp_path / "copy/step_1"
    WeightFiles(copy).remove()
    assert [path.name for path in copy.iterdir()] == ["casnap-snapshot.json"]


def other_bytes(weights: dict[str, torch.Tensor]) -> None:
    weights["1.bias"][-1] += 1


def other_dtype(weights: dict[str, torch.Tensor]) -> None:
    weights["1.bias"] = weights["1.bias"].bfloat16()


def missing(weights: dict[str, torch.Tensor]) -> None:
    del weights["1.bias"]


def exchanged(weights: dict[str, torch.Tensor]) -> None:
    weights["0.bias"], weights["1.bias"] = weights["1.bias"], weights["0.bias"]


def added(weights: dict[str, torch.Tensor]) -> None:
    weights["3.bias"] = torch.zeros(64)


@pytest.mark.parametrize("change", [other_bytes, other_dtype, missing, exchanged, added])
def test_other_weights_in_place_of_those_that_were_put(
    taken: Snapshot, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    folder = Path(taken.path)
    WeightFiles(folder).put(taken.contents)
    weights = weights_of(taken)
    save_file(weights, folder / "model.safetensors")
    assert others(taken) == []
    change(weights)
    save_file(weights, folder / "model.safetensors")
    assert others(taken) == ["model.safetensors"]


def test_a_shard_that_was_changed(taken: Snapshot) -> None:
    folder = Path(taken.path)
    WeightFiles(folder).put(taken.contents, max_shard_size=SIZE)
    shard = folder / "model-00002-of-00003.safetensors"
    weights = load_file(shard)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, shard)
    assert others(taken) == [shard.name]


def test_files_that_casnap_never_put_there(taken: Snapshot) -> None:
    folder = Path(taken.path)
    weights = weights_of(taken)
    torch.save(weights, folder / "pytorch_model.bin")
    assert others(taken) == []
    other_bytes(weights)
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert others(taken) == ["model.safetensors", "pytorch_model.bin"]


def test_an_adapter_has_some_of_the_tensors_under_its_own_names(taken: Snapshot) -> None:
    inner = Path(taken.path, "default")
    inner.mkdir()
    weights = {f"base.{name}": tensor for name, tensor in weights_of(taken).items() if "1." in name}
    save_file(weights, inner / "adapter_model.safetensors")
    assert others(taken) == []
    weights["base.1.bias"][0] += 1
    save_file(weights, inner / "adapter_model.safetensors")
    assert others(taken) == ["default/adapter_model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.bin"])
def test_those_of_another_form_are_known_by_their_bytes(
    taken: Snapshot, tmp_path: Path, name: str
) -> None:
    """As Transformers writes the experts of a mixture, and PEFT some adapters."""

    def write(folder: Path) -> None:
        folder.mkdir()
        save_file({"fused": torch.arange(9.0)}, folder / name)

    WeightFiles(Path(taken.path)).put(taken.contents, write=write)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copyfile)
    copy = Store(tmp_path / "copy", create=False)["step_1"]
    assert others(copy) == []
    file = Path(copy.path, name)
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert others(copy) == [name]


def test_those_of_another_snapshot(taken: Snapshot) -> None:
    """As after `cp -a` from one checkpoint to another, with the record and the times."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    later = taken.store.take({"model": model}, "step_2")
    WeightFiles(Path(later.path)).put(later.contents)
    for path in Path(later.path).iterdir():
        shutil.copy2(path, taken.path)
    assert others(taken) == ["model.safetensors"]
    assert others(later) == []
