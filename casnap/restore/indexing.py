"""Which elements of a tensor an index selects, and which cells of the grid hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import TypeAlias

from casnap.format.grid import Grid
from casnap.format.region import Region
from casnap.runtime.units import whole_number

Index: TypeAlias = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True)
class Selection:
    """The elements of a tensor that an index selects: ``range(start, stop, step)`` on each axis.

    Attributes:
        axes: A range for each axis; steps are positive.
        dropped: The axes that were indexed with an int, which the result lacks.
    """

    axes: tuple[range, ...]
    dropped: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many elements are selected along each axis, dropped axes included."""
        return tuple(len(axis) for axis in self.axes)

    @property
    def numel(self) -> int:
        """The number of selected elements."""
        return prod(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result, without the dropped axes."""
        return tuple(n for i, n in enumerate(self.sizes) if i not in self.dropped)

    def within(self, _outer: Region) -> tuple[slice, ...]:
        """Return the slices that take the selected elements out of the whole tensor.

        The argument is ignored. A ``Region`` has a method of the same name, which needs it.
        """
        return tuple(slice(axis.start, axis.stop, axis.step) for axis in self.axes)

    def cells(self, grid: Grid) -> Iterator[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
        """Yield the cells that hold selected elements, with the slices to copy them.

        Yields: The number of a cell; the slices that select elements of the cell; and the slices of
        the result to fill with them, dropped axes included.
        """
        if 0 in self.sizes:
            return
        box = Region(
            tuple(a.start for a in self.axes), tuple(a[-1] + 1 - a.start for a in self.axes)
        )
        for number in grid.covering(box):
            cell = grid.region(number)
            moves = [
                _move(axis, offset, size)
                for axis, offset, size in zip(self.axes, cell.offsets, cell.sizes, strict=True)
            ]
            if None not in moves:
                yield number, tuple(m[0] for m in moves if m), tuple(m[1] for m in moves if m)


def _move(axis: range, offset: int, size: int) -> tuple[slice, slice] | None:
    start_index = max(0, -(-(offset - axis.start) // axis.step))
    end_index = min(len(axis), -(-(offset + size - axis.start) // axis.step))
    if start_index >= end_index:
        return None
    start = axis[start_index] - offset
    stop = axis[end_index - 1] - offset + 1
    return slice(start, stop, axis.step), slice(start_index, end_index)


def select(shape: tuple[int, ...], index: Index | None) -> Selection:
    """Return the selection that an index of ints, slices and ``...`` makes.

    Raises:
        IndexError: There are too many axes, or an int is out of range.
        TypeError: The index holds something else.
        ValueError: A slice has a step below 1.
    """
    items = index if isinstance(index, tuple) else (Ellipsis if index is None else index,)
    gaps = sum(1 for item in items if item is Ellipsis)
    if gaps > 1 or len(items) - gaps > len(shape):
        raise IndexError(f"index {index!r} does not fit a tensor of shape {shape}")
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    fill = (slice(None),) * (len(shape) - (len(items) - gaps))
    full = items[:at] + fill + items[at + 1 :]
    axes, dropped = [], []
    for axis, (item, size) in enumerate(zip(full, shape, strict=True)):
        if isinstance(item, slice):
            if item.step is not None and item.step < 1:
                raise ValueError(f"index {index!r}: a step must be positive")
            axes.append(range(*item.indices(size)))
        elif (number := whole_number(item)) is not None:
            if not -size <= number < size:
                raise IndexError(f"index {number} is out of range for axis {axis} of size {size}")
            axes.append(range(number % size, number % size + 1))
            dropped.append(axis)
        else:
            raise TypeError(f"an index holds ints, slices and ..., not {item!r}")
    return Selection(tuple(axes), tuple(dropped))
