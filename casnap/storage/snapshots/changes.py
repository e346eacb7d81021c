"""Commits that add no snapshot: they change only the table and the settings of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import msgspec

from casnap.errors import SnapshotNotFoundError, StorageFullError
from casnap.format.records import Root, Row
from casnap.runtime.threads import Crew, run_shielded
from casnap.storage.commit_log.roots import release_reserve, with_advice
from casnap.storage.reading.repository import Repository
from casnap.storage.reading.table import Table
from casnap.storage.writing.session import Session
from casnap.storage.writing.starting_over import Obstacle, again

_TRIES = 3

Change = Callable[[Table, int], dict[str, "Row | None"]]


class Changes:
    """Commits to a store that add no snapshot.

    Args:
        store: The store.
    """

    def __init__(self, store: Repository) -> None:
        self._store = store

    def commit(
        self, change: Change, update_root: Callable[[Root], Root] = lambda root: root
    ) -> bool:
        """Commit a change to the table. If it changes nothing, put no root, and return False.

        Args:
            change: Called with the table and the number of the next root. Returns the rows to set,
                by name, with None for each row to remove.
            update_root: Changes fields of the next root other than its table. It gets the newest
                root, and returns the changed copy.
        """
        return self.commit_with(lambda _: change, update_root)

    def edit_row(self, name: str, commit_id: str, edit: Callable[[Row], Row | None]) -> None:
        """Change or remove the row of a snapshot, in one commit.

        Args:
            name: The full name of the snapshot.
            commit_id: The commit id that the snapshot must have, in hex.
            edit: Called with the row; returns the new row, or None to remove it.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name and commit id.
        """

        def change(table: Table, _seq: int) -> dict[str, Row | None]:
            row = table.get(name)
            if row is None or row.commit.hex() != commit_id:
                raise SnapshotNotFoundError(
                    f"{self._store.backend.uri}: the snapshot {name!r} was deleted or replaced in "
                    "the meantime"
                )
            edited = edit(row)
            return {} if edited == row else {name: edited}

        self.commit(change)

    def edit_settings(
        self,
        edit: Callable[[dict[str, Any]], dict[str, Any]],
        edit_rows: Callable[[Iterable[tuple[str, Row]]], dict[str, Row | None]] = lambda _: {},
    ) -> bool:
        """Change the settings of the store, in one commit. Return False if nothing changed.

        Args:
            edit: Called with the settings; returns the new ones.
            edit_rows: Called with the names and rows of all snapshots if the settings change;
                returns the rows to change in the same commit.
        """

        def update_root(root: Root) -> Root:
            before = self._store.settings(root).values
            after = edit(dict(before))
            if after == before:
                return root
            return msgspec.structs.replace(root, settings=after)

        def change(table: Table, seq: int) -> dict[str, Row | None]:
            before = self._store.newest()
            stays = before.seq == seq - 1 and update_root(before) is before
            return {} if stays else edit_rows(table.items_in())

        return self.commit(change, update_root)

    def commit_with(
        self,
        change_in: Callable[[Session], Change],
        update_root: Callable[[Root], Root] = lambda root: root,
    ) -> bool:
        """Commit as :meth:`commit` does, for a change that also stores nodes.

        Args:
            change_in: Returns the change, given the session in which to store nodes.
            update_root: As for :meth:`commit`.
        """

        def some(change: Change, table: Table, seq: int) -> dict[str, Row | None] | None:
            changes = change(table, seq)
            newest = self._store.newest()
            return changes if changes or update_root(newest) != newest else None

        def commit(crew: Crew) -> bool:
            with Session(self._store, crew) as session:
                change = partial(some, change_in(session))
                return session.commit(change, update_root=update_root) is not None

        def give_up(error: Obstacle) -> NoReturn:
            if isinstance(error, StorageFullError):
                raise with_advice(error, self._store.recent()) from error
            raise error

        return again(
            self._store,
            lambda: run_shielded(commit),
            f"{self._store.backend.uri}: a change",
            tries=_TRIES,
            on_full=lambda _: release_reserve(self._store.backend),
            give_up=give_up,
        )
