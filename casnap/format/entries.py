"""The entries of a manifest: the tensors, values and containers that a snapshot holds.

``docs/format.md`` describes them byte for byte. A store is untrusted: each entry is decoded into a
closed type.

Later versions of casnap may add sorts of entries, kinds, dtypes, and elements of an entry. In each
of these cases the payload of the entry names all chunks that the entry needs. So this version can
keep and copy an unknown entry, and verify its chunks. It only refuses to read the entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Raw, Struct

from casnap.errors import UnsupportedFormatError
from casnap.format.decoding import decoder
from casnap.format.digest import Digest
from casnap.format.tree import Load, Tree

INLINE_BYTES, INLINE_DIGESTS = 64, 4
"""A payload of up to 64 bytes holds the bytes; a larger one holds up to four digests."""
LIST_DIGESTS, MAX_LIST_DEPTH = 1 << 15, 4
"""The most digests in a list, and the most levels of lists above a chunk."""
MAX_PATH_CHARS = 1 << 20

TENSOR_KINDS = frozenset({"tensor", "parameter", "buffer", "ndarray", "numpy_scalar"})
NUMPY_KINDS = frozenset({"ndarray", "numpy_scalar"})
"""The kinds of tensor entries for numpy arrays and scalars."""
# fmt: off
VALUE_KINDS = frozenset({
    "none", "bool", "int", "float", "complex", "str", "bytes", "bytearray", "bytes_io", "range",
    "slice", "timedelta", "date", "datetime", "path", "device", "torch_version", "dtype", "layout",
    "memory_format", "qscheme", "enum", "packed_list", "packed_tuple", "packed_set",
    "packed_frozenset", "object", "pickle",
})
CONTAINER_KINDS = frozenset({
    "dict", "Counter", "defaultdict", "OrderedDict", "list", "tuple", "size", "set", "frozenset",
    "deque", "namedtuple", "sparse_coo", "sparse_csr", "sparse_bsr", "sparse_csc", "sparse_bsc",
})
TORCH_DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
"""Dtypes of whole bytes; an element of float4_e2m1fn_x2 is one byte that holds two numbers."""
# fmt: on
QUANTIZED_DTYPES = ("quint8", "qint8", "qint32")
SCHEMES = ("per_tensor_affine", "per_channel_affine", "per_channel_affine_float_qparams")
NUMPY_DTYPE = re.compile(
    r"\|(?:b1|[iu]1|[SV][1-9][0-9]{0,4})|"
    r"[<>](?:[iu][248]|f[248]|c8|c16|[mM]8(?:\[[0-9A-Za-z/]{1,24}\])?|U[1-9][0-9]{0,4})"
)
"""Numpy's typestrs that can be stored. Those for text and bytes contain a length."""
_DTYPES = frozenset({*TORCH_DTYPES, *QUANTIZED_DTYPES})


class Payload(Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """The bytes of an entry: stored in the entry itself, or as the digests of chunks.

    Attributes:
        nbytes: The number of bytes.
        inline: The bytes themselves, if they are 64 or fewer.
        digests: Up to four concatenated digests, if the bytes are more than 64.
        depth: 0 if the digests name chunks. At depth n, each digest names a node: a list of digests
            of depth n - 1.
    """

    nbytes: int
    inline: bytes = b""
    digests: bytes = b""
    depth: int = 0


class Quantization(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the integers of a quantized tensor map to numbers.

    Attributes:
        scheme: ``per_tensor_affine``, ``per_channel_affine`` or
            ``per_channel_affine_float_qparams``.
        scales: Little-endian float64 (float32 for float qparams), one for each channel.
        zero_points: Little-endian int64 (float32 for float qparams), one for each channel.
        axis: The channel axis; 0 for ``per_tensor_affine``.
    """

    scheme: str
    scales: bytes
    zero_points: bytes
    axis: int = 0


class _EntryBase(Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """The base class of entries. Decoding fails for an entry with unknown elements.

    An unknown element may change what the known elements mean.

    Attributes:
        payload: The bytes of the entry.
    """

    payload: Payload


class TensorEntry(_EntryBase, frozen=True, array_like=True, tag="t", gc=False):
    """A tensor, numpy array or numpy scalar.

    Attributes:
        payload: The bytes of the elements, row-major and little-endian. The grid cuts them into
            chunks.
        dtype: The name in torch (``bfloat16``), or numpy's typestr (``<f4``) for numpy kinds.
        shape: The global shape.
        kind: ``tensor``, ``parameter``, ``buffer``, ``ndarray`` or ``numpy_scalar``.
        requires_grad: The tensor's ``requires_grad``.
        quantization: The parameters of a quantized dtype; None for other dtypes.
    """

    dtype: str
    shape: tuple[int, ...]
    kind: str = "tensor"
    requires_grad: bool = False
    quantization: Quantization | None = None


class ValueEntry(_EntryBase, frozen=True, array_like=True, tag="v", gc=False):
    """A value that is neither tensor nor container.

    Attributes:
        payload: The encoded value.
        kind: The encoding (see ``state/values.py``): ``int``, ``str``, ``object``, …
    """

    kind: str


class ContainerEntry(_EntryBase, frozen=True, array_like=True, tag="c", gc=False):
    """A dict, list, tuple, set, or another container.

    Its elements have entries of their own below its path.

    Attributes:
        payload: The container's spec: the encoded keys in order, and whatever else is needed to
            build the container again.
        kind: The type of the container (see ``state/containers.py``).
        count: The number of elements.
    """

    kind: str
    count: int


class UnknownEntry(Struct, frozen=True, gc=False):
    """An entry that a later version of casnap wrote; this version knows only its payload.

    Attributes:
        payload: The bytes of the entry.
        what: The part that this version does not know, in words for messages, such as "the dtype
            'x'".
        kind: Always ``unknown``.
    """

    payload: Payload
    what: str
    kind: str = "unknown"


KnownEntry: TypeAlias = TensorEntry | ValueEntry | ContainerEntry
Entry: TypeAlias = KnownEntry | UnknownEntry

_NIL = msgspec.msgpack.encode(None)
_SORTS: dict[str, Any] = {"t": TensorEntry, "v": ValueEntry, "c": ContainerEntry}


def _decode_known(data: Raw | bytes) -> KnownEntry:
    entry: KnownEntry = decoder(KnownEntry).decode(data)  # type: ignore[arg-type]
    return entry


def decode_entry(data: Raw) -> Entry:
    """Decode an entry.

    Returns:
        The entry; an :class:`UnknownEntry` if its sort, or one of its elements, is unknown.

    Raises:
        msgspec.DecodeError: The entry is malformed.
    """
    try:
        return _decode_known(data)
    except msgspec.ValidationError:
        sort, payload, *others = decoder(list[Raw]).decode(data)
    numbers, more_of_payload = _split(payload, 4)
    known_payload = decoder(Payload).decode(msgspec.msgpack.encode(numbers))
    name = decoder(str).decode(sort)
    if name not in _SORTS:
        return UnknownEntry(known_payload, f"the sort {name[:40]!r}")
    count = len(_SORTS[name].__struct_fields__) - 1
    more, fields = _has_any(others[count:]), others[:count]
    if name == "t" and len(fields) == count and bytes(fields[-1]) != _NIL:
        parameters, more_of_parameters = _split(fields[-1], 4)
        fields[-1] = Raw(msgspec.msgpack.encode(parameters))
        more |= more_of_parameters
    if more or more_of_payload:
        return UnknownEntry(known_payload, "what follows the elements that are known")
    return _decode_known(msgspec.msgpack.encode([sort, known_payload, *fields]))


def _split(data: Raw, count: int) -> tuple[list[Raw], bool]:
    """Decode an array of msgpack, and split it into known and unknown elements.

    Returns:
        The first ``count`` elements, and whether any element after them is not nil.
    """
    elements = decoder(list[Raw]).decode(data)
    return elements[:count], _has_any(elements[count:])


def _has_any(elements: Iterable[Raw]) -> bool:
    return any(bytes(element) != _NIL for element in elements)


def entry_tree(top: Digest, load: Load) -> Tree[Entry]:
    """Return one tree of a manifest: the entries of one key of the app state.

    Args:
        top: The digest of the tree's top node.
        load: Returns the verified bytes of a node.
    """
    return Tree(top, load, KnownEntry, decode_one=decode_entry)


def unknown_in(entry: Entry) -> str:
    """Return the part of an entry that this version does not know, in words; "" if it knows all."""
    # Tensors first, and without helper calls: a restore asks this three times for each entry.
    if not isinstance(entry, TensorEntry):
        match entry:
            case ValueEntry(kind=kind):
                return "" if kind in VALUE_KINDS else f"the kind of value {kind[:40]!r}"
            case ContainerEntry(kind=kind):
                return "" if kind in CONTAINER_KINDS else f"the kind of container {kind[:40]!r}"
            case UnknownEntry(what=what):
                return what
    if entry.kind not in TENSOR_KINDS:
        return f"the kind of tensor {entry.kind[:40]!r}"
    is_numpy, dtype = entry.kind in NUMPY_KINDS, entry.dtype
    if not (NUMPY_DTYPE.fullmatch(dtype) if is_numpy else dtype in _DTYPES):
        return f"the dtype {dtype[:40]!r}"
    if entry.quantization is not None and entry.quantization.scheme not in SCHEMES:
        return f"the quantization scheme {entry.quantization.scheme[:40]!r}"
    return ""


def type_text(entry: Entry) -> str:
    """Return the type of an entry in words: ``float32 [4, 8]``, ``int`` or ``dict of 3``."""
    if what := unknown_in(entry):
        return f"unknown: {what}"
    if isinstance(entry, TensorEntry):
        return f"{entry.dtype} {list(entry.shape)}"
    if isinstance(entry, ContainerEntry):
        return f"{entry.kind} of {entry.count:,}"
    return entry.kind


def check_known(label: str, entries: Iterable[tuple[str, Entry]]) -> None:
    """Check that this version of casnap can read entries.

    Args:
        label: The name of the snapshot, for the message.
        entries: Pairs of a path and its entry.

    Raises:
        UnsupportedFormatError: This version cannot read some entries. The message names up to 20
            paths.
    """
    unknown = [f"{path} has {what}" for path, entry in entries if (what := unknown_in(entry))]
    if unknown:
        more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        raise UnsupportedFormatError(
            f"{label} holds what this version of casnap does not know: "
            f"{', '.join(unknown[:_MOST_NAMED])}{more}; update casnap"
        )


_MOST_NAMED = 20


def with_payload(entry: KnownEntry, payload: Payload) -> KnownEntry:
    """Return a copy of an entry with another payload."""
    return msgspec.structs.replace(entry, payload=payload)


class OwnedTree(NamedTuple):
    """A tree that a manifest names.

    Attributes:
        owner: The rank that owns its entries; None for a global tree.
        component: The key of the app state, as a component of paths.
        digest: The digest of its top node.
    """

    owner: int | None
    component: str
    digest: bytes

    @property
    def label(self) -> str:
        """What the paths of its entries begin with: the key, after the rank that owns them."""
        return self.component if self.owner is None else f"{self.owner}/{self.component}"


class Manifest(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The top node of a snapshot's tree.

    It names one tree of entries for each key of the app state.

    A struct that was decoded by ``decode_keeping`` also keeps fields that a later version added.

    Attributes:
        shared: For each key, the digest of the tree ``global/<key>``, whose entries any rank can
            restore.
        ranks: For each rank r and key, the digest of the tree ``ranks/<r>/<key>``, whose entries
            belong to that rank.
        thinned: The path components of the keys that the snapshot has lost by thinning, sorted.
        environment: Facts about the process that took the snapshot, such as its version of torch. A
            later version of casnap may add values that are not strings.
        health: The digest of a tree → the record with the health of its tensors, which
            :mod:`casnap.format.health` decodes. A digest of another snapshot's tree is ignored.
    """

    shared: dict[str, bytes] = msgspec.field(name="global")
    ranks: dict[str, dict[str, bytes]]
    thinned: tuple[str, ...] = ()
    environment: dict[str, Any] = {}
    health: Any = msgspec.field(default_factory=dict)

    @property
    def health_by_tree(self) -> dict[Any, Any] | None:
        """``health`` in a checked form: the digest of a tree → its record; None if malformed.

        A snapshot can be restored without these records, so a malformed one is no damage.
        """
        is_map = isinstance(self.health, dict) and all(isinstance(k, bytes) for k in self.health)
        return self.health if is_map else None

    def trees(self) -> Iterator[OwnedTree]:
        """Yield each tree of entries."""
        for component, digest in self.shared.items():
            yield OwnedTree(None, component, digest)
        for rank, trees in self.ranks.items():
            for component, digest in trees.items():
                yield OwnedTree(int(rank), component, digest)
