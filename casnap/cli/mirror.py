"""``casnap mirror``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import click

from casnap.cli.arguments import identity, open_whole_store, reading_options
from casnap.cli.output import CommandError, emit, json_time, moment, say, size, table
from casnap.errors import MirrorError
from casnap.format.records import Root, Row
from casnap.mirror.notes import is_unmirrored, lag_in, mirror_place, succeeded_in
from casnap.mirror.status import HostFiles, HostStatus
from casnap.runtime.sizes import amount
from casnap.snapshot import Snapshot
from casnap.store import Store
from casnap.view import repository_of


class MirrorLag(NamedTuple):
    """The snapshots that the mirror of a store lacks, and why.

    Attributes:
        uri: The URI of the mirror.
        tag: The tag that it follows; empty if it gets all snapshots.
        lacking: The rows of these snapshots, by name.
        succeeded: The names of snapshots that the mirror never gets, since another store continues
            their run there.
        status: The status of the process of this host that copies; None if there is none.
    """

    uri: str
    tag: str
    lacking: dict[str, Row]
    succeeded: tuple[str, ...]
    status: HostStatus | None

    @property
    def new_bytes(self) -> int:
        """The bytes that the takes of these snapshots added to the store."""
        return sum(row.stats.new_bytes for row in self.lacking.values())


def mirror_lag(store: Store) -> MirrorLag | None:
    """Return what the mirror of a store lacks; None if the store has no mirror.

    The mirror is not read.

    Raises:
        MirrorError: A newer version of casnap has attached the mirror.
    """
    repository = repository_of(store)
    uri = repository.backend.uri
    root = repository.newest()
    known = mirror_place(root, uri)
    if known is None:
        return None
    snapshots = repository.table(root)
    lacking = lag_in(root, snapshots, known.tag, uri).rows
    status = HostFiles(repository, known.uri).read()
    return MirrorLag(known.uri, known.tag, lacking, tuple(succeeded_in(snapshots)), status)


@click.command()
@click.argument("store", required=False)
@reading_options
def mirror(store: str | None, as_json: bool) -> None:
    """Show which snapshots the mirror of a store lacks, and why.

    The store knows that; the mirror is not read. The reason is known only while a process of this
    host has the store open with mirror=.
    """
    place = open_whole_store(store)
    uri = repository_of(place).backend.uri
    lag = mirror_lag(place)
    if lag is None:
        raise CommandError(f"{uri} has no mirror; Store({uri!r}, mirror=URI) gives it one")
    lacking, status = lag.lacking, lag.status or HostStatus()
    if as_json:
        snapshots = [
            {
                **identity(repository_of(place).backend, name, row.commit.hex()),
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
            "mirror": lag.uri,
            "tag": lag.tag or None,
            "snapshots": snapshots,
            "succeeded": list(lag.succeeded),
        }
        emit({**document, "lacking_bytes": lag.new_bytes, **state}, place)
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
    lacks = (
        f"lacks {amount(len(lacking), 'snapshot')}, about {size(lag.new_bytes)}"
        if lacking
        else "has all"
    )
    follows = f" (it follows the tag {lag.tag})" if lag.tag else ""
    say(f"{lag.uri} {lacks}{follows}")
    if lag.succeeded:
        say(
            f"{amount(len(lag.succeeded), 'snapshot')} of runs that another store continues there "
            f"stay here alone: {', '.join(lag.succeeded)}"
        )
    if status.error:
        say(f"it fails since {moment(status.since)}: {status.error}")
    if lag.status is None and lacking:
        say("no process of this host copies to it; a Store with this mirror= does")


def commits_lacking(store: Store, snapshots: Sequence[Snapshot]) -> set[str]:
    """Return the commit ids of the snapshots that the mirror lacks.

    If the mirror follows a tag, the result includes the snapshot that has the tag here, but not at
    the mirror.

    Args:
        store: The store.
        snapshots: Some of its snapshots.
    """
    lacking = {each.commit_id for each in snapshots if is_unmirrored(each.row)}
    return lacking | {_owed_publish(store)} if snapshots else lacking


def _owed_publish(store: Store) -> str:
    """Return the commit id of the last published snapshot, if its tag has not moved at the mirror.

    Otherwise return "". A row does not say what the mirror has followed, so this reads the settings
    of the store.
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
