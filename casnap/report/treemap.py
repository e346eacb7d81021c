"""Cutting a rectangle into parts whose areas are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle: its corner, its width and its height."""

    x: float
    y: float
    width: float
    height: float


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """Cut a rectangle into one part for each size, each as square as can be.

    The algorithm is that of Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000).

    Args:
        sizes: Positive sizes, the largest first.
        box: The rectangle.
    """
    boxes: list[Box] = []
    left = sum(sizes)
    at = 0
    while at < len(sizes):
        # How many of the next parts stand side by side at the shorter side.
        count = 1
        while at + count < len(sizes):
            if _worst(sizes[at : at + count + 1], left, box) > _worst(
                sizes[at : at + count], left, box
            ):
                break
            count += 1
        row = sizes[at : at + count]
        placed, box = _laid(row, left, box)
        boxes += placed
        left -= sum(row)
        at += count
    return boxes


def _worst(row: Sequence[float], left: float, box: Box) -> float:
    """Return the greatest ratio of the sides of the parts of a row."""
    side = min(box.width, box.height)
    scale = box.width * box.height / left
    total = sum(row) * scale
    if side <= 0 or total <= 0:
        return 1.0
    return max(
        max(side**2 * size * scale / total**2, total**2 / (side**2 * size * scale)) for size in row
    )


def _laid(row: Sequence[float], left: float, box: Box) -> tuple[list[Box], Box]:
    """Lay parts along the shorter side; return their boxes and what is left of the rectangle."""
    total = sum(row)
    share = min(1.0, total / left)
    placed: list[Box] = []
    if box.width >= box.height:
        depth, at = box.width * share, box.y
        for size in row:
            length = box.height * size / total
            placed.append(Box(box.x, at, depth, length))
            at += length
        return placed, Box(box.x + depth, box.y, box.width - depth, box.height)
    depth, at = box.height * share, box.x
    for size in row:
        length = box.width * size / total
        placed.append(Box(at, box.y, length, depth))
        at += length
    return placed, Box(box.x, box.y + depth, box.width, box.height - depth)
