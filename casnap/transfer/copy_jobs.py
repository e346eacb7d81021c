"""The options of a copy, and its report."""

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
    """A snapshot has no place at its destination, as :attr:`CopyJob.place` says."""


class Placement(NamedTuple):
    """How a snapshot is put into the table of a destination.

    Attributes:
        notes: The notes that its row is to have there.
        replaced: The snapshots there that it replaces, by full name.
        tags: Tags that it gets there beside its own.
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
        replaces: The commit ids of snapshots that it may replace there.
        place: Says otherwise how it is placed, given the table and the number of the next root. It
            raises :class:`PlacementError` to give up.
        moved_tag: A tag that is moved to it there, so that it holds nothing that this replaces.
        upkeep: Given the table, what the snapshot replaces, its new row, and the session, returns
            what else the same commit does to the run there.
    """

    name: str
    new_name: str
    row: Row
    replaces: frozenset[bytes] = frozenset()
    place: Callable[[Table, int], Placement] | None = None
    moved_tag: str = ""
    upkeep: Callable[[Table, Mapping[str, Row], Row, Session], Upkeep] | None = None

    def placement(self, table: Table, seq: int) -> Placement:
        """Return how it is placed in a table, for the root of a number."""
        if self.place is not None:
            return self.also_replacing_itself(table, self.place(table, seq))
        row = table.get(self.new_name)
        replaced = {self.new_name: row} if row is not None and row.commit in self.replaces else {}
        return self.also_replacing_itself(table, Placement(self.row.copied_notes, replaced))

    def also_replacing_itself(self, table: Table, placement: Placement) -> Placement:
        """Return a placement that replaces the same snapshot by the name that it had there before.

        It has another name since its run went back from it, or to it again.
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
    """How to copy.

    Attributes:
        dry_run: Only report what would be sent.
        skip_gone: Pass over snapshots that are deleted from the source meanwhile.
        part_bytes: Commit what was sent when it is about so many bytes, so that a repeat goes on
            from there.
        part_seconds: Commit it also when about so many seconds have passed: a link may be slow.
        hooks: Those of the destination.
        gets_all: Whether the destination gets each snapshot: then it gets deltas on a disk too.
    """

    dry_run: bool = False
    skip_gone: bool = False
    part_bytes: int = PART_BYTES
    part_seconds: float = PART_SECONDS
    hooks: CommitHooks = field(default_factory=CommitHooks)
    gets_all: bool = False


@dataclass
class CopyReport:
    """What a copy did, or with ``dry_run`` would do. Bytes are those of chunks and nodes as stored.

    Attributes:
        dry_run: Whether nothing was changed.
        copied: The names of the snapshots that were copied, as they are called there.
        present: The names of those that were there already.
        gone: The names, in the source, of those that were deleted there meanwhile.
        sent_chunks: How many chunks and tree nodes were sent.
        sent_bytes: Their bytes.
        present_chunks: How many chunks and tree nodes of the copied snapshots were there already.
            One that several snapshots have may count more than once.
        present_bytes: Their bytes.
        seconds: How long it took.
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
