"""What a snapshot holds: its entries by path, and the chunks of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from math import prod

from casnap.digest import DIGEST_SIZE, Digest
from casnap.errors import DamagedError, EntryNotFoundError, SnapshotNotFoundError
from casnap.format import (
    INLINE_BYTES,
    LIST_DIGESTS,
    MAX_DEPTH,
    Entry,
    Manifest,
    Payload,
    Row,
    TensorEntry,
    decode,
    payload_of,
)
from casnap.grid import Grid, grid_of
from casnap.manifest import Tree
from casnap.objects import Objects


class Contents:
    """The tree of one snapshot.

    Paths are ``<rank>/<key>/<path>``; what is global answers under every rank and without one.

    Args:
        objects: The store.
        name: The snapshot's name, for messages.
        row: Its row in the table.
    """

    def __init__(self, objects: Objects, name: str, row: Row) -> None:
        self.objects = objects
        self.name = name
        self.row = row
        self._trees: dict[bytes, Tree[Entry]] = {}

    @property
    def where(self) -> str:
        """The snapshot as a user would name it."""
        return f"{self.objects.backend.uri}/{self.name}"

    @cached_property
    def manifest(self) -> Manifest:
        """The top of the tree."""
        ref = self.row.manifest
        node = self.objects.node(Digest(ref.digest), ref.hint)
        manifest = decode(node, Manifest, f"the manifest of {self.where}")
        subtrees = [manifest.shared, *manifest.ranks.values()]
        if any(len(d) != DIGEST_SIZE for subtree in subtrees for d in subtree.values()):
            raise DamagedError(f"the manifest of {self.where} holds what is no digest")
        if len(manifest.ranks) != self.row.world_size:
            raise DamagedError(
                f"{self.where} claims {self.row.world_size} ranks, but has {len(manifest.ranks)}"
            )
        return manifest

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read something; if it was collected meanwhile, say that instead of "damaged".

        Raises:
            SnapshotNotFoundError: The snapshot was deleted, and what it held collected.
        """
        try:
            yield
        except DamagedError as e:
            row = self.objects.current(
                lambda root: self.objects.tree(root.table, Row).get(self.name)
            )
            if row is not None and row.commit == self.row.commit:
                raise
            raise SnapshotNotFoundError(
                f"{self.where} was deleted or replaced, and what it held was collected as garbage "
                "while it was being read; a longer `casnap gc --grace` lets readers end"
            ) from e

    def subtrees(self, rank: int) -> dict[str, bytes]:
        """Return the subtree digests by key, as one rank sees them."""
        return {**self.manifest.shared, **self.manifest.ranks.get(str(rank), {})}

    def tree(self, digest: bytes) -> Tree[Entry]:
        """Return the tree of one key."""
        tree = self._trees.get(digest)
        if tree is None:
            tree = Tree(Digest(digest), self.objects.node, Entry)
            self._trees[digest] = tree
        return tree

    def entries(self, rank: int = 0) -> Iterator[tuple[str, Entry]]:
        """Yield ``<key>/<path>`` and entry of all that a rank sees."""
        for key, digest in sorted(self.subtrees(rank).items()):
            for inner, entry in self.tree(digest).items():
                yield key + inner, entry

    def ranks(self) -> Iterator[int]:
        """Yield the ranks of the world that took this snapshot."""
        yield from range(self.row.world_size)

    def resolve(self, path: str) -> tuple[str, str, Tree[Entry]]:
        """Return key, path below it (with its leading slash) and tree of a path.

        Raises:
            EntryNotFoundError: The snapshot has no such key.
        """
        first, slash, rest = path.partition("/")
        if slash and first.isascii() and first.isdigit() and int(first) < self.row.world_size:
            key, slash, inner = rest.partition("/")
            subtrees = self.subtrees(int(first))
            if key in subtrees:
                return key, slash + inner, self.tree(subtrees[key])
        subtrees = self.subtrees(0)
        key, slash, inner = path.partition("/")
        if key in subtrees:
            return key, slash + inner, self.tree(subtrees[key])
        raise self._absent(path)

    def entry(self, path: str) -> tuple[str, Entry, Tree[Entry]]:
        """Return the path without its rank, the entry there, and the tree of its key.

        Raises:
            EntryNotFoundError: There is no entry of this path.
        """
        key, inner, tree = self.resolve(path)
        entry = tree.get(inner)
        if entry is None:
            raise self._absent(path)
        return key + inner, entry, tree

    def _absent(self, path: str) -> EntryNotFoundError:
        import difflib

        paths = (
            [p for r in self.ranks() for p, _ in self.entries(r)]
            if self.row.stats.entries < 1e5
            else []
        )
        bare = path.partition("/")[2] if path.partition("/")[0].isdigit() else path
        near = difflib.get_close_matches(bare, dict.fromkeys(paths), 3, 0.5)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        return EntryNotFoundError(f"{self.where} has no entry {path!r}{hint}")

    def chunks(self, path: str, entry: Entry) -> list[tuple[Digest, int]]:
        """Return digest and length of every chunk of an entry; none where its bytes stand in it.

        Raises:
            DamagedError: Shape, length and digests do not fit each other.
        """
        payload = payload_of(entry)
        if payload.nbytes <= INLINE_BYTES:
            return []
        chunk_size = self.objects.config.chunk_size
        if isinstance(entry, TensorEntry):
            count = prod(entry.shape)
            itemsize = payload.nbytes // max(count, 1)
            whole = min(entry.shape, default=1) > 0 and itemsize * count == payload.nbytes
            if not whole or itemsize > chunk_size:
                raise DamagedError(
                    f"{self.where}: {path} claims {payload.nbytes} bytes for the shape "
                    f"{list(entry.shape)}",
                    (path,),
                )
            grid = grid_of(entry.shape, itemsize, chunk_size)
        else:
            grid = grid_of((payload.nbytes,), 1, chunk_size)
        digests = split_digests(self.digests(payload, grid, path))
        return list(zip(digests, grid.sizes(), strict=True))

    def digests(self, payload: Payload, grid: Grid, path: str) -> bytes:
        """Return the digests of a payload's chunks, one behind the other.

        Raises:
            DamagedError: Their number is not that of the grid's cells.
        """
        digests = payload.digests
        if not 0 <= payload.depth <= MAX_DEPTH:
            raise DamagedError(
                f"{self.where}: {path} claims a list of depth {payload.depth}", (path,)
            )
        for _ in range(payload.depth):
            if len(digests) > DIGEST_SIZE * max(grid.count, 1):
                break
            digests = self._joined_lists(digests, grid.count, path)
        if len(digests) != DIGEST_SIZE * grid.count:
            raise DamagedError(
                f"{self.where}: {path} lists {len(digests) / DIGEST_SIZE:g} chunks where its shape "
                f"has {grid.count}",
                (path,),
            )
        return digests

    def _joined_lists(self, digests: bytes, most: int, path: str) -> bytes:
        """Return what lists hold, one behind the other; no more than it takes to see too many."""
        joined = bytearray()
        try:
            for digest in split_digests(digests):
                joined += self._list(digest)
                if len(joined) > DIGEST_SIZE * most:
                    break
        except DamagedError as e:
            raise DamagedError(f"{e}; hurt: {path}", (path,)) from e
        return bytes(joined)

    def _list(self, digest: Digest) -> bytes:
        listed = self.objects.node(digest)
        if len(listed) > DIGEST_SIZE * LIST_DIGESTS:
            raise DamagedError(f"the list {digest.hex()} is longer than a list may be")
        return listed


def split_digests(digests: bytes) -> list[Digest]:
    """Split a string of digests."""
    return [Digest(digests[i : i + DIGEST_SIZE]) for i in range(0, len(digests), DIGEST_SIZE)]
