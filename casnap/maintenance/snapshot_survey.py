"""Survey the table: find out which snapshots there are, and what each damage hurts in them."""

from __future__ import annotations

from functools import partial

from casnap.format.digest import Digest
from casnap.format.records import Root, Row, Stats
from casnap.format.tree import Branch, Child, LeafNode, Tree
from casnap.maintenance.damage import ALL, Damage, Findings, Hurt
from casnap.maintenance.tree_survey import TreeSurvey, leaf_name
from casnap.runtime.progress import Progress
from casnap.storage import Contents

# How many nodes of the table, and manifests, are read ahead together.
_TOGETHER = 256


class SnapshotSurvey:
    """The snapshots of a root, and which damages hurt each of them.

    Args:
        root: The root.
        trees: The survey of its trees.
        findings: Gets each damage.
        progress: Called with the current phase, how much of it is done, and the total.

    Attributes:
        count: How many snapshots there are.
        rejected: The names in the table that cannot be names of snapshots.
        commits: The commit of each snapshot and unfinished copy, by its name in damages.
    """

    def __init__(
        self, root: Root, trees: TreeSurvey, findings: Findings, progress: Progress
    ) -> None:
        self._root = root
        self._trees = trees
        self._findings = findings
        self._progress = progress
        self.count = 0
        self.rejected: set[str] = set()
        self.commits: dict[str, bytes] = {}

    @property
    def table_is_lost(self) -> bool:
        """Whether a part of the table cannot be read, so that names of snapshots are missing."""

        def read() -> list[tuple[str, Row]]:
            return list(self._trees.nodes.table(self._root).items_in())

        return self._trees.try_read(read, "the table")[0] is None

    def walk(self, only: str | None = None) -> None:
        """Survey all snapshots and unfinished copies, or one snapshot.

        Args:
            only: The full name of the one snapshot; None for all.
        """
        table, damages = self._trees.try_read(
            partial(self._trees.nodes.table, self._root), "the table"
        )
        self._hurt(damages, ALL.snapshot, "")
        if only is None:
            self._copies()
        if table is None:
            return
        if only is not None:
            row, damages = self._trees.try_read(partial(table.get, only), "the table")
            self._hurt(damages, only, "")
            if row is not None:
                self._snapshot(only, row)
                self.count += 1
            return
        self._rows(table)
        self.rejected = table.rejected
        for name in sorted(table.rejected):
            self._findings.add(
                "malformed",
                "",
                f"the table has a row {name!r:.200}, which cannot be the name of a snapshot, so it "
                "is passed over; `casnap repair` removes it (--yes in a script)",
            )

    def _rows(self, table: Tree[Row]) -> None:
        """Survey all snapshots of the table.

        The nodes of a level are read together, then the manifests of many snapshots.

        Args:
            table: The table.
        """
        children, rows = table.children, list[tuple[str, Row]]()
        while children:
            below = list[Child]()
            for number, (key, digest, count) in enumerate(children):
                if not number % _TOGETHER:
                    window = children[number : number + _TOGETHER]
                    self._trees.nodes.read_ahead(digest for _, digest, _ in window)
                read = partial(table.node, Digest(digest))
                node, damages = self._trees.try_read(read, "the table")
                self._hurt(damages, leaf_name(key, count), "")
                below += node.children if isinstance(node, Branch) else ()
                rows += node.items if isinstance(node, LeafNode) else ()
            children = below
        for number, (name, row) in enumerate(rows):
            if not number % _TOGETHER:
                manifests = (row.manifest for _, row in rows[number : number + _TOGETHER])
                self._trees.nodes.read_ahead(manifest.digest for manifest in manifests)
            self._progress("looking at snapshots", self.count, len(table))
            self._snapshot(name, row)
            self.count += 1

    def _copies(self) -> None:
        """Survey the parts of unfinished copies. The root keeps these as it keeps snapshots."""
        # Their entries only name chunks, however short, and are no values.
        self._trees.judges = False
        for commit, copy in self._root.copies.items():
            row = Row(copy.parts.digest, copy.parts, self._root.seq, copy.time, 1, Stats())
            self._snapshot(copy_name(commit), row)
        self._trees.judges = True

    def _snapshot(self, name: str, row: Row) -> None:
        self.commits[name] = row.commit
        contents = Contents(self._trees.nodes, name, row)
        if row.unknown_features:
            names = ", ".join(row.unknown_features)
            unknown = self._findings.add_unsupported(
                f"it has the features {names:.200}; update casnap"
            )
            self._hurt([unknown], name, "")
        manifest, damages = self._trees.try_read(lambda: contents.unchecked_manifest, name)
        self._hurt(damages, name, "")
        self._hurt(self._trees.try_read(lambda: contents.metadata, name)[1], name, "")
        if manifest is None:
            return
        everyone = (manifest.shared, *manifest.ranks.values())
        tops = (top for subtrees in everyone for top in subtrees.values())
        self._trees.read_ahead(tops)
        groups = [("", manifest.shared), *((f"{r}/", k) for r, k in manifest.ranks.items())]
        for rank, subtrees in groups:
            for key, subtree in subtrees.items():
                for inner, damage in self._trees.subtree(contents, key, subtree).hurts:
                    damage.hurts[Hurt(name, f"{rank}{key}{inner}")] = None
        if self._trees.reads and self._trees.judges and not row.unknown_features:
            self._elements(contents)

    def _hurt(self, damages: list[Damage], snapshot: str, path: str) -> None:
        for damage in damages:
            damage.hurts[Hurt(snapshot, path)] = None

    def _elements(self, contents: Contents) -> None:
        """Report the containers of a snapshot that lack elements, as each rank sees them."""
        for rank in contents.ranks():
            for key, entries in contents.trees(rank).items():
                for inner, damage in self._trees.lacking(contents, entries):
                    damage.hurts[Hurt(contents.name, f"{rank}/{key}{inner}")] = None


def copy_name(commit: bytes) -> str:
    """Return the name, in damages, of an unfinished copy of a snapshot.

    Args:
        commit: The commit id of the snapshot.
    """
    return f"the unfinished copy {commit.hex()}"
