"""Read chunks at their places: neighbours in a pack together, and several packs at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from msgspec import Struct

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
# The least bytes of a file that one thread reads, with one opening.
_IN_PLACE_BYTES = 8 << 20
# One more thread for fewer bytes than this saves no time.
_SHARE_BYTES = 4 << 20
# Chunks of fewer bytes lie close together, so one read takes many of them.
_LARGE_BYTES = 64 << 10
_MAX_OFFSET = 1 << 62

Sink = Callable[[memoryview], None]
"""Called with the verified bytes of a chunk, from any thread. It must copy the bytes it keeps."""
Fill = Callable[[memoryview], bool]
"""Fills memory with a chunk that the caller has; returns False if the chunk has another length."""
FindBase = Callable[[Digest], "Fill | None"]
"""Returns a function that reads a chunk which the caller has; None if the caller lacks it."""
ReadAgain = Callable[[set[Digest]], set[Digest]]
"""Reads chunks once more, and verifies each before its sinks get it; returns the damaged ones."""
Settle = Callable[["Sequence[Want]", ReadAgain], None]
"""Verifies chunks that lie on devices, given all wants for them, and has the others read again."""


class Want(Struct, frozen=True):
    """A chunk that a caller wants to read.

    Attributes:
        digest: The digest of the chunk.
        nbytes: The raw length of the chunk; -1 if it is not known.
        sink: Called with the verified bytes.
        path: The path of the entry that needs the chunk, for messages.
        target: Memory into which the chunk may be read straight, and verified there. If it was, the
            sink is called with this very object.
        on_device: Memory of a device, as a tensor, which the sink fills with the chunk and nothing
            else. The sink may then get unverified bytes, which ``ReadOptions.settle`` verifies
            there.
        is_node: Whether the chunk is a tree node.
        is_stored: Whether the sink wants the stored bytes, which are not verified.
        as_delta: If given, it is called instead of the sink when the chunk is stored as a delta.
            Its arguments are the stored bytes of the delta, and the verified bytes of the chunk.
    """

    digest: Digest
    nbytes: int
    sink: Sink
    path: str
    target: memoryview | None = None
    on_device: Any = None
    is_node: bool = False
    is_stored: bool = False
    as_delta: Callable[[memoryview, memoryview], None] | None = None


class ReadOptions(NamedTuple):
    """How to read chunks.

    Attributes:
        budget: The most bytes of buffers. One chunk is always read, however long it is. None: the
            pool of buffers is the only bound.
        prepare: Called with each buffer of the pool before its use.
        readers: The most threads, each with a buffer of the pool. Lower this number if the sinks
            take buffers too. With 0, the calling thread reads into a buffer of its own.
        keep: Called with the id of a pack, and with verified runs of its bytes, each with its
            offset in the pack.
        room: For a caller that copies chunks into new packs. It is called with the number of bytes
            and of chunks of a run, and returns memory in a new pack, or None. Large raw chunks of
            the run are read straight into this memory; nodes are not.
        base: Returns a chunk that the caller has, to be used as the base of a delta. Its bytes need
            not be verified, because the resulting chunk is verified.
        settle: Verifies chunks where they lie on devices, after their sinks have got them. None:
            each chunk is verified here, before its sink gets it. It must be None if ``keep`` is
            given.
    """

    budget: int | None = None
    prepare: Callable[[Slot], object] | None = None
    readers: int = SLOTS
    keep: Callable[[bytes, Sequence[Target]], None] = lambda pack, runs: None
    room: Callable[[int, int], Room | None] | None = None
    base: FindBase = lambda digest: None
    settle: Settle | None = None


DEFAULT_READ = ReadOptions()
# For a single chunk: its caller may hold buffers of the pool, and must not wait for another.
WITHOUT_POOL = ReadOptions(readers=0)


Located: TypeAlias = tuple[Place, list[Want]]
"""The place of a chunk, and the ``Want`` objects for it."""
_Laid: TypeAlias = tuple[Place, list[Want], memoryview]


class Reason(Enum):
    """The reason why a chunk cannot be read. The values are texts for messages."""

    NOWHERE = "it is in no pack of the index"
    MISSING = "its pack is missing"
    UNREADABLE = "its pack cannot be read"
    CUT_OFF = "its pack is cut off"
    IMPOSSIBLE = "the index gives it an impossible place"
    UNSUPPORTED = "it is stored in a form that this casnap does not know"
    CHANGED = "its bytes differ from what was written"


class Failure(NamedTuple):
    """A failure to read a chunk.

    Attributes:
        reason: The reason.
        detail: The message of the backend or the decoder; "" if there is none.
    """

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        """Return the reason and the detail in words."""
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


def unsupported(place: Place) -> Failure:
    """Return the failure to read a chunk with an unknown codec. The chunk itself may be whole."""
    return Failure(Reason.UNSUPPORTED, f"codec {place.codec}")


class FailedRead(NamedTuple):
    """A failed read of a chunk: the place, the ``Want`` objects for the chunk, and the failure."""

    place: Place
    wants: list[Want]
    failure: Failure


def _readers(backend: Backend) -> int:
    """Return how many threads should read.

    On a disk, there are more threads than cores: some wait for the disk while others verify.
    """
    return min(cores() + 2, SLOTS) if backend.has_page_cache else SLOTS


def read_places(
    backend: Backend,
    chunk_size: int,
    places: list[Located],
    options: ReadOptions = DEFAULT_READ,
) -> list[FailedRead]:
    """Read and verify chunks at places, and pass them to their sinks.

    Args:
        backend: The backend of the store.
        chunk_size: The chunk size of the store.
        places: The places, each with the ``Want`` objects for its chunk.
        options: How to read.

    Returns:
        The failed reads.
    """
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
    if direct and joined and backend.costs.waiting and options.readers:
        # Read both kinds at once: one after the other would take one more round trip.
        read_joined = partial(_read_joined, backend, chunk_size, joined, options)
        retried, bad = run_both(read_direct, read_joined)
        return failures + bad + _read_joined(backend, chunk_size, retried, options)
    return failures + _read_joined(backend, chunk_size, joined + read_direct(), options)


def _read_joined(
    backend: Backend, chunk_size: int, wanted_places: list[Located], options: ReadOptions
) -> list[FailedRead]:
    """Read chunks into buffers, and verify them here or on devices; return the failed reads."""
    landed: list[Located] = []
    failures = _read_runs(backend, chunk_size, wanted_places, options, landed)
    if landed and options.settle is not None:
        verified_here = options._replace(settle=None)

        def read_again(digests: set[Digest]) -> set[Digest]:
            again = [each for each in landed if each[1][0].digest in digests]
            failed = _read_joined(backend, chunk_size, again, verified_here)
            failures.extend(failed)
            return {unread.wants[0].digest for unread in failed}

        options.settle([want for _, wants in landed for want in wants], read_again)
    return failures


def _read_runs(
    backend: Backend,
    chunk_size: int,
    wanted_places: list[Located],
    options: ReadOptions,
    landed: list[Located],
) -> list[FailedRead]:
    """Read chunks into buffers, those near each other together; return the failed reads.

    Args:
        backend: The backend of the store.
        chunk_size: The chunk size of the store.
        wanted_places: The places, each with the wants for its chunk.
        options: How to read.
        landed: Gets the chunks that were passed on unverified, for ``options.settle``.
    """
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
        options = options._replace(settle=None)
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
                failures.extend(_read_and_verify(backend, run, buffer, options, landed))

        def work() -> None:
            if is_small:
                read_into(memoryview(bytearray(most)))
                return
            # A thread frees its slot when it ends, since other reads may wait for one.
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


def _may_land(place: Place, wants: list[Want]) -> bool:
    """Whether a chunk may be verified on devices, after all its sinks have got it."""
    is_whole = place.stored_size == place.raw_size
    return is_whole and _is_large_raw(place) and all(want.on_device is not None for want in wants)


def _is_large_raw(place: Place) -> bool:
    return place.codec == Codec.RAW and place.raw_size >= _LARGE_BYTES


def _split_direct(
    backend: Backend, wanted_places: list[Located], options: ReadOptions
) -> tuple[list[Located], list[Located]]:
    """Split chunks into those that can be read straight into their final memory, and the others."""
    in_place: list[Located] = []
    others: list[Located] = []
    for place, wants in wanted_places:
        in_room = options.room is not None and not wants[0].is_node
        has_place = in_room or _target(wants) is not None
        (in_place if _is_large_raw(place) and has_place else others).append((place, wants))
    return in_place, others


def _read_in_place(
    backend: Backend, in_place: list[Located], options: ReadOptions
) -> list[Located]:
    """Read chunks straight into their final memory, and verify them there.

    Returns:
        The chunks that failed. The caller reads them again, into a buffer. This shows whether a
        chunk is damaged, or another thread wrote to its memory.
    """
    total = sum(place.stored_size for place, _ in in_place)
    if backend.costs.waiting:
        least, readers = _SMALL_BYTES, backend.in_flight
    else:
        readers = min(_readers(backend), options.readers, total // _SHARE_BYTES)
        least = _IN_PLACE_BYTES if readers > 1 else SLOT_BYTES
    # A run may have up to a whole pack. A server gets several requests for it. A file is read in
    # its order, so that the kernel reads ahead, in large pages.
    most = min(SLOT_BYTES, max(least, total // SLOTS))
    # A file is read chunk by chunk, so gaps in a run cost nothing.
    gap = most if backend.has_page_cache else backend.costs.gap
    if options.room is not None:
        gap = PAGE  # the bytes of a gap would take up room in the new pack
    runs = list(coalesce(in_place, most + PAGE, gap))
    failures: list[Located] = []
    with Crew() as crew:
        source = SharedItems(enumerate(runs), crew)

        def work() -> None:
            for number, run in source:
                # The kernel does not read ahead over a gap by itself.
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
    """Return the ``target`` of one of the ``Want`` objects for a chunk; None if none has any."""
    return next((want.target for want in wants if want.target is not None), None)


def _fill_in_place(backend: Backend, run: PackRun, options: ReadOptions) -> list[Located]:
    """Read a run of chunks into their final memory; return the chunks that failed."""
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
        # Hash each chunk at once, while it is in the core's cache and a server sends the others.
        backend.filled(pack_key(run.pack), [(p.offset, t) for p, _, t in chunks], prove)
    except (FileNotFoundError, BackendError):
        pass  # the caller reads the failed chunks again into a buffer, which shows the reason
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
    """Assign to each chunk of a run the memory to read it into.

    Args:
        run: The run.
        room: Memory for the whole run; None to use the ``target`` of each chunk.

    Returns:
        The chunks, each with its memory; and the chunks that get no memory, since they overlap the
        chunk before them.
    """
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
            # It overlaps the chunk before: reading it would change verified bytes.
            without.append((place, wants))
    return laid, without


def _read_and_verify(
    backend: Backend,
    run: PackRun,
    buffer: memoryview,
    options: ReadOptions,
    landed: list[Located],
) -> list[FailedRead]:
    """Read a run of chunks into a buffer, and pass them to their sinks; return the failed reads.

    Args:
        backend: The backend of the store.
        run: The run.
        buffer: The buffer.
        options: How to read.
        landed: Gets the chunks that were passed on unverified, for ``options.settle``.
    """
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
        raw: memoryview | Failure
        if options.settle is not None and _may_land(place, wants) and start + place.raw_size <= n:
            raw = stored_form
            landed.append((place, wants))
        else:
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
    """Whether a wanted chunk can lie at a place. This is checked before memory is allocated."""
    limit = chunk_size if want.nbytes >= 0 else MAX_NODE_BYTES
    return (want.nbytes in (-1, place.raw_size)) and is_possible(place, max(limit, 1 << 16))


def _verify(want: Want, place: Place, stored_form: memoryview) -> memoryview | Failure:
    """Decode stored bytes, and verify them; return the raw bytes, or the failure."""
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
    """A run of bytes in a pack, and the chunks to read from it.

    Attributes:
        pack: The id of the pack.
        start: The offset of the first byte, which begins a page.
        stop: The offset after the last chunk.
        chunks: The places in the run, in the order of their offsets, each with the ``Want``
            objects for its chunk.
    """

    pack: bytes
    start: int
    stop: int
    chunks: list[Located]


def coalesce(places: list[Located], most: int, gap: int) -> Iterator[PackRun]:
    """Join places that are near each other in a pack into runs.

    Args:
        places: The places, each with the ``Want`` objects for its chunk.
        most: The most bytes of a run of several places. They are counted from the start of the
            page in which the run begins.
        gap: The most bytes between two successive places of a run.
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
        # A run begins on a page, since a cache of chunks keeps whole pages.
        run = PackRun(place.pack, place.offset // PAGE * PAGE, stop, [(place, wants)])
    if run is not None:
        yield run


def data_extents(run: PackRun, gap: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a run that contain chunks, as pairs of an offset and a length.

    Args:
        run: The run.
        gap: Parts with at most this many bytes between them are joined.
    """
    start = stop = run.start
    for place, _ in run.chunks:
        if place.offset - stop > gap:
            yield start, stop - start
            start = place.offset
        stop = max(stop, place.offset + place.stored_size)
    yield start, stop - start


def is_possible(place: Place, limit: int = MAX_NODE_BYTES) -> bool:
    """Whether offset and lengths of a place are within bounds. If not, the index is wrong.

    This is checked before memory is allocated for the chunk.

    Args:
        place: The place.
        limit: The most stored bytes, and the most raw bytes.
    """
    sizes_fit = 0 <= place.stored_size <= limit and 0 <= place.raw_size <= limit
    return sizes_fit and 0 <= place.offset < _MAX_OFFSET and len(place.pack) == ID_SIZE
