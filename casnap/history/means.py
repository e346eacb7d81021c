"""Compute means of elements as torch does, block by block.

A block, its sum and a summand fit into the cache of a core together. So an element of a snapshot
comes from memory once, and sums do not go there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# How many elements torch gets at a time. With more, it would use threads of its own, which wait for
# each other; casnap already uses threads. With half as many, all takes a third longer.
_BLOCK = 1 << 15
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Sum:
    """The sum of a block so far.

    Attributes:
        total: Memory for the sum.
        same: Whether an element has the same bits in all snapshots so far.
        compares: Whether ``same`` is kept up. It is not once no element is the same.
    """

    total: torch.Tensor
    same: torch.Tensor
    compares: bool = False


class Means:
    """Computes means of the elements of one dtype. Each thread has an object of its own.

    Args:
        dtype: The dtype of the elements.
        sum_dtype: The dtype of their sums.
        count: How many snapshots there are.
        weights: The weight of each snapshot; None if all have the same.
        keeps_equal: Whether an element that is equal in all snapshots stays as it is.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        sum_dtype: torch.dtype,
        count: int,
        weights: Sequence[float] | None,
        *,
        keeps_equal: bool,
    ) -> None:
        self._dtype = dtype
        self._sum_dtype = sum_dtype
        self._widens = dtype != sum_dtype
        self._count = count
        self._weights = weights
        self._keeps_equal = keeps_equal
        self._sums = dict[int, _Sum]()
        self._wide = torch.empty(_BLOCK, dtype=sum_dtype)
        self._narrow = torch.empty(_BLOCK, dtype=dtype)
        # If the sum has enough more bits than an element x, x + x + … loses none, and the mean of
        # equal elements is x without a comparison, unless x is too large.
        spare = torch.finfo(dtype).eps / torch.finfo(sum_dtype).eps
        is_lossless = weights is None and not dtype.is_complex and count <= max(2, spare)
        self._most = torch.finfo(sum_dtype).max / count if is_lossless else -1.0

    def blocks(self, raw: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut bytes into blocks of elements."""
        return torch.split(raw.view(self._dtype), _BLOCK)

    def add(
        self, number: int, first: torch.Tensor, summands: Iterable[tuple[int, torch.Tensor]]
    ) -> None:
        """Add the elements of one snapshot after the other to a sum.

        Args:
            number: The number of the sum. Snapshot 0 begins it anew.
            first: The elements of snapshot 0.
            summands: The numbers of snapshots, in order, each with its elements.
        """
        if number not in self._sums:
            same = torch.empty(_BLOCK * self._keeps_equal, dtype=torch.bool)
            self._sums[number] = _Sum(torch.empty(_BLOCK, dtype=self._sum_dtype), same)
        to = self._sums[number]
        total, wide, same = _as_long_as(first, to.total, self._wide, to.same)
        so_far = total
        for snapshot, summand in summands:
            if snapshot:
                # Round the product before it is added. If torch did both in one step, it would
                # depend on the place of the element whether the result is rounded once or twice.
                so_far = torch.add(so_far, self._product(snapshot, summand, wide), out=total)
            else:
                so_far = self._product(0, summand, total)
                to.compares = self._keeps_equal and not self._is_kept_by_itself(so_far)
                if to.compares:
                    same.fill_(True)
            if to.compares and snapshot:
                equal = _bits(summand) == _bits(first)
                same.logical_and_(equal if equal.dim() == 1 else equal.all(1))
                # In an eighth of the time of same.any().
                to.compares = bool(same.view(torch.uint8).max())
        if so_far is not total:
            total.copy_(so_far)

    def write(self, number: int, first: torch.Tensor) -> None:
        """Write the mean in place of the elements of snapshot 0.

        Args:
            number: The number of the sum, which has the elements of all snapshots.
            first: The elements of snapshot 0.
        """
        of = self._sums[number]
        total, narrow, same = _as_long_as(first, of.total, self._narrow, of.same)
        count = self._count
        mean = total if self._widens or of.compares else first
        if self._weights is not None:
            mean = total
        elif count & (count - 1) or self._dtype.is_complex:
            torch.div(total, count, out=mean)
        else:
            # The same quotient in half the time: 1 / count has no rounding.
            torch.mul(total, 1 / count, out=mean)
        if of.compares:
            torch.where(same, first, narrow.copy_(mean), out=first)
        elif mean is not first:
            first.copy_(mean)

    def _product(self, snapshot: int, summand: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Return the elements of a snapshot in the dtype of the sum, times its weight.

        Args:
            snapshot: The number of the snapshot.
            summand: Its elements, which are returned if nothing is to be done.
            into: Memory for the result.
        """
        if self._widens:
            summand = into.copy_(summand)
        if self._weights is None:
            return summand
        return torch.mul(summand, self._weights[snapshot], out=into)

    def _is_kept_by_itself(self, summand: torch.Tensor) -> bool:
        """Whether an element of snapshot 0 that all have is its own mean."""
        if self._most < 0:
            return False
        # NaN, which is neither, makes both NaN.
        least, most = torch.aminmax(summand)
        return -self._most <= least.item() and most.item() <= self._most


def _as_long_as(block: torch.Tensor, *memory: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the beginnings of memory for a block that is as long as a given one."""
    n = block.numel()
    return memory if n == _BLOCK else [each[:n] for each in memory]


def _bits(elements: torch.Tensor) -> torch.Tensor:
    """Return the bits of elements as integers: one for each element, two for complex128."""
    bits = elements.view(_INTEGERS[min(8, elements.itemsize)])
    return bits.view(-1, 2) if elements.itemsize > 8 else bits
