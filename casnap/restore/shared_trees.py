"""Rank 0 reads the trees of a remote snapshot for all ranks, since each read is a request.

Several ranks may share a cache, as the ranks of a host do. Rank 0 reads many nodes together. It
sends one rank of each cache the nodes that the cache's ranks need, and that rank puts them into the
cache. Later each rank takes nodes from its cache, and verifies them by their digests. It reads a
node from the store if the cache lacks it, or has it damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from casnap.errors import DamagedError
from casnap.format.decoding import decoder
from casnap.format.digest import Digest
from casnap.format.records import encode
from casnap.ranks.comm import Comm
from casnap.storage import Contents

_WINDOW_BYTES = 8 << 20
"""How many bytes are sent together."""


def share_trees(comm: Comm, contents: Contents, keys: Iterable[str], caches: list[bytes]) -> None:
    """Let rank 0 read the trees of some keys, and put them into the caches of all ranks.

    Args:
        comm: The ranks; all call this.
        contents: The snapshot.
        keys: The first components of the paths to read.
        caches: On rank 0: the identity of each rank's cache.
    """
    if comm.rank == 0:
        _send_trees(comm, contents, keys, [caches.index(cache) for cache in caches])
        return
    while part := comm.scatter():
        contents.store.keep_nodes(decoder(list[bytes]).decode(part))


def _send_trees(comm: Comm, contents: Contents, keys: Iterable[str], keepers: list[int]) -> None:
    window: list[tuple[set[int], bytes]] = []
    nbytes = 0
    # Each rank that needs a damaged node reads it itself, and raises the error.
    with suppress(DamagedError):
        for ranks, node in _nodes(contents, keys, comm.size):
            # Rank 0, and the ranks that share its cache, have the node already.
            recipients = {keepers[rank] for rank in ranks} - {0}
            if recipients:
                window.append((recipients, node))
                nbytes += len(node)
            if nbytes >= _WINDOW_BYTES:
                comm.scatter(_nodes_by_rank(window, comm.size))
                window, nbytes = [], 0
    if window:
        comm.scatter(_nodes_by_rank(window, comm.size))
    comm.scatter([b""] * comm.size)  # an empty part ends the loop of each rank


def _nodes_by_rank(window: list[tuple[set[int], bytes]], size: int) -> list[bytes]:
    # Ranks that get the same nodes get the same object, so that it is made only once.
    equal: dict[tuple[int, ...], bytes] = {}
    parts = []
    for rank in range(size):
        numbers = tuple(i for i, (recipients, _) in enumerate(window) if rank in recipients)
        if numbers not in equal:
            equal[numbers] = encode([window[i][1] for i in numbers])
        parts.append(equal[numbers])
    return parts


def _nodes(
    contents: Contents, keys: Iterable[str], size: int
) -> Iterator[tuple[frozenset[int], bytes]]:
    """Yield the nodes of the trees of some keys, each with the ranks that need it."""
    keys = set(keys)
    everyone = frozenset(range(size))
    # A rank that the take did not have looks at the entries of all ranks, to say what it lacks.
    without_tree = everyone - set(contents.ranks())
    trees_of = [(contents.manifest.shared, everyone)]
    for rank, trees in contents.manifest.ranks.items():
        trees_of.append((trees, without_tree | (everyone & {int(rank)})))
    yield everyone, contents.store.node(Digest(contents.row.manifest.digest))
    users: dict[bytes, frozenset[int]] = {}
    for trees, ranks in trees_of:
        for key in trees.keys() & keys:
            users[trees[key]] = users.get(trees[key], frozenset()) | ranks
    yield from contents.nodes_of(users)
