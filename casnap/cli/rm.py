"""``casnap rm``."""

from __future__ import annotations

import click

from casnap.cli.arguments import identity_of, open_snapshot, writing_options
from casnap.cli.garbage import show_what_waits
from casnap.cli.output import CommandError, confirm, emit, say, size, summary
from casnap.runtime.sizes import amount
from casnap.snapshot import Snapshot
from casnap.view import repository_of


@click.command()
@click.argument("snapshots", metavar="STORE/NAME...", nargs=-1, required=True)
@click.option("--tagged", is_flag=True, help="Delete those that have tags, too.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@writing_options
def rm(snapshots: tuple[str, ...], tagged: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Delete snapshots.

    If one is not found, or has a tag, none is deleted; --tagged deletes also those with tags. Then
    the command begins to free their bytes. The last line says how many bytes wait, and for what;
    `casnap gc` frees them.
    """
    doomed = list({(s.store.uri, s.name): s for s in map(open_snapshot, snapshots)}.values())
    for snapshot in doomed:
        if snapshot.tags and not tagged:
            raise CommandError(
                f"{snapshot.path} has a tag, {', '.join(snapshot.tags)}, which protects it, so "
                "nothing was deleted; --tagged deletes it, `casnap tag --remove` removes the tag"
            )
    if not (yes or dry_run):
        question = f"Delete {amount(len(doomed), 'snapshot')}?"
        confirm(question, "--yes to delete, or --dry-run to look", list(map(_line, doomed)))
    for snapshot in doomed:
        if not dry_run:
            snapshot.store.delete(snapshot.name, commit_id=snapshot.commit_id)
        if not as_json:
            say(f"would be deleted {_line(snapshot)}" if dry_run else f"deleted {snapshot.path}")
    if as_json:
        deleted = [{**identity_of(s), "tags": list(s.tags)} for s in doomed]
        emit({"dry_run": dry_run, "deleted": deleted}, *(s.store for s in doomed))
    elif not dry_run:
        for place in {repository_of(s.store).backend.uri: s.store for s in doomed}.values():
            show_what_waits(place)


def _line(snapshot: Snapshot) -> str:
    tags = summary({}, snapshot.tags)
    return f"{snapshot.path}  {size(snapshot.stats.logical_bytes)}  {tags}".rstrip()
