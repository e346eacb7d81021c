"""Walk the tree of a snapshot that is copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from casnap.format.digest import Digest
from casnap.storage import Contents
from casnap.transfer.copy_jobs import CopyJob


class SourceTree:
    """The tree of a snapshot, without the subtrees that it shares with snapshots copied earlier.

    Args:
        contents: The snapshot.
        visited: The keys (kind and digest) of nodes that earlier copies have visited. The walk adds
            those of its nodes.
        owners: The key of each visited node → the copied snapshot that it belongs to.

    Attributes:
        nodes: The key of each node that was visited so far → its digest; parents come first.
        shared_with: New name → a copied snapshot that has some of the subtrees that were left out.
    """

    def __init__(
        self, contents: Contents, visited: set[bytes], owners: dict[bytes, CopyJob]
    ) -> None:
        self._contents = contents
        self._visited = visited
        self._owners = owners
        self.nodes: dict[bytes, Digest] = {}
        self.shared_with: dict[str, CopyJob] = {}

    def chunks(self) -> Iterator[Digest]:
        """Walk the tree, and yield the digests of its chunks. A digest may come several times.

        Raises:
            DamagedError: A node is missing or damaged.
        """
        self._note_owners([self._contents.top])
        for node in self._contents.nodes(self._visited):
            self.nodes[node.key] = node.digest
            self._note_owners(node.below)
            yield from node.chunks

    def _note_owners(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            owner = self._owners.get(key)
            if owner is not None:
                self.shared_with[owner.new_name] = owner
