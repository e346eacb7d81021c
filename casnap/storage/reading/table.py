"""The table of snapshots: the order of snapshots, and the rules for new names."""

from __future__ import annotations

from collections.abc import Iterable

from casnap.errors import SnapshotExistsError
from casnap.format.records import Row
from casnap.format.tree import Tree


class Table(Tree[Row]):
    """The snapshots of a store as of one root: full name → row."""

    def rows_of_run(self, run: str) -> dict[str, Row]:
        """Return the snapshots of a run: name → row.

        Snapshots that a rewind has moved aside count too.
        """
        return {name: row for name, row in self.items_in(run) if row.run_of(name) == run}

    @staticmethod
    def in_commit_order(rows: Iterable[tuple[str, Row]]) -> list[tuple[str, Row]]:
        """Return snapshots in the order in which they were committed.

        A copy of a snapshot from another store may be committed late: for example, only after a
        repair, or once its name is free. So the copies from one store change places with each
        other, until they are in the order of their commits in that store, if their rows name these
        commits. All other snapshots keep their places.
        """
        ordered = sorted(rows, key=lambda item: (item[1].seq, item[0]))
        places: dict[str, list[int]] = {}
        for at, (_, row) in enumerate(ordered):
            store_id, seq = row.origin
            if seq >= 0:
                places.setdefault(store_id, []).append(at)
        for at_places in places.values():
            of_one = sorted((ordered[at] for at in at_places), key=lambda item: item[1].origin[1])
            for at, item in zip(at_places, of_one, strict=True):
                ordered[at] = item
        return ordered

    def check_free(self, name: str, *, overwrite: bool, uri: str, moved_tag: str = "") -> None:
        """Check that a new snapshot may have a name.

        Args:
            name: The full name of the new snapshot.
            overwrite: Whether it may replace a snapshot that has no tag.
            uri: The URI of the store, for messages.
            moved_tag: A tag that the commit moves from the old to the new snapshot. It does not
                protect the old snapshot.

        Raises:
            SnapshotExistsError: The name is taken, and may not be overwritten. Or the name is a
                folder of another snapshot, or lies below another snapshot.
        """
        row = self.get(name)
        if row is not None and not overwrite:
            raise SnapshotExistsError(
                f"{uri} holds a snapshot {name!r} already; choose another name, or delete it; a "
                "take may also pass overwrite=True"
            )
        tags = () if row is None else tuple(tag for tag in row.tags if tag != moved_tag)
        if tags:
            raise SnapshotExistsError(
                f"{uri}: the snapshot {name!r} is tagged ({', '.join(tags):.200}), so it is "
                "not overwritten; choose another name, or untag it first (`casnap tag --remove`)"
            )
        parts = name.split("/")
        for n in range(1, len(parts)):
            outer = "/".join(parts[:n])
            if self.get(outer) is not None:
                raise SnapshotExistsError(
                    f"{uri}: {outer!r} is a snapshot, so nothing can be taken below it as {name!r}"
                )
        inner = next(self.items_below(f"{name}/"), None)
        if inner is not None:
            raise SnapshotExistsError(
                f"{uri}: {name!r} is the folder of the snapshot {inner[0]!r}; choose another name"
            )
