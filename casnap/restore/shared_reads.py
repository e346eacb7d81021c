"""Shared reads: one rank reads each stored byte for all ranks that want it.

The ranks of a host find a chunk in memory that they share. The rank that read the chunk has
verified it there, and no other rank writes there. Ranks of other hosts get the chunk by sockets,
and verify it again, since it may have changed on its way.

Rank 0 gathers which runs of packs the ranks want, and makes a schedule of windows
(:mod:`casnap.restore.shared_schedule`). While the chunks of one window are passed on, the chunks of
the next one are read. A chunk that only one rank wants is not passed on. So a restore to the same
sharding as in the take passes on next to nothing.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from heapq import nsmallest
from itertools import groupby
from operator import itemgetter
from struct import Struct as Layout
from typing import NamedTuple, TypeAlias

from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.decoding import decoder, unpacked
from casnap.format.digest import Digest, digest_of
from casnap.format.records import encode
from casnap.ranks.comm import Comm
from casnap.ranks.failures import error_text
from casnap.ranks.shared_memory import not_shared
from casnap.restore.shared_schedule import Schedule, Unit, request_of, run_of, schedule_reads
from casnap.runtime import buffers
from casnap.runtime.buffers import PAGE, Slot
from casnap.runtime.threads import Crew, SharedItems, cores
from casnap.storage import (
    ReadOptions,
    Repository,
    Want,
)

_log = logging.getLogger("casnap")
_LEAST_WINDOW, _LARGEST_WINDOW = 64 << 20, 256 << 20
_WINDOW_PER_RANK = 4 << 20
_UNIT_BYTES = 16 << 20
# The bytes that a chunk takes in a buffer besides its own: space before it, and entries of tables.
_EXTRA = 128
# While one buffer is filled, another one is sent; and ranks may still read in a third one.
_BUFFERS = 3
# From this size on, several threads copy faster than one.
_BULK_BYTES = 8 << 20
# If several ranks want less than this in common, agreeing on the readers costs more than it saves.
# A sample tells how much it is: up to _SAMPLES chunks, each by _SAMPLED bytes of its digest.
_WORTH_SHARING, _SAMPLES, _SAMPLED = 96 << 20, 64, 8
# If on average no more ranks than this want a byte, each reads for itself. A rank that gets a chunk
# from another one neither reads nor hashes it, but copies it, and the ranks wait for each other.
_READ_ALONE = 3
_REQUEST = Layout("<32sI")
# The length of an entry in a table of chunks' positions, and the alignment of these chunks.
_POINTER, _ALIGNED = 8, 64


class _Copy(NamedTuple):
    """A place in this rank's buffer for a chunk that other ranks want.

    Attributes:
        target: The memory of the chunk.
        position: The offset of this memory in the buffer that the other ranks see.
        entries: Where to write ``position`` once the chunk has been read: tables, each with an
            index.
    """

    target: memoryview
    position: int
    entries: list[tuple[memoryview, int]]


_Copies: TypeAlias = defaultdict[Digest, list[_Copy]]


def fetch_shared(
    comm: Comm,
    store: Repository,
    wants: Iterable[Want],
    options: ReadOptions,
    *,
    window: int | None = None,
    only_in_memory: bool = False,
) -> None:
    """Read chunks as :meth:`Repository.fetch` does, but on all ranks together.

    Args:
        comm: The ranks; all call this.
        store: Where to read from.
        wants: The chunks that this rank wants, each with its length; may be empty.
        options: How this rank reads.
        window: About how many bytes a rank receives at once, the same on all ranks. A rank also
            keeps three to six times its share of a window in buffers for other ranks.
        only_in_memory: Whether to share reads only if all ranks share memory, and many of the
            chunks are wanted by several ranks. Otherwise each rank reads for itself.

    Raises:
        DamagedError: Some chunks are missing, or damaged wherever they lie. All other chunks were
            passed to their sinks. The error is raised on all ranks.
        UnsupportedFormatError: Some chunks are stored in a form that this version does not know.
            The error is raised on all ranks.
    """
    if comm.size == 1:
        store.fetch(wants, options)
        return
    passing = _SharedFetch(comm, store, wants, options)
    passing.run((window or window_for(comm.size)) // comm.largest_team, only_in_memory)
    error = passing.fetch_the_rest()
    is_damage = isinstance(error, DamagedError)
    told = b"%d%s" % (is_damage, error_text(error).text.encode()) if error else b""
    errors = comm.all_gather(told)
    if error is not None:
        raise error
    for rank, text in enumerate(map(bytes, errors)):
        if text:
            raise (DamagedError if text[:1] == b"1" else UnsupportedFormatError)(
                f"rank {rank}: {text[1:].decode()}"
            )


def window_for(ranks: int) -> int:
    """Return about how many bytes a rank receives at once.

    The number is small, since each fetch allocates that much memory. With many ranks it is larger,
    so that all of them can read at the same time.
    """
    return min(max(_LEAST_WINDOW, ranks * _WINDOW_PER_RANK), _LARGEST_WINDOW)


class _SharedFetch:
    """The work of one rank in :func:`fetch_shared`.

    The schedule names one reader for each chunk that several ranks want. The rank reads the chunks
    for which it is the reader, and passes them on to the ranks that want them. It gets the other
    chunks that it wants from their readers. It reads itself the chunks that no other rank wants.
    """

    def __init__(
        self, comm: Comm, store: Repository, wants: Iterable[Want], options: ReadOptions
    ) -> None:
        self._comm = comm
        self._store = store
        self._how = options
        # The wants that have not been handed over yet.
        self._left: dict[Digest, list[Want]] = {}
        for want in wants:
            self._left.setdefault(want.digest, []).append(want)
        # The buffers into which this rank reads for others, and which ranks can look into them.
        self._buffers: list[memoryview] = []
        self._shared = not_shared(0, comm.size)
        self._readers = self._shared.readers

    def fetch_the_rest(self) -> DamagedError | UnsupportedFormatError | None:
        """Read from the store the wanted chunks that have not arrived; return the error, if any."""
        try:
            self._store.fetch((w for wants in self._left.values() for w in wants), self._how)
        except (DamagedError, UnsupportedFormatError) as e:
            return e
        return None

    def run(self, window: int, only_in_memory: bool) -> None:
        """Read and pass on chunks as the schedule says; receive those that other ranks read.

        Chunks that the index does not have are left for :meth:`fetch_the_rest`.

        Args:
            window: About how many bytes a rank receives at once.
            only_in_memory: Whether to share reads only if all ranks see each other's memory, and
                sharing saves much. If it does not, this method reads nothing.
        """
        if only_in_memory and not self._is_worth_sharing():
            return
        size, chunk_size = self._comm.size, self._store.config.chunk_size
        # Each rank reads an equal share of a window, so that what a rank receives fits.
        share, unit = max(window // size, chunk_size), _UNIT_BYTES
        # Two shares: several ranks may want different chunks of one unit. Most stays untouched.
        self._shared = self._comm.share(_BUFFERS * (2 * share + self._room_for(PAGE)))
        if self._shared.by_all:
            # Each rank has its part of this memory, in which all ranks find the chunks it has read.
            window = min(window, _LEAST_WINDOW)
            share = max(window // size, chunk_size)
            if not self._store.backend.costs.waiting:
                # Small units are shared out more evenly. A rank asks a server for long runs: with
                # small units it would also get the units of other ranks in between.
                unit = chunk_size
        if only_in_memory and not (self._shared.by_all and share * size <= 2 * window):
            return
        by_unit = self._by_unit(min(share, unit), share)
        schedule, equal = self._agree(by_unit, share, window)
        if not schedule.windows:
            return
        requests, read_alone = self._split(by_unit, schedule)
        requested = self._requested(requests) if equal else self._exchange_requests(requests)
        self._make_buffers(requested)
        incoming = max(map(self._incoming, requests))
        room = Slot(incoming).view if incoming else None
        with Crew() as crew:
            parts: list[Sequence[memoryview | bytes]] = []

            def read(i: int) -> None:
                begin, end = (n * len(read_alone) // schedule.windows for n in (i, i + 1))
                digests = read_alone[begin:end]
                digests += requests[i][self._comm.rank]
                parts.append(self._read_for_all(digests, requested[i], i))

            reading = crew.start(partial(read, 0))
            for i in range(schedule.windows):
                crew.join(reading)
                if i + 1 < schedule.windows:
                    reading = crew.start(partial(read, i + 1))
                received = self._comm.all_to_all(parts.pop(0), room, is_proven=True)
                self._receive(i, received, requests[i])

    def _is_worth_sharing(self) -> bool:
        """Whether ranks of one page cache save time if they share reads; the same on all ranks.

        They do if many bytes would be read again, and enough ranks want each of them. Both are
        estimated from a sample.
        """
        least = self._store.config.chunk_size // 2
        large = [digest for digest in self._left if self._nbytes(digest) >= least]
        nbytes = sum(map(self._nbytes, large))
        # Digests are random, so the smallest ones are a sample, and the same one on all ranks.
        sample = b"".join(digest[:_SAMPLED] for digest in nsmallest(_SAMPLES, large))
        parts = self._comm.all_gather(nbytes.to_bytes(8, "big") + sample)
        total = sum(int.from_bytes(part[:8], "big") for part in parts)
        each = [
            [bytes(part[at : at + _SAMPLED]) for at in range(8, len(part), _SAMPLED)]
            for part in parts
        ]
        # A rank with more chunks than samples says nothing of digests beyond its last sample.
        end = min((s[-1] for s in each if len(s) == _SAMPLES), default=b"\xff" * _SAMPLED)
        sampled_digests = [digest for sampled in each for digest in sampled if digest <= end]
        wanted, distinct = len(sampled_digests), len(set(sampled_digests))
        return wanted > _READ_ALONE * distinct and total * (1 - distinct / wanted) >= _WORTH_SHARING

    def _room_for(self, nbytes: int) -> int:
        """Return the bytes of a buffer for ``nbytes`` of chunks, and a pointer for each rank."""
        return nbytes + _POINTER * self._comm.size

    def _make_buffers(self, requested: list[list[bytes]]) -> None:
        """Make the buffers into which this rank reads for others; in shared memory, if they fit.

        Args:
            requested: For each window, the request of each rank to this one.
        """
        self._readers = self._shared.readers
        # A buffer is written to again only when all ranks have taken in the window after its own.
        self._buffers = [_buffer(self._shared.own_memory, i) for i in range(_BUFFERS)]
        if max(map(self._room, requested)) > len(self._buffers[0]):
            self._readers = [False] * self._comm.size
            most = max(map(self._room, requested))
            # While one buffer is filled, the other one is sent.
            self._buffers = [Slot(most).view for _ in requested[:2]]

    def _room(self, requested: list[bytes]) -> int:
        """Return the most bytes that the chunks and tables for all requests of a window take.

        Args:
            requested: The request of each rank to this one in the window.
        """
        local, remote = self._texts(requested)
        return self._room_for(_nbytes_of(local)) + sum(_nbytes_of([text]) for text in remote)

    def _texts(self, requested: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Return the different requests of ranks that see this rank's memory, and of other ranks.

        Equal requests of several ranks are returned once.
        """
        each = [
            {t for t, reads in zip(requested, self._readers, strict=True) if t and reads == near}
            for near in (True, False)
        ]
        return sorted(each[0]), sorted(each[1])

    # --- which rank reads which bytes ---

    def _by_unit(self, nbytes: int, share: int) -> dict[Unit, list[Digest]]:
        """Group the chunks that this rank wants by unit: a run of a pack that is read at once.

        Args:
            nbytes: The most bytes of the pack in a unit.
            share: How many bytes a rank reads for others in a window. The chunks of a unit have at
                most about a quarter of that once decompressed.

        Returns:
            Unit → the digests of its chunks, in the order of units.
        """
        digests = list(self._left)
        places = self._store.find(digests)
        by_unit: dict[Unit, list[Digest]] = {}
        for digest, place in zip(digests, places, strict=True):
            if place is not None:
                run = run_of(place, nbytes, share // 4)
                by_unit.setdefault((place.pack, run), []).append(digest)
        return dict(sorted(by_unit.items()))

    def _agree(
        self, by_unit: dict[Unit, list[Digest]], share: int, window: int
    ) -> tuple[Schedule, bool]:
        """Agree with all ranks on which rank reads which units; all call this.

        If several ranks want the same units, one of them sends the list for all of them.

        Returns:
            The schedule, and whether all ranks want the same chunks.
        """
        units = [
            (pack, [(n, sum(self._nbytes(d) + _EXTRA for d in by_unit[pack, n])) for _, n in group])
            for pack, group in groupby(by_unit, key=itemgetter(0))
        ]
        listed = request_of(units)
        chunks = b"".join(self._request(digests) for digests in by_unit.values())
        digests_of_ranks = self._comm.all_gather(digest_of(listed)[:16] + digest_of(chunks)[:16])
        size, in_memory = self._comm.size, self._shared.by_all
        if len(set(map(bytes, digests_of_ranks))) == 1:
            of_all = [(list(range(size)), listed)]
            return schedule_reads(of_all, size, share, window, in_memory), True
        ranks_by_digest: defaultdict[bytes, list[int]] = defaultdict(list)
        for rank, digests in enumerate(digests_of_ranks):
            ranks_by_digest[bytes(digests[:16])].append(rank)
        speakers = {ranks[0]: ranks for ranks in ranks_by_digest.values()}
        lists = self._comm.gather(listed if self._comm.rank in speakers else b"")
        schedule = b""
        if self._comm.rank == 0:
            requests = [(speakers[rank], text) for rank, text in enumerate(lists) if text]
            schedule = encode(schedule_reads(requests, size, share, window, in_memory))
        return decoder(Schedule).decode(self._comm.broadcast(schedule)), False

    def _nbytes(self, digest: Digest) -> int:
        return self._left[digest][0].nbytes

    def _split(
        self, by_unit: dict[Unit, list[Digest]], schedule: Schedule
    ) -> tuple[list[list[list[Digest]]], list[Digest]]:
        """Split this rank's chunks by the schedule.

        Returns: For each window and each reader, the chunks to request from it; and the chunks that
        this rank reads for itself alone.
        """
        assignments = {
            (pack, n): assigned for pack, runs in schedule.units for n, assigned in runs.items()
        }
        requests: list[list[list[Digest]]] = [
            [[] for _ in range(self._comm.size)] for _ in range(schedule.windows)
        ]
        read_alone: list[Digest] = []
        for unit, digests in by_unit.items():
            assigned = assignments.get(unit)
            if assigned is None:
                read_alone += digests
            else:
                requests[assigned.window][assigned.reader] += digests
        for lists in requests:
            for digests in lists:
                # Ranks that want the same chunks send equal requests.
                digests.sort()
        return requests, read_alone

    def _requested(self, requests: list[list[list[Digest]]]) -> list[list[bytes]]:
        """Return the requests to this rank, by window and rank, without an exchange of messages.

        Call this only if all ranks want the same chunks: every request then equals this rank's own.

        Args:
            requests: For each window and each reader, the chunks that this rank requests from it.
        """
        rank, size = self._comm.rank, self._comm.size
        each = [self._request(lists[rank]) for lists in requests]
        return [[b"" if reader == rank else text for reader in range(size)] for text in each]

    def _exchange_requests(self, requests: list[list[list[Digest]]]) -> list[list[bytes]]:
        """Send this rank's requests to all readers; return the requests to this rank.

        Args:
            requests: For each window and each reader, the chunks that this rank requests from it.

        Returns:
            The requests to this rank, by window and rank.
        """
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
        self, digests: list[Digest], requested: list[bytes], number: int
    ) -> list[memoryview | bytes]:
        """Read the chunks of a window, for this rank and for others.

        Args:
            digests: The chunks that this rank itself wants.
            requested: The request of each rank to this one.
            number: The number of the window.

        Returns:
            The bytes to send to each rank; none to a rank that sees this rank's memory.
        """
        buffer = self._buffers[number % len(self._buffers)]
        local, remote = self._texts(requested)
        copies: _Copies = defaultdict(list)
        parts: dict[bytes, memoryview | bytes] = {b"": b""}
        end = self._room_for(0)
        if local:
            tables, end = _lay_out(buffer, end, local, copies)
            begins = buffer[: self._room_for(0)].cast("Q")
            for rank, text in enumerate(requested):
                begins[rank] = tables.get(text, 0)
        for text in remote:
            part = buffer[end : end + _nbytes_of([text])]
            _lay_out(part, 0, [text], copies)
            parts[text] = part
            end += len(part)
        self._read_chunks(digests, copies)
        return [
            b"" if reads else parts[text]
            for text, reads in zip(requested, self._readers, strict=True)
        ]

    def _read_chunks(self, digests: list[Digest], copies: Mapping[Digest, list[_Copy]]) -> None:
        """Read chunks for this rank and others. Damaged chunks are left out, without an error.

        Args:
            digests: The chunks that this rank itself wants.
            copies: Digest → the places for other ranks' copies.
        """
        mine = set(digests)
        wants = []
        for digest in [*digests, *(copies.keys() - mine)]:
            theirs = copies.get(digest, ())
            target = theirs[0].target if theirs else self._left[digest][0].target
            nbytes = len(theirs[0].target) if theirs else self._nbytes(digest)
            sink = partial(self._hand_over, digest, digest in mine, theirs)
            wants.append(Want(digest, nbytes, sink, "", target))
        # A rank that wants a damaged chunk notices that it did not arrive.
        with suppress(DamagedError):
            self._store.fetch(wants, self._how)

    def _hand_over(
        self, digest: Digest, is_own: bool, copies: Iterable[_Copy], raw: memoryview
    ) -> None:
        for target, position, entries in copies:
            if len(target) != len(raw):
                continue
            if raw is not target:
                buffers.copy(target, raw)
            for table, i in entries:
                table[i] = position
        if is_own:
            for want in self._left[digest]:
                want.sink(raw)
            del self._left[digest]

    # --- receiving ---

    def _incoming(self, lists: list[list[Digest]]) -> int:
        """Return the most bytes that ranks of other hosts send to this one in a window.

        Args:
            lists: For each reader, the chunks that this rank requests from it.
        """
        return sum(
            _nbytes_of([self._request(digests)])
            for reader, digests in enumerate(lists)
            if reader != self._comm.rank and self._shared.theirs[reader] is None
        )

    def _receive(
        self, number: int, received: list[memoryview], requests: list[list[Digest]]
    ) -> None:
        """Pass the chunks of a window that other ranks have read to the sinks of this rank.

        A chunk in the memory of another rank of this host was verified by that rank, which alone
        writes there. A chunk that came in a message is verified here. If it does not have its
        digest, this rank reads it again.

        Args:
            number: The number of the window.
            received: The message of each rank; empty if this rank sees the sender's memory.
            requests: For each reader, the chunks that this rank requested from it.
        """
        chunks: list[tuple[Digest, memoryview, bool]] = []
        for reader, digests in enumerate(requests):
            if reader == self._comm.rank or not digests:
                continue
            content, begin = received[reader], 0
            memory = self._shared.theirs[reader]
            if not len(content) and memory is not None:
                memory = _buffer(memory, number)
                begin = memory[: self._room_for(0)].cast("Q")[self._comm.rank]
            else:
                memory = content
            table = memory[begin : begin + _POINTER * len(digests)].cast("Q")
            for digest, position in zip(digests, table, strict=True):
                raw = memory[position : position + self._nbytes(digest)]
                if position and len(raw) == self._nbytes(digest):
                    chunks.append((digest, raw, not len(content)))
        threads = (
            max(1, min(cores() // self._comm.neighbours, 4))
            if sum(len(raw) for _, raw, _ in chunks) >= _BULK_BYTES
            else 1
        )
        with Crew() as crew:
            source = SharedItems(chunks, crew)

            def work() -> None:
                for digest, raw, is_proven in source:
                    if is_proven or digest_of(raw) == digest:
                        self._hand_over(digest, True, (), raw)
                    else:
                        _log.warning(
                            "chunk %s came damaged from another rank and is read again: a network "
                            "card or some memory may be faulty",
                            digest.hex(),
                        )

            crew.start(work, threads - 1)
            work()


def _buffer(shared: memoryview, number: int) -> memoryview:
    """Return the part of a rank's shared memory that it uses for the window ``number``."""
    room = len(shared) // _BUFFERS // PAGE * PAGE
    return shared[number % _BUFFERS * room :][:room]


def _nbytes_of(texts: Iterable[bytes]) -> int:
    """Return the most bytes of the requested chunks, each once, and of the tables of positions."""
    chunks: set[tuple[bytes, int]] = {c for text in texts for c in unpacked(_REQUEST, text)}
    tables = sum(len(text) // _REQUEST.size * _POINTER for text in texts)
    return tables + sum(nbytes + _ALIGNED for _, nbytes in chunks)


def _lay_out(
    memory: memoryview, begin: int, texts: Iterable[bytes], copies: _Copies
) -> tuple[dict[bytes, int], int]:
    """Lay out a buffer: first a table of positions for each request, then the requested chunks.

    Args:
        memory: The buffer.
        begin: The offset at which to begin.
        texts: The requests.
        copies: Gets digest → the places for its chunk.

    Returns:
        Request → the offset of its table; and the offset at which the last chunk ends.
    """
    end, begins = begin, dict[bytes, int]()
    for text in texts:
        begins[text] = end
        end += len(text) // _REQUEST.size * _POINTER
    memory[begin:end] = bytes(end - begin)
    places: dict[tuple[bytes, int], _Copy] = {}
    for text, at in begins.items():
        table = memory[at : at + len(text) // _REQUEST.size * _POINTER].cast("Q")
        for i, (digest, nbytes) in enumerate(unpacked(_REQUEST, text)):
            if (digest, nbytes) not in places:
                end += -end % _ALIGNED
                places[digest, nbytes] = _Copy(memory[end : end + nbytes], end, [])
                copies[digest].append(places[digest, nbytes])
                end += nbytes
            places[digest, nbytes].entries.append((table, i))
    return begins, end
