"""The grid and its boxes, against torch slicing."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casnap.format.grid import grid_of
from casnap.format.region import Region
from tests.support.boxes import chunk_sizes, cut, itemsizes, numbered, regions, shapes

shapes_with_zero = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def shapes_and_regions(draw, count=1):
    shape = draw(shapes_with_zero)
    return shape, *(draw(regions(shape)) for _ in range(count))


@given(shapes_with_zero, itemsizes, chunk_sizes)
def test_cells_are_consecutive_runs_that_cover_a_tensor(shape, itemsize, chunk_size):
    grid = grid_of(shape, itemsize, chunk_size)
    cells = [cut(numbered(shape), grid.region(i)).flatten() for i in range(grid.count)]
    assert torch.equal(
        torch.cat([*cells, torch.empty(0, dtype=torch.int64)]).long(), torch.arange(prod(shape))
    )
    sizes = [cell.numel() * itemsize for cell in cells]
    assert sizes == list(grid.sizes()) == [grid.cell_bytes(i) for i in range(grid.count)]
    assert all(0 < size <= chunk_size for size in sizes)


@given(shapes, itemsizes, chunk_sizes)
def test_cells_are_as_large_as_the_rule_says(shape, itemsize, chunk_size):
    grid = grid_of(shape, itemsize, chunk_size)
    if not shape:
        assert (grid.count, list(grid.sizes())) == (1, [itemsize])
        return
    below = [itemsize * prod(shape[i + 1 :]) for i in range(len(shape))]
    axis = next(i for i, b in enumerate(below) if b <= chunk_size)
    step = 1
    while step * 2 * below[axis] <= chunk_size:
        step *= 2
    assert (grid.axis, grid.step) == (axis, min(shape[axis], step))
    assert grid.slice_bytes == below[axis]
    region = grid.region(grid.count - 1)
    assert region.sizes[:axis] == (1,) * axis
    assert region.sizes[axis + 1 :] == shape[axis + 1 :]


@given(shapes_and_regions(), itemsizes, chunk_sizes)
def test_covering_yields_what_shares_an_element_in_order(case, itemsize, chunk_size):
    shape, region = case
    grid = grid_of(shape, itemsize, chunk_size)
    wanted = set(cut(numbered(shape), region).flatten().tolist())
    sharing = [
        i
        for i in range(grid.count)
        if wanted & set(cut(numbered(shape), grid.region(i)).flatten().tolist())
    ]
    assert list(grid.covering(region)) == sharing
    assert all(a < b for a, b in pairwise(sharing))


@given(shapes_and_regions(count=2))
def test_intersection_is_what_both_boxes_hold(case):
    shape, a, b = case
    both = set(cut(numbered(shape), a).flatten().tolist())
    both &= set(cut(numbered(shape), b).flatten().tolist())
    common = a.intersect(b)
    assert common == b.intersect(a)
    if common is None:
        assert not both
    else:
        assert set(cut(numbered(shape), common).flatten().tolist()) == both
        assert len(both) == common.numel > 0


@given(shapes_and_regions(count=2))
def test_within_cuts_a_box_out_of_a_box(case):
    shape, outer, other = case
    common = outer.intersect(other)
    if common is not None:
        held = cut(numbered(shape), outer)
        assert torch.equal(held[common.within(outer)], cut(numbered(shape), common))


def test_a_large_tensor_has_cells_near_the_chunk_size():
    grid = grid_of((32000, 4096), 2, 1 << 20)
    assert (grid.axis, grid.step, grid.count) == (0, 128, 250)
    assert grid.cell_bytes(0) == 1 << 20


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 2)])
def test_a_tensor_without_elements_has_no_cells(shape):
    grid = grid_of(shape, 4, 64)
    assert (grid.count, list(grid.sizes())) == (0, [])
    assert list(grid.covering(Region.whole(shape))) == []


def test_a_scalar_is_one_cell():
    grid = grid_of((), 8, 64)
    assert grid.region(0) == Region((), ())
    assert list(grid.covering(Region((), ()))) == [0]
    assert Region((), ()).intersect(Region((), ())) == Region((), ())
