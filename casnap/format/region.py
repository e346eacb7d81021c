"""Boxes in a tensor, and their intersections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """An N-d box: ``offsets[i] <= x_i < offsets[i] + sizes[i]``."""

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

    def moved(self, by: Iterable[int]) -> Region:
        """Return this box, moved along each axis."""
        return Region(tuple(o + d for o, d in zip(self.offsets, by, strict=True)), self.sizes)

    def start_in(self, outer: Region) -> int | None:
        """Return where this box begins among the row-major elements of ``outer``.

        None if its elements are not consecutive there.
        """
        start, stride, whole = 0, 1, True
        for axis in range(len(self.sizes) - 1, -1, -1):
            n, full = self.sizes[axis], outer.sizes[axis]
            if n > 1 and not whole:
                return None
            start += (self.offsets[axis] - outer.offsets[axis]) * stride
            stride *= full
            whole = whole and n == full
        return start

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Return the slices that cut this box out of a tensor that holds ``outer``."""
        return tuple(
            slice(o - base, o - base + n)
            for o, n, base in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )
