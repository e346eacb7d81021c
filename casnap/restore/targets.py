"""Find the tensors of a live state that can be filled in place, and their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias, TypeGuard

import torch

from casnap.format.entries import Entry, TensorEntry, unknown_in
from casnap.format.region import Region
from casnap.restore.key_state import KeyState
from casnap.restore.loaders import known_loader
from casnap.state.flatten import fill_targets
from casnap.state.overlap import conflicting_groups, end_address
from casnap.state.sharded import Shards, sharded_like, shards_of, without_torch_function
from casnap.state.tensors import (
    ORDINARY_TYPES,
    allocate,
    carrier_dtype,
    holds_no_values,
    is_float4,
    why_not_writable,
)

Part: TypeAlias = tuple[str, int]
"""The path of a target, and the number of one of its shards."""
_EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def targets_of(state: KeyState) -> dict[str, Shards]:
    """Return, by path, the tensors to read entries into: live tensors, or new ones like them.

    Live tensors are filled if the loader of the value is torch's or casnap's. Any other loader gets
    new tensors: it may overwrite the live tensors before it reads the new ones, or compare the two.
    A path that is not in the result gets a tensor when its entry is read.
    """
    targets = fill_targets(state.current, state.component)
    moments: dict[str, Shards] = {}
    if isinstance(state.stateful, torch.optim.Optimizer):
        moments = _moments(state.stateful, state.component, state.entries)
    is_module = isinstance(state.stateful, torch.nn.Module)
    is_known = known_loader(state.stateful) is not None
    tied: dict[object, Shards] = {}
    filled: dict[str, Shards] = {}
    for path, shards in targets.items():
        entry = state.entries.get(path)
        if entry is None:
            continue
        has_any_shape = is_module and is_extra_state(path)
        # A module that renames while it loads needs no memory on its device.
        is_rewritten = bool(state.rewritten) and path.startswith(state.rewritten)
        if is_rewritten and not shards.is_sharded:
            continue
        if has_any_shape and not shards.is_sharded:
            if not _is_plain(entry):
                continue
        elif not fits(entry, shards.value):
            continue
        is_kept = is_known and not has_any_shape and not is_rewritten
        filled[path] = shards if is_kept else _new(path, entry, shards, tied)
    return filled | {path: s for path, s in moments.items() if fits(state.entries[path], s.value)}


def is_extra_state(path: str) -> bool:
    """Whether a path of a module's state is extra state, which ``set_extra_state()`` loads."""
    # The first test alone rules out nearly all paths, of which a state may have many.
    return _EXTRA_STATE in path and path.split("/")[1].endswith(_EXTRA_STATE)


def _new(path: str, entry: Entry, live: Shards, tied: dict[object, Shards]) -> Shards:
    """Return a new tensor for an entry, on the device of the live one.

    Args:
        path: The path.
        entry: The entry.
        live: The live tensor. If it is sharded, the new one is sharded alike.
        tied: The new tensors so far, by live memory and stored bytes. A tensor that is tied to an
            earlier one gets the same new tensor.
    """
    assert isinstance(entry, TensorEntry)
    value = live.value
    if live.is_sharded:
        return _sharded_like(path, value)
    memory: tuple[object, ...] = (path,)  # tensors without elements share none
    if value.numel():
        memory = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
    content = (entry.dtype, entry.shape, entry.payload)
    if (memory, content) not in tied:
        tensor, shape = allocate(entry, value.device), entry.shape
        tied[memory, content] = Shards(shape, (Region.whole(shape),), (tensor,), tensor)
    return tied[memory, content]


def _moments(
    optimizer: torch.optim.Optimizer, component: str, entries: Mapping[str, Entry]
) -> dict[str, Shards]:
    """Return new moments, sharded like their parameters, for an optimizer that has none yet.

    Args:
        optimizer: The optimizer.
        component: The first component of the optimizer's paths.
        entries: The entries to read, by path.

    Returns:
        Path → moment, for sharded parameters alone.
    """
    moments = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for path, entry in entries.items():
        index, _, name = path.removeprefix(f"{component}/state/").partition("/")
        if not path.startswith(f"{component}/state/") or not index.isdigit() or "/" in name:
            continue
        parameter = parameters[int(index)] if int(index) < len(parameters) else None
        if parameter is None or name in optimizer.state.get(parameter, ()):
            continue
        if torch.nn.parameter.is_lazy(parameter):
            continue  # it gets its shape when its module is loaded
        if isinstance(entry, TensorEntry) and entry.shape == tuple(parameter.shape):
            shards = shards_of(path, parameter)
            if shards is not None:
                moments[path] = _sharded_like(path, parameter, carrier_dtype(entry))
    return moments


def _sharded_like(path: str, like: torch.Tensor, dtype: torch.dtype | None = None) -> Shards:
    """Return a new tensor, as shards, that is sharded like ``like``."""
    shards = shards_of(path, sharded_like(like, dtype))
    assert shards is not None
    return shards


def fits(entry: Entry, current: torch.Tensor) -> bool:
    """Whether a tensor has the shape of an entry, and a dtype to which the entry can be cast."""
    if type(current) not in ORDINARY_TYPES:
        with without_torch_function():
            return _fits(entry, current)
    return _fits(entry, current)  # of ordinary tensors there may be many


def _fits(entry: Entry, current: torch.Tensor) -> bool:
    return (
        _is_plain(entry)
        and tuple(current.shape) == entry.shape
        and is_float4(entry) == is_float4(current)
        and torch.can_cast(carrier_dtype(entry), current.dtype)
    )


def _is_plain(entry: Entry) -> TypeGuard[TensorEntry]:
    kinds = ("tensor", "parameter", "buffer")
    return isinstance(entry, TensorEntry) and entry.kind in kinds and entry.quantization is None


def why_unfit(entry: Entry, shape: tuple[int, ...], *memory: torch.Tensor) -> str:
    """Return why a tensor cannot be filled with an entry; empty if it can.

    Args:
        entry: The entry.
        shape: The shape of the tensor; if it is sharded, the global one.
        memory: The tensors that hold it, or this rank's shards of it.
    """
    if what := unknown_in(entry):
        return f"{what} in the snapshot, which this version does not know; update casnap"
    if not isinstance(entry, TensorEntry):
        return f"a tensor here, a value of kind {entry.kind} in the snapshot"
    if shape != entry.shape:
        return f"{shape} here, {entry.shape} in the snapshot"
    for tensor in memory:
        if tensor.is_meta:
            return "on the meta device here; call to_empty(device=...) first"
        if holds_no_values(tensor):
            return "fake here; make it outside of FakeTensorMode"
        if reason := why_not_writable(tensor):
            return reason
    return ""


def memory_of(targets: Mapping[str, Shards]) -> dict[Part, torch.Tensor]:
    """Return the memory of each target, by its path and the number of the shard."""
    return {
        (path, i): tensor
        for path, shards in targets.items()
        for i, tensor in enumerate(
            _extents(shards.tensors) if shards.is_sharded else shards.tensors
        )
    }


def conflicts(
    memory: Mapping[Part, torch.Tensor], entries: Mapping[str, Entry]
) -> list[list[Part]]:
    """Return the groups of tensors that share memory, but have different entries.

    Args:
        memory: The memory of all targets.
        entries: The entry that each target is to be filled with, by path.
    """

    def content(part: Part) -> object:
        entry = entries[part[0]]
        assert isinstance(entry, TensorEntry)
        return entry.dtype, entry.payload

    return conflicting_groups(memory, content)


def _extents(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield, for each storage of some shards, one tensor that spans all its shards."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for part in parts:
        by_storage.setdefault(part.untyped_storage().data_ptr(), []).append(part)
    for tensors in by_storage.values():
        lowest = min(tensors, key=torch.Tensor.data_ptr)
        stop = max(end_address(part) for part in tensors)
        yield lowest.as_strided(((stop - lowest.data_ptr()) // lowest.itemsize,), (1,))
