"""Reading the footer of a pack, which lists its chunks and nodes."""

from __future__ import annotations

from casnap.backends import Backend
from casnap.format.records import (
    PACK_TAIL_SIZE,
    PackId,
    Record,
    footer_length,
    pack_key,
    read_pack_footer,
)


def read_footer(
    backend: Backend, pack: PackId, size: int, guess: int = PACK_TAIL_SIZE
) -> list[Record]:
    """Return the records in the footer of a pack.

    Args:
        backend: The backend of the store.
        pack: The id of the pack.
        size: The length of the pack in bytes.
        guess: The expected length of the footer. If the footer is not longer, one read is enough.

    Raises:
        DamagedError: The footer is damaged.
        FileNotFoundError: The pack does not exist.
    """
    tail = _tail(backend, pack, size, guess)
    if len(tail) >= PACK_TAIL_SIZE and guess < (length := footer_length(tail)) <= size:
        tail = _tail(backend, pack, size, length)
    return read_pack_footer(pack, tail)


def _tail(backend: Backend, pack: PackId, size: int, nbytes: int) -> bytes:
    tail = bytearray(min(size, nbytes))
    [n] = backend.read_into(pack_key(pack), [(size - len(tail), memoryview(tail))])
    return bytes(tail[:n])
