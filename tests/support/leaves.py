"""States to leaves and back."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace

from casnap.format.entries import TensorEntry
from casnap.state.flatten import Leaf, flatten, inflate
from casnap.state.tensors import allocate


def leaves_of(value: Any, path: str = "m", **options: Any) -> dict[str, Leaf]:
    leaves = list(flatten(value, path, **options))
    by_path = {leaf.path: leaf for leaf in leaves}
    assert len(by_path) == len(leaves)
    return by_path


def carried(leaf: Leaf) -> Leaf:
    """Return a leaf as a store would give it back."""
    assert len(leaf.path.encode()) > 0  # every path is UTF-8
    if not isinstance(leaf.content, torch.Tensor):
        assert isinstance(leaf.content, bytes)
        assert leaf.entry.payload.nbytes == len(leaf.content)
        return leaf
    assert isinstance(leaf.entry, TensorEntry)
    return replace(leaf, content=allocate(leaf.entry).copy_(leaf.content))


def round_trip(value: Any, **options: Any) -> Any:
    leaves = leaves_of(value, **options)
    return inflate("m", {p: carried(leaf) for p, leaf in leaves.items()}, **options)
