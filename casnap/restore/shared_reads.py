"""Shared reads: one rank reads each stored byte and sends it to the other ranks that want it.

A rank that receives a chunk verifies it again: the chunk may have changed in memory or on its way.
Ranks of one host find what another one has read in memory that they share; others get it by
sockets.

Reads are scheduled in *units*, runs of a pack, so that no rank needs to know every chunk. Rank 0
gathers which units are wanted and assigns each unit to a rank that wants it, and to a window. A
unit that only one rank wants is not sent at all, so a restore to the sharding of the take sends
next to nothing. While the chunks of one window are sent, those of the next are read.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from heapq import heapify, heapreplace
from itertools import groupby
from operator import itemgetter
from struct import Struct as Layout
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from casnap.errors import DamagedError
from casnap.format.decoding import decoder
from casnap.format.digest import Digest, digest_of
from casnap.format.records import encode
from casnap.ranks.comm import Comm
from casnap.ranks.shared_memory import not_shared
from casnap.runtime import buffers
from casnap.runtime.buffers import Slot
from casnap.runtime.threads import Crew, Shared, cores
from casnap.storage.objects import Objects
from casnap.storage.place_reads import DEFAULT_READ, ReadOptions, Want

_log = logging.getLogger("casnap")
_LEAST_WINDOW, _LARGEST_WINDOW = 64 << 20, 256 << 20
_WINDOW_PER_RANK = 4 << 20
_UNIT_BYTES = 16 << 20
# While one buffer is filled, another one is sent; and ranks may still read in a third one.
_BUFFERS = 3
# From this size on, several threads copy faster than one.
_BULK_BYTES = 8 << 20
_REQUEST = Layout("<32sI")
# Where chunks lie in the memory that ranks of a host share.
_POINTER = Layout("<Q")

Unit: TypeAlias = tuple[bytes, int]
"""A pack, and the number of a run in it."""
Units: TypeAlias = list[tuple[bytes, list[tuple[int, int]]]]
"""For each pack, in order: the runs that are wanted, and how many bytes of each."""


class Assignment(Struct, frozen=True, array_like=True, gc=False):
    """The rank that reads a unit, and the window that the unit is sent in."""

    window: int
    reader: int


class Schedule(Struct, frozen=True, array_like=True):
    """Which rank reads which units for others.

    Attributes:
        windows: How many windows there are.
        units: For each pack, the runs that are sent to other ranks. All other runs are read by
            the one rank that wants them.
    """

    windows: int
    units: list[tuple[bytes, dict[int, Assignment]]]


class _Copy(NamedTuple):
    """Where to put a chunk for another rank, and the byte that says it is there."""

    target: memoryview
    there: memoryview


def fetch_shared(
    comm: Comm,
    objects: Objects,
    wants: Iterable[Want],
    how: ReadOptions = DEFAULT_READ,
    *,
    window: int | None = None,
) -> None:
    """Do what :meth:`Objects.fetch` does, on all ranks together.

    Args:
        comm: The ranks; all call this.
        objects: Where to read from.
        wants: The chunks that this rank wants, each with its length; may be empty.
        how: How this rank reads.
        window: About how many bytes a rank receives at once, the same on all ranks. A rank also
            keeps twice its share of a window in buffers for other ranks.

    Raises:
        DamagedError: Some chunks have no whole place. All others were handed over. The error is
            raised on all ranks.
    """
    if comm.size == 1:
        objects.fetch(wants, how)
        return
    passing = _SharedFetch(comm, objects, wants, how)
    passing.run(window or window_for(comm.size))
    error = passing.fetch_the_rest()
    told = comm.all_gather(str(error).encode() if error else b"")
    if error is not None:
        raise error
    for rank, text in enumerate(told):
        if text:
            raise DamagedError(f"rank {rank}: {bytes(text).decode()}")


def window_for(ranks: int) -> int:
    """Return about how many bytes a rank receives at once.

    Small, since this memory is allocated for each call, but enough for many ranks to read at once.
    """
    return min(max(_LEAST_WINDOW, ranks * _WINDOW_PER_RANK), _LARGEST_WINDOW)


class _SharedFetch:
    """What one rank does in one fetch."""

    def __init__(
        self, comm: Comm, objects: Objects, wants: Iterable[Want], how: ReadOptions
    ) -> None:
        self._comm = comm
        self._objects = objects
        self._how = how
        # The wants that have not been handed over yet.
        self._left: dict[Digest, list[Want]] = {}
        for want in wants:
            self._left.setdefault(want.digest, []).append(want)
        # Buffers for what is sent; whether they are shared, with whom, and who shares its own.
        self._buffers: list[memoryview] = []
        self._shared = not_shared(0, comm.size)
        self._points = self._pointed = [False] * comm.size

    def fetch_the_rest(self) -> DamagedError | None:
        """Read chunks that did not arrive: the index may be stale, or the chunks damaged."""
        try:
            self._objects.fetch((w for wants in self._left.values() for w in wants), self._how)
        except DamagedError as e:
            return e
        return None

    def run(self, window: int) -> None:
        """Read together everything that the index places."""
        # Each rank reads an equal share of a window, so that what a rank receives fits.
        share = max(window // self._comm.size, self._objects.config.chunk_size)
        by_unit = self._by_unit(min(share, _UNIT_BYTES))
        schedule = self._agree(by_unit, share, window)
        requests, alone = self._split(by_unit, schedule)
        if not schedule.windows:
            self._read(alone, {}, {})
            return
        requested = self._exchange_requests(requests)
        most = max(sum(map(_room, set(lists))) for lists in requested)
        self._make_buffers(most, min(_BUFFERS, schedule.windows), share)
        incoming = max(self._incoming(lists) for lists in requests)
        room = Slot(incoming).view if incoming else None
        with Crew() as crew:
            parts: list[Sequence[memoryview | bytes]] = []

            def read(i: int) -> None:
                own = alone[
                    i * len(alone) // schedule.windows : (i + 1) * len(alone) // schedule.windows
                ]
                own += requests[i][self._comm.rank]
                parts.append(self._read_for_all(own, requested[i], i))

            reading = crew.start(partial(read, 0))
            for i in range(schedule.windows):
                crew.join(reading)
                if i + 1 < schedule.windows:
                    reading = crew.start(partial(read, i + 1))
                received = self._comm.all_to_all(parts.pop(0), room, proven=True)
                self._receive(received, requests[i])

    def _make_buffers(self, most: int, count: int, share: int) -> None:
        """Make the buffers for what this rank sends; share them with ranks of its host if possible.

        Args:
            most: The most bytes that this rank sends in a window.
            count: How many buffers.
            share: About how many bytes a rank reads in a window; the same on all ranks.
        """
        shared = self._comm.share(_BUFFERS * (share + share // 8))
        if most * count <= len(shared.own):
            # A buffer is written to again when all ranks have taken in the window after it.
            self._buffers = [shared.own[i * most : (i + 1) * most] for i in range(count)]
            self._points = shared.readers
        else:
            self._buffers = [Slot(most).view for _ in range(min(2, count))]
        said = self._comm.all_to_all([bytes([points]) for points in self._points])
        self._pointed = [part[0] == 1 for part in said]
        self._shared = shared

    # --- who reads what ---

    def _by_unit(self, nbytes: int) -> dict[Unit, list[Digest]]:
        """Return the chunks to read by their units, in order."""
        digests = list(self._left)
        places = self._objects.index.find(self._objects.recent_view(), digests)
        by_unit: dict[Unit, list[Digest]] = {}
        for digest, place in zip(digests, places, strict=True):
            if place is not None:
                by_unit.setdefault((place.pack, place.offset // nbytes), []).append(digest)
        return dict(sorted(by_unit.items()))

    def _agree(self, by_unit: dict[Unit, list[Digest]], share: int, window: int) -> Schedule:
        """Agree on a schedule; of ranks that want the same units, one sends the list."""
        units = [
            (pack, [(n, sum(self._nbytes(d) for d in by_unit[pack, n])) for _, n in group])
            for pack, group in groupby(by_unit, key=itemgetter(0))
        ]
        listed = encode(units)
        same: defaultdict[bytes, list[int]] = defaultdict(list)
        for rank, digest in enumerate(self._comm.all_gather(digest_of(listed)[:16])):
            same[bytes(digest)].append(rank)
        speakers = {ranks[0]: ranks for ranks in same.values()}
        lists = self._comm.gather(listed if self._comm.rank in speakers else b"")
        schedule = b""
        if self._comm.rank == 0:
            wanted = [
                (speakers[rank], decoder(Units).decode(text))
                for rank, text in enumerate(lists)
                if text
            ]
            schedule = encode(schedule_reads(wanted, self._comm.size, share, window))
        return decoder(Schedule).decode(self._comm.broadcast(schedule))

    def _nbytes(self, digest: Digest) -> int:
        return self._left[digest][0].nbytes

    def _split(
        self, by_unit: dict[Unit, list[Digest]], schedule: Schedule
    ) -> tuple[list[list[list[Digest]]], list[Digest]]:
        """Return the chunks to request, by window and reader, and those to read alone."""
        assignments = {
            (pack, n): assigned for pack, runs in schedule.units for n, assigned in runs.items()
        }
        requests: list[list[list[Digest]]] = [
            [[] for _ in range(self._comm.size)] for _ in range(schedule.windows)
        ]
        alone: list[Digest] = []
        for unit, digests in by_unit.items():
            assigned = assignments.get(unit)
            if assigned is None:
                alone += digests
            else:
                requests[assigned.window][assigned.reader] += digests
        for lists in requests:
            for digests in lists:
                # Ranks that want the same chunks send equal requests.
                digests.sort()
        return requests, alone

    def _exchange_requests(self, requests: list[list[list[Digest]]]) -> list[list[bytes]]:
        """Send requests to all readers; return the requests to this rank, by window and rank."""
        mine = [
            encode([self._request(lists[reader]) for lists in requests])
            for reader in range(self._comm.size)
        ]
        mine[self._comm.rank] = encode([b""] * len(requests))
        # Most requests are equal, so keep one copy.
        equal: dict[bytes, bytes] = {}
        received = [
            [equal.setdefault(text, text) for text in decoder(list[bytes]).decode(texts)]
            for texts in self._comm.all_to_all(mine)
        ]
        return [list(lists) for lists in zip(*received, strict=True)]

    def _request(self, digests: list[Digest]) -> bytes:
        return b"".join(_REQUEST.pack(digest, self._nbytes(digest)) for digest in digests)

    # --- reading ---

    def _read_for_all(
        self, own: list[Digest], requested: list[bytes], number: int
    ) -> list[memoryview | bytes]:
        """Read the chunks of a window; return what to send to each rank."""
        copies: defaultdict[Digest, list[_Copy]] = defaultdict(list)
        sizes: dict[Digest, int] = {}
        parts: dict[bytes, memoryview | bytes] = {b"": b""}
        pointers = {b"": b""}
        which, start = number % max(1, len(self._buffers)), 0
        for text in sorted(set(requested) - {b""}):
            part = self._buffers[which][start : start + _room(text)]
            pointers[text] = _POINTER.pack(which * len(self._buffers[which]) + start)
            start += len(part)
            parts[text] = part
            there = part[len(part) - len(text) // _REQUEST.size :]
            there[:] = bytes(len(there))
            at = 0
            for i, (digest, nbytes) in enumerate(_REQUEST.iter_unpack(text)):
                sizes[digest] = nbytes
                copies[digest].append(_Copy(part[at : at + nbytes], there[i : i + 1]))
                at += nbytes
        self._read(own, copies, sizes)
        return [
            pointers[text] if points else parts[text]
            for text, points in zip(requested, self._points, strict=True)
        ]

    def _read(
        self,
        own: list[Digest],
        copies: Mapping[Digest, list[_Copy]],
        sizes: Mapping[Digest, int],
    ) -> None:
        """Read chunks for this rank and others; damaged chunks are left out."""
        mine = set(own)
        wants = [
            Want(
                digest,
                sizes[digest] if digest in sizes else self._nbytes(digest),
                partial(self._hand_over, digest, digest in mine, copies.get(digest, ())),
                "",
            )
            for digest in [*own, *(copies.keys() - mine)]
        ]
        # A rank that wants a damaged chunk notices that it did not arrive.
        with suppress(DamagedError):
            self._objects.fetch(wants, self._how)

    def _hand_over(
        self, digest: Digest, is_own: bool, copies: Iterable[_Copy], raw: memoryview
    ) -> None:
        for target, there in copies:
            if len(target) == len(raw):
                buffers.copy(target, raw)
                there[0] = 1
        if is_own:
            for want in self._left[digest]:
                want.sink(raw)
            del self._left[digest]

    def _incoming(self, lists: list[list[Digest]]) -> int:
        """Return how many bytes other ranks send in a window."""
        theirs = (
            digest
            for reader, digests in enumerate(lists)
            if reader != self._comm.rank and not self._pointed[reader]
            for digest in digests
        )
        return sum(self._nbytes(digest) + 1 for digest in theirs)

    def _answer(self, reader: int, received: memoryview, digests: list[Digest]) -> memoryview:
        """Return what a rank sent, as it came or where it lies: chunks, and a byte for each."""
        memory = self._shared.theirs[reader]
        if not self._pointed[reader] or memory is None:
            return received
        nbytes = sum(self._nbytes(digest) + 1 for digest in digests)
        (at,) = _POINTER.unpack(received)
        # Nothing checked the pointer on its way; but the chunks are verified, wherever they lie.
        return memory[at : at + nbytes] if at + nbytes <= len(memory) else memoryview(bytes(nbytes))

    def _receive(self, received: list[memoryview], requests: list[list[Digest]]) -> None:
        """Verify the chunks that other ranks sent, in the order of the requests; hand them over.

        A chunk that does not have its digest is read again by this rank.
        """
        chunks: list[tuple[Digest, memoryview]] = []
        for reader, digests in enumerate(requests):
            if reader == self._comm.rank or not digests:
                continue
            answer = self._answer(reader, received[reader], digests)
            there = answer[len(answer) - len(digests) :]
            at = 0
            for i, digest in enumerate(digests):
                nbytes = self._nbytes(digest)
                if there[i]:
                    chunks.append((digest, answer[at : at + nbytes]))
                at += nbytes
        threads = (
            max(1, min(cores() // self._comm.neighbours, 4))
            if sum(len(raw) for _, raw in chunks) >= _BULK_BYTES
            else 1
        )
        with Crew() as crew:
            source = Shared(chunks, crew)

            def work() -> None:
                for digest, raw in source:
                    if digest_of(raw) == digest:
                        self._hand_over(digest, True, (), raw)
                    else:
                        _log.warning(
                            "chunk %s came damaged from another rank and is read again: a network "
                            "card or some memory may be faulty",
                            digest.hex(),
                        )

            crew.start(work, threads - 1)
            work()


def _room(text: bytes) -> int:
    """Return the bytes of the answer to a request: the chunks, and a byte for each."""
    return sum(nbytes + 1 for _, nbytes in _REQUEST.iter_unpack(text))


# --- who reads what ---------------------------------------------------------------------------


def schedule_reads(
    wanted: Sequence[tuple[list[int], Units]], size: int, share: int, window: int
) -> Schedule:
    """Assign the units that several ranks want to readers and windows.

    Args:
        wanted: Groups of ranks, each with the units that all ranks of the group want.
        size: The number of ranks.
        share: About how many bytes a rank reads for others in a window.
        window: About how many bytes a rank receives in a window.
    """
    by_unit: defaultdict[Unit, list[tuple[int, int]]] = defaultdict(list)
    for i, (_, units) in enumerate(wanted):
        for pack, runs in units:
            for number, nbytes in runs:
                by_unit[pack, number].append((i, nbytes))
    by_lists: defaultdict[tuple[int, ...], list[Unit]] = defaultdict(list)
    for unit, named in by_unit.items():
        by_lists[tuple([i for i, _ in named])].append(unit)
    load = [0] * size
    readers: dict[Unit, int] = {}
    # Units that few ranks want are assigned first.
    for lists in sorted(by_lists, key=lambda lists: sum(len(wanted[i][0]) for i in lists)):
        heap = [(load[rank], rank) for i in lists for rank in wanted[i][0]]
        heapify(heap)
        for unit in by_lists[lists]:
            reader = _least_loaded(heap, load)
            load[reader] += max([nbytes for _, nbytes in by_unit[unit]])
            if len(heap) > 1:
                readers[unit] = reader
    windows = _Windows(size, share, len(wanted), window)
    schedule: defaultdict[bytes, dict[int, Assignment]] = defaultdict(dict)
    for unit in sorted(readers):
        assigned = Assignment(windows.place(readers[unit], by_unit[unit]), readers[unit])
        schedule[unit[0]][unit[1]] = assigned
    return Schedule(windows.count, list(schedule.items()))


def _least_loaded(heap: list[tuple[int, int]], load: list[int]) -> int:
    """Return the rank with the least load; the heap may hold older loads."""
    while load[heap[0][1]] != heap[0][0]:
        heapreplace(heap, (load[heap[0][1]], heap[0][1]))
    return heap[0][1]


class _Windows:
    """Assigns units to windows, in order, so that no rank reads or receives too much in one.

    Attributes:
        count: How many windows there are so far.
    """

    def __init__(self, readers: int, share: int, lists: int, window: int) -> None:
        self.count = 0
        self._lists = readers
        # For each reader, then for each list: its last window, the bytes in it, and the limit.
        self._last = [0] * (readers + lists)
        self._filled = [0] * (readers + lists)
        self._bounds = [share] * readers + [window] * lists

    def place(self, reader: int, lists: list[tuple[int, int]]) -> int:
        """Return the window for a unit, given the lists that want it and their bytes."""
        last, filled, bounds = self._last, self._filled, self._bounds
        adds = [(self._lists + i, nbytes) for i, nbytes in lists]
        adds.append((reader, sum([nbytes for _, nbytes in lists])))
        chosen = 0
        for i, nbytes in adds:
            first = last[i] + (0 < filled[i] > bounds[i] - nbytes)
            chosen = max(chosen, first)
        for i, nbytes in adds:
            if last[i] < chosen:
                last[i], filled[i] = chosen, 0
            filled[i] += nbytes
        self.count = max(self.count, chosen + 1)
        return chosen
