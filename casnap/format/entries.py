"""The entries of a manifest: what a snapshot holds.

``docs/format.md`` says what they are byte for byte. A store is untrusted: each entry is decoded
into a closed type.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import Struct

INLINE_BYTES, INLINE_DIGESTS = 64, 4
"""The most bytes, or else digests, that stand in a payload itself."""
LIST_DIGESTS, MAX_LIST_DEPTH = 1 << 15, 4
"""The most digests in a list, and the most levels of lists above a chunk."""
MAX_PATH_CHARS = 1 << 20


class Payload(Struct, frozen=True, array_like=True, gc=False):
    """Some bytes: in place, or as the digests of chunks.

    Attributes:
        nbytes: Length of the bytes.
        inline: The bytes themselves, if there are at most 64.
        digests: Otherwise up to four digests, one behind the other.
        depth: 0 if the digests name chunks; else each names a list of digests of one depth less.
    """

    nbytes: int
    inline: bytes = b""
    digests: bytes = b""
    depth: int = 0


class Quantization(Struct, frozen=True, array_like=True):
    """How the integers of a quantized tensor map to numbers.

    Attributes:
        scheme: ``per_tensor_affine``, ``per_channel_affine`` or
            ``per_channel_affine_float_qparams``.
        scales: Little-endian float64 (float32 for float qparams), one a channel.
        zero_points: Little-endian int64 (float32 for float qparams), one a channel.
        axis: The channel axis; 0 for ``per_tensor_affine``.
    """

    scheme: str
    scales: bytes
    zero_points: bytes
    axis: int = 0


class TensorEntry(Struct, frozen=True, array_like=True, tag="t", gc=False):
    """A tensor, numpy array or numpy scalar.

    Attributes:
        payload: Its bytes, row-major and little-endian, cut by the grid.
        dtype: The name in torch (``bfloat16``), or numpy's typestr (``<f4``) for numpy kinds.
        shape: The global shape.
        kind: ``tensor``, ``parameter``, ``buffer``, ``ndarray`` or ``numpy_scalar``.
        requires_grad: The tensor's ``requires_grad``.
        quantization: Set for quantized dtypes.
    """

    payload: Payload
    dtype: str
    shape: tuple[int, ...]
    kind: str = "tensor"
    requires_grad: bool = False
    quantization: Quantization | None = None


class ValueEntry(Struct, frozen=True, array_like=True, tag="v", gc=False):
    """A value that is neither tensor nor container.

    Attributes:
        payload: The encoded bytes.
        kind: Their encoding (see ``state/values.py``): ``int``, ``str``, ``object``, …
    """

    payload: Payload
    kind: str


class ContainerEntry(Struct, frozen=True, array_like=True, tag="c", gc=False):
    """A dict, list, tuple, set, … whose elements are entries below its path.

    Attributes:
        payload: Its spec: the encoded keys, in order, and what else is needed to build it again.
        kind: Which container (see ``state/containers.py``).
        count: The number of elements.
    """

    payload: Payload
    kind: str
    count: int


Entry: TypeAlias = TensorEntry | ValueEntry | ContainerEntry


def with_payload(entry: Entry, payload: Payload) -> Entry:
    """Return the entry with other bytes."""
    return msgspec.structs.replace(entry, payload=payload)


class Manifest(Struct, frozen=True, omit_defaults=True):
    """The top of a snapshot's tree: for every key of the app state the digest of its subtree.

    Attributes:
        shared: ``global/<key>``: entries that any rank can restore.
        ranks: ``ranks/<r>/<key>``: entries that belong to one rank.
        thinned: The components of the keys that the snapshot has lost, sorted.
    """

    shared: dict[str, bytes] = msgspec.field(name="global")
    ranks: dict[str, dict[str, bytes]]
    thinned: tuple[str, ...] = ()
