"""Reading by many ranks: each stored byte is read by one, and passed on to the others.

Whoever receives a chunk proves it once more: it may have changed in memory, or on its way.

What is dealt out are *units*, runs of a pack, so that nobody needs to know every chunk: rank 0
hears which units are wanted, and says who reads each, and when. A reader is one of those who want
the unit. What nobody else wants is not passed on, so a restore to the sharding of the take passes
next to nothing. The rest goes in windows: while one is passed on, the next one is read.
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

import msgspec
from msgspec import Struct

from casnap.errors import DamagedError
from casnap.format.digest import Digest, digest_of
from casnap.format.records import encode
from casnap.ranks.comm import Comm
from casnap.runtime import buffers
from casnap.runtime.buffers import Slot
from casnap.runtime.threads import Crew, Shared, cores
from casnap.storage.objects import DEFAULT_READ, Objects, ReadOptions, Want

_log = logging.getLogger("casnap")
_LEAST_WINDOW, _LARGEST_WINDOW = 64 << 20, 256 << 20
_WINDOW_PER_RANK = 4 << 20
_UNIT_BYTES = 16 << 20
# From here on it pays to copy on several threads.
_BULK_BYTES = 8 << 20
_REQUEST = Layout("<32sI")

Unit: TypeAlias = tuple[bytes, int]
"""A pack, and which run of it."""
Units: TypeAlias = list[tuple[bytes, list[tuple[int, int]]]]
"""For each pack, in order: which runs of it are wanted, and the bytes wanted of each."""


class Assignment(Struct, frozen=True, array_like=True, gc=False):
    """Who reads a unit, and in which window."""

    window: int
    reader: int


class Schedule(Struct, frozen=True, array_like=True):
    """Who reads what is passed on.

    Attributes:
        windows: How many windows there are.
        units: For each pack, the runs of it that are passed on; all others are read by whoever
            wants them.
    """

    windows: int
    units: list[tuple[bytes, dict[int, Assignment]]]


class _Copy(NamedTuple):
    """Where a chunk goes for another rank, and what says that it is there."""

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
        wants: What this rank wants, each with its length; may be nothing.
        how: How this rank reads.
        window: About how many bytes a rank receives at once, the same on all ranks. Twice its
            share of that it keeps of what it reads for others.

    Raises:
        DamagedError: Some chunks are missing or damaged, everywhere; all others were handed over.
            It is raised on all ranks.
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

    Few, since the memory is fresh each time, but enough for many ranks to read at once.
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
        # What has not been handed over yet.
        self._left: dict[Digest, list[Want]] = {}
        for want in wants:
            self._left.setdefault(want.digest, []).append(want)
        self._slots: list[Slot] = []

    def fetch_the_rest(self) -> DamagedError | None:
        """Read what did not come, alone: our index may be stale, or the chunks may be damaged."""
        try:
            self._objects.fetch((w for wants in self._left.values() for w in wants), self._how)
        except DamagedError as e:
            return e
        return None

    def run(self, window: int) -> None:
        """Read together whatever can be."""
        # A rank reads so much for a window that all that it receives fits.
        share = max(window // self._comm.size, self._objects.config.chunk_size)
        by_unit = self._by_unit(min(share, _UNIT_BYTES))
        schedule = self._agree(by_unit, share, window)
        asking, alone = self._sorted_out(by_unit, schedule)
        if not schedule.windows:
            self._read(alone, {}, {})
            return
        asked = self._requests(asking)
        most = max(sum(map(_room, set(lists))) for lists in asked)
        self._slots = [Slot(most) for _ in range(min(2, schedule.windows))] if most else []
        incoming = max(self._incoming(lists) for lists in asking)
        room = Slot(incoming).view if incoming else None
        with Crew() as crew:
            parts: list[Sequence[memoryview | bytes]] = []

            def read(i: int) -> None:
                own = alone[
                    i * len(alone) // schedule.windows : (i + 1) * len(alone) // schedule.windows
                ]
                own += asking[i][self._comm.rank]
                parts.append(self._read_for_all(own, asked[i], i))

            reading = crew.start(partial(read, 0))
            for i in range(schedule.windows):
                crew.join(reading)
                if i + 1 < schedule.windows:
                    reading = crew.start(partial(read, i + 1))
                came = self._comm.all_to_all(parts.pop(0), room, proven=True)
                self._receive(came, asking[i])

    # --- who reads what ---

    def _by_unit(self, nbytes: int) -> dict[Unit, list[Digest]]:
        """Return the chunks to read by the units that they lie in, in order."""
        digests = list(self._left)
        places = self._objects.index.find(self._objects.view(), digests)
        by_unit: dict[Unit, list[Digest]] = {}
        for digest, place in zip(digests, places, strict=True):
            if place is not None:
                by_unit.setdefault((place.pack, place.offset // nbytes), []).append(digest)
        return dict(sorted(by_unit.items()))

    def _agree(self, by_unit: dict[Unit, list[Digest]], share: int, window: int) -> Schedule:
        """Agree on who reads what; ranks that want the same units say so once."""
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
                (speakers[rank], msgspec.msgpack.decode(text, type=Units))
                for rank, text in enumerate(lists)
                if text
            ]
            schedule = encode(schedule_reads(wanted, self._comm.size, share, window))
        return msgspec.msgpack.decode(self._comm.broadcast(schedule), type=Schedule)

    def _nbytes(self, digest: Digest) -> int:
        return self._left[digest][0].nbytes

    def _sorted_out(
        self, by_unit: dict[Unit, list[Digest]], schedule: Schedule
    ) -> tuple[list[list[list[Digest]]], list[Digest]]:
        """Return what to ask for, by window and reader, and what to read alone."""
        turns = {(pack, n): turn for pack, runs in schedule.units for n, turn in runs.items()}
        asking: list[list[list[Digest]]] = [
            [[] for _ in range(self._comm.size)] for _ in range(schedule.windows)
        ]
        alone: list[Digest] = []
        for unit, digests in by_unit.items():
            turn = turns.get(unit)
            (alone if turn is None else asking[turn.window][turn.reader]).extend(digests)
        for lists in asking:
            for digests in lists:
                # Who wants the same asks for it in the same words.
                digests.sort()
        return asking, alone

    def _requests(self, asking: list[list[list[Digest]]]) -> list[list[bytes]]:
        """Tell all readers what to read; return what we are asked for, by window and rank."""
        mine = [
            encode([self._request(lists[reader]) for lists in asking])
            for reader in range(self._comm.size)
        ]
        mine[self._comm.rank] = encode([b""] * len(asking))
        # Most ranks ask for the same.
        equal: dict[bytes, bytes] = {}
        came = [
            [
                equal.setdefault(text, text)
                for text in msgspec.msgpack.decode(texts, type=list[bytes])
            ]
            for texts in self._comm.all_to_all(mine)
        ]
        return [list(lists) for lists in zip(*came, strict=True)]

    def _request(self, digests: list[Digest]) -> bytes:
        return b"".join(_REQUEST.pack(digest, self._nbytes(digest)) for digest in digests)

    # --- reading ---

    def _read_for_all(
        self, own: list[Digest], asked: list[bytes], number: int
    ) -> list[memoryview | bytes]:
        """Read a window; return what each rank is to be sent."""
        copies: defaultdict[Digest, list[_Copy]] = defaultdict(list)
        sizes: dict[Digest, int] = {}
        parts: dict[bytes, memoryview | bytes] = {b"": b""}
        start = 0
        for text in sorted(set(asked) - {b""}):
            part = self._slots[number % 2].view[start : start + _room(text)]
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
        return [parts[text] for text in asked]

    def _read(
        self,
        own: list[Digest],
        copies: Mapping[Digest, list[_Copy]],
        sizes: Mapping[Digest, int],
    ) -> None:
        """Read chunks, for this rank and for copies; what is damaged is left out."""
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
        # Whoever wants them finds out that they did not come.
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
        theirs = (d for reader, ds in enumerate(lists) if reader != self._comm.rank for d in ds)
        return sum(self._nbytes(digest) + 1 for digest in theirs)

    def _receive(self, came: list[memoryview], asking: list[list[Digest]]) -> None:
        """Prove what other ranks have read, laid out as we asked for it, and hand it over.

        What does not fit its digest is left to be read alone.
        """
        chunks: list[tuple[Digest, memoryview]] = []
        for reader, digests in enumerate(asking):
            if reader == self._comm.rank or not digests:
                continue
            there = came[reader][len(came[reader]) - len(digests) :]
            at = 0
            for i, digest in enumerate(digests):
                nbytes = self._nbytes(digest)
                if there[i]:
                    chunks.append((digest, came[reader][at : at + nbytes]))
                at += nbytes
        threads = min(cores(), 4) if sum(len(raw) for _, raw in chunks) >= _BULK_BYTES else 1
        with Crew() as crew:
            source = Shared(chunks, crew)

            def work() -> None:
                for digest, raw in source:
                    if digest_of(raw) == digest:
                        self._hand_over(digest, True, (), raw)
                    else:
                        _log.warning(
                            "chunk %s came damaged from another rank and is read anew: a network "
                            "card or some memory may be at fault",
                            digest.hex(),
                        )

            crew.start(work, threads - 1)
            work()


def _room(text: bytes) -> int:
    """Return how many bytes the answer to a request has: the chunks, and which are there."""
    return sum(nbytes + 1 for _, nbytes in _REQUEST.iter_unpack(text))


# --- who reads what ---------------------------------------------------------------------------


def schedule_reads(
    wanted: Sequence[tuple[list[int], Units]], size: int, share: int, window: int
) -> Schedule:
    """Say who reads what is wanted by several ranks, and in which window.

    Args:
        wanted: Some ranks, each time with what each of them wants; different lists for different
            ranks.
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
    # Those with the smallest choice choose first.
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
        turn = Assignment(windows.place(readers[unit], by_unit[unit]), readers[unit])
        schedule[unit[0]][unit[1]] = turn
    return Schedule(windows.count, list(schedule.items()))


def _least_loaded(heap: list[tuple[int, int]], load: list[int]) -> int:
    """Return the rank with the least load, of some that are in a heap by an earlier load."""
    while load[heap[0][1]] != heap[0][0]:
        heapreplace(heap, (load[heap[0][1]], heap[0][1]))
    return heap[0][1]


class _Windows:
    """Puts units into windows, in order, so that no rank reads or receives too much in one.

    Attributes:
        count: How many windows there are so far.
    """

    def __init__(self, readers: int, share: int, lists: int, window: int) -> None:
        self.count = 0
        self._lists = readers
        # Of each reader, then of each list: its last window, what is in there, what may be.
        self._last = [0] * (readers + lists)
        self._filled = [0] * (readers + lists)
        self._bounds = [share] * readers + [window] * lists

    def place(self, reader: int, lists: list[tuple[int, int]]) -> int:
        """Return a window for a unit that some lists name, each with its bytes."""
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
