"""Pairs of chunks: a chunk of a snapshot, and the chunk of the same cell in an earlier snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from casnap.errors import DamagedError
from casnap.format.digest import Digest
from casnap.format.entries import TensorEntry, unknown_in
from casnap.format.names import folder_of
from casnap.format.records import Root, Row
from casnap.storage.snapshots.contents import Contents

# A smaller form of a shorter chunk saves no more bytes than its record in the index takes.
_LEAST_BYTES = 4096
# To find the snapshot that another one is a fine-tune of: how many other folders to look at, and
# the share of its bytes that must be alike.
_OTHERS, _ALIKE = 8, 0.5


class CellPair(NamedTuple):
    """A chunk of a snapshot, and the chunk of the same cell in an earlier snapshot.

    Attributes:
        digest: The digest of the chunk.
        base: The digest of the earlier chunk; None if there is none, if it is the same chunk, or if
            it has another length.
        nbytes: The raw length of the chunk.
    """

    digest: Digest
    base: Digest | None
    nbytes: int


def snapshot_before(
    contents: Contents,
    snapshots: Iterable[tuple[str, Row]],
    is_there: Callable[[str, Row], bool] = lambda name, row: True,
    last_there: Callable[[], Contents | None] = lambda: None,
) -> Contents | None:
    """Return the earlier snapshot whose chunks are to be the bases for a snapshot's chunks.

    It is the snapshot before in the same folder. The first snapshot of a folder may be a fine-tune
    of a snapshot in another folder. So it is compared with the newest snapshots of other folders,
    by path, dtype and shape of the tensors, and the most similar one is returned.

    Args:
        contents: The snapshot to find bases for.
        snapshots: The names and rows of all snapshots in its store.
        is_there: For a copy to another store: returns whether that store has a snapshot. Snapshots
            that it lacks are skipped.
        last_there: For a copy to another store: returns the last earlier snapshot of the folder in
            that store. It is used if the two stores have no earlier snapshot in common.

    Returns:
        The earlier snapshot; None if there is none.
    """
    earlier: dict[str, list[Contents]] = {}
    for name, row in sorted(snapshots, key=lambda each: -each[1].seq):
        if row.seq < contents.row.seq and not row.unknown_features:
            earlier.setdefault(folder_of(name), []).append(Contents(contents.store, name, row))
    folder = folder_of(contents.name)
    own = earlier.get(folder, [])
    before = next((each for each in own if is_there(each.name, each.row)), None) or last_there()
    if before is not None or own:
        return before or own[0]
    newest = {folder: each[0] for folder, each in earlier.items()}
    others = list(newest.values())[:_OTHERS]
    likeness = [_alike_bytes(contents, other) for other in others]
    most = max(likeness, default=0)
    return (
        others[likeness.index(most)] if most > _ALIKE * _alike_bytes(contents, contents) else None
    )


def bases_in(
    contents: Contents,
    root: Root,
    is_there: Callable[[str, Row], bool],
    last_there: Callable[[], Contents | None],
) -> dict[Digest, Digest]:
    """Return the bases for the chunks of a snapshot, as :func:`cell_pairs` finds them.

    If something is damaged, no bases are returned: the earlier snapshot may have been collected
    meanwhile. If the snapshot itself is damaged, its next reader reports this.

    Args:
        contents: The snapshot.
        root: The root whose table lists the earlier snapshots.
        is_there: As for :func:`snapshot_before`.
        last_there: As for :func:`snapshot_before`.

    Returns:
        The digest of each chunk that has a base → the digest of the base.
    """
    store = contents.store
    try:
        before = snapshot_before(contents, store.table(root).items_in(), is_there, last_there)
        pairs = () if before is None else cell_pairs(contents, before)
        bases = {pair.digest: pair.base for pair in pairs if pair.base is not None}
    except DamagedError:
        return {}
    if before is None or before.store is store:
        return bases
    # The snapshot before is gone here, and its chunks may be gone too.
    digests = list(dict.fromkeys(bases.values()))
    places = dict(zip(digests, store.find(digests), strict=True))
    return {digest: base for digest, base in bases.items() if places[base] is not None}


def _alike_bytes(contents: Contents, other: Contents) -> int:
    """Return the bytes of the tensors whose path, dtype and shape are the same in two snapshots."""
    nbytes = 0
    for _, digest, digest_of_other in _subtrees(contents, other):
        if digest_of_other is not None:
            other_tree = other.tree(digest_of_other)
            for path, entry in contents.tree(digest).items():
                alike = other_tree.get(path)
                if isinstance(entry, TensorEntry) and isinstance(alike, TensorEntry):
                    is_alike = (entry.dtype, entry.shape) == (alike.dtype, alike.shape)
                    nbytes += entry.payload.nbytes * is_alike
    return nbytes


def cell_pairs(contents: Contents, before: Contents | None) -> Iterator[CellPair]:
    """Yield each chunk of a snapshot, paired with the chunk of its cell in an earlier snapshot.

    Trees of entries that both snapshots have are skipped, and so are short chunks.

    Args:
        contents: The snapshot.
        before: The earlier snapshot; None if there is none.
    """
    visited: set[Digest] = set()
    for key, digest, digest_before in _subtrees(contents, before):
        if digest == digest_before:
            continue
        tree = contents.tree(digest)
        tree_before = None
        if before is not None and digest_before is not None:
            tree_before = before.tree(digest_before)
        for path, entry in tree.items():
            if unknown_in(entry):
                continue
            chunks = contents.chunks(key + path, entry)
            entry_before = None if tree_before is None else tree_before.get(path)
            bases: list[tuple[Digest, int]] = []
            if before is not None and entry_before is not None and not unknown_in(entry_before):
                bases = before.chunks(key + path, entry_before)
            if len(bases) != len(chunks):
                bases = [(chunk, -1) for chunk, _ in chunks]
            for (chunk, nbytes), (base, nbytes_before) in zip(chunks, bases, strict=True):
                if chunk not in visited and nbytes >= _LEAST_BYTES:
                    visited.add(chunk)
                    is_other = nbytes == nbytes_before and base != chunk
                    yield CellPair(chunk, base if is_other else None, nbytes)


def _subtrees(
    contents: Contents, before: Contents | None
) -> Iterator[tuple[str, bytes, bytes | None]]:
    """Yield each key of a snapshot, with the digest of its tree in this and the earlier snapshot.

    The second digest is None if the earlier snapshot lacks the key.
    """
    manifest = contents.manifest
    manifest_before = None if before is None else before.manifest
    for rank, trees in ((None, manifest.shared), *manifest.ranks.items()):
        trees_before: dict[str, bytes] = {}
        if manifest_before is not None:
            ranks = manifest_before.ranks
            trees_before = manifest_before.shared if rank is None else ranks.get(rank, {})
        for key, digest in trees.items():
            yield key, digest, trees_before.get(key)
