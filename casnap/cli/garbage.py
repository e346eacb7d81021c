"""What becomes of the bytes of snapshots that a command has let go."""

from __future__ import annotations

from casnap.cli.output import moment, say, size
from casnap.maintenance.automatic import automatic_collector
from casnap.maintenance.gc import DAY
from casnap.runtime.environment import collects_by_itself
from casnap.storage.catalog.settings import collects_unasked, grace_of
from casnap.store import Store


def show_what_waits(place: Store) -> None:
    """Print what was freed already, what waits, and for what."""
    objects = place.objects
    root, uri = objects.newest(), objects.backend.uri
    by_hand = f"`casnap gc {uri} --grace 0`"
    if not collects_by_itself() or not collects_unasked(root):
        say(f"{by_hand} frees the bytes; no process does so by itself here")
        return
    collector = automatic_collector(objects)
    collector.wait()
    report = collector.last_report
    if report is not None and not report.waiting_packs:
        say(f"{size(report.freed_bytes)} freed")
        return
    waiting = "the bytes" if report is None else size(report.waiting_bytes)
    freed = f"{size(report.freed_bytes)} freed; " if report and report.freed_bytes else ""
    grace = grace_of(root)
    if report is not None and grace is not None and report.waiting_until is not None:
        event = f"a collection after {moment(report.waiting_until)}"
    elif objects.backend.costly_requests or grace is not None:
        hours = (DAY if grace is None else grace) / 3600
        event = f"a collection, and {hours:g} hours after it another one that frees them"
    else:
        event = "the next collection, by a process that lets snapshots go"
    say(f"{freed}{waiting} wait for {event}; {by_hand} frees them now")
