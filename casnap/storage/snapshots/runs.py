"""Runs: the snapshots of a folder, in the order in which they were committed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from casnap.format.names import folder_of
from casnap.format.records import Row
from casnap.storage.reading.table import Table


class Run(NamedTuple):
    """The snapshots of one folder, or some of them.

    Attributes:
        folder: The full name of the folder.
        snapshots: The name and row of each snapshot, the oldest first.
    """

    folder: str
    snapshots: list[tuple[str, Row]]

    def newest(self, count: int) -> list[tuple[str, Row]]:
        """Return the ``count`` newest snapshots, or all if there are fewer."""
        return self.snapshots[max(0, len(self.snapshots) - count) :]

    def older(self, count: int) -> list[tuple[str, Row]]:
        """Return all snapshots except the ``count`` newest."""
        return self.snapshots[: max(0, len(self.snapshots) - count)]

    @property
    def last_healthy(self) -> str:
        """The name of the last healthy snapshot, if the last snapshot is unhealthy; else "".

        This snapshot must stay: later ones would bring NaN into a run that resumes from them.
        """
        rows = [(n, row) for n, row in self.snapshots if not (row.is_rewound or row.is_thinned)]
        if not rows or not rows[-1][1].unhealthy:
            return ""
        return next((name for name, row in reversed(rows) if not row.unhealthy), "")


def runs_of(rows: Iterable[tuple[str, Row]]) -> list[Run]:
    """Group snapshots by run, for rules about the newest snapshots of a run.

    In each run, the snapshots that a rewind has moved aside come first, as if they were the oldest.
    """
    ordered = sorted(Table.in_commit_order(rows), key=lambda item: not item[1].is_rewound)
    runs: dict[str, list[tuple[str, Row]]] = {}
    for name, row in ordered:
        runs.setdefault(row.run_of(name), []).append((name, row))
    return [Run(*run) for run in runs.items()]


def folders_of(rows: Iterable[tuple[str, Row]]) -> list[Run]:
    """Group snapshots by the folder that each lies in, in the given order.

    Unlike :func:`runs_of`, this puts snapshots that a rewind has moved aside into a group of their
    own.
    """
    folders: dict[str, list[tuple[str, Row]]] = {}
    for name, row in rows:
        folders.setdefault(folder_of(name), []).append((name, row))
    return [Run(*folder) for folder in folders.items()]
