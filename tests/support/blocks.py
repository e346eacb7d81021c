"""Async takes whose copies lie in small blocks: what fills many of them is no large state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from casnap.runtime.buffers import Pool
from casnap.take import staging

LEAST = staging._LEAST_BLOCKS
"""So many blocks may be used whatever the bound is."""


@contextmanager
def small_blocks(nbytes: int = 1 << 20) -> Iterator[Pool]:
    """Have takes copy to blocks of so many bytes, in pieces of a fourth; give their pool."""
    pool = Pool(nbytes, None)
    with mock.patch.multiple(
        staging, _BLOCK_BYTES=nbytes, _block_pool=pool, PIECE_BYTES=nbytes // 4
    ):
        yield pool
