"""Runs: the snapshots of a folder, in the order of their commits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from casnap.format.names import folder_of
from casnap.format.records import Row
from casnap.storage.reading.table import Table


class Run(NamedTuple):
    """A run, or a part of it: snapshots of one folder.

    Attributes:
        folder: The full name of the folder.
        snapshots: Names and rows of the snapshots, the oldest first.
    """

    folder: str
    snapshots: list[tuple[str, Row]]

    def newest(self, count: int) -> list[tuple[str, Row]]:
        """Return the ``count`` newest snapshots, or all if there are fewer."""
        return self.snapshots[max(0, len(self.snapshots) - count) :]

    def older(self, count: int) -> list[tuple[str, Row]]:
        """Return all snapshots except the ``count`` newest."""
        return self.snapshots[: max(0, len(self.snapshots) - count)]


def runs_of(rows: Iterable[tuple[str, Row]]) -> list[Run]:
    """Return the runs of snapshots, for rules about the last snapshots of a run.

    In each run, snapshots that a rewind has moved aside come first: the run goes on without them.
    """
    ordered = sorted(Table.in_commit_order(rows), key=lambda item: not item[1].is_rewound)
    runs: dict[str, list[tuple[str, Row]]] = {}
    for name, row in ordered:
        runs.setdefault(row.run_of(name), []).append((name, row))
    return [Run(*run) for run in runs.items()]


def folders_of(rows: Iterable[tuple[str, Row]]) -> list[Run]:
    """Return snapshots by the folder that they lie in, in their given order.

    Unlike in :func:`runs_of`, snapshots that a rewind has moved aside have a folder of their own.
    """
    folders: dict[str, list[tuple[str, Row]]] = {}
    for name, row in rows:
        folders.setdefault(folder_of(name), []).append((name, row))
    return [Run(*folder) for folder in folders.items()]
