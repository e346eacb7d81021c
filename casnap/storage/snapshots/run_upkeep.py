"""The upkeep of a run: the commit that adds a snapshot also prunes and thins the earlier ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from casnap.format.records import Row
from casnap.storage.reading.repository import Repository
from casnap.storage.reading.table import Table
from casnap.storage.snapshots.pruning import RetentionChange
from casnap.storage.snapshots.retention import Retention, Verdict, unknown_metrics
from casnap.storage.snapshots.thinning import thin_run
from casnap.storage.writing.session import Session

_log = logging.getLogger("casnap")
# The ids of stores for which a warning was logged that keep_best keeps every snapshot.
_warned: set[str] = set()


class Upkeep(NamedTuple):
    """The changes to the earlier snapshots of a run that a commit makes when it adds a snapshot.

    Attributes:
        pruned: The rows of the snapshots that are removed, by name.
        thinned: The new rows of the snapshots that are thinned, by name.
    """

    pruned: dict[str, Row]
    thinned: dict[str, Row]

    @classmethod
    def of_run(
        cls,
        table: Table,
        added: tuple[str, Row],
        retention: Retention | None,
        session: Session,
        *,
        replaced: Collection[str] = (),
        counts: Callable[[Row], bool] = lambda row: True,
    ) -> Upkeep:
        """Return the changes to the earlier snapshots of a run.

        An error is only logged as a warning, so that the new snapshot is committed all the same.
        The next commit repeats the upkeep.

        Args:
            table: The table that the commit changes.
            added: The name and row of the new snapshot, which stays as it is.
            retention: The rules; None keeps all snapshots.
            session: The session that commits. It stores the new manifests.
            replaced: The names of snapshots that the commit removes in any case.
            counts: Returns whether a snapshot counts for the rules. One that does not is kept.
        """
        if retention is None:
            return cls({}, {})
        name, row = added
        store, run = session.store, row.run_of(name)
        rows = {name: row}
        pruned: dict[str, Row] = {}
        try:
            earlier = table.rows_of_run(run).items()
            rows = {n: r for n, r in earlier if n not in replaced and counts(r)} | rows
            judging = RetentionChange(store, retention, run, row.commit)
            verdicts = judging.judge_rows(rows.items())
            pruned = {verdict.name: rows[verdict.name] for verdict in verdicts if not verdict.kept}
        except Exception as e:  # noqa: BLE001
            text = "%s is stored, but its run is not pruned: %s: %s"
            _log.warning(text, name, type(e).__name__, e)
        else:
            _warn_of_metric(store, name, retention, verdicts)
        remaining = [item for item in rows.items() if item[0] not in pruned]
        return cls(pruned, thin_run(store, remaining, retention.thin, session, name))


def _warn_of_metric(
    store: Repository, name: str, retention: Retention, verdicts: Iterable[Verdict]
) -> None:
    """Log a warning, once for each store, if no snapshot has the metric of ``keep_best``.

    The rule then keeps all snapshots.
    """
    unknown = unknown_metrics(retention, (verdict.row for verdict in verdicts))
    store_id = store.config.store_id
    if unknown and store_id not in _warned:
        _warned.add(store_id)
        _log.warning(
            "%s: keep_best keeps every snapshot, since none has %r as a number in its "
            "metadata; give it to the takes: metadata={%r: ...}",
            name,
            unknown[0],
            unknown[0],
        )
