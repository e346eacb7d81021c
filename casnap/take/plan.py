"""Plans which rank hashes which cells: arithmetic on shapes, boxes and ranks.

There are two kinds of plans. Tensors that all ranks hold are shared out by bytes; each rank
computes its own share (:func:`replicated_runs`). A sharded tensor is planned by one rank, from the
boxes that each rank holds (:func:`plan_tensor`).

A cell that shard edges cut is put together by one rank. If no edge lies on an axis after that of
the grid, every box is a few runs of the tensor's bytes, and every part of a cell is one run of the
cell's bytes. So plans are made in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, TypeAlias

from msgspec import Struct, field

from casnap.format.grid import Grid, grid_of
from casnap.format.region import Region
from casnap.take.boxes import disjoint_boxes, distinct_boxes, missing_box_error

CoveredRun: TypeAlias = tuple[int, int, tuple[int, ...]]
"""A run from one number to another, and the boxes that cover it."""


class SentPart(Struct, frozen=True, array_like=True, gc=False):
    """A part of a cell that goes to another rank: bytes ``start`` to ``stop`` of the cell."""

    cell: int
    to: int
    start: int
    stop: int


class PartSource(Struct, frozen=True, array_like=True, gc=False):
    """The rank that bytes ``start`` to ``stop`` of a cell come from."""

    source: int
    start: int
    stop: int


class Assembly(Struct, frozen=True, array_like=True):
    """A cell that a rank puts together from parts, its own included."""

    cell: int
    parts: tuple[PartSource, ...]


class StoredBox(Struct, frozen=True, array_like=True):
    """A box that is gridded as a tensor of its own.

    Attributes:
        first: The number of its first cell among all cells of the tensor.
        offsets: Its offsets in the tensor.
        sizes: Its sizes.
    """

    first: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class RankPlan(Struct, array_like=True):
    """What one rank does for one tensor. Cells are numbered over the whole tensor.

    Attributes:
        boxes: The boxes that ``runs`` lie in, in order, if the tensor is stored as boxes.
        runs: Whole cells to hash, from one number to another, in order; each run lies in a single
            box that the rank holds.
        sends: The parts that other ranks need, in the order of cells.
        assemblies: The cells that it puts together and hashes, in order.
    """

    boxes: list[StoredBox] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    sends: list[SentPart] = field(default_factory=list)
    assemblies: list[Assembly] = field(default_factory=list)


class TensorPlan(NamedTuple):
    """How a sharded tensor is stored, and what each rank does for that.

    Attributes:
        boxes: The boxes that have a grid each, sorted by offsets; none if the tensor has one grid.
        ranks: The plan of each rank that has something to do.
    """

    boxes: tuple[Region, ...]
    ranks: dict[int, RankPlan]


def replicated_runs(grids: Sequence[Grid], rank: int, world: int) -> list[tuple[int, int, int]]:
    """Return which cells a rank hashes of tensors that all ranks hold.

    All have the same number of bytes to hash, give or take one cell.

    Args:
        grids: Of all these tensors, in one order on all ranks.
        rank: Whose share.
        world: The number of ranks.

    Returns:
        Runs of cells: for each the number of the tensor, the first cell, and one past the last.
    """
    return _CellRuns([(_CellBytes(grid), 0, grid.count) for grid in grids]).share(rank, world)


def part_region(grid: Grid, cell: int, start: int, stop: int) -> Region:
    """Return the box of bytes ``start`` to ``stop`` of a cell, as plans name parts."""
    region = grid.region(cell)
    if not grid.shape:
        return region
    axis, nbytes = grid.axis, grid.slice_bytes
    offsets, sizes = list(region.offsets), list(region.sizes)
    offsets[axis] += start // nbytes
    sizes[axis] = (stop - start) // nbytes
    return Region(tuple(offsets), tuple(sizes))


def plan_tensor(
    shape: tuple[int, ...],
    itemsize: int,
    chunk_size: int,
    holders: Iterable[tuple[int, Region]],
    *,
    name: str = "a sharded tensor",
    turn: int = 0,
    loads: defaultdict[int, int] | None = None,
) -> TensorPlan:
    """Plan which rank hashes which cells of one sharded tensor.

    Args:
        shape: The global shape.
        itemsize: Bytes per element.
        chunk_size: The store's, in bytes.
        holders: Pairs of a rank and a box that it holds. A rank may hold several boxes; boxes may
            be equal, overlap, or be empty.
        name: The name of the tensor, for messages.
        turn: Any number, such as a hash of the name. It chooses among ranks that could do the same
            equally well; 0 chooses the lowest.
        loads: The bytes that each rank has been given to hash by other plans; those of this plan
            are added. A cell goes to its holder with the lowest load; of equal ones, to the holder
            of the largest part.

    Raises:
        StateError: No rank holds some box, or a box lies outside the tensor.
    """
    loads = defaultdict(int) if loads is None else loads
    grid = grid_of(shape, itemsize, chunk_size)
    if not grid.count:
        return TensorPlan((), {})
    held = distinct_boxes(shape, holders, name)
    behind = range(grid.axis + 1, len(shape))
    if all(box.sizes[axis] == shape[axis] for box in held for axis in behind):
        return TensorPlan((), dict(_GridPlan(grid, held, name, turn, loads).ranks))
    tiles = disjoint_boxes(shape, held, name)
    if tiles[0][0] == Region.whole(shape):
        return TensorPlan((), dict(_GridPlan(grid, dict(tiles), name, turn, loads).ranks))
    return TensorPlan(
        tuple(box for box, _ in tiles), _planned_boxes(tiles, itemsize, chunk_size, turn)
    )


# --- cells and bytes --------------------------------------------------------------------------


class _CellBytes:
    """The cells of a grid as runs of the tensor's bytes.

    Attributes:
        cell: Bytes of a full cell.
        lead: Bytes that ``rows`` cells have together.
        rows: Cells along the grid's axis.
    """

    def __init__(self, grid: Grid) -> None:
        nbytes = grid.slice_bytes
        self.cell = nbytes * grid.step or 1
        self.lead = nbytes * (grid.shape[grid.axis] if grid.shape else 1) or 1
        self.rows = grid.rows or 1

    def run(self, cell: int) -> tuple[int, int]:
        """Return the bytes at which a cell begins and ends."""
        lead, row = divmod(cell, self.rows)
        start = lead * self.lead + row * self.cell
        return start, min(start + self.cell, (lead + 1) * self.lead)

    def at(self, byte: int) -> int:
        """Return the cell in which a byte lies."""
        lead, rest = divmod(byte, self.lead)
        return lead * self.rows + rest // self.cell

    def since(self, byte: int) -> int:
        """Return the first cell that begins at a byte or after it."""
        lead, rest = divmod(byte, self.lead)
        return lead * self.rows - (-rest // self.cell)


class _CellRuns:
    """Runs of cells, one after the other, to be shared out by bytes.

    Args:
        runs: For each the cells that it is of, the first cell, and one past the last.
    """

    def __init__(self, runs: Sequence[tuple[_CellBytes, int, int]]) -> None:
        self._runs = runs
        sizes = (cells.run(stop)[0] - cells.run(first)[0] for cells, first, stop in runs)
        self._starts = [0, *accumulate(sizes)]

    def share(self, part: int, parts: int) -> list[tuple[int, int, int]]:
        """Return the cells that begin in one of several equal parts of the bytes.

        Returns:
            Runs: for each the number of the run that it is a part of, the first cell, and one past
            the last.
        """
        total = self._starts[-1]
        low, high = (-(-n * total // parts) for n in (part, part + 1))
        found = []
        for i in range(bisect_right(self._starts, low) - 1, bisect_left(self._starts, high)):
            cells, first, stop = self._runs[i]
            base = cells.run(first)[0] - self._starts[i]
            begin, end = max(first, cells.since(base + low)), min(stop, cells.since(base + high))
            if begin < end:
                found.append((i, begin, end))
        return found


# --- boxes that are gridded each ---------------------------------------------------------------


def _planned_boxes(
    tiles: list[tuple[Region, list[int]]], itemsize: int, chunk_size: int, turn: int
) -> dict[int, RankPlan]:
    """Share out the cells of boxes that have a grid each; each cell lies whole in one box."""
    plans: defaultdict[int, RankPlan] = defaultdict(RankPlan)
    first = 0
    for number, (box, ranks) in enumerate(tiles):
        grid = grid_of(box.sizes, itemsize, chunk_size)
        line = _CellRuns([(_CellBytes(grid), 0, grid.count)])
        for i, rank in enumerate(_rotated(ranks, turn + number)):
            for _, start, stop in line.share(i, len(ranks)):
                plans[rank].boxes.append(StoredBox(first, box.offsets, box.sizes))
                plans[rank].runs.append((first + start, first + stop))
        first += grid.count
    return dict(plans)


def _rotated(ranks: Sequence[int], turn: int) -> list[int]:
    shift = turn % len(ranks)
    return [*ranks[shift:], *ranks[:shift]]


# --- one grid ---------------------------------------------------------------------------------


class _GridPlan:
    """The plan of a tensor with one grid, all of whose boxes are runs of its bytes.

    Attributes:
        ranks: The plan of each rank.
    """

    def __init__(
        self,
        grid: Grid,
        held: dict[Region, list[int]],
        name: str,
        turn: int,
        loads: defaultdict[int, int],
    ) -> None:
        self.ranks: defaultdict[int, RankPlan] = defaultdict(RankPlan)
        self._cells = cells = _CellBytes(grid)
        self._count = grid.count
        self._holders = list(held.values())
        self._turn = turn
        self._loads = loads
        self._sent: defaultdict[int, int] = defaultdict(int)
        runs = sorted(
            (start, stop, i) for i, box in enumerate(held) for start, stop in _byte_runs(grid, box)
        )
        self._spans = _spans(runs)
        stops = [0, *(stop for _, stop, _ in self._spans)]
        starts = [*(start for start, _, _ in self._spans), grid.itemsize * prod(grid.shape)]
        if starts != stops:
            raise missing_box_error(grid.shape, held, name)
        inner = ((cells.since(start), cells.at(stop), i) for start, stop, i in runs)
        whole = _spans(sorted(run for run in inner if run[0] < run[1]))
        self._share_out(whole)
        self._plan_assemblies(whole)

    def _ranks_of(self, boxes: tuple[int, ...]) -> list[int]:
        if len(boxes) == 1:
            return self._holders[boxes[0]]
        return sorted({rank for i in boxes for rank in self._holders[i]})

    def _share_out(self, whole: list[CoveredRun]) -> None:
        """Share out the cells that lie whole in a box among the ranks that hold the box."""
        groups: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for first, stop, boxes in whole:
            groups[boxes].append((first, stop))
        for number, (boxes, runs) in enumerate(groups.items()):
            ranks = _rotated(self._ranks_of(boxes), self._turn + number)
            if len(ranks) == 1:
                self.ranks[ranks[0]].runs += runs
                continue
            line = _CellRuns([(self._cells, first, stop) for first, stop in runs])
            for i, rank in enumerate(ranks):
                if share := line.share(i, len(ranks)):
                    self.ranks[rank].runs += [run[1:] for run in share]
        for rank, plan in self.ranks.items():
            plan.runs.sort()
            run = self._cells.run
            self._loads[rank] += sum(run(stop)[0] - run(first)[0] for first, stop in plan.runs)

    def _plan_assemblies(self, whole: list[CoveredRun]) -> None:
        """Plan for each other cell which rank puts it together, from which parts."""
        spans = self._spans
        at = behind = 0
        for first, stop, _ in [*whole, (self._count, self._count, ())]:
            for cell in range(behind, first):
                start, end = self._cells.run(cell)
                while spans[at][1] <= start:
                    at += 1
                last = at
                while spans[last][1] < end:
                    last += 1
                self._plan_assembly(
                    cell,
                    [
                        (max(a, start) - start, min(b, end) - start, self._ranks_of(boxes))
                        for a, b, boxes in spans[at : last + 1]
                    ],
                )
            behind = stop

    def _plan_assembly(self, cell: int, parts: list[tuple[int, int, list[int]]]) -> None:
        held: defaultdict[int, int] = defaultdict(int)
        for start, stop, ranks in parts:
            for rank in ranks:
                held[rank] += stop - start
        owner = self._assembler(held, parts[-1][1])
        chosen = []
        for start, stop, ranks in parts:
            source = owner
            if owner not in ranks:
                source = ranks[0]
                if len(ranks) > 1:
                    source = min(_rotated(ranks, self._turn), key=self._sent.__getitem__)
                self._sent[source] += stop - start
                self.ranks[source].sends.append(SentPart(cell, owner, start, stop))
            chosen.append(PartSource(source, start, stop))
        self.ranks[owner].assemblies.append(Assembly(cell, tuple(chosen)))

    def _assembler(self, held: dict[int, int], nbytes: int) -> int:
        """Choose the rank that puts a cell together.

        Args:
            held: Rank → how many bytes of the cell it holds.
            nbytes: The bytes of the cell.
        """
        best = min((self._loads[rank], -n) for rank, n in held.items())
        equal = [rank for rank in sorted(held) if (self._loads[rank], -held[rank]) == best]
        chosen = _rotated(equal, self._turn)[0]
        self._loads[chosen] += nbytes
        return chosen


def _byte_runs(grid: Grid, box: Region) -> Iterator[tuple[int, int]]:
    """Yield the runs of a tensor's bytes that make up a box, in order."""
    shape, nbytes = grid.shape, grid.itemsize
    axis = len(shape) - 1
    while axis >= 0 and box.sizes[axis] == shape[axis]:
        nbytes *= shape[axis]
        axis -= 1
    if axis < 0:
        yield 0, nbytes
        return
    starts, size = [box.offsets[axis] * nbytes], box.sizes[axis] * nbytes
    for i in range(axis - 1, -1, -1):
        nbytes *= shape[i + 1]
        lead = range(box.offsets[i], box.offsets[i] + box.sizes[i])
        starts = [x * nbytes + start for x in lead for start in starts]
    for start in starts:
        yield start, start + size


def _spans(runs: list[tuple[int, int, int]]) -> list[CoveredRun]:
    """Return disjoint runs that cover the same, each with the numbers of the runs that cover it.

    Args:
        runs: Sorted: first byte, one past the last, and number.
    """
    if all(a[1] <= b[0] for a, b in pairwise(runs)):
        return [(start, stop, (i,)) for start, stop, i in runs]
    edges = sorted(
        [(stop, False, i) for _, stop, i in runs] + [(start, True, i) for start, _, i in runs]
    )
    spans: list[CoveredRun] = []
    covering: set[int] = set()
    for (at, begins, i), (then, _, _) in pairwise(edges):
        (covering.add if begins else covering.remove)(i)
        if covering and at < then:
            spans.append((at, then, tuple(sorted(covering))))
    return spans
