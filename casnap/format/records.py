"""The records of a store: their fields, their bytes, and the limits of their sizes.

``docs/format.md`` describes them byte for byte. A store is untrusted: every record is decoded into
a closed type, and every number in it is checked before it is used.
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
"""The most bytes of metadata in a row. Larger metadata are stored in a node of their own."""
ID_SIZE = 16
THINNED = "thinned"
"""The note of a snapshot that has lost some keys, which its manifest names."""
REWOUND = "rewound"
"""The note of a snapshot that a rewind of its run has moved aside."""
WITNESS = "witness"
"""The note of a witness: the hex commit id of the last snapshot that its run had; "" for none."""
UNHEALTHY = "unhealthy"
"""The note of a snapshot whose tensors were measured: how many were unhealthy."""
ORIGIN = "from"
"""The note of a copy that keeps its place in the order of commits: the id of the store that it was
copied from, and the number of the original's root there.
"""

HOLDING_NOTES = {"unmirrored": "not mirrored yet"}
"""The notes that hold a snapshot, each with its text for people.

While a snapshot has such a note, it is neither pruned nor thinned. All processes must obey these
notes, even those that never load the code that writes them; so they are listed here.
"""

CommitId = Annotated[bytes, msgspec.Meta(min_length=ID_SIZE, max_length=ID_SIZE)]
PackId = NewType("PackId", bytes)
"""16 bytes: 6 of its base (the root number that it was written under), then 10 random ones."""
SegmentId = NewType("SegmentId", bytes)
"""Made like a :data:`PackId`."""


class Place(Struct, frozen=True, array_like=True, gc=False):
    """Where a chunk or node lies: a run of bytes in a pack, and their codec.

    Attributes:
        pack: The id of the pack.
        offset: The offset of the first byte in the pack.
        stored_size: The number of stored bytes.
        raw_size: The number of bytes once decoded.
        codec: The number of the codec (``codec.py``).
    """

    pack: PackId
    offset: int
    stored_size: int
    raw_size: int
    codec: int


class DeltaPlace(Place, frozen=True, array_like=True, gc=False):
    """The place of a chunk that is stored as a delta.

    Attributes:
        base: The digest of the base.
    """

    base: bytes


class NodeRef(Struct, frozen=True, array_like=True):
    """A reference to a tree node.

    Attributes:
        digest: The digest of the node.
        hint: Where the node was when the reference was written; None if the writer did not know.
    """

    digest: bytes
    hint: Place | None


class SegmentRef(Struct, frozen=True, array_like=True):
    """A reference of a root to a live segment of the index.

    Attributes:
        id: The id of the segment.
        count: The number of its records.
        deltas: The number of its records that are of deltas. Each of these has a base.
    """

    id: bytes
    count: int
    deltas: int

    @property
    def weight(self) -> int:
        """The number of the segment's records and bases: a measure of its bytes."""
        return self.count + self.deltas


class Stats(Struct, frozen=True, array_like=True):
    """Figures of one take.

    Attributes:
        logical_bytes: The bytes of the state.
        new_bytes: The stored bytes that the take added to the store.
        entries: The number of leaves of the state.
        seconds: The time from the call to the commit.
    """

    logical_bytes: int = 0
    new_bytes: int = 0
    entries: int = 0
    seconds: float = 0.0


_ROW_FEATURES: frozenset[str] = frozenset()
"""The features of a snapshot that this version knows."""


class Row(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A row of the table: one snapshot in a root.

    A row keeps fields that a later version added: see :func:`decode_row`.

    Attributes:
        commit: The id of the commit that made the snapshot.
        manifest: The top of the snapshot's tree.
        seq: The number of the root that committed the snapshot.
        time: Seconds since the epoch, by the writer's clock.
        world_size: How many ranks took the snapshot.
        stats: The figures of the take.
        metadata: The user's metadata, if they are small.
        tags: The tags that users gave, sorted.
        metadata_node: The digest of the node that holds the user's metadata, if they are large.
        notes: Casnap's own notes about the snapshot, sorted by key. Notes that this version does
            not know stay as they are.
        features: The features that a reader of the snapshot must know.
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
        """The features that this version does not know.

        If there are any, it cannot read the snapshot.
        """
        return tuple(feature for feature in self.features if feature not in _ROW_FEATURES)

    def of_this_version(self) -> Row:
        """Return the row without the fields that a later version added.

        A copy of a snapshot gets this row.
        """
        return Row(**{name: getattr(self, name) for name in Row.__struct_fields__})

    def has_note(self, note: str) -> bool:
        """Whether the row has a note whose value is true."""
        return bool(self.notes.get(note))

    def with_notes(self, changes: Mapping[str, Any]) -> Row:
        """Return a copy of the row with some notes changed; the value None removes a note."""
        notes = sorted({**self.notes, **changes}.items())
        kept = {key: note for key, note in notes if note is not None or key not in changes}
        return msgspec.structs.replace(self, notes=kept)

    @property
    def is_thinned(self) -> bool:
        """Whether the snapshot has lost some keys."""
        return self.has_note(THINNED)

    @property
    def is_rewound(self) -> bool:
        """Whether a rewind has moved the snapshot aside.

        Its run does not resume from such a snapshot.
        """
        return self.has_note(REWOUND)

    @property
    def is_witness(self) -> bool:
        """Whether this is the row of a witness: of a table of the digests of a state, no snapshot.

        A witness also has the note ``REWOUND``. Versions that know no witnesses take it for a
        snapshot that a rewind has moved aside.
        """
        return isinstance(self.notes.get(WITNESS), str)

    @property
    def unhealthy(self) -> int | None:
        """How many tensors of the state were unhealthy; None if none was measured."""
        count = self.notes.get(UNHEALTHY)
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 0
        return count if is_count else None

    @property
    def awaited(self) -> list[str]:
        """The texts of the row's ``HOLDING_NOTES``, which say for what the snapshot must wait."""
        return [reason for note, reason in HOLDING_NOTES.items() if self.has_note(note)]

    @property
    def holds(self) -> list[str]:
        """The *holds* of the snapshot: reasons why it must stay, such as "tagged"; may be empty.

        A snapshot with a hold is not pruned, not thinned, and not forgotten when its folder is
        deleted. A take that overwrites the snapshot heeds only tags. A delete by name heeds no
        hold.
        """
        return [*(["tagged"] if self.tags else []), *self.awaited]

    def run_of(self, name: str) -> str:
        """Return the folder of the run that the snapshot belongs to.

        This is the folder part of its name. If a rewind has moved the snapshot aside, the run's
        folder is one level higher.

        Args:
            name: The name of the snapshot; a row does not hold it.
        """
        folder = name.rpartition("/")[0]
        return folder.rpartition("/")[0] if self.is_rewound else folder

    @property
    def origin(self) -> tuple[str, int]:
        """The store that the snapshot was copied from: its id, and the number of its root.

        They are "" and -1 if the row names no origin. Only a copy that keeps its place in the order
        of commits names one.
        """
        return self.noted_root(ORIGIN)

    def noted_root(self, note: str) -> tuple[str, int]:
        """Return the store and root that a note names: the store's id, and the root's number.

        They are "" and -1 if the row does not have the note, or the note is malformed.
        """
        match self.notes.get(note):
            case [str(store_id), int(number)] if number >= 0:
                return store_id, number
        return "", -1

    @property
    def copied_notes(self) -> dict[str, Any]:
        """The notes that a copy of the snapshot gets.

        All other notes are about this store alone.
        """
        flags = {note: True for note in (REWOUND, THINNED) if self.has_note(note)}
        health = {} if self.unhealthy is None else {UNHEALTHY: self.unhealthy}
        witness = {WITNESS: self.notes[WITNESS]} if self.is_witness else {}
        return flags | health | witness


class UnfinishedCopy(Struct, frozen=True, array_like=True):
    """A snapshot of another store, copied into this one only in part so far.

    Attributes:
        parts: A manifest of the parts that have arrived.
        time: When the last part arrived, in seconds since the epoch, by the writer's clock.
    """

    parts: NodeRef
    time: float


class Root(Struct, frozen=True):
    """A root. The newest root says what the store holds.

    A writer that puts the next root drops fields that it does not know. So a later version that
    adds a field must also add a write feature.

    Attributes:
        seq: The number of the root.
        commit: The id of the commit. After an unclear answer, a writer recognises its root by this
            id.
        time: Seconds since the epoch, by the writer's clock. No decision that matters rests on it.
        fence: The number of a root. A collector may be deleting packs that no root names, if their
            writer began at a root before this one.
        table: The tree of name → :class:`Row`; None while there is no snapshot.
        segments: The live index segments.
        condemned: The id of each condemned pack → the number of the root that condemned it.
        lost: The concatenated digests of chunks and nodes of which a repair found no whole copy.
        read_features: A reader refuses the store if it does not know one of these features.
        write_features: A writer refuses the store if it does not know one of these features.
        settings: The settings of the store. A writer keeps settings that it does not know.
        store: A copy of ``casnap.json``.
        writer: The program and version that put the root, for people; nothing relies on it.
        copies: For each unfinished copy in this store: the commit id of the original → the copy.
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
"""A setting: the store serves no names with a folder, since a take to a path has made the store."""


def serves_below(root: Root) -> bool:
    """Whether a store may hold snapshots whose names have a folder, such as ``run1/step_1``."""
    return not root.settings.get(FOLDER_ONLY)


def serving_below(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a store's settings without ``FOLDER_ONLY``: the store serves all names."""
    return {key: value for key, value in settings.items() if key != FOLDER_ONLY}


class StoreConfig(Struct, frozen=True, kw_only=True):
    """The record ``casnap.json``, which is written once, when the store is created.

    Attributes:
        format: The number of the format; a reader refuses a number that it does not know.
        digest: The name of the hash function; a reader refuses a name that it does not know. It is
            "" in a store that a casnap before 1.0 created.
        store_id: The id of the store: 32 hex digits.
        chunk_size: The most bytes of a chunk, a power of two.
        put_if_absent: Whether a probe found that the backend honours conditional puts.
    """

    format: int = FORMAT
    digest: str = ""
    store_id: str
    chunk_size: int
    put_if_absent: bool


# --- records as bytes -------------------------------------------------------------------------

T = TypeVar("T")
encode = msgspec.msgpack.Encoder().encode


def check_length(label: str, nbytes: int, most: int) -> None:
    """Check that an object is not longer than a caller is willing to read.

    Args:
        label: The name of the object, for the message.
        nbytes: The length of the object.
        most: The most bytes that it may have.

    Raises:
        DamagedError: The object is longer.
    """
    if nbytes > most:
        raise DamagedError(
            f"{label} is damaged: it has {nbytes:,} bytes, and such an object {most:,} at most"
        )


def decode(data: bytes | memoryview, as_type: type[T], label: str) -> T:
    """Decode a record of msgpack into a closed type.

    Args:
        data: The bytes of the record.
        as_type: The type.
        label: The name of the record, for messages.

    Raises:
        DamagedError: The bytes are not a record of this type.
    """
    try:
        return decoder(as_type).decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as e:
        raise DamagedError(f"{label} cannot be decoded: {e}") from e


def decode_kept(data: bytes | memoryview, as_type: type[T], label: str) -> T:
    """Decode a record as :func:`decode` does, but keep fields that the type does not have.

    Raises:
        DamagedError: The bytes are not a record of this type.
    """
    try:
        return decode_keeping(data, as_type)
    except (msgspec.DecodeError, RecursionError, ValueError) as e:
        raise DamagedError(f"{label} cannot be decoded: {e}") from e


def decode_row(data: msgspec.Raw) -> Row:
    """Decode a row of the table of snapshots, and keep the fields that a later version added.

    Raises:
        msgspec.DecodeError: The row is malformed.
    """
    return decode_keeping(data, Row)


_MAGIC, _VERSION = b"CASNAP", b"%d" % FORMAT


def seal(kind: bytes, body: bytes) -> bytes:
    """Return a sealed record: magic, kind, version and body, then the digest of all these bytes."""
    head = _MAGIC + kind + _VERSION
    return b"".join((head, body, digest_of(head + body)))


def unseal(kind: bytes, data: bytes, label: str) -> memoryview:
    """Verify a sealed record, and return its body.

    Args:
        kind: The kind of record that is expected.
        data: The sealed bytes.
        label: The name of the record, for messages.

    Raises:
        DamagedError: The record is damaged, or of another kind.
        UnsupportedFormatError: The record is of a newer format.
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
    """Return how many of the records are of chunks stored as deltas."""
    return sum([type(place) is DeltaPlace for _, place in records])


def footer_size(records: Collection[Record]) -> int:
    """Return the number of bytes of a pack's footer with these records."""
    bases = DIGEST_SIZE * count_deltas(records)
    return len(records) * _PACKED.size + bases + PACK_TAIL_SIZE


def pack_footer(kind: bytes, records: Collection[Record]) -> bytes:
    """Return the footer of a pack: records, bases of deltas, both counts, magic, and a digest.

    Args:
        kind: The kind of the pack.
        records: The digest and place of each chunk or node in the pack.
    """
    bases = [place.base for _, place in records if type(place) is DeltaPlace]
    packed = [_PACKED.pack(d, p.offset, p.stored_size, p.raw_size, p.codec) for d, p in records]
    counts = struct.pack("<II8s", len(packed), len(bases), _MAGIC + kind + b"1")
    head = b"".join([*packed, *bases, counts])
    return head + digest_of(head)


def footer_length(tail: bytes) -> int:
    """Return the length of a pack's footer, computed from the counts in it. Nothing is verified.

    Args:
        tail: The last bytes of the pack, at least ``PACK_TAIL_SIZE``.
    """
    count, deltas, _, _ = _PACK_TAIL.unpack_from(tail, len(tail) - PACK_TAIL_SIZE)
    return int(count * _PACKED.size + deltas * DIGEST_SIZE + PACK_TAIL_SIZE)


def read_pack_footer(pack: PackId, tail: bytes) -> list[Record]:
    """Decode and verify the footer of a pack.

    Args:
        pack: The id of the pack.
        tail: The last bytes of the pack. They may begin before the footer.

    Returns:
        The digest and place of each chunk or node in the pack.

    Raises:
        DamagedError: ``tail`` does not end with a whole footer.
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
    """Return the place of a delta: a plain place, with the digest of the base added.

    Args:
        p: The plain place.
        base: The digest of the base.
    """
    return DeltaPlace(p.pack, p.offset, p.stored_size, p.raw_size, p.codec, base)


_RECORD, _SEGMENT_HEAD = struct.Struct("<32sIQIIB"), struct.Struct("<IQQ")
_BASE = struct.Struct(f"<{DIGEST_SIZE}sQ")
SEGMENT_RECORD_SIZE = _RECORD.size

RawRecord: TypeAlias = tuple[bytes, int, int, int, int, int]
"""A record of a segment: digest, index of the pack, offset, stored length, raw length, codec."""


class Segment(Struct, frozen=True):
    """A piece of the index: some packs, and the places of the chunks and nodes in them."""

    packs: tuple[PackId, ...]
    records: list[Record]

    @property
    def deltas(self) -> int:
        """How many of the records are of chunks stored as deltas."""
        return count_deltas(self.records)


def encode_segment(segment: Segment) -> bytes:
    """Return the sealed bytes of a segment, with its records sorted by digest."""
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
    """Return the sealed bytes of a segment.

    Args:
        packs: The ids of the segment's packs.
        records: The records as bytes, sorted.
        bases: The record of each delta, as bytes → the digest of the base.
    """
    based = [_BASE.pack(bases[r], i) for i, r in enumerate(records) if r in bases] if bases else []
    head = _SEGMENT_HEAD.pack(len(packs), len(records), len(based))
    return seal(b"s", b"".join([head, *packs, *records, *sorted(based)]))


class SealedSegment:
    """A segment in its stored form. It decodes one record at a time, to save memory.

    A million decoded records would take some 400 MB.

    Args:
        data: The sealed bytes.
        label: The name of the segment, for messages.

    Attributes:
        packs: The ids of the segment's packs.
        count: The number of records.
        deltas: The number of records that are of deltas.

    Raises:
        DamagedError: The segment is damaged.
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
        """Check that each record of a delta has one base, and that no other record has any.

        Raises:
            DamagedError: The check fails.
        """
        codecs = bytearray(self._records[_RECORD.size - 1 :: _RECORD.size])
        for _, index in unpacked(_BASE, self._based):
            if index >= len(codecs) or codecs[index] != _DELTA:
                raise self._malformed("a base belongs to no delta, or to one that has another base")
            codecs[index] = 0
        if _DELTA in codecs:
            raise self._malformed("a delta has no base")

    def _malformed(self, why: str) -> DamagedError:
        return DamagedError(f"{self._label} is malformed: {why}")

    def records(self) -> Iterator[RawRecord]:
        """Yield the records, in the order of their digests.

        Raises:
            DamagedError: A record has the number of a pack that the segment does not list.
        """
        n_packs = len(self.packs)
        for record in unpacked(_RECORD, self._records):
            if record[1] >= n_packs:
                raise self._malformed("a record names a pack that it does not list")
            yield record

    def bases(self) -> Iterator[bytes]:
        """Yield the digest of the base of each delta."""
        return (base for base, _ in unpacked(_BASE, self._based))

    def records_of_deltas(self) -> Iterator[tuple[RawRecord, bytes]]:
        """Yield pairs: the record of a delta, and the digest of the delta's base.

        Raises:
            DamagedError: A record has the number of a pack that the segment does not list.
        """
        for base, index in unpacked(_BASE, self._based):
            record = _RECORD.unpack_from(self._records, index * _RECORD.size)
            if record[1] >= len(self.packs):
                raise self._malformed("a record names a pack that it does not list")
            yield record, base

    def bases_by_index(self) -> dict[int, bytes]:
        """Return the digest of each delta's base, keyed by the index of the delta's record."""
        return {index: base for base, index in unpacked(_BASE, self._based)}


def segment_counts(data: bytes) -> tuple[int, int]:
    """Return how many records and how many deltas a segment has, as its head says.

    Args:
        data: The first bytes of the sealed segment.

    Returns:
        Both counts; -1 and -1 if the head is cut off.
    """
    if len(data) < 8 + _SEGMENT_HEAD.size:
        return -1, -1
    _, count, deltas = _SEGMENT_HEAD.unpack_from(data, 8)
    return count, deltas


def max_segment_bytes(ref: SegmentRef) -> int:
    """Return the most bytes that a segment may have, given its reference in a root.

    The bound allows one pack for each record, and 1 MiB more for packs that are listed but have no
    record left.
    """
    most = ref.count * (_RECORD.size + ID_SIZE) + ref.deltas * _BASE.size
    return min((1 << 20) + most, MAX_SEGMENT_BYTES)


class SegmentLayout(NamedTuple):
    """The offsets of the parts of a sealed segment, by which a reader can read one part alone.

    Attributes:
        packs: The number of packs that the segment lists.
    """

    packs: int

    @staticmethod
    def of(ref: SegmentRef, length: int) -> SegmentLayout | None:
        """Return the layout of a segment.

        Args:
            ref: The reference to the segment.
            length: The number of the segment's sealed bytes.

        Returns:
            The layout; None if a segment with such a reference cannot have this length.
        """
        others = ref.count * _RECORD.size + ref.deltas * _BASE.size + DIGEST_SIZE
        listed = length - 8 - _SEGMENT_HEAD.size - others
        return None if listed < 0 or listed % ID_SIZE else SegmentLayout(listed // ID_SIZE)

    def pack_offset(self, number: int) -> int:
        """Return the offset of a pack's id in the segment.

        Args:
            number: The index of the pack in the segment's list of packs.
        """
        return 8 + _SEGMENT_HEAD.size + number * ID_SIZE

    def offset(self, index: int) -> int:
        """Return the offset of a record in the segment.

        Args:
            index: The index of the record.
        """
        return self.pack_offset(self.packs) + index * _RECORD.size

    def decode(self, data: bytes | bytearray) -> list[RawRecord]:
        """Decode a run of whole records. Nothing is verified."""
        return list(unpacked(_RECORD, data))


def decode_segment(data: bytes, label: str) -> Segment:
    """Decode a sealed segment.

    Raises:
        DamagedError: The segment is damaged.
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
    """Merge segments into one.

    If a digest has several places, the new segment has all of them.

    Args:
        parts: For each segment, its sealed bytes and its name for messages.
        without: The packs to leave out. Their records are left out too.

    Returns:
        The sealed bytes of the new segment, and the ids of its packs.

    Raises:
        DamagedError: A segment is damaged.
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
    # b"" stands for each record in a pack that is left out.
    merged.discard(b"")
    bases.pop(b"", None)
    return _sealed_segment(numbers, sorted(merged), bases), tuple(numbers)


# --- names ------------------------------------------------------------------------------------

CONFIG_KEY = "casnap.json"


def root_key(seq: int) -> str:
    """Return the backend's key for the root of a number. A folder holds 1,000 roots."""
    return f"roots/{seq // 1000}/{seq}"


def pack_key(pack: PackId | bytes) -> str:
    """Return the backend's key for a pack.

    The last byte of the pack's id selects one of 256 folders.
    """
    name = pack.hex()
    return f"packs/{name[-2:]}/{name}"


def segment_key(segment: SegmentId | bytes) -> str:
    """Return the backend's key for a segment."""
    return f"index/{segment.hex()}"


def id_from_name(name: str) -> bytes | None:
    """Return the id of a pack or segment, given its file name; None for any other name."""
    return bytes.fromhex(name) if re.fullmatch("[0-9a-f]{32}", name) else None
