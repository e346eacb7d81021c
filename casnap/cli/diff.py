"""``casnap diff``."""

from __future__ import annotations

from typing import Any

import click

from casnap.cli.arguments import identity_of, open_snapshot, reading_options, second_snapshot
from casnap.cli.entries import entry_fields, type_text
from casnap.cli.output import emit, print_rest, say, size, table
from casnap.maintenance.diff import Change, Diff
from casnap.maintenance.diff import diff as compare
from casnap.snapshot import Snapshot

SIGNS = {"changed": "~", "added": "+", "removed": "-"}


@click.command()
@click.argument("a", metavar="STORE/A")
@click.argument("b", metavar="STORE/B")
@click.option("--limit", type=click.IntRange(min=1), help="The most entries to print [50; all].")
@reading_options
def diff(a: str, b: str, limit: int | None, as_json: bool) -> None:
    """Show the differences between two snapshots: added, removed and changed entries.

    B may be the bare name of a snapshot beside A or in its store. The entries with the most
    changed bytes come first. CHANGED counts the bytes in those chunks of an entry that differ from
    the chunks at the same position in A.
    """
    older = open_snapshot(a)
    newer = second_snapshot(b, older)
    difference = compare(older.contents, newer.contents)
    ordered = sorted(difference.changes, key=lambda c: (-c.changed_bytes, -c.total_bytes, c.path))
    if as_json:
        document = _document(older, newer, difference, ordered[:limit])
        emit(document, older.store, newer.store)
        return
    if not ordered:
        say("no difference")
        return
    say(_summary(difference))
    paths = ordered[: limit or 50]
    rows = [
        (
            SIGNS[change.kind],
            change.path,
            _types(change),
            size(change.changed_bytes),
            size(change.total_bytes),
        )
        for change in paths
    ]
    header = ("", "PATH", "TYPE", "CHANGED", "OF")
    table(header, rows, numbers={"CHANGED", "OF"})
    print_rest(len(ordered) - len(paths), "entry")


def _summary(difference: Diff) -> str:
    counts = ", ".join(
        f"{len(difference.of(kind)):,} {kind}" for kind in ("changed", "added", "removed")
    )
    return f"{counts}; {size(difference.changed_bytes)} differ"


def _types(change: Change) -> str:
    before, after = (None if e is None else type_text(e) for e in (change.old, change.new))
    return " → ".join(dict.fromkeys(text for text in (before, after) if text is not None))


def _document(
    older: Snapshot, newer: Snapshot, difference: Diff, changes: list[Change]
) -> dict[str, Any]:
    return {
        "a": identity_of(older),
        "b": identity_of(newer),
        "changed_count": len(difference.of("changed")),
        "added_count": len(difference.of("added")),
        "removed_count": len(difference.of("removed")),
        "changed_bytes": difference.changed_bytes,
        "changes": [
            {
                "entry": change.path,
                "change": change.kind,
                "changed_bytes": change.changed_bytes,
                "total_bytes": change.total_bytes,
                "old": None if change.old is None else entry_fields(change.old),
                "new": None if change.new is None else entry_fields(change.new),
            }
            for change in changes
        ],
    }
