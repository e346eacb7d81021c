"""How a chunk is stored in its pack: as it is, or compressed.

Its digest is that of the raw bytes, so each writer may choose a codec.
"""

from __future__ import annotations

import enum
import threading

from casnap.errors import DamagedError, UnsupportedFormatError


class Codec(enum.IntEnum):
    """The numbers of the codecs, as in packs and segments."""

    RAW = 0
    ZSTD = 1


_local = threading.local()


def compress(raw: memoryview | bytes) -> bytes:
    """Return the zstd form (level 1) of some bytes."""
    if not hasattr(_local, "compressor"):
        import zstandard

        _local.compressor = zstandard.ZstdCompressor(level=1)
    compressed: bytes = _local.compressor.compress(raw)
    return compressed


def decompress(codec: int, stored: memoryview, raw_size: int) -> memoryview:
    """Return the raw bytes of a chunk.

    Args:
        codec: How it is stored.
        stored: The stored bytes.
        raw_size: The length to expect; nothing longer is ever allocated.

    Raises:
        DamagedError: It is damaged.
        UnsupportedFormatError: The codec is not known.
    """
    if codec == Codec.RAW:
        return stored
    if codec != Codec.ZSTD:
        raise UnsupportedFormatError(f"a chunk is stored with codec {codec}; update casnap")
    import zstandard

    try:
        if zstandard.frame_content_size(stored) != raw_size:
            raise DamagedError("a compressed chunk has another length than the index says")
        return memoryview(zstandard.ZstdDecompressor().decompress(stored, raw_size))
    except zstandard.ZstdError as e:
        raise DamagedError(f"a compressed chunk cannot be read: {e}") from e
