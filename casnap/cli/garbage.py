"""What becomes of bytes that no snapshot needs any more."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from casnap.cli.output import json_time, moment, say, size
from casnap.maintenance.automatic import automatic_collector
from casnap.maintenance.gc import DAY
from casnap.maintenance.usage import DiskUsage
from casnap.runtime.environment import collects_by_itself
from casnap.storage.log.roots import read_root
from casnap.storage.log.settings import collects_unasked, grace_of
from casnap.storage.reading.repository import Repository
from casnap.store import Store
from casnap.view import repository_of


def show_what_waits(place: Store) -> None:
    """Print, after a command has let snapshots go, what was freed, what waits, and for what."""
    repository = repository_of(place)
    collector = automatic_collector(repository)
    collector.wait()
    report = collector.last_report
    if report is None:
        say(what_frees(repository, "the bytes", condemned=False))
        return
    freed = f"{size(report.freed_bytes)} freed"
    if report.waiting_packs:
        waiting = what_frees(repository, size(report.waiting_bytes), condemned=True)
        say(f"{freed}; {waiting}" if report.freed_bytes else waiting)
    else:
        say(freed)


def what_frees(repository: Repository, waiting: str, *, condemned: bool) -> str:
    """Return what frees bytes that no snapshot needs.

    Args:
        repository: The store.
        waiting: How many.
        condemned: Whether a collection has condemned them.
    """
    root, backend = repository.newest(), repository.backend
    by_hand = f"`casnap gc {backend.uri} --grace 0`"
    if not collects_by_itself() or not collects_unasked(root):
        return f"{by_hand} frees {waiting}; no process does so by itself here"
    until = waiting_until(repository)
    if until is not None and condemned:
        event = f"a collection after {moment(until)}"
    elif not _has_grace(repository):
        event = "the next collection, by a process that lets snapshots go"
    else:
        grace = grace_of(root)
        hours = (DAY if grace is None else grace) / 3600
        event = f"a collection, and {hours:g} hours after it another one that frees them"
    return f"{waiting} wait for {event}; {by_hand} frees them now"


def disk_fields(repository: Repository, disk: DiskUsage) -> dict[str, Any]:
    """Return, for --json, what a store takes up, and what of that is garbage."""
    until = json_time(waiting_until(repository))
    return {"stored_bytes": disk.nbytes, **asdict(disk), "waiting_until_time": until}


def waiting_until(repository: Repository) -> float | None:
    """Return when the grace of all condemned packs is over, in seconds since the epoch.

    None if nothing is condemned, or if the next collection that a process begins by itself frees
    it.
    """
    root = repository.newest()
    if not root.condemned or not _has_grace(repository):
        return None
    grace = grace_of(root)
    condemned_at = read_root(repository.backend, max(root.condemned.values())).time
    return condemned_at + (DAY if grace is None else grace)


def _has_grace(repository: Repository) -> bool:
    """Whether processes that collect by themselves wait for a grace, or would if they did."""
    root = repository.newest()
    collects = collects_by_itself() and collects_unasked(root)
    return repository.backend.costly_requests or grace_of(root) is not None or not collects
