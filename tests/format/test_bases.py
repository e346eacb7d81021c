"""Each delta has one base, behind the records of its pack and of segments."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from itertools import pairwise

import pytest

from casnap.errors import DamagedError
from casnap.format.digest import Digest, digest_of
from casnap.format.records import (
    DeltaPlace,
    PackId,
    Place,
    Record,
    SealedSegment,
    Segment,
    decode_segment,
    encode_segment,
    merged_segment,
    pack_footer,
    read_pack_footer,
    seal,
    segment_counts,
)
from casnap.maintenance.full_index import FullIndex

_HEAD, _RECORD, _BASE = 20, 53, 40


def segment_at_random(seed: int, count: int = 200, packs: int = 5) -> Segment:
    """Return a segment of which about each third record is one of a delta."""
    drawn = random.Random(seed)
    ids = tuple(PackId(drawn.randbytes(16)) for _ in range(packs))
    bases = [drawn.randbytes(32) for _ in range(20)]
    records: list[Record] = []
    for number in range(count):
        place = ids[number % packs], 100 * number, 90, 4096
        codec = drawn.choice([0, 1, 2])
        if codec == 2:
            records.append(
                (Digest(drawn.randbytes(32)), DeltaPlace(*place, 2, drawn.choice(bases)))
            )
        else:
            records.append((Digest(drawn.randbytes(32)), Place(*place, codec)))
    return Segment(ids, records)


@pytest.mark.parametrize("seed", range(5))
def test_segments_keep_the_bases(seed: int) -> None:
    segment = segment_at_random(seed)
    content = encode_segment(segment)
    assert segment_counts(content) == (200, segment.deltas)
    decoded = decode_segment(content, "it")
    assert decoded.packs == segment.packs
    assert decoded.records == sorted(segment.records, key=lambda record: record[0])
    sealed = SealedSegment(content, "it")
    bases = [place.base for _, place in segment.records if isinstance(place, DeltaPlace)]
    assert list(sealed.bases()) == sorted(bases)
    assert {(record[0], base) for record, base in sealed.records_of_deltas()} == {
        (digest, place.base) for digest, place in segment.records if isinstance(place, DeltaPlace)
    }


def test_what_is_stored_is_in_the_order_of_its_bytes() -> None:
    content = encode_segment(segment_at_random(1))
    _, count, deltas = struct.unpack_from("<IQQ", content, 8)
    start = 8 + _HEAD + 5 * 16
    stop = start + count * _RECORD
    for begin, end, size in ((start, stop, _RECORD), (stop, stop + deltas * _BASE, _BASE)):
        parts = [content[at : at + size] for at in range(begin, end, size)]
        assert all(one < other for one, other in pairwise(parts))


def test_merged_segments_keep_the_bases() -> None:
    """Also of what stands in both, and without the packs that are left out."""
    parts = [segment_at_random(seed) for seed in (1, 2)]
    parts.append(Segment(parts[0].packs[:1], [r for r in parts[0].records if _in(r, parts[0], 0)]))
    left_out = parts[1].packs[2]
    contents = [(encode_segment(part), "a part") for part in parts]
    content, packs = merged_segment(contents, {left_out})
    expected = {r for part in parts for r in part.records if r[1].pack != left_out}
    merged = decode_segment(content, "it")
    assert set(merged.records) == expected
    assert len(merged.records) == len(expected)
    assert set(packs) == {pack for part in parts for pack in part.packs} - {left_out}
    index = FullIndex(contents)
    for part in parts:
        assert all(place in index.of(digest) for digest, place in part.records)


def _in(record: Record, segment: Segment, pack: int) -> bool:
    return record[1].pack == segment.packs[pack]


def _with_bases(body: bytes, *bases: tuple[bytes, int]) -> bytes:
    """Return the body of a segment of one pack, a chunk and a delta, with other bases."""
    head = struct.pack("<IQQ", 1, 2, len(bases))
    bare = body[_HEAD : _HEAD + 16 + 2 * _RECORD]
    return head + bare + b"".join(struct.pack("<32sQ", *base) for base in bases)


FORGED: dict[str, Callable[[bytes], bytes]] = {
    "no base": _with_bases,
    "two bases": lambda body: _with_bases(body, (bytes(32), 1), (b"\1" * 32, 1)),
    "the base of a chunk": lambda body: _with_bases(body, (bytes(32), 0)),
    "one for each": lambda body: _with_bases(body, (bytes(32), 0), (bytes(32), 1)),
    "beyond the records": lambda body: _with_bases(body, (bytes(32), 2)),
    "far beyond": lambda body: _with_bases(body, (bytes(32), (1 << 64) - 1)),
    "cut off": lambda body: body[:-1],
    "longer": lambda body: body + bytes(_BASE),
    "many": lambda body: body[:12] + b"\xff" * 8 + body[20:],
}


@pytest.mark.parametrize("case", FORGED)
def test_a_segment_has_one_base_for_each_delta(case: str) -> None:
    pack = PackId(bytes(16))
    records: list[Record] = [
        (Digest(b"\1" * 32), Place(pack, 0, 90, 4096, 0)),
        (Digest(b"\2" * 32), DeltaPlace(pack, 90, 90, 4096, 2, b"\3" * 32)),
    ]
    body = encode_segment(Segment((pack,), records))[8:-32]
    assert decode_segment(seal(b"s", _with_bases(body, (b"\3" * 32, 1))), "it").records == records
    forged = seal(b"s", FORGED[case](body))
    for read in (
        SealedSegment,
        decode_segment,
        lambda data, label: merged_segment([(data, label)]),
    ):
        with pytest.raises(DamagedError, match=r"malformed|wrong length"):
            read(forged, "it")


@pytest.mark.parametrize("kind", [b"p", b"t"])
def test_footers_keep_the_bases(kind: bytes) -> None:
    segment = segment_at_random(7, packs=1)
    [pack] = segment.packs
    footer = pack_footer(kind, segment.records)
    assert read_pack_footer(pack, b"before" + footer) == segment.records
    assert len(footer) == 200 * 49 + segment.deltas * 32 + 48


@pytest.mark.parametrize("deltas", [0, 1, 3])
def test_a_footer_has_one_base_for_each_delta(deltas: int) -> None:
    pack = PackId(bytes(16))
    record = struct.pack("<32sQIIB", bytes(32), 0, 90, 4096, 2)
    head = 2 * record + deltas * bytes(32) + struct.pack("<II", 2, deltas) + b"CASNAPp1"
    with pytest.raises(DamagedError, match="one base for each delta"):
        read_pack_footer(pack, head + digest_of(head))
