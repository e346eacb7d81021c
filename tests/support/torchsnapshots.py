"""Folders as TorchSnapshot writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
