"""How fast a place is: as casnap writes and reads packs, beside one plain file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from casnap.diagnosis.report import DoctorRow
from casnap.diagnosis.site import Site
from casnap.runtime.buffers import Slot
from casnap.runtime.descriptors import opened
from casnap.runtime.sizes import size
from casnap.runtime.threads import mapped

# As many packs at once as a take writes.
_WRITERS = 3
_LEAST, _MOST = 1 << 20, 48 << 20
# Of a free disk, so little is written; and a larger amount is tried until one takes so long.
_SHARE = 16
_ENOUGH_SECONDS = 0.7
_SLOW = 100e6
_PIECE = 8 << 20


def speed_rows(site: Site) -> list[DoctorRow]:
    """Write and read packs, and one plain file where the place is a folder."""
    free = site.backend.free_bytes()
    most = _MOST if free is None else max(_LEAST, min(_MOST, free // _SHARE // _WRITERS))
    slots = [Slot(most) for _ in range(_WRITERS)]
    random = os.urandom(_LEAST)
    for slot in slots:
        for start in range(0, most, _LEAST):
            # No two runs are the same: some file systems compress, or store the same once.
            number = os.urandom(16)
            slot.view[start : start + _LEAST] = random[: most - start]
            slot.view[start : start + 16] = number
    views = [slot.view for slot in slots]
    written, read, nbytes = _grown(lambda n: _packs(site, [view[:n] for view in views]), most)
    rows = [("write speed", written), ("read speed", read)]
    if site.backend.folder is None:
        return [_row(name, speed, None) for name, speed in rows]
    plain = _plain_file(site, views[0], nbytes)
    return [_row(name, speed, beside) for (name, speed), beside in zip(rows, plain, strict=True)]


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


def _grown(measure: Callable[[int], tuple[float, float]], most: int) -> tuple[float, float, int]:
    """Measure with ever more bytes until it takes long enough; return the speeds and the bytes."""
    nbytes = min(_LEAST, most)
    while True:
        writing, reading = measure(nbytes)
        if nbytes == most or writing + reading > _ENOUGH_SECONDS:
            total = _WRITERS * nbytes
            return total / writing, total / reading, total
        nbytes = min(4 * nbytes, most)


def _packs(site: Site, views: list[memoryview]) -> tuple[float, float]:
    """Write objects and read them back; return how long each took, in seconds."""
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
    """Write one file as any program does, and read it; return the speeds, in bytes a second."""
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
    """Have the page cache forget a file that was synced."""
    with opened(path, os.O_RDONLY | os.O_CLOEXEC) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
