"""The tree of a snapshot that is copied."""

from __future__ import annotations

from collections.abc import Iterator

from casnap.format.digest import Digest
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.references import MANIFEST, is_node, walk
from casnap.transfer.copy_jobs import CopyJob


class SourceTree:
    """The tree of a snapshot, without the subtrees that were copied with an earlier one.

    Args:
        source: The store.
        job: The snapshot.
        visited: References to nodes that were visited before; new ones are added.
        owners: The copied snapshot that each of these is part of.

    Attributes:
        nodes: References to the nodes that were visited so far, each before those below it.
        shared_with: The copied snapshots that the other nodes are part of, by their new names.
    """

    def __init__(
        self,
        source: Repository,
        job: CopyJob,
        visited: set[bytes],
        owners: dict[bytes, CopyJob],
    ) -> None:
        self._source = source
        self._ref = job.row.manifest
        self._seen = visited
        self._owners = owners
        self.nodes: list[bytes] = []
        self.shared_with: dict[str, CopyJob] = {}

    def chunks(self) -> Iterator[Digest]:
        """Walk the tree, and yield the digests of its chunks; one may come several times.

        Raises:
            DamagedError: A node is missing or damaged.
        """
        # The hint finds the node without the index. From now on it is cached.
        self._source.node(Digest(self._ref.digest), self._ref.hint)
        top = MANIFEST + self._ref.digest
        self._note_owners([top])
        for node, children in walk(self._source, [top], self._seen):
            self.nodes.append(node)
            self._note_owners(children)
            yield from (Digest(reference) for reference in children if not is_node(reference))

    def _note_owners(self, references: list[bytes]) -> None:
        for reference in references:
            owner = self._owners.get(reference)
            if owner is not None:
                self.shared_with[owner.new_name] = owner
