"""Import safetensors: one file, or the shards of a model."""

from __future__ import annotations

from typing import Any

import torch

from casnap.errors import FileFormatError
from casnap.files.safetensors_header import HeaderTensor, read_header
from casnap.files.shards import Shards, check_names
from casnap.files.sources import MappedFile, SourceFiles, file_leaf
from casnap.format.names import component_of
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.flatten import containers_of
from casnap.state.tensors import Leaf


def read_safetensors(shards: Shards, key: str) -> SourceFiles:
    """Return the tensors of one or more safetensors files, as leaves below a key.

    Raises:
        FileFormatError: A header is wrong, or the files do not belong together.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, tuple[MappedFile, HeaderTensor]] = {}
    for file, names in shards.items():
        mapped = MappedFile(file)
        try:
            header = read_header(mapped.view)
        except FileFormatError as e:
            raise FileFormatError(f"{file} is not a safetensors file: {e}") from e
        check_names(file, {tensor.name for tensor in header.tensors}, names, {*tensors})
        tensors |= {tensor.name: (mapped, tensor) for tensor in header.tensors}
        metadata = {**header.metadata, **metadata}
    return SourceFiles("safetensors", len(shards), {key: _leaves(key, tensors)}, metadata)


def _leaves(key: str, tensors: dict[str, tuple[MappedFile, HeaderTensor]]) -> list[Leaf]:
    top = component_of(key)
    with without_torch_modes():
        stand_in = torch.empty(0)
        leaves = list(containers_of(dict.fromkeys(tensors, stand_in), top))
        for name, (file, t) in tensors.items():
            content = file.elements(t.start, t.shape, t.itemsize)
            leaves.append(file_leaf(f"{top}/{component_of(name)}", t.dtype, t.shape, content))
    return leaves
