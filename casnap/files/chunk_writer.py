"""Writing the bytes of tensors to their places in files, chunk by chunk, as they are read."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

from casnap.backends.file_io import write_at
from casnap.errors import DamagedError
from casnap.format.digest import split_digests
from casnap.format.entries import INLINE_BYTES, TensorEntry
from casnap.runtime.progress import ProgressCounter
from casnap.storage.catalog.contents import Contents
from casnap.storage.chunks.chunk_reads import Want


class Placed(NamedTuple):
    """A tensor, and where its bytes go in a file.

    Attributes:
        path: Its path in the snapshot.
        entry: Its entry.
        start: The byte of the file at which it begins.
    """

    path: str
    entry: TensorEntry
    start: int


class ChunkWriter:
    """Writes tensors of a snapshot to files.

    Args:
        contents: The snapshot.
        counter: Counts the bytes that are written.
    """

    def __init__(self, contents: Contents, counter: ProgressCounter) -> None:
        self._contents = contents
        self._counter = counter

    def write(self, fd: int, placed: Iterable[Placed], crcs: dict[int, int] | None = None) -> None:
        """Write tensors to a file.

        Args:
            fd: The file.
            placed: The tensors.
            crcs: Gets the CRC-32 of each tensor, by where it begins; None if they are not needed.

        Raises:
            DamagedError: Stored bytes are missing or damaged.
            OSError: The file cannot be written.
        """
        tensors = list(placed)
        sums = {tensor.start: _Crc() for tensor in tensors} if crcs is not None else {}
        self._contents.store.fetch(self._wants(fd, tensors, sums))
        for tensor in tensors if crcs is not None else ():
            assert crcs is not None
            crcs[tensor.start] = sums[tensor.start].value()

    def _wants(self, fd: int, tensors: list[Placed], sums: dict[int, _Crc]) -> Iterator[Want]:
        for path, entry, start in tensors:
            crc, payload = sums.get(start), entry.data
            if payload.nbytes <= INLINE_BYTES:
                if len(payload.inline) != payload.nbytes:
                    raise DamagedError(f"{self._contents.label}: {path} is cut off", (path,))
                self._put(fd, start, crc, 0, memoryview(payload.inline))
                continue
            cells = self._contents.cells(path, entry)
            digests = split_digests(self._contents.digests(payload, cells, path))
            at = start
            for number, nbytes in enumerate(cells.sizes()):
                sink = partial(self._put, fd, at, crc, number)
                yield Want(digests[number], nbytes, sink, path)
                at += nbytes

    def _put(self, fd: int, at: int, crc: _Crc | None, number: int, raw: memoryview) -> None:
        if crc is not None:
            crc.add(number, raw)
        write_at(fd, raw, at)
        self._counter.add(len(raw))


# --- CRC-32 -----------------------------------------------------------------------------------


class _Crc:
    """The CRC-32 of a tensor whose chunks come in any order.

    Those of the chunks are joined by algebra: an export took 0.36 s so, and 0.51 s without it.
    """

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, int]] = {}

    def add(self, number: int, raw: memoryview) -> None:
        self._parts[number] = zlib.crc32(raw), len(raw)

    def value(self) -> int:
        """Return it, once all chunks were added."""
        crc = 0
        for _, (part, nbytes) in sorted(self._parts.items()):
            crc = _times(_shift(nbytes), crc) ^ part
        return crc


_POLYNOMIAL = 0xEDB88320


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32, bits reflected."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(4096)
def _shift(nbytes: int) -> int:
    """Return what a CRC is multiplied with if so many bytes follow: x to the power of the bits."""
    power, factor = 1 << 31, 1 << 23  # x to the power of 0 and of 8
    while nbytes:
        if nbytes & 1:
            power = _times(power, factor)
        factor = _times(factor, factor)
        nbytes >>= 1
    return power
