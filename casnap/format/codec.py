"""How a chunk is stored in its pack: raw, compressed, or as a delta of another chunk.

The digest of a chunk is the digest of its raw bytes, so each writer may choose a codec. A
compressed chunk is stored in planes (``planes.py``); ``delta.py`` has the deltas.

A new codec that compresses a chunk by itself needs a number here, a place in ``BY_SIZE``, and a
case in :func:`compress` and :func:`decompress`: mypy finds a missing case. Copies that compress
write tree nodes with the last codec in ``BY_SIZE`` from then on, and older versions refuse to
collect or copy such nodes. ``tools/read_store.py`` must learn the codec too. An older version of
casnap keeps chunks of a new codec, and cannot read them. So write them with a new read feature
(``docs/format.md``, Evolution): of a row, and older versions refuse to read that snapshot; of the
root, and they refuse the store.

Users can choose the codec once ``CODECS`` of ``storage/commit_log/settings.py`` has a word for it;
``NewStore``, ``Store.configure``, ``cli/config.py`` and ``docs/format.md`` then describe the word.
Collections, and copies that compress, choose the form of a chunk in
``storage/writing/chunk_forms.py``. All other code uses the constants ``KNOWN_CODECS``,
``WHOLE_CODECS`` and ``BY_SIZE``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NoReturn

from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.planes import join_planes, split_planes, width_of


class Codec(enum.IntEnum):
    """The numbers that stand for codecs in packs and segments.

    ``DELTA`` stores the difference from another chunk (``delta.py``). A later version of casnap may
    add numbers. A chunk with an unknown number is not damaged, but this version cannot read it.
    """

    RAW = 0
    PLANES = 1
    DELTA = 2


KNOWN_CODECS = frozenset(map(int, Codec))
"""The codecs that this version can read."""
WHOLE_CODECS = KNOWN_CODECS - {int(Codec.DELTA)}
"""The codecs of chunks that can be read without another chunk."""
BY_SIZE = (Codec.RAW, Codec.PLANES)
"""``WHOLE_CODECS``, from the largest stored form to the smallest. A copy that compresses stores
tree nodes with the last one."""


def codec_among(codecs: Iterable[int]) -> Codec:
    """Return the codec, of those given, that makes chunks smallest.

    Args:
        codecs: The numbers of codecs. Deltas and unknown numbers are ignored.

    Returns:
        The codec; ``RAW`` if no other is left.
    """
    given = set(codecs)
    return [Codec.RAW, *(codec for codec in BY_SIZE if codec in given)][-1]


def compress(raw: memoryview | bytes, codec: Codec = Codec.PLANES) -> bytes | None:
    """Return the stored form of a chunk; None if the codec does not make the chunk smaller.

    Args:
        raw: The bytes of the chunk.
        codec: The codec. It must not be ``DELTA``, which needs a second chunk.

    Raises:
        ValueError: The codec is ``DELTA``.
    """
    match codec:
        case Codec.RAW:
            return None
        case Codec.PLANES:
            stored_form = split_planes(raw, width_of(raw))
            return stored_form if len(stored_form) < len(raw) else None
        case Codec.DELTA:
            raise ValueError("a delta is made of two chunks")
        case _:
            raise _forgotten(codec)


def decompress(codec: int, stored_form: memoryview, raw_size: int) -> memoryview:
    """Return the raw bytes of a chunk that is not stored as a delta.

    Args:
        codec: The number of the chunk's codec.
        stored_form: The stored bytes.
        raw_size: The expected length of the raw bytes. No buffer longer than this is allocated.

    Returns:
        The raw bytes: for ``RAW`` the memory of ``stored_form``; for each other codec new, writable
        memory, which the caller may keep and write to.

    Raises:
        DamagedError: The stored bytes are damaged.
        UnsupportedFormatError: This version does not know the codec, or the codec is ``DELTA``.
    """
    if codec not in WHOLE_CODECS:
        raise UnsupportedFormatError(f"a chunk is stored with codec {codec}; update casnap")
    match known := Codec(codec):
        case Codec.RAW:
            return stored_form
        case Codec.PLANES:
            raw, end = join_planes(stored_form, raw_size)
            if end != len(stored_form):
                raise DamagedError("a compressed chunk has another length than its header says")
            return raw.data
        case Codec.DELTA:
            raise ValueError("a delta is read with its base")
        case _:
            raise _forgotten(known)


def _forgotten(codec: NoReturn) -> AssertionError:
    """Return the error for a codec that a ``match`` does not handle; mypy finds such a case."""
    return AssertionError(codec)
