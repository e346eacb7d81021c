"""The last step of a take: the row of the snapshot, its marker file, and the pruning of its run."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from casnap.format.records import Row, Stats, encode
from casnap.storage.catalog.mirror_notes import UNMIRRORED
from casnap.storage.catalog.retention import Retention, RetentionChange, prune, unknown_metrics
from casnap.storage.catalog.table import Table, mark, row_setter
from casnap.storage.chunks.objects import Objects
from casnap.storage.commits.commit import publish
from casnap.storage.commits.rank_parts import OtherRanks
from casnap.storage.commits.transaction import Transaction
from casnap.take.manifest import BuiltManifest
from casnap.take.options import TakeOptions

_log = logging.getLogger("casnap")
# The stores, by id, of which a warning was logged that keep_best keeps every snapshot.
_warned: set[str] = set()


class Taken(msgspec.Struct, frozen=True):
    """A snapshot that was taken just now.

    Attributes:
        row: Its row in the table.
        requests: How many requests the take made, by kind, on all ranks. They are not stored: when
            a row is written, its take still has to put the root.
    """

    row: Row
    requests: dict[str, int] = {}


@dataclass(frozen=True)
class Publication:
    """A snapshot that is about to be published.

    Attributes:
        objects: The store.
        name: The name of the snapshot.
        options: How it is taken.
        world_size: The number of ranks that take it.
        started: When the take began, by ``time.monotonic``.
    """

    objects: Objects
    name: str
    options: TakeOptions
    world_size: int
    started: float

    def publish(
        self, transaction: Transaction, built: BuiltManifest | None, others: OtherRanks
    ) -> Taken:
        """Commit the snapshot, with all that the other ranks wrote."""
        assert built is not None, "rank 0 publishes, and has the manifest"
        digest = transaction.put_node(encode(built.manifest))
        made: list[Row] = []

        mirrored = self.options.on_commit is not None

        def row(seq: int) -> Row:
            duration = time.monotonic() - self.started
            new_bytes = transaction.new_packs.stored_bytes + others.new_bytes
            made.append(
                Row(
                    commit=transaction.commit,
                    manifest=transaction.ref(digest),
                    seq=seq,
                    time=time.time(),
                    world_size=self.world_size,
                    stats=Stats(built.logical_bytes, new_bytes, built.entries, duration),
                    metadata=dict(self.options.metadata or {}),
                    tags=(UNMIRRORED,) if mirrored else (),
                )
            )
            return made[-1]

        uri, overwrite = self.objects.backend.uri, self.options.overwrite
        change = row_setter(self.name, row, overwrite=overwrite, uri=uri)
        replaced: list[Row] = []

        def change_and_note(table: Table, seq: int) -> Mapping[str, Row | None]:
            replaced[:] = filter(None, [table.get(self.name)])
            return change(table, seq)

        publish(transaction, change_and_note, others)
        self.options.on_release(replaced)
        if self.options.on_commit is not None:
            self.options.on_commit()
        mark(self.objects, self.name, made[-1])
        if self.options.retention is not None:
            self._prune(made[-1], self.options.retention)
        return Taken(made[-1], dict(transaction.requests + others.requests))

    def find(self, commit: bytes) -> Row | None:
        """Return the row of this take if the store has it, given the commit id."""
        row = self.objects.current(lambda root: self.objects.table(root).get(self.name))
        return row if row is not None and row.commit == commit else None

    def _prune(self, row: Row, retention: Retention) -> None:
        """Prune the run. An error is a warning only: the snapshot is committed."""
        run = self.name.rpartition("/")[0]
        try:
            verdicts = prune(
                self.objects, RetentionChange(self.objects, retention, run, row.commit)
            )
        except Exception as e:  # noqa: BLE001
            _log.warning(
                "%s is committed, but its run was not pruned: %s: %s",
                self.name,
                type(e).__name__,
                e,
            )
            return
        self.options.on_release([verdict.row for verdict in verdicts if not verdict.kept])
        store = self.objects.config.store_id
        unknown = unknown_metrics(retention, (v.row for v in verdicts))
        if unknown and store not in _warned:
            _warned.add(store)
            _log.warning(
                "%s: keep_best keeps every snapshot, since none has %r as a number in its "
                "metadata; give it to the takes: metadata={%r: ...}",
                self.name,
                unknown[0],
                unknown[0],
            )
