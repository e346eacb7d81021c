"""Measure the speed of a place: for packs, as casnap handles them, and for one plain file."""

from __future__ import annotations

import os
import time

from casnap.diagnosis.report import DoctorRow
from casnap.diagnosis.site import Site
from casnap.runtime.buffers import Slot
from casnap.runtime.descriptors import opened
from casnap.runtime.sizes import size
from casnap.runtime.threads import mapped

# How many packs are written at once, as a take does.
_WRITERS = 3
_LEAST, _MOST, _RUN = 1 << 18, 48 << 20, 1 << 20
# At most this fraction of the free space is written: one part in 16. The amount grows until a
# measurement takes enough seconds.
_SHARE = 16
_ENOUGH_SECONDS = 0.7
_SLOW = 100e6
_PIECE = 8 << 20


def speed_rows(site: Site) -> list[DoctorRow]:
    """Write and read packs, and one plain file if the place is a folder; return the rows."""
    free = site.backend.free_bytes()
    most = _MOST if free is None else max(_LEAST, min(_MOST, free // _SHARE // _WRITERS))
    slots = [Slot(most) for _ in range(_WRITERS)]
    written, read, nbytes = _grown(site, [slot.view for slot in slots], most)
    plain: tuple[float | None, float | None] = (None, None)
    # Also measure a plain file, if the time left is enough at the speed of packs.
    if site.backend.folder is not None and site.left > nbytes / written + nbytes / read:
        plain = _plain_file(site, slots[0].view, nbytes)
    return [_row("write speed", written, plain[0]), _row("read speed", read, plain[1])]


def _row(name: str, speed: float, plain: float | None) -> DoctorRow:
    found = f"{size(speed)}/s by casnap, in {_WRITERS} packs at once"
    if plain is not None:
        found += f"; {size(plain)}/s in one plain file"
    if speed >= _SLOW:
        return DoctorRow(name, found)
    return DoctorRow(
        name,
        found,
        "fair",
        "have the store on a faster disk, and its mirror here: Store(..., mirror=)",
    )


def _grown(site: Site, views: list[memoryview], most: int) -> tuple[float, float, int]:
    """Measure with more and more bytes, until a measurement takes long enough to be exact.

    Args:
        site: The site.
        views: Buffers of bytes to write.
        most: The most bytes to write.

    Returns:
        The speeds of writing and of reading, in bytes per second; and how many bytes it took.
    """
    nbytes = min(_LEAST, most)
    while True:
        packs = [view[:nbytes] for view in views]
        for pack in packs:
            _fill(pack)
        writing, reading = _packs(site, packs)
        lasted = writing + reading
        # The next measurement may take four times as long, and a plain file as long again.
        if nbytes == most or lasted > _ENOUGH_SECONDS or 8 * lasted > site.left:
            total = _WRITERS * nbytes
            return total / writing, total / reading, total
        nbytes = min(4 * nbytes, most)


def _fill(view: memoryview) -> None:
    """Fill a buffer with blocks that differ, since some file systems store equal blocks once."""
    random = os.urandom(_RUN)
    for start in range(0, len(view), _RUN):
        view[start : start + _RUN] = random[: len(view) - start]
        view[start : start + 16] = os.urandom(16)


def _packs(site: Site, views: list[memoryview]) -> tuple[float, float]:
    """Write objects and read them back; return the seconds of writing and of reading."""
    backend = site.backend
    keys = {f"{site.key}/pack-{os.urandom(6).hex()}": view for view in views}
    try:
        started = time.monotonic()
        list(mapped(lambda key: backend.write(key, keys[key]), keys, _WRITERS))
        backend.sync()
        writing = time.monotonic() - started
        if backend.folder is not None:
            for key in keys:
                _forget(backend.where(key))
        started = time.monotonic()
        list(mapped(lambda key: backend.read_into(key, [(0, keys[key])]), keys, _WRITERS))
        return writing, time.monotonic() - started
    finally:
        backend.delete_all(keys)


def _plain_file(site: Site, view: memoryview, nbytes: int) -> tuple[float, float]:
    """Write one file as any program does, and read it; return both speeds in bytes per second.

    Args:
        site: The site.
        view: The bytes to write, again and again.
        nbytes: The length of the file.
    """
    path = site.path("plain")
    pieces = [view[: min(_PIECE, nbytes - start, len(view))] for start in range(0, nbytes, _PIECE)]
    started = time.monotonic()
    with path.open("wb", buffering=0) as file:
        done = sum(file.write(piece) for piece in pieces)
        os.fsync(file.fileno())
    writing = time.monotonic() - started
    _forget(str(path))
    started = time.monotonic()
    with path.open("rb", buffering=0) as file:
        while file.readinto(view[:_PIECE]):
            pass
    reading = time.monotonic() - started
    path.unlink()
    return done / writing, done / reading


def _forget(path: str) -> None:
    """Remove a synced file from the page cache."""
    with opened(path, os.O_RDONLY | os.O_CLOEXEC) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
