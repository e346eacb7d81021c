"""Shapes of tensors and boxes in them, as Hypothesis strategies."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import strategies as st

from casnap.format.region import Region

Shape = tuple[int, ...]

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)
itemsizes = st.sampled_from([1, 2, 4, 8, 16])
chunk_sizes = st.sampled_from([16, 32, 64, 256, 1 << 20])


@st.composite
def regions(draw: st.DrawFn, shape: Shape) -> Region:
    offsets: list[int] = []
    sizes: list[int] = []
    for n in shape:
        start = draw(st.integers(0, n))
        offsets.append(start)
        sizes.append(draw(st.integers(0, n - start)))
    return Region(tuple(offsets), tuple(sizes))


def numbered(shape: Shape) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


def cut(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[region.within(Region.whole(tuple(tensor.shape)))]
