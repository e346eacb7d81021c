"""The fixed grid that cuts a tensor into chunks.

The cells depend only on global shape, item size and the store's chunk size, so equal weights give
equal chunks however they are sharded. The grid cuts one axis: the first one whose slices fit into a
chunk. A cell has 1, 2, 4, 8 or another power of two of these slices. On each axis before the cut
one, a cell has length 1; on each axis after it, the full length. So a cell of a contiguous tensor
is one run of the tensor's bytes, and the cells follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import prod

from casnap.format.region import Region


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of one tensor, numbered in row-major order.

    Attributes:
        shape: The global shape.
        itemsize: The bytes of an element.
        axis: The axis that is cut, every ``step`` slices; 0 if there is nothing to cut.
        step: The slices of a cell on ``axis``; the last cell on ``axis`` may have fewer.
        rows: The number of cells along ``axis``.
        count: The number of all cells; 0 if the tensor has no element.
    """

    shape: tuple[int, ...]
    itemsize: int
    axis: int
    step: int
    rows: int
    count: int

    @property
    def slice_bytes(self) -> int:
        """The bytes of one slice of ``axis``."""
        return self.itemsize * prod(self.shape[self.axis + 1 :])

    def cell_bytes(self, index: int) -> int:
        """Return the number of bytes of the cell ``index``."""
        if not self.shape:
            return self.itemsize
        row = index % self.rows
        return min(self.step, self.shape[self.axis] - row * self.step) * self.slice_bytes

    def sizes(self) -> Iterator[int]:
        """Yield the number of bytes of each cell, in order."""
        if self.count < 2:
            if self.count:
                yield self.cell_bytes(0)
            return
        full = self.cell_bytes(0)
        last_bytes = self.cell_bytes(self.rows - 1)
        for _ in range(self.count // self.rows):
            for _ in range(self.rows - 1):
                yield full
            yield last_bytes

    def region(self, index: int, stop: int | None = None) -> Region:
        """Return the box of one cell, or of several cells in a row.

        Args:
            index: The first cell.
            stop: One past the last cell; None for one cell. It must not exceed
                ``lead_stop(index)``.
        """
        if not self.shape:
            return Region((), ())
        lead, row = divmod(index, self.rows)
        offsets = [0] * len(self.shape)
        sizes = list(self.shape)
        for i in range(self.axis - 1, -1, -1):
            lead, offsets[i] = divmod(lead, self.shape[i])
            sizes[i] = 1
        length = self.step * (1 if stop is None else stop - index)
        offsets[self.axis] = row * self.step
        sizes[self.axis] = min(length, self.shape[self.axis] - row * self.step)
        return Region(tuple(offsets), tuple(sizes))

    def lead_stop(self, index: int) -> int:
        """Return where the row of a cell ends: the number of the first cell of the next row.

        A row is the ``rows`` cells along ``axis`` that lie at the same place on the axes before it.

        Args:
            index: The number of the cell.
        """
        return (index // self.rows + 1) * self.rows

    def covering(self, region: Region) -> Iterator[int]:
        """Yield, in order, the numbers of the cells that share an element with ``region``."""
        return chain.from_iterable(range(*run) for run in self.runs_covering(region))

    def runs_covering(self, region: Region) -> Iterator[tuple[int, int]]:
        """Yield, in order, the runs of successive cells that share an element with ``region``.

        Each run is a pair: the number of its first cell, and one past the number of its last cell.
        """
        if self.count == 0 or region.numel == 0:
            return
        if not self.shape:
            yield 0, 1
            return
        start = region.offsets[self.axis]
        first_row, stop = start // self.step, -(-(start + region.sizes[self.axis]) // self.step)
        leads = [0]
        for i in range(self.axis):
            axis = range(region.offsets[i], region.offsets[i] + region.sizes[i])
            leads = [lead * self.shape[i] + x for lead in leads for x in axis]
        begin = end = leads[0] * self.rows + first_row
        for lead in leads:
            if lead * self.rows + first_row != end:
                yield begin, end
                begin = lead * self.rows + first_row
            end = lead * self.rows + stop
        yield begin, end


@lru_cache(4096)
def grid_of(shape: tuple[int, ...], itemsize: int, chunk_size: int) -> Grid:
    """Return the grid of a tensor.

    Args:
        shape: The global shape.
        itemsize: Bytes per element, at most ``chunk_size``.
        chunk_size: The store's chunk size in bytes.
    """
    if 0 in shape:
        return Grid(shape, itemsize, 0, 1, 0, 0)
    if not shape:
        return Grid(shape, itemsize, 0, 1, 1, 1)
    axis, slice_bytes = len(shape) - 1, itemsize
    while axis > 0 and slice_bytes * shape[axis] <= chunk_size:
        slice_bytes *= shape[axis]
        axis -= 1
    step = min(shape[axis], 1 << ((chunk_size // slice_bytes).bit_length() - 1))
    rows = -(-shape[axis] // step)
    return Grid(shape, itemsize, axis, step, rows, prod(shape[:axis]) * rows)
