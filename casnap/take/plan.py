"""Plan which rank hashes which cells: arithmetic on shapes, boxes and ranks.

There are two kinds of plans. Tensors that all ranks hold are divided by bytes; each rank computes
its own share (:func:`replicated_runs`). A sharded tensor is planned by one rank, from the boxes
that each rank holds (:func:`plan_tensor`).

A cell that lies whole in a box is hashed by a rank that holds the box. A cell that shard edges cut
is put together by one rank, the *joiner*: other ranks send it the parts that their boxes hold. A
*joint* is a run of such cells that the same edges cut. The joiner puts one joint together at a
time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, TypeAlias

from msgspec import Struct, field

from casnap.errors import StateError
from casnap.format.grid import Grid, grid_of
from casnap.format.region import Region, cover_once

CoveredRun: TypeAlias = tuple[int, int, tuple[int, ...]]
"""A run of cells: the first, one past the last, and the boxes that hold a part of each cell."""

# The most bytes of cells that are cut alike and put together at once, for fewer messages.
_JOINT_BYTES = 4 << 20


class SentPart(Struct, frozen=True, array_like=True, gc=False):
    """One box's part of a joint (a run of cells that one rank puts together), to be sent.

    Attributes:
        first_cell: The first cell of the joint.
        to: The joiner. It may be the sender itself.
        region: Where the part lies in the tensor.
    """

    first_cell: int
    to: int
    region: Region


class RankPlan(Struct, array_like=True):
    """The work of one rank for one tensor.

    Attributes:
        runs: The runs of whole cells to hash, in order: the first cell, and one past the last. Each
            run lies in a single box that the rank holds.
        sends: The parts that the rank sends, in the order of cells.
        joints: The runs of cut cells that the rank puts together and hashes, in order.
        senders: For each joint, the ranks that send parts of it.
    """

    runs: list[tuple[int, int]] = field(default_factory=list)
    sends: list[SentPart] = field(default_factory=list)
    joints: list[tuple[int, int]] = field(default_factory=list)
    senders: list[list[int]] = field(default_factory=list)


def replicated_runs(grids: Sequence[Grid], rank: int, world: int) -> list[tuple[int, int, int]]:
    """Return a rank's share of the cells of tensors that all ranks hold: the cells that it hashes.

    All ranks have the same number of bytes to hash, give or take one cell.

    Args:
        grids: The grids of all these tensors, in one order on all ranks.
        rank: The rank whose share this is.
        world: The number of ranks.

    Returns:
        Runs of cells: for each the number of the tensor, the first cell, and one past the last.
    """
    return _CellRuns([(_CellBytes(grid), 0, grid.count) for grid in grids]).share(rank, world)


def plan_tensor(
    shape: tuple[int, ...],
    itemsize: int,
    chunk_size: int,
    holders: Iterable[tuple[int, Region]],
    *,
    name: str = "a sharded tensor",
    tiebreak: int = 0,
    loads: defaultdict[int, int] | None = None,
    hosts: Sequence[int] | None = None,
) -> dict[int, RankPlan]:
    """Plan which rank hashes which cells of one sharded tensor.

    Args:
        shape: The global shape.
        itemsize: Bytes per element.
        chunk_size: The chunk size of the store, in bytes.
        holders: Pairs of a rank and a box that it holds. A rank may hold several boxes; boxes may
            be equal, or be empty.
        name: The name of the tensor, for messages.
        tiebreak: Any number, such as a hash of the name. It chooses among ranks that could do the
            same equally well; 0 chooses the lowest.
        loads: The bytes that each rank has to hash by other plans; this plan adds to them. A cell
            that shard edges cut is given to that holder of a part who has the lowest load; among
            equal loads, to the holder of the largest part.
        hosts: For each rank, the number of its host; None if all ranks are on one host. If several
            ranks can send a part to the joiner, one on the joiner's host does if possible.

    Returns:
        The plan of each rank that has something to do.

    Raises:
        StateError: No rank holds some part of the tensor, boxes overlap, or a box lies outside
            the tensor.
    """
    grid = grid_of(shape, itemsize, chunk_size)
    if not grid.count:
        return {}
    held = _disjoint_boxes(shape, _distinct_boxes(shape, holders, name), name)
    loads = defaultdict(int) if loads is None else loads
    return dict(_Planner(grid, held, tiebreak, loads, hosts).ranks)


# --- cells and bytes --------------------------------------------------------------------------


class _CellBytes:
    """Where the cells of a grid begin and end, if the bytes of all cells are laid end to end.

    Attributes:
        cell: The bytes of a full cell.
        lead: The bytes of all ``rows`` cells of one row together.
        rows: The number of cells along the grid's axis.
    """

    def __init__(self, grid: Grid) -> None:
        nbytes = grid.slice_bytes
        self.cell = nbytes * grid.step or 1
        self.lead = nbytes * (grid.shape[grid.axis] if grid.shape else 1) or 1
        self.rows = grid.rows or 1

    def run(self, cell: int) -> tuple[int, int]:
        """Return the offsets in bytes at which a cell begins and ends."""
        lead, row = divmod(cell, self.rows)
        start = lead * self.lead + row * self.cell
        return start, min(start + self.cell, (lead + 1) * self.lead)

    def since(self, byte: int) -> int:
        """Return the first cell that begins at the offset ``byte`` or after it."""
        lead, remainder = divmod(byte, self.lead)
        return lead * self.rows - (-remainder // self.cell)


class _CellRuns:
    """Runs of cells of one or more tensors, which ranks share by bytes.

    Args:
        runs: For each run, the cells of its tensor, the first cell, and one past the last.
    """

    def __init__(self, runs: Sequence[tuple[_CellBytes, int, int]]) -> None:
        self._runs = runs
        sizes = (cells.run(stop)[0] - cells.run(first_cell)[0] for cells, first_cell, stop in runs)
        self._starts = [0, *accumulate(sizes)]

    def share(self, part: int, parts: int) -> list[tuple[int, int, int]]:
        """Divide the bytes of all runs into equal shares; return the cells that begin in one share.

        Args:
            part: The number of the share, from 0 on.
            parts: The number of shares.

        Returns:
            Shorter runs: the index of the run in ``runs``, the first cell, and one past the last.
        """
        total = self._starts[-1]
        low, high = (-(-n * total // parts) for n in (part, part + 1))
        runs = []
        for i in range(bisect_right(self._starts, low) - 1, bisect_left(self._starts, high)):
            cells, first_cell, stop = self._runs[i]
            base = cells.run(first_cell)[0] - self._starts[i]
            begin, end = (
                max(first_cell, cells.since(base + low)),
                min(stop, cells.since(base + high)),
            )
            if begin < end:
                runs.append((i, begin, end))
        return runs


# --- one tensor -------------------------------------------------------------------------------


def _rotated(ranks: Sequence[int], tiebreak: int) -> list[int]:
    shift = tiebreak % len(ranks)
    return [*ranks[shift:], *ranks[:shift]]


class _SharedBox(NamedTuple):
    """A box of the tensor, and the ranks that hold it."""

    region: Region
    ranks: list[int]


class _Planner:
    """Plans one sharded tensor.

    Args:
        grid: Its grid.
        held: Boxes that hold each element once, with the ranks that hold them.
        tiebreak: As for :func:`plan_tensor`.
        loads: As for :func:`plan_tensor`.
        hosts: As for :func:`plan_tensor`.

    Attributes:
        ranks: The plan of each rank.
    """

    def __init__(
        self,
        grid: Grid,
        held: Sequence[_SharedBox],
        tiebreak: int,
        loads: defaultdict[int, int],
        hosts: Sequence[int] | None,
    ) -> None:
        self.ranks: defaultdict[int, RankPlan] = defaultdict(RankPlan)
        self._grid, self._cells = grid, _CellBytes(grid)
        self._held = held
        self._tiebreak = tiebreak
        self._loads = loads
        self._hosts = hosts
        self._sent: defaultdict[int, int] = defaultdict(int)
        covered_runs = _covered_runs(
            sorted((*run, i) for i, (box, _) in enumerate(held) for run in grid.runs_covering(box))
        )
        self._share_out(run for run in covered_runs if len(run[2]) == 1)
        for run in covered_runs:
            if len(run[2]) > 1:
                self._plan_cut_cells(*run)

    def _share_out(self, covered: Iterable[CoveredRun]) -> None:
        """Divide the cells that lie whole in a box among the ranks that hold that box.

        Args:
            covered: Runs of cells: the first, one past the last, and the one box that contains
                them.
        """
        by_box: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for first_cell, stop, (box,) in covered:
            by_box[box].append((first_cell, stop))
        for number, (box, runs) in enumerate(by_box.items()):
            ranks = _rotated(self._held[box].ranks, self._tiebreak + number)
            if len(ranks) == 1:
                self.ranks[ranks[0]].runs += runs
                continue
            line = _CellRuns([(self._cells, first_cell, stop) for first_cell, stop in runs])
            for i, rank in enumerate(ranks):
                if share := line.share(i, len(ranks)):
                    self.ranks[rank].runs += [run[1:] for run in share]
        for rank, plan in self.ranks.items():
            plan.runs.sort()
            self._loads[rank] += sum(self._nbytes(*run) for run in plan.runs)

    def _nbytes(self, first_cell: int, stop: int) -> int:
        return self._cells.run(stop)[0] - self._cells.run(first_cell)[0]

    def _plan_cut_cells(self, first_cell: int, stop: int, boxes: tuple[int, ...]) -> None:
        """Divide a run of cells, all cut by the same boxes, into joints; plan each joint.

        Args:
            first_cell: The first cell of the run.
            stop: One past the last.
            boxes: The indices of the boxes that hold parts of each cell.
        """
        holders = {rank for box in boxes for rank in self._held[box].ranks}
        most = min(_JOINT_BYTES // self._cells.cell, -(-(stop - first_cell) // len(holders)))
        while first_cell < stop:
            end = min(stop, first_cell + max(1, most), self._grid.lead_stop(first_cell))
            region = self._grid.region(first_cell, end)
            held = [self._held[box] for box in boxes]
            parts = [
                _SharedBox(part, ranks) for box, ranks in held if (part := region.intersect(box))
            ]
            self._plan_joint(first_cell, end, parts)
            first_cell = end

    def _plan_joint(self, first_cell: int, stop: int, parts: list[_SharedBox]) -> None:
        """Choose the rank that puts a joint's cells together, and the ranks that send it the parts.

        Args:
            first_cell: The first cell of the joint.
            stop: One past the last.
            parts: The parts of the joint, with the ranks that hold them.
        """
        elements_by_rank: defaultdict[int, int] = defaultdict(int)
        for region, ranks in parts:
            for rank in ranks:
                elements_by_rank[rank] += region.numel
        joiner = self._joiner(elements_by_rank, self._nbytes(first_cell, stop))
        senders = set[int]()
        for region, ranks in parts:
            sender = joiner
            if joiner not in ranks:
                near = self._near(ranks, joiner)
                sender = min(_rotated(near, self._tiebreak), key=self._sent.__getitem__)
                self._sent[sender] += region.numel
            self.ranks[sender].sends.append(SentPart(first_cell, joiner, region))
            senders.add(sender)
        self.ranks[joiner].joints.append((first_cell, stop))
        self.ranks[joiner].senders.append(sorted(senders))

    def _near(self, ranks: list[int], joiner: int) -> list[int]:
        """Return the ranks that are on the joiner's host; all of ``ranks`` if none is there."""
        if self._hosts is None or len(ranks) == 1:
            return ranks
        return [r for r in ranks if self._hosts[r] == self._hosts[joiner]] or ranks

    def _joiner(self, elements_by_rank: dict[int, int], nbytes: int) -> int:
        """Choose the rank that puts some cells together.

        Args:
            elements_by_rank: Rank → how many elements of the cells it holds.
            nbytes: The bytes of the cells.
        """
        best = min((self._loads[rank], -n) for rank, n in elements_by_rank.items())
        equal = [
            rank
            for rank in sorted(elements_by_rank)
            if (self._loads[rank], -elements_by_rank[rank]) == best
        ]
        joiner = _rotated(equal, self._tiebreak)[0]
        self._loads[joiner] += nbytes
        return joiner


def _covered_runs(runs: list[tuple[int, int, int]]) -> list[CoveredRun]:
    """Cut runs of cells, which may overlap, wherever any run begins or ends.

    Args:
        runs: For each box, the runs of the cells that it holds a part of: the first cell, one past
            the last, the index of the box. They are sorted.

    Returns:
        Shorter runs: the first cell, one past the last, and the indices of all boxes that hold a
        part of these cells.
    """
    if all(a[1] <= b[0] for a, b in pairwise(runs)):
        return [(first_cell, stop, (i,)) for first_cell, stop, i in runs]
    edges = sorted(
        [(stop, False, i) for _, stop, i in runs]
        + [(first_cell, True, i) for first_cell, _, i in runs]
    )
    covered_runs: list[CoveredRun] = []
    covering: set[int] = set()
    for (at, begins, i), (until, _, _) in pairwise(edges):
        (covering.add if begins else covering.remove)(i)
        if covering and at < until:
            covered_runs.append((at, until, tuple(sorted(covering))))
    return covered_runs


# --- the boxes that ranks hold of a tensor ------------------------------------------------------


def _distinct_boxes(
    shape: tuple[int, ...], holders: Iterable[tuple[int, Region]], name: str
) -> dict[Region, list[int]]:
    """Return the boxes that are not empty, each with its ranks in order.

    Args:
        shape: The shape of the tensor.
        holders: Pairs of a rank and a box that it holds.
        name: The name of the tensor, for messages.

    Raises:
        StateError: A box lies outside the tensor.
    """
    holders_of: dict[Region, set[int]] = {}
    for rank, box in holders:
        if 0 not in box.sizes:
            holders_of.setdefault(box, set()).add(rank)
    for box, ranks in holders_of.items():
        ends = [o + n for o, n in zip(box.offsets, box.sizes, strict=True)]
        if len(ends) != len(shape) or any(
            o < 0 or end > size for o, end, size in zip(box.offsets, ends, shape, strict=True)
        ):
            raise StateError(
                f"{name}: rank {min(ranks)} says that it holds offsets {box.offsets}, sizes "
                f"{box.sizes}, which do not fit the shape {shape}; give all ranks one and the same "
                "global shape"
            )
    return {box: sorted(ranks) for box, ranks in holders_of.items()}


def _disjoint_boxes(
    shape: tuple[int, ...], holders_of: dict[Region, list[int]], name: str
) -> list[_SharedBox]:
    """Check that the boxes hold each element once; return them sorted, with their ranks.

    Args:
        shape: The shape of the tensor.
        holders_of: Box → the ranks that hold it.
        name: The name of the tensor, for messages.

    Raises:
        StateError: No rank holds some part of the tensor, or boxes overlap.
    """
    if not cover_once(shape, holders_of):
        held_elements = sum(box.numel for box in holders_of)
        raise StateError(
            f"{name} of shape {shape}: the ranks hold {held_elements:,} of {prod(shape):,} "
            "elements, not each once; all ranks of its mesh must take part, each with all that it "
            "holds, and shards overlap only if they are the same"
        )
    return sorted(
        (_SharedBox(*each) for each in holders_of.items()), key=lambda held: held.region.offsets
    )
