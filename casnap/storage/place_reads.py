"""Reading chunks at their places: neighbours in a pack together, several packs at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeAlias

from casnap.backends.base import Backend, Target
from casnap.errors import BackendError, DamagedError, UnavailableError
from casnap.format.codec import Codec, decompress
from casnap.format.digest import Digest, digest_of
from casnap.format.records import MAX_NODE_BYTES, Place, pack_key
from casnap.runtime.buffers import PAGE, SLOT_BYTES, SLOTS, Slot, shared_pool, whole_pages
from casnap.runtime.threads import Crew, SharedItems, beside, cores
from casnap.storage.pack import Room
from casnap.storage.pack_runs import PackRun, coalesced, extents, gap_of, is_possible

_READ_BYTES = 16 << 20
_BULK_BYTES = 64 << 20
_SMALL_BYTES = 1 << 20
_SMALL_IN_ALL = 16 << 20
# At least so many bytes of a file are read by one thread, which opens it once.
_IN_PLACE_BYTES = 8 << 20
# A thread more for less than this makes reading no sooner.
_SHARE_BYTES = 4 << 20
# So many threads share a buffer, from a remote place: most of them wait.
_SHARING = 3
# Smaller chunks lie close together, so one read takes many of them.
_LARGE_BYTES = 64 << 10

Sink = Callable[[memoryview], None]
"""Called with the verified bytes of a chunk, from any thread. It must copy what it keeps."""


class Want(NamedTuple):
    """A chunk to read.

    Attributes:
        digest: Its digest.
        nbytes: Its raw length; -1 if it is not known.
        sink: What takes its bytes.
        path: The path that needs it.
        target: Memory that may be read into before the bytes are proven. The sink then gets this
            very object.
        is_node: Whether it is a node.
    """

    digest: Digest
    nbytes: int
    sink: Sink
    path: str
    target: memoryview | None = None
    is_node: bool = False


class ReadOptions(NamedTuple):
    """How to read chunks.

    Attributes:
        budget: The most bytes of buffers; at least one chunk is always read. None for no bound
            but that of the pool.
        prepare: Called with each buffer from the pool before it is used.
        readers: The most threads, each with a buffer of the pool. Lower it if the sinks take
            buffers too. 0: the calling thread reads, into a buffer of its own.
        keep: Called with what was whole: the pack, and runs of it, each with where it begins.
        room: Returns room for a run of so many bytes and chunks; None for none. Large raw chunks
            are read and kept there as they are, and then handed to their sinks; nodes are not.
    """

    budget: int | None = None
    prepare: Callable[[Slot], None] | None = None
    readers: int = SLOTS
    keep: Callable[[bytes, Sequence[Target]], None] | None = None
    room: Callable[[int, int], Room | None] | None = None


DEFAULT_READ = ReadOptions()
# For one chunk: the caller may hold buffers of the pool, and must not wait for another one.
WITHOUT_POOL = ReadOptions(readers=0)


_Laid: TypeAlias = tuple[Place, list[Want], memoryview]


class Reason(Enum):
    """Why a chunk cannot be read. The values are texts for messages."""

    NOWHERE = "it is in no pack of the index"
    MISSING = "its pack is missing"
    UNREADABLE = "its pack cannot be read"
    CUT_OFF = "its pack is cut off"
    IMPOSSIBLE = "the index gives it an impossible place"
    CHANGED = "its bytes differ from what was written"


class Why(NamedTuple):
    """Why a chunk cannot be read, with the words of the backend or the decoder, if any."""

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


class Unread(NamedTuple):
    """A place where a chunk could not be read, the wants for that chunk, and why it failed."""

    place: Place
    wants: list[Want]
    why: Why


def _readers(backend: Backend) -> int:
    """Return how many threads read: some wait for the disk, or a server, while all cores verify."""
    return SLOTS if backend.is_remote else min(cores() + 2, SLOTS)


def read_places(
    backend: Backend,
    chunk_size: int,
    places: list[tuple[Place, list[Want]]],
    how: ReadOptions = DEFAULT_READ,
) -> list[Unread]:
    """Read the chunks at these places; return the places that failed, and why."""
    found, failed = [], []
    for place, wants in places:
        if _plausible(place, wants[0], chunk_size):
            found.append((place, wants))
        else:
            failed.append(Unread(place, wants, Why(Reason.IMPOSSIBLE)))
    direct, rest = _divided(backend, found, how)
    in_place = partial(_read_in_place, backend, direct, how)
    if direct and rest and backend.is_remote and how.readers:
        # A few small chunks would take a round trip more after the others, or before.
        again, bad = beside(in_place, partial(_read_joined, backend, chunk_size, rest, how))
        return failed + bad + _read_joined(backend, chunk_size, again, how)
    return failed + _read_joined(backend, chunk_size, rest + in_place(), how)


def _read_joined(
    backend: Backend, chunk_size: int, found: list[tuple[Place, list[Want]]], how: ReadOptions
) -> list[Unread]:
    """Read chunks into buffers, neighbours together; return those that failed, and why."""
    failed: list[Unread] = []
    total = sum(place.stored for place, _ in found)
    largest = max((place.stored for place, _ in found), default=0)
    readers = _readers(backend)
    share = max(_SMALL_BYTES, total // readers)
    unit = min(_READ_BYTES, share, _READ_BYTES if how.budget is None else how.budget)
    reads = list(coalesced(found, max(largest + 2 * PAGE, unit), gap_of(backend)))
    most = whole_pages(max((read.stop - read.start for read in reads), default=0) + PAGE)
    if total <= _SMALL_BYTES or how.readers == 0:
        return _read_small(backend, reads, most, how)
    pool = shared_pool(max(most, chunk_size + (64 << 10)))
    affordable = SLOTS if how.budget is None else max(1, how.budget // most)
    with Crew() as crew:
        source = SharedItems(reads, crew)

        def read_into(buffer: memoryview) -> None:
            for read in source:
                failed.extend(_read_run(backend, read, buffer, how))

        def work() -> None:
            # A thread that has ended keeps no slot, since other reads may wait for one.
            with pool.lease() as slot:
                if how.prepare is not None:
                    how.prepare(slot)
                if how.budget is not None or not backend.is_remote:
                    read_into(slot.view)
                    return
                parts = [slot.view[at:][:most] for at in range(0, pool.slot_bytes - most + 1, most)]
                parts = parts[:_SHARING]
                crew.run(lambda: read_into(parts.pop()), len(parts))

        crew.run(work, min(len(reads), readers, affordable, how.readers))
    return failed


def _divided(
    backend: Backend, found: list[tuple[Place, list[Want]]], how: ReadOptions
) -> tuple[list[tuple[Place, list[Want]]], list[tuple[Place, list[Want]]]]:
    """Return the chunks that are read straight into the memory that wants them, and the others."""
    direct: list[tuple[Place, list[Want]]] = []
    rest: list[tuple[Place, list[Want]]] = []
    for place, wants in found:
        large = place.codec == Codec.RAW and place.raw >= _LARGE_BYTES
        in_room = how.room is not None and not wants[0].is_node
        has_place = in_room or _target(wants) is not None
        (direct if large and has_place else rest).append((place, wants))
    return direct, rest


def _read_in_place(
    backend: Backend, direct: list[tuple[Place, list[Want]]], how: ReadOptions
) -> list[tuple[Place, list[Want]]]:
    """Read straight into the memory that wants the chunks, and prove them there.

    Returns:
        Those that failed: read again into a buffer, a chunk shows whether it is damaged, or the
        memory was written to meanwhile.
    """
    total = sum(place.stored for place, _ in direct)
    if backend.is_remote:
        least, readers = _SMALL_BYTES, backend.in_flight
    else:
        readers = min(_readers(backend), how.readers, total // _SHARE_BYTES)
        least = _IN_PLACE_BYTES if readers > 1 else SLOT_BYTES
    # Of up to a whole pack: by several requests, or in the order of the file, which the kernel then
    # reads ahead, in large pages.
    most = min(SLOT_BYTES, max(least, total // SLOTS))
    # A file is read chunk by chunk, so a run of it may have any gaps.
    gap = gap_of(backend) if backend.is_remote else most
    if how.room is not None:
        gap = PAGE  # what lies in a gap would be kept, in room for all
    runs = list(coalesced(direct, most + PAGE, gap))
    failed: list[tuple[Place, list[Want]]] = []
    with Crew() as crew:
        source = SharedItems(enumerate(runs), crew)

        def work() -> None:
            for number, run in source:
                # What lies behind a gap the kernel does not read ahead by itself.
                for later in runs[number + bool(number) : number + 2]:
                    parts = list(extents(later, gap_of(backend)))
                    if len(parts) > 1:
                        backend.will_read(pack_key(later.pack), parts)
                failed.extend(_fill(backend, run, how))

        if len(runs) < 2 or readers < 2:
            work()
        else:
            crew.run(work, min(len(runs), readers))
    return failed


def _target(wants: list[Want]) -> memoryview | None:
    """Return the memory that a chunk can be read into."""
    return next((want.target for want in wants if want.target is not None), None)


def _fill(
    backend: Backend, run: PackRun[list[Want]], how: ReadOptions
) -> list[tuple[Place, list[Want]]]:
    """Read a run of chunks into their places; return those that are not whole there."""
    room = None
    if how.room is not None:
        room = how.room(run.stop - run.start, len(run.chunks))
        if room is None:
            return run.chunks
    chunks, failed = _laid_out(run, room)
    whole: dict[int, _Laid] = {}
    keeping = _Keeping(run.pack, how)

    def prove(number: int) -> None:
        place, wants, target = chunks[number]
        if place.raw == len(target) and digest_of(target) == wants[0].digest:
            whole[number] = chunks[number]
            keeping.add(place.offset, target)

    try:
        # Hashed at once: while the core has it in its cache, or a server sends the others.
        backend.filled(pack_key(run.pack), [(p.offset, t) for p, _, t in chunks], prove)
        keeping.keep()
    except UnavailableError:
        raise
    except (FileNotFoundError, BackendError):
        pass  # Read into a buffer, those that failed show why.
    finally:
        if room is not None:
            found = whole.values()
            room.keep([(w[0].digest, p.offset - run.start, p.raw) for p, w, _ in found])
    for _, wants, target in whole.values():
        for want in wants:
            want.sink(target)
    return failed + [chunk[:2] for number, chunk in enumerate(chunks) if number not in whole]


class _Keeping:
    """Has whole chunks of a pack kept, several at a time, while others are on their way."""

    def __init__(self, pack: bytes, how: ReadOptions) -> None:
        self._pack = pack
        self._how = how
        self._chunks: list[Target] = []
        self._nbytes = 0

    def add(self, offset: int, chunk: memoryview) -> None:
        if self._how.keep is None:
            return
        self._chunks.append((offset, chunk))
        self._nbytes += len(chunk)
        if self._nbytes >= _READ_BYTES:
            self.keep()

    def keep(self) -> None:
        if self._how.keep is not None and self._chunks:
            self._how.keep(self._pack, self._chunks)
        self._chunks, self._nbytes = [], 0


def _laid_out(
    run: PackRun[list[Want]], room: Room | None
) -> tuple[list[_Laid], list[tuple[Place, list[Want]]]]:
    """Return the chunks of a run with the memory that each is read into; and those without any."""
    laid: list[_Laid] = []
    without: list[tuple[Place, list[Want]]] = []
    end = 0
    for place, wants in run.chunks:
        begin = place.offset - run.start
        target = _target(wants) if room is None else room.view[begin : begin + place.raw]
        assert target is not None
        if room is None or begin >= end:
            laid.append((place, wants, target))
            end = begin + place.raw
        else:
            # Reading it would change what was proven of the one before.
            without.append((place, wants))
    return laid, without


def _read_small(
    backend: Backend, reads: list[PackRun[list[Want]]], most: int, how: ReadOptions
) -> list[Unread]:
    """Read without the pool: in the calling thread, or on a remote store on a few threads."""
    failed: list[Unread] = []

    def work() -> None:
        buffer = memoryview(bytearray(most))
        for read in source:
            failed.extend(_read_run(backend, read, buffer, how))

    with Crew() as crew:
        source: Iterable[PackRun[list[Want]]] = reads
        at_once = min(len(reads), backend.in_flight, _SMALL_IN_ALL // most)
        if not backend.is_remote or at_once < 2:
            work()
        else:
            source = SharedItems(reads, crew)
            crew.run(work, at_once)
    return failed


def _read_run(
    backend: Backend, read: PackRun[list[Want]], buffer: memoryview, how: ReadOptions
) -> list[Unread]:
    target = buffer[: whole_pages(read.stop - read.start)]
    try:
        [n] = backend.read_into(pack_key(read.pack), [(read.start, target)])
    except FileNotFoundError:
        return [Unread(*chunk, Why(Reason.MISSING)) for chunk in read.chunks]
    except UnavailableError:
        raise
    except BackendError as e:
        return [Unread(*chunk, Why(Reason.UNREADABLE, str(e))) for chunk in read.chunks]
    failed = []
    for place, wants in read.chunks:
        start = place.offset - read.start
        stored = target[start : min(start + place.stored, n)]
        raw = _proven(wants[0].digest, place, stored)
        if isinstance(raw, Why):
            failed.append(Unread(place, wants, raw))
            continue
        for want in wants:
            want.sink(raw)
    if how.keep is not None and not failed:
        how.keep(read.pack, [(read.start, target[:n])])
    return failed


def _plausible(place: Place, want: Want, chunk_size: int) -> bool:
    """Whether a place fits the wanted length. Checked before memory is taken for it."""
    limit = chunk_size if want.nbytes >= 0 else MAX_NODE_BYTES
    return (want.nbytes in (-1, place.raw)) and is_possible(place, max(limit, 1 << 16))


def _proven(digest: Digest, place: Place, stored: memoryview) -> memoryview | Why:
    """Return the raw bytes if they have this digest, else why not."""
    if len(stored) != place.stored:
        return Why(Reason.CUT_OFF)
    try:
        raw = decompress(place.codec, stored, place.raw)
    except DamagedError as e:
        return Why(Reason.CHANGED, str(e))
    intact = len(raw) == place.raw and digest_of(raw) == digest
    return raw if intact else Why(Reason.CHANGED)
