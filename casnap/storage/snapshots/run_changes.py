"""Change the runs of a store: prune, thin, rewind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from casnap.format.records import Root, Row
from casnap.storage.reading.repository import Repository
from casnap.storage.reading.table import Table
from casnap.storage.snapshots.changes import Changes
from casnap.storage.snapshots.marker_files import unmark
from casnap.storage.snapshots.pruning import (
    Judge,
    JudgedChange,
    OnRelease,
    PruneChange,
    RetentionChange,
    prune,
    unmark_pruned,
)
from casnap.storage.snapshots.retention import (
    LAST_HEALTHY,
    PruneReport,
    Retention,
    check_retention,
)
from casnap.storage.snapshots.rewinding import Rewound, rewind
from casnap.storage.snapshots.runs import runs_of
from casnap.storage.snapshots.thinning import Rules, Thinned, check_keys, check_rules, thin


class Runs:
    """The runs in a folder of a store.

    Args:
        store: The store.
        folder: The folder; "" for the whole store.
    """

    def __init__(self, store: Repository, folder: str = "") -> None:
        self._store = store
        self._folder = folder

    @staticmethod
    def holds(table: Table, rows: Mapping[str, Row]) -> dict[str, list[str]]:
        """Return the reasons why snapshots must stay, by name.

        These are the holds of each row, and ``LAST_HEALTHY`` for the last healthy snapshot of a
        run whose later snapshots are unhealthy.

        Args:
            table: The table.
            rows: The rows of the snapshots, by full name.
        """
        folders = {row.run_of(name) for name, row in rows.items()}
        runs = (run for each in folders for run in runs_of(table.rows_of_run(each).items()))
        last = {run.last_healthy for run in runs}
        return {n: [*row.holds, *([LAST_HEALTHY] if n in last else [])] for n, row in rows.items()}

    @staticmethod
    def check_retention(retention: object) -> None:
        """Check that an argument is a :class:`Retention`.

        Raises:
            TypeError: The argument is something else.
        """
        check_retention(retention)

    def prune(
        self,
        retention: Retention,
        on_release: OnRelease,
        *,
        dry_run: bool = False,
    ) -> PruneReport:
        """Remove the snapshots of these runs that no rule keeps, and thin the others.

        Args:
            retention: The rules.
            on_release: Called after the commit, as :data:`OnRelease` says.
            dry_run: Whether to change nothing, and only report.

        Raises:
            EntryNotFoundError: No snapshot has, or had, a key that a pattern of ``thin`` matches.
        """
        change = RetentionChange(self._store, retention, self._folder)
        if retention.thin is None:
            report = prune(self._store, change, dry_run=dry_run)
        else:
            thinned = self._thin(retention.thin, on_release, change, dry_run=dry_run)
            if not dry_run:
                unmark_pruned(self._store, change)
            lost = {name: each.keys for name, each in thinned.items()}
            report = PruneReport(change.verdicts, dry_run, lost)
        if not dry_run:
            on_release([verdict.row for verdict in report.deleted])
        return report

    def prune_judged(
        self, judge: Judge, on_release: OnRelease, *, dry_run: bool = False
    ) -> PruneReport:
        """Remove the snapshots that a function does not keep, in one commit.

        Args:
            judge: Returns verdicts on the snapshots of a table. It is called in each try to commit.
            on_release: Called after the commit, as :data:`OnRelease` says.
            dry_run: Whether to change nothing, and only report.
        """
        report = prune(self._store, JudgedChange(judge), dry_run=dry_run)
        if not dry_run:
            on_release([verdict.row for verdict in report.deleted])
        return report

    def thin(
        self,
        rules: Rules,
        on_release: OnRelease,
        *,
        dry_run: bool = False,
    ) -> dict[str, tuple[str, ...]]:
        """Thin these runs: take keys away from older snapshots, in one commit.

        Args:
            rules: The rules.
            on_release: Called after the commit, as :data:`OnRelease` says.
            dry_run: Whether to change nothing, and only return what would be lost.

        Returns:
            The name of each thinned snapshot → the keys that it lost.

        Raises:
            ValueError: There is no rule, or one is malformed.
            EntryNotFoundError: No snapshot has, or had, a key that a pattern matches.
        """
        thinned = self._thin(rules, on_release, None, dry_run=dry_run)
        return {name: each.keys for name, each in thinned.items()}

    def _thin(
        self,
        rules: Rules,
        on_release: OnRelease,
        change: PruneChange | None,
        *,
        dry_run: bool,
    ) -> dict[str, Thinned]:
        rows = self._store.read_at_newest(
            lambda root: list(self._store.table(root).items_in(self._folder))
        )
        check_keys(self._store, rows, check_rules(rules))
        thinned = thin(self._store, rules, self._folder, change, dry_run=dry_run)
        if thinned and not dry_run:
            on_release([each.before for each in thinned.values()])
        return thinned

    def forget(self, name: str, commit_id: str) -> None:
        """Remove a snapshot, even if it has a tag or another hold.

        Args:
            name: The full name of the snapshot.
            commit_id: The commit id that the snapshot must have, in hex.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name and commit id.
        """
        Changes(self._store).edit_row(name, commit_id, lambda _: None)
        unmark(self._store, {name: bytes.fromhex(commit_id)})

    def rewind(
        self, name: str, notes_of_renamed: Callable[[Root], Mapping[str, Any]] = lambda _: {}
    ) -> Rewound:
        """Rewind a run to one of its snapshots: move all later snapshots aside, in one commit.

        Args:
            name: The full name of the snapshot to go back to.
            notes_of_renamed: Called with the newest root. It returns changes to notes, which each
                renamed snapshot gets; the value None removes a note.

        Raises:
            SnapshotNotFoundError: There is no such snapshot.
            SnapshotExistsError: A name that a snapshot is to get is taken.
            SnapshotError: The snapshot is thinned, so that no run can resume from it.
        """
        return rewind(self._store, name, notes_of_renamed)
