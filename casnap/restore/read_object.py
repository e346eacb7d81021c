"""Reading one entry, everything below a container, or a part of one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from casnap.errors import MismatchError
from casnap.format.digest import split_digests
from casnap.format.entries import INLINE_BYTES, Payload, TensorEntry
from casnap.format.region import Region
from casnap.restore.loading import (
    Loading,
    check_entry,
    elements_of,
    inline_bytes,
    naming,
    preparation,
    with_item_axis,
)
from casnap.restore.selection import Index, Selection, select
from casnap.runtime.torch_modes import fill, plain
from casnap.state.cuda import settle, settle_workers
from casnap.state.flatten import inflate
from casnap.state.overlap import filled_in_place, overlaps_itself
from casnap.state.tensors import (
    Leaf,
    allocate,
    assemble,
    is_fillable,
    is_float4,
    is_hollow,
    itemsize_of,
)
from casnap.storage.contents import Contents
from casnap.storage.objects import ReadOptions, Want


@plain()
def read_object(
    contents: Contents,
    path: str,
    obj_out: Any = None,
    memory_budget_bytes: int | None = None,
    index: Index | None = None,
    *,
    allow_pickle: bool = False,
) -> Any:
    """Read one entry, everything below a container, or a part of a tensor.

    Raises:
        EntryNotFoundError: There is no such path.
        MismatchError: ``obj_out`` has another shape than what is read.
        DamagedError: A chunk is missing or damaged.
    """
    full, entry, entries = contents.entry(path)
    if isinstance(entry, TensorEntry):
        return _read_tensor(contents, full, entry, obj_out, memory_budget_bytes, index)
    if index is not None:
        raise MismatchError(f"{contents.where}: {path} is no tensor, so it takes no index")
    loading = Loading(contents)
    key, slash, inner = full.partition("/")
    loading.add(full, entry)
    for below, child in entries.below(f"{slash}{inner}/"):
        loading.add(key + below, child)
    leaves = loading.load(memory_budget_bytes)
    return inflate(full, leaves, allow_pickle=allow_pickle)


def _read_tensor(
    contents: Contents,
    path: str,
    entry: TensorEntry,
    obj_out: Any,
    budget: int | None,
    index: Index | None,
) -> Any:
    if index is not None and entry.quantization is not None:
        whole: Any = _read_tensor(contents, path, entry, None, budget, None)
        return whole[index] if obj_out is None else _copied(contents, path, whole[index], obj_out)
    with naming(contents, path):
        check_entry(entry, contents.objects.config.chunk_size)
    selection = select(entry.shape, index)
    if obj_out is not None:
        _check_out(contents, path, entry, selection.shape, obj_out)
    fits = entry.kind in ("tensor", "parameter", "buffer") and entry.quantization is None
    in_place = (
        obj_out is not None and fits and is_fillable(obj_out) and not overlaps_itself(obj_out)
    )
    part = TensorEntry(
        entry.dtype,
        selection.shape,
        Payload(prod(selection.shape) * itemsize_of(entry)),
        entry.kind if index is None else _PLAIN.get(entry.kind, entry.kind),
        entry.requires_grad and index is None,
        entry.quantization,
    )
    carrier = obj_out.detach() if in_place else allocate(part)
    settle([carrier])
    if index is None:
        loading = Loading(contents)
        loading.add(path, entry, carrier)
        loading.load(budget)
    else:
        out = with_item_axis(part, carrier)
        wants = _selected(contents, path, entry, selection, out)
        contents.objects.fetch(wants, ReadOptions(budget, preparation([carrier])))
        settle_workers([carrier])
    if in_place:
        return obj_out
    value: Any = assemble(Leaf(path, part, carrier))
    return value if obj_out is None else _copied(contents, path, value, obj_out)


def _copied(contents: Contents, path: str, value: Any, out: torch.Tensor) -> torch.Tensor:
    try:
        new = torch.as_tensor(value)
        if out.layout is not torch.strided or not overlaps_itself(out):
            fill(out, new)
            return out
        held = filled_in_place([(out, new)])
    except (TypeError, ValueError, RuntimeError) as e:
        raise MismatchError(f"{contents.where}: {path} cannot be read into a tensor: {e}") from e
    if not held:
        raise MismatchError(
            f"{contents.where}: {path} cannot be held by obj_out, which overlaps itself and holds "
            "only some of the values now; pass obj_out.contiguous(), or none"
        )
    return out


_PLAIN = {"parameter": "tensor", "buffer": "tensor", "numpy_scalar": "ndarray"}


def _check_out(
    contents: Contents, path: str, entry: TensorEntry, shape: tuple[int, ...], out: Any
) -> None:
    if not isinstance(out, torch.Tensor):
        raise MismatchError(
            f"{contents.where}: {path} is a tensor; obj_out is a {type(out).__name__}"
        )
    if is_hollow(out):
        raise MismatchError(
            f"{contents.where}: {path} cannot be read into a tensor that holds no values: "
            "obj_out is on the meta device, or of a FakeTensorMode"
        )
    if tuple(out.shape) != shape:
        raise MismatchError(
            f"{contents.where}: {path} is read with shape {shape}; obj_out has {tuple(out.shape)}"
        )
    if is_float4(entry) != is_float4(out):
        raise MismatchError(
            f"{contents.where}: {path} is of {entry.dtype}, obj_out of {out.dtype}; there is no "
            "cast to or from float4"
        )


def _selected(
    contents: Contents, path: str, entry: TensorEntry, selection: Selection, out: torch.Tensor
) -> Iterator[Want]:
    """Yield the chunks that hold selected elements; each sink moves its elements to ``out``."""
    for axis in selection.dropped:
        out = out.unsqueeze(axis)
    payload, whole = entry.data, Region.whole(entry.shape)
    if payload.nbytes <= INLINE_BYTES:
        inline = memoryview(bytearray(inline_bytes(contents, path, payload)))
        if out.numel():
            index = tuple(slice(axis.start, axis.stop, axis.step) for axis in selection.axes)
            fill(out, elements_of(entry, inline, whole)[index])
        return
    cells = contents.cells(path, entry)
    digests = split_digests(contents.digests(payload, cells, path))
    for number, source, target in selection.cells(cells):
        cell, box = cells.region(number), out[target]

        def sink(
            raw: memoryview,
            source: tuple[slice, ...] = source,
            box: torch.Tensor = box,
            cell: Region = cell,
        ) -> None:
            fill(box, elements_of(entry, raw, cell)[source])

        yield Want(digests[number], cells.cell_bytes(number), sink, path)
