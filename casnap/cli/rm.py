"""``casnap rm``."""

from __future__ import annotations

import click

from casnap.cli.arguments import (
    endpoint_option,
    exclusive_option,
    open_snapshot,
    request_fields,
)
from casnap.cli.output import (
    check_can_ask,
    confirm,
    counted,
    described,
    emit,
    json_option,
    safe,
    size,
)


@click.command()
@click.argument("snapshots", metavar="STORE/NAME...", nargs=-1, required=True)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@exclusive_option
@endpoint_option
@json_option
def rm(snapshots: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete snapshots.

    Nothing is deleted unless all of them are found. Tags do not protect them. Their bytes stay on
    disk until garbage is collected.
    """
    found = list({(s.store.uri, s.name): s for s in map(open_snapshot, snapshots)}.values())
    if not yes:
        check_can_ask("--yes to delete")
        for snapshot in found:
            known = f"{size(snapshot.stats.logical_bytes)}  {described({}, snapshot.tags)}"
            click.echo(f"{safe(snapshot.path)}  {known.rstrip()}", err=True)
        confirm(f"Delete {counted(len(found), 'snapshot')}?")
    for snapshot in found:
        snapshot.store.delete(snapshot.name, commit_id=snapshot.commit_id)
        if not as_json:
            click.echo(f"deleted {safe(snapshot.path)}")
    if as_json:
        deleted = [{"store": s.store.uri, "name": s.name, "commit": s.commit_id} for s in found]
        emit({"deleted": deleted, **request_fields(*(s.store for s in found))})
