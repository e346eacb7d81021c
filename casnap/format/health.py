"""The health of the tensors of a snapshot, as its manifest has it: NaN, infinities and norms."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from math import hypot
from typing import Any

from msgspec import Struct

from casnap.format.decoding import unpacked
from casnap.format.entries import Entry, TensorEntry, unknown_in

MAX_HEALTH_BYTES = 4 << 20
"""The most bytes of health records in a manifest, which each restore reads."""
# Of a tensor: its place in the tree, norm and largest; and where it has some, its NaN and infinite.
_SIZES, _COUNTS = struct.Struct("<Idd"), struct.Struct("<IQQ")


class TensorHealth(Struct, frozen=True, array_like=True, gc=False):
    """The *health* of a floating-point tensor: what a take has measured of its elements.

    Attributes:
        nan: How many elements are NaN. A complex element is NaN if its real or imaginary part is.
        infinite: How many elements are infinite, counted in the same way.
        norm: The Euclidean norm of the finite elements, summed in float64.
        largest: The largest absolute value of the finite elements; 0.0 if there are none.
    """

    nan: int = 0
    infinite: int = 0
    norm: float = 0.0
    largest: float = 0.0

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return not (self.nan or self.infinite)

    @classmethod
    def of_parts(cls, parts: Iterable[TensorHealth]) -> TensorHealth:
        """Return the health of a tensor, given the health of each of its parts."""
        parts = parts if isinstance(parts, list) else list(parts)
        if len(parts) == 1:
            return parts[0]
        return cls(
            sum(part.nan for part in parts),
            sum(part.infinite for part in parts),
            hypot(*(part.norm for part in parts)),
            max((part.largest for part in parts), default=0.0),
        )


def has_health(entry: Entry) -> bool:
    """Whether an entry is a tensor of floating-point numbers, which may be NaN or infinite."""
    # Two numbers of float4_e2m1fn_x2 share a byte, and none is NaN or infinite.
    return (
        isinstance(entry, TensorEntry)
        # numpy's typestrs have the kind as their second letter.
        and (entry.dtype.startswith(("float", "bfloat", "complex")) or entry.dtype[1:2] in "fc")
        and not entry.dtype.startswith("float4")
        and not entry.quantization
        and not unknown_in(entry)
    )


def pack_health(by_number: Mapping[int, TensorHealth]) -> list[bytes]:
    """Encode the health of the tensors of a tree as a record for the manifest.

    Args:
        by_number: The number of an entry in the tree → its health, in ascending order.
    """
    sizes = (_SIZES.pack(i, each.norm, each.largest) for i, each in by_number.items())
    counts = (
        _COUNTS.pack(i, each.nan, each.infinite)
        for i, each in by_number.items()
        if not each.is_finite
    )
    return [b"".join(sizes), b"".join(counts)]


def unpack_health(record: Any) -> dict[int, TensorHealth]:
    """Decode a record of :func:`pack_health`: the number of an entry in the tree → its health.

    Raises:
        ValueError: The record is malformed.
    """
    match record:
        case [bytes(sizes), bytes(counts), *_]:
            pass
        case _:
            raise ValueError("it is no array of bytes")
    if len(sizes) % _SIZES.size or len(counts) % _COUNTS.size:
        raise ValueError("it is cut off")
    found = {i: TensorHealth(0, 0, *numbers) for i, *numbers in unpacked(_SIZES, sizes)}
    for i, nan, infinite in unpacked(_COUNTS, counts):
        if i not in found:
            raise ValueError("it counts elements of another tensor")
        found[i] = TensorHealth(nan, infinite, found[i].norm, found[i].largest)
    return found
