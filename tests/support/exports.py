"""What an export of a snapshot holds, read by safetensors itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from casnap import Snapshot
from tests.support.bitwise import assert_same


def assert_exports(
    snapshot: Snapshot,
    folder: Path,
    path: str,
    wanted: Mapping[str, torch.Tensor],
    tied: Any = (),
) -> None:
    """Export the tensors below a path to a file in a folder, and compare what is in it.

    Args:
        snapshot: The snapshot.
        folder: Where the file is made.
        path: The path.
        wanted: The tensors, by name. Those that are tied may be missing in the file.
        tied: The module whose parameters are stored once.
    """
    from safetensors.torch import load_file

    file = folder / f"{snapshot.commit_id}.safetensors"
    snapshot.export(file, path=path, tied=tied)
    weights = load_file(file)
    assert weights.keys() == wanted.keys() if tied == () else weights.keys() < wanted.keys()
    for name, weight in weights.items():
        assert_same(weight, wanted[name], name)
