"""Segments of an index with records at random, as large stores have."""

from __future__ import annotations

import random
from functools import lru_cache

from casnap.backends import Backend
from casnap.format.digest import Digest
from casnap.format.records import (
    PackId,
    Place,
    Segment,
    SegmentId,
    SegmentRef,
    encode_segment,
    segment_key,
)
from casnap.storage.packs.pack_writer import new_id


@lru_cache(2)
def records_at_random(count: int, packs: int = 50, seed: int = 0) -> Segment:
    drawn = random.Random(seed)
    ids = [PackId(new_id(0)) for _ in range(packs)]
    return Segment(
        tuple(ids),
        [
            (Digest(drawn.randbytes(32)), Place(ids[i % packs], 100 * i, 100, 100, 0))
            for i in range(count)
        ],
    )


def put_segment(backend: Backend, segment: Segment) -> SegmentRef:
    ident = SegmentId(new_id(0))
    backend.write(segment_key(ident), encode_segment(segment))
    return SegmentRef(ident, len(segment.records), segment.deltas)
