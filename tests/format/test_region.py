"""Boxes in a tensor: where a run of one begins, and whether some cover the tensor once."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casnap.format.region import Region, cover_once
from tests.support.boxes import numbered, regions, shapes

# Five boxes around a middle: no cut through all of them makes it.
PINWHEEL = (
    Region((0, 0), (1, 2)),
    Region((0, 2), (2, 1)),
    Region((1, 0), (2, 1)),
    Region((1, 1), (1, 1)),
    Region((2, 1), (1, 2)),
)


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


# --- boxes that cover a tensor once -------------------------------------------------------------


@st.composite
def cut_up(draw):
    """Return a shape, and boxes that cover it once, made by cutting it again and again."""
    shape = draw(shapes)
    boxes = [Region.whole(shape)]
    for _ in range(draw(st.integers(0, 7))):
        at = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[at].offsets, boxes[at].sizes
        axes = [i for i, n in enumerate(sizes) if n > 1]
        if axes:
            axis = draw(st.sampled_from(axes))
            length = draw(st.integers(1, sizes[axis] - 1))
            starts, first, rest = list(offsets), list(sizes), list(sizes)
            starts[axis] += length
            first[axis], rest[axis] = length, rest[axis] - length
            boxes[at : at + 1] = [
                Region(offsets, tuple(first)),
                Region(tuple(starts), tuple(rest)),
            ]
    return shape, draw(st.permutations(boxes))


def each_once(shape, boxes):
    """Count how often each element is in a box."""
    counts = dict.fromkeys(product(*map(range, shape)), 0)
    for box in boxes:
        if not (len(box.offsets) == len(box.sizes) == len(shape)) or 0 in box.sizes:
            return False
        for at in product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))):
            if at not in counts:
                return False
            counts[at] += 1
    return set(counts.values()) <= {1}


@st.composite
def spoilt(draw):
    """Return a shape, and boxes that cover it once, or almost."""
    shape, boxes = draw(cut_up())
    at = draw(st.integers(0, len(boxes) - 1))
    box, near = boxes[at], st.integers(-1, 1)
    match draw(st.sampled_from(["left out", "twice", "moved", "another size", "exchanged"])):
        case "left out":
            del boxes[at]
        case "twice":
            boxes.append(box)
        case "moved":
            boxes[at] = Region(tuple(o + draw(near) for o in box.offsets), box.sizes)
        case "another size":
            boxes[at] = Region(box.offsets, tuple(n + draw(near) for n in box.sizes))
        case "exchanged":
            # As many elements as before, and other ones.
            other = draw(st.integers(0, len(boxes) - 1))
            boxes[at] = Region(box.offsets, boxes[other].sizes)
    return shape, boxes


@given(cut_up() | spoilt())
def test_boxes_cover_once_if_each_element_is_in_one(case):
    shape, boxes = case
    assert cover_once(shape, boxes) == each_once(shape, boxes)


@pytest.mark.parametrize("turn", [False, True])
def test_boxes_that_no_cut_separates(turn):
    boxes = [Region(b.offsets[::-1], b.sizes[::-1]) if turn else b for b in PINWHEEL]
    assert cover_once((3, 3), boxes)
    for at, box in enumerate(boxes):
        # Of the right volume in all, in the wrong place.
        moved = Region(box.offsets[::-1], box.sizes)
        wrong = [*boxes[:at], moved, *boxes[at + 1 :]]
        assert cover_once((3, 3), wrong) == each_once((3, 3), wrong)


HUGE = 1 << 62
ROWS = tuple(((i, 0), (1, 2)) for i in range(3))
WRONG = {
    "no boxes": ((3, 2), ()),
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
    "none of one": ((), ()),
    "two of one": ((), (((), ()), ((), ()))),
    "empty tensor": ((0, 4), (((0, 0), (0, 4)),)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_cover_once(case):
    shape, boxes = WRONG[case]
    assert not cover_once(shape, [Region(*box) for box in boxes])


def test_many_boxes_take_one_pass():
    side = 1 << 8
    boxes = [Region((3 * i, 2 * j), (3, 2)) for i in range(side) for j in range(side)]
    assert cover_once((3 * side, 2 * side), boxes)
    assert not cover_once((3 * side, 2 * side), boxes[:-1])
    assert cover_once((1,) * 65, [Region((0,) * 65, (1,) * 65)])


def test_tensors_without_elements_have_no_boxes():
    assert cover_once((0, 4), [])
    assert cover_once((), [Region((), ())])
