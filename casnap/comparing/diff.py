"""Compare two snapshots by digests, from the top: only the subtrees that differ are read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, zip_longest

from casnap.comparing.changes import Change, Diff
from casnap.errors import StoreError
from casnap.format.digest import Digest
from casnap.format.entries import Entry, unknown_in
from casnap.format.tree import LeafNode, Tree
from casnap.storage import Contents


def diff(a: Contents, b: Contents, *, elements: bool = False) -> Diff:
    """Return the entries that differ between two snapshots.

    Equal subtrees are not read. If two trees differ, only their differing leaves are read. If two
    entries differ, only their differing lists of chunks are read.

    Args:
        a: The first snapshot.
        b: The second one.
        elements: Whether to read the chunks that differ, and to measure how their elements differ.

    Raises:
        DamagedError: A node is missing or damaged.
        StoreError: The snapshots are in two stores with different chunk sizes.
    """
    if a.store.config.chunk_size != b.store.config.chunk_size:
        raise StoreError(
            f"{a.label} and {b.label} are cut into chunks of different sizes, so equal tensors "
            "cannot be told from their digests; compare two snapshots of one store"
        )
    changes = [
        _change(a, b, path, entry_a, entry_b)
        for prefix, digest_a, digest_b in subtrees(a, b)
        if digest_a != digest_b
        for path, entry_a, entry_b in entries_apart(a, b, prefix, digest_a, digest_b)
    ]
    if elements:
        from casnap.comparing.elements import with_elements

        changes = with_elements(a, b, changes)
    return Diff(sorted(changes, key=lambda change: change.path))


def subtrees(a: Contents, b: Contents) -> Iterator[tuple[str, bytes | None, bytes | None]]:
    """Yield each key, with its rank as a prefix if it has one, and its subtree in each snapshot.

    A subtree is given by its digest; None if a snapshot lacks it.
    """
    manifest_a, manifest_b = a.manifest, b.manifest
    ranks = (
        (f"{rank}/", manifest_a.ranks.get(rank, {}), manifest_b.ranks.get(rank, {}))
        for rank in manifest_a.ranks.keys() | manifest_b.ranks.keys()
    )
    for prefix, digest_a, digest_b in (("", manifest_a.shared, manifest_b.shared), *ranks):
        for key in digest_a.keys() | digest_b.keys():
            yield prefix + key, digest_a.get(key), digest_b.get(key)


def entries_apart(
    a: Contents, b: Contents, prefix: str, digest_a: bytes | None, digest_b: bytes | None
) -> Iterator[tuple[str, Entry | None, Entry | None]]:
    """Yield path, old entry and new entry wherever two trees differ.

    Args:
        a: The first snapshot.
        b: The second one.
        prefix: The path of the trees.
        digest_a: The digest of the tree in the first snapshot; None if it has none.
        digest_b: The digest of the tree in the second one.
    """
    entries_a = None if digest_a is None else a.tree(digest_a)
    entries_b = None if digest_b is None else b.tree(digest_b)
    was, now = _items_apart(entries_a, entries_b)
    for key in was.keys() | now.keys():
        if was.get(key) != now.get(key):
            yield prefix + key, was.get(key), now.get(key)


def _items_apart(*trees: Tree[Entry] | None) -> list[dict[str, Entry]]:
    """Return, for each of two trees, the items of the leaf nodes that the other tree lacks.

    Both trees are read level by level, without the nodes that both have. If one tree has more
    levels than the other, some equal nodes are read too.
    """
    nodes: list[dict[bytes, LeafNode[Entry] | None]] = [
        dict.fromkeys(digest for _, digest, _ in tree.children) if tree is not None else {}
        for tree in trees
    ]
    is_all_read = False
    while not is_all_read:
        is_all_read = True
        # A node that both trees have holds the same items in both, and is not read.
        for digest in nodes[0].keys() & nodes[1].keys():
            del nodes[0][digest], nodes[1][digest]
        for tree, found in zip(trees, nodes, strict=True):
            for digest in [digest for digest, node in found.items() if node is None]:
                assert tree is not None
                node = tree.node(Digest(digest))
                if isinstance(node, LeafNode):
                    found[digest] = node
                else:
                    del found[digest]
                    found |= dict.fromkeys(digest for _, digest, _ in node.children)
                    is_all_read = False
    return [dict(chain.from_iterable(n.items for n in f.values() if n)) for f in nodes]


def _change(
    a: Contents, b: Contents, path: str, entry_a: Entry | None, entry_b: Entry | None
) -> Change:
    if entry_b is None:
        assert entry_a is not None
        return Change(path, "removed", entry_a, None, 0, entry_a.payload.nbytes)
    nbytes = entry_b.payload.nbytes
    if entry_a is None:
        return Change(path, "added", None, entry_b, nbytes, nbytes)
    return Change(
        path, "changed", entry_a, entry_b, _changed_bytes(a, b, path, entry_a, entry_b), nbytes
    )


def _changed_bytes(a: Contents, b: Contents, path: str, entry_a: Entry, entry_b: Entry) -> int:
    was, now = entry_a.payload, entry_b.payload
    if was == now:
        return 0
    if unknown_in(entry_a) or unknown_in(entry_b):
        return now.nbytes
    chunks = b.chunks(path, entry_b)
    if not chunks:
        return now.nbytes
    before = [digest for digest, _ in a.chunks(path, entry_a)]
    pairs = zip_longest(chunks, before[: len(chunks)])
    return sum(size for (digest, size), digest_a in pairs if digest != digest_a)
