"""Comparing two snapshots: only the subtrees that differ are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from casnap.errors import StoreError
from casnap.format.digest import Digest
from casnap.format.entries import Entry, payload_of
from casnap.format.tree import Tree
from casnap.storage.catalog.contents import Contents

Kind = Literal["added", "removed", "changed"]


@dataclass(frozen=True)
class Change:
    """One entry that two snapshots do not share.

    Attributes:
        path: ``<key>/<path>`` of a global entry, ``<rank>/<key>/<path>`` of one that a rank keeps
            for itself.
        kind: Whether it was added, removed or changed.
        old: The entry of the first snapshot; None if it was added.
        new: The entry of the second one; None if it was removed.
        changed_bytes: Bytes in those chunks of the new entry that differ from the old chunk at
            the same position. All bytes if the entry was added, none if it was removed.
        total_bytes: All bytes of the new entry, or of the old one if it was removed.
    """

    path: str
    kind: Kind
    old: Entry | None
    new: Entry | None
    changed_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Diff:
    """What differs between two snapshots.

    Attributes:
        changes: Every entry that differs, in the order of the paths.
    """

    changes: list[Change]

    @property
    def changed_bytes(self) -> int:
        """Bytes of the second snapshot that the first one does not have at the same position."""
        return sum(change.changed_bytes for change in self.changes)

    def of(self, kind: Kind) -> list[Change]:
        """Return the changes of one kind."""
        return [change for change in self.changes if change.kind == kind]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.changes)


def diff(a: Contents, b: Contents) -> Diff:
    """Return what differs between two snapshots.

    Equal subtrees are not read. Of two trees only the leaves that differ are read, and of two
    entries only the lists of chunks that differ.

    Raises:
        DamagedError: A node is missing or damaged.
        StoreError: The snapshots are in two stores with different chunk sizes.
    """
    if a.objects.config.chunk_size != b.objects.config.chunk_size:
        raise StoreError(
            f"{a.where} and {b.where} are cut into chunks of different sizes, so equal tensors "
            "cannot be told from their digests; compare two snapshots of one store"
        )
    changes = [
        _change(a, b, path, old, new)
        for prefix, left, right in _subtrees(a, b)
        if left != right
        for path, old, new in _entries(a, b, prefix, left, right)
    ]
    return Diff(sorted(changes, key=lambda change: change.path))


def _subtrees(a: Contents, b: Contents) -> Iterator[tuple[str, bytes | None, bytes | None]]:
    """Yield each key with its rank prefix, and the digest of its subtree in each snapshot."""
    left, right = a.manifest, b.manifest
    ranks = (
        (f"{rank}/", left.ranks.get(rank, {}), right.ranks.get(rank, {}))
        for rank in left.ranks.keys() | right.ranks.keys()
    )
    for prefix, old, new in (("", left.shared, right.shared), *ranks):
        for key in old.keys() | new.keys():
            yield prefix + key, old.get(key), new.get(key)


def _entries(
    a: Contents, b: Contents, prefix: str, left: bytes | None, right: bytes | None
) -> Iterator[tuple[str, Entry | None, Entry | None]]:
    """Yield path, old entry and new entry where two trees differ."""
    old = None if left is None else a.tree(left)
    new = None if right is None else b.tree(right)
    # A leaf that both trees list holds the same items in both.
    shared = _leaves(old) & _leaves(new)
    was, now = dict(_items(old, shared)), dict(_items(new, shared))
    for key in was.keys() | now.keys():
        if was.get(key) != now.get(key):
            yield prefix + key, was.get(key), now.get(key)


def _leaves(tree: Tree[Entry] | None) -> set[bytes]:
    return set() if tree is None else {digest for _, digest, _ in tree.children}


def _items(tree: Tree[Entry] | None, without: set[bytes]) -> Iterator[tuple[str, Entry]]:
    if tree is not None:
        for _, digest, _ in tree.children:
            if digest not in without:
                yield from tree.leaf(Digest(digest))


def _change(a: Contents, b: Contents, path: str, old: Entry | None, new: Entry | None) -> Change:
    if new is None:
        assert old is not None
        return Change(path, "removed", old, None, 0, payload_of(old).nbytes)
    nbytes = payload_of(new).nbytes
    if old is None:
        return Change(path, "added", None, new, nbytes, nbytes)
    return Change(path, "changed", old, new, _changed_bytes(a, b, path, old, new), nbytes)


def _changed_bytes(a: Contents, b: Contents, path: str, old: Entry, new: Entry) -> int:
    was, now = payload_of(old), payload_of(new)
    if was == now:
        return 0
    chunks = b.chunks(path, new)
    if not chunks:
        return now.nbytes
    before = [digest for digest, _ in a.chunks(path, old)]
    pairs = zip_longest(chunks, before[: len(chunks)])
    return sum(size for (digest, size), known in pairs if digest != known)
