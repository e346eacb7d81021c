"""Capture an app state: list its leaves, and find the leaves that share memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from msgspec.structs import replace

from casnap.errors import StateError, UnsupportedTypeError
from casnap.format.entries import (
    INLINE_BYTES,
    MAX_PATH_CHARS,
    KnownEntry,
    Payload,
    TensorEntry,
    with_payload,
)
from casnap.format.grid import Grid, grid_of
from casnap.format.names import component_of
from casnap.format.region import Region
from casnap.runtime.buffers import view_at
from casnap.runtime.threads import python_gc_paused
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.devices import devices_of, synchronize
from casnap.state.flatten import flatten
from casnap.state.numpy_values import is_numpy
from casnap.state.parts import check_state
from casnap.state.sharded import Shards
from casnap.state.stateful import (
    AppState,
    RNGState,
    Stateful,
    random_states_first,
    same_random_state,
    with_states,
)
from casnap.state.tensors import Leaf, as_copyable, itemsize_of
from casnap.take.options import OF_STORAGE
from casnap.take.plan import RankPlan
from casnap.take.staging import (
    HeldBox,
    Piece,
    piece_of_part,
    pieces_between,
    pieces_of,
)


class Scope(Enum):
    """Whether the entry of a leaf is global or belongs to one rank, and which ranks hash it."""

    UNDECIDED = "global if all ranks turn out to hold the same, else its rank's"
    PER_RANK = "its rank's"
    SHARDED = "global; ranks hold pieces, and share the work"
    REPLICATED = "global; declared equal on all ranks, which share the work"
    FROM_RANK_0 = "global; rank 0 hashes it"
    DIVIDED = "global; this rank alone has it"
    EQUAL = "global; it was undecided, and all ranks hold the same"


class KeySpan(NamedTuple):
    """The leaves of one key of the app state, as a run in the list of all leaves.

    Attributes:
        component: The key, as a path component.
        start: The index of the first leaf.
        stop: One past the index of the last leaf.
        scope: The scope of those leaves that are not sharded; ``UNDECIDED`` if it is not known.
    """

    component: str
    start: int
    stop: int
    scope: Scope = Scope.UNDECIDED


class CapturedState:
    """The leaves of a state. Tensors are referenced; all other values are encoded.

    Args:
        leaves: The leaves, in order.
        spans: Which leaves belong to which key.
        chunk_size: The chunk size of the store, in bytes.

    Attributes:
        leaves: All leaves, in order.
        spans: Which leaves belong to which key.
        grids: Leaf → its grid of cells. Small leaves that are not sharded have none.
        inline: Leaf → its entry, which holds its bytes, for small leaves that are not sharded.
        same_as: Leaf → an earlier leaf with the same address, shape, strides and dtype.
        sharded: Whether any leaf is a sharded tensor.
        plans: Leaf → what this rank does for it. Only leaves that other ranks hold too, in whole or
            in part, have one.
        devices: The accelerators that hold some of the state.

    Raises:
        UnsupportedTypeError: A path is too long.
    """

    def __init__(self, leaves: list[Leaf], spans: list[KeySpan], chunk_size: int) -> None:
        self.leaves = leaves
        self.spans = spans
        self.grids: dict[int, Grid] = {}
        self.plans: dict[int, RankPlan] = {}
        self.inline: dict[int, KnownEntry] = {}
        self.same_as: dict[int, int] = {}
        self.sharded = False
        leaf_by_address: dict[int, int] = {}
        # The tensors that may be in other memory than the host's.
        elsewhere: list[torch.Tensor] = []
        with without_torch_modes():
            for i, leaf in enumerate(self.leaves):
                path, entry, content = leaf.path, leaf.entry, leaf.content
                if len(path) > MAX_PATH_CHARS:
                    raise UnsupportedTypeError(
                        f"{path[:80]}…: a path of {len(path):,} characters is too long; "
                        f"keys are names, of at most {MAX_PATH_CHARS:,} characters in all"
                    )
                payload = entry.payload
                # A small value is stored in its entry alone, and there may be a million of them.
                if payload.inline:
                    self.inline[i] = entry
                    continue
                if isinstance(content, Shards):
                    self.sharded = True
                    elsewhere += content.tensors
                    self.grids[i] = _grid_of(entry, chunk_size)
                    continue
                is_small = payload.nbytes <= INLINE_BYTES
                if is_small:
                    self.inline[i] = _with_bytes(entry, content)
                else:
                    self.grids[i] = _grid_of(entry, chunk_size)
                if isinstance(content, bytes):
                    continue
                if not content.is_cpu:
                    elsewhere.append(content)
                twin = i if is_small else leaf_by_address.setdefault(content.data_ptr(), i)
                if twin != i and self._is_same(i, twin):
                    self.same_as[i] = twin
            # Other threads copy from the GPU, so work that the caller began there must end first.
            synchronize(elsewhere)
        self.devices = devices_of(elsewhere)

    def _is_same(self, leaf: int, twin: int) -> bool:
        """Whether two leaves with the same address have the same elements in the same order."""
        a, b = self.leaves[leaf].content, self.leaves[twin].content
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
            and a.stride() == b.stride()
            and self.grids[leaf] == self.grids[twin]
        )

    def assign(self, plans: dict[int, RankPlan]) -> None:
        """Set the plans for leaves that other ranks hold too: only planned cells are hashed."""
        self.plans = plans
        # A planned leaf may be hashed in part, so another leaf of its memory is hashed by itself.
        self.same_as = {i: twin for i, twin in self.same_as.items() if twin not in plans}

    def bytes_to_hash(self) -> int:
        """Return how many bytes this rank has to hash."""
        sizes = (self.leaves[i].entry.payload.nbytes for i in self.whole_leaves())
        cells = (
            self.grids[i].cell_bytes(cell)
            for i, plan in self.plans.items()
            for first_cell, stop in (*plan.joints, *plan.runs)
            for cell in range(first_cell, stop)
        )
        return sum(sizes) + sum(cells)

    def drop_tensors(self) -> None:
        """Release the tensors, once their bytes have been copied; paths and entries stay."""
        self.leaves = [replace(leaf, content=b"") for leaf in self.leaves]

    def pieces(self, share: float = 0.0) -> Iterator[Piece]:
        """Yield first the parts of cells that this rank sends, then the bytes that it hashes.

        Leaves that share memory yield their bytes once.

        Args:
            share: At which fraction (0 to 1) of their bytes to begin with the leaves that this rank
                hashes whole; the bytes before come last. Ranks that hold equal leaves begin at
                different fractions, and so write different chunks.
        """
        for i, plan in self.plans.items():
            for part in plan.sends:
                yield piece_of_part(i, self._held_box(i, part.region), part)
        for i, plan in self.plans.items():
            for first_cell, stop in plan.runs:
                yield from self._pieces_between(i, first_cell, stop)
        leaves = self.whole_leaves()
        number, cell = self._starting_point(leaves, share) if share else (0, 0)
        parted = leaves[number : number + 1] if cell else []
        for i in parted:
            yield from pieces_between(i, self._held_boxes(i)[0], self.grids[i], cell)
        for i in (*leaves[number + bool(cell) :], *leaves[:number]):
            content = self.leaves[i].content
            assert not isinstance(content, Shards)
            yield from pieces_of(i, content, self.grids[i])
        for i in parted:
            yield from pieces_between(i, self._held_boxes(i)[0], self.grids[i], 0, cell)

    def whole_leaves(self) -> list[int]:
        """Return the numbers of the leaves that this rank hashes whole."""
        return [i for i in self.grids if i not in self.same_as and i not in self.plans]

    def _starting_point(self, leaves: list[int], share: float) -> tuple[int, int]:
        """Return the position at a fraction of the bytes of some leaves.

        Args:
            leaves: The numbers of the leaves.
            share: The fraction, from 0 to 1.

        Returns:
            The index of a leaf in ``leaves``, and a cell of that leaf.
        """
        sizes = [self.leaves[i].entry.payload.nbytes for i in leaves]
        start = share * sum(sizes)
        for number, nbytes in enumerate(sizes):
            if start < nbytes:
                entry = self.leaves[leaves[number]].entry
                splits = isinstance(entry, TensorEntry) and not is_numpy(entry)
                cells = self.grids[leaves[number]].count
                return number, int(start / nbytes * cells) if splits else 0
            start -= nbytes
        return 0, 0

    def _pieces_between(self, leaf: int, first_cell: int, stop: int) -> Iterator[Piece]:
        grid = self.grids[leaf]
        while first_cell < stop:
            # The cells may lie in several boxes of this rank.
            held = self._held_box(leaf, grid.region(first_cell))
            end = first_cell + 1
            while end < stop and _holds(held.region, grid.region(end)):
                end += 1
            yield from pieces_between(leaf, held, grid, first_cell, end)
            first_cell = end

    def _held_box(self, leaf: int, region: Region) -> HeldBox:
        """Return this rank's box of a leaf that contains ``region``."""
        return next(held for held in self._held_boxes(leaf) if _holds(held.region, region))

    def _held_boxes(self, leaf: int) -> list[HeldBox]:
        content = self.leaves[leaf].content
        if isinstance(content, Shards):
            parts = zip(content.boxes, map(as_copyable, content.tensors), strict=True)
            return [HeldBox(*part) for part in parts]
        if isinstance(content, torch.Tensor):
            content = as_copyable(content)
        return [HeldBox(Region.whole(self.grids[leaf].shape), content)]


def _holds(outer: Region, inner: Region) -> bool:
    return all(
        a <= b and b + m <= a + n
        for a, n, b, m in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )


def _grid_of(entry: KnownEntry, chunk_size: int) -> Grid:
    """Return the grid of a tensor's elements, or of the bytes of another value."""
    if isinstance(entry, TensorEntry):
        return grid_of(entry.shape, itemsize_of(entry), chunk_size)
    return grid_of((entry.payload.nbytes,), 1, chunk_size)


def _with_bytes(entry: KnownEntry, content: torch.Tensor | bytes) -> KnownEntry:
    """Return the entry of a small leaf, with the leaf's bytes inside it."""
    nbytes = entry.payload.nbytes
    if nbytes == 0:
        return entry
    if not isinstance(content, bytes):
        host = as_copyable(content).cpu().contiguous()
        content = bytes(view_at(host.data_ptr(), host.nbytes))
    return with_payload(entry, Payload(len(content), content))


# --- the input of a take ------------------------------------------------------------------------


class StateSource(Protocol):
    """The input of a take: the state of this rank.

    :class:`LiveState` and :class:`DividedLeaves` are such inputs.
    :class:`casnap.divided.WithOthers` joins one of each.

    Attributes:
        values: Key → value of the app state. A take looks for DDP modules among the values, since
            their parameters are equal on all ranks.
    """

    values: Mapping[str, Stateful]

    def keys(self) -> list[str]:
        """Return the keys, the same on all ranks, in the order in which they are captured."""

    def capture(self, keys: Sequence[str], chunk_size: int, *, allow_pickle: bool) -> CapturedState:
        """Capture the values of all keys.

        Args:
            keys: All keys, in the order that all ranks agreed on.
            chunk_size: The chunk size of the store, in bytes.
            allow_pickle: Whether values without a safe encoding may be pickled.
        """


class LiveState:
    """An app state of this rank. The take compares it with the states of other ranks.

    Args:
        values: Key → a value with ``state_dict`` and ``load_state_dict``, or a generator.
    """

    def __init__(self, values: AppState) -> None:
        self.values = with_states(values)

    def keys(self) -> list[str]:
        """Return the keys, the key of a random state first.

        Raises:
            UnsupportedTypeError: A value lacks ``state_dict`` or ``load_state_dict``.
        """
        return random_states_first(self.values)

    def capture(self, keys: Sequence[str], chunk_size: int, *, allow_pickle: bool) -> CapturedState:
        """Capture the state. The random state is the same afterwards as before.

        Args:
            keys: All keys, in the order that all ranks agreed on.
            chunk_size: The chunk size of the store, in bytes.
            allow_pickle: Whether values without a safe encoding may be pickled.

        Raises:
            UnsupportedTypeError: A value cannot be stored.
        """
        random = [s for s in self.values.values() if isinstance(s, RNGState)]
        states = [s.state_dict() for s in random]
        leaves: list[Leaf] = []
        spans: list[KeySpan] = []
        try:
            with python_gc_paused():
                for key in keys:
                    value = self.values[key]
                    start, component = len(leaves), component_of(key)
                    state = _state_of(key, value)
                    with without_torch_modes():
                        check_state(key, value, state)
                        leaves.extend(flatten(state, component, allow_pickle=allow_pickle))
                    scope = Scope.PER_RANK if isinstance(value, RNGState) else Scope.UNDECIDED
                    spans.append(KeySpan(component, start, len(leaves), scope))
                return CapturedState(leaves, spans, chunk_size)
        finally:
            # Set the random state back at once, and only if it has changed: other threads would
            # draw twice the numbers that they have drawn in between.
            for generator, before in zip(random, states, strict=True):
                if not same_random_state(generator.state_dict(), before):
                    generator.load_state_dict(before)


def _state_of(key: str, value: Stateful) -> dict[str, Any]:
    """Return ``value.state_dict()``.

    Raises:
        StateError: ``state_dict()`` raised an error of storage, such as OSError. As a StateError it
            is not mistaken for an error of the store that the take writes to.
    """
    try:
        return value.state_dict()
    except OF_STORAGE as e:
        raise StateError(f"state_dict() of {key!r} raised {type(e).__name__}: {e}") from e


class DividedLeaves:
    """Leaves that the caller has already divided among the ranks; all of them are global.

    Args:
        leaves: Key → the leaves below it that this rank has. All ranks have the same keys; one rank
            also has the leaves of the containers.
    """

    def __init__(self, leaves: Mapping[str, list[Leaf]]) -> None:
        self.values: Mapping[str, Stateful] = {}
        self._leaves = leaves

    def keys(self) -> list[str]:
        """Return the keys."""
        return list(self._leaves)

    def capture(self, keys: Sequence[str], chunk_size: int, *, allow_pickle: bool) -> CapturedState:
        """Capture the leaves.

        Args:
            keys: All keys, in the order that all ranks agreed on.
            chunk_size: The chunk size of the store, in bytes.
            allow_pickle: Ignored: the leaves are encoded already.
        """
        leaves: list[Leaf] = []
        spans = []
        for key in keys:
            start, values = len(leaves), self._leaves[key]
            leaves += values
            spans.append(KeySpan(component_of(key), start, len(leaves), Scope.DIVIDED))
        return CapturedState(leaves, spans, chunk_size)
