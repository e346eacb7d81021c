"""References between tree nodes: how to walk from a table or snapshot down to its chunks.

A reference to a chunk is the chunk's digest. A reference to a node is a byte for the kind of node,
followed by the node's digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from casnap.errors import DamagedError
from casnap.format.digest import DIGEST_SIZE, Digest, split_digests
from casnap.format.entries import LIST_DIGESTS, MAX_LIST_DEPTH, Manifest, entry_tree
from casnap.format.records import Root, Row, decode_kept, decode_row
from casnap.format.tree import TABLE_FANOUT, Load, Tree
from casnap.storage.reading.repository import Repository

TABLE, MANIFEST, TREE, DATA = b"T", b"m", b"t", b"d"
_TOGETHER = 64


def tops_of(root: Root) -> list[bytes]:
    """Return the references in a root: to its table, and to the manifests of unfinished copies."""
    table = [] if root.table is None else [TABLE + root.table.digest]
    return table + [MANIFEST + copy.parts.digest for copy in root.copies.values()]


def is_node(reference: bytes) -> bool:
    """Whether a reference leads to a node, not to a chunk."""
    return len(reference) > DIGEST_SIZE


def digest_in(reference: bytes) -> Digest:
    """Return the digest in a reference."""
    return Digest(reference[-DIGEST_SIZE:])


def references(load: Load, node: bytes) -> list[bytes]:
    """Return the references in a node, to chunks and other nodes.

    Args:
        load: Returns the verified bytes of a node.
        node: The reference to the node.

    Raises:
        DamagedError: The node is missing, damaged, or of another kind.
    """
    kind, digest = node[:1], digest_in(node)
    if kind == DATA:
        return []
    if kind == MANIFEST:
        manifest = decode_kept(load(digest), Manifest, f"manifest {digest.hex()}")
        subtrees = chain(manifest.shared.values(), *(k.values() for k in manifest.ranks.values()))
        return [_checked(TREE + subtree, digest) for subtree in subtrees]
    if kind in (TREE, TABLE):
        return (_below_tree if kind == TREE else _below_table)(load, digest)
    return _listed(load(digest), kind[0] - 1, digest)


def _below_tree(load: Load, digest: Digest) -> list[bytes]:
    tree = entry_tree(digest, load)
    children = _children(tree, TREE, digest)
    if children is not None:
        return children
    payloads = (entry.payload for _, entry in tree.leaf(digest))
    lists = (_listed(p.digests, p.depth, digest) for p in payloads if p.digests)
    return list(chain.from_iterable(lists))


def _below_table(load: Load, digest: Digest) -> list[bytes]:
    tree: Tree[Row] = Tree(digest, load, Row, TABLE_FANOUT, decode_one=decode_row)
    children = _children(tree, TABLE, digest)
    if children is not None:
        return children
    rows = [row for _, row in tree.leaf(digest)]
    return [_checked(reference, digest) for row in rows for reference in references_of_row(row)]


def references_of_row(row: Row) -> list[bytes]:
    """Return the references in a row: to its manifest, and to its metadata's node if it has one."""
    data = [DATA + row.metadata_node] if row.metadata_node else []
    return [MANIFEST + row.manifest.digest, *data]


def _children(tree: Tree[Any], kind: bytes, digest: Digest) -> list[bytes] | None:
    """Return references to the nodes below a tree's top node; None if the top is a leaf."""
    if [child for _, child, _ in tree.children] == [digest]:
        return None
    return [kind + child for _, child, _ in tree.children]


def _checked(reference: bytes, node: Digest) -> bytes:
    if len(reference) != 1 + DIGEST_SIZE:
        raise DamagedError(f"tree node {node.hex()} names a node by something that is not a digest")
    return reference


def _listed(digests: bytes, depth: int, node: Digest) -> list[bytes]:
    """Return the references in a list of digests: to chunks, or at greater depth to other lists.

    Args:
        digests: The concatenated digests.
        depth: 0 if the digests name chunks. At depth n, they name lists of depth n - 1.
        node: The digest of the node with the list, for messages.

    Raises:
        DamagedError: The list is malformed.
    """
    n, odd = divmod(len(digests), DIGEST_SIZE)
    if not 0 <= depth <= MAX_LIST_DEPTH or odd or n > LIST_DIGESTS:
        raise DamagedError(f"tree node {node.hex()} holds a malformed list of digests")
    if depth == 0:
        return [digests] if n == 1 else list[bytes](split_digests(digests))
    return [bytes([depth]) + digest for digest in split_digests(digests)]


def walk(
    store: Repository, tops: Iterable[bytes], visited: set[bytes]
) -> Iterator[tuple[bytes, list[bytes]]]:
    """Walk down from some nodes. Yield the reference to each node, with the references in the node.

    Args:
        store: The store.
        tops: The references to the nodes to begin with.
        visited: The references to nodes that are not visited again. The walk adds the references to
            the nodes that it visits.

    Raises:
        DamagedError: A node is missing or damaged.
    """
    pending = [top for top in dict.fromkeys(tops) if top not in visited]
    visited.update(pending)
    while pending:
        # Go on in groups, so that nodes that are not cached are read together.
        group = pending[-_TOGETHER:]
        del pending[-_TOGETHER:]
        store.cache_nodes([digest_in(node) for node in group if node[:1] != DATA])
        for node in group:
            children = references(store.node, node)
            yield node, children
            unvisited = [r for r in dict.fromkeys(children) if is_node(r) and r not in visited]
            visited.update(unvisited)
            pending += unvisited
