"""Boxes in a tensor, their intersections, and whether they cover the tensor once."""

from __future__ import annotations

import random
from collections.abc import Collection

from msgspec import Struct

_PRIME = (1 << 61) - 1


class Region(Struct, frozen=True, array_like=True, gc=False):
    """A box of the elements of a tensor.

    On each axis ``i`` it holds ``offsets[i] <= x_i < offsets[i] + sizes[i]``.

    Attributes:
        offsets: Where it begins, on each axis.
        sizes: How many elements it has, on each axis.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """Return the box that holds a whole tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        n = 1
        for size in self.sizes:
            n *= size
        return n

    def intersect(self, other: Region) -> Region | None:
        """Return the common box; None if there is no common element."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Region(tuple(offsets), tuple(sizes))

    def start_in(self, outer: Region) -> int | None:
        """Return the index of this box's first element among the row-major elements of ``outer``.

        None if the elements of this box are not consecutive in ``outer``.
        """
        start, stride, is_contiguous = 0, 1, True
        for axis in range(len(self.sizes) - 1, -1, -1):
            n, full = self.sizes[axis], outer.sizes[axis]
            if n > 1 and not is_contiguous:
                return None
            start += (self.offsets[axis] - outer.offsets[axis]) * stride
            stride *= full
            is_contiguous = is_contiguous and n == full
        return start

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Return the slices that cut this box out of a tensor that holds ``outer``."""
        return tuple(
            slice(o - base, o - base + n)
            for o, n, base in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


def cover_once(shape: tuple[int, ...], boxes: Collection[Region]) -> bool:
    """Whether boxes hold each element of a tensor once, and nothing else. No box may be empty.

    Each step from one coordinate to the next gets a random length, modulo a large prime. If the
    boxes cover the tensor once, their volumes add up to its volume. Else they do so with a chance
    of 1 in 10¹⁶, and no attacker can foresee the lengths. This takes one pass over the boxes;
    comparing each with each would take time in the square of their number.
    """
    marks: list[dict[int, int]] = [{} for _ in shape]
    lengths = random.Random()  # seeded by the operating system

    def volume(box: Region) -> int:
        product = 1
        for at, start, size in zip(marks, box.offsets, box.sizes, strict=True):
            for edge in (start, start + size):
                if edge not in at:
                    at[edge] = lengths.randrange(_PRIME)
            product = product * (at[start + size] - at[start]) % _PRIME
        return product

    if not all(_fits(shape, box) for box in boxes):
        return False
    return (sum(map(volume, boxes)) - volume(Region.whole(shape))) % _PRIME == 0


def _fits(shape: tuple[int, ...], box: Region) -> bool:
    return len(box.offsets) == len(box.sizes) == len(shape) and all(
        o >= 0 and n > 0 and o + n <= most
        for o, n, most in zip(box.offsets, box.sizes, shape, strict=True)
    )
