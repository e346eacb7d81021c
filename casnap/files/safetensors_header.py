"""Write the header of a safetensors file, and read it as untrusted input.

A file is the length of the header (8 bytes), the header (JSON), then the bytes of all tensors,
without holes. https://github.com/huggingface/safetensors describes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import msgspec

from casnap.errors import FileFormatError
from casnap.format.decoding import json_decoder

MOST_HEADER = 100_000_000
"""The longest header, in bytes, that safetensors itself reads."""
_MOST_AXES = 64
_PAGE = 4096
_PAIR = "float4_e2m1fn_x2"

# The format's name of a dtype → torch's name, and the bytes of an element.
_DTYPES = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1), "F4": (_PAIR, 1),
    "U16": ("uint16", 2), "I16": ("int16", 2), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4), "I32": ("int32", 4), "F32": ("float32", 4),
    "U64": ("uint64", 8), "I64": ("int64", 8), "F64": ("float64", 8), "C64": ("complex64", 8),
}  # fmt: skip
_NAMES = {dtype: (name, itemsize) for name, (dtype, itemsize) in _DTYPES.items()}

DTYPES = frozenset(_NAMES)
"""The dtypes that safetensors has, by torch's names."""


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element of one of :data:`DTYPES`."""
    return _NAMES[dtype][1]


class HeaderTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        name: Its name.
        dtype: Its dtype, by torch's name.
        itemsize: The bytes of one element. Two numbers of 4 bits are one element, as in torch.
        shape: Its shape, in elements.
        start: The offset of its first byte in the file.
        stop: The offset behind its last byte.
    """

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """The header of a file: its tensors, in order, and its ``__metadata__``."""

    tensors: list[HeaderTensor]
    metadata: dict[str, str]


class _Described(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(file: memoryview) -> Header:
    """Return the header of a safetensors file.

    Args:
        file: The whole file.

    Raises:
        FileFormatError: It is no safetensors file, or its header contradicts the file or itself.
    """
    size = int.from_bytes(file[:8], "little")
    if len(file) < 8 or size > min(MOST_HEADER, len(file) - 8):
        raise FileFormatError("it is too short, or its header is longer than it may be")
    text = bytes(file[8 : 8 + size])
    try:
        raws = json_decoder(dict[str, msgspec.Raw]).decode(text)
        raw = raws.pop("__metadata__", None)
        metadata = {} if raw is None else json_decoder(dict[str, str]).decode(raw)
        described = {n: json_decoder(_Described).decode(r) for n, r in raws.items()}
        # Equal keys are refused: msgspec keeps the last one, other readers the first one.
        json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise FileFormatError(f"its header is not one of safetensors: {e}") from e
    tensors = [_checked(name, d, 8 + size, len(file)) for name, d in described.items()]
    end = 8 + size
    for tensor in sorted(tensors, key=lambda t: (t.start, t.stop)):
        if tensor.start != end:
            raise FileFormatError(f"the bytes of {tensor.name!r:.200} overlap, or follow a hole")
        end = tensor.stop
    if end != len(file):
        raise FileFormatError(
            f"its tensors end at byte {end:,}, but it has {len(file):,}: it is cut off, or longer"
        )
    return Header(tensors, metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = set[str]()
        for name, _ in pairs:
            if name in names:
                raise ValueError(f"{name!r:.200} is there twice")
            names.add(name)
    return fields


def _checked(name: str, described: _Described, base: int, length: int) -> HeaderTensor:
    """Check the description of a tensor in a header, and return it.

    Args:
        name: The name of the tensor.
        described: The header's description of it.
        base: Where the bytes of tensors begin in the file.
        length: The length of the file.

    Raises:
        FileFormatError: The description contradicts itself, or the length of the file.
    """
    dtype, itemsize = _DTYPES.get(described.dtype, ("", 0))
    shape, (start, stop) = described.shape, described.data_offsets
    label = f"{name!r:.200} is said to be {described.dtype[:20]} of shape {list(shape[:8])}"
    if not dtype:
        raise FileFormatError(f"{label}: casnap has no such dtype")
    # An axis without elements counts as one in strides.
    if len(shape) > _MOST_AXES or min(shape, default=0) < 0 or prod(n or 1 for n in shape) >> 58:
        raise FileFormatError(f"{label}: no tensor can have that shape")
    if dtype == _PAIR:
        if not shape or shape[-1] % 2:
            raise FileFormatError(f"{label}: it has no whole bytes")
        shape = (*shape[:-1], shape[-1] // 2)
    if not 0 <= start <= stop <= length - base:
        raise FileFormatError(f"{label}, in bytes beyond the end of the file")
    if prod(shape) * itemsize != stop - start:
        raise FileFormatError(f"{label}, but has {stop - start:,} bytes")
    return HeaderTensor(name, dtype, itemsize, shape, base + start, base + stop)


def header_of(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Return the beginning of a file, the offset of each tensor's bytes, and the file's length.

    Args:
        tensors: The name of each tensor → its dtype, as torch names it, and its shape.
        metadata: The content of ``__metadata__``.

    Raises:
        FileFormatError: The header would be too long for readers; or the format cannot express the
            name or the shape of a tensor.
    """

    # Tensors of whole pages come first, then those with the largest elements: so all are aligned.
    def place(name: str) -> tuple[bool, int, str]:
        dtype, shape = tensors[name]
        itemsize = _NAMES[dtype][1]
        return prod(shape) * itemsize % _PAGE > 0, -itemsize, name

    order = sorted(tensors, key=place)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, at = {}, 0
    for name in order:
        dtype, shape = tensors[name]
        if name == "__metadata__":
            raise FileFormatError(f"safetensors has no room for a tensor named {name!r}")
        if dtype == _PAIR and not shape:
            raise FileFormatError(f"safetensors has no {dtype} without axes, as {name!r:.200} is")
        theirs, itemsize = _NAMES[dtype]
        starts[name], at = at, at + prod(shape) * itemsize
        if dtype == _PAIR:
            shape = (*shape[:-1], shape[-1] * 2)
        header[name] = {"dtype": theirs, "shape": shape, "data_offsets": (starts[name], at)}
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise FileFormatError(f"names in safetensors are UTF-8, but one is not: {e}") from e
    text += b" " * (-(8 + len(text)) % _PAGE)
    if len(text) > MOST_HEADER:
        raise FileFormatError(
            f"the header would have {len(text):,} bytes, and readers take {MOST_HEADER:,}; export "
            "fewer tensors to a file, with a lower max_shard_size"
        )
    base = 8 + len(text)
    starts = {name: base + start for name, start in starts.items()}
    return len(text).to_bytes(8, "little") + text, starts, base + at
