"""The numbers that differ between a disk and a bucket, where each call takes a round trip."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple


class Costs(NamedTuple):
    """How much to read, to list and to remember at a place, and how long to wait there.

    Attributes:
        gap: To read over so many bytes takes less time than another read.
        sharing: So many threads share a buffer: most of those that read from a server wait.
        few: So many chunks are looked for without reading a large index whole.
        probes: After so many newer roots, those that are left are listed.
        stands: A root that was seen so few seconds ago still stands.
        recent: A root that was the newest so few seconds ago is recent enough to begin with.
        small_records: Each commit writes a segment of up to so many records again, and hosts keep
            it: each segment is a request for a reader that has not cached it.
        levels: Up to how many records and bases the segments of a level have, and how many of them
            are merged with one more.
        merged: So many small segments are merged when a collector writes others anew.
        many_records: Of an index of more, the packs are listed folder by folder.
        delete_batch: So many files are deleted at once.
        delta_bytes: So many bytes of chunks are encoded at once as deltas of what another store
            has.
        collection_start: A process first collects garbage so many seconds after it has made some,
            so that one that ends soon makes no requests in vain.
        collection_rest: The next time is so many seconds later.
        watch: How often to look for what other processes have committed, in seconds.
        one_asks: Whether of many ranks one asks for what all need, and tells the others.
        recodes: Whether a collector makes what history keeps smaller, unless the store is set
            otherwise. It reads that, which a bucket charges.
        has_grace: Whether what is condemned waits for a grace, also where processes collect by
            themselves and the store is set to none; else for a whole cycle of collections.
    """

    gap: int
    sharing: int
    few: int
    probes: float
    stands: float
    recent: float
    small_records: int
    levels: tuple[tuple[int, int], ...]
    merged: int
    many_records: float
    delete_batch: int
    delta_bytes: int
    collection_start: float
    collection_rest: float
    watch: float
    one_asks: bool
    recodes: bool
    has_grace: bool


_SMALL = 10_000
# On a disk, and in a bucket.
_TABLE: dict[str, tuple[Any, Any]] = {
    "gap": (64 << 10, 1 << 20),
    "sharing": (1, 3),
    "few": (0, 64),
    "probes": (inf, 4),
    "stands": (0.0, 60.0),
    "recent": (0.0, 10.0),
    "small_records": (0, _SMALL),
    "levels": (
        tuple((256 * 8**level, 15) for level in range(4)),
        ((_SMALL, 1), (8 * _SMALL, 3), (64 * _SMALL, 3)),
    ),
    "merged": (16, 1),
    "many_records": (inf, 1_000_000),
    "delete_batch": (16, 1000),
    "delta_bytes": (4 << 20, 16 << 20),
    "collection_start": (0.0, 60.0),
    "collection_rest": (0.0, 3600.0),
    "watch": (5.0, 30.0),
    "one_asks": (False, True),
    "recodes": (True, False),
    "has_grace": (False, True),
}
LOCAL = Costs(**{name: disk for name, (disk, _) in _TABLE.items()})
REMOTE = Costs(**{name: bucket for name, (_, bucket) in _TABLE.items()})
