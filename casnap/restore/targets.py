"""Which tensors of a live state can be filled in place, and their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from casnap.format.entries import Entry, TensorEntry
from casnap.restore.key_state import KeyState
from casnap.state.flatten import fill_targets
from casnap.state.overlap import conflicting_groups, end_address
from casnap.state.sharded import Shards, shards_of, without_torch_function
from casnap.state.tensors import carrier_dtype, is_float4


def targets_of(state: KeyState) -> dict[str, Shards]:
    """Return the tensors of a state that can be filled from the snapshot in place, by path."""
    targets = fill_targets(state.current, state.component)
    if isinstance(state.stateful, torch.optim.Optimizer):
        targets |= _moments(state.stateful, state.component, state.entries)
    return {
        path: _fresh(path, shards.value) if path.startswith(state.rewritten) else shards
        for path, shards in targets.items()
        # A module that renames while it loads could overwrite a tensor before reading it. It loads
        # new ones: they are made when they are read, but those that must be sharded here.
        if path in state.entries
        and (shards.is_sharded or not path.startswith(state.rewritten))
        and fits(state.entries[path], shards.value)
    }


def _moments(
    optimizer: torch.optim.Optimizer, component: str, entries: Mapping[str, Entry]
) -> dict[str, Shards]:
    """Return new moments, sharded like their parameters, for an optimizer that has none yet."""
    moments = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for path, entry in entries.items():
        index, _, name = path.removeprefix(f"{component}/state/").partition("/")
        if not path.startswith(f"{component}/state/") or not index.isdigit() or "/" in name:
            continue
        parameter = parameters[int(index)] if int(index) < len(parameters) else None
        if parameter is None or name in optimizer.state.get(parameter, ()):
            continue
        if isinstance(entry, TensorEntry) and entry.shape == tuple(parameter.shape):
            shards = shards_of(path, parameter)
            if shards is not None:
                moments[path] = _fresh(path, parameter, carrier_dtype(entry))
    return moments


def _fresh(path: str, like: torch.Tensor, dtype: torch.dtype | None = None) -> Shards:
    """Return a new tensor that is sharded like another one."""
    shards = shards_of(path, torch.zeros_like(like.detach(), dtype=dtype))
    assert shards is not None
    return shards


def fits(entry: Entry, current: torch.Tensor) -> bool:
    """Whether a tensor has the shape of an entry, and a dtype that this can be cast to."""
    with without_torch_function():
        return (
            isinstance(entry, TensorEntry)
            and entry.kind in ("tensor", "parameter", "buffer")
            and entry.quantization is None
            and tuple(current.shape) == entry.shape
            and is_float4(entry) == is_float4(current)
            and torch.can_cast(carrier_dtype(entry), current.dtype)
        )


def memory_of(targets: Mapping[str, Shards]) -> dict[tuple[str, int], torch.Tensor]:
    """Return the memory of all targets, by path and number of the shard."""
    return {
        (path, i): tensor
        for path, shards in targets.items()
        for i, tensor in enumerate(
            _extents(shards.tensors) if shards.is_sharded else shards.tensors
        )
    }


def conflicts(
    memory: Mapping[tuple[str, int], torch.Tensor], entries: Mapping[str, Entry]
) -> list[list[tuple[str, int]]]:
    """Return the groups of targets that share memory, but are not the same in the snapshot.

    Args:
        memory: The memory of all targets.
        entries: The entry that each of them is to be filled with.
    """

    def content(part: tuple[str, int]) -> object:
        entry = entries[part[0]]
        assert isinstance(entry, TensorEntry)
        return entry.dtype, entry.data

    return conflicting_groups(memory, content)


def _extents(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the memory of the parts of one tensor; parts in one storage are one span."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for part in parts:
        by_storage.setdefault(part.untyped_storage().data_ptr(), []).append(part)
    for tensors in by_storage.values():
        lowest = min(tensors, key=torch.Tensor.data_ptr)
        stop = max(end_address(part) for part in tensors)
        yield lowest.as_strided(((stop - lowest.data_ptr()) // lowest.itemsize,), (1,))
