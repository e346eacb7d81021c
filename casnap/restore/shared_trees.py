"""The trees of a snapshot, read by rank 0 for all ranks: at a remote place each read is a request.

Rank 0 reads level by level, many nodes together, and sends each node to one rank of every cache
whose ranks need it. That rank keeps it there. A rank verifies a node by the digest that it looks
for. If a node is lost on the way, or damaged, each rank reads it itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from casnap.errors import DamagedError
from casnap.format.decoding import decoder
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of, split_digests
from casnap.format.entries import INLINE_BYTES, MAX_LIST_DEPTH, Entry, payload_of
from casnap.format.records import encode
from casnap.ranks.comm import Comm
from casnap.storage.contents import Contents
from casnap.storage.tree import Branch, Tree

# Nodes that are read together; bytes that are sent together.
_TOGETHER, _WINDOW_BYTES = 128, 8 << 20


class _Node(NamedTuple):
    """A node to read.

    Attributes:
        ranks: The ranks that need it.
        tree: The tree that it is of; None for a list of digests.
        depth: The levels of a list, and of the lists that it names.
        most: The most digests of a list.
    """

    ranks: frozenset[int]
    tree: Tree[Entry] | None
    depth: int = 0
    most: int = 0


def share_trees(comm: Comm, contents: Contents, keys: Iterable[str], caches: list[bytes]) -> None:
    """Have rank 0 read the trees of some keys, and bring them to the caches of all ranks.

    Args:
        comm: The ranks; all call this.
        contents: The snapshot.
        keys: The first components of the paths to read.
        caches: On rank 0: for each rank, what tells its cache from others.
    """
    if comm.rank == 0:
        for parts in _parts(_nodes(contents, keys, comm.size), caches):
            comm.scatter(parts)
    else:
        cache = contents.objects.index.cache
        while part := comm.scatter():
            nodes = decoder(list[bytes]).decode(part)
            cache.keep_nodes([(digest_of(node), node) for node in nodes])


def _parts(
    nodes: Iterable[tuple[frozenset[int], bytes]], caches: Sequence[bytes]
) -> Iterator[list[bytes]]:
    """Yield the messages to all ranks; the last ones are empty: then all nodes are kept."""
    keepers = [caches.index(cache) for cache in caches]
    window: list[tuple[set[int], bytes]] = []
    nbytes = 0
    for ranks, node in nodes:
        # Rank 0, and the ranks that share its cache, have the node already.
        to = {keepers[rank] for rank in ranks} - {0}
        if to:
            window.append((to, node))
            nbytes += len(node)
        if nbytes >= _WINDOW_BYTES:
            yield _packed(window, len(caches))
            window, nbytes = [], 0
    if window:
        yield _packed(window, len(caches))
    yield [b""] * len(caches)


def _packed(window: list[tuple[set[int], bytes]], size: int) -> list[bytes]:
    # Ranks that get the same nodes get the same object, so that it is made only once.
    equal: dict[tuple[int, ...], bytes] = {}
    parts = []
    for rank in range(size):
        numbers = tuple(i for i, (to, _) in enumerate(window) if rank in to)
        if numbers not in equal:
            equal[numbers] = encode([window[i][1] for i in numbers])
        parts.append(equal[numbers])
    return parts


def _nodes(
    contents: Contents, keys: Iterable[str], size: int
) -> Iterator[tuple[frozenset[int], bytes]]:
    """Yield the nodes of the trees of some keys, level by level, each with the ranks to send to."""
    everyone = frozenset(range(size))
    # A rank that the take did not have looks at the entries of all ranks, to say what it lacks.
    new = everyone - set(contents.ranks())
    subtrees = [(contents.manifest.shared, everyone)]
    for rank, subtree in contents.manifest.ranks.items():
        subtrees.append((subtree, new | (everyone & {int(rank)})))
    tops: dict[Digest, frozenset[int]] = {}
    for subtree, ranks in subtrees:
        for key in subtree.keys() & set(keys):
            digest = Digest(subtree[key])
            tops[digest] = tops.get(digest, frozenset()) | ranks
    yield from _read(contents, {Digest(contents.row.manifest.digest): everyone})
    yield from _read(contents, tops)
    level: dict[Digest, _Node] = {}
    for digest, ranks in tops.items():
        with suppress(DamagedError):
            tree = contents.tree(digest)
            _add(level, ((Digest(child), _Node(ranks, tree)) for _, child, _ in tree.children))
    while level:
        # A tree of one leaf is that leaf.
        unread = {digest: node.ranks for digest, node in level.items() if digest not in tops}
        yield from _read(contents, unread)
        below: dict[Digest, _Node] = {}
        for digest, node in level.items():
            with suppress(DamagedError):
                _add(below, list(_below(contents, digest, node)))
        level = below


def _add(level: dict[Digest, _Node], nodes: Iterable[tuple[Digest, _Node]]) -> None:
    for digest, node in nodes:
        known = level.get(digest, node)
        level[digest] = known._replace(ranks=known.ranks | node.ranks)


def _read(
    contents: Contents, nodes: Mapping[Digest, frozenset[int]]
) -> Iterator[tuple[frozenset[int], bytes]]:
    """Read nodes, many together; leave out those that are damaged."""
    wanted = iter(nodes)
    while some := list(islice(wanted, _TOGETHER)):
        with suppress(DamagedError):
            contents.objects.cache_nodes(list(some))
        for digest in some:
            with suppress(DamagedError):
                yield nodes[digest], contents.objects.node(digest)


def _below(contents: Contents, digest: Digest, node: _Node) -> Iterator[tuple[Digest, _Node]]:
    """Yield the nodes that a node names."""
    if node.tree is None:
        if node.depth > 1:
            yield from _lists(contents.objects.node(digest), node._replace(depth=node.depth - 1))
        return
    found = node.tree.node(digest)
    if isinstance(found, Branch):
        for _, child, _ in found.children:
            yield Digest(child), node
        return
    for path, entry in found.items:
        payload = payload_of(entry)
        if payload.nbytes > INLINE_BYTES and 0 < payload.depth <= MAX_LIST_DEPTH:
            most = contents.cells(path, entry).count
            yield from _lists(payload.digests, _Node(node.ranks, None, payload.depth, most))


def _lists(digests: bytes, node: _Node) -> Iterator[tuple[Digest, _Node]]:
    if len(digests) % DIGEST_SIZE == 0 and len(digests) <= DIGEST_SIZE * node.most:
        for digest in split_digests(digests):
            yield digest, node
