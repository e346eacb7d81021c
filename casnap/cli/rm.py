"""``casnap rm``."""

from __future__ import annotations

import click

from casnap.cli.arguments import (
    endpoint_option,
    exclusive_option,
    named_fields,
    open_snapshot,
    request_fields,
)
from casnap.cli.output import (
    CommandError,
    check_can_ask,
    confirm,
    counted,
    described,
    emit,
    json_option,
    safe,
    size,
)
from casnap.snapshot import Snapshot


@click.command()
@click.argument("snapshots", metavar="STORE/NAME...", nargs=-1, required=True)
@click.option("--tagged", is_flag=True, help="Delete those that have tags, too.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@exclusive_option
@endpoint_option
@json_option
def rm(snapshots: tuple[str, ...], tagged: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Delete snapshots.

    Nothing is deleted unless all of them are found, and none has a tag; --tagged deletes those too.
    Their bytes stay on disk until `casnap gc` frees them.
    """
    found = list({(s.store.uri, s.name): s for s in map(open_snapshot, snapshots)}.values())
    if not tagged:
        _refuse_tagged(found)
    if not (yes or dry_run):
        check_can_ask("--yes to delete, or --dry-run to look")
        for snapshot in found:
            click.echo(_line(snapshot), err=True)
        confirm(f"Delete {counted(len(found), 'snapshot')}?")
    for snapshot in found:
        if not dry_run:
            snapshot.store.delete(snapshot.name, commit_id=snapshot.commit_id)
        if not as_json:
            would = "would be deleted" if dry_run else "deleted"
            click.echo(f"{would} {_line(snapshot) if dry_run else safe(snapshot.path)}")
    if as_json:
        deleted = [{**named_fields(s), "tags": list(s.tags)} for s in found]
        requests = request_fields(*(s.store for s in found))
        emit({"dry_run": dry_run, "deleted": deleted, **requests})
    elif not dry_run:
        click.echo("`casnap gc` frees the bytes")


def _refuse_tagged(found: list[Snapshot]) -> None:
    for snapshot in found:
        if snapshot.tags:
            raise CommandError(
                f"{snapshot.path} has a tag, {', '.join(snapshot.tags)}, which protects it, so "
                "nothing was deleted; --tagged deletes it, `casnap tag --remove` removes the tag"
            )


def _line(snapshot: Snapshot) -> str:
    known = f"{size(snapshot.stats.logical_bytes)}  {described({}, snapshot.tags)}"
    return f"{safe(snapshot.path)}  {known.rstrip()}"
