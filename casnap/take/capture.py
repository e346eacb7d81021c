"""An app state at one moment: its leaves, and which of them hold the same memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from casnap.errors import UnsupportedTypeError
from casnap.format.entries import INLINE_BYTES, MAX_PATH_CHARS, TensorEntry, payload_of
from casnap.format.grid import Grid, grid_of
from casnap.format.region import Region
from casnap.format.tiling import Tiling
from casnap.runtime.buffers import bytes_at
from casnap.runtime.torch_modes import plain
from casnap.state.containers import component_of
from casnap.state.cuda import settle
from casnap.state.flatten import flatten
from casnap.state.sharded import Shards
from casnap.state.stateful import RNGState, Stateful, random_states_first
from casnap.state.tensors import Leaf, elements, is_numpy, itemsize_of
from casnap.take.staging import Part, Piece, Source, part_of, pieces_between, pieces_of


class Span(NamedTuple):
    """The leaves of one key of the app state.

    Attributes:
        private: Whether they belong to their rank alone, whatever they hold.
        component: The key, as a path component.
        start: The first leaf.
        stop: One past the last.
    """

    private: bool
    component: str
    start: int
    stop: int


class Assignment(NamedTuple):
    """What this rank hashes of a leaf that others hold too, or hold pieces of.

    Attributes:
        grid: How the whole leaf is cut.
        runs: First cell, and one past the last, of those that are hashed from its memory.
        parts: Parts of cells, and whom they go to, which may be this rank.
        gets: The cells that this rank puts together and hashes.
    """

    grid: Grid | Tiling
    runs: list[tuple[int, int]]
    parts: list[tuple[int, Part]]
    gets: list[int]


class Capture:
    """The leaves of an app state; tensors are referred to, all else is encoded.

    Args:
        app_state: Key → what has ``state_dict`` and ``load_state_dict``.
        chunk_size: The store's, in bytes.
        allow_pickle: Whether what has no safe encoding may be pickled.

    Attributes:
        leaves: All leaves, in order.
        spans: Which of them belong to which key.
        grids: The grid of each leaf; None where it has no chunks, or is sharded.
        inline: The bytes of small leaves that are not sharded.
        same_as: Leaf → an earlier leaf that is the same memory seen the same way.
        assigned: Leaf → what of it this rank hashes, where that is not all.
        logical_bytes: The bytes of all leaves.

    Raises:
        NotStatefulError: A value lacks one of the two methods.
        UnsupportedTypeError: A value can't be stored.
    """

    def __init__(
        self, app_state: Mapping[str, Stateful], chunk_size: int, *, allow_pickle: bool
    ) -> None:
        self.leaves: list[Leaf] = []
        self.spans: list[Span] = []
        for key in random_states_first(app_state):
            stateful = app_state[key]
            start, component = len(self.leaves), component_of(key)
            state = stateful.state_dict()
            with plain():
                self.leaves.extend(flatten(state, component, allow_pickle=allow_pickle))
            private = isinstance(stateful, RNGState)
            self.spans.append(Span(private, component, start, len(self.leaves)))
        self.grids: list[Grid | None] = []
        self.assigned: dict[int, Assignment] = {}
        self.inline: dict[int, bytes] = {}
        self.same_as: dict[int, int] = {}
        self.logical_bytes = 0
        with plain():
            self._look_at_leaves(chunk_size)
            # Other threads copy from the GPU: what the caller has begun there must have ended.
            settle(t for x in self.leaves for t in getattr(x.content, "tensors", [x.content]))

    def _look_at_leaves(self, chunk_size: int) -> None:
        seen: dict[int, int] = {}
        for i, leaf in enumerate(self.leaves):
            if len(leaf.path) > MAX_PATH_CHARS:
                raise UnsupportedTypeError(
                    f"{leaf.path[:80]}…: a path of {len(leaf.path):,} characters is too long; "
                    f"keys are names, of at most {MAX_PATH_CHARS:,} characters in all"
                )
            nbytes = payload_of(leaf.entry).nbytes
            self.logical_bytes += nbytes
            if isinstance(leaf.content, Shards):
                self.grids.append(None)
                continue
            if nbytes <= INLINE_BYTES:
                self.inline[i] = _small_bytes(leaf.content)
                self.grids.append(None)
                continue
            self.grids.append(grid_for(leaf, chunk_size))
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

    def bytes_to_hash(self) -> int:
        """Return the bytes that this rank hashes."""
        whole = (sum(grid.sizes()) for _, grid in self._whole())
        cells = (
            a.grid.cell_bytes(cell)
            for a in self.assigned.values()
            for cell in (*a.gets, *(c for first, stop in a.runs for c in range(first, stop)))
        )
        return sum(whole) + sum(cells)

    def untie(self) -> None:
        """Hash what is the same memory as a leaf that others hash too by itself."""
        self.same_as = {i: first for i, first in self.same_as.items() if first not in self.assigned}

    def let_go(self) -> None:
        """Keep the description alone: the bytes are copied, and the tensors may go."""
        self.leaves = [Leaf(path, entry, b"") for path, entry, _ in self.leaves]

    def pieces(self, share: float = 0.0) -> Iterator[Piece]:
        """Yield the bytes that this rank hashes, each memory once; parts of cells come first.

        Args:
            share: Of what this rank hashes all of, where to begin: ranks that hold the same each
                come first to another part of it, which is then theirs to write.
        """
        for i, assignment in self.assigned.items():
            for cell, part in assignment.parts:
                yield part_of(i, self._source(i, part.region), cell, part)
        for i, assignment in self.assigned.items():
            for first, stop in assignment.runs:
                yield from self._between(i, first, stop)
        whole = self._whole()
        number, cell = self._at_share(whole, share)
        for i, grid in whole[number : number + 1] if cell else []:
            yield from pieces_between(i, self._sources(i)[0], grid, cell, grid.count)
        for i, grid in (*whole[number + bool(cell) :], *whole[:number]):
            yield from pieces_of(i, self._sources(i)[0], grid)
        for i, grid in whole[number : number + 1] if cell else []:
            yield from pieces_between(i, self._sources(i)[0], grid, 0, cell)

    def _whole(self) -> list[tuple[int, Grid]]:
        """Return the leaves that this rank hashes all of, and their grids."""
        grids = enumerate(self.grids)
        return [(i, grid) for i, grid in grids if grid is not None and i not in self.same_as]

    def _at_share(self, whole: list[tuple[int, Grid]], share: float) -> tuple[int, int]:
        """Return which of some leaves lies at a share of their bytes, and which cell of it."""
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

    def _between(self, leaf: int, first: int, stop: int) -> Iterator[Piece]:
        grid = self.assigned[leaf].grid
        while first < stop:
            # Of a rank's several boxes, each may hold some of the cells.
            source = self._source(leaf, grid.region(first))
            end = first + 1
            while end < stop and _holds(source.region, grid.region(end)):
                end += 1
            yield from pieces_between(leaf, source, grid, first, end)
            first = end

    def _source(self, leaf: int, region: Region) -> Source:
        """Return where the elements of a box are."""
        return next(s for s in self._sources(leaf) if _holds(s.region, region))

    def _sources(self, leaf: int) -> list[Source]:
        content = self.leaves[leaf].content
        if isinstance(content, Shards):
            parts = zip(content.boxes, map(elements, content.tensors), strict=True)
            return [Source(*part) for part in parts]
        grid = self.assigned[leaf].grid if leaf in self.assigned else self.grids[leaf]
        assert grid is not None
        if isinstance(content, torch.Tensor):
            content = elements(content)
        return [Source(Region.whole(grid.shape), content)]


def _holds(outer: Region, inner: Region) -> bool:
    return all(
        a <= b and b + m <= a + n
        for a, n, b, m in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )


def grid_for(leaf: Leaf, chunk_size: int) -> Grid:
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
    host = elements(content).cpu().contiguous()
    return bytes_at(host.data_ptr(), host.nbytes)
