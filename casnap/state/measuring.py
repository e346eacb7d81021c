"""Measure floating-point tensors: NaN, infinities, norms and largest values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from math import inf, isfinite, sqrt

import numpy as np
import torch

from casnap.format.health import TensorHealth
from casnap.runtime.buffers import view_at
from casnap.state.tensors import TENSOR_DTYPES

# Elements that are cast to float64 at a time: they stay in the cache of a core, and are fewer than
# those for which torch would start threads of its own beside the caller's.
_BLOCK = 32_000
# Elements that are looked at at a time, so that little is copied.
_PART = 1 << 20
# Pieces of at most so many bytes are measured many at a time.
_SMALL_BYTES = 16 << 10
# Below this, squares of float64 may have lost bits, or have become 0.
_TINY = 1e-280
# What torch computes with; it casts other dtypes first.
_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OF_NUMPY = {"f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64"}
_OF_NUMPY["c16"] = "complex128"
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def elements_on_host(dtype: str, raw: memoryview | bytes) -> torch.Tensor:
    """View the bytes of a tensor as a 1-D tensor of its elements.

    Complex elements become a tensor of shape ``(n, 2)``: their real and imaginary parts. The result
    may share the memory of ``raw``: the caller keeps ``raw``, and must not write to the result.

    Args:
        dtype: The dtype, as in an entry: of floating-point numbers.
        raw: The bytes.
    """
    here = np.frombuffer(raw, np.uint8)
    if dtype.startswith(">"):
        here = here.view(dtype).astype(f"<{dtype[1:]}").view(np.uint8)
        return elements_in(dtype, torch.from_numpy(here))
    # By its address: torch warns of memory that may not be written to.
    view = view_at(here.ctypes.data, len(here))
    return elements_in(dtype, torch.frombuffer(view, dtype=torch.uint8))


def elements_in(dtype: str, raw: torch.Tensor) -> torch.Tensor:
    """View a 1-D tensor of bytes as :func:`elements_on_host` does, on any device."""
    name = _OF_NUMPY.get(dtype[1:], dtype)
    if name in _PARTS:
        return raw.view(TENSOR_DTYPES[_PARTS[name]]).reshape(-1, 2)
    return raw.view(TENSOR_DTYPES[name])


def measured(elements: torch.Tensor) -> TensorHealth:
    """Return the health of elements in the host's memory.

    Args:
        elements: At least one element, as :func:`elements_in` returns them.
    """
    parts = torch.split(elements, _PART)
    if len(parts) > 1:
        return TensorHealth.of_parts(map(measured, parts))
    plain = _plain(elements)
    wide, squares, largest = torch.empty(min(len(plain), _BLOCK), dtype=torch.float64), 0.0, 0.0
    for block in torch.split(plain, _BLOCK):
        norm = float(torch.linalg.vector_norm(wide[: len(block)].copy_(block)))
        squares += norm * norm
        low, high = torch.aminmax(block)
        largest = max(largest, -float(low), float(high))
    return _of_finite(squares, largest) or _measured_all(elements)


def measured_pieces(pieces: Iterable[tuple[str, memoryview | bytes]]) -> list[TensorHealth]:
    """Return the health of each of some pieces of tensors; small ones are measured together.

    Args:
        pieces: The dtype of each piece, as in an entry, and its bytes.
    """
    found = dict[int, TensorHealth]()
    small: defaultdict[str, dict[int, memoryview | bytes]] = defaultdict(dict)
    for number, (dtype, raw) in enumerate(pieces):
        if len(raw) <= _SMALL_BYTES:
            small[dtype][number] = raw
        else:
            found[number] = measured(elements_on_host(dtype, raw))
    for dtype, parts in small.items():
        found |= zip(parts, measured_together(dtype, [*parts.values()]), strict=True)
    return [found[number] for number in range(len(found))]


def measured_together(dtype: str, parts: Sequence[memoryview | bytes]) -> list[TensorHealth]:
    """Return the health of each of many small tensors, measured together to save calls of torch.

    Args:
        dtype: The dtype of all tensors, as in an entry.
        parts: The bytes of each tensor, or of a part of it; may be empty.
    """
    some = [part for part in parts if len(part)]
    if not some:
        return [TensorHealth()] * len(parts)
    joined = b"".join(some)
    wide = _plain(elements_on_host(dtype, joined)).double()
    itemsize = len(joined) // len(wide)
    starts = [0, *accumulate(len(part) // itemsize for part in some)][:-1]
    with np.errstate(all="ignore"):
        squares = np.add.reduceat(wide.square().numpy(), starts).tolist()
        largest = np.maximum.reduceat(wide.abs().numpy(), starts).tolist()
    found = iter(
        _of_finite(*both) or _measured_all(elements_on_host(dtype, part))
        for *both, part in zip(squares, largest, some, strict=True)
    )
    return [next(found) if len(part) else TensorHealth() for part in parts]


def measured_on_devices(rows: Sequence[torch.Tensor]) -> list[TensorHealth]:
    """Return the health of tensors on accelerators, computed there.

    A tensor is copied to the host, and measured there, if some of its elements are not finite, or
    if its device has no float64 or no memory left.

    Args:
        rows: The elements of each tensor, at least one, as :func:`elements_in` returns them.
    """
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    for i, row in enumerate(rows):
        # An error that says what a device cannot do has either type.
        with suppress(RuntimeError, TypeError):
            plain = _plain(row)
            norm = torch.linalg.vector_norm(plain, dtype=torch.float64)
            largest = torch.linalg.vector_norm(plain, inf).double()
            by_device.setdefault(row.device, {})[i] = torch.stack((norm, largest))
    found: dict[int, TensorHealth | None] = {}
    for computed in by_device.values():
        on_host = torch.stack([*computed.values()]).tolist()
        for i, (norm, largest) in zip(computed, on_host, strict=True):
            found[i] = _of_finite(norm * norm, largest)
    return [found.get(i) or measured(row.cpu()) for i, row in enumerate(rows)]


def _plain(elements: torch.Tensor) -> torch.Tensor:
    """Cast elements to a dtype that torch computes with; replace complex ones by their magnitude.

    Args:
        elements: The elements, as :func:`elements_in` returns them.
    """
    if elements.dim() == 2:
        return torch.hypot(*elements.double().unbind(1))
    return elements if elements.dtype in _PLAIN else elements.float()


def _of_finite(squares: float, largest: float) -> TensorHealth | None:
    """Return the health of elements that are all finite.

    Args:
        squares: The sum of the squares of the elements.
        largest: The largest absolute value.

    Returns:
        The health; None if an element is not finite, or the sum is too large or small to be exact.
        Then :func:`_measured_all` must measure the elements.
    """
    if isfinite(squares) and isfinite(largest) and (squares > _TINY or not largest):
        return TensorHealth(0, 0, sqrt(squares), largest)
    return None


def _measured_all(elements: torch.Tensor) -> TensorHealth:
    """Return the health of elements, even if some are not finite, or very large or small."""
    plain = _plain(elements)
    wide = plain.double()
    finite = wide[wide.isfinite()]
    largest = float(finite.abs().max()) if len(finite) else 0.0
    # Squares of shares of the largest neither overflow nor vanish.
    norm = largest * float((finite / largest).square().sum().sqrt()) if largest else 0.0
    parts = elements if elements.dim() == 2 else plain.reshape(-1, 1)
    nan, infinite = (int(test.any(1).sum()) for test in (parts.isnan(), parts.isinf()))
    return TensorHealth(nan, infinite, norm, largest)
