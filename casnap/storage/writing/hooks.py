"""The hooks of a commit.

``Store`` and ``Snapshot`` set them: to add notes, to make room on the disk, and to collect garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from casnap.errors import StorageFullError
from casnap.format.records import Row

CountBytes = Callable[[], int]
"""Returns an upper estimate of the bytes to write."""


# Not lambdas: the options of takes are pickled for processes that save in the background.
def _no_notes(_name: str) -> dict[str, Any]:
    return {}


def _make_no_room(_count_bytes: CountBytes) -> None:
    pass


def _raise_full(error: StorageFullError, _count_bytes: CountBytes) -> None:
    raise error


def _ignore(_rows: Sequence[Row]) -> None:
    pass


def _do_nothing() -> None:
    pass


def _ignore_taken(_name: str, _row: Row) -> None:
    pass


def _freed_nothing() -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class CommitHooks:
    """The functions that takes and copies call around a commit.

    Attributes:
        notes: Returns the notes for the row of a new snapshot, given its full name.
        make_room: Called before a take writes anything, with a function that returns how many bytes
            it may write.
        on_full: Called if the disk is full. It returns if there is more room now, and otherwise
            raises.
        on_release: Called after a commit, with the rows of the snapshots that the commit removed.
        on_commit: Called after ``on_release``.
        on_taken: Called once a take has committed, with the full name and the row of its snapshot.
        count_freed: Returns how many bytes were freed since its last call, for the stats of a take.
    """

    notes: Callable[[str], dict[str, Any]] = _no_notes
    make_room: Callable[[CountBytes], None] = _make_no_room
    on_full: Callable[[StorageFullError, CountBytes], None] = _raise_full
    on_release: Callable[[Sequence[Row]], None] = _ignore
    on_commit: Callable[[], None] = _do_nothing
    on_taken: Callable[[str, Row], None] = _ignore_taken
    count_freed: Callable[[], int] = _freed_nothing
