"""States to leaves and back, compared bit for bit."""

from __future__ import annotations

import struct
from collections import Counter, deque

import numpy as np
import torch

from casnap.format.entries import ContainerEntry
from casnap.state.flatten import flatten, inflate
from casnap.state.tensors import allocate


def leaves_of(value, path="m", **kwargs):
    leaves = list(flatten(value, path, **kwargs))
    by_path = {leaf.path: leaf for leaf in leaves}
    assert len(by_path) == len(leaves)
    return by_path


def carried(leaf):
    """Return a leaf as a store would give it back."""
    assert len(leaf.path.encode()) > 0  # every path is UTF-8
    if not isinstance(leaf.content, torch.Tensor):
        payload = leaf.entry.spec if isinstance(leaf.entry, ContainerEntry) else leaf.entry.data
        assert payload.nbytes == len(leaf.content)
        return leaf
    return leaf._replace(content=allocate(leaf.entry).copy_(leaf.content))


def round_trip(value, **kwargs):
    leaves = leaves_of(value, **kwargs)
    return inflate("m", {p: carried(leaf) for p, leaf in leaves.items()}, **kwargs)


def same(a, b):
    """Tell whether two values are equal in type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _same_tensors(a, b)
    if isinstance(a, dict):
        return list(map(_bits, a)) == list(map(_bits, b)) and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return Counter(map(_bits, a)) == Counter(map(_bits, b))
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype.str, a.shape, a.tobytes()) == (b.dtype.str, b.shape, b.tobytes())
    return _bits(a) == _bits(b)


def _same_tensors(a, b):
    if (a.dtype, a.shape, a.layout, a.requires_grad) != (
        b.dtype,
        b.shape,
        b.layout,
        b.requires_grad,
    ):
        return False
    if a.layout is torch.sparse_coo:
        return a.is_coalesced() == b.is_coalesced() and all(
            map(_same_tensors, (a._indices(), a._values()), (b._indices(), b._values()))
        )
    if a.layout is not torch.strided:
        return torch.equal(a.detach().to_dense(), b.detach().to_dense())
    a, b = (
        t.detach().contiguous().view(torch.uint8) if t.numel() and t.ndim else t for t in (a, b)
    )
    return torch.equal(a, b)


def _bits(value):
    if isinstance(value, float):
        return float, struct.pack("<d", value)
    if isinstance(value, complex):
        return complex, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, (tuple, frozenset)):
        parts = [_bits(v) for v in value]
        return type(value), tuple(
            sorted(parts, key=repr) if isinstance(value, frozenset) else parts
        )
    return type(value), repr(value)
