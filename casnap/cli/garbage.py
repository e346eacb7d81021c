"""Print what becomes of garbage: bytes that no snapshot needs any more."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from casnap.cli.output import json_time, moment, say, size
from casnap.errors import shell_word
from casnap.maintenance.usage import DiskUsage
from casnap.storage import AutomaticCollector, Outlook, Repository
from casnap.store import Store
from casnap.view import repository_of


def show_what_waits(place: Store) -> None:
    """After a delete, print the freed bytes, the garbage that is left, and what will free it."""
    repository = repository_of(place)
    collector = AutomaticCollector.of(repository)
    collector.wait()
    report = collector.last_report
    if report is None:
        say(what_frees(repository, "the bytes", condemned=False))
        return
    if not report.waiting_packs:
        say(f"{size(report.freed_bytes)} freed")
        return
    waiting = what_frees(repository, size(report.waiting_bytes), condemned=True)
    # Bytes of the snapshots that were just deleted wait. Freed bytes were garbage before.
    freed = f"{size(report.freed_bytes)} of earlier garbage freed; " if report.freed_bytes else ""
    say(f"{freed}{waiting}")


def what_frees(repository: Repository, waiting: str, *, condemned: bool) -> str:
    """Return a sentence that says what will free some garbage, and when.

    Args:
        repository: The store.
        waiting: The garbage in words, such as a number of bytes.
        condemned: Whether a collection has condemned it.
    """
    outlook = Outlook(repository)
    by_hand = f"`casnap gc {shell_word(repository.backend.uri)} --grace 0`"
    if not outlook.is_freed_unasked:
        return f"{by_hand} frees {waiting}; no process does so by itself here"
    until, grace = outlook.freed_at, outlook.grace
    if until is not None and condemned:
        when = f"by a collection after {moment(until)}"
    elif grace is None:
        when = "when a process next deletes snapshots"
    else:
        when = f"by a collection, {grace / 3600:g} hours after they were found to be garbage"
    return f"{waiting} will be freed {when}; {by_hand} frees them now"


def disk_fields(repository: Repository, disk: DiskUsage) -> dict[str, Any]:
    """Return, for JSON, how many bytes a store takes up, and how many of them are garbage."""
    until = json_time(Outlook(repository).freed_at)
    return {"stored_bytes": disk.nbytes, **asdict(disk), "waiting_until_time": until}
