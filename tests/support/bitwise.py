"""Equality of states to the last bit."""

from __future__ import annotations

import io
import struct
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements, row-major."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.dtype is getattr(torch, "float4_e2m1fn_x2", None):
        tensor = tensor.view(torch.uint8)  # before torch 2.10 it cannot be copied itself
    tensor = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def noise(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return random bits, NaNs with payloads among them, as a tensor."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def assert_same(a: Any, b: Any, where: str = "state") -> None:
    """Check that two values are of one type and equal bit for bit, in the same order."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        _assert_same_tensors(a, b, where)
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype.str, a.shape, a.tobytes()) == (b.dtype.str, b.shape, b.tobytes()), where
    elif isinstance(a, dict):
        assert list(map(_bits, a)) == list(map(_bits, b)), where
        if isinstance(a, defaultdict):
            assert a.default_factory is b.default_factory, where
        for key, x, y in zip(a, a.values(), b.values(), strict=True):
            assert_same(x, y, f"{where}[{key!r:.40}]")
    elif isinstance(a, list | tuple | deque):
        assert len(a) == len(b), where
        assert getattr(a, "maxlen", None) == getattr(b, "maxlen", None), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, set | frozenset):
        assert sorted(map(repr, map(_bits, a))) == sorted(map(repr, map(_bits, b))), where
    else:
        assert _bits(a) == _bits(b), where


def _assert_same_tensors(a: torch.Tensor, b: torch.Tensor, where: str) -> None:
    for what in ("dtype", "shape", "layout", "requires_grad", "is_quantized"):
        assert getattr(a, what) == getattr(b, what), f"{where}: {what}"
    if a.layout is torch.sparse_coo:
        assert a.is_coalesced() == b.is_coalesced(), where
        assert_same(a.detach()._indices(), b.detach()._indices(), where)
        assert_same(a.detach()._values(), b.detach()._values(), where)
    elif a.layout is not torch.strided:
        a, b = a.detach(), b.detach()
        rows = a.layout in (torch.sparse_csr, torch.sparse_bsr)
        for part in ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices"):
            assert_same(getattr(a, part)(), getattr(b, part)(), where)
        assert_same(a.values(), b.values(), where)
    else:
        assert raw(a) == raw(b), where
        if a.is_quantized:
            assert _quantization(a) == _quantization(b), where


def _quantization(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.qscheme() == torch.per_tensor_affine:
        return tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()
    scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return tensor.qscheme(), tensor.q_per_channel_axis(), scales.tolist(), points.tolist()


def _bits(value: Any) -> tuple[Any, ...]:
    if isinstance(value, float):
        return float, struct.pack("<d", value)
    if isinstance(value, complex):
        return complex, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, tuple):
        return type(value), *map(_bits, value)
    if isinstance(value, frozenset):
        return type(value), *sorted(map(_bits, value), key=repr)
    if isinstance(value, io.BytesIO):
        return io.BytesIO, value.getvalue(), value.tell()
    return type(value), value
