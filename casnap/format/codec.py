"""How a chunk is stored in its pack: as it is, compressed, or as a delta of another chunk.

Its digest is that of the raw bytes, so each writer may choose a codec. Compressed means in planes
(``planes.py``); ``delta.py`` has the deltas.

A new codec that compresses a chunk by itself needs a number here, its place in ``BY_SIZE``, and its
case in :func:`compress` and :func:`decompress`: mypy finds a case that is missing. So that users
can choose it for new chunks, it needs a word in ``CODECS`` of ``storage/commit_log/settings.py``;
so that `gc` chooses it for old ones, a place in ``storage/writing/chunk_forms.py``, and so that
copies do, in ``Session.copy`` of ``storage/writing/session.py``. All else goes by the sets below.
An older version keeps what it cannot read, and says so.
"""

from __future__ import annotations

import enum
from typing import NoReturn

from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.planes import join_planes, split_planes, width_of


class Codec(enum.IntEnum):
    """The numbers of the codecs, as in packs and segments.

    ``DELTA`` is how the chunk differs from another one (``delta.py``). A later version may add
    more: what is stored so is not damaged, this version only cannot read it.
    """

    RAW = 0
    PLANES = 1
    DELTA = 2


KNOWN_CODECS = frozenset(map(int, Codec))
"""What this version can read."""
WHOLE_CODECS = KNOWN_CODECS - {int(Codec.DELTA)}
"""Those of which a chunk can be read without another one."""
BY_SIZE = (Codec.RAW, Codec.PLANES)
"""The same, from the one that makes chunks smallest last: in this order a writer prefers them."""


def compress(raw: memoryview | bytes, codec: Codec = Codec.PLANES) -> bytes | None:
    """Return the stored form of some bytes by a codec; None if it is not smaller than they are.

    Args:
        raw: The bytes.
        codec: One of those that need no other chunk.
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
    """Return the raw bytes of a chunk that is not a delta.

    Args:
        codec: How it is stored.
        stored_form: The stored bytes.
        raw_size: The length to expect; nothing longer is ever allocated.

    Raises:
        DamagedError: It is damaged.
        UnsupportedFormatError: The codec is not known.
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
    """Return the error where no codec comes: mypy refuses the call if one has no case."""
    return AssertionError(codec)
