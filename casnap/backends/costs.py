"""The numbers that differ between a disk and a bucket, where each call takes a round trip."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple


class Costs(NamedTuple):
    """How much to read, to list and to remember at a place, and how long to wait there.

    Attributes:
        gap: The most bytes between two runs that are read by one call. To read over them takes less
            time than another call.
        sharing: How many threads share a buffer. Most threads that read from a server only wait.
        few: The most chunks that are searched for in parts of a large index. To find more, the
            index is read whole.
        probes: How many newer roots are read one by one, before the others are listed.
        stands: For how many seconds after a root was seen it counts as still there.
        recent: For how many seconds a root that was the newest is recent enough to begin with.
        small_records: A segment of up to this many records is small: the next commit merges it into
            its own, so the host that wrote it keeps it. A reader without it pays a request.
        levels: For each level, the most records, bases and packs of its segments; and how many of
            its segments to merge with a new one.
        merged: How many small segments there must be for a collector to merge them, when it writes
            other segments anew.
        many_records: If the index has more records, the packs are listed folder by folder.
        delete_batch: How many files are deleted at once.
        delta_bytes: How many bytes of chunks are encoded at once as deltas of chunks that another
            store has.
        collection_start: How many seconds after it has made garbage a process first collects, so
            that a process that ends soon makes no requests in vain.
        collection_rest: How many seconds a process waits between two collections.
        watch: How many seconds pass between looks for commits of other processes.
        one_asks: Whether one of many ranks asks for what all need, and tells the others.
        recodes: Whether a collector makes chunks of older snapshots smaller, unless the store is
            set otherwise. To do so it reads them, and a bucket charges that.
        has_grace: Whether condemned packs wait for a default grace where processes collect by
            themselves and the store sets none. Otherwise they wait for the next collection.
        free_looks: Whether a look at one file costs next to nothing. Otherwise callers leave out
            looks that only make sure, and prefer one listing to many looks.
        waiting: Whether a thread that reads or writes only waits for a server. If so, as many
            threads run at once as calls are in flight, however few cores there are.
        writes_hints: Whether the last pack of nodes of a commit gets hints, so that a reader need
            not read the index.
        keeps_counts: Whether a process goes on from the counts of its last collection. So the next
            collection is short, and a process that ends waits for it.
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
    free_looks: bool
    waiting: bool
    writes_hints: bool
    keeps_counts: bool


_SMALL = 10_000
# Name → the number on a disk, and in a bucket.
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
    "free_looks": (True, False),
    "waiting": (False, True),
    "writes_hints": (False, True),
    "keeps_counts": (True, False),
}
LOCAL = Costs(**{name: disk for name, (disk, _) in _TABLE.items()})
REMOTE = Costs(**{name: bucket for name, (_, bucket) in _TABLE.items()})
