"""Boxes of elements in a tensor: their intersections, and whether they cover the tensor once."""

from __future__ import annotations

import random
from collections.abc import Collection

from msgspec import Struct

_PRIME = (1 << 61) - 1


class Region(Struct, frozen=True, array_like=True, gc=False):
    """A box of elements in a tensor, given by a range of indices on each axis.

    On axis ``i`` the range is from ``offsets[i]`` to before ``offsets[i] + sizes[i]``.

    Attributes:
        offsets: The first index on each axis.
        sizes: The number of indices on each axis.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """Return the box that holds a whole tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """The number of elements in the box."""
        n = 1
        for size in self.sizes:
            n *= size
        return n

    def intersect(self, other: Region) -> Region | None:
        """Return the box of the elements that are in both boxes; None if there are none."""
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

        Returns:
            The index; None if the elements of this box do not follow each other in ``outer``.
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
        """Return the slices that select this box from a tensor that holds the box ``outer``."""
        return tuple(
            slice(o - base, o - base + n)
            for o, n, base in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


def cover_once(shape: tuple[int, ...], boxes: Collection[Region]) -> bool:
    """Whether boxes cover each element of a tensor exactly once, and nothing outside it.

    The check adds up the volumes of the boxes, and compares the sum with the volume of the tensor.
    To tell overlaps from gaps, each step from one index to the next gets a random length, modulo a
    large prime. Boxes that do not cover the tensor once pass with a probability of 1 in 10¹⁶, and
    nobody can foresee the lengths. The time grows with the number of boxes, not with its square.

    Args:
        shape: The shape of the tensor.
        boxes: The boxes. With an empty box among them the result is False.
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
