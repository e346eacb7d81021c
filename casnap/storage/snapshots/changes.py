"""Commits that change only the table and the settings of a store."""

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


def edit_row(
    store: Repository, name: str, commit_id: str, edit: Callable[[Row], Row | None]
) -> None:
    """Edit the row of a snapshot, or remove it, in one commit.

    Args:
        store: The store.
        name: The full name of the snapshot.
        commit_id: The commit id that it must have.
        edit: Gets the row, and returns the new one; None removes it.

    Raises:
        SnapshotNotFoundError: There is no snapshot of this name and commit id.
    """

    def change(table: Table, _seq: int) -> dict[str, Row | None]:
        row = table.get(name)
        if row is None or row.commit.hex() != commit_id:
            raise SnapshotNotFoundError(
                f"{store.backend.uri}: the snapshot {name!r} was deleted or replaced in the "
                "meantime"
            )
        edited = edit(row)
        return {} if edited == row else {name: edited}

    change_table(store, change)


def change_table(
    store: Repository, change: Change, update_root: Callable[[Root], Root] = lambda root: root
) -> bool:
    """Commit a change of the table; return False, and put no root, if it changes nothing.

    Args:
        store: The store.
        change: Gets the table and the number of the next root. Returns the rows to set, with None
            for each row to remove.
        update_root: Returns the last root with other fields changed for the next root.
    """
    return commit_change(store, lambda _: change, update_root)


def change_settings(
    store: Repository,
    edit: Callable[[dict[str, Any]], dict[str, Any]],
    edit_rows: Callable[[Iterable[tuple[str, Row]]], dict[str, Row | None]] = lambda _: {},
) -> bool:
    """Change settings of a store, in one commit; return False if nothing changed.

    Args:
        store: The store.
        edit: Gets the settings, and returns the new ones.
        edit_rows: Gets the snapshots, and returns the rows to change too if the settings change.
    """

    def update_root(root: Root) -> Root:
        before = store.settings(root).values
        after = edit(dict(before))
        if after == before:
            return root
        return msgspec.structs.replace(root, settings=after)

    def change(table: Table, seq: int) -> dict[str, Row | None]:
        before = store.newest()
        stays = before.seq == seq - 1 and update_root(before) is before
        return {} if stays else edit_rows(table.items_in())

    return change_table(store, change, update_root)


def commit_change(
    store: Repository,
    change_in: Callable[[Session], Change],
    update_root: Callable[[Root], Root] = lambda root: root,
) -> bool:
    """Commit as :func:`change_table` does, for a change that stores nodes in the session."""

    def some(change: Change, table: Table, seq: int) -> dict[str, Row | None] | None:
        changes = change(table, seq)
        newest = store.newest()
        return changes if changes or update_root(newest) != newest else None

    def commit(crew: Crew) -> bool:
        with Session(store, crew) as session:
            change = partial(some, change_in(session))
            return session.commit(change, update_root=update_root) is not None

    def give_up(error: Obstacle) -> NoReturn:
        if isinstance(error, StorageFullError):
            raise with_advice(error, store.recent()) from error
        raise error

    return again(
        store,
        lambda: run_shielded(commit),
        f"{store.backend.uri}: a change",
        tries=_TRIES,
        on_full=lambda _: release_reserve(store.backend),
        give_up=give_up,
    )
