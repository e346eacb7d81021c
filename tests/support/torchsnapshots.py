"""Folders as TorchSnapshot writes them, and a state with each kind of value that it writes.

``python -m tests.support.torchsnapshots FOLDER`` has TorchSnapshot itself (0.1.0, with psutil,
aiofiles, pyyaml and importlib_metadata) write that state. ``tests/fixtures/torchsnapshot`` was
made so.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from casnap import StateDict

SEED = 7
"""What torch's generator was set to just before the folder was written."""


def tensor_at(location: str, shape: list[int], **more: Any) -> dict[str, Any]:
    return {
        "type": "Tensor", "location": location, "serializer": "buffer_protocol",
        "dtype": "torch.float32", "shape": shape, "replicated": False, "byte_range": None, **more,
    }  # fmt: skip


def torchsnapshot(folder: Path, manifest: dict[str, Any], world: int = 1, **files: bytes) -> Path:
    """Write a folder as TorchSnapshot 0.1.0 writes it."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    document = {"version": "0.1.0", "world_size": world, "manifest": manifest}
    (folder / ".snapshot_metadata").write_text(json.dumps(document, indent=2))
    return folder


def values_of_every_kind() -> dict[str, Any]:
    """Return each kind of value that TorchSnapshot writes: as text, as bytes, as an object."""
    ramp = torch.arange(24.0).reshape(4, 6)
    return {
        "int": -3,
        "float": 0.1,
        "str": "é",
        "bool": True,
        "bytes": b"\x00x",
        "none": None,
        "complex": 1 + 2j,
        "list": [1, [2, ramp[0]], []],
        "dict": {"a/b": {1: 2}, "empty": {}},
        "ordered": OrderedDict(x=ramp[1]),
        "tuple": (1, "two", torch.ones(2)),
        "set": {1, 2},
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "strided": ramp[::2, 1:3],
        "scalar": torch.tensor(2.5),
        "complex tensor": torch.ones(2, dtype=torch.complex64),
        "per tensor": torch.quantize_per_tensor(ramp, 0.5, 1, torch.qint8),
        "per channel": torch.quantize_per_channel(
            ramp, torch.ones(4), torch.zeros(4, dtype=torch.int64), 0, torch.quint8
        ),
        **{
            str(dtype): ramp.to(dtype)
            for dtype in (
                torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                torch.int8, torch.uint8, torch.bool,
            )
        },
    }  # fmt: skip


def app_of_every_kind(*, trained: bool) -> dict[str, Any]:
    """Return an app state of a model and all that belongs to it, but the random state."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 if trained else 9)
    if trained:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.arange(float(parameter.numel())).view_as(parameter))
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler.step()
    values = StateDict(values_of_every_kind() if trained else {})
    return {"model": model, "optim": optimizer, "scheduler": scheduler, "values": values}


def write_with_torchsnapshot(folder: Path) -> None:
    """Have TorchSnapshot itself write a state of every kind."""
    import torchsnapshot as real  # type: ignore[import-not-found,unused-ignore]

    app_state = app_of_every_kind(trained=True)
    torch.manual_seed(SEED)
    real.Snapshot.take(str(folder), {**app_state, "rng": real.RNGState()})


if __name__ == "__main__":
    write_with_torchsnapshot(Path(sys.argv[1]))
