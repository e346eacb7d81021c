"""The boxes that ranks hold of a tensor: whether they cover it, and which disjoint boxes do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from casnap.errors import StateError
from casnap.format.region import Region, cover_once


def distinct_boxes(
    shape: tuple[int, ...], holders: Iterable[tuple[int, Region]], name: str
) -> dict[Region, list[int]]:
    """Return the boxes that are not empty, each with the ranks that hold it, in order.

    Raises:
        StateError: A box lies outside the tensor.
    """
    held: dict[Region, set[int]] = {}
    for rank, box in holders:
        if 0 not in box.sizes:
            held.setdefault(box, set()).add(rank)
    for box, ranks in held.items():
        ends = [o + n for o, n in zip(box.offsets, box.sizes, strict=True)]
        if len(ends) != len(shape) or any(
            o < 0 or end > size for o, end, size in zip(box.offsets, ends, shape, strict=True)
        ):
            raise StateError(
                f"{name}: rank {min(ranks)} says that it holds offsets {box.offsets}, sizes "
                f"{box.sizes}, which do not fit the shape {shape}; give all ranks one and the same "
                "global shape"
            )
    return {box: sorted(ranks) for box, ranks in held.items()}


def disjoint_boxes(
    shape: tuple[int, ...], held: dict[Region, list[int]], name: str
) -> list[tuple[Region, list[int]]]:
    """Return disjoint boxes that cover the tensor, sorted, each with the ranks that hold it.

    Raises:
        StateError: No rank holds some part of the tensor.
    """
    tiles = list(held.items())
    if not cover_once(shape, held):
        # Boxes overlap, or one is missing. No sharding of torch does that, so this may be slow. The
        # largest boxes stay whole.
        tiles, before = [], list[Region]()
        for box, ranks in sorted(held.items(), key=lambda h: (-h[0].numel, h[0].offsets)):
            tiles += [(rest, ranks) for rest in _without([box], before)]
            before.append(box)
        if sum(box.numel for box, _ in tiles) != prod(shape):
            raise missing_box_error(shape, held, name)
    return sorted(tiles, key=lambda tile: tile[0].offsets)


def _without(boxes: list[Region], others: Iterable[Region]) -> list[Region]:
    """Return the parts of some boxes that lie in none of the others."""
    for other in others:
        boxes = [rest for box in boxes for rest in _subtracted(box, other)]
    return boxes


def _subtracted(box: Region, other: Region) -> Iterator[Region]:
    """Yield disjoint boxes that cover a box without another."""
    common = box.intersect(other)
    if common is None:
        yield box
        return
    offsets, sizes = list(box.offsets), list(box.sizes)
    for axis, (o, n) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        for start, stop in ((offsets[axis], o), (o + n, offsets[axis] + sizes[axis])):
            if start < stop:
                yield Region(
                    (*offsets[:axis], start, *offsets[axis + 1 :]),
                    (*sizes[:axis], stop - start, *sizes[axis + 1 :]),
                )
        offsets[axis], sizes[axis] = o, n


def missing_box_error(shape: tuple[int, ...], held: Iterable[Region], name: str) -> StateError:
    """Return the error that names a box that no rank holds."""
    box = _without([Region.whole(shape)], held)[0]
    return StateError(
        f"{name}: of shape {shape}, no rank holds the box at offsets {box.offsets} of sizes "
        f"{box.sizes}; all ranks of its mesh must take part, each with all that it holds"
    )
