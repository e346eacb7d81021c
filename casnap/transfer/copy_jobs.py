"""The jobs, the options and the report of a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from casnap.errors import StoreError
from casnap.format.records import Row
from casnap.storage import CommitHooks, Session, Table, Upkeep

PART_BYTES = 1 << 30
PART_SECONDS = 30.0


class PlacementError(StoreError):
    """The snapshot may not be put into the destination. :attr:`CopyJob.place` raises this."""


class Placement(NamedTuple):
    """How a copy enters the table of its destination: its notes and tags, and what it replaces.

    Attributes:
        notes: The notes of the new row.
        replaced: The full name of each snapshot of the destination that it replaces → its row.
        tags: Tags of the new row, in addition to those of the snapshot.
    """

    notes: Mapping[str, Any]
    replaced: Mapping[str, Row]
    tags: tuple[str, ...] = ()


class CopyJob(NamedTuple):
    """A snapshot to copy.

    Attributes:
        name: Its full name in the source.
        new_name: Its full name in the destination.
        row: Its row in the source's table.
        replaces: The commit ids of snapshots that it may replace at the destination.
        place: Given the destination's table and the number of its next root, returns the placement.
            It may raise :class:`PlacementError`. None: the copy replaces a snapshot of its new
            name, if ``replaces`` allows that.
        moved_tag: A tag that is moved to this copy. A snapshot that has this tag so far may be
            replaced.
        upkeep: Given the table, the replaced snapshots, the new row, and the session, returns which
            other snapshots of the run the same commit deletes or thins at the destination.
    """

    name: str
    new_name: str
    row: Row
    replaces: frozenset[bytes] = frozenset()
    place: Callable[[Table, int], Placement] | None = None
    moved_tag: str = ""
    upkeep: Callable[[Table, Mapping[str, Row], Row, Session], Upkeep] | None = None

    def placement(self, table: Table, seq: int) -> Placement:
        """Return how to put the snapshot into the table, for the root of number ``seq``."""
        if self.place is not None:
            return self.also_replacing_itself(table, self.place(table, seq))
        row = table.get(self.new_name)
        may = row is not None and (
            row.commit in self.replaces or (self.row.is_witness and row.is_witness)
        )
        replaced = {self.new_name: row} if row is not None and may else {}
        return self.also_replacing_itself(table, Placement(self.row.copied_notes, replaced))

    def also_replacing_itself(self, table: Table, placement: Placement) -> Placement:
        """Return a placement that also replaces this snapshot's copy under an earlier name.

        A snapshot is renamed when its run is rewound to an earlier one, and when it is brought
        back.
        """
        base_name = self.new_name.rpartition("/")[2]
        same = {
            name: row
            for name, row in table.rows_of_run(self.row.run_of(self.new_name)).items()
            if row.commit == self.row.commit
            and row.is_rewound != self.row.is_rewound
            and name.rpartition("/")[2] == base_name
        }
        tags = tuple(tag for row in same.values() for tag in row.tags)
        return placement._replace(replaced={**placement.replaced, **same}, tags=tags)


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """The options of a copy.

    Attributes:
        dry_run: Whether to report only what would be sent.
        skip_gone: Whether to skip snapshots that are deleted from the source meanwhile.
        part_bytes: About how many bytes to send before they are committed, so that a repeated copy
            goes on from there.
        part_seconds: About how many seconds to send before the chunks are committed, if
            ``part_bytes`` are not reached earlier, as on a slow link.
        hooks: The hooks of commits to the destination.
        gets_all: Whether the destination gets each snapshot. If so, it gets deltas even on a disk.
    """

    dry_run: bool = False
    skip_gone: bool = False
    part_bytes: int = PART_BYTES
    part_seconds: float = PART_SECONDS
    hooks: CommitHooks = field(default_factory=CommitHooks)
    gets_all: bool = False


@dataclass
class CopyReport:
    """The outcome of a copy; with ``dry_run``, what it would be.

    All bytes are those of chunks and nodes, as they are stored.

    Attributes:
        dry_run: Whether nothing was changed.
        copied: The names, at the destination, of the snapshots that were copied.
        present: The names of snapshots that the destination had already.
        gone: The names, in the source, of snapshots that were deleted there meanwhile.
        sent_chunks: How many chunks and tree nodes were sent.
        sent_bytes: The bytes of the chunks and nodes that were sent.
        present_chunks: How many chunks and tree nodes of the copied snapshots the destination had
            already. One that several snapshots share may count more than once.
        present_bytes: The bytes of the chunks and nodes that it had already.
        seconds: How long the copy took.
    """

    dry_run: bool = False
    copied: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    sent_chunks: int = 0
    sent_bytes: int = 0
    present_chunks: int = 0
    present_bytes: int = 0
    seconds: float = 0.0
