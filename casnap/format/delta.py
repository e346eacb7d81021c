"""Deltas: a chunk stored as its difference from another chunk of the same length, its base.

The difference is taken element by element, between integers that wrap around. The bits of floats
are ordered like the floats, so a small change to a float is a small difference of integers. All
deltas of a chain are applied to the same buffer.

A delta has one of two forms. If most elements differ from the base, the dense form stores all
differences in planes (``planes.py``). If few elements differ, the sparse form stores their
differences alone, and the gaps between their indices.

numpy computes differences at 10 GB/s, Python's own integers at 0.25 GB/s.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from casnap.errors import DamagedError
from casnap.format.digest import DIGEST_SIZE, Digest
from casnap.format.planes import WIDTHS, join_planes, scratch, split_planes, width_of

if TYPE_CHECKING:
    import numpy as np

_DENSE, _SPARSE = 0, 1
# The number of the scratch that holds differences. Planes use another one at the same time.
_DIFFERENCES = 1
# The digest of the base, the form, the bytes of an element, and (sparse form) how many differ.
_HEAD = struct.Struct(f"<{DIGEST_SIZE}sBBI")
# If a greater share of the elements differs, their gaps take more bytes than zeros would.
_FEW = 0.4
_GAP_WIDTHS = (2, 4)
# A delta that takes a greater share of its chunk is not worth the time of each reader.
_WORTH = 0.9

MOST_LINKS = 32
"""The most deltas in a chain."""
MOST_STORED = 2.0
"""The most stored bytes of all chunks of a chain, as a multiple of the raw bytes of one chunk."""


def encode_delta(
    raw: memoryview | bytes, base: memoryview | bytes, base_digest: Digest
) -> bytes | None:
    """Return a chunk as a delta of a base.

    Args:
        raw: The bytes of the chunk.
        base: The bytes of the base.
        base_digest: The digest of the base.

    Returns:
        The delta; None if it takes 90 % of the chunk's bytes or more, or if the lengths differ.
    """
    import numpy as np

    if len(raw) != len(base):
        return None
    content, other = np.frombuffer(raw, np.uint8), np.frombuffer(base, np.uint8)
    width = width_of(base) if len(raw) % WIDTHS[-1] == 0 else 1
    elements, elements_before = content.view(f"<u{width}"), other.view(f"<u{width}")
    form, count = _DENSE, 0
    differing = elements != elements_before
    # Counting takes a twentieth of the time of listing.
    if np.count_nonzero(differing) <= _FEW * len(elements):
        places = np.flatnonzero(differing)
        form, count = _SPARSE, len(places)
        gaps = np.diff(places, prepend=0)
        gap_width = 2 if count and gaps.max() < 1 << 16 else 4
        values = _difference(elements[places], elements_before[places])
        body = split_planes(gaps.astype(f"<u{gap_width}").tobytes(), gap_width)
        body += split_planes(values.data, width)
    else:
        body = split_planes(_difference(elements, elements_before).data, width)
    stored_form = _HEAD.pack(base_digest, form, width, count) + body
    return stored_form if len(stored_form) < _WORTH * len(raw) else None


def base_of(stored_form: memoryview | bytes) -> Digest:
    """Return the digest of the base that a delta names.

    Raises:
        DamagedError: The bytes are not a delta.
    """
    return _head(stored_form)[0]


def is_sparse(stored_form: memoryview | bytes) -> bool:
    """Whether a delta has the sparse form.

    Raises:
        DamagedError: The bytes are not a delta.
    """
    return _head(stored_form)[1] == _SPARSE


def apply_delta(stored_form: memoryview, chunk: bytearray | memoryview) -> None:
    """Apply a delta to its base, in place. The caller must verify the result.

    Args:
        stored_form: The delta.
        chunk: The bytes of the base. The call overwrites them with the bytes of the chunk.

    Raises:
        DamagedError: The delta is malformed, or does not fit a chunk of this length.
    """
    import numpy as np

    _, form, width, count = _head(stored_form)
    body = stored_form[_HEAD.size :]
    if width not in WIDTHS or len(chunk) % width:
        raise DamagedError("a delta has elements of an impossible length")
    if form == _DENSE and count:
        raise DamagedError("a dense delta counts some elements, as only a sparse one may")
    target = np.frombuffer(chunk, np.uint8)
    if form == _DENSE:
        change, end = join_planes(body, len(chunk), scratch(len(chunk)))
        _add(target.view(f"<u{width}"), change)
    else:
        elements = target.view(f"<u{width}")
        places, steps, end = _listed(body, width, count, len(elements))
        changed = elements[places]
        _add(changed, steps)
        elements[places] = changed
    if end != len(body):
        raise DamagedError("a delta has another length than its parts")


def changed_by(
    stored_form: memoryview, chunk: memoryview, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return which elements of a chunk differ from its base, with their values before and after.

    Args:
        stored_form: The delta that makes the chunk of its base.
        chunk: The bytes of the chunk, verified.
        width: The bytes of an element.

    Returns:
        The indices of the differing elements in ascending order, their values in the base, and
        their values in the chunk. None if the delta has the dense form, or elements of another
        width.

    Raises:
        DamagedError: The delta is malformed, or does not fit this chunk.
    """
    import numpy as np

    _, form, its_width, count = _head(stored_form)
    if form != _SPARSE or its_width != width:
        return None
    elements = np.frombuffer(chunk, f"<u{width}")
    places, steps, _ = _listed(stored_form[_HEAD.size :], width, count, len(elements))
    values = elements[places]
    before = values - steps.view(values.dtype)
    before += _middle(values)
    return places, before, values


def _listed(
    body: memoryview, width: int, count: int, most: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Decode the body of a sparse delta.

    Args:
        body: The delta without its head.
        width: The bytes of an element.
        count: How many elements the delta changes.
        most: How many elements the chunk has.

    Returns:
        The indices of the changed elements, their differences as bytes, and how many bytes of
        ``body`` were decoded.

    Raises:
        DamagedError: The body is malformed, or does not fit a chunk of this length.
    """
    import numpy as np

    if count > most:
        raise DamagedError("a delta changes more elements than its base has")
    gap_width = body[0] if len(body) else 0
    if gap_width not in _GAP_WIDTHS:
        raise DamagedError("a delta has gaps of an impossible length")
    gaps, end = join_planes(body, gap_width * count)
    steps, length = join_planes(body[end:], width * count)
    places = np.cumsum(gaps.view(f"<u{gap_width}"), dtype=np.int64)
    # Gaps are never negative, so the last place is the greatest.
    if count and places[-1] >= most:
        raise DamagedError("a delta changes elements beyond its base")
    return places, steps, end + length


def _difference(elements: np.ndarray, elements_before: np.ndarray) -> np.ndarray:
    """Return the differences of two arrays of integers, as bytes.

    The differences are offset by :func:`_middle`. They lie in memory that the next call in this
    thread overwrites.
    """
    import numpy as np

    memory = scratch(elements.nbytes, _DIFFERENCES)
    steps = memory.view(elements.dtype)
    np.subtract(elements, elements_before, out=steps)
    np.add(steps, _middle(elements), out=steps)
    return memory


def _add(elements: np.ndarray, differences: np.ndarray) -> None:
    """Add differences, as :func:`_difference` returns them, to an array of integers, in place."""
    import numpy as np

    np.add(elements, differences.view(elements.dtype), out=elements)
    np.subtract(elements, _middle(elements), out=elements)


def _middle(elements: np.ndarray) -> np.generic:
    """Return the integer that stands for the difference 0: all its bytes are 0x80.

    Stored in this way, the differences -1 and 1 have nearly the same bytes, which compress well.
    """
    import numpy as np

    middle: np.generic = np.frombuffer(b"\x80" * elements.itemsize, elements.dtype)[0]
    return middle


def _head(stored_form: memoryview | bytes) -> tuple[Digest, int, int, int]:
    if len(stored_form) < _HEAD.size:
        raise DamagedError("a delta is cut off")
    digest, form, width, count = _HEAD.unpack_from(stored_form)
    if form not in (_DENSE, _SPARSE):
        raise DamagedError(f"a delta has the unknown form {form}")
    return Digest(digest), form, width, count
