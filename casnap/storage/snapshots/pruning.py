"""Remove snapshots that a retention, or another judge, does not keep."""

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
from casnap.storage.reading.table import Table
from casnap.storage.snapshots.changes import Changes
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

_log = logging.getLogger("casnap")
_UNREAD = "its metadata cannot be read"
# The runs whose snapshots have no step, as a warning has said. Each comes after its store's id.
_warned: set[str] = set()

OnRelease = Callable[[Sequence[Row]], None]
"""Called after a commit, with the rows of the snapshots that it removed or thinned."""
Judge = Callable[[Table], Iterable[Verdict]]
"""Returns verdicts on snapshots of a table. A snapshot is removed if its verdict has no reason."""


class PruneChange(ABC):
    """A change to the table that removes snapshots.

    Each try to commit judges the table again: since a try that failed, snapshots may have been
    tagged or replaced.

    Attributes:
        verdicts: The verdicts of the last try.
    """

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []

    @abstractmethod
    def judge(self, table: Table) -> list[Verdict]:
        """Return the verdicts on snapshots of a table."""

    def __call__(self, table: Table, _seq: int) -> dict[str, Row | None]:
        """Judge the table, and return None for the name of each snapshot to remove."""
        self.verdicts = self.judge(table)
        return {v.name: None for v in self.verdicts if not v.kept}


class RetentionChange(PruneChange):
    """A change to the table that removes the snapshots that a retention does not keep.

    Args:
        store: The store.
        retention: The rules.
        folder: The folder of the runs; "" for the whole store.
        taken_commit: The commit id of a snapshot in the folder that was just taken, and must stay.
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
        """Return the verdicts on the snapshots in the folder."""
        return self.judge_rows(table.items_in(self._folder))

    def judge_rows(self, named_rows: Iterable[tuple[str, Row]]) -> list[Verdict]:
        """Return the verdicts on all snapshots of some runs, given their names and rows."""
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
        """Log a warning, once for each run, if ``keep_every`` keeps snapshots that have no step."""
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
        """Return a row that contains its metadata.

        If the metadata cannot be read, the row has none, and the name is added to ``unread``.
        """
        try:
            metadata = Contents(self._store, name, row).metadata
        except (DamagedError, BackendError) as e:
            _log.warning("%.200s is judged without its metadata: %.500s", name, e)
            unread.add(name)
            metadata = {}
        return msgspec.structs.replace(row, metadata=metadata)


def prune(store: Repository, change: PruneChange, *, dry_run: bool = False) -> PruneReport:
    """Remove the snapshots that a change does not keep, in one commit.

    A dry run only reports them.
    """
    if dry_run:
        store.read_at_newest(lambda root: change(store.table(root), 0))
    elif Changes(store).commit(change):
        unmark_pruned(store, change)
    return PruneReport(change.verdicts, dry_run)


class JudgedChange(PruneChange):
    """A change to the table that removes the snapshots that a function does not keep.

    Args:
        judge: Returns verdicts on the snapshots of a table.
    """

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    @override
    def judge(self, table: Table) -> list[Verdict]:
        """Return the verdicts of the function, in the order of the snapshots' commits."""
        verdicts = {verdict.name: verdict for verdict in self._judge(table)}
        rows = Table.in_commit_order((name, verdict.row) for name, verdict in verdicts.items())
        return [verdicts[name] for name, _ in rows]


def unmark_pruned(store: Repository, change: PruneChange) -> None:
    """Remove the markers of the snapshots that a change has removed."""
    unmark(store, {v.name: v.row.commit for v in change.verdicts if not v.kept})
