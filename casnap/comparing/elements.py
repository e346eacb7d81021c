"""Measure how the elements of two tensors differ, cell by cell, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from casnap.comparing.changes import Change, Elements
from casnap.format.digest import Digest
from casnap.format.entries import INLINE_BYTES, Entry, TensorEntry, ValueEntry, unknown_in
from casnap.format.plain_values import PLAIN_CODECS
from casnap.format.region import Region
from casnap.restore.loading import elements_of
from casnap.runtime.batches import batches
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.numpy_values import is_numpy
from casnap.state.tensors import check_tensor, is_float4, itemsize_of
from casnap.storage import Contents, Want

# How many chunks of the second snapshot are held, in bytes, while those of the first one are read.
_WINDOW_BYTES = 64 << 20
# Elements that are measured at a time: numbers are cast to float64 for that.
_BLOCK = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMBERS = {c.kind: c.decode for c in PLAIN_CODECS if c.kind in ("bool", "int", "float", "complex")}


class Measure:
    """Compares two tensors of one shape and dtype part by part, and sums up the differences.

    Args:
        entry: The entry of either tensor; both have its shape and dtype.
        total: How many elements are compared.
    """

    def __init__(self, entry: TensorEntry, total: int) -> None:
        self._entry = entry
        self._total = total
        self._lock = threading.Lock()
        self._found = Elements(0, total)

    @property
    def found(self) -> Elements:
        """The differences of all parts so far."""
        return self._found

    def add(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Compare two parts, and add their differences. Any thread may call this.

        Args:
            old: The elements of the first part, as stored.
            new: The elements of the second, of the same shape.
        """
        with without_torch_modes():
            for block in blocks_of(self._entry, old, new):
                self._add(*block)

    def _add(self, old: torch.Tensor, new: torch.Tensor) -> None:
        differs = where_apart(old, new)
        count = int(differs.sum())
        if not count:
            return
        if count < len(differs):
            old, new = old[differs], new[differs]
        a, b = numbers_in(self._entry, old), numbers_in(self._entry, new)
        largest, relative, nan = (0.0, 0.0, 0) if a is None or b is None else _apart(a, b)
        with self._lock:
            before = self._found
            self._found = Elements(
                before.differing + count,
                self._total,
                max(before.largest, largest),
                max(before.largest_relative, relative),
                before.nan + nan,
            )


def blocks_of(
    entry: TensorEntry, old: torch.Tensor, new: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same part of two tensors, in blocks of limited size, in the host's memory.

    Args:
        entry: The entry of either tensor; both have its shape and dtype.
        old: The elements of the first tensor, as stored.
        new: The elements of the second, of the same shape.

    Yields:
        Two blocks, each with a row for each element. The row of a numpy item has the item's bytes.
    """
    row = itemsize_of(entry) if is_numpy(entry) else 1
    old, new = (each.detach().to("cpu").contiguous().reshape(-1, row) for each in (old, new))
    for start in range(0, len(old), _BLOCK):
        yield old[start : start + _BLOCK], new[start : start + _BLOCK]


def numbers_in(entry: TensorEntry, items: torch.Tensor) -> torch.Tensor | None:
    """Return elements as numbers in double precision; None if they are not numbers.

    Args:
        entry: The entry of their tensor.
        items: The elements, as :func:`blocks_of` yields them.
    """
    if is_numpy(entry):
        array = items.numpy().reshape(-1).view(np.dtype(entry.dtype))
        if array.dtype.kind not in "biufc":
            return None
        wide = np.complex128 if array.dtype.kind == "c" else np.float64
        return torch.from_numpy(array.astype(wide))
    if is_float4(entry):
        return None
    if items.dtype.is_complex:
        return items.to(torch.complex128)
    return items.double()


def where_apart(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return, for each row of two blocks, whether the two differ in any bit."""
    return _as_integers(old).ne(_as_integers(new)).any(1)


def _as_integers(items: torch.Tensor) -> torch.Tensor:
    """Return a view of elements as integers, which have the same bits."""
    return items.view(_INTEGERS.get(items.dtype.itemsize, torch.int64))


def _apart(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, int]:
    """Compare two rows of numbers.

    Returns:
        The largest absolute difference, the largest relative one, and how many pairs have a NaN.
    """
    apart = (a - b).abs()
    is_nan = apart.isnan()
    if not is_nan.any():
        shares = apart / torch.maximum(a.abs(), b.abs())
        # Infinities of two signs are infinitely far apart; zeros of two signs are not apart.
        shares[apart == inf] = inf
        return float(apart.max()), float(shares.nan_to_num_(0.0, inf).max()), 0
    nan = int((a.isnan() | b.isnan()).sum())
    # The difference of two infinities is NaN too, but neither of them is.
    a, b = a[~is_nan], b[~is_nan]
    return (*_apart(a, b)[:2], nan) if len(a) else (0.0, 0.0, nan)


def measured(old: Entry, new: Entry, old_bytes: bytes, new_bytes: bytes) -> Elements | None:
    """Return how two small entries differ; None if they are not numbers of one shape and dtype.

    Args:
        old: The first entry.
        new: The second one.
        old_bytes: The bytes of the first.
        new_bytes: The bytes of the second.
    """
    if isinstance(old, ValueEntry) and isinstance(new, ValueEntry) and old.kind in _NUMBERS:
        return _of_numbers(old, new, old_bytes, new_bytes)
    if not is_measurable(old, new):
        return None
    assert isinstance(old, TensorEntry)
    box = Region.whole(old.shape)
    measure = Measure(old, prod(old.shape))
    if old_bytes:
        parts = (elements_of(old, memoryview(bytearray(b)), box) for b in (old_bytes, new_bytes))
        measure.add(*parts)
    return measure.found


def _of_numbers(old: ValueEntry, new: ValueEntry, a: bytes, b: bytes) -> Elements | None:
    if old.kind != new.kind or a == b:
        return None
    number_of: Any = _NUMBERS[old.kind]
    try:
        numbers = [complex(number_of(raw)) for raw in (a, b)]
    except (ValueError, ArithmeticError):
        return None
    entry = TensorEntry(old.payload, "complex128", ())
    measure = Measure(entry, 1)
    measure.add(*(torch.tensor([number], dtype=torch.complex128) for number in numbers))
    return measure.found


def is_measurable(old: Entry | None, new: Entry | None) -> bool:
    """Whether the elements of two entries can be compared one by one."""
    return (
        isinstance(old, TensorEntry)
        and isinstance(new, TensorEntry)
        and not (unknown_in(old) or unknown_in(new))
        and (old.dtype, old.shape, is_numpy(old)) == (new.dtype, new.shape, is_numpy(new))
        and old.quantization == new.quantization
    )


# --- two snapshots ------------------------------------------------------------------------------


class Pairs(Protocol):
    """Receives the elements of two tensors, part by part."""

    def add(self, old: torch.Tensor, new: torch.Tensor, /) -> None:
        """Receive the elements of one part of both tensors. Any thread may call this."""


class CellToCompare(NamedTuple):
    """A cell of a tensor of which two snapshots have different versions.

    Attributes:
        measure: Receives the elements of both versions.
        path: The path of the tensor.
        entry: Its entry.
        cell: The box of the cell.
        nbytes: The bytes of the cell.
        old: The digest of its chunk in the first snapshot.
        new: The digest of its chunk in the second.
    """

    measure: Pairs
    path: str
    entry: TensorEntry
    cell: Region
    nbytes: int
    old: Digest
    new: Digest


@without_torch_modes()
def with_elements(a: Contents, b: Contents, changes: Iterable[Change]) -> list[Change]:
    """Read the chunks that differ; return the changes with their ``elements`` set.

    Args:
        a: The first snapshot.
        b: The second one.
        changes: The changes between them.

    Raises:
        DamagedError: Chunks are missing or damaged.
    """
    changes = list(changes)
    measures: dict[int, Measure] = {}
    found: dict[int, Elements | None] = {}

    def pairs() -> Iterator[CellToCompare]:
        for i, change in enumerate(changes):
            old, new = change.old, change.new
            if old is None or new is None or unknown_in(old) or unknown_in(new):
                continue
            if max(old.payload.nbytes, new.payload.nbytes) <= INLINE_BYTES:
                found[i] = measured(old, new, old.payload.inline, new.payload.inline)
                continue
            if not is_measurable(old, new):
                continue
            assert isinstance(old, TensorEntry)
            check_tensor(old)
            measure = measures[i] = Measure(old, prod(old.shape))
            cells = a.cells(change.path, old)
            both = zip(a.chunks(change.path, old), b.chunks(change.path, new), strict=True)
            for number, ((was, nbytes), (now, _)) in enumerate(both):
                if was != now:
                    cell = cells.region(number)
                    yield CellToCompare(measure, change.path, old, cell, nbytes, was, now)

    compare_cells(a, b, pairs())
    found |= {i: measure.found for i, measure in measures.items()}
    return [replace(change, elements=found.get(i)) for i, change in enumerate(changes)]


def compare_cells(a: Contents, b: Contents, cells: Iterable[CellToCompare]) -> None:
    """Read cells of two snapshots, and give the elements of both to their measures.

    Args:
        a: The first snapshot.
        b: The second one.
        cells: The cells. Only some of them are in memory at a time.

    Raises:
        DamagedError: Chunks are missing or damaged.
    """
    for window in batches(cells, lambda cell: cell.nbytes, _WINDOW_BYTES):
        _compare_window(a, b, window)


def _compare_window(a: Contents, b: Contents, window: Sequence[CellToCompare]) -> None:
    new = dict[Digest, bytes]()

    def keep(pair: CellToCompare) -> Want:
        def sink(raw: memoryview) -> None:
            if pair.old == pair.new:
                part = elements_of(pair.entry, raw, pair.cell)
                pair.measure.add(part, part)
            else:
                new[pair.new] = bytes(raw)

        return Want(pair.new, pair.nbytes, sink, pair.path)

    def compare(pair: CellToCompare) -> Want:
        def sink(raw: memoryview) -> None:
            now = elements_of(pair.entry, memoryview(bytearray(new[pair.new])), pair.cell)
            pair.measure.add(elements_of(pair.entry, raw, pair.cell), now)

        return Want(pair.old, pair.nbytes, sink, pair.path)

    b.store.fetch(map(keep, window))
    a.store.fetch(compare(pair) for pair in window if pair.old != pair.new)
