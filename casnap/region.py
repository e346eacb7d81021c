"""Boxes in a tensor, and their intersections."""

from __future__ import annotations

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
        """Return the common box, or None where there is no common element."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Region(tuple(offsets), tuple(sizes))

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Return the slices that cut this box out of a tensor that holds ``outer``."""
        return tuple(
            slice(o - base, o - base + n)
            for o, n, base in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )
