"""``casnap diff``."""

from __future__ import annotations

from math import isfinite
from typing import Any

import click

from casnap.cli.arguments import identity_of, open_snapshot, reading_options, second_snapshot
from casnap.cli.entries import entry_fields
from casnap.cli.output import emit, print_rest, say, size, table
from casnap.comparing.changes import SIGNS, Change, Diff, Elements
from casnap.comparing.diff import diff as compare
from casnap.snapshot import Snapshot


@click.command()
@click.argument("a", metavar="STORE/A")
@click.argument("b", metavar="STORE/B")
@click.option("--limit", type=click.IntRange(min=1), help="The most entries to print [50; all].")
@click.option(
    "--elements", is_flag=True, help="Read what differs; tell how many elements, and by how much."
)
@click.option(
    "--stats",
    is_flag=True,
    help="Read the tensors that differ; tell how far each group of them has moved.",
)
@reading_options
def diff(a: str, b: str, limit: int | None, elements: bool, stats: bool, as_json: bool) -> None:
    """Show the differences between two snapshots: added, removed and changed entries.

    B may be the bare name of a snapshot beside A or in its store. The entries with the most changed
    bytes come first. ROLE says what the entry is for in a training, judging by its path. CHANGED
    counts the bytes in those chunks of an entry that differ from the chunks at the same position in
    A. DIFFERENCE has short values; with --elements also how the elements of tensors differ, with
    the largest absolute and relative difference.

    With --stats, there is one line for each group of tensors whose paths differ only in numbers:
    how many of the tensors differ, the share of all elements that differ, the largest and the mean
    difference, and the cosine between the two versions of the tensors that differ.

    The exit status is 0, whether the snapshots differ or not: a script looks whether `changes` of
    --json is empty.
    """
    if elements and stats:
        raise click.UsageError("--elements and --stats are two reports: ask for one")
    older = open_snapshot(a)
    newer = second_snapshot(b, older)
    if stats:
        _show_statistics(older, newer, as_json=as_json)
        return
    difference = compare(older.contents, newer.contents, elements=elements)
    ordered = sorted(difference.changes, key=lambda c: (-c.changed_bytes, -c.total_bytes, c.path))
    if as_json:
        document = _document(older, newer, difference, ordered[:limit])
        emit(document, older.store, newer.store)
        return
    if not ordered:
        say("no difference")
        return
    say(difference.summary())
    paths = ordered[: limit or 50]
    rows = [
        (
            SIGNS[change.kind],
            change.path,
            change.role,
            change.types,
            size(change.changed_bytes),
            size(change.total_bytes),
            change.difference,
        )
        for change in paths
    ]
    header = ("", "PATH", "ROLE", "TYPE", "CHANGED", "OF", "DIFFERENCE")
    table(header, rows, numbers={"CHANGED", "OF"})
    print_rest(len(ordered) - len(paths), "entry")


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
                "role": change.role,
                "changed_bytes": change.changed_bytes,
                "total_bytes": change.total_bytes,
                "elements": None if change.elements is None else _fields(change.elements),
                "old": None if change.old is None else entry_fields(change.old),
                "new": None if change.new is None else entry_fields(change.new),
            }
            for change in changes
        ],
    }


def _fields(elements: Elements) -> dict[str, Any]:
    largest = (elements.largest, elements.largest_relative)
    absolute, relative = (value if isfinite(value) else None for value in largest)
    return {
        "differing_count": elements.differing,
        "total_count": elements.total,
        "largest": absolute,
        "largest_relative": relative,
        "nan_count": elements.nan,
    }


def _show_statistics(older: Snapshot, newer: Snapshot, *, as_json: bool) -> None:
    from casnap.comparing.statistics import statistics

    groups = statistics(older.contents, newer.contents)
    if as_json:
        rows = [
            {
                "group": group.group,
                "role": group.role,
                "tensor_count": group.tensors,
                "differing_tensor_count": group.differing_tensors,
                "element_count": group.elements,
                "differing_count": group.differing,
                "largest": group.largest,
                "mean": group.mean,
                "cosine": group.cosine if isfinite(group.cosine) else None,
            }
            for group in groups
        ]
        document = {"a": identity_of(older), "b": identity_of(newer), "groups": rows}
        emit(document, older.store, newer.store)
        return
    cells = [
        (
            group.group,
            group.role,
            f"{group.differing_tensors:,} of {group.tensors:,}",
            f"{group.share:.2%}",
            f"{group.largest:.3g}" if group.differing else "",
            f"{group.mean:.3g}" if group.differing else "",
            f"{group.cosine:.6f}" if isfinite(group.cosine) else "",
        )
        for group in groups
    ]
    numbers = ("TENSORS", "ELEMENTS", "LARGEST", "MEAN", "COSINE")
    table(("GROUP", "ROLE", *numbers), cells, numbers={*numbers})
