"""Letting snapshots go: by a retention, or by name."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec

from casnap.errors import BackendError, DamagedError
from casnap.format.records import Row
from casnap.runtime.typing import override
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.changes import change_table, edit_row
from casnap.storage.snapshots.contents import Contents
from casnap.storage.snapshots.marker_files import unmark
from casnap.storage.snapshots.retention import (
    PruneReport,
    Retention,
    Verdict,
    check_retention,
    judge_runs,
    step_of,
)
from casnap.storage.snapshots.runs import in_commit_order
from casnap.storage.snapshots.table import Table
from casnap.storage.snapshots.thinning import (
    Rules,
    Thinned,
    check_keys,
    check_rules,
    thin,
)

_log = logging.getLogger("casnap")
_UNREAD = "its metadata cannot be read"
# The runs whose snapshots have no step, as a warning has said. Each comes after its store's id.
_warned: set[str] = set()

OnRelease = Callable[[Sequence[Row]], None]
"""Called after a commit, with the rows of the snapshots that it removed or thinned."""
Judge = Callable[[Table], Iterable[Verdict]]
"""Returns verdicts on snapshots of a table. A snapshot whose verdict has no reason goes."""


class PruneChange(ABC):
    """A change of the table that removes the snapshots that are not kept.

    If a try to commit fails, the next one judges the newer table: snapshots may have been tagged or
    replaced meanwhile.

    Attributes:
        verdicts: The last verdicts.
    """

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []

    @abstractmethod
    def judge(self, table: Table) -> list[Verdict]:
        """Return the verdicts on the snapshots of a table."""

    def __call__(self, table: Table, _seq: int) -> dict[str, Row | None]:
        """Return the rows to remove."""
        self.verdicts = self.judge(table)
        return {v.name: None for v in self.verdicts if not v.kept}


class RetentionChange(PruneChange):
    """A change of the table that removes the snapshots that a retention does not keep.

    Args:
        store: The store.
        retention: The rules.
        folder: The folder of the runs; "" for the whole store.
        taken_commit: The commit of a snapshot in the folder that was just taken, and must stay.
    """

    def __init__(
        self,
        store: Repository,
        retention: Retention,
        folder: str,
        taken_commit: bytes | None = None,
    ) -> None:
        check_retention(retention)
        super().__init__()
        self._store = store
        self._retention = retention
        self._folder = folder
        self._taken = taken_commit

    @override
    def judge(self, table: Table) -> list[Verdict]:
        """Return the verdicts on the snapshots of a table."""
        return self.judge_rows(table.items_in(self._folder))

    def judge_rows(self, named_rows: Iterable[tuple[str, Row]]) -> list[Verdict]:
        """Return the verdicts on snapshots. The rows must be of whole runs."""
        unread: set[str] = set()
        if self._taken is None or self._retention.asks_metadata:
            named_rows = ((n, self._with_metadata(n, row, unread)) for n, row in named_rows)
        # Verdicts of a take are not shown, so it reads no metadata that its rules do not need.
        rows = list(named_rows)
        verdicts = judge_runs(rows, self._retention, time.time(), self._taken)
        if not self._retention.asks_metadata:
            return verdicts
        if self._retention.keep_every is not None:
            self._warn_of_no_step([v for v in verdicts if v.name not in unread])
        return [
            replace(v, reasons=(*v.reasons, _UNREAD)) if v.name in unread else v for v in verdicts
        ]

    def _warn_of_no_step(self, verdicts: Iterable[Verdict]) -> None:
        """Warn, once for a run, that ``keep_every`` keeps snapshots since they have no step."""
        for verdict in verdicts:
            run = f"{self._store.config.store_id} {verdict.row.run_of(verdict.name)}"
            has_step = step_of(verdict.name, verdict.row) is not None
            if has_step or verdict.row.is_rewound or run in _warned:
                continue
            _warned.add(run)
            _log.warning(
                "%s: keep_every keeps %.200r, and others like it, since neither its metadata nor "
                "its name says its step; give the takes one: metadata={'step': ...}",
                self._store.backend.uri,
                verdict.name,
            )

    def _with_metadata(self, name: str, row: Row, unread: set[str]) -> Row:
        """Return a row with its metadata. If they cannot be read, note its name in ``unread``."""
        try:
            metadata = Contents(self._store, name, row).metadata
        except (DamagedError, BackendError) as e:
            _log.warning("%.200s is judged without its metadata: %.500s", name, e)
            unread.add(name)
            metadata = {}
        return msgspec.structs.replace(row, metadata=metadata)


def prune(store: Repository, change: PruneChange, *, dry_run: bool = False) -> PruneReport:
    """Remove the snapshots that are not kept, in one commit; a dry run only reports them."""
    if dry_run:
        store.read_at_newest(lambda root: change(store.table(root), 0))
    elif change_table(store, change):
        _unmark_pruned(store, change)
    return PruneReport(change.verdicts, dry_run)


def prune_by(
    store: Repository,
    retention: Retention,
    folder: str,
    on_release: OnRelease,
    *,
    dry_run: bool = False,
) -> PruneReport:
    """Remove the snapshots of the runs in a folder that no rule keeps, and thin the others.

    Args:
        store: The store.
        retention: The rules.
        folder: The folder; "" for the whole store.
        on_release: See :data:`OnRelease`.
        dry_run: Whether to change nothing, and only report.

    Raises:
        EntryNotFoundError: No snapshot has, or had, a key that a pattern of ``thin`` matches.
    """
    change = RetentionChange(store, retention, folder)
    if retention.thin is None:
        report = prune(store, change, dry_run=dry_run)
    else:
        thinned = _thin(store, retention.thin, folder, on_release, change, dry_run=dry_run)
        if not dry_run:
            _unmark_pruned(store, change)
        lost = {name: each.keys for name, each in thinned.items()}
        report = PruneReport(change.verdicts, dry_run, lost)
    if not dry_run:
        on_release([verdict.row for verdict in report.deleted])
    return report


def thin_by(
    store: Repository,
    rules: Rules,
    folder: str,
    on_release: OnRelease,
    *,
    dry_run: bool = False,
) -> dict[str, tuple[str, ...]]:
    """Thin the runs in a folder; return the keys that each snapshot lost, by name.

    Args:
        store: The store.
        rules: The rules.
        folder: The folder; "" for the whole store.
        on_release: See :data:`OnRelease`.
        dry_run: Whether to change nothing, and only return what would be lost.

    Raises:
        ValueError: The rules make no sense.
        EntryNotFoundError: No snapshot has, or had, a key that a pattern matches.
    """
    thinned = _thin(store, rules, folder, on_release, None, dry_run=dry_run)
    return {name: each.keys for name, each in thinned.items()}


def _thin(
    store: Repository,
    rules: Rules,
    folder: str,
    on_release: OnRelease,
    change: PruneChange | None,
    *,
    dry_run: bool,
) -> dict[str, Thinned]:
    rows = store.read_at_newest(lambda root: list(store.table(root).items_in(folder)))
    check_keys(store, rows, check_rules(rules))
    thinned = thin(store, rules, folder, change, dry_run=dry_run)
    if thinned and not dry_run:
        on_release([each.before for each in thinned.values()])
    return thinned


def forget(store: Repository, name: str, commit_id: str) -> None:
    """Remove a snapshot, whatever holds it.

    Raises:
        SnapshotNotFoundError: There is no snapshot of this name and commit id.
    """
    edit_row(store, name, commit_id, lambda _: None)
    unmark(store, {name: bytes.fromhex(commit_id)})


def prune_judged(
    store: Repository, judge: Judge, on_release: OnRelease, *, dry_run: bool = False
) -> PruneReport:
    """Remove the snapshots that a judge does not keep, in one commit.

    Args:
        store: The store.
        judge: Returns verdicts on snapshots of a table. Each try to commit calls it.
        on_release: See :data:`OnRelease`.
        dry_run: Whether to change nothing, and only report.
    """
    report = prune(store, _JudgedChange(judge), dry_run=dry_run)
    if not dry_run:
        on_release([verdict.row for verdict in report.deleted])
    return report


class _JudgedChange(PruneChange):
    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    @override
    def judge(self, table: Table) -> list[Verdict]:
        verdicts = {verdict.name: verdict for verdict in self._judge(table)}
        rows = in_commit_order((name, verdict.row) for name, verdict in verdicts.items())
        return [verdicts[name] for name, _ in rows]


def _unmark_pruned(store: Repository, change: PruneChange) -> None:
    """Remove the markers of the snapshots that were not kept."""
    unmark(store, {v.name: v.row.commit for v in change.verdicts if not v.kept})
