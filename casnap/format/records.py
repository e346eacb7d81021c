"""The records of a store: their fields, their bytes, and the limits for reading them.

``docs/format.md`` says what they are byte for byte. A store is untrusted: every record is decoded
into a closed type, and every number in it is checked before it is used.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NewType, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.codec import Codec
from casnap.format.decoding import decode_keeping, decoder
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of

FORMAT = 1
DIGEST_NAME = "blake3"

DEFAULT_CHUNK_SIZE = 1 << 20
MIN_CHUNK_SIZE, MAX_CHUNK_SIZE = 64 << 10, 64 << 20
MAX_NODE_BYTES = MAX_ROOT_BYTES = 64 << 20
MAX_SEGMENT_BYTES = 256 << 20
MAX_CONFIG_BYTES = MAX_METADATA_BYTES = 64 << 10
INLINE_METADATA_BYTES = 256
"""Larger metadata of a row stand in a node of their own."""
ID_SIZE = 16
THINNED = "thinned"
"""The note of a snapshot that has lost some keys, which its manifest names."""
REWOUND = "rewound"
"""The note of a snapshot that its run has gone back from."""

PackId = NewType("PackId", bytes)
"""16 bytes: 6 of its base (the root number that it was written under), then 10 random ones."""
SegmentId = NewType("SegmentId", bytes)
"""Made like a :data:`PackId`."""


class Place(Struct, frozen=True, array_like=True, gc=False):
    """Where a chunk or node lies: a run of bytes in a pack, and how it is encoded there."""

    pack: bytes
    offset: int
    stored_size: int
    raw_size: int
    codec: int


class DeltaPlace(Place, frozen=True, array_like=True, gc=False):
    """Where a chunk lies that is stored as a delta.

    Attributes:
        base: The digest of the chunk that it differs from.
    """

    base: bytes


class NodeRef(Struct, frozen=True, array_like=True):
    """A tree node, and a hint to its place: where it was when this was written."""

    digest: bytes
    hint: Place | None


class SegmentRef(Struct, frozen=True, array_like=True):
    """A live index segment: its id and how many records it holds."""

    id: bytes
    count: int


class Stats(Struct, frozen=True, array_like=True):
    """Figures of one take.

    Attributes:
        logical_bytes: Bytes of the state.
        new_bytes: Bytes that this take added to the store, as stored.
        entries: Leaves of the state.
        seconds: From the call to the commit.
    """

    logical_bytes: int = 0
    new_bytes: int = 0
    entries: int = 0
    seconds: float = 0.0


_ROW_FEATURES: frozenset[str] = frozenset()
"""The features of a snapshot that this version knows."""


class Row(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One snapshot in the table of a root.

    Fields that a later version adds are kept: see :func:`decode_row`.

    Attributes:
        commit: The id of the commit that made it.
        manifest: The top of its tree.
        seq: The root that it was committed by.
        time: Seconds since the epoch, by the writer's clock.
        world_size: How many ranks took it.
        stats: What the take did.
        metadata: The user's metadata, if they are small.
        tags: Those that users gave, sorted.
        metadata_node: The digest of the node that holds the user's metadata, if they are large.
        notes: What casnap notes of the snapshot for itself, sorted by key. Those that this version
            does not know stay as they are.
        features: What a reader of the snapshot must know.
    """

    commit: bytes
    manifest: NodeRef
    seq: int
    time: float
    world_size: int
    stats: Stats
    metadata: dict[str, Any] = {}
    tags: tuple[str, ...] = ()
    metadata_node: bytes = b""
    notes: dict[str, Any] = {}
    features: tuple[str, ...] = ()

    @property
    def unknown_features(self) -> tuple[str, ...]:
        """What this version does not know, so that it cannot read the snapshot."""
        return tuple(feature for feature in self.features if feature not in _ROW_FEATURES)

    def of_this_version(self) -> Row:
        """Return the row without fields that a later version has added: what a copy has."""
        return Row(**{name: getattr(self, name) for name in Row.__struct_fields__})

    def has_note(self, note: str) -> bool:
        """Whether a note stands in the row, and says yes."""
        return bool(self.notes.get(note))

    def with_notes(self, changes: Mapping[str, Any]) -> Row:
        """Return the row with some notes changed; None removes one."""
        notes = sorted({**self.notes, **changes}.items())
        kept = {key: note for key, note in notes if note is not None or key not in changes}
        return msgspec.structs.replace(self, notes=kept)

    @property
    def is_thinned(self) -> bool:
        """Whether the snapshot has lost some keys."""
        return self.has_note(THINNED)

    @property
    def is_rewound(self) -> bool:
        """Whether the run of the snapshot has gone back from it, and does not resume from it."""
        return self.has_note(REWOUND)

    @property
    def copied_notes(self) -> dict[str, Any]:
        """The notes of a copy. The others are about one store alone."""
        return {note: True for note in (REWOUND, THINNED) if self.has_note(note)}


class UnfinishedCopy(Struct, frozen=True, array_like=True):
    """What was sent so far of a snapshot that is being copied into the store.

    Attributes:
        parts: The manifest of what was sent.
        time: When the last part was sent, in seconds since the epoch, by the writer's clock.
    """

    parts: NodeRef
    time: float


class Root(Struct, frozen=True):
    """A root: what the store holds since it was put.

    A field that a later version adds needs a write feature: a writer drops fields that it does not
    know.

    Attributes:
        seq: Its number.
        commit: The commit id: after an unclear answer, the writer knows its own root by it.
        time: Seconds since the epoch, by the writer's clock; no decision that matters rests on it.
        fence: A collector may be deleting packs that have a smaller base and that no root names.
        table: The tree of name → :class:`Row`; None while there is no snapshot.
        segments: The live index segments.
        condemned: Pack → the root that condemned it.
        lost: Digests of chunks and nodes that were found whole nowhere, one behind the other.
        read_features: A reader refuses a store that has a feature here that it does not know.
        write_features: A writer refuses it likewise.
        settings: Settings of the store; a writer keeps those that it does not know.
        store: A copy of ``casnap.json``.
        writer: The program and version that put it, for people; nothing relies on it.
        copies: The unfinished copies of snapshots of other stores, by the commit ids of these.
    """

    seq: int
    commit: bytes
    time: float
    fence: int = 0
    table: NodeRef | None = None
    segments: tuple[SegmentRef, ...] = ()
    condemned: dict[bytes, int] = {}
    lost: bytes = b""
    read_features: tuple[str, ...] = ()
    write_features: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    store: dict[str, Any] = {}
    writer: str = ""
    copies: dict[bytes, UnfinishedCopy] = {}


FOLDER_ONLY = "folder-only"
"""The setting of a store that a path alone has made: it serves only names right in its folder."""


def serves_below(root: Root) -> bool:
    """Whether a path deeper than right in the folder of a store may lead to it."""
    return not root.settings.get(FOLDER_ONLY)


def serving_below(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a store that serves all paths below it."""
    return {key: value for key, value in settings.items() if key != FOLDER_ONLY}


class StoreConfig(Struct, frozen=True, kw_only=True):
    """``casnap.json``: written once, when the store is created.

    Attributes:
        format: The version; a reader refuses a greater one.
        digest: The name of the hash function; a reader refuses one that it does not know. A casnap
            before 1.0 wrote none.
        store_id: 32 hex digits.
        chunk_size: Bytes, a power of two.
        put_if_absent: Whether the backend was found to honour it.
    """

    format: int = FORMAT
    digest: str = ""
    store_id: str
    chunk_size: int
    put_if_absent: bool = True


# --- records as bytes -------------------------------------------------------------------------

T = TypeVar("T")
encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes | memoryview, as_type: type[T], label: str) -> T:
    """Decode msgpack into a closed type.

    Raises:
        DamagedError: The bytes are not such a record.
    """
    try:
        return decoder(as_type).decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as e:
        raise DamagedError(f"{label} cannot be decoded: {e}") from e


def decode_kept(data: bytes | memoryview, as_type: type[T], label: str) -> T:
    """Do what :func:`decode` does, and keep the fields that the type lacks.

    Raises:
        DamagedError: The bytes are not such a record.
    """
    try:
        return decode_keeping(data, as_type)
    except (msgspec.DecodeError, RecursionError, ValueError) as e:
        raise DamagedError(f"{label} cannot be decoded: {e}") from e


def decode_row(data: msgspec.Raw) -> Row:
    """Decode a row that may have fields of a later version: these are kept.

    Raises:
        msgspec.DecodeError: It is malformed.
    """
    return decode_keeping(data, Row)


_MAGIC, _VERSION = b"CASNAP", b"%d" % FORMAT


def seal(kind: bytes, body: bytes) -> bytes:
    """Frame a record: magic, kind, version, body, then the digest of all that."""
    head = _MAGIC + kind + _VERSION
    return b"".join((head, body, digest_of(head + body)))


def unseal(kind: bytes, data: bytes, label: str) -> memoryview:
    """Return the body of a sealed record.

    Args:
        kind: The kind of record.
        data: Its bytes.
        label: Its name, for messages.

    Raises:
        DamagedError: It is damaged.
        UnsupportedFormatError: It is of a newer format.
    """
    head = _MAGIC + kind
    if len(data) < 8 + DIGEST_SIZE or data[:7] != head:
        raise DamagedError(f"{label} is not a casnap record ({len(data)} bytes)")
    if data[-DIGEST_SIZE:] != digest_of(memoryview(data)[:-DIGEST_SIZE]):
        raise DamagedError(f"{label} is damaged: its checksum does not match")
    if data[7:8] != _VERSION:
        raise UnsupportedFormatError(f"{label} is of a newer format; update casnap")
    return memoryview(data)[8:-DIGEST_SIZE]


Record: TypeAlias = tuple[Digest, Place]

_PACKED = struct.Struct("<32sQIIB")
_PACK_TAIL = struct.Struct(f"<I8s{DIGEST_SIZE}s")
PACK_TAIL_SIZE, FOOTER_RECORD_SIZE = _PACK_TAIL.size, _PACKED.size


# Takes pass each new chunk through these, so neither calls anything for a chunk that is no delta.
def listed_records(records: Iterable[Record]) -> list[Record]:
    """Return records as they stand in packs and segments: a delta has one more, of its base."""
    listed = []
    for record in records:
        listed.append(record)
        place = record[1]
        if type(place) is DeltaPlace:
            listed.append((Digest(place.base), msgspec.structs.replace(place, codec=Codec.BASE)))
    return listed


def count_records(records: Collection[Record]) -> int:
    """Return how many records stand in packs and segments for these."""
    return len(records) + sum([type(place) is DeltaPlace for _, place in records])


def joined_records(records: Iterable[Record]) -> list[Record]:
    """Return records with the bases of deltas in their places, the inverse of the above.

    The second record of a delta whose first one is missing is dropped, and a delta without its
    second one stays a place that names no base.
    """
    bare_records: list[Record] = []
    bases: dict[tuple[bytes, int], bytes] = {}
    for digest, place in records:
        if place.codec == Codec.BASE:
            bases[place.pack, place.offset] = digest
        else:
            bare_records.append((digest, place))
    if not bases:
        return bare_records
    return [
        (
            digest,
            DeltaPlace(
                p.pack, p.offset, p.stored_size, p.raw_size, p.codec, bases[p.pack, p.offset]
            ),
        )
        if p.codec == Codec.DELTA and (p.pack, p.offset) in bases
        else (digest, p)
        for digest, p in bare_records
    ]


def pack_footer(kind: bytes, chunks: Iterable[tuple[Digest, Place]]) -> bytes:
    """Return the end of a pack: the records of its chunks, their count, magic, and a digest."""
    listed = listed_records(chunks)
    records = b"".join(
        [_PACKED.pack(d, p.offset, p.stored_size, p.raw_size, p.codec) for d, p in listed]
    )
    magic = _MAGIC + kind + b"1"
    head = records + struct.pack("<I8s", len(records) // _PACKED.size, magic)
    return head + digest_of(head)


def read_pack_footer(pack: PackId, tail: bytes) -> list[tuple[Digest, Place]]:
    """Decode the footer from the last bytes of a pack (which may begin before the footer).

    Raises:
        DamagedError: ``tail`` does not end in a whole footer.
    """
    label = f"the footer of pack {pack.hex()}"
    if len(tail) < PACK_TAIL_SIZE:
        raise DamagedError(f"{label} is cut off")
    count, magic, digest = _PACK_TAIL.unpack_from(tail, len(tail) - PACK_TAIL_SIZE)
    start = len(tail) - PACK_TAIL_SIZE - count * _PACKED.size
    if magic[:6] != _MAGIC or start < 0 or digest_of(tail[start:-DIGEST_SIZE]) != digest:
        raise DamagedError(f"{label} is damaged")
    records = _PACKED.iter_unpack(tail[start : len(tail) - PACK_TAIL_SIZE])
    return joined_records((Digest(d), Place(pack, *fields)) for d, *fields in records)


_RECORD, _SEGMENT_HEAD = struct.Struct("<32sIQIIB"), struct.Struct("<IQ")
SEGMENT_RECORD_SIZE = _RECORD.size

RawRecord: TypeAlias = tuple[bytes, int, int, int, int, int]
"""Digest, number of the pack, offset, stored length, raw length, codec."""


class Segment(Struct, frozen=True):
    """A piece of the index: the packs it covers, and where each digest lies in them."""

    packs: tuple[PackId, ...]
    records: list[Record]

    @property
    def count(self) -> int:
        """How many records stand in its bytes."""
        return count_records(self.records)


def encode_segment(segment: Segment) -> bytes:
    """Return the sealed bytes of a segment, its records sorted."""
    number: dict[bytes, int] = {pack: i for i, pack in enumerate(segment.packs)}
    body = [_SEGMENT_HEAD.pack(len(segment.packs), segment.count), *segment.packs]
    body.extend(
        sorted(
            [
                _RECORD.pack(d, number[p.pack], p.offset, p.stored_size, p.raw_size, p.codec)
                for d, p in listed_records(segment.records)
            ]
        )
    )
    return seal(b"s", b"".join(body))


def segment_records(data: bytes, label: str) -> tuple[tuple[PackId, ...], Iterator[RawRecord]]:
    """Return the packs of a sealed segment, and its records one by one.

    Args:
        data: The bytes of the segment.
        label: Its name, for messages.

    Returns:
        The packs, and an iterator: a million decoded records would take some 400 MB.

    Raises:
        DamagedError: It is damaged.
    """
    body = unseal(b"s", data, label)
    if len(body) < _SEGMENT_HEAD.size:
        raise DamagedError(f"{label} is malformed: it is cut off")
    n_packs, n_records = _SEGMENT_HEAD.unpack_from(body)
    start = _SEGMENT_HEAD.size + n_packs * ID_SIZE
    if len(body) != start + n_records * _RECORD.size:
        raise DamagedError(f"{label} has the wrong length")
    packs = tuple(
        PackId(bytes(body[i : i + ID_SIZE])) for i in range(_SEGMENT_HEAD.size, start, ID_SIZE)
    )
    return packs, _checked_records(body[start:], n_packs, label)


def segment_count(data: bytes) -> int:
    """Return how many records a sealed segment says that it has; -1 if it is cut off."""
    return _SEGMENT_HEAD.unpack_from(data, 8)[1] if len(data) >= 8 + _SEGMENT_HEAD.size else -1


def max_segment_bytes(count: int) -> int:
    """Return how many bytes a sealed segment of so many records has at most.

    Each pack that it lists has a record there; a few more may be left of packs that were lost.
    """
    return min((1 << 20) + count * (_RECORD.size + ID_SIZE), MAX_SEGMENT_BYTES)


def _checked_records(body: memoryview, n_packs: int, label: str) -> Iterator[RawRecord]:
    for record in _RECORD.iter_unpack(body):
        if record[1] >= n_packs:
            raise DamagedError(f"{label} is malformed: a record names a pack that it does not list")
        yield record


class SegmentLayout(NamedTuple):
    """Where the parts of a sealed segment lie.

    Attributes:
        packs: How many packs it lists.
        records: How many records it has.
    """

    packs: int
    records: int

    @staticmethod
    def of(count: int, length: int) -> SegmentLayout | None:
        """Return the layout of a segment of so many records and bytes; None if there is none."""
        listed = length - 8 - _SEGMENT_HEAD.size - count * _RECORD.size - DIGEST_SIZE
        return None if listed < 0 or listed % ID_SIZE else SegmentLayout(listed // ID_SIZE, count)

    def pack_offset(self, number: int) -> int:
        """Return where the id of a pack begins."""
        return 8 + _SEGMENT_HEAD.size + number * ID_SIZE

    def offset(self, index: int) -> int:
        """Return where a record begins."""
        return self.pack_offset(self.packs) + index * _RECORD.size

    def decode(self, data: bytes | bytearray) -> list[RawRecord]:
        """Return the records in some bytes that begin and end with one. Nothing is verified."""
        return list(_RECORD.iter_unpack(data))


def decode_segment(data: bytes, label: str) -> Segment:
    """Decode a sealed segment.

    Raises:
        DamagedError: It is damaged.
    """
    packs, records = segment_records(data, label)
    listed = ((Digest(d), Place(packs[n], *fields)) for d, n, *fields in records)
    return Segment(packs, joined_records(listed))


def merged_segment(
    parts: Iterable[tuple[bytes, str]], without: Collection[PackId] = ()
) -> tuple[bytes, tuple[PackId, ...], int]:
    """Merge segments into one, which has all places of every digest, except those in some packs.

    Args:
        parts: The sealed bytes of each segment, and its name for messages.
        without: The packs to leave out.

    Returns:
        The sealed bytes, the packs, and the number of records.

    Raises:
        DamagedError: One is damaged.
    """
    numbers: dict[PackId, int] = {}
    merged: set[bytes] = set()
    for data, label in parts:
        packs, records = segment_records(data, label)
        renumbered = [
            None if pack in without else numbers.setdefault(pack, len(numbers)) for pack in packs
        ]
        merged.update(
            _RECORD.pack(digest, number, *fields)
            for digest, n, *fields in records
            if (number := renumbered[n]) is not None
        )
    head = _SEGMENT_HEAD.pack(len(numbers), len(merged))
    content = seal(b"s", b"".join([head, *numbers, *sorted(merged)]))
    return content, tuple(numbers), len(merged)


# --- names ------------------------------------------------------------------------------------

CONFIG_KEY = "casnap.json"


def root_key(seq: int) -> str:
    """Return the key of a root: a folder per 1,000."""
    return f"roots/{seq // 1000}/{seq}"


def pack_key(pack: PackId | bytes) -> str:
    """Return the key of a pack, spread over 256 folders by its last byte."""
    name = pack.hex()
    return f"packs/{name[-2:]}/{name}"


def segment_key(segment: SegmentId | bytes) -> str:
    """Return the key of a segment."""
    return f"index/{segment.hex()}"


def id_from_name(name: str) -> bytes | None:
    """Return the id that a file name stands for; None if casnap makes no such names."""
    return bytes.fromhex(name) if re.fullmatch("[0-9a-f]{32}", name) else None
