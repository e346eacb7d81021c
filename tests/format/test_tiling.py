"""Tensors that are cut into boxes: their cells against slicing, and boxes that are no tiling."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casnap.errors import DamagedError
from casnap.format.entries import BoxedTensorEntry, Payload, TensorEntry
from casnap.format.grid import grid_of
from casnap.format.region import Region
from casnap.format.tiling import MAX_BOXES, tile, tiling_of
from tests.support.boxes import (
    NO_TILINGS,
    chunk_sizes,
    cut,
    itemsizes,
    numbered,
    regions,
    shapes,
    tilings,
)

# Five boxes around a middle: no cut through all of them makes it.
PINWHEEL = (
    ((0, 0), (1, 2)),
    ((0, 2), (2, 1)),
    ((1, 0), (2, 1)),
    ((1, 1), (1, 1)),
    ((2, 1), (1, 2)),
)


@st.composite
def shapes_and_boxes(draw):
    shape = draw(shapes)
    return shape, draw(tilings(shape))


def entry_of(shape, boxes, itemsize=4):
    return BoxedTensorEntry("float32", shape, Payload(prod(shape) * itemsize), boxes=boxes)


@given(shapes_and_boxes(), itemsizes, chunk_sizes)
def test_cells_are_those_of_each_box_in_turn(case, itemsize, chunk_size):
    shape, boxes = case
    tiling = tiling_of(entry_of(shape, boxes), itemsize, chunk_size)
    elements, sizes = [], []
    for offsets, extent in boxes:
        box = cut(numbered(shape), Region(offsets, extent))
        grid = grid_of(extent, itemsize, chunk_size)
        elements += [cut(box, grid.region(i)).tolist() for i in range(grid.count)]
        sizes += grid.sizes()
    assert tiling.count == len(sizes)
    assert list(tiling.sizes()) == [tiling.cell_bytes(i) for i in range(tiling.count)] == sizes
    assert [
        cut(numbered(shape), tiling.region(i)).tolist() for i in range(tiling.count)
    ] == elements
    once = torch.cat([torch.tensor(e).flatten() for e in elements]).sort().values
    assert torch.equal(once, torch.arange(prod(shape)))


@given(st.data(), shapes_and_boxes(), itemsizes, chunk_sizes)
def test_covering_yields_what_shares_an_element_in_order(data, case, itemsize, chunk_size):
    shape, boxes = case
    region = data.draw(regions(shape))
    tiling = tile(shape, boxes, itemsize, chunk_size)
    wanted = set(cut(numbered(shape), region).flatten().tolist())
    cells = [cut(numbered(shape), tiling.region(i)) for i in range(tiling.count)]
    shared = [i for i, c in enumerate(cells) if wanted & set(c.flatten().tolist())]
    assert list(tiling.covering(region)) == shared


@given(shapes, itemsizes, chunk_sizes)
def test_one_box_is_no_other_cut(shape, itemsize, chunk_size):
    plain = TensorEntry("float32", shape, Payload(prod(shape) * itemsize))
    grid = tiling_of(plain, itemsize, chunk_size)
    assert grid is grid_of(shape, itemsize, chunk_size)
    tiling = tile(shape, (((0,) * len(shape), shape),), itemsize, chunk_size)
    assert [tiling.region(i) for i in range(tiling.count)] == [
        grid.region(i) for i in range(grid.count)
    ]


@given(st.data(), shapes)
def test_a_box_knows_where_its_run_begins(data, shape):
    outer, inner = data.draw(regions(shape)), data.draw(regions(shape))
    common = inner.intersect(outer)
    if common is None:
        return
    whole = numbered(outer.sizes)
    elements = whole[common.within(outer)].flatten().tolist()
    is_run = elements == list(range(elements[0], elements[0] + len(elements)))
    assert common.start_in(outer) == (elements[0] if is_run else None)


# --- boxes that are no tiling -----------------------------------------------------------------


def is_tiling(shape, boxes):
    """Count how often each element is in a box."""
    counts = dict.fromkeys(product(*map(range, shape)), 0)
    for offsets, sizes in boxes:
        if not (len(offsets) == len(sizes) == len(shape)) or 0 in sizes:
            return False
        for at in product(*(range(o, o + n) for o, n in zip(offsets, sizes, strict=True))):
            if at not in counts:
                return False
            counts[at] += 1
    return set(counts.values()) <= {1}


@st.composite
def spoilt(draw):
    """Return a shape, and boxes that are a tiling, or almost."""
    shape, boxes = draw(shapes_and_boxes())
    boxes = list(boxes)
    at = draw(st.integers(0, len(boxes) - 1))
    near = st.integers(-1, 1)
    match draw(st.sampled_from(["left out", "twice", "moved", "another size", "exchanged"])):
        case "left out":
            del boxes[at]
        case "twice":
            boxes.append(boxes[at])
        case "moved":
            offsets, sizes = boxes[at]
            boxes[at] = tuple(o + draw(near) for o in offsets), sizes
        case "another size":
            offsets, sizes = boxes[at]
            boxes[at] = offsets, tuple(n + draw(near) for n in sizes)
        case "exchanged":
            # As many elements as before, and other ones.
            other = draw(st.integers(0, len(boxes) - 1))
            boxes[at] = boxes[at][0], boxes[other][1]
    return shape, tuple(sorted(boxes))


@given(spoilt())
def test_boxes_are_taken_only_if_they_tile(case):
    shape, boxes = case
    if is_tiling(shape, boxes):
        tile(shape, boxes, 4, 64)
    else:
        with pytest.raises(DamagedError, match="box"):
            tile(shape, boxes, 4, 64)


@pytest.mark.parametrize("turn", [False, True])
def test_boxes_that_no_cut_separates(turn):
    boxes = [(o[::-1], n[::-1]) if turn else (o, n) for o, n in PINWHEEL]
    tiling = tile((3, 3), tuple(sorted(boxes)), 4, 1 << 20)
    assert list(tiling.sizes()) == [4 * prod(n) for _, n in sorted(boxes)]
    for at, (offsets, sizes) in enumerate(sorted(boxes)):
        # Of the right volume in all, in the wrong place.
        wrong = sorted([*boxes[:at], (offsets[::-1], sizes), *boxes[at + 1 :]])
        assert is_tiling((3, 3), wrong) == (wrong == sorted(boxes))
        if wrong != sorted(boxes):
            with pytest.raises(DamagedError):
                tile((3, 3), tuple(wrong), 4, 1 << 20)


@pytest.mark.parametrize("case", NO_TILINGS)
def test_what_is_no_tiling(case):
    shape, boxes = NO_TILINGS[case]
    with pytest.raises(DamagedError, match="box"):
        tiling_of(entry_of(shape, boxes), 4, 1 << 16)


def test_as_many_boxes_as_there_may_be():
    side = 1 << 8
    boxes = tuple(((3 * i, 2 * j), (3, 2)) for i in range(side) for j in range(side))
    assert len(boxes) == MAX_BOXES
    tiling = tile((3 * side, 2 * side), boxes, 4, 1 << 16)
    assert tiling.count == MAX_BOXES
    assert tiling.region(MAX_BOXES - 1) == Region(*boxes[-1])
    assert list(tiling.covering(Region((4, 3), (1, 2)))) == [side + 1, side + 2]


def test_tensors_without_elements_have_no_boxes():
    tiling = tile((0, 4), (), 4, 1 << 16)
    assert (tiling.count, list(tiling.sizes())) == (0, [])
    assert list(tiling.covering(Region((0, 0), (0, 4)))) == []
    assert list(tile((), (((), ()),), 4, 1 << 16).sizes()) == [4]
