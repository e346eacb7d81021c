"""How a chunk is stored in its pack: as it is, or compressed.

Its digest is that of the raw bytes, so each writer may choose a codec.

Bytes of numbers hardly repeat, but the first byte of each number (its sign and exponent) takes few
values. So a chunk is cut into planes: the first bytes of all elements, then the second ones. The
idea is that of the shuffle filters of HDF5 and Blosc.
"""

from __future__ import annotations

import enum
import struct
import threading
from collections.abc import Callable

from casnap.errors import DamagedError, UnsupportedFormatError


class Codec(enum.IntEnum):
    """The numbers of the codecs, as in packs and segments.

    ``DELTA`` is how the chunk differs from another one (``delta.py``). A delta has a second record,
    under the digest of that other chunk, with the number ``BASE``.
    """

    RAW = 0
    PLANES = 1
    DELTA = 2
    BASE = 3


WIDTHS = (1, 2, 4, 8)
"""How many planes a chunk may be cut into: the bytes of an element."""
# A plane that shrinks by less is stored as it is: it is not worth the time of each reader.
_WORTH = 0.97
# Which width compresses best is found out from so many bytes at three places of a chunk.
_SAMPLE = 2048
# Shorter chunks, such as nodes of trees, are not worth that.
_LEAST = 1024

_local = threading.local()


def _compressor(width: int) -> Callable[[bytes], bytes]:
    """Return what compresses a plane of a chunk, in this thread."""
    if not hasattr(_local, "compressors"):
        import zstandard

        # In planes of numbers there is little to find but frequent bytes: the fastest search leaves
        # them as small, in less than half of the time.
        fastest = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            hash_log=6,
            min_match=7,
            target_length=0,
            window_log=20,
        )
        _local.compressors = (
            zstandard.ZstdCompressor(level=1).compress,
            zstandard.ZstdCompressor(compression_params=fastest).compress,
        )
    compress: Callable[[bytes], bytes] = _local.compressors[width > 1]
    return compress


def _planes(raw: bytes, width: int) -> list[bytes]:
    return [raw[i::width] for i in range(width)]


def width_of(raw: bytes | memoryview) -> int:
    """Return the width by which a sample of some bytes is smallest."""
    middle = len(raw) // 2 // WIDTHS[-1] * WIDTHS[-1]
    sample = bytes(raw) if len(raw) <= 3 * _SAMPLE else b""
    if not sample:
        last_start = len(raw) - _SAMPLE - len(raw) % WIDTHS[-1]
        sample = b"".join(bytes(raw[at : at + _SAMPLE]) for at in (0, middle, last_start))
    best, least = WIDTHS[0], float(len(sample))
    for width in WIDTHS if len(raw) >= _LEAST else WIDTHS[:1]:
        compress = _compressor(width)
        size = sum(min(len(compress(plane)), len(plane)) for plane in _planes(sample, width))
        # Each plane more costs time.
        if size < _WORTH * least:
            best, least = width, size
    return best


def split_planes(content: bytes, width: int) -> bytes:
    """Return the planes of some bytes, compressed where that is worth it, behind a header."""
    compress_plane = _compressor(width)
    parts = []
    for plane in _planes(content, width):
        frame = compress_plane(plane)
        parts.append(frame if len(frame) < _WORTH * len(plane) else plane)
    header = struct.pack(f"<B{width}I", width, *map(len, parts))
    return b"".join((header, *parts))


def planes_in(stored_form: memoryview, raw_size: int) -> tuple[list[bytes | memoryview], int]:
    """Return some planes, and where they end.

    Args:
        stored_form: The planes, and perhaps more behind them.
        raw_size: The length of all together; nothing longer is ever allocated.

    Raises:
        DamagedError: They are damaged.
    """
    import zstandard

    width = stored_form[0] if len(stored_form) else 0
    start = 1 + 4 * width
    if width not in WIDTHS or len(stored_form) < start:
        raise DamagedError("a compressed chunk has no header")
    lengths = struct.unpack_from(f"<{width}I", stored_form, 1)
    if start + sum(lengths) > len(stored_form):
        raise DamagedError("a compressed chunk has another length than its header says")
    planes: list[bytes | memoryview] = []
    # To make one takes as long as to decompress a short plane.
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    try:
        for i, length in enumerate(lengths):
            plane: bytes | memoryview = stored_form[start : start + length]
            start += length
            nbytes = len(range(i, raw_size, width))
            if length != nbytes:
                if zstandard.frame_content_size(plane) != nbytes:
                    raise DamagedError("a compressed chunk has another length than the index says")
                plane = decompressor.decompress(plane, nbytes)
            planes.append(plane)
    except zstandard.ZstdError as e:
        raise DamagedError(f"a compressed chunk cannot be read: {e}") from e
    return planes, start


def join_planes(stored_form: memoryview, raw_size: int) -> tuple[bytearray, int]:
    """Return the bytes that some planes were made of, and where the planes end.

    The arguments and errors are those of :func:`planes_in`.
    """
    planes, end = planes_in(stored_form, raw_size)
    raw = bytearray(raw_size)
    for i, plane in enumerate(planes):
        raw[i :: len(planes)] = plane
    return raw, end


def compress(raw: memoryview | bytes) -> bytes | None:
    """Return the compressed form of some bytes; None if it is not smaller."""
    content = bytes(raw)
    stored_form = split_planes(content, width_of(content))
    return stored_form if len(stored_form) < len(content) else None


def decompress(codec: int, stored_form: memoryview, raw_size: int) -> memoryview:
    """Return the raw bytes of a chunk that is not a delta.

    Args:
        codec: How it is stored.
        stored_form: The stored bytes.
        raw_size: The length to expect; nothing longer is ever allocated.

    Raises:
        DamagedError: It is damaged.
        UnsupportedFormatError: The codec is not known.
    """
    if codec == Codec.RAW:
        return stored_form
    if codec != Codec.PLANES:
        raise UnsupportedFormatError(f"a chunk is stored with codec {codec}; update casnap")
    raw, end = join_planes(stored_form, raw_size)
    if end != len(stored_form):
        raise DamagedError("a compressed chunk has another length than its header says")
    return memoryview(raw)
