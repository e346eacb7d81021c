"""Decide how a snapshot is put into a mirror that may have the same run from another store.

``docs/decisions/0058-lives-of-a-run.md`` has the rules, and ``tests/model/succession.py`` shows
that two nodes never mix their branches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from casnap.format.records import Row
from casnap.mirror.notes import (
    Life,
    copies_in,
    copy_notes,
    follows_of,
    life_of,
)
from casnap.storage import Repository, Retention, Session, Table, Upkeep
from casnap.transfer.copy_jobs import Placement, PlacementError


class SucceededError(PlacementError):
    """Another store has taken over the run at the mirror, and the snapshot does not follow it."""


@dataclass
class Succession:
    """Decides with which notes a snapshot enters a mirror, and which copies it replaces there.

    A run has a new *life* at the mirror whenever another store goes on with it.

    Attributes:
        source: The mirrored store.
        destination: The mirror.
        new_name: The full name of the snapshot at the mirror.
        row: Its row in the mirrored store.
        retention: Which copies to keep at the mirror; None for all.
        tag: The tag that the mirror follows; "" for none. A copy with this tag may be replaced; one
            with another tag may not.
        predecessor: The id of the store whose run the last placement took over; "" for none.
        replaced: The names of the copies of earlier lives that the last placement replaces.
    """

    source: Repository
    destination: Repository
    new_name: str
    row: Row
    retention: Retention | None
    tag: str = ""
    predecessor: str = ""
    replaced: tuple[str, ...] = ()

    @property
    def run(self) -> str:
        """The folder of the run at the mirror."""
        return self.row.run_of(self.new_name)

    def place(self, table: Table, seq: int) -> Placement:
        """Return the placement of the copy: its notes, and the copies that it replaces.

        Args:
            table: The table of the mirror.
            seq: The number of the mirror's next root.

        Raises:
            SucceededError: Another store has taken over the run, and the snapshot does not follow
                it.
        """
        copies = copies_in(table, self.run)
        life = self._life(copies, seq)
        if self.row.is_rewound:
            there = table.get(self.new_name) if self.row.is_witness else None
            replaced = {} if there is None or not there.is_witness else {self.new_name: there}
            return Placement(copy_notes(self.row, self.source.config.store_id, life), replaced)
        copies = {name: row for name, row in copies.items() if not row.is_rewound}
        earlier = {name: row for name, row in copies.items() if life_of(row) != life}
        follows = follows_of(self.row, self.destination.config.store_id)
        # Copies that the store had not seen when it resumed belong to another branch.
        replaced_names = {name for name, row in earlier.items() if row.seq > follows}
        if self.new_name in earlier:
            # The name was taken again: later copies came from the old snapshot, so they are
            # replaced too.
            names = [name for name, _ in Table.in_commit_order(earlier.items())]
            replaced_names.update(names[names.index(self.new_name) :])
        replaced_names = {n for n in replaced_names if not {*copies[n].tags} - {self.tag}}
        self.replaced = tuple(
            name for name, _ in Table.in_commit_order((n, copies[n]) for n in replaced_names)
        )
        if self.new_name in copies:
            replaced_names.add(self.new_name)
        notes = copy_notes(self.row, self.source.config.store_id, life)
        return Placement(notes, {name: copies[name] for name in replaced_names})

    def _life(self, copies: Mapping[str, Row], seq: int) -> Life:
        """Return the life of the run that the copy belongs to: the last one so far, or a new one.

        Args:
            copies: The copies of the run at the mirror.
            seq: The number of the mirror's next root.

        Raises:
            SucceededError: Another store writes the run, and the snapshot does not follow it.
        """
        follows = follows_of(self.row, self.destination.config.store_id)
        self.predecessor = ""
        newest = max(copies.values(), key=lambda row: row.seq, default=None)
        life = None if newest is None else life_of(newest)
        if newest is None or life is None:
            return Life(seq, follows)
        if follows >= life.follows and self.source.has_taken_origin_of(newest):
            return life
        if follows >= life.began:
            self.predecessor, _ = newest.origin
            return Life(seq, follows)
        run = f" in {self.run!r}" if self.run else ""
        raise SucceededError(
            f"{self.destination.backend.uri} has a run{run} that the store {newest.origin[0]} "
            f"writes, and the snapshots of {self.source.backend.uri} (the store "
            f"{self.source.config.store_id}) do not follow it: that store has succeeded this one, "
            "or this one never resumed from there. Nothing more of this run is mirrored from here; "
            "takes go on, and their retention alone says what is kept here. To go on with the run "
            "of the mirror, make a Store of an empty folder with this mirror, and resume from its "
            "latest(); to mirror this one too, give it a folder of its own there, as in "
            "mirror='s3://bucket/ckpts//node1'"
        )

    def upkeep(
        self, table: Table, replaced: Mapping[str, Row], row: Row, session: Session
    ) -> Upkeep:
        """Return which copies of the run the same commit deletes or thins, by the retention.

        The copies of all lives of the run count.

        Args:
            table: The table of the mirror.
            replaced: The copies that the new one replaces.
            row: The new row.
            session: The session of the mirror.
        """
        return Upkeep.of_run(
            table,
            (self.new_name, row),
            self.retention,
            session,
            replaced=replaced,
            counts=lambda row: life_of(row) is not None,
        )
