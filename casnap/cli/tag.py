"""``casnap tag``."""

from __future__ import annotations

import click

from casnap.cli.arguments import identity_of, open_snapshot, writing_options
from casnap.cli.output import CommandError, emit, say, summary
from casnap.snapshot import Snapshot


@click.command()
@click.argument("path", metavar="STORE/NAME")
@click.argument("tags", metavar="TAG...", nargs=-1)
@click.option("--remove", is_flag=True, help="Remove these tags.")
@writing_options
def tag(path: str, tags: tuple[str, ...], remove: bool, as_json: bool) -> None:
    """Add tags, which protect a snapshot, or remove them.

    A snapshot with a tag is neither pruned nor overwritten, and `casnap rm` asks for --tagged.
    Without TAG, lists the tags.
    """
    snapshot = open_snapshot(path)
    store, name = snapshot.store, snapshot.name
    if remove and not tags:
        raise click.UsageError("name the tags to remove")
    if remove:
        _check_has(snapshot, tags)
    if tags:
        (store.untag if remove else store.tag)(name, *tags)
        snapshot = store[name]
    if as_json:
        facts = {**identity_of(snapshot), "tags": list(snapshot.tags)}
        emit({**facts}, store)
    elif tags:
        say(f"{snapshot.path}  {summary({}, snapshot.tags) or 'has no tags'}")
    else:
        for each in snapshot.tags:
            say(each)


def _check_has(snapshot: Snapshot, tags: tuple[str, ...]) -> None:
    lacking = [tag for tag in tags if tag not in snapshot.tags]
    if lacking:
        has = f"its tags are {', '.join(snapshot.tags)}" if snapshot.tags else "it has no tags"
        raise CommandError(
            f"{snapshot.path} has no tag {', '.join(lacking)}, so none was removed; {has}"
        )
