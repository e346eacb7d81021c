"""``casnap diff``."""

from __future__ import annotations

from typing import Any

import click

from casnap.cli.arguments import (
    endpoint_option,
    named_fields,
    open_snapshot,
    request_fields,
    second_snapshot,
)
from casnap.cli.entries import entry_fields, type_text
from casnap.cli.output import emit, json_option, print_rest, safe, size, table
from casnap.maintenance.diff import Change, Diff
from casnap.maintenance.diff import diff as compare
from casnap.snapshot import Snapshot

SIGNS = {"changed": "~", "added": "+", "removed": "-"}


@click.command()
@click.argument("a", metavar="STORE/A")
@click.argument("b", metavar="STORE/B")
@click.option("--limit", type=click.IntRange(min=1), help="The most entries to print [50; all].")
@endpoint_option
@json_option
def diff(a: str, b: str, limit: int | None, as_json: bool) -> None:
    """Show the differences between two snapshots: added, removed and changed entries.

    B may be the bare name of a snapshot beside A or in its store. The entries with the most
    changed bytes come first. CHANGED counts the bytes in those chunks of an entry that differ from
    the chunks at the same position in A.
    """
    first = open_snapshot(a)
    second = second_snapshot(b, first)
    found = compare(first.contents, second.contents)
    ordered = sorted(found.changes, key=lambda c: (-c.changed_bytes, -c.total_bytes, c.path))
    if as_json:
        document = _document(first, second, found, ordered[:limit])
        emit({**document, **request_fields(first.store, second.store)})
        return
    if not ordered:
        click.echo("no difference")
        return
    click.echo(_summary(found))
    shown = ordered[: limit or 50]
    rows = [
        (
            SIGNS[change.kind],
            safe(change.path),
            _types(change),
            size(change.changed_bytes),
            size(change.total_bytes),
        )
        for change in shown
    ]
    header = ("", "PATH", "TYPE", "CHANGED", "OF")
    table(header, rows, numbers={"CHANGED", "OF"})
    print_rest(len(ordered) - len(shown), "entry")


def _summary(found: Diff) -> str:
    counts = ", ".join(
        f"{len(found.of(kind)):,} {kind}" for kind in ("changed", "added", "removed")
    )
    return f"{counts}; {size(found.changed_bytes)} differ"


def _types(change: Change) -> str:
    old, new = (None if e is None else type_text(e) for e in (change.old, change.new))
    return safe(" → ".join(dict.fromkeys(text for text in (old, new) if text is not None)))


def _document(
    first: Snapshot, second: Snapshot, found: Diff, changes: list[Change]
) -> dict[str, Any]:
    return {
        "a": named_fields(first),
        "b": named_fields(second),
        "changed_count": len(found.of("changed")),
        "added_count": len(found.of("added")),
        "removed_count": len(found.of("removed")),
        "changed_bytes": found.changed_bytes,
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
