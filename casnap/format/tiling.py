"""How the bytes of a tensor entry are cut into cells: by one grid, or by the grids of boxes.

Takes cut every tensor by one grid. Takes of older versions cut a tensor into the boxes of its
shards if these had an edge on an axis after the one that the grid cuts, and each box by the grid of
a tensor of its shape. The parts of a copy are boxes too (:mod:`casnap.transfer.pinned`).
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from casnap.errors import DamagedError
from casnap.format.entries import BoxedTensorEntry, Boxes, TensorEntry
from casnap.format.grid import Grid, grid_of
from casnap.format.region import Region

MAX_BOXES = 1 << 16
_MAX_AXES = 64
_PRIME = (1 << 61) - 1


@dataclass(frozen=True, slots=True)
class Tiling:
    """The cells of a tensor that is cut into boxes, box after box.

    Attributes:
        shape: The global shape.
        itemsize: Bytes per element.
        boxes: The boxes. They tile the tensor, and none is empty.
        grids: The grid of each box.
        firsts: The number of the first cell of each box.
        count: The number of cells.
    """

    shape: tuple[int, ...]
    itemsize: int
    boxes: tuple[Region, ...]
    grids: tuple[Grid, ...]
    firsts: tuple[int, ...]
    count: int

    def _at(self, index: int) -> tuple[int, int]:
        """Return the box that a cell is in, and the cell's number in the box's grid."""
        box = bisect_right(self.firsts, index) - 1
        return box, index - self.firsts[box]

    def cell_bytes(self, index: int) -> int:
        """Return the bytes of one cell."""
        box, cell = self._at(index)
        return self.grids[box].cell_bytes(cell)

    def sizes(self) -> Iterator[int]:
        """Yield the bytes of every cell, in order."""
        for grid in self.grids:
            yield from grid.sizes()

    def region(self, index: int) -> Region:
        """Return the box of one cell, in the coordinates of the tensor."""
        box, cell = self._at(index)
        return self.grids[box].region(cell).moved(self.boxes[box].offsets)

    def covering(self, region: Region) -> Iterator[int]:
        """Yield, in order, the cells that share an element with ``region``."""
        for first, box, grid in zip(self.firsts, self.boxes, self.grids, strict=True):
            common = box.intersect(region)
            if common is not None:
                for cell in grid.covering(common.moved(-o for o in box.offsets)):
                    yield first + cell


def tiling_of(entry: TensorEntry, itemsize: int, chunk_size: int) -> Grid | Tiling:
    """Return the cells of an entry, in the order of its digests.

    Args:
        entry: An entry from a store. Its boxes are checked here; its shape has been checked.
        itemsize: Bytes per element, at most ``chunk_size``.
        chunk_size: The store's chunk size in bytes.

    Raises:
        DamagedError: Its boxes do not tile it.
    """
    if isinstance(entry, BoxedTensorEntry):
        return tile(entry.shape, entry.boxes, itemsize, chunk_size)
    return grid_of(entry.shape, itemsize, chunk_size)


# Cache few, since each may hold many boxes; tensors of one shape are mostly sharded alike.
@lru_cache(16)
def tile(shape: tuple[int, ...], boxes: Boxes, itemsize: int, chunk_size: int) -> Tiling:
    """Return the cells of a tensor that is cut into boxes.

    Args:
        shape: The global shape.
        boxes: Offsets and sizes of each, sorted by offset.
        itemsize: Bytes per element, at most ``chunk_size``.
        chunk_size: The store's chunk size in bytes.

    Raises:
        DamagedError: The boxes do not tile the tensor, or there are too many.
    """
    if len(boxes) > MAX_BOXES or len(shape) > _MAX_AXES:
        raise DamagedError(f"an entry has {len(boxes):,} boxes of {len(shape):,} axes: too many")
    fit = all(_fits(shape, *box) for box in boxes)
    if not fit or any(a >= b for (a, _), (b, _) in pairwise(boxes)):
        raise DamagedError(f"an entry has boxes that do not fit its shape {shape}, or no order")
    if not _tile(shape, boxes):
        raise DamagedError(f"an entry has boxes that overlap, or leave gaps in its shape {shape}")
    grids = tuple(grid_of(sizes, itemsize, chunk_size) for _, sizes in boxes)
    *firsts, count = accumulate((grid.count for grid in grids), initial=0)
    regions = tuple(Region(offsets, sizes) for offsets, sizes in boxes)
    return Tiling(shape, itemsize, regions, grids, tuple(firsts), count)


def tiles(shape: tuple[int, ...], boxes: Boxes) -> bool:
    """Whether boxes hold each element of a tensor once, and nothing else."""
    return all(_fits(shape, *box) for box in boxes) and _tile(shape, boxes)


def _fits(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    return len(offsets) == len(sizes) == len(shape) and all(
        o >= 0 and n > 0 and o + n <= most for o, n, most in zip(offsets, sizes, shape, strict=True)
    )


def _tile(shape: tuple[int, ...], boxes: Boxes) -> bool:
    """Whether boxes that lie in a tensor hold each of its elements once.

    Give each step from one coordinate to the next a random length, modulo a large prime. If the
    boxes tile the tensor, their volumes add up to its volume. If they do not, the volumes add up
    only by a chance of 1 in 10¹⁶, and no attacker can foresee the lengths. This takes one pass over
    the boxes; comparing them with each other would take time in the square of their number.
    """
    marks: list[dict[int, int]] = [{} for _ in shape]
    lengths = random.Random()  # seeded by the operating system

    def volume(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        product = 1
        for at, start, size in zip(marks, offsets, sizes, strict=True):
            for edge in (start, start + size):
                if edge not in at:
                    at[edge] = lengths.randrange(_PRIME)
            product = product * (at[start + size] - at[start]) % _PRIME
        return product

    return (sum(volume(*box) for box in boxes) - volume((0,) * len(shape), shape)) % _PRIME == 0
