"""Probes of a server: one for each ability of the server that casnap uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from casnap.backends.remote.backend import RemoteBackend
from casnap.backends.remote.client import ObjectFacts
from casnap.diagnosis.report import DoctorRow, clock_row, time_text
from casnap.diagnosis.site import Site
from casnap.errors import UnavailableError
from casnap.storage import PutIfAbsent

_REQUESTS = 5
_SLOW_REQUEST = 0.5
# How many seconds a probe may repeat its requests.
_SOME = 4.0


def put_if_absent(site: Site) -> DoctorRow:
    """Race several writers for one key: exactly one may put it."""
    name, backend = "put-if-absent", site.backend
    # Race only if the server refuses the second of two puts without a race.
    puts = PutIfAbsent(backend)
    refuses = backend.can_put_if_absent and puts.has_one_winner(2, threads=1)
    if refuses and all(puts.has_one_winner(8, threads=4) for _ in site.tries(4, _SOME)):
        return DoctorRow(name, "a key is put once, also if eight writers try at once")
    return DoctorRow(name, "is not honoured", "bad", str(puts.error()))


def rules(site: Site) -> DoctorRow:
    """Read the rules of the bucket, such as versioning, that can hurt a store."""
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
    """Measure how long it takes to put and get small objects."""
    seconds = []
    for number in site.tries(_REQUESTS, _SOME):
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


def clocks(site: Site) -> DoctorRow | None:
    """Compare the server's clock with this host's, by the time stamp of a new object."""
    begun = time.time()
    at = _told(site, "clock").put_at
    return None if at is None else clock_row("the server", at, begun)


def encryption(site: Site) -> DoctorRow | None:
    """Find out how the server encrypts new objects."""
    found = _told(site, "encrypted").encryption
    if found is None:
        return None
    if found:
        return DoctorRow("encryption", found)
    return DoctorRow(
        "encryption",
        "the server does not say that it encrypts objects",
        "fair",
        "give the bucket a default encryption, if what it keeps is secret",
    )


def _told(site: Site, name: str) -> ObjectFacts:
    """Put an object; return the facts that the server reports about it, such as encryption."""
    if not isinstance(site.backend, RemoteBackend):
        return ObjectFacts()
    site.backend.write(key := f"{site.key}/{name}", b"1")
    return site.backend.facts_of(key)


PROBES: list[tuple[str, Callable[[Site], DoctorRow | None]]] = [
    ("put-if-absent", put_if_absent),
    ("rules of the bucket", rules),
    ("requests", requests),
    ("clocks", clocks),
    ("encryption", encryption),
]
