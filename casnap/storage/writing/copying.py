"""Copy chunks and nodes out of packs into new packs, of the same store or of another one."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from casnap.format.codec import Codec
from casnap.format.delta import base_of
from casnap.format.digest import Digest
from casnap.runtime.fork import new_lock
from casnap.runtime.threads import works_in_background
from casnap.storage.packs.chunk_reads import ReadOptions, Want
from casnap.storage.packs.pack_writer import Room
from casnap.storage.reading.repository import Repository
from casnap.storage.writing.new_packs import NewPacks

# Reading takes two buffers of the pool; writing takes the others.
_READ = ReadOptions(readers=2)

# Work in the background has a pool of its own, and so a turn of its own.
_turn = new_lock()
_turn_in_background = new_lock()

Report = Callable[[Digest, int], None]
"""Called with the digest and the raw length of a copied chunk or node, from any thread."""


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """In this ``with`` block, one thread at a time copies chunks through the buffers of the pool.

    A copy holds buffers for reading while it waits for buffers for writing. Two copies at the same
    time could each hold the buffers that the other waits for. Threads in the background have
    another pool, so one of them may copy at the same time as another thread.
    """
    with _turn_in_background if works_in_background() else _turn:
        yield


def copy_verified(
    source: Repository,
    chunks: Iterable[tuple[Digest, bool]],
    new_packs: NewPacks,
    report: Report,
    *,
    keeps_delta: Callable[[Digest, Digest], bool] | None = None,
) -> None:
    """Read chunks and nodes, verify them, and write them into new packs.

    The caller must be in a block of :func:`one_at_a_time`.

    Args:
        source: The store to read from.
        chunks: The digests; for each, whether it names a node.
        new_packs: The packs to write to.
        report: Called after each chunk and node.
        keeps_delta: Called, from any thread, with the digest of a chunk that is stored as a delta,
            and the digest of its base. Returns whether to write the delta instead of the raw chunk.
            None: never.

    Raises:
        DamagedError: Some chunks or nodes are missing, or damaged wherever they lie. All other
            chunks and nodes were written.
        BackendError: Some chunks or nodes cannot be read, but may be whole.
    """

    def sink(digest: Digest, is_node: bool, raw: memoryview) -> None:
        new_packs.copy(digest, raw, is_node=is_node, is_verified=True)
        report(digest, len(raw))

    def keep_delta(digest: Digest, stored_form: memoryview, raw: memoryview) -> None:
        if keeps_delta is not None and keeps_delta(digest, base_of(stored_form)):
            new_packs.copy_stored(digest, stored_form, len(raw), Codec.DELTA)
            report(digest, len(raw))
        else:
            sink(digest, False, raw)

    def want(digest: Digest, is_node: bool) -> Want:
        as_delta = partial(keep_delta, digest) if keeps_delta else None
        return Want(
            digest, -1, partial(sink, digest, is_node), "", is_node=is_node, as_delta=as_delta
        )

    options = _READ._replace(room=new_packs.room)
    source.fetch((want(d, node) for d, node in chunks), options)


class ChunkBuffer:
    """A buffer into which groups of chunks are read, one group after the other.

    Allocating memory for each group would take longer than hashing the chunks. A chunk that does
    not fit into the buffer gets memory of its own. The caller must be in a block of
    :func:`one_at_a_time`.

    Args:
        nbytes: The bytes of the buffer.
    """

    def __init__(self, nbytes: int) -> None:
        # The kernel makes a page at its first use.
        self._memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used = 0
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Empty the buffer. The bytes of chunks that were read before are no longer valid."""
        self._used = 0

    def read(self, source: Repository, digests: Iterable[Digest]) -> dict[Digest, memoryview]:
        """Read chunks into the buffer; return their bytes by digest, valid until :meth:`clear`.

        Raises:
            DamagedError: Some chunks are missing, or damaged wherever they lie.
            BackendError: Some chunks cannot be read, and may be whole.
        """
        raws: dict[Digest, memoryview] = {}

        def keep(digest: Digest, raw: memoryview) -> None:
            if raw.obj is not self._memory:
                part = self._part(len(raw))
                copy = memoryview(bytearray(len(raw))) if part is None else part
                copy[:] = raw
                raw = copy
            raws[digest] = raw

        wants = (Want(digest, -1, partial(keep, digest), "") for digest in digests)
        source.fetch(wants, ReadOptions(readers=1, room=self._room))
        return raws

    def _part(self, nbytes: int) -> memoryview | None:
        with self._lock:
            begin, end = self._used, self._used + nbytes
            if end > len(self._memory):
                return None
            self._used = end
        return memoryview(self._memory)[begin:end]

    def _room(self, nbytes: int, _count: int) -> Room | None:
        part = self._part(nbytes)
        return None if part is None else Room(part, lambda chunks: None)
