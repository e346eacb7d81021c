"""Which rank hashes which cells: plans, carried out on numbered elements."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casnap.errors import StateError
from casnap.format.grid import grid_of
from casnap.format.region import Region
from casnap.take.plan import plan_tensor, replicated_runs

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
itemsizes = st.sampled_from([1, 2, 4, 8])
chunk_sizes = st.sampled_from([8, 16, 64, 256])


# --- sharded tensors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "box", [Region((0, 0), (5, 4)), Region((-1, 0), (2, 4)), Region((0,), (4,))]
)
def test_a_box_outside_is_refused(box):
    with pytest.raises(StateError, match="rank 3 says that it holds"):
        plan_tensor((4, 4), 4, 64, [(0, Region.whole((4, 4))), (3, box)])


@pytest.mark.parametrize("turn", range(5))
def test_replicas_share_evenly(turn):
    # Ranks 0 to 4 hold the first half, 5 to 9 the second: 500 cells each.
    shape = (8000, 16)
    holders = [(r, Region((4000 * (r // 5), 0), (4000, 16))) for r in range(10)]
    plan = plan_tensor(shape, 4, 512, holders, tiebreak=turn)
    assert not any(todo.joints or todo.sends for todo in plan.values())
    hashed = [sum(b - a for a, b in plan[r].runs) for r in range(10)]
    assert hashed == [100] * 10
    assert all(len(todo.runs) == 1 for todo in plan.values())


def test_turns_spread_what_one_rank_must_do():
    # Of a tensor smaller than a cell, one rank puts all together; not always the same one.
    holders = [(r, Region((r * 4,), (4,))) for r in range(8)]
    owners = [
        next(
            r for r, todo in plan_tensor((32,), 4, 4096, holders, tiebreak=t).items() if todo.joints
        )
        for t in range(8)
    ]
    assert owners == list(range(8))


def test_parts_come_from_the_same_host_if_they_can():
    # Two hosts of two ranks each hold a replica; each rank has half of the columns.
    holders = [(r, Region((0, 4 * (r % 2)), (160, 4))) for r in range(4)]
    plan = plan_tensor((160, 8), 4, 64, holders, hosts=[7, 7, 9, 9])
    assert all(todo.joints for todo in plan.values())
    assert all(sent.to // 2 == r // 2 for r, todo in plan.items() for sent in todo.sends)


def test_who_has_much_to_hash_already_gets_no_cells_of_others():
    loads = defaultdict(int, {0: 10_000})
    holders = [(r, Region((25 * r, 0), (25, 4))) for r in range(4)]
    plan = plan_tensor((100, 4), 4, 256, holders, loads=loads)  # 16 rows a cell
    cells = {r: len(p.joints) for r, p in plan.items()}
    assert cells[0] == 0
    assert sum(cells.values()) == 3
    assert loads[0] == 10_000 + 256


@pytest.mark.parametrize("columns", [4, 3])
def test_ranks_that_hold_columns_put_as_much_together(columns):
    # 64 MiB in cells of 1 MiB, of which no rank holds one whole.
    shape, step = (16384, 1020), 1020 // columns
    holders = [(r, Region((0, r * step), (16384, step))) for r in range(columns)]
    loads = defaultdict(int)
    for _ in range(5):
        plan = plan_tensor(shape, 4, 1 << 20, holders, loads=loads)
        joined = [run for todo in plan.values() for run in todo.joints]
        assert max(stop - first for first, stop in joined) == 4
        assert len(joined) < 24
        for r, todo in plan.items():
            assert len(todo.sends) == len(joined), r
            assert not todo.runs
    assert max(loads.values()) < 1.05 * sum(loads.values()) / columns


def test_a_copy_of_many_slices_is_one_run():
    # Each slice is two cells; a rank that holds all of them is not told of each.
    plan = plan_tensor((1000, 32, 16), 1, 256, [(0, Region.whole((1000, 32, 16)))])
    assert plan[0].runs == [(0, 2000)]
    halves = [(r, Region((0, 0, 8 * r), (1000, 32, 8))) for r in range(2)]
    joined = [
        run for todo in plan_tensor((1000, 32, 16), 1, 256, halves).values() for run in todo.joints
    ]
    assert sorted(joined) == [(2 * i, 2 * i + 2) for i in range(1000)]


# --- declared replicas ------------------------------------------------------------------------


@given(st.lists(shapes, max_size=6), itemsizes, chunk_sizes, st.integers(1, 9))
def test_replicas_are_shared_out_without_a_word(some, itemsize, chunk_size, world):
    grids = [grid_of(shape, itemsize, chunk_size) for shape in some]
    sizes = [list(grid.sizes()) for grid in grids]
    seen, loads = [], []
    for rank in range(world):
        cells = [
            (tensor, i)
            for tensor, first, stop in replicated_runs(grids, rank, world)
            for i in range(first, stop)
        ]
        seen += cells
        loads.append(sum(sizes[tensor][i] for tensor, i in cells))
    assert seen == [(t, i) for t, grid in enumerate(grids) for i in range(grid.count)]
    largest = max((n for each in sizes for n in each), default=0)
    assert all(abs(load - sum(loads) / world) <= largest for load in loads)


def test_a_million_cells_are_no_work():
    grids = [grid_of((1 << 30,), 4, 1 << 20)] * 256
    assert sum(grid.count for grid in grids) == 1 << 20
    runs = replicated_runs(grids, 500, 1000)
    assert sum(stop - first for _, first, stop in runs) in (1048, 1049)
    assert len(runs) <= 2
