"""BLAKE3-256: the name of every chunk and of every tree node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

from blake3 import blake3

Digest = NewType("Digest", bytes)
"""32 raw bytes; never hex."""

DIGEST_SIZE = 32


def digest_of(buffer: bytes | bytearray | memoryview) -> Digest:
    """Return the BLAKE3-256 of a buffer.

    A call uses one thread: callers hash many chunks at once. From 2 KiB up it releases the GIL.
    """
    # Digest(…) would be one more call, for each entry of a state and each small chunk.
    return blake3(buffer).digest()  # type: ignore[return-value]


def digest_of_parts(parts: Iterable[bytes | bytearray | memoryview]) -> Digest:
    """Return the BLAKE3-256 digest of several buffers, as if they were one buffer in this order."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return Digest(hasher.digest())


def split_digests(digests: bytes) -> list[Digest]:
    """Cut concatenated digests into single ones."""
    return [Digest(digests[i : i + DIGEST_SIZE]) for i in range(0, len(digests), DIGEST_SIZE)]
