"""The schedule of shared reads: which rank reads which runs of packs, and when it passes them on.

Reads are scheduled in *units*, which are runs of a pack, so that no rank needs to know every chunk.
A unit that several ranks want is given to one of them as its reader, and to a window, which limits
how much a rank reads or receives at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import TypeAlias

from msgspec import Raw, Struct

from casnap.format.decoding import decoder
from casnap.format.records import Place, encode

Unit: TypeAlias = tuple[bytes, int]
"""The id of a pack, and the number of a run in it. The numbers ascend with the offsets."""
Units: TypeAlias = list[tuple[bytes, list[tuple[int, int]]]]
"""For each pack, in order: the numbers of the wanted runs, each with its wanted bytes."""
_Told: TypeAlias = list[tuple[bytes, int, Raw]]
"""A request as it was sent: for each pack, the bytes wanted of it, and the encoded runs."""
# No pack is as long as this. An index may claim larger offsets, but the number of a run must fit in
# 64 bits.
_FAR = 1 << 56


def run_of(place: Place, nbytes: int, most: int) -> int:
    """Return the number of the run of a pack that a chunk is read with.

    The number follows from the place alone, so all ranks find the same one.

    Args:
        place: Where the chunk lies.
        nbytes: The most bytes of the pack in a run.
        most: About the most raw bytes of the compressed chunks in a run.
    """
    # The least n for which the chunk is compressed by no more than 2**n.
    n = (max(0, place.raw_size - 1) // max(1, place.stored_size)).bit_length()
    length = min(nbytes, max(1, most >> n)) if n else nbytes
    return min(place.offset, _FAR) // length * length << 6 | min(n, 63)


def request_of(units: Units) -> bytes:
    """Return the message by which a rank requests units."""
    return encode([(pack, sum(nbytes for _, nbytes in runs), runs) for pack, runs in units])


class ReadTurn(Struct, frozen=True, array_like=True, gc=False):
    """The rank that reads a unit, and the window in which it passes the unit on."""

    window: int
    reader: int


class Schedule(Struct, frozen=True, array_like=True):
    """The units that each rank reads for other ranks.

    Attributes:
        windows: How many windows there are.
        units: For each pack, the runs that are sent to other ranks. All other runs are read by
            the one rank that wants them.
    """

    windows: int
    units: list[tuple[bytes, dict[int, ReadTurn]]]


def schedule_reads(
    requests: Sequence[tuple[list[int], bytes | memoryview]],
    size: int,
    share: int,
    window: int,
    in_memory: bool = False,
) -> Schedule:
    """Give each unit that several ranks want a reader and a window.

    Args:
        requests: Groups of ranks, each with the request that all ranks of the group make, as
            :func:`request_of` returns it.
        size: The number of ranks.
        share: About how many bytes a rank reads for others in a window.
        window: About how many bytes a rank receives in a window.
        in_memory: Whether all ranks see each other's memory. A chunk that several ranks want then
            takes up memory only once.
    """
    load = [0] * size
    by_unit = _wanted_units(requests, load)
    by_lists: defaultdict[tuple[int, ...], list[Unit]] = defaultdict(list)
    for unit, digests in by_unit.items():
        by_lists[tuple([i for i, _ in digests])].append(unit)
    readers: dict[Unit, int] = {}
    # Units that few ranks want are assigned first.
    for lists in sorted(by_lists, key=lambda lists: sum(len(requests[i][0]) for i in lists)):
        heap = [(load[rank], rank) for i in lists for rank in requests[i][0]]
        heapify(heap)
        for unit in by_lists[lists]:
            reader = _least_loaded(heap, load)
            load[reader] += max([nbytes for _, nbytes in by_unit[unit]])
            if len(heap) > 1:
                readers[unit] = reader
    windows = _Windows(size, share, len(requests), window, in_memory)
    schedule: defaultdict[bytes, dict[int, ReadTurn]] = defaultdict(dict)
    for unit in sorted(readers):
        assigned = ReadTurn(windows.place(readers[unit], by_unit[unit]), readers[unit])
        schedule[unit[0]][unit[1]] = assigned
    return Schedule(windows.count, list(schedule.items()))


def _wanted_units(
    requests: Sequence[tuple[list[int], bytes | memoryview]], load: list[int]
) -> dict[Unit, list[tuple[int, int]]]:
    """Return the units that several ranks may want.

    A pack that only one rank wants is left out, and its wanted bytes are added to the load of that
    rank. Most packs are such when many ranks restore shards.

    Args:
        requests: Groups of ranks, each with the request of the group.
        load: For each rank, the bytes that it reads. Packs that it alone wants are added.

    Returns:
        Unit → pairs of a group that wants it, by index, and how many bytes of it the group wants.
    """
    told = [decoder(_Told).decode(text) for _, text in requests]
    alone: dict[bytes, int | None] = {}
    for i, (ranks, _) in enumerate(requests):
        for pack, _, _ in told[i]:
            alone[pack] = ranks[0] if len(ranks) == 1 and pack not in alone else None
    by_unit: defaultdict[Unit, list[tuple[int, int]]] = defaultdict(list)
    for i, packs in enumerate(told):
        for pack, wanted_bytes, runs in packs:
            if (rank := alone[pack]) is not None:
                load[rank] += wanted_bytes
                continue
            for number, nbytes in decoder(list[tuple[int, int]]).decode(runs):
                by_unit[pack, number].append((i, nbytes))
    return by_unit


def _least_loaded(heap: list[tuple[int, int]], load: list[int]) -> int:
    """Return the rank with the least load, and update outdated loads on the heap.

    Args:
        heap: Pairs of load and rank. A load may be lower than the rank's load is now.
        load: The load of each rank now.
    """
    while load[heap[0][1]] != heap[0][0]:
        heapreplace(heap, (load[heap[0][1]], heap[0][1]))
    return heap[0][1]


class _Windows:
    """Assigns units to windows, in order, so that no rank reads or receives too much in one.

    Attributes:
        count: How many windows there are so far.
    """

    def __init__(self, readers: int, share: int, lists: int, window: int, in_memory: bool) -> None:
        self.count = 0
        self._read_for = max if in_memory else sum
        self._lists = readers
        # For each reader, then for each group: its last window, the bytes in it, and the limit.
        self._last = [0] * (readers + lists)
        self._filled = [0] * (readers + lists)
        self._bounds = [share] * readers + [window] * lists

    def place(self, reader: int, lists: list[tuple[int, int]]) -> int:
        """Choose the window for a unit.

        Args:
            reader: The rank that reads the unit.
            lists: The index of each group that wants the unit, and how many bytes of it the group
                wants.
        """
        last_window, fill, bounds = self._last, self._filled, self._bounds
        adds = [(self._lists + i, nbytes) for i, nbytes in lists]
        adds.append((reader, self._read_for([nbytes for _, nbytes in lists])))
        window = 0
        for i, nbytes in adds:
            window_tried = last_window[i] + (0 < fill[i] > bounds[i] - nbytes)
            window = max(window, window_tried)
        for i, nbytes in adds:
            if last_window[i] < window:
                last_window[i], fill[i] = window, 0
            fill[i] += nbytes
        self.count = max(self.count, window + 1)
        return window
