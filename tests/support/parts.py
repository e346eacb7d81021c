"""Plain tensors that hold parts of a larger one: ``CheckpointableTensor`` of DCP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PADDING = -7.0
_GAP = 3


def holding(
    whole: torch.Tensor, runs: Sequence[tuple[int, int]], axis: int = 0, gap: int = _GAP
) -> torch.Tensor:
    """Return a tensor that holds runs of indices of another, in this order, with padding between.

    Args:
        whole: The larger tensor.
        runs: The first index and one past the last, of each run.
        axis: The axis that the runs cut.
        gap: The padding before, between and after them.
    """
    lengths = [stop - start for start, stop in runs]
    shape = list(whole.shape)
    shape[axis] = sum(lengths) + gap * (len(runs) + 1)
    local = torch.full(shape, PADDING, dtype=whole.dtype)
    at, places = gap, []
    for (start, stop), length in zip(runs, lengths, strict=True):
        local.narrow(axis, at, length).copy_(whole.narrow(axis, start, stop - start))
        places.append((start, at, length))
        at += length + gap

    def along(index: int) -> tuple[int, ...]:
        return tuple(index if i == axis else 0 for i in range(whole.dim()))

    say(
        local,
        tuple(whole.shape),
        tuple(along(start) for start, _, _ in places),
        tuple(along(at) for _, at, _ in places),
        tuple(
            tuple(length if i == axis else n for i, n in enumerate(whole.shape))
            for _, _, length in places
        ),
    )
    return local


def say(tensor: Any, shape: Any, offsets: Any, local_offsets: Any, sizes: Any) -> None:
    """Have a tensor say which parts of which tensor it holds."""
    tensor.global_shape, tensor.global_offsets = shape, offsets
    tensor.local_offsets, tensor.local_sizes = local_offsets, sizes


def say_as(parts: Any, tensor: torch.Tensor) -> None:
    """Have a tensor say that it holds the same parts as another one."""
    said = (parts.global_shape, parts.global_offsets, parts.local_offsets, parts.local_sizes)
    say(tensor, *said)


def blank(parts: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """Return another tensor that is to hold the same parts, and does not yet."""
    made = torch.full_like(parts, PADDING, device=device)
    say_as(parts, made)
    return made
