"""Read one entry, everything below a container, part of a tensor, or many of these at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch

from casnap.errors import MismatchError, with_article
from casnap.format.entries import ContainerEntry, Entry, Payload, TensorEntry, check_known
from casnap.format.region import Region
from casnap.restore.indexing import Index, select
from casnap.restore.loading import Loading, naming, with_item_axis
from casnap.runtime.progress import Progress
from casnap.runtime.torch_modes import fill, without_torch_modes
from casnap.runtime.units import Size
from casnap.state.devices import synchronize
from casnap.state.overlap import fill_shared_memory, overlaps_itself
from casnap.state.parts import holds_parts, why_not_whole
from casnap.state.tensors import (
    Leaf,
    allocate,
    assemble,
    check_tensor,
    holds_no_values,
    is_fillable,
    is_float4,
    itemsize_of,
    why_not_writable,
)
from casnap.storage import Contents, Entries


@without_torch_modes()
def read_object(
    contents: Contents,
    path: str,
    obj_out: Any = None,
    memory_budget_bytes: Size | None = None,
    index: Index | None = None,
    *,
    allow_pickle: bool = False,
) -> Any:
    """Read one entry, everything below a container, or part of a tensor.

    Args:
        contents: The snapshot.
        path: The path of the entry.
        obj_out: A tensor to fill; None for new memory.
        memory_budget_bytes: The most bytes of buffers to read with.
        index: The elements of a tensor to read; None for all.
        allow_pickle: Whether to unpickle pickled values. Only for a trusted store.

    Raises:
        EntryNotFoundError: There is no such path, or it names several ranks' own entries.
        MismatchError: ``obj_out`` does not have the shape of the object that is read.
        DamagedError: A chunk is missing or damaged.
        UnsupportedFormatError: A newer version wrote the entry, or one below it.
    """
    full, entry, entries = contents.entry(path)
    if isinstance(entry, TensorEntry):
        return read_tensor(contents, full, entry, obj_out, memory_budget_bytes, index)
    if index is not None:
        raise MismatchError(f"{contents.label}: {path} is not a tensor, so it takes no index")
    by_path = {full: _all_entries(full, entry, entries)}
    return _read_entries(contents, by_path, memory_budget_bytes, allow_pickle=allow_pickle)[full]


@without_torch_modes()
def read_objects(
    contents: Contents,
    paths: Iterable[str],
    memory_budget_bytes: Size | None = None,
    *,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read everything that some paths and globs name, in one pass; return it by path.

    Raises:
        EntryNotFoundError: A path names nothing, or several ranks' own entries.
        DamagedError: A chunk is missing or damaged.
    """
    by_path: dict[str, Iterable[tuple[str, Entry]]] = {}
    plain_paths: list[str] = []
    for path in paths:
        matched = contents.matching(path) if Contents.is_pattern(path) else []
        by_path |= {each.name: (("", each.entry),) for each in matched}
        if not matched:
            by_path[path] = ()
            plain_paths.append(path)
    # In this order, each leaf of the tree is decoded only once.
    for path in sorted(plain_paths):
        by_path[path] = _all_entries(*contents.entry(path))
    return _read_entries(
        contents, by_path, memory_budget_bytes, progress, allow_pickle=allow_pickle
    )


def _all_entries(path: str, entry: Entry, entries: Entries) -> Iterator[tuple[str, Entry]]:
    """Yield an entry, and everything below it.

    Args:
        path: The path of the entry.
        entry: The entry.
        entries: All entries of its key.

    Yields:
        The path below ``path``, "" for the entry itself; and the entry.
    """
    yield "", entry
    inner = path[len(path.partition("/")[0]) :]
    if isinstance(entry, ContainerEntry):
        for inner_path, child in entries.items_below(f"{inner}/"):
            yield inner_path[len(inner) :], child


def _read_entries(
    contents: Contents,
    by_path: Mapping[str, Iterable[tuple[str, Entry]]],
    budget: Size | None,
    progress: Progress | None = None,
    *,
    allow_pickle: bool,
) -> dict[str, Any]:
    from casnap.state.flatten import inflate  # not needed by who reads tensors alone

    loading = Loading(contents, progress)
    paths = set[str]()
    for name, entries in by_path.items():
        for inner_path, entry in entries:
            # A container and something in it may both be asked for.
            if name + inner_path not in paths:
                paths.add(name + inner_path)
                loading.add(name + inner_path, entry)
    leaves = loading.load(budget)
    return {name: inflate(name, leaves, allow_pickle=allow_pickle) for name in by_path}


def read_tensor(
    contents: Contents,
    path: str,
    entry: TensorEntry,
    obj_out: Any,
    budget: Size | None,
    index: Index | None,
) -> Any:
    """Read a tensor or a part of it: into ``obj_out``, or if that is None, into new memory.

    Args:
        contents: The snapshot.
        path: The path of the tensor.
        entry: Its entry.
        obj_out: The tensor to fill.
        budget: The most bytes of buffers to read with.
        index: The elements to read; None for all.
    """
    if index is not None and entry.quantization is not None:
        by_path = {path: (("", entry),)}
        tensor: Any = _read_entries(contents, by_path, budget, allow_pickle=False)[path]
        return (
            tensor[index] if obj_out is None else _copy_into(contents, path, tensor[index], obj_out)
        )
    check_known(contents.label, [(path, entry)])
    with naming(contents, path):
        check_tensor(entry)
    selection = select(entry.shape, index)
    if obj_out is not None:
        _check_out(contents, path, entry, selection.shape, obj_out)
    fits = entry.kind in ("tensor", "parameter", "buffer") and entry.quantization is None
    in_place = (
        obj_out is not None and fits and is_fillable(obj_out) and not overlaps_itself(obj_out)
    )
    part = TensorEntry(
        Payload(prod(selection.shape) * itemsize_of(entry)),
        entry.dtype,
        selection.shape,
        entry.kind if index is None else _PLAIN.get(entry.kind, entry.kind),
        entry.requires_grad and index is None,
        entry.quantization,
    )
    carrier = obj_out.detach() if in_place else allocate(part)
    synchronize([carrier])
    out = with_item_axis(part, carrier)
    for axis in selection.dropped:
        out = out.unsqueeze(axis)
    loading = Loading(contents)
    loading.add(path, entry, [(Region.whole(entry.shape) if index is None else selection, out)])
    loading.load(budget)
    if in_place:
        return obj_out
    value: Any = assemble(Leaf(path, part, carrier))
    return value if obj_out is None else _copy_into(contents, path, value, obj_out)


def _copy_into(contents: Contents, path: str, value: Any, out: torch.Tensor) -> torch.Tensor:
    try:
        copy = torch.as_tensor(value)
        if out.layout is not torch.strided or not overlaps_itself(out):
            fill(out, copy)
            synchronize([out])
            return out
        is_filled = fill_shared_memory([(out, copy)])
    except (TypeError, ValueError, RuntimeError) as e:
        raise MismatchError(f"{contents.label}: {path} cannot be read into a tensor: {e}") from e
    if not is_filled:
        raise MismatchError(
            f"{contents.label}: {path} cannot be held by obj_out, which overlaps itself; nothing "
            "was written. Pass obj_out.contiguous(), or none"
        )
    return out


_PLAIN = {"parameter": "tensor", "buffer": "tensor", "numpy_scalar": "ndarray"}


def _check_out(
    contents: Contents, path: str, entry: TensorEntry, shape: tuple[int, ...], out: Any
) -> None:
    if not isinstance(out, torch.Tensor):
        raise MismatchError(
            f"{contents.label}: {path} is a tensor; obj_out is {with_article(type(out).__name__)}"
        )
    if holds_parts(out):
        raise MismatchError(
            f"{contents.label}: {path} cannot be read into obj_out: {why_not_whole(out)}"
        )
    if holds_no_values(out):
        raise MismatchError(
            f"{contents.label}: {path} cannot be read into a tensor that holds no values: "
            "obj_out is on the meta device, or of a FakeTensorMode"
        )
    if out.is_nested or torch.nn.parameter.is_lazy(out):
        raise MismatchError(
            f"{contents.label}: {path} cannot be read into obj_out, which is nested or has no "
            "shape yet; pass a plain tensor, or none"
        )
    if tuple(out.shape) != shape:
        raise MismatchError(
            f"{contents.label}: {path} is read with shape {shape}; obj_out has {tuple(out.shape)}"
        )
    if reason := why_not_writable(out):
        raise MismatchError(f"{contents.label}: {path} cannot be read into obj_out, which {reason}")
    if is_float4(entry) != is_float4(out):
        raise MismatchError(
            f"{contents.label}: {path} is of {entry.dtype}, obj_out of {out.dtype}; there is no "
            "cast to or from float4"
        )
