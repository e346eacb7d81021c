"""Giving state back: in place where it can be, whole or one entry, or a part of one tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from math import prod
from typing import Any

import torch

from casnap import buffers
from casnap.buffers import Slot, address_of, view_at
from casnap.capture import random_states_first
from casnap.containers import segment_of
from casnap.contents import Contents, split_digests
from casnap.errors import DamagedError, MismatchError, StateError
from casnap.flatten import inflate, tensor_targets
from casnap.format import INLINE_BYTES, Entry, Payload, TensorEntry, payload_of
from casnap.grid import Grid, grid_of
from casnap.indexing import Index, Selection, select
from casnap.objects import ReadOptions, Want
from casnap.overlap import filled_in_place, overlapping
from casnap.pipeline import collector_paused
from casnap.region import Region
from casnap.staging import pin, settle
from casnap.state import RNGState, Stateful
from casnap.tensors import (
    Leaf,
    allocate,
    assemble,
    carrier_dtype,
    check_shape,
    is_fillable,
    is_numpy,
    itemsize_of,
)

Progress = Callable[[int, int], None]


@dataclass
class RestoreReport:
    """What a restore with ``strict=False`` left alone.

    Attributes:
        missing: Paths of the state that the snapshot lacks.
        unexpected: Paths of the snapshot that the state lacks.
        mismatched: Paths whose shapes differ.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything was left alone."""
        return bool(self.missing or self.unexpected or self.mismatched)


class Loading:
    """Entries on their way from the store into memory: what to read, and where it goes.

    Args:
        contents: The snapshot.
        progress: Told the bytes done and in all.
    """

    def __init__(self, contents: Contents, progress: Progress | None = None) -> None:
        self._contents = contents
        self._chunk_size = contents.objects.config.chunk_size
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._total = 0
        self._leaves: list[tuple[str, Entry, torch.Tensor | bytearray]] = []

    def add(self, path: str, entry: Entry, target: torch.Tensor | None = None) -> None:
        """Ask for an entry: into ``target`` (same shape, any dtype), or into new memory."""
        payload = payload_of(entry)
        content: torch.Tensor | bytearray
        if isinstance(entry, TensorEntry):
            with _naming(self._contents, path):
                if target is not None:
                    check_shape(entry)
                content = target if target is not None else allocate(entry)
        else:
            # Bytes are taken only once it is known that there are chunks for them.
            content = bytearray()
        self._total += payload.nbytes
        self._leaves.append((path, entry, content))

    def load(self, budget: int | None = None) -> dict[str, Leaf]:
        """Read everything, verified, and return it by path."""
        with collector_paused():
            self._contents.objects.fetch(self._wants(), ReadOptions(budget, self._prepare()))
        return {
            path: Leaf(path, entry, bytes(content) if isinstance(content, bytearray) else content)
            for path, entry, content in self._leaves
        }

    def _prepare(self) -> Callable[[Slot], None] | None:
        on_gpu = any(isinstance(c, torch.Tensor) and c.is_cuda for _, _, c in self._leaves)
        return pin if on_gpu else None

    def _wants(self) -> Iterator[Want]:
        for path, entry, content in self._leaves:
            payload = payload_of(entry)
            if isinstance(content, bytearray):
                grid = grid_of((payload.nbytes,), 1, self._chunk_size)
            else:
                assert isinstance(entry, TensorEntry)
                grid = grid_of(entry.shape, itemsize_of(entry), self._chunk_size)
            if payload.nbytes <= INLINE_BYTES:
                self._fill_inline(path, entry, payload, content)
                continue
            digests = split_digests(self._contents.digests(payload, grid, path))
            if isinstance(content, bytearray):
                content.extend(bytes(payload.nbytes))
                sinks = _byte_sinks(memoryview(content), grid)
            else:
                sinks = _tensor_sinks(content, entry, grid)  # type: ignore[arg-type]
            for digest, size, sink in zip(digests, grid.sizes(), sinks, strict=True):
                yield Want(digest, size, self._counted(sink) if self._progress else sink, path)

    def _fill_inline(
        self, path: str, entry: Entry, payload: Payload, content: torch.Tensor | bytearray
    ) -> None:
        inline = _inline(self._contents, path, payload)
        if isinstance(content, bytearray):
            content.extend(inline)
        elif content.numel():
            assert isinstance(entry, TensorEntry)
            raw = memoryview(bytearray(inline))
            content.detach().copy_(_as_tensor(raw, carrier_dtype(entry), tuple(content.shape)))

    def _counted(self, sink: Callable[[memoryview], None]) -> Callable[[memoryview], None]:
        def counted(raw: memoryview) -> None:
            sink(raw)
            with self._lock:
                self._done += len(raw)
                assert self._progress is not None
                self._progress(self._done, self._total)

        return counted


@contextmanager
def _naming(contents: Contents, path: str) -> Iterator[None]:
    """Say, where an entry cannot be given memory, which one it is."""
    try:
        yield
    except DamagedError as e:
        raise DamagedError(f"{contents.where}: {path}: {e}", (path,)) from e
    except StateError as e:
        raise type(e)(f"{contents.where}: {path}: {e}") from e


def _inline(contents: Contents, path: str, payload: Payload) -> bytes:
    if len(payload.inline) != payload.nbytes:
        raise DamagedError(f"{contents.where}: {path} is cut off", (path,))
    return payload.inline


def _as_tensor(raw: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # Small chunks lie anywhere in a pack, and torch crashes on elements that are not aligned;
    # of bytes that are read-only, as decompressed ones are, it warns.
    if raw.readonly or address_of(raw) % dtype.itemsize:
        raw = memoryview(bytearray(raw))
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


def _byte_sinks(target: memoryview, grid: Grid) -> Iterator[Callable[[memoryview], None]]:
    start = 0
    for size in grid.sizes():
        part = target[start : start + size]
        start += size

        def sink(raw: memoryview, part: memoryview = part) -> None:
            buffers.copy(part, raw)

        yield sink


def _tensor_sinks(
    target: torch.Tensor, entry: TensorEntry, grid: Grid
) -> Iterator[Callable[[memoryview], None]]:
    dtype, target = carrier_dtype(entry), target.detach()
    if target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype:
        yield from _byte_sinks(view_at(target.data_ptr(), target.nbytes), grid)
        return
    for i in range(grid.count):
        box = target[grid.region(i).within(Region.whole(grid.shape))]

        def sink(raw: memoryview, box: torch.Tensor = box) -> None:
            box.copy_(_as_tensor(raw, dtype, tuple(box.shape)))

        yield sink


# --- whole app states -------------------------------------------------------------------------


@dataclass
class _Part:
    """One key of the app state to be restored."""

    key: str
    segment: str
    stateful: Stateful
    current: Any
    entries: dict[str, Entry]
    skipped: set[str] = field(default_factory=set)


def restore(
    contents: Contents,
    app_state: Mapping[str, Stateful],
    *,
    strict: bool = True,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> RestoreReport:
    """Restore an app state, or some keys of it.

    Raises:
        MismatchError: Under ``strict``, the snapshot lacks a key, or a module differs from it;
            all that differs is listed, and nothing was written.
        DamagedError: Something could not be read whole; no ``load_state_dict`` was called, but
            tensors that are restored in place may hold new values already.
    """
    keys = random_states_first(app_state)
    report = RestoreReport()
    parts = [p for k in keys if (p := _part(contents, k, app_state[k], report)) is not None]
    loading = Loading(contents, progress)
    targets: dict[str, torch.Tensor] = {}
    for part in parts:
        targets |= _targets(part, report)
    if strict and report:
        raise MismatchError(_mismatch(contents, report))
    entries = {path: entry for part in parts for path, entry in part.entries.items()}
    # Each could overwrite a part of the other, so these are read apart at first.
    groups = overlapping(targets, lambda path: payload_of(entries[path]))
    apart = {path for group in groups for path in group}
    settle(targets.values())
    for path, entry in entries.items():
        loading.add(path, entry, None if path in apart else targets.get(path))
    leaves = loading.load()
    for group in groups:
        if filled_in_place((targets[p], leaves[p].content) for p in group):
            leaves |= {p: leaves[p]._replace(content=targets[p]) for p in group}
    # The random state last: to load the others may draw from it.
    for part in sorted(parts, key=lambda p: isinstance(p.stateful, RNGState)):
        state = inflate(part.segment, leaves, allow_pickle=allow_pickle)
        if isinstance(part.stateful, torch.nn.Module) and not strict:
            _load_what_fits(part, part.stateful, state, report)
        else:
            part.stateful.load_state_dict(state)
    return report


def _part(contents: Contents, key: str, stateful: Stateful, report: RestoreReport) -> _Part | None:
    segment = segment_of(key)
    subtree = contents.subtrees(0).get(segment)
    if subtree is None:
        report.missing.append(key)
        return None
    entries = {segment + inner: e for inner, e in contents.tree(subtree).items()}
    return _Part(key, segment, stateful, stateful.state_dict(), entries)


def _targets(part: _Part, report: RestoreReport) -> dict[str, torch.Tensor]:
    """Return the tensors to fill in place; note where module and snapshot differ."""
    targets = tensor_targets(part.current, part.segment)
    if isinstance(part.stateful, torch.nn.Module):
        rewritten = [f"{part.segment}/{segment_of(name)}" for name in _rewritten(part.stateful)]
        if not rewritten:
            part.skipped = _compare(part, report)
        # Filled in place, what is renamed on its way could be overwritten before it is read.
        targets = {p: t for p, t in targets.items() if not p.startswith(tuple(rewritten))}
    return {p: t for p, t in targets.items() if p in part.entries and _fits(part.entries[p], t)}


def _fits(entry: Entry, current: torch.Tensor) -> bool:
    """Whether a tensor of the state can be filled with an entry and lose nothing."""
    return (
        isinstance(entry, TensorEntry)
        and entry.kind in ("tensor", "parameter", "buffer")
        and entry.quantization is None
        and tuple(current.shape) == entry.shape
        and torch.can_cast(carrier_dtype(entry), current.dtype)
    )


def _rewritten(module: torch.nn.Module) -> list[str]:
    """Return the prefixes of a module's keys that may be renamed or changed on their way in.

    Where there are any, keys cannot be compared beforehand.
    """
    if _has_own_loader(module):
        return [""]
    return [
        f"{name}." if name else ""
        for name, child in module.named_modules(remove_duplicate=False)
        if child._load_state_dict_pre_hooks
        or not type(child)._load_from_state_dict.__module__.startswith("torch.nn.")
    ]


def _has_own_loader(module: torch.nn.Module) -> bool:
    return type(module).load_state_dict is not torch.nn.Module.load_state_dict


def _load_what_fits(
    part: _Part, module: torch.nn.Module, state: dict[str, Any], report: RestoreReport
) -> None:
    for key in [k for k in state if f"{part.segment}/{segment_of(k)}" in part.skipped]:
        del state[key]
    if _has_own_loader(module) and "strict" not in signature(module.load_state_dict).parameters:
        module.load_state_dict(state)
        return
    left: Any = module.load_state_dict(state, strict=False)
    if _rewritten(module) and left is not None:
        report.missing += [f"{part.segment}/{segment_of(k)}" for k in left.missing_keys]
        report.unexpected += [f"{part.segment}/{segment_of(k)}" for k in left.unexpected_keys]


def _compare(part: _Part, report: RestoreReport) -> set[str]:
    """Note what differs between a module and the snapshot; return what must not be loaded."""
    there = {p for p in part.entries if p.count("/") == 1}
    here = {f"{part.segment}/{segment_of(k)}" for k in part.current}
    shapes = {}
    for key, value in part.current.items():
        path = f"{part.segment}/{segment_of(key)}"
        entry = part.entries.get(path)
        if not isinstance(entry, TensorEntry) or not isinstance(value, torch.Tensor):
            continue
        if value.is_meta:
            shapes[path] = f"{path}: on the meta device here; call to_empty(device=...) first"
        elif tuple(value.shape) != entry.shape:
            shapes[path] = f"{path}: {tuple(value.shape)} here, {entry.shape} in the snapshot"
    report.missing += sorted(here - there)
    report.unexpected += sorted(there - here)
    report.mismatched += [shapes[p] for p in sorted(shapes)]
    return (there - here) | shapes.keys()


def _mismatch(contents: Contents, report: RestoreReport) -> str:
    lines = [f"{contents.where} does not fit the state; nothing was restored"]
    for what, paths in (
        ("missing in the snapshot", report.missing),
        ("unexpected in the snapshot", report.unexpected),
        ("of another shape", report.mismatched),
    ):
        lines += [f"  {what} ({len(paths)}):"] + [f"    {p}" for p in paths] if paths else []
    lines.append("Pass strict=False to restore what fits.")
    return "\n".join(lines)


# --- single entries ---------------------------------------------------------------------------


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
    full, entry, tree = contents.entry(path)
    if isinstance(entry, TensorEntry):
        return _read_tensor(contents, full, entry, obj_out, memory_budget_bytes, index)
    if index is not None:
        raise MismatchError(f"{contents.where}: {path} is no tensor, so it takes no index")
    loading = Loading(contents)
    key, slash, inner = full.partition("/")
    loading.add(full, entry)
    for below, child in tree.below(f"{slash}{inner}/"):
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
        return whole[index] if obj_out is None else obj_out.copy_(whole[index])
    with _naming(contents, path):
        check_shape(entry)
    selection = select(entry.shape, index)
    if obj_out is not None:
        _check_out(contents, path, selection.shape, obj_out)
    fits = entry.kind in ("tensor", "parameter", "buffer") and entry.quantization is None
    in_place = obj_out is not None and fits and is_fillable(obj_out)
    part = TensorEntry(
        entry.dtype,
        selection.shape,
        Payload(prod(selection.shape) * itemsize_of(entry)),
        entry.kind if index is None else _PLAIN.get(entry.kind, entry.kind),
        entry.requires_grad and index is None,
        entry.quantization,
    )
    carrier = obj_out.detach() if in_place else allocate(part)
    if index is None:
        loading = Loading(contents)
        loading.add(path, entry, carrier)
        loading.load(budget)
    else:
        wants = _selected(contents, path, entry, selection, carrier)
        contents.objects.fetch(wants, ReadOptions(budget, pin if carrier.is_cuda else None))
    if in_place:
        return obj_out
    value: Any = assemble(Leaf(path, part, carrier))
    if obj_out is None:
        return value
    try:
        return obj_out.copy_(torch.as_tensor(value))
    except (TypeError, ValueError) as e:
        raise MismatchError(f"{contents.where}: {path} cannot be read into a tensor: {e}") from e


_PLAIN = {"parameter": "tensor", "buffer": "tensor", "numpy_scalar": "ndarray"}


def _check_out(contents: Contents, path: str, shape: tuple[int, ...], out: Any) -> None:
    if not isinstance(out, torch.Tensor):
        raise MismatchError(
            f"{contents.where}: {path} is a tensor; obj_out is a {type(out).__name__}"
        )
    if tuple(out.shape) != shape:
        raise MismatchError(
            f"{contents.where}: {path} is read with shape {shape}; obj_out has {tuple(out.shape)}"
        )


def _selected(
    contents: Contents, path: str, entry: TensorEntry, selection: Selection, out: torch.Tensor
) -> Iterator[Want]:
    """Yield the chunks that hold selected elements; each sink moves its elements to ``out``."""
    itemsize = itemsize_of(entry)
    grid = grid_of(entry.shape, itemsize, contents.objects.config.chunk_size)
    dtype = carrier_dtype(entry)
    # The bytes of an item of numpy's stand as one more axis.
    item = (itemsize,) if is_numpy(entry) else ()
    full = out.reshape(selection.sizes + item) if item else out
    for axis in selection.dropped if not item else ():
        full = full.unsqueeze(axis)
    payload = entry.data
    inline = _inline(contents, path, payload) if payload.nbytes <= INLINE_BYTES else None
    digests = split_digests(contents.digests(payload, grid, path)) if inline is None else []
    for number, source, target in selection.cells(grid):
        shape = grid.region(number).sizes + item
        box = full[target]

        def sink(
            raw: memoryview,
            source: tuple[slice, ...] = source,
            box: torch.Tensor = box,
            shape: tuple[int, ...] = shape,
        ) -> None:
            box.copy_(_as_tensor(raw, dtype, shape)[source])

        if inline is not None:
            sink(memoryview(bytearray(inline)))
        else:
            yield Want(digests[number], grid.cell_bytes(number), sink, path)
