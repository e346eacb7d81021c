"""``casnap tag``."""

from __future__ import annotations

import click

from casnap.cli.arguments import (
    endpoint_option,
    exclusive_option,
    open_snapshot,
    request_fields,
)
from casnap.cli.output import described, emit, json_option, safe


@click.command()
@click.argument("path", metavar="STORE/NAME")
@click.argument("tags", metavar="TAG...", nargs=-1)
@click.option("--remove", is_flag=True, help="Remove these tags.")
@exclusive_option
@endpoint_option
@json_option
def tag(path: str, tags: tuple[str, ...], remove: bool, as_json: bool) -> None:
    """Add tags, which protect a snapshot, or remove them.

    A snapshot with a tag is neither pruned nor overwritten, but `casnap rm` still deletes it.
    Without TAG, lists the tags.
    """
    snapshot = open_snapshot(path)
    store, name = snapshot.store, snapshot.name
    if remove and not tags:
        raise click.UsageError("name the tags to remove")
    if tags:
        (store.untag if remove else store.tag)(name, *tags)
        snapshot = store[name]
    if as_json:
        facts = {"name": name, "commit": snapshot.commit_id, "tags": list(snapshot.tags)}
        emit({"store": store.uri, **facts, **request_fields(store)})
    elif tags:
        click.echo(f"{safe(snapshot.path)}  {described({}, snapshot.tags) or 'has no tags'}")
    else:
        for each in snapshot.tags:
            click.echo(safe(each))
