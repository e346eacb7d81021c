"""The table of snapshots: the order of snapshots, and the rules for new names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile

from casnap.errors import SnapshotExistsError
from casnap.format.digest import Digest
from casnap.format.names import is_row_name
from casnap.format.records import WITNESS, Row, decode_row
from casnap.format.tree import TABLE_FANOUT, Load, Put, Tree
from casnap.runtime.typing import override

_WITNESSES = "witness"


def _snapshots_among(items: Iterable[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    return (item for item in items if not item[1].is_witness)


class Table(Tree[Row]):
    """The snapshots of a store as of one root: full name → row.

    It also holds witnesses: not snapshots, but tables of the digests of a state. ``items`` leaves
    the witnesses out; ``get`` finds them.

    Args:
        top: The digest of the top node; None if there is no snapshot.
        load: Returns the verified bytes of a node.
        cache: Reads and caches many nodes together.
    """

    def __init__(
        self, top: Digest | None, load: Load, cache: Callable[[list[Digest]], object]
    ) -> None:
        super().__init__(top, load, Row, TABLE_FANOUT, is_row_name, decode_row)
        self._cache = cache

    def rows_in(self, folder: str = "") -> list[tuple[str, Row]]:
        """Return what ``items_in`` yields. Nodes that are not cached are read together."""
        self.read_ahead(f"{folder}/" if folder else "", self._cache)
        return list(self.items_in(folder))

    @override
    def items(self, start: str = "") -> Iterator[tuple[str, Row]]:
        """Yield the snapshots in the order of their names, from a name on."""
        return _snapshots_among(super().items(start))

    @override
    def items_below(self, prefix: str) -> Iterator[tuple[str, Row]]:
        """Yield the snapshots whose names begin with ``prefix``.

        A witness of another name ends the search, too: there may be thousands in a row.
        """
        return _snapshots_among(self._all_below(prefix))

    def with_witnesses(self, folder: str = "") -> Iterator[tuple[str, Row]]:
        """Yield the snapshots and the witnesses in a folder, in the order of their names."""
        return self._all_below(f"{folder}/" if folder else "")

    def _all_below(self, prefix: str) -> Iterator[tuple[str, Row]]:
        return takewhile(lambda item: item[0].startswith(prefix), super().items(prefix))

    @staticmethod
    def witness_name(name: str) -> str:
        """Return the full name of a witness in the table, by the name that a user gives it."""
        run, _, last = name.rpartition("/")
        return f"{run}/{_WITNESSES}/{last}".lstrip("/")

    def witnesses_of(self, run: str) -> dict[str, Row]:
        """Return the witnesses of a run by their full names."""
        folder = f"{run}/{_WITNESSES}".lstrip("/")
        return {name: row for name, row in self.with_witnesses(folder) if row.is_witness}

    @override
    def edit(self, changes: Mapping[str, Row | None], put_node: Put) -> Digest | None:
        """Store a changed copy of this table: see :meth:`casnap.format.tree.Tree.edit`.

        If a snapshot is removed or replaced, the witnesses of its run are removed too, unless the
        snapshot that they name is still in the run.
        """
        return super().edit({**dict.fromkeys(self._needless(changes)), **changes}, put_node)

    def _needless(self, changes: Mapping[str, Row | None]) -> Iterator[str]:
        """Yield the names of the witnesses that :meth:`edit` removes along with some changes."""
        runs = set()
        for name, row in changes.items():
            before = self.get(name)
            if before is None or before.is_witness:
                continue
            if row is None or row.commit != before.commit:
                runs.add(before.run_of(name))
        for run in runs:
            if witnesses := self.witnesses_of(run):
                rows = {**self.rows_of_run(run), **changes}
                commits = {row.commit.hex() for row in rows.values() if row is not None}
                yield from (n for n, row in witnesses.items() if row.notes[WITNESS] not in commits)

    def rows_of_run(self, run: str) -> dict[str, Row]:
        """Return the snapshots of a run: name → row.

        Snapshots that a rewind has moved aside count too.
        """
        return {name: row for name, row in self.items_in(run) if row.run_of(name) == run}

    def last_commit(self, run: str) -> str:
        """Return the commit id of the last snapshot of a run, in hex; "" if it has none."""
        rows = [item for item in self.rows_of_run(run).items() if not item[1].is_rewound]
        return self.in_commit_order(rows)[-1][1].commit.hex() if rows else ""

    @staticmethod
    def in_commit_order(rows: Iterable[tuple[str, Row]]) -> list[tuple[str, Row]]:
        """Return snapshots in the order in which they were committed.

        Copies from another store may be committed here in another order than there: for example,
        one was copied late, after a repair. The row of such a copy names the root of the original.
        So the copies from one store are sorted by these roots; as a group they keep their positions
        in the list, and so do all other snapshots.
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

    def check_free(
        self,
        name: str,
        *,
        overwrite: bool,
        uri: str,
        moved_tag: str = "",
        advice: str = "choose another name, or delete it; a take may also pass overwrite=True",
    ) -> None:
        """Check that a new snapshot may have a name.

        Args:
            name: The full name of the new snapshot.
            overwrite: Whether it may replace a snapshot that has no tag.
            uri: The URI of the store, for messages.
            moved_tag: A tag that the commit moves from the old to the new snapshot. It does not
                protect the old snapshot.
            advice: What the caller can do if another snapshot has the name, for the message.

        Raises:
            SnapshotExistsError: The name is taken, and may not be overwritten. Or the name is a
                folder of another snapshot, or lies below another snapshot.
        """
        row = self.get(name)
        if row is not None and not overwrite:
            raise SnapshotExistsError(f"{uri} holds a snapshot {name!r} already; {advice}")
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
        inner = next(self.with_witnesses(name), None)
        if inner is not None:
            what = "witness" if inner[1].is_witness else "snapshot"
            raise SnapshotExistsError(
                f"{uri}: {name!r} is the folder of the {what} {inner[0]!r}; choose another name"
            )
