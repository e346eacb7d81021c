"""Import a checkpoint of torch_checkpointing: a file of ``torch.save`` for each item and rank.

Its DTensors were pickled with their mesh, so the files say which rank held which box. Its
``metadata.pkl``, which only items with a resharder have, says nothing more.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from casnap.errors import FileFormatError, UnsupportedTypeError
from casnap.files.from_torch import load_torch
from casnap.files.sources import SourceFiles, joined
from casnap.format.entries import TensorEntry
from casnap.format.names import component_of, rank_names
from casnap.format.region import Region
from casnap.runtime.threads import python_gc_paused
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.flatten import flatten
from casnap.state.overlap import same_bytes
from casnap.state.sharded import Shards, on_behalf_of
from casnap.state.tensors import Leaf

METADATA = "metadata.pkl"
# The prefix of a folder's name until all ranks have written their files.
_UNFINISHED = "tmp_"
_FILE = re.compile(r"(.+)_(0|[1-9][0-9]{0,8})\.pt", re.DOTALL)


def files_of_items(folder: Path) -> dict[str, dict[int, Path]]:
    """Return item → rank → file; an empty dict if the folder is no such checkpoint."""
    items: dict[str, dict[int, Path]] = {}
    for file in sorted(folder.iterdir()):
        if (match := _FILE.fullmatch(file.name)) is not None:
            items.setdefault(match[1], {})[int(match[2])] = file
    return items


def read_torch_checkpointing(folder: Path, key: str | None, rank: int | None) -> SourceFiles:
    """Return the leaves of a checkpoint: DTensors whole, other values as one rank has them.

    Args:
        folder: The checkpoint.
        key: Must be None, since the checkpoint's items become the keys.
        rank: The rank whose values to import where the ranks differ.

    Raises:
        FileFormatError: A file is missing, damaged or needs pickle; or the ranks have different
            values, and ``rank`` is None.
    """
    if key is not None:
        raise FileFormatError(f"{folder} has keys of its own; leave key= out")
    if folder.name.startswith(_UNFINISHED):
        raise FileFormatError(
            f"{folder} is a checkpoint that torch_checkpointing has not finished: it begins with "
            f"{_UNFINISHED}"
        )
    items = files_of_items(folder)
    if not items:
        raise FileFormatError(
            f"{folder} has {METADATA} of torch_checkpointing, but no file such as model_0.pt, as "
            "its default layout names them; load it with its CheckpointManager, and save it with "
            "casnap.integrations.torch_checkpointing.CasnapCheckpointManager"
        )
    leaves = {item: _leaves(folder, item, files, rank) for item, files in items.items()}
    return SourceFiles("torch_checkpointing", sum(map(len, items.values())), leaves)


def _leaves(folder: Path, item: str, files: Mapping[int, Path], rank: int | None) -> list[Leaf]:
    """Return the leaves of an item, as one rank has them, with DTensors joined from all ranks.

    Args:
        folder: The checkpoint.
        item: The name of the item.
        files: Rank → file.
        rank: The rank; None if all ranks must have the same values.
    """
    of_rank = min(files) if rank is None else rank
    if of_rank not in files:
        raise FileFormatError(f"{folder} has {item} of {rank_names([*files])}, not of rank {rank}")
    by_rank = {number: _leaves_of_file(file, item, number) for number, file in files.items()}
    leaves = []
    for path, leaf in by_rank[of_rank].items():
        of_ranks = {n: other[path] for n, other in by_rank.items() if path in other}
        if isinstance(leaf.content, Shards) and isinstance(leaf.entry, TensorEntry):
            leaf = joined(path, leaf.entry, _boxes(folder, leaf, of_ranks))
        leaves.append(leaf)
    if rank is None:
        _check_equal(folder, by_rank)
    return leaves


def _leaves_of_file(file: Path, item: str, rank: int) -> dict[str, Leaf]:
    import torch.distributed.tensor  # noqa: F401 - torch.load then knows DTensors

    # This logger warns that the process groups of a mesh do not exist; the import needs none.
    log = logging.getLogger("torch.distributed.device_mesh")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        state = load_torch(file)
        with without_torch_modes(), python_gc_paused(), on_behalf_of(rank):
            return {leaf.path: leaf for leaf in flatten(state, component_of(item))}
    except UnsupportedTypeError as e:
        raise FileFormatError(f"{file} cannot be imported: {e}") from e
    finally:
        log.setLevel(level)


def _boxes(
    folder: Path, leaf: Leaf, of_ranks: Mapping[int, Leaf]
) -> list[tuple[Region, torch.Tensor]]:
    """Return the boxes of a DTensor that the ranks hold, with their elements, each box once.

    Args:
        folder: The checkpoint, for messages.
        leaf: The DTensor's leaf on one rank.
        of_ranks: Its leaf on each rank that has it.

    Raises:
        FileFormatError: A rank has another tensor at this path.
    """
    parts: dict[Region, torch.Tensor] = {}
    for other in of_ranks.values():
        if not isinstance(other.content, Shards) or other.entry != leaf.entry:
            raise FileFormatError(f"{folder}: {leaf.path} is another tensor on another rank")
        # Replicas have the same box, and the dict keeps one of them.
        parts |= zip(other.content.boxes, other.content.tensors, strict=True)
    return list(parts.items())


def _check_equal(folder: Path, by_rank: Mapping[int, Mapping[str, Leaf]]) -> None:
    """Check that all ranks have the same values, except for the boxes of DTensors.

    Args:
        folder: The checkpoint, for messages.
        by_rank: Rank → path → leaf.

    Raises:
        FileFormatError: Two ranks have different values.
    """
    (first, wanted), *others = by_rank.items()
    for rank, leaves in others:
        for path in dict.fromkeys([*wanted, *leaves]):
            if path not in wanted or path not in leaves or not _same(wanted[path], leaves[path]):
                raise FileFormatError(
                    f"{folder}: the ranks {first} and {rank} have different values of {path}; say "
                    "which rank to import with rank=0 (--rank 0). DTensors are imported whole"
                )


def _same(one: Leaf, other: Leaf) -> bool:
    if one.entry != other.entry:
        return False
    a: Any = one.content
    b: Any = other.content
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bytes(a, b)
    return isinstance(a, Shards) or a == b
