"""Importing safetensors: one file, or shards with their index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from casnap.errors import FileFormatError
from casnap.files.safetensors_header import MOST_HEADER, HeaderTensor, read_header
from casnap.files.sources import MappedFile, SourceFiles, file_leaf, path_below
from casnap.format.decoding import json_decoder
from casnap.format.names import component_of
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.flatten import containers_of
from casnap.state.tensors import Leaf


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


def read_safetensors(path: Path, key: str) -> SourceFiles:
    """Return what a file holds, or all the shards that an index names.

    Raises:
        FileFormatError: A header lies, or a shard is missing.
    """
    expected = _shards(path) if path.name.endswith(".json") else {path: None}
    metadata: dict[str, Any] = {}
    tensors: dict[str, tuple[MappedFile, HeaderTensor]] = {}
    for file, names in expected.items():
        mapped = MappedFile(file)
        try:
            header = read_header(mapped.view)
        except FileFormatError as e:
            raise FileFormatError(f"{file} is not a safetensors file: {e}") from e
        tensor_names = {tensor.name for tensor in header.tensors}
        if names is not None and (odd := tensor_names ^ names):
            raise FileFormatError(
                f"{path.name} and {file} disagree on {min(odd)!r:.200}: only one of them has it"
            )
        tensors |= {tensor.name: (mapped, tensor) for tensor in header.tensors}
        metadata = {**header.metadata, **metadata}
    return SourceFiles("safetensors", len(expected), {key: _leaves(key, tensors)}, metadata)


def _shards(index: Path) -> dict[Path, set[str] | None]:
    """Return the files that an index names, and the names of the tensors in each."""
    if index.stat().st_size > MOST_HEADER:
        raise FileFormatError(f"{index} is too long to be the index of safetensors shards")
    text = index.read_bytes()
    try:
        weights = json_decoder(_ShardIndex).decode(text).weight_map
    except (ValueError, RecursionError) as e:
        raise FileFormatError(f"{index} is not an index of safetensors shards: {e}") from e
    shards: dict[str, set[str]] = {}
    for name, file in weights.items():
        shards.setdefault(file, set()).add(name)
    if not shards:
        raise FileFormatError(f"{index} names no tensors")
    # The cache of the Hugging Face hub is made of links.
    return {path_below(index.parent, file, index.name, links=True): n for file, n in shards.items()}


def _leaves(key: str, tensors: dict[str, tuple[MappedFile, HeaderTensor]]) -> list[Leaf]:
    top = component_of(key)
    with without_torch_modes():
        stand_in = torch.empty(0)
        leaves = list(containers_of(dict.fromkeys(tensors, stand_in), top))
        for name, (file, t) in tensors.items():
            content = file.elements(t.start, t.shape, t.itemsize)
            leaves.append(file_leaf(f"{top}/{component_of(name)}", t.dtype, t.shape, content))
    return leaves
