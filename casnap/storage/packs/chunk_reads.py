"""Reading chunks at their places: neighbours in a pack together, several packs at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from casnap.backends.base import Backend, Target
from casnap.errors import BackendError, DamagedError
from casnap.format.codec import KNOWN_CODECS, Codec, decompress
from casnap.format.digest import Digest, digest_of
from casnap.format.records import ID_SIZE, MAX_NODE_BYTES, Place, pack_key
from casnap.runtime.buffers import PAGE, SLOT_BYTES, SLOTS, Slot, shared_pool, whole_pages
from casnap.runtime.threads import Crew, SharedItems, cores, run_both

if TYPE_CHECKING:
    from casnap.storage.packs.pack_writer import Room

_READ_BYTES = 16 << 20
_SMALL_BYTES = 1 << 20
_SMALL_IN_ALL = 16 << 20
# At least so many bytes of a file are read by one thread, which opens it once.
_IN_PLACE_BYTES = 8 << 20
# A thread more for less than this makes reading no sooner.
_SHARE_BYTES = 4 << 20
# Smaller chunks lie close together, so one read takes many of them.
_LARGE_BYTES = 64 << 10
_MAX_OFFSET = 1 << 62

Sink = Callable[[memoryview], None]
"""Called with the verified bytes of a chunk, from any thread. It must copy what it keeps."""
Fill = Callable[[memoryview], bool]
"""Fills memory with a chunk that the caller has; returns False if it has not as many bytes."""
FindBase = Callable[[Digest], "Fill | None"]
"""Returns what reads a chunk that the caller has; None for one that it has not."""


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
        is_stored: Whether the sink takes the bytes as they are stored, which nothing proves.
        as_delta: Called instead of the sink if the chunk is stored as a delta, with its stored
            bytes, and the chunk, which was verified.
    """

    digest: Digest
    nbytes: int
    sink: Sink
    path: str
    target: memoryview | None = None
    is_node: bool = False
    is_stored: bool = False
    as_delta: Callable[[memoryview, memoryview], None] | None = None


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
        base: Finds chunks that the caller has, for deltas upon them. Their bytes need not be
            verified: the chunk that comes of them is.
    """

    budget: int | None = None
    prepare: Callable[[Slot], object] | None = None
    readers: int = SLOTS
    keep: Callable[[bytes, Sequence[Target]], None] = lambda pack, runs: None
    room: Callable[[int, int], Room | None] | None = None
    base: FindBase = lambda digest: None


DEFAULT_READ = ReadOptions()
# For one chunk: the caller may hold buffers of the pool, and must not wait for another one.
WITHOUT_POOL = ReadOptions(readers=0)


Located: TypeAlias = tuple[Place, list[Want]]
"""Where a chunk lies, and who wants it."""
_Laid: TypeAlias = tuple[Place, list[Want], memoryview]


class Reason(Enum):
    """Why a chunk cannot be read. The values are texts for messages."""

    NOWHERE = "it is in no pack of the index"
    MISSING = "its pack is missing"
    UNREADABLE = "its pack cannot be read"
    CUT_OFF = "its pack is cut off"
    IMPOSSIBLE = "the index gives it an impossible place"
    UNSUPPORTED = "it is stored in a form that this casnap does not know"
    CHANGED = "its bytes differ from what was written"


class Failure(NamedTuple):
    """Why a chunk cannot be read, with the words of the backend or the decoder, if any."""

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


def unsupported(place: Place) -> Failure:
    """Return why a chunk cannot be read that may be whole."""
    return Failure(Reason.UNSUPPORTED, f"codec {place.codec}")


class FailedRead(NamedTuple):
    """A place where a chunk could not be read, the wants for that chunk, and why it failed."""

    place: Place
    wants: list[Want]
    failure: Failure


def _readers(backend: Backend) -> int:
    """Return how many threads read: some wait for the disk, or a server, while all cores verify."""
    return min(cores() + 2, SLOTS) if backend.has_page_cache else SLOTS


def read_places(
    backend: Backend,
    chunk_size: int,
    places: list[Located],
    options: ReadOptions = DEFAULT_READ,
) -> list[FailedRead]:
    """Read the chunks at these places; return the places that failed, and why."""
    wanted_places, failures = [], []
    for place, wants in places:
        if place.codec not in KNOWN_CODECS:
            failures.append(FailedRead(place, wants, unsupported(place)))
        elif _is_plausible(place, wants[0], chunk_size):
            wanted_places.append((place, wants))
        else:
            failures.append(FailedRead(place, wants, Failure(Reason.IMPOSSIBLE)))
    direct, joined = _split_direct(backend, wanted_places, options)
    read_direct = partial(_read_in_place, backend, direct, options)
    if direct and joined and backend.costly_requests and options.readers:
        # A few small chunks would take a round trip more after the others, or before.
        read_joined = partial(_read_joined, backend, chunk_size, joined, options)
        retried, bad = run_both(read_direct, read_joined)
        return failures + bad + _read_joined(backend, chunk_size, retried, options)
    return failures + _read_joined(backend, chunk_size, joined + read_direct(), options)


def _read_joined(
    backend: Backend, chunk_size: int, wanted_places: list[Located], options: ReadOptions
) -> list[FailedRead]:
    """Read chunks into buffers, neighbours together; return those that failed, and why."""
    failures: list[FailedRead] = []
    total = sum(place.stored_size for place, _ in wanted_places)
    largest = max((place.stored_size for place, _ in wanted_places), default=0)
    readers = _readers(backend)
    share = max(_SMALL_BYTES, total // readers)
    unit = min(_READ_BYTES, share, _READ_BYTES if options.budget is None else options.budget)
    reads = list(coalesce(wanted_places, max(largest + 2 * PAGE, unit), backend.costs.gap))
    most = whole_pages(max((run.stop - run.start for run in reads), default=0) + PAGE)
    if not reads:
        return []
    is_small = total <= _SMALL_BYTES or options.readers == 0
    if is_small:
        at_once = min(backend.in_flight, _SMALL_IN_ALL // most)
    else:
        pool = shared_pool(max(most, chunk_size + (64 << 10)))
        at_once = min(
            readers, options.readers, SLOTS if options.budget is None else options.budget // most
        )
    with Crew() as crew:
        source = SharedItems(reads, crew)

        def read_into(buffer: memoryview) -> None:
            for run in source:
                failures.extend(_read_and_verify(backend, run, buffer, options))

        def work() -> None:
            if is_small:
                read_into(memoryview(bytearray(most)))
                return
            # A thread that has ended keeps no slot, since other reads may wait for one.
            with pool.lease() as slot:
                if options.prepare is not None:
                    options.prepare(slot)
                sharing = 1 if options.budget is not None else backend.costs.sharing
                if sharing == 1:
                    read_into(slot.view)
                    return
                parts = [slot.view[at:][:most] for at in range(0, pool.slot_bytes - most + 1, most)]
                parts = parts[:sharing]
                crew.run(lambda: read_into(parts.pop()), len(parts))

        at_once = max(1, min(at_once, len(reads)))
        if is_small and at_once == 1:
            work()
        else:
            crew.run(work, at_once)
    return failures


def _split_direct(
    backend: Backend, wanted_places: list[Located], options: ReadOptions
) -> tuple[list[Located], list[Located]]:
    """Return the chunks that are read straight into the memory that wants them, and the others."""
    in_place: list[Located] = []
    others: list[Located] = []
    for place, wants in wanted_places:
        large = place.codec == Codec.RAW and place.raw_size >= _LARGE_BYTES
        in_room = options.room is not None and not wants[0].is_node
        has_place = in_room or _target(wants) is not None
        (in_place if large and has_place else others).append((place, wants))
    return in_place, others


def _read_in_place(
    backend: Backend, in_place: list[Located], options: ReadOptions
) -> list[Located]:
    """Read straight into the memory that wants the chunks, and prove them there.

    Returns:
        Those that failed: read again into a buffer, a chunk shows whether it is damaged, or the
        memory was written to meanwhile.
    """
    total = sum(place.stored_size for place, _ in in_place)
    if backend.costly_requests:
        least, readers = _SMALL_BYTES, backend.in_flight
    else:
        readers = min(_readers(backend), options.readers, total // _SHARE_BYTES)
        least = _IN_PLACE_BYTES if readers > 1 else SLOT_BYTES
    # Of up to a whole pack: by several requests, or in the order of the file, which the kernel then
    # reads ahead, in large pages.
    most = min(SLOT_BYTES, max(least, total // SLOTS))
    # A file is read chunk by chunk, so a run of it may have any gaps.
    gap = most if backend.has_page_cache else backend.costs.gap
    if options.room is not None:
        gap = PAGE  # what lies in a gap would be kept, in room for all
    runs = list(coalesce(in_place, most + PAGE, gap))
    failures: list[Located] = []
    with Crew() as crew:
        source = SharedItems(enumerate(runs), crew)

        def work() -> None:
            for number, run in source:
                # What lies behind a gap the kernel does not read ahead by itself.
                for later in runs[number + bool(number) : number + 2]:
                    parts = list(data_extents(later, backend.costs.gap))
                    if len(parts) > 1:
                        backend.will_read(pack_key(later.pack), parts)
                failures.extend(_fill_in_place(backend, run, options))

        if len(runs) < 2 or readers < 2:
            work()
        else:
            crew.run(work, min(len(runs), readers))
    return failures


def _target(wants: list[Want]) -> memoryview | None:
    """Return the memory that a chunk can be read into."""
    return next((want.target for want in wants if want.target is not None), None)


def _fill_in_place(backend: Backend, run: PackRun, options: ReadOptions) -> list[Located]:
    """Read a run of chunks into their places; return those that are not whole there."""
    room = None
    if options.room is not None:
        room = options.room(run.stop - run.start, len(run.chunks))
        if room is None:
            return run.chunks
    chunks, failures = _lay_out(run, room)
    verified: dict[int, _Laid] = {}

    def prove(number: int) -> None:
        place, wants, target = chunks[number]
        if place.raw_size == len(target) and digest_of(target) == wants[0].digest:
            verified[number] = chunks[number]

    try:
        # Hashed at once: while the core has it in its cache, or a server sends the others.
        backend.filled(pack_key(run.pack), [(p.offset, t) for p, _, t in chunks], prove)
    except (FileNotFoundError, BackendError):
        pass  # Read into a buffer, those that failed show why.
    finally:
        options.keep(run.pack, [(place.offset, target) for place, _, target in verified.values()])
        if room is not None:
            wanted_places = verified.values()
            room.keep(
                [(w[0].digest, p.offset - run.start, p.raw_size) for p, w, _ in wanted_places]
            )
    for _, wants, target in verified.values():
        for want in wants:
            want.sink(target)
    return failures + [chunk[:2] for number, chunk in enumerate(chunks) if number not in verified]


def _lay_out(run: PackRun, room: Room | None) -> tuple[list[_Laid], list[Located]]:
    """Return the chunks of a run with the memory that each is read into; and those without any."""
    laid: list[_Laid] = []
    without: list[Located] = []
    end = 0
    for place, wants in run.chunks:
        begin = place.offset - run.start
        target = _target(wants) if room is None else room.view[begin : begin + place.raw_size]
        assert target is not None
        if room is None or begin >= end:
            laid.append((place, wants, target))
            end = begin + place.raw_size
        else:
            # Reading it would change what was proven of the one before.
            without.append((place, wants))
    return laid, without


def _read_and_verify(
    backend: Backend, run: PackRun, buffer: memoryview, options: ReadOptions
) -> list[FailedRead]:
    """Read a run into a buffer, and hand over its chunks; return those that failed, and why."""
    target = buffer[: whole_pages(run.stop - run.start)]
    try:
        [n] = backend.read_into(pack_key(run.pack), [(run.start, target)])
    except FileNotFoundError:
        return [FailedRead(*chunk, Failure(Reason.MISSING)) for chunk in run.chunks]
    except BackendError as e:
        return [FailedRead(*chunk, Failure(Reason.UNREADABLE, str(e))) for chunk in run.chunks]
    failures = []
    for place, wants in run.chunks:
        start = place.offset - run.start
        stored_form = target[start : min(start + place.stored_size, n)]
        raw = _verify(wants[0], place, stored_form)
        if isinstance(raw, Failure):
            failures.append(FailedRead(place, wants, raw))
            continue
        for want in wants:
            want.sink(raw)
    if not failures:
        options.keep(run.pack, [(run.start, target[:n])])
    return failures


def _is_plausible(place: Place, want: Want, chunk_size: int) -> bool:
    """Whether a place fits the wanted length. Checked before memory is taken for it."""
    limit = chunk_size if want.nbytes >= 0 else MAX_NODE_BYTES
    return (want.nbytes in (-1, place.raw_size)) and is_possible(place, max(limit, 1 << 16))


def _verify(want: Want, place: Place, stored_form: memoryview) -> memoryview | Failure:
    """Return the raw bytes if they have the wanted digest, else why not."""
    if len(stored_form) != place.stored_size:
        return Failure(Reason.CUT_OFF)
    if want.is_stored:
        return stored_form
    try:
        raw = decompress(place.codec, stored_form, place.raw_size)
    except DamagedError as e:
        return Failure(Reason.CHANGED, str(e))
    intact = len(raw) == place.raw_size and digest_of(raw) == want.digest
    return raw if intact else Failure(Reason.CHANGED)


# --- runs of neighbours in a pack ---


@dataclass
class PackRun:
    """A run of bytes of a pack, and the chunks in it."""

    pack: bytes
    start: int
    stop: int
    chunks: list[Located]


def coalesce(places: list[Located], most: int, gap: int) -> Iterator[PackRun]:
    """Join places that are neighbours in a pack into runs of at most ``most`` bytes.

    Args:
        places: The places.
        most: The bytes of a run at most, and a page.
        gap: How many bytes between two places a run may have.
    """
    run: PackRun | None = None
    for place, wants in sorted(places, key=lambda each: (each[0].pack, each[0].offset)):
        stop = place.offset + place.stored_size
        if (
            run is not None
            and run.pack == place.pack
            and place.offset - run.stop <= gap
            and stop - run.start <= most - PAGE
        ):
            run.stop = max(run.stop, stop)
            run.chunks.append((place, wants))
            continue
        if run is not None:
            yield run
        # It begins on a page: a cache of chunks keeps whole pages.
        run = PackRun(place.pack, place.offset // PAGE * PAGE, stop, [(place, wants)])
    if run is not None:
        yield run


def data_extents(run: PackRun, gap: int) -> Iterator[tuple[int, int]]:
    """Yield where the chunks of a run lie, start and length, joined over gaps of so many bytes."""
    start = stop = run.start
    for place, _ in run.chunks:
        if place.offset - stop > gap:
            yield start, stop - start
            start = place.offset
        stop = max(stop, place.offset + place.stored_size)
    yield start, stop - start


def is_possible(place: Place, limit: int = MAX_NODE_BYTES) -> bool:
    """Whether a place makes sense; ask before taking memory for what lies there."""
    sizes_fit = 0 <= place.stored_size <= limit and 0 <= place.raw_size <= limit
    return sizes_fit and 0 <= place.offset < _MAX_OFFSET and len(place.pack) == ID_SIZE
