"""An app state at one moment: its leaves, and which of them are the same memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from casnap.errors import UnsupportedTypeError
from casnap.format.entries import INLINE_BYTES, MAX_PATH_CHARS, TensorEntry, payload_of
from casnap.format.grid import Grid, grid_of
from casnap.format.region import Region
from casnap.runtime.buffers import bytes_at
from casnap.runtime.torch_modes import plain
from casnap.state.cuda import synchronize
from casnap.state.numpy_values import is_numpy
from casnap.state.sharded import Shards
from casnap.state.tensors import Leaf, as_copyable, itemsize_of
from casnap.take.staging import (
    JointPart,
    Piece,
    Source,
    piece_of_part,
    pieces_between,
    pieces_of,
)


class KeySpan(NamedTuple):
    """The leaves of one key of the app state.

    Attributes:
        per_rank: Whether they belong to their rank alone, whatever they hold.
        component: The key, as a path component.
        start: The first leaf.
        stop: One past the last leaf.
        given: Whether they are global, and no other rank has any of them, except for other parts
            of sharded tensors.
    """

    per_rank: bool
    component: str
    start: int
    stop: int
    given: bool = False


class Assignment(NamedTuple):
    """What this rank hashes of a leaf that other ranks hold too, or hold pieces of.

    Attributes:
        grid: How the whole leaf is cut into cells.
        runs: Runs of whole cells to hash: the first cell, and one past the last.
        parts: Parts of cells to send, in the order of cells. The receiver may be this rank.
        joined: The runs of cells that this rank puts together from parts and hashes.
        givers: For each of these runs the ranks that give parts of it.
    """

    grid: Grid
    runs: list[tuple[int, int]]
    parts: list[JointPart]
    joined: list[tuple[int, int]]
    givers: Sequence[Sequence[int]] = ()


class Capture:
    """The leaves of a state. Tensors are referenced; all other values are encoded.

    Args:
        leaves: The leaves, in order.
        spans: Which of them belong to which key.
        chunk_size: The store's, in bytes.

    Attributes:
        leaves: All leaves, in order.
        spans: Which leaves belong to which key.
        grids: The grid of each leaf that this rank hashes as a whole; None for other leaves.
        inline: The bytes of small leaves that are not sharded.
        same_as: Leaf → an earlier leaf that is the same memory seen the same way.
        assigned: Leaf → what of it this rank hashes, where other ranks hold it too.

    Raises:
        UnsupportedTypeError: A path is too long.
    """

    def __init__(self, leaves: list[Leaf], spans: list[KeySpan], chunk_size: int) -> None:
        self.leaves = leaves
        self.spans = spans
        self.grids: list[Grid | None] = []
        self.assigned: dict[int, Assignment] = {}
        self.inline: dict[int, bytes] = {}
        self.same_as: dict[int, int] = {}
        with plain():
            self._index_leaves(chunk_size)
            # Other threads copy from the GPU, so what the caller has begun there must end first.
            synchronize(t for x in self.leaves for t in getattr(x.content, "tensors", [x.content]))

    def _index_leaves(self, chunk_size: int) -> None:
        seen: dict[int, int] = {}
        for i, leaf in enumerate(self.leaves):
            if len(leaf.path) > MAX_PATH_CHARS:
                raise UnsupportedTypeError(
                    f"{leaf.path[:80]}…: a path of {len(leaf.path):,} characters is too long; "
                    f"keys are names, of at most {MAX_PATH_CHARS:,} characters in all"
                )
            if isinstance(leaf.content, Shards):
                self.grids.append(None)
                continue
            if payload_of(leaf.entry).nbytes <= INLINE_BYTES:
                self.inline[i] = _small_bytes(leaf.content)
                self.grids.append(None)
                continue
            self.grids.append(grid_of_leaf(leaf, chunk_size))
            if isinstance(leaf.content, torch.Tensor):
                first = seen.setdefault(leaf.content.data_ptr(), i)
                same_grid = self.grids[first] == self.grids[i]
                if (
                    first != i
                    and same_grid
                    and _same_memory(leaf.content, self.leaves[first].content)
                ):
                    self.same_as[i] = first

    @property
    def sharded(self) -> bool:
        """Whether any leaf is a sharded tensor."""
        return any(isinstance(leaf.content, Shards) for leaf in self.leaves)

    def assign(self, assigned: dict[int, Assignment]) -> None:
        """Hash only these parts of the leaves that other ranks hold too."""
        self.assigned = assigned
        for i in assigned:
            self.grids[i] = None
        # A leaf of the same memory as one of these is hashed by itself.
        self.same_as = {i: first for i, first in self.same_as.items() if first not in assigned}

    def bytes_to_hash(self) -> int:
        """Return how many bytes this rank hashes."""
        whole = (payload_of(self.leaves[i].entry).nbytes for i, _ in self._whole())
        cells = (
            a.grid.cell_bytes(cell)
            for a in self.assigned.values()
            for first, stop in (*a.joined, *a.runs)
            for cell in range(first, stop)
        )
        return sum(whole) + sum(cells)

    def drop_tensors(self) -> None:
        """Keep only the paths and entries: the bytes have been copied."""
        self.leaves = [Leaf(path, entry, b"") for path, entry, _ in self.leaves]

    def pieces(self, share: float = 0.0) -> Iterator[Piece]:
        """Yield the bytes that this rank hashes, each memory once; parts of cells come first.

        Args:
            share: Where to begin with the leaves that this rank hashes as a whole, from 0 to 1.
                Ranks that hold equal leaves begin at different ones, and so write different ones.
        """
        for i, assignment in self.assigned.items():
            for part in assignment.parts:
                yield piece_of_part(i, self._source(i, part.region), part)
        for i, assignment in self.assigned.items():
            for first, stop in assignment.runs:
                yield from self._pieces_between(i, first, stop)
        whole = self._whole()
        number, cell = self._starting_point(whole, share)
        for i, grid in whole[number : number + 1] if cell else []:
            yield from pieces_between(i, self._sources(i)[0], grid, cell, grid.count)
        for i, grid in (*whole[number + bool(cell) :], *whole[:number]):
            yield from pieces_of(i, self._sources(i)[0], grid)
        for i, grid in whole[number : number + 1] if cell else []:
            yield from pieces_between(i, self._sources(i)[0], grid, 0, cell)

    def _whole(self) -> list[tuple[int, Grid]]:
        """Return the leaves that this rank hashes as a whole, and their grids."""
        grids = enumerate(self.grids)
        return [(i, grid) for i, grid in grids if grid is not None and i not in self.same_as]

    def _starting_point(self, whole: list[tuple[int, Grid]], share: float) -> tuple[int, int]:
        """Return the leaf, and the cell of it, at a share of the bytes of some leaves."""
        sizes = [payload_of(self.leaves[i].entry).nbytes for i, _ in whole]
        start = share * sum(sizes)
        for number, nbytes in enumerate(sizes):
            if start < nbytes:
                i, grid = whole[number]
                entry = self.leaves[i].entry
                splits = isinstance(entry, TensorEntry) and not is_numpy(entry)
                return number, int(start / nbytes * grid.count) if splits else 0
            start -= nbytes
        return 0, 0

    def _pieces_between(self, leaf: int, first: int, stop: int) -> Iterator[Piece]:
        grid = self.assigned[leaf].grid
        while first < stop:
            # The cells may lie in several boxes of this rank.
            source = self._source(leaf, grid.region(first))
            end = first + 1
            while end < stop and _holds(source.region, grid.region(end)):
                end += 1
            yield from pieces_between(leaf, source, grid, first, end)
            first = end

    def _source(self, leaf: int, region: Region) -> Source:
        """Return the source that holds a box."""
        return next(s for s in self._sources(leaf) if _holds(s.region, region))

    def _sources(self, leaf: int) -> list[Source]:
        content = self.leaves[leaf].content
        if isinstance(content, Shards):
            parts = zip(content.boxes, map(as_copyable, content.tensors), strict=True)
            return [Source(*part) for part in parts]
        grid = self.assigned[leaf].grid if leaf in self.assigned else self.grids[leaf]
        assert grid is not None
        if isinstance(content, torch.Tensor):
            content = as_copyable(content)
        return [Source(Region.whole(grid.shape), content)]


def _holds(outer: Region, inner: Region) -> bool:
    return all(
        a <= b and b + m <= a + n
        for a, n, b, m in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )


def grid_of_leaf(leaf: Leaf, chunk_size: int) -> Grid:
    """Return the grid of a leaf: the tensor's own, or that of its bytes."""
    entry = leaf.entry
    if isinstance(entry, TensorEntry):
        return grid_of(entry.shape, itemsize_of(entry), chunk_size)
    return grid_of((payload_of(entry).nbytes,), 1, chunk_size)


def _same_memory(a: torch.Tensor, b: object) -> bool:
    """Whether two tensors at one address are the same elements in the same order."""
    return (
        isinstance(b, torch.Tensor)
        and (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
        and a.stride() == b.stride()
    )


def _small_bytes(content: torch.Tensor | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    if content.nbytes == 0:
        return b""
    host = as_copyable(content).cpu().contiguous()
    return bytes_at(host.data_ptr(), host.nbytes)
