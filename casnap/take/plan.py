"""Who hashes which cells of what several ranks hold: arithmetic on shapes, boxes and ranks.

There are two plans. What all ranks are known to hold whole is shared out by bytes, and each rank
works out its share by itself (:func:`replicated_runs`). A sharded tensor is planned by one rank,
which is told who holds which boxes, and tells each holder its part (:func:`plan_tensor`).

A cell that shard edges cut is put together by one rank. As long as no edge lies on an axis behind
the grid's, every box is a few runs of the tensor's bytes, and every part of a cell one run of the
cell's bytes; so plans speak of bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, product
from math import prod
from typing import NamedTuple, TypeAlias

from msgspec import Struct, field

from casnap.errors import StateError
from casnap.format.grid import Grid, grid_of
from casnap.format.region import Region

CoveredRun: TypeAlias = tuple[int, int, tuple[int, ...]]
"""A run from one number to another, and who covers it."""


class SentPart(Struct, frozen=True, array_like=True, gc=False):
    """A part of a cell for another rank: bytes ``start`` to ``stop`` of the cell."""

    cell: int
    to: int
    start: int
    stop: int


class PartSource(Struct, frozen=True, array_like=True, gc=False):
    """Where bytes ``start`` to ``stop`` of a cell come from."""

    source: int
    start: int
    stop: int


class Assembly(Struct, frozen=True, array_like=True):
    """A cell to be put together from parts, own ones included."""

    cell: int
    parts: tuple[PartSource, ...]


class StoredBox(Struct, frozen=True, array_like=True):
    """A box that is gridded as a tensor of its own.

    Attributes:
        first: The number of its first cell among all cells of the tensor.
        offsets: Where it lies.
        sizes: Its sizes.
    """

    first: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class RankPlan(Struct, array_like=True):
    """What one rank does for one tensor. Cells are numbered over the whole tensor.

    Attributes:
        boxes: Where the tensor is stored as boxes, those that ``runs`` lie in, in order.
        runs: Whole cells to hash, from one number to another, in order; each run lies in a single
            box that the rank holds.
        sends: What other ranks need, in the order of cells.
        assemblies: The cells that it puts together and hashes, in order.
    """

    boxes: list[StoredBox] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    sends: list[SentPart] = field(default_factory=list)
    assemblies: list[Assembly] = field(default_factory=list)


class TensorPlan(NamedTuple):
    """How a sharded tensor is stored, and by whom.

    Attributes:
        boxes: The boxes that are gridded each, sorted by offsets; none where the tensor is.
        ranks: What to do, for each rank that has something to do.
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
        Runs of cells, each as number of the tensor, first cell, and the cell behind the last.
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
    """Plan who hashes which cells of one sharded tensor.

    Args:
        shape: The global shape.
        itemsize: Bytes per element.
        chunk_size: The store's chunk size in bytes.
        holders: Ranks, each with a box that it holds: several a rank, equal ones, overlapping
            and empty ones as they come.
        name: What it is called, for messages.
        turn: Any number, such as a hash of the name: of ranks that could do the same equally
            well, it says who is first. With 0 that is the lowest.
        loads: The bytes that each rank has been given to hash so far, by other plans; this one's
            are added. A cell goes to that holder of it who was given least; of equals, to the
            one that holds its largest piece.

    Raises:
        StateError: A box is held by nobody, or lies outside.
    """
    loads = defaultdict(int) if loads is None else loads
    grid = grid_of(shape, itemsize, chunk_size)
    if not grid.count:
        return TensorPlan((), {})
    held = _distinct(shape, holders, name)
    behind = range(grid.axis + 1, len(shape))
    if all(box.sizes[axis] == shape[axis] for box in held for axis in behind):
        return TensorPlan((), dict(_GridPlan(grid, held, name, turn, loads).ranks))
    tiles = _tiles(shape, held, name)
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
        """Return at which byte a cell begins, and at which it ends."""
        lead, row = divmod(cell, self.rows)
        start = lead * self.lead + row * self.cell
        return start, min(start + self.cell, (lead + 1) * self.lead)

    def at(self, byte: int) -> int:
        """Return which cell a byte lies in."""
        lead, rest = divmod(byte, self.lead)
        return lead * self.rows + rest // self.cell

    def since(self, byte: int) -> int:
        """Return the first cell that begins at a byte or behind it."""
        lead, rest = divmod(byte, self.lead)
        return lead * self.rows - (-rest // self.cell)


class _CellRuns:
    """Runs of cells, one behind the other, to be shared out by bytes.

    Args:
        runs: Each as cells, number of the first, and of the one behind the last.
    """

    def __init__(self, runs: Sequence[tuple[_CellBytes, int, int]]) -> None:
        self._runs = runs
        sizes = (cells.run(stop)[0] - cells.run(first)[0] for cells, first, stop in runs)
        self._starts = [0, *accumulate(sizes)]

    def share(self, part: int, parts: int) -> list[tuple[int, int, int]]:
        """Return the cells that begin in one of several equal parts of the bytes.

        Returns:
            Runs, each as number of the run that it is of, first cell, and the cell behind the last.
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


# --- boxes ------------------------------------------------------------------------------------


def _distinct(
    shape: tuple[int, ...], holders: Iterable[tuple[int, Region]], name: str
) -> dict[Region, list[int]]:
    """Return the boxes that hold something, each with its ranks in order."""
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
                f"{box.sizes}, which is no part of shape {shape}; give all ranks one and the same "
                "global shape"
            )
    return {box: sorted(ranks) for box, ranks in held.items()}


def _tiles(
    shape: tuple[int, ...], held: dict[Region, list[int]], name: str
) -> list[tuple[Region, list[int]]]:
    """Return boxes without overlap that cover the tensor, sorted, each with who holds it."""
    tiles = list(held.items())
    if not _cover_once(shape, held):
        # No sharding of torch's comes here, so it may take its time: boxes overlap, or one is
        # missing. The largest boxes stay whole.
        tiles, before = [], list[Region]()
        for box, ranks in sorted(held.items(), key=lambda h: (-h[0].numel, h[0].offsets)):
            tiles += [(rest, ranks) for rest in _without([box], before)]
            before.append(box)
        if sum(box.numel for box, _ in tiles) != prod(shape):
            raise _missing(shape, held, name)
    return sorted(tiles, key=lambda tile: tile[0].offsets)


def _cover_once(shape: tuple[int, ...], boxes: Collection[Region]) -> bool:
    """Whether boxes cover a tensor without overlap.

    A sum of boxes is known by its signed corners; so they must be those of the whole.
    """
    axes = [i for i, size in enumerate(shape) if any(box.sizes[i] != size for box in boxes)]
    corners: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for box, weight in [(Region.whole(shape), -1), *((box, 1) for box in boxes)]:
        ends = [((box.offsets[i], 1), (box.offsets[i] + box.sizes[i], -1)) for i in axes]
        for corner in product(*ends):
            corners[tuple(at for at, _ in corner)] += weight * prod(sign for _, sign in corner)
    return not any(corners.values())


def _without(boxes: list[Region], others: Iterable[Region]) -> list[Region]:
    """Return boxes that hold what none of the others does."""
    for other in others:
        boxes = [rest for box in boxes for rest in _subtracted(box, other)]
    return boxes


def _subtracted(box: Region, other: Region) -> Iterator[Region]:
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


def _missing(shape: tuple[int, ...], held: Iterable[Region], name: str) -> StateError:
    box = _without([Region.whole(shape)], held)[0]
    return StateError(
        f"{name}: of shape {shape}, nobody holds the box at offsets {box.offsets} of sizes "
        f"{box.sizes}; all ranks of its mesh must take part, each with all that it holds"
    )


def _planned_boxes(
    tiles: list[tuple[Region, list[int]]], itemsize: int, chunk_size: int, turn: int
) -> dict[int, RankPlan]:
    """Share out the cells of boxes that are gridded each: all are whole in a rank's memory."""
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
    """The plan of a tensor of which all boxes are runs of bytes.

    Attributes:
        ranks: What each has to do.
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
            raise _missing(grid.shape, held, name)
        inner = ((cells.since(start), cells.at(stop), i) for start, stop, i in runs)
        whole = _spans(sorted(run for run in inner if run[0] < run[1]))
        self._share_out(whole)
        self._plan_assemblies(whole)

    def _ranks_of(self, boxes: tuple[int, ...]) -> list[int]:
        if len(boxes) == 1:
            return self._holders[boxes[0]]
        return sorted({rank for i in boxes for rank in self._holders[i]})

    def _share_out(self, whole: list[CoveredRun]) -> None:
        """Share out the cells that lie whole in a box, among those who hold that box."""
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
        """Say for each other cell who puts it together, from whose parts."""
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
        """Return who puts a cell of so many bytes together, of those who hold some of them."""
        best = min((self._loads[rank], -n) for rank, n in held.items())
        equal = [rank for rank in sorted(held) if (self._loads[rank], -held[rank]) == best]
        chosen = _rotated(equal, self._turn)[0]
        self._loads[chosen] += nbytes
        return chosen


def _byte_runs(grid: Grid, box: Region) -> Iterator[tuple[int, int]]:
    """Yield the runs of a tensor's bytes that a box is, in order."""
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
    """Return runs without overlap that cover the same, each with all that cover it.

    Args:
        runs: Sorted, each with its number.
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
