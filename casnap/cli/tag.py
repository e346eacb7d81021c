"""``casnap tag``."""

from __future__ import annotations

import click

from casnap.cli.arguments import identity_of, open_snapshot, open_store, writing_options
from casnap.cli.output import CommandError, emit, json_time, moment, safe, say, summary
from casnap.snapshot import Snapshot
from casnap.view import repository_of


@click.command()
@click.argument("path", metavar="STORE/NAME")
@click.argument("tags", metavar="TAG...", nargs=-1)
@click.option("--remove", is_flag=True, help="Remove these tags.")
@click.option("--move", is_flag=True, help="Move each TAG here, from whichever snapshot has it.")
@click.option("--history", is_flag=True, help="Of a STORE: list the moves of one TAG.")
@writing_options
def tag(
    path: str, tags: tuple[str, ...], remove: bool, move: bool, history: bool, as_json: bool
) -> None:
    """Add tags to a snapshot, remove them, or move them to it. Without TAG, list its tags.

    A snapshot with a tag is neither pruned nor overwritten, and `casnap rm` asks for --tagged.

    --move publishes a tag: it takes the tag from any other snapshot of the store, and followers of
    the tag then get this one. Move it on, or back, in the same way.
    """
    _check_options(tags, remove=remove, move=move, history=history)
    if history:
        _print_moves(path, tags[0], as_json)
        return
    snapshot = open_snapshot(path)
    store = snapshot.store
    if tags:
        if move:
            for each in tags:
                store.publish(each, snapshot)
        elif remove:
            _check_has(snapshot, tags)
            store.untag(snapshot.name, *tags)
        else:
            store.tag(snapshot.name, *tags)
        snapshot = store[snapshot.name]
    if as_json:
        facts = {**identity_of(snapshot), "tags": list(snapshot.tags)}
        emit({**facts}, store)
    elif tags:
        say(f"{snapshot.path}  {summary({}, snapshot.tags) or 'has no tags'}")
    else:
        for each in snapshot.tags:
            say(each)


def _check_options(tags: tuple[str, ...], **options: bool) -> None:
    actions = [name for name, is_set in options.items() if is_set]
    if len(actions) > 1:
        raise click.UsageError("--remove, --move and --history do not go together")
    if actions in (["remove"], ["move"]) and not tags:
        raise click.UsageError(f"name the tags to {actions[0]}")
    if actions == ["history"] and len(tags) != 1:
        raise click.UsageError("name the one tag whose moves to list")


def _print_moves(path: str, tag: str, as_json: bool) -> None:
    store = open_store(path)
    moves = store.tag_moves(tag)
    if as_json:
        fields = ("name", "commit", "root", "by", "previous")
        listed = [
            {**{field: getattr(m, field) for field in fields}, "time": json_time(m.time)}
            for m in moves
        ]
        emit({"store": repository_of(store).backend.uri, "tag": tag, "moves": listed}, store)
        return
    if not moves:
        raise CommandError(f"{repository_of(store).backend.uri}: the tag {tag} was never moved")
    for m in moves:
        before = f" from {m.previous}" if m.previous else ""
        say(safe(f"{moment(m.time)}  {m.name}{before}  by {m.by}"))


def _check_has(snapshot: Snapshot, tags: tuple[str, ...]) -> None:
    lacking = [tag for tag in tags if tag not in snapshot.tags]
    if lacking:
        has = f"its tags are {', '.join(snapshot.tags)}" if snapshot.tags else "it has no tags"
        raise CommandError(
            f"{snapshot.path} has no tag {', '.join(lacking)}, so none was removed; {has}"
        )
