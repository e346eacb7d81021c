"""Reading neighbours in a pack together: places are joined into runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from casnap.backends import Backend
from casnap.format.records import ID_SIZE, MAX_NODE_BYTES, Place
from casnap.runtime.buffers import PAGE

T = TypeVar("T")
# To read over a gap takes less time than another read.
_GAP, _REMOTE_GAP = 64 << 10, 1 << 20
_MAX_OFFSET = 1 << 62


@dataclass
class PackRun(Generic[T]):
    """A run of bytes of a pack, and the chunks in it."""

    pack: bytes
    start: int
    stop: int
    chunks: list[tuple[Place, T]]


def gap_of(backend: Backend) -> int:
    """Return over how many bytes to read rather than read twice."""
    return _REMOTE_GAP if backend.is_remote else _GAP


def coalesced(found: list[tuple[Place, T]], most: int, gap: int) -> Iterator[PackRun[T]]:
    """Join places that are neighbours in a pack into runs of at most ``most`` bytes.

    Args:
        found: The places.
        most: The bytes of a run at most, and a page.
        gap: How many bytes between two places a run may have.
    """
    run: PackRun[T] | None = None
    for place, wants in sorted(found, key=lambda f: (f[0].pack, f[0].offset)):
        stop = place.offset + place.stored
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


def extents(run: PackRun[T], gap: int) -> Iterator[tuple[int, int]]:
    """Yield where the chunks of a run lie, start and length, joined over gaps of so many bytes."""
    start = stop = run.start
    for place, _ in run.chunks:
        if place.offset - stop > gap:
            yield start, stop - start
            start = place.offset
        stop = max(stop, place.offset + place.stored)
    yield start, stop - start


def is_possible(place: Place, limit: int = MAX_NODE_BYTES) -> bool:
    """Whether a place makes sense; ask before taking memory for what lies there."""
    sizes_fit = 0 <= place.stored <= limit and 0 <= place.raw <= limit
    return sizes_fit and 0 <= place.offset < _MAX_OFFSET and len(place.pack) == ID_SIZE
