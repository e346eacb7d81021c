"""Write the bytes of tensors to their places in files, chunk by chunk, as they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from casnap.backends.local_files import write_at
from casnap.errors import DamagedError
from casnap.format.digest import split_digests
from casnap.format.entries import INLINE_BYTES, TensorEntry
from casnap.runtime.progress import ProgressCounter
from casnap.storage import Contents, Want


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


class TensorWriter:
    """Writes tensors of a snapshot to files.

    Args:
        contents: The snapshot.
        counter: Counts the bytes that are written.
    """

    def __init__(self, contents: Contents, counter: ProgressCounter) -> None:
        self._contents = contents
        self._counter = counter

    def write(self, fd: int, placed: Iterable[Placed]) -> None:
        """Write tensors to a file.

        Args:
            fd: The file.
            placed: The tensors.

        Raises:
            DamagedError: Stored bytes are missing or damaged.
            OSError: The file cannot be written.
        """
        self._contents.store.fetch(self._wants(fd, placed))

    def _wants(self, fd: int, placed: Iterable[Placed]) -> Iterator[Want]:
        for path, entry, start in placed:
            payload = entry.payload
            if payload.nbytes <= INLINE_BYTES:
                if len(payload.inline) != payload.nbytes:
                    raise DamagedError(f"{self._contents.label}: {path} is cut off", (path,))
                self._put(fd, start, memoryview(payload.inline))
                continue
            cells = self._contents.cells(path, entry)
            digests = split_digests(self._contents.digests(payload, cells, path))
            at = start
            for digest, nbytes in zip(digests, cells.sizes(), strict=True):
                yield Want(digest, nbytes, partial(self._put, fd, at), path)
                at += nbytes

    def _put(self, fd: int, at: int, raw: memoryview) -> None:
        write_at(fd, raw, at)
        self._counter.add(len(raw))
