"""The records of a store: their fields, their bytes, and the limits for reading them.

``docs/format.md`` says what they are byte for byte. A store is untrusted: every record is decoded
into a closed type, and every number in it is checked before it is used.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, NewType, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.codec import Codec
from casnap.format.decoding import decode_keeping, decoder, unpacked
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
UNMIRRORED = "unmirrored"
"""The note of a snapshot that must stay until another store has a copy of it."""
ORIGIN = "from"
"""The note of a copy that must keep its order: the store it is from, and the number of its root."""

# Notes that hold a snapshot, and what people read of each. Every process must know them, also one
# that never writes them.
_AWAITED = {UNMIRRORED: "not mirrored yet"}

CommitId = Annotated[bytes, msgspec.Meta(min_length=ID_SIZE, max_length=ID_SIZE)]
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
    """A live index segment.

    Attributes:
        id: Its id.
        count: How many records it has.
        deltas: How many of these are those of deltas, each with a base.
    """

    id: bytes
    count: int
    deltas: int

    @property
    def weight(self) -> int:
        """What its bytes go by: how many records and bases it has. A base is the smaller one."""
        return self.count + self.deltas


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

    commit: CommitId
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
    def is_unmirrored(self) -> bool:
        """Whether the mirror still lacks the snapshot, and is to get it."""
        return self.has_note(UNMIRRORED)

    @property
    def awaited(self) -> list[str]:
        """The holds that end by themselves: what the snapshot waits for."""
        return [reason for note, reason in _AWAITED.items() if self.has_note(note)]

    @property
    def holds(self) -> list[str]:
        """Why the snapshot must stay, such as "tagged"; empty if nothing holds it.

        Pruning, thinning, and forgetting what has no folder any more ask for it. Deleting a
        snapshot by its name asks for none, and overwriting it only for its tags.
        """
        return [*(["tagged"] if self.tags else []), *self.awaited]

    def run_of(self, name: str) -> str:
        """Return the folder of the run that the snapshot of this row and a name is of.

        One that its run has gone back from lies in a folder of that folder.
        """
        folder = name.rpartition("/")[0]
        return folder.rpartition("/")[0] if self.is_rewound else folder

    @property
    def origin(self) -> tuple[str, int]:
        """The id of the store that it was copied from, and the number of its root there.

        They are "" and -1 if the row does not say it.
        """
        return self.noted_root(ORIGIN)

    def noted_root(self, note: str) -> tuple[str, int]:
        """Return the store and the number of the root that a note names; "" and -1 for none."""
        match self.notes.get(note):
            case [str(store_id), int(number)] if number >= 0:
                return store_id, number
        return "", -1

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
    commit: CommitId
    time: float = 0.0
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
        format: The version; a reader refuses any other.
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
    put_if_absent: bool


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

_DELTA = int(Codec.DELTA)
_PACKED = struct.Struct("<32sQIIB")
_PACK_TAIL = struct.Struct(f"<II8s{DIGEST_SIZE}s")
PACK_TAIL_SIZE, FOOTER_RECORD_SIZE = _PACK_TAIL.size, _PACKED.size


def count_deltas(records: Iterable[Record]) -> int:
    """Return how many of some records are those of deltas."""
    return sum([type(place) is DeltaPlace for _, place in records])


def footer_size(records: Collection[Record]) -> int:
    """Return how many bytes the footer of a pack of these records has."""
    bases = DIGEST_SIZE * count_deltas(records)
    return len(records) * _PACKED.size + bases + PACK_TAIL_SIZE


def pack_footer(kind: bytes, records: Collection[Record]) -> bytes:
    """Return the end of a pack: records, bases of deltas, how many of both, magic, and a digest."""
    bases = [place.base for _, place in records if type(place) is DeltaPlace]
    packed = [_PACKED.pack(d, p.offset, p.stored_size, p.raw_size, p.codec) for d, p in records]
    counts = struct.pack("<II8s", len(packed), len(bases), _MAGIC + kind + b"1")
    head = b"".join([*packed, *bases, counts])
    return head + digest_of(head)


def footer_length(tail: bytes) -> int:
    """Return how many bytes the footer of a pack says that it has.

    Args:
        tail: The last bytes of the pack, at least ``PACK_TAIL_SIZE``.
    """
    count, deltas, _, _ = _PACK_TAIL.unpack_from(tail, len(tail) - PACK_TAIL_SIZE)
    return int(count * _PACKED.size + deltas * DIGEST_SIZE + PACK_TAIL_SIZE)


def read_pack_footer(pack: PackId, tail: bytes) -> list[Record]:
    """Decode the footer from the last bytes of a pack (which may begin before the footer).

    Raises:
        DamagedError: ``tail`` does not end in a whole footer.
    """
    label = f"the footer of pack {pack.hex()}"
    if len(tail) < PACK_TAIL_SIZE:
        raise DamagedError(f"{label} is cut off")
    end = len(tail) - PACK_TAIL_SIZE
    count, deltas, magic, digest = _PACK_TAIL.unpack_from(tail, end)
    start = len(tail) - footer_length(tail)
    if magic[:6] != _MAGIC or start < 0 or digest_of(tail[start:-DIGEST_SIZE]) != digest:
        raise DamagedError(f"{label} is damaged")
    stop = start + count * _PACKED.size
    if tail[start + _PACKED.size - 1 : stop : _PACKED.size].count(_DELTA) != deltas:
        raise DamagedError(f"{label} is malformed: it has not one base for each delta")
    bases = iter([tail[at : at + DIGEST_SIZE] for at in range(stop, end, DIGEST_SIZE)])
    return [
        (Digest(d), with_base(p, next(bases)) if p.codec == _DELTA else p)
        for d, *fields in unpacked(_PACKED, tail[start:stop])
        for p in [Place(pack, *fields)]
    ]


def with_base(p: Place, base: bytes) -> DeltaPlace:
    """Return the place of a delta on a base."""
    return DeltaPlace(p.pack, p.offset, p.stored_size, p.raw_size, p.codec, base)


_RECORD, _SEGMENT_HEAD = struct.Struct("<32sIQIIB"), struct.Struct("<IQQ")
_BASE = struct.Struct(f"<{DIGEST_SIZE}sQ")
SEGMENT_RECORD_SIZE = _RECORD.size

RawRecord: TypeAlias = tuple[bytes, int, int, int, int, int]
"""Digest, number of the pack, offset, stored length, raw length, codec."""


class Segment(Struct, frozen=True):
    """A piece of the index: the packs it covers, and where each digest lies in them."""

    packs: tuple[PackId, ...]
    records: list[Record]

    @property
    def deltas(self) -> int:
        """How many of the records are those of deltas."""
        return count_deltas(self.records)


def encode_segment(segment: Segment) -> bytes:
    """Return the sealed bytes of a segment, its records sorted."""
    number: dict[bytes, int] = {pack: i for i, pack in enumerate(segment.packs)}
    records: list[bytes] = []
    bases: dict[bytes, bytes] = {}
    for d, p in segment.records:
        record = _RECORD.pack(d, number[p.pack], p.offset, p.stored_size, p.raw_size, p.codec)
        records.append(record)
        if type(p) is DeltaPlace:
            bases[record] = p.base
    records.sort()
    return _sealed_segment(segment.packs, records, bases)


def _sealed_segment(
    packs: Collection[PackId], records: list[bytes], bases: Mapping[bytes, bytes]
) -> bytes:
    """Return a sealed segment.

    Args:
        packs: Its packs.
        records: Its records, sorted.
        bases: The base of each record that is one of a delta.
    """
    based = [_BASE.pack(bases[r], i) for i, r in enumerate(records) if r in bases] if bases else []
    head = _SEGMENT_HEAD.pack(len(packs), len(records), len(based))
    return seal(b"s", b"".join([head, *packs, *records, *sorted(based)]))


class SealedSegment:
    """A segment as it is stored: a million decoded records would take some 400 MB.

    Args:
        data: Its bytes.
        label: Its name, for messages.

    Attributes:
        packs: The packs that it covers.
        count: How many records it has.
        deltas: How many of these are those of deltas.

    Raises:
        DamagedError: It is damaged.
    """

    def __init__(self, data: bytes, label: str) -> None:
        body = unseal(b"s", data, label)
        if len(body) < _SEGMENT_HEAD.size:
            raise DamagedError(f"{label} is malformed: it is cut off")
        n_packs, self.count, self.deltas = _SEGMENT_HEAD.unpack_from(body)
        start = _SEGMENT_HEAD.size + n_packs * ID_SIZE
        stop = start + self.count * _RECORD.size
        if len(body) != stop + self.deltas * _BASE.size:
            raise DamagedError(f"{label} has the wrong length")
        ids = range(_SEGMENT_HEAD.size, start, ID_SIZE)
        self.packs = tuple(PackId(bytes(body[i : i + ID_SIZE])) for i in ids)
        self._records, self._based, self._label = body[start:stop], body[stop:], label
        self._check_bases()

    def _check_bases(self) -> None:
        """Check that each record of a delta has one base, and no other record has one."""
        codecs = bytearray(self._records[_RECORD.size - 1 :: _RECORD.size])
        for _, index in unpacked(_BASE, self._based):
            if index >= len(codecs) or codecs[index] != _DELTA:
                raise self._malformed("a base is that of no delta, or of one that has a base")
            codecs[index] = 0
        if _DELTA in codecs:
            raise self._malformed("a delta has no base")

    def _malformed(self, why: str) -> DamagedError:
        return DamagedError(f"{self._label} is malformed: {why}")

    def records(self) -> Iterator[RawRecord]:
        """Yield the records one by one.

        Raises:
            DamagedError: One names a pack that the segment does not list.
        """
        n_packs = len(self.packs)
        for record in unpacked(_RECORD, self._records):
            if record[1] >= n_packs:
                raise self._malformed("a record names a pack that it does not list")
            yield record

    def bases(self) -> Iterator[bytes]:
        """Yield the base of each delta."""
        return (base for base, _ in unpacked(_BASE, self._based))

    def records_of_deltas(self) -> Iterator[tuple[RawRecord, bytes]]:
        """Yield the record of each delta, and its base.

        Raises:
            DamagedError: One names a pack that the segment does not list.
        """
        for base, index in unpacked(_BASE, self._based):
            record = _RECORD.unpack_from(self._records, index * _RECORD.size)
            if record[1] >= len(self.packs):
                raise self._malformed("a record names a pack that it does not list")
            yield record, base

    def bases_by_index(self) -> dict[int, bytes]:
        """Return the base of each delta by the index of its record."""
        return {index: base for base, index in unpacked(_BASE, self._based)}


def segment_counts(data: bytes) -> tuple[int, int]:
    """Return how many records and deltas a sealed segment says that it has; -1 if it is cut off."""
    if len(data) < 8 + _SEGMENT_HEAD.size:
        return -1, -1
    _, count, deltas = _SEGMENT_HEAD.unpack_from(data, 8)
    return count, deltas


def max_segment_bytes(ref: SegmentRef) -> int:
    """Return how many bytes a sealed segment has at most.

    Each pack that it lists has a record there; a few more may be left of packs that were lost.
    """
    most = ref.count * (_RECORD.size + ID_SIZE) + ref.deltas * _BASE.size
    return min((1 << 20) + most, MAX_SEGMENT_BYTES)


class SegmentLayout(NamedTuple):
    """Where the parts of a sealed segment lie.

    Attributes:
        packs: How many packs it lists.
    """

    packs: int

    @staticmethod
    def of(ref: SegmentRef, length: int) -> SegmentLayout | None:
        """Return the layout of a segment of so many bytes; None if it cannot have as many."""
        others = ref.count * _RECORD.size + ref.deltas * _BASE.size + DIGEST_SIZE
        listed = length - 8 - _SEGMENT_HEAD.size - others
        return None if listed < 0 or listed % ID_SIZE else SegmentLayout(listed // ID_SIZE)

    def pack_offset(self, number: int) -> int:
        """Return where the id of a pack begins."""
        return 8 + _SEGMENT_HEAD.size + number * ID_SIZE

    def offset(self, index: int) -> int:
        """Return where a record begins."""
        return self.pack_offset(self.packs) + index * _RECORD.size

    def decode(self, data: bytes | bytearray) -> list[RawRecord]:
        """Return the records in some bytes that begin and end with one. Nothing is verified."""
        return list(unpacked(_RECORD, data))


def decode_segment(data: bytes, label: str) -> Segment:
    """Decode a sealed segment.

    Raises:
        DamagedError: It is damaged.
    """
    sealed = SealedSegment(data, label)
    packs, bases = sealed.packs, sealed.bases_by_index()
    records = [(Digest(d), Place(packs[n], *fields)) for d, n, *fields in sealed.records()]
    for index, base in bases.items():
        digest, place = records[index]
        records[index] = digest, with_base(place, base)
    return Segment(packs, records)


def merged_segment(
    parts: Iterable[tuple[bytes, str]], without: Collection[PackId] = ()
) -> tuple[bytes, tuple[PackId, ...]]:
    """Merge segments into one, which has all places of every digest, except those in some packs.

    Args:
        parts: The sealed bytes of each segment, and its name for messages.
        without: The packs to leave out.

    Returns:
        The sealed bytes, and the packs.

    Raises:
        DamagedError: One is damaged.
    """
    numbers: dict[PackId, int] = {}
    merged: set[bytes] = set()
    bases: dict[bytes, bytes] = {}
    for data, label in parts:
        sealed = SealedSegment(data, label)
        renumbered = [
            None if pack in without else numbers.setdefault(pack, len(numbers))
            for pack in sealed.packs
        ]
        records = [
            b"" if (number := renumbered[n]) is None else _RECORD.pack(digest, number, *fields)
            for digest, n, *fields in sealed.records()
        ]
        merged.update(records)
        bases |= {records[i]: base for i, base in sealed.bases_by_index().items()}
    # What stands for the records in packs that are left out.
    merged.discard(b"")
    bases.pop(b"", None)
    return _sealed_segment(numbers, sorted(merged), bases), tuple(numbers)


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
