"""``casnap mirror``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import click

from casnap.cli.arguments import identity, open_whole_store, reading_options
from casnap.cli.output import CommandError, emit, json_time, moment, say, size, table
from casnap.errors import MirrorError
from casnap.format.records import Root
from casnap.mirror.notes import is_unmirrored, lag_in, mirror_place, succeeded_in
from casnap.mirror.status import HostFiles, HostStatus
from casnap.runtime.sizes import amount
from casnap.snapshot import Snapshot
from casnap.store import Store
from casnap.view import repository_of


@click.command()
@click.argument("store", required=False)
@reading_options
def mirror(store: str | None, as_json: bool) -> None:
    """Show which snapshots the mirror of a store lacks, and why.

    The store knows that; the mirror is not read. The reason is known only while a process of this
    host has the store open with mirror=.
    """
    place = open_whole_store(store)
    repository = repository_of(place)
    uri = repository.backend.uri
    root = repository.newest()
    mirror_known = mirror_place(root, uri)
    if mirror_known is None:
        raise CommandError(f"{uri} has no mirror; Store({uri!r}, mirror=URI) gives it one")
    snapshot_table = repository.table(root)
    lacking = lag_in(root, snapshot_table, mirror_known.tag, uri).rows
    succeeded = succeeded_in(snapshot_table)
    running = HostFiles(repository, mirror_known.uri).read()
    status = running or HostStatus()
    nbytes = sum(row.stats.new_bytes for row in lacking.values())
    if as_json:
        snapshots = [
            {
                **identity(repository.backend, name, row.commit.hex()),
                "time": json_time(row.time),
                "new_bytes": row.stats.new_bytes,
                "refused": status.refused.get(name),
            }
            for name, row in lacking.items()
        ]
        state = {
            "process_id": status.pid or None,
            "error": status.error or None,
            "failing_since_time": json_time(status.since or None),
        }
        document = {
            "store": uri,
            "mirror": mirror_known.uri,
            "tag": mirror_known.tag or None,
            "snapshots": snapshots,
            "succeeded": list(succeeded),
        }
        emit({**document, "lacking_bytes": nbytes, **state}, place)
        return
    if lacking:
        rows = [
            (
                name,
                moment(row.time),
                size(row.stats.new_bytes),
                status.refused.get(name, ""),
            )
            for name, row in lacking.items()
        ]
        table(("NAME", "TIME", "NEW", "REFUSED"), rows, numbers={"NEW"})
    lag = (
        f"lacks {amount(len(lacking), 'snapshot')}, about {size(nbytes)}" if lacking else "has all"
    )
    follows = f" (it follows the tag {mirror_known.tag})" if mirror_known.tag else ""
    say(f"{mirror_known.uri} {lag}{follows}")
    if succeeded:
        say(
            f"{amount(len(succeeded), 'snapshot')} of runs that another store continues there stay "
            f"here alone: {', '.join(succeeded)}"
        )
    if status.error:
        say(f"it fails since {moment(status.since)}: {status.error}")
    if running is None and lacking:
        say("no process of this host copies to it; a Store with this mirror= does")


def commits_lacking(store: Store, snapshots: Sequence[Snapshot]) -> set[str]:
    """Return the commit ids of the snapshots that the mirror lacks.

    If the mirror follows a tag, they include the snapshot that has the tag here, but not at the
    mirror.

    Args:
        store: The store.
        snapshots: Some of its snapshots.
    """
    lacking = {each.commit_id for each in snapshots if is_unmirrored(each.row)}
    return lacking | {_owed_publish(store)} if snapshots else lacking


def _owed_publish(store: Store) -> str:
    """Return the commit id of the snapshot that has the followed tag here, but not at the mirror.

    The id is "" if the mirror follows no tag, or lacks nothing. No note in the snapshot's row tells
    this, so the settings of the store are read.
    """
    repository = repository_of(store)
    uri = repository.backend.uri

    def look(root: Root) -> str:
        known = mirror_place(root, uri)
        if known is None or not known.tag:
            return ""
        lag = lag_in(root, repository.table(root), known.tag, uri)
        return lag.rows[lag.published].commit.hex() if lag.published else ""

    # A mirror that a later casnap has attached must not keep the snapshots from being shown.
    with suppress(MirrorError):
        return repository.read_at_newest(look, repository.recent)
    return ""
