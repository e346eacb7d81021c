"""The numbers that differ between a disk and a bucket.

At a bucket, each call takes a round trip.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple


class Costs(NamedTuple):
    """How much to read, list and remember at a place, and how long to wait there.

    Attributes:
        gap: Two pieces of a pack with at most this many bytes between them are read by one call.
            Reading the bytes between them takes less time than a second call.
        sharing: How many reading threads share a buffer. At a bucket, most of these threads only
            wait.
        few: To look up at most this many chunks, only parts of a large segment are read. To look up
            more, the segment is read whole.
        probes: How many newer roots to look for one by one, before the folder of roots is listed.
        stands: After a root was seen, it counts as existing for this many seconds, without another
            look.
        recent: After a root was found to be the newest, it is used as the newest for this many
            seconds, without another look.
        small_records: A segment with up to this many records is small. The next commit merges small
            segments into its own. The host that wrote such a segment keeps it; another reader pays
            a request for it.
        levels: The size classes of segments, the smallest first. For each: the size of its largest
            segment, as the number of records, bases of deltas and packs together; and how many
            segments of the class there must be before a commit merges them with its new one.
        merged: A collector that writes segments anyway merges the small ones too, if there are at
            least this many.
        many_records: If the index has more records than this, packs are listed folder by folder.
        delete_batch: How many files are deleted at once.
        delta_bytes: How many bytes of chunks are encoded at once as deltas of chunks that another
            store has.
        collection_start: How many seconds pass between a process's first garbage and its first
            collection. A process that ends sooner makes no requests for a collection.
        collection_rest: How many seconds a process waits between two collections.
        watch: How many seconds a background copy waits between two looks for commits of other
            processes.
        one_asks: Whether rank 0 reads what all ranks need, such as the newest root, and sends it to
            them. Otherwise each rank reads it.
        recodes: Whether a collector makes chunks of older snapshots smaller, unless a setting of
            the store decides. To do so it reads the chunks, for which a bucket charges.
        has_grace: Whether collections that a process begins by itself keep condemned packs for the
            default grace, if the store sets no grace. Otherwise they delete these packs in the next
            collection.
        free_looks: Whether it costs next to nothing to look at one file. Otherwise callers skip
            looks that only confirm something, and list a folder rather than look at many files.
        waiting: Whether a thread that reads or writes mostly waits for a server. If so, there is a
            thread for each call that is useful at once, however few cores there are.
        writes_hints: Whether a commit writes hints into its last pack of nodes, so that a reader
            need not read the index.
        keeps_counts: Whether a process keeps the counts of its last collection for the next one.
            The next collection is then short, and a process that exits waits for it.
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
