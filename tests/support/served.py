"""Folders that pulls make, and what must hold of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from casnap import NewStore, StateDict, Store
from casnap.serving import verify

CHUNK = 64 << 10


def weights(step: int, *, count: int = 6) -> dict[str, torch.Tensor]:
    """Return weights of which a step changes two: one in part."""
    tensors = {
        f"layers.{i}": torch.arange(50_000, dtype=torch.float32).add(i).bfloat16()
        for i in range(count)
    }
    tensors["layers.1"][:100] = step
    tensors["bias"] = torch.full((5,), float(step))
    tensors["norm"] = torch.linspace(0, 1, 20_000)
    tensors["empty"] = torch.zeros(0, 3)
    return tensors


def store_at(path: Path | str, **options: Any) -> Store:
    return Store(path, create=NewStore(chunk_size=CHUNK), **options)


def take(store: Store, step: int, name: str | None = None, **tensors: torch.Tensor) -> None:
    """Take the weights of a step, and a file that says which."""
    state = {
        "model": StateDict(weights(step) | tensors),
        "files": StateDict({"config.json": json.dumps({"step": step})}),
        "progress": StateDict(step=step),
    }
    store.take(state, name or f"step_{step}", metadata={"step": step})


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the files in a folder, and check its index."""
    tensors: dict[str, torch.Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                assert name not in tensors
                tensors[name] = opened.get_tensor(name).clone()
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        shards = json.loads(index.read_text())["weight_map"]
        assert shards.keys() == tensors.keys()
        assert set(shards.values()) == {file.name for file in files}
    return tensors


def assert_served(folder: Path, step: int) -> None:
    """Check that a folder is the whole version of a step."""
    whole = folder.resolve()
    assert json.loads((whole / "config.json").read_text()) == {"step": step}
    assert json.loads((whole / "casnap-version.json").read_text())["metadata"] == {"step": step}
    found, expected = tensors_in(whole), weights(step)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert verify(folder) == []


def versions_of(folder: Path) -> list[str]:
    """Return what stands in the folder of versions, but for the notes of casnap."""
    names = {path.name for path in folder.with_name(f"{folder.name}.versions").iterdir()}
    return sorted(names - {".lock", ".called.json", ".turn"})


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.resolve().iterdir()}
