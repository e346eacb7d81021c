"""What a server can do: one probe for each thing that casnap uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from casnap.diagnosis.report import DoctorRow, time_text
from casnap.diagnosis.site import Site
from casnap.errors import UnavailableError
from casnap.storage import has_one_winner, no_put_if_absent_error

_REQUESTS = 5
_SLOW_REQUEST = 0.5


def put_if_absent(site: Site) -> DoctorRow:
    """Race several requests for one key, where the server can be asked at all."""
    name, backend = "put-if-absent", site.backend
    # A race is only for servers that refuse a second put.
    refuses = backend.can_put_if_absent and has_one_winner(backend, 2, threads=1)
    if refuses and all(has_one_winner(backend, 8, threads=4) for _ in range(4)):
        return DoctorRow(name, "a key is put once, also if eight writers try at once")
    return DoctorRow(name, "is not honoured", "bad", str(no_put_if_absent_error(backend)))


def rules(site: Site) -> DoctorRow:
    """Look at what the bucket does by itself."""
    name = "rules of the bucket"
    try:
        warnings = site.backend.bucket_warnings()
    except UnavailableError as e:
        if e.reason != "denied":
            raise
        return DoctorRow(name, "may not be looked at", "unknown", str(e))
    if warnings:
        return DoctorRow(name, "can hurt a store", "fair", "; ".join(warnings))
    return DoctorRow(name, "none that could hurt a store")


def requests(site: Site) -> DoctorRow:
    """Put and get small objects."""
    seconds = []
    for number in range(_REQUESTS):
        started = time.monotonic()
        site.backend.write(f"{site.key}/small-{number}", bytes(1024))
        put = time.monotonic()
        site.backend.read(f"{site.key}/small-{number}")
        seconds.append((put - started, time.monotonic() - put))
    puts, gets = (statistics.median(column) for column in zip(*seconds, strict=True))
    found = f"{time_text(puts)} to put a small object, {time_text(gets)} to get it"
    if max(puts, gets) < _SLOW_REQUEST:
        return DoctorRow("requests", found)
    return DoctorRow("requests", found, "fair", "a bucket in the region of the hosts is faster")


PROBES: list[tuple[str, Callable[[Site], DoctorRow]]] = [
    ("put-if-absent", put_if_absent),
    ("rules of the bucket", rules),
    ("requests", requests),
]
