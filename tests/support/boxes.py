"""Shapes, regions and boxes that tile a tensor, as Hypothesis strategies; boxes that tile none."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import strategies as st

from casnap.format.region import Region
from casnap.format.tiling import MAX_BOXES

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)
itemsizes = st.sampled_from([1, 2, 4, 8, 16])
chunk_sizes = st.sampled_from([16, 32, 64, 256, 1 << 20])


@st.composite
def regions(draw: st.DrawFn, shape: Shape) -> Region:
    offsets: list[int] = []
    sizes: list[int] = []
    for n in shape:
        start = draw(st.integers(0, n))
        offsets.append(start)
        sizes.append(draw(st.integers(0, n - start)))
    return Region(tuple(offsets), tuple(sizes))


def numbered(shape: Shape) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


def cut(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[region.within(Region.whole(tuple(tensor.shape)))]


@st.composite
def tilings(draw: st.DrawFn, shape: Shape, most: int = 8) -> tuple[Box, ...]:
    """Return boxes that tile a shape, made by cutting it again and again."""
    boxes: list[Box] = [((0,) * len(shape), shape)] if 0 not in shape else []
    for _ in range(draw(st.integers(0, most - 1)) if boxes else 0):
        at = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[at]
        axes = [i for i, n in enumerate(sizes) if n > 1]
        if axes:
            axis = draw(st.sampled_from(axes))
            length = draw(st.integers(1, sizes[axis] - 1))
            starts = list(offsets)
            starts[axis] += length
            first, rest = list(sizes), list(sizes)
            first[axis], rest[axis] = length, rest[axis] - length
            boxes[at : at + 1] = [(offsets, tuple(first)), (tuple(starts), tuple(rest))]
    return tuple(sorted(boxes))


HUGE = 1 << 62
ROWS = tuple(((i, 0), (1, 2)) for i in range(3))
NO_TILINGS: dict[str, tuple[Shape, tuple[Box, ...]]] = {
    "no boxes": ((3, 2), ()),
    "out of order": ((3, 2), (ROWS[1], ROWS[0], ROWS[2])),
    "twice": ((3, 2), (*ROWS, ROWS[2])),
    "a gap": ((3, 2), ROWS[:2]),
    "beyond": ((2, 2), ROWS),
    "before": ((3, 2), (((-1, 0), (1, 2)), *ROWS)),
    "empty": ((3, 2), (((0, 0), (0, 2)), *ROWS)),
    "negative": ((3, 2), (((0, 0), (-1, -2)), *ROWS[1:])),
    "too few axes": ((3, 2), (((0,), (3,)),)),
    "too many axes": ((6,), (((0, 0), (6, 1)),)),
    "sizes of other axes": ((6,), (((0,), (6, 1)),)),
    "an overlap as large as a gap": ((4,), (((0,), (2,)), ((1,), (2,)))),
    "huge": ((HUGE, 2), (((0, 0), (HUGE, 1)), ((HUGE, 0), (HUGE, 1)))),
    "one of none": ((), ()),
    "two of one": ((), (((), ()), ((), ()))),
    "empty tensor": ((0, 4), (((0, 0), (0, 4)),)),
    "many axes": ((1,) * 65, (((0,) * 65, (1,) * 65),)),
    "many": ((MAX_BOXES + 1,), tuple(((i,), (1,)) for i in range(MAX_BOXES + 1))),
}
