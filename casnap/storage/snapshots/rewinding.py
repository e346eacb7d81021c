"""Rewinding: a run goes back to an earlier snapshot, and the later snapshots are moved aside.

One commit renames the later snapshots. Their new names lie in the folder ``rewound-N`` below the
folder of the run. N is the number of the commit's root, or the next number that is free. A note in
each row says that the snapshot was moved aside (``docs/decisions/0071-going-back.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from casnap.backends import Backend
from casnap.backends.uris import joined
from casnap.errors import SnapshotError, SnapshotExistsError
from casnap.format.names import check_name
from casnap.format.records import REWOUND, Root, Row
from casnap.storage.opening.location import Location
from casnap.storage.reading.repository import Repository
from casnap.storage.reading.table import Table
from casnap.storage.snapshots.changes import Changes
from casnap.storage.snapshots.marker_files import mark, unmark


@dataclass(frozen=True)
class Rewound:
    """The result of a rewind.

    Attributes:
        name: The full name of the snapshot that the run goes back to.
        row: The row of this snapshot.
        moved: The old full name of each snapshot that was moved aside → its new full name.
    """

    name: str
    row: Row
    moved: Mapping[str, str]


def rewind(
    store: Repository,
    name: str,
    notes_of_renamed: Callable[[Root], Mapping[str, Any]] = lambda _: {},
) -> Rewound:
    """Rewind a run to one of its snapshots: move all later snapshots aside, in one commit.

    If an earlier rewind had moved the snapshot itself aside, it gets its name in the run back. The
    run's later witnesses (tables of digests, not snapshots) are removed.

    Args:
        store: The store.
        name: The full name of the snapshot to go back to.
        notes_of_renamed: Called with the newest root. It returns changes to notes, which each
            renamed snapshot gets; the value None removes a note.

    Raises:
        SnapshotNotFoundError: There is no such snapshot.
        SnapshotExistsError: A name that a snapshot is to get is taken.
        SnapshotError: The snapshot is thinned, so that no run can resume from it.
    """
    backend = store.backend
    before: dict[str, Row] = {}
    after: dict[str, Row] = {}
    rewound: Rewound | None = None

    def change(table: Table, seq: int) -> dict[str, Row | None]:
        nonlocal before, after, rewound
        row = Location(backend, name).row_in(table)
        run = row.run_of(name)
        rows = {n: r for n, r in table.rows_of_run(run).items() if n == name or not r.is_rewound}
        ordered = [each for each, _ in Table.in_commit_order(rows.items())]
        if row.is_thinned:
            whole = [n for n in ordered[: ordered.index(name)] if not rows[n].is_thinned]
            raise _thinned_error(backend, name, whole)
        aside = _free_folder(table, run, seq)
        moved = {n: _in(aside, n) for n in ordered[ordered.index(name) + 1 :]}
        renamed = {**moved, name: _in(run, name)} if row.is_rewound else moved
        if row.is_rewound and renamed[name] not in moved:
            _check_free(table, backend, name, renamed[name])
        notes = notes_of_renamed(store.newest())
        before = {n: rows[n] for n in renamed}
        after = {check_name(new): _turned(rows[old], notes) for old, new in renamed.items()}
        now = renamed.get(name, name)
        rewound = Rewound(now, after.get(now, row), moved)
        # The run may go on in another way, and need not meet what it was.
        later = {n: None for n, each in table.witnesses_of(run).items() if each.seq > row.seq}
        return {**later, **dict.fromkeys(before), **after}

    if Changes(store).commit(change):
        unmark(store, {n: row.commit for n, row in before.items()})
        for new_name, row in after.items():
            mark(store, new_name, row)
    assert rewound is not None
    return rewound


def _check_free(table: Table, backend: Backend, name: str, new_name: str) -> None:
    """Check that the snapshot to go back to can get its name in the run back.

    Args:
        table: The table of snapshots.
        backend: The backend of the store.
        name: The full name of the snapshot.
        new_name: The full name that it is to get.

    Raises:
        SnapshotExistsError: The name is taken.
    """
    try:
        table.check_free(new_name, overwrite=False, uri=backend.uri)
    except SnapshotExistsError as e:
        path, taken = joined(backend.uri, name), joined(backend.uri, new_name)
        raise SnapshotExistsError(
            f"{path} was {new_name!r} before it was moved aside, and that name is taken. Delete "
            f"what is at {taken}; or do not rewind: restore {path}, and take the next snapshots "
            "under new names"
        ) from e


def _thinned_error(backend: Backend, name: str, whole: Sequence[str]) -> SnapshotError:
    """Return the error to raise for a rewind to a thinned snapshot.

    Args:
        backend: The backend of the store.
        name: The full name of the snapshot.
        whole: The names of the whole snapshots before it in its run.
    """
    there = f"the newest whole one before it is {joined(backend.uri, whole[-1])}" if whole else ""
    return SnapshotError(
        f"{joined(backend.uri, name)} is thinned: it has lost what a resume needs, so no run goes "
        f"on from it; {there or 'no snapshot before it in its run is whole'}. To begin anew from "
        "its weights, restore the keys that it has: `casnap show` lists them"
    )


def _free_folder(table: Table, run: str, seq: int) -> str:
    """Return the folder into which a commit moves snapshots.

    Its name contains the number of the commit's root. If snapshots already lie in that folder, such
    as copies from another store, it contains the next free number.

    Args:
        table: The table that the commit changes.
        run: The folder of the run.
        seq: The number of the commit's root.
    """
    while True:
        folder = f"{run}/rewound-{seq}".lstrip("/")
        if table.get(folder) is None and next(table.items_below(f"{folder}/"), None) is None:
            return folder
        seq += 1


def _in(folder: str, name: str) -> str:
    """Return the name that a snapshot gets when it is moved into a folder."""
    return f"{folder}/{name.rpartition('/')[2]}".lstrip("/")


def _turned(row: Row, notes: Mapping[str, Any]) -> Row:
    """Return the row of a renamed snapshot: add the note ``REWOUND``, or remove it if it is there.

    Args:
        row: The row before.
        notes: Changes to other notes; the value None removes a note.
    """
    return row.with_notes({REWOUND: None if row.is_rewound else True, **notes})
