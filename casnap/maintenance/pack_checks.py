"""Check packs: read each chunk and node in them, and compare it with its digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from casnap.format.codec import KNOWN_CODECS, Codec
from casnap.format.delta import base_of
from casnap.format.digest import Digest
from casnap.format.records import (
    DeltaPlace,
    Place,
    Record,
)
from casnap.storage import Repository, Want
from casnap.storage.inspecting import Failure, Reason, is_possible

_WINDOW_BYTES = 128 << 20
_WINDOW_RECORDS = 1 << 15


def bad_records(
    store: Repository,
    records: Iterable[Record],
    report: Callable[[int], None],
    tell_base: Callable[[Record, Digest], None] = lambda record, base: None,
) -> Iterator[tuple[Record, Failure]]:
    """Read chunks and nodes; yield each that is not whole, and why.

    Chunks of a codec that this version does not know are skipped.

    Args:
        store: The store.
        records: The chunks and nodes, and their places.
        report: Called with the number of bytes read since the last call.
        tell_base: Called, from any thread, with each delta whose real base differs from the one in
            its record, and with the real base.
    """
    window: list[tuple[Place, list[Want]]] = []
    nbytes = 0
    for digest, place in records:
        is_delta = isinstance(place, DeltaPlace)
        compare = partial(_compare_base, (digest, place), tell_base) if is_delta else None
        window.append((place, [Want(digest, -1, _forget, "", as_delta=compare)]))
        nbytes += place.stored_size
        if nbytes >= _WINDOW_BYTES or len(window) >= _WINDOW_RECORDS:
            yield from _bad_of(store, window)
            report(nbytes)
            window, nbytes = [], 0
    yield from _bad_of(store, window)
    report(nbytes)


def _bad_of(
    store: Repository, window: list[tuple[Place, list[Want]]]
) -> Iterator[tuple[Record, Failure]]:
    for place, wants, _ in store.read_places(window):
        # Read each alone: one unreadable chunk makes a read with its neighbours fail.
        for unread in store.read_places([(place, wants)]):
            if unread.failure.reason is not Reason.UNSUPPORTED:
                yield (wants[0].digest, place), unread.failure


def _forget(_raw: memoryview) -> None:
    """Do nothing: a sink for chunks that only have to be verified."""


def _compare_base(
    record: Record,
    tell_base: Callable[[Record, Digest], None],
    stored_form: memoryview,
    _raw: memoryview,
) -> None:
    place, base = record[1], base_of(stored_form)
    if isinstance(place, DeltaPlace) and place.base != base:
        tell_base(record, base)


def can_lie_at(place: Place) -> bool:
    """Whether a place from the index is possible. Call this before taking memory for its bytes."""
    if place.codec == Codec.RAW and place.raw_size != place.stored_size:
        return False
    return is_possible(place)


def is_known(place: Place) -> bool:
    """Whether this version knows the form in which a chunk is stored at a place."""
    return place.codec in KNOWN_CODECS
