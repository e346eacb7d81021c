"""How far a training has moved groups of tensors: the share that changed, how much, and cosines."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, nan, prod, sqrt

import torch

from casnap.comparing.diff import diff
from casnap.comparing.elements import (
    CellToCompare,
    blocks_of,
    compare_cells,
    is_measurable,
    numbers_in,
    where_apart,
)
from casnap.format.entries import INLINE_BYTES, TensorEntry
from casnap.format.region import Region
from casnap.restore.loading import elements_of
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.roles import Role, role_of
from casnap.state.tensors import check_tensor
from casnap.storage import Contents


@dataclass
class GroupStatistics:
    """How the tensors of one group differ between two snapshots.

    Pairs of elements of which one is NaN or infinite count as differing, and in nothing else.

    Attributes:
        group: What the paths of the group have in common; * stands for a number in each.
        role: The role of the tensors in a training, such as ``weights``.
        tensors: How many tensors both snapshots have, of one shape and dtype.
        differing_tensors: How many of them differ.
        elements: How many elements the tensors have.
        differing: How many elements differ, in any bit.
        largest: The largest absolute difference.
        sum_of_differences: The sum of the absolute differences.
        squares: The sum of the squares of all elements of the tensors that differ, in the first
            snapshot and in the second.
        products: The sum, over these tensors, of the first version of each element times the
            second.
    """

    group: str
    role: Role
    tensors: int = 0
    differing_tensors: int = 0
    elements: int = 0
    differing: int = 0
    largest: float = 0.0
    sum_of_differences: float = 0.0
    squares: tuple[float, float] = (0.0, 0.0)
    products: float = 0.0

    @property
    def share(self) -> float:
        """The share of the elements that differ."""
        return self.differing / max(1, self.elements)

    @property
    def mean(self) -> float:
        """The mean absolute difference, over all elements of the group."""
        return self.sum_of_differences / max(1, self.elements)

    @property
    def cosine(self) -> float:
        """The cosine between the two versions of the tensors that differ; NaN if one is all zero.

        Tensors that are equal do not count: their elements would hide the change of direction.
        """
        length = sqrt(self.squares[0]) * sqrt(self.squares[1])
        return min(1.0, max(-1.0, self.products / length)) if 0 < length < inf else nan


def statistics(a: Contents, b: Contents) -> list[GroupStatistics]:
    """Return how the tensors of two snapshots differ, by groups of paths.

    A group has the tensors whose paths differ in numbers alone, as in the layers of a model. If a
    tensor differs, all its chunks are read, even those that are equal.

    Args:
        a: The first snapshot.
        b: The second one.

    Returns:
        The groups that have tensors in both snapshots, in the order of their first paths.

    Raises:
        DamagedError: Chunks are missing or damaged.
        StoreError: The snapshots are in two stores with different chunk sizes.
    """
    groups: dict[tuple[str, Role], GroupStatistics] = {}
    changes = {change.path: change for change in diff(a, b).changes}

    def group_of(path: str, entry: TensorEntry) -> GroupStatistics:
        key = re.sub(r"\d+", "*", path), role_of(path, entry)
        return groups.setdefault(key, GroupStatistics(*key))

    def cells() -> Iterator[CellToCompare]:
        for listed in b.listed():
            path, entry = listed.name, listed.entry
            change = changes.get(path)
            old = entry if change is None else change.old
            if not is_measurable(old, entry):
                continue
            assert isinstance(old, TensorEntry)
            assert isinstance(entry, TensorEntry)
            group = group_of(path, entry)
            group.tensors += 1
            group.elements += prod(entry.shape)
            if old.payload == entry.payload:
                continue
            check_tensor(old)
            group.differing_tensors += 1
            sums = _Sums(group, old)
            if old.payload.nbytes <= INLINE_BYTES:
                box = Region.whole(old.shape)
                both = (memoryview(bytearray(e.payload.inline)) for e in (old, entry))
                sums.add(*(elements_of(old, raw, box) for raw in both))
                continue
            grid = a.cells(path, old)
            pairs = zip(a.chunks(path, old), b.chunks(path, entry), strict=True)
            for number, ((was, nbytes), (now, _)) in enumerate(pairs):
                yield CellToCompare(sums, path, old, grid.region(number), nbytes, was, now)

    with without_torch_modes():
        compare_cells(a, b, cells())
    return list(groups.values())


class _Sums:
    """Adds the elements of one tensor to the statistics of its group.

    Args:
        group: The statistics.
        entry: The entry of the tensor.
    """

    _lock = threading.Lock()

    def __init__(self, group: GroupStatistics, entry: TensorEntry) -> None:
        self._group = group
        self._entry = entry

    def add(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Add the elements of one part of both versions. Any thread may call this."""
        for block in blocks_of(self._entry, old, new):
            apart = int(where_apart(*block).sum())
            a, b = (numbers_in(self._entry, items) for items in block)
            largest, total, squares, products = 0.0, 0.0, (0.0, 0.0), 0.0
            if a is not None and b is not None:
                a, b = a.flatten(), b.flatten()
                finite = a.isfinite() & b.isfinite()
                if not finite.all():
                    a, b = a[finite], b[finite]
                if len(a):
                    difference = (b - a).abs()
                    largest, total = float(difference.max()), float(difference.sum())
                    squares = (float(a.abs().square().sum()), float(b.abs().square().sum()))
                    products = float((a.conj() * b).real.sum())
            group = self._group
            with self._lock:
                group.differing += apart
                group.largest = max(group.largest, largest)
                group.sum_of_differences += total
                group.squares = (group.squares[0] + squares[0], group.squares[1] + squares[1])
                group.products += products
