"""The snapshot table of a root: names and rows, and the rule that names must not shadow others."""

from __future__ import annotations

from collections.abc import Callable

from casnap.errors import SnapshotExistsError, SnapshotNotFoundError
from casnap.format import Row
from casnap.manifest import Tree

Table = Tree[Row]
Change = Callable[[Table, int], dict[str, "Row | None"]]


def check_free(table: Table, name: str, *, overwrite: bool, uri: str) -> None:
    """Check that a snapshot may be made under this name.

    Raises:
        SnapshotExistsError: The name is taken, or is a folder of, or inside of, another name.
    """
    if table.get(name) is not None and not overwrite:
        raise SnapshotExistsError(
            f"{uri} holds a snapshot {name!r} already; choose another name, delete it, or pass "
            "overwrite=True"
        )
    parts = name.split("/")
    for n in range(1, len(parts)):
        outer = "/".join(parts[:n])
        if table.get(outer) is not None:
            raise SnapshotExistsError(
                f"{uri}: {outer!r} is a snapshot, so nothing can be taken below it as {name!r}"
            )
    inner = next(table.below(f"{name}/"), None)
    if inner is not None:
        raise SnapshotExistsError(
            f"{uri}: {name!r} is the folder of the snapshot {inner[0]!r}; choose another name"
        )


def setting(name: str, row: Callable[[int], Row], *, overwrite: bool, uri: str) -> Change:
    """Return the change that adds a row, made for the number of the root it will stand in."""

    def change(table: Table, seq: int) -> dict[str, Row | None]:
        check_free(table, name, overwrite=overwrite, uri=uri)
        return {name: row(seq)}

    return change


def removing(name: str, commit: bytes, uri: str) -> Change:
    """Return the change that removes a row, if it is still that commit's."""

    def change(table: Table, _seq: int) -> dict[str, Row | None]:
        row = table.get(name)
        if row is None or row.commit != commit:
            raise SnapshotNotFoundError(
                f"{uri}: the snapshot {name!r} was deleted or replaced in the meantime"
            )
        return {name: None}

    return change
