"""The contents of a snapshot: its entries by path, and the chunks of each entry."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import translate
from heapq import merge
from itertools import chain, takewhile
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

from casnap.backends.uris import joined
from casnap.errors import (
    DamagedError,
    EntryNotFoundError,
    SnapshotNotFoundError,
    UnsupportedFormatError,
    nearest,
    with_article,
)
from casnap.format.digest import DIGEST_SIZE, Digest, split_digests
from casnap.format.entries import (
    INLINE_BYTES,
    LIST_DIGESTS,
    MAX_LIST_DEPTH,
    ContainerEntry,
    Entry,
    Manifest,
    Payload,
    TensorEntry,
    check_known,
    entry_tree,
    unknown_in,
)
from casnap.format.grid import Grid, grid_of
from casnap.format.names import key_of, rank_names
from casnap.format.records import MAX_METADATA_BYTES, Row, decode, decode_kept
from casnap.format.tree import Tree
from casnap.runtime.fork import cached_property
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.references import MANIFEST, TREE, digest_in, is_node, references, walk

# Metadata of 64 KiB as JSON take up to 148 kB as a node: a float of three letters takes nine bytes.
# A larger node is not decoded: hostile bytes could take sixty times as much memory.
_MOST_METADATA = 4 * MAX_METADATA_BYTES
GLOBAL = "global"
"""The word that a path may begin with in place of a rank. The path then means a global entry."""
_WILDCARDS = re.compile(r"[*?\[]")


class Listed(NamedTuple):
    """An entry of a snapshot, as :meth:`Contents.listed` yields it.

    Attributes:
        name: A path that means only this entry. It begins with a rank if the entry belongs to a
            rank.
        path: The path in the form that the caller used. It begins with a rank only if the text that
            the caller gave does.
        entry: The entry.
        owner: The rank that the entry belongs to; None for a global entry.
    """

    name: str
    path: str
    entry: Entry
    owner: int | None


class Node(NamedTuple):
    """A node of the tree of a snapshot, with its references.

    Attributes:
        key: The kind and the digest of the node. Nodes of two kinds may have the same digest.
        digest: The digest of the node.
        below: The keys of the nodes that the node names.
        chunks: The digests of the chunks that the node names.
    """

    key: bytes
    digest: Digest
    below: list[bytes]
    chunks: list[Digest]


class Entries:
    """The entries below one key of the app state that a rank sees: global entries, and its own.

    Args:
        contents: The snapshot.
        owners: The digest of each tree of entries → the rank that owns the tree; None for the
            global tree. If two trees have an entry of the same path, the first tree counts.
    """

    def __init__(self, contents: Contents, owners: Mapping[bytes, int | None]) -> None:
        self._contents = contents
        self._digests = list(owners)
        self._owners = owners

    @property
    def tops(self) -> tuple[bytes, ...]:
        """The digests of the top nodes of the trees, those that take precedence first."""
        return tuple(self._digests)

    @property
    def _trees(self) -> Iterator[Tree[Entry]]:
        return map(self._contents.tree, self._digests)

    def owner(self, path: str) -> int | None:
        """Return the rank that owns the entry at a path; None for a global entry."""
        trees = zip(self._trees, self._owners.values(), strict=True)
        return next((owner for tree, owner in trees if tree.get(path) is not None), None)

    def get(self, path: str) -> Entry | None:
        """Return the entry at a path below the key; None if there is none."""
        return next((e for tree in self._trees if (e := tree.get(path)) is not None), None)

    def items(self, start: str = "") -> Iterator[tuple[str, Entry]]:
        """Yield paths and entries, in the order of the paths, from the path ``start`` on."""
        if len(self._digests) == 1:
            yield from self._contents.tree(self._digests[0]).items(start)
            return
        before = None
        # The merge is stable, so the entry of the first tree comes first if two have one path.
        for path, entry in merge(*(tree.items(start) for tree in self._trees), key=itemgetter(0)):
            if path != before:
                yield path, entry
            before = path

    def items_below(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        """Yield the paths that begin with ``prefix``, each with its entry."""
        return takewhile(lambda item: item[0].startswith(prefix), self.items(prefix))


class Contents:
    """The contents of one snapshot.

    Paths are ``<rank>/<key>/<path>``. A global entry is found under every rank, and also without a
    rank. A path without a rank may also mean rank 0's entry, if no other rank has an entry of its
    own at this path.

    Args:
        store: The store.
        name: The full name of the snapshot.
        row: The row of the snapshot.
    """

    def __init__(self, store: Repository, name: str, row: Row) -> None:
        self.store = store
        self.name = name
        self.row = row
        self._trees: dict[bytes, Tree[Entry]] = {}
        self._seen: dict[int | None, dict[str, Entries]] = {}

    @staticmethod
    def read_ahead(snapshots: Sequence[Contents]) -> None:
        """Cache the manifests of many snapshots of one store, and the top nodes of their trees.

        One by one, each is a request, and a commit of the cache. What is missing or damaged is left
        to the later reads, which say what it hurts.
        """
        if not snapshots:
            return
        store, tops = snapshots[0].store, [each.top for each in snapshots]
        with suppress(DamagedError):
            store.cache_nodes([*map(digest_in, tops)], (each.row.manifest for each in snapshots))
        below = set[bytes]()
        for top in tops:
            if store.cached_node(digest_in(top)) is not None:
                with suppress(DamagedError):
                    below.update(references(store.node, top))
        with suppress(DamagedError):
            store.cache_nodes([*map(digest_in, below)])

    @property
    def label(self) -> str:
        """The path or URI of the snapshot, as a user would write it."""
        return joined(self.store.backend.uri, self.name)

    @property
    def top(self) -> bytes:
        """The ``key`` of the snapshot's top :class:`Node`, its manifest."""
        return MANIFEST + self.row.manifest.digest

    def nodes(self, visited: set[bytes]) -> Iterator[Node]:
        """Yield the snapshot's nodes that were not visited yet, each before the nodes below it.

        Args:
            visited: The keys of visited nodes. The keys of the yielded nodes are added.

        Raises:
            DamagedError: A node is missing or damaged.
        """
        ref = self.row.manifest
        # The hint finds the node without the index, and from now on the node is cached.
        self.store.node(Digest(ref.digest), ref.hint)
        for node, named in walk(self.store, [self.top], visited):
            below = [reference for reference in named if is_node(reference)]
            chunks = [Digest(reference) for reference in named if not is_node(reference)]
            yield Node(node, digest_in(node), below, chunks)

    def nodes_of(
        self, users: Mapping[bytes, frozenset[int]]
    ) -> Iterator[tuple[frozenset[int], bytes]]:
        """Yield each node of some trees once, with the ranks that use the node.

        Args:
            users: The digest of each tree → the ranks that use the tree.

        Yields:
            The ranks, and the bytes of the node.

        Raises:
            DamagedError: A node is missing or damaged.
        """
        ranks_of = {TREE + tree: ranks for tree, ranks in users.items()}
        for node, named in walk(self.store, list(ranks_of), set()):
            for reference in filter(is_node, named):
                ranks_of[reference] = ranks_of.get(reference, frozenset()) | ranks_of[node]
            yield ranks_of[node], self.store.node(digest_in(node))

    @property
    def manifest(self) -> Manifest:
        """The snapshot's manifest, decoded.

        Raises:
            UnsupportedFormatError: Only a later version of casnap can read the snapshot.
            DamagedError: The manifest is missing or damaged.
        """
        self.check_features()
        return self.unchecked_manifest

    def check_features(self) -> None:
        """Check that this version of casnap can read the snapshot.

        Raises:
            UnsupportedFormatError: The snapshot has a feature that this version does not know.
        """
        if unknown := self.row.unknown_features:
            names = ", ".join(map(repr, unknown))
            raise UnsupportedFormatError(
                f"{self.label} has the feature {names:.200}, which this version of casnap does not "
                "know; update casnap to read this snapshot"
            )

    @cached_property
    def unchecked_manifest(self) -> Manifest:
        """The snapshot's manifest, even if only a later version of casnap can read the snapshot.

        Raises:
            DamagedError: The manifest is missing or damaged.
        """
        ref = self.row.manifest
        node = self.store.node(Digest(ref.digest), ref.hint)
        manifest = decode_kept(node, Manifest, f"the manifest of {self.label}")
        subtrees = [manifest.shared, *manifest.ranks.values()]
        if any(len(d) != DIGEST_SIZE for subtree in subtrees for d in subtree.values()):
            raise DamagedError(f"the manifest of {self.label} holds a malformed digest")
        world, ranks = self.row.world_size, manifest.ranks.keys()
        if len(ranks) != world or ranks != set(map(str, range(world))):
            names = ", ".join(sorted(ranks)[:4])
            raise DamagedError(
                f"{self.label} claims {world} ranks, but has {len(ranks)}: {names:.80}"
            )
        return manifest

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The metadata that the user gave to the snapshot.

        Raises:
            DamagedError: The metadata are missing or damaged.
        """
        if not self.row.metadata_node:
            return self.row.metadata
        node = self.store.node(Digest(self.row.metadata_node))
        if len(node) > _MOST_METADATA:
            raise DamagedError(f"the metadata of {self.label} have {len(node):,} bytes, too many")
        return decode(node, dict[str, Any], f"the metadata of {self.label}")

    @property
    def environment(self) -> dict[str, str]:
        """Facts about the process that took the snapshot, by key; empty if none were noted."""
        noted = self.manifest.environment
        return {key: text for key, text in noted.items() if isinstance(text, str)}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """In a ``with`` block, replace a ``DamagedError`` that comes from a deletion or thinning.

        Raises:
            SnapshotNotFoundError: The snapshot was deleted, replaced or thinned, and its chunks
                were collected.
        """
        try:
            yield
        except DamagedError as e:
            row = self.store.read_at_newest(lambda root: self.store.table(root).get(self.name))
            event, verb = "deleted or replaced", "held"
            if row is not None and row.commit == self.row.commit:
                if row.manifest.digest == self.row.manifest.digest:
                    raise
                event, verb = "thinned", "lost"
            raise SnapshotNotFoundError(
                f"{self.label} was {event}, and what it {verb} was collected as garbage "
                "while it was being read; a longer `casnap gc --grace` lets readers end"
            ) from e

    def keys(self) -> set[str]:
        """Return the keys of the app states of all ranks."""
        subtrees = (self.manifest.shared, *self.manifest.ranks.values())
        return {key_of(component) for subtree in subtrees for component in subtree}

    def trees(self, rank: int | None) -> dict[str, Entries]:
        """Return the entries that a rank sees, for each key of the app state.

        Args:
            rank: The rank. Its own entries take precedence over global ones. A rank that the
                snapshot does not have sees only global entries. None is for paths without a rank:
                global entries take precedence over rank 0's entries.

        Returns:
            The path component of each key → the entries.
        """
        shared, of_rank = self.manifest.shared, self.manifest.ranks.get(str(rank or 0), {})
        layers: list[tuple[dict[str, bytes], int | None]] = [(of_rank, rank or 0), (shared, None)]
        if rank is None:
            layers.reverse()
        return self._layers(layers)

    def _seen_by(self, rank: int | None) -> dict[str, Entries]:
        """Return the result of :meth:`trees` for a rank.

        The result is kept, since many paths may be looked up.
        """
        if rank not in self._seen:
            self._seen[rank] = self.trees(rank)
        return self._seen[rank]

    def _layers(self, layers: list[tuple[dict[str, bytes], int | None]]) -> dict[str, Entries]:
        keys = dict.fromkeys(key for trees, _ in layers for key in trees)
        return {
            key: Entries(self, {trees[key]: owner for trees, owner in layers if key in trees})
            for key in keys
        }

    def tree(self, digest: bytes) -> Tree[Entry]:
        """Return a tree of entries, given the digest of its top node."""
        tree = self._trees.get(digest)
        if tree is None:
            tree = entry_tree(Digest(digest), self.store.node)
            self._trees[digest] = tree
        return tree

    def entries(self, rank: int = 0) -> Iterator[tuple[str, Entry]]:
        """Yield all entries that a rank sees, each with its path ``<key>/<path>``."""
        for key, entries in sorted(self.trees(rank).items()):
            for inner, entry in entries.items():
                yield key + inner, entry

    def own_paths(self, rank: int) -> Iterator[str]:
        """Yield the path ``<key>/<path>`` of each entry that belongs to a rank alone."""
        for key, digest in self.manifest.ranks[str(rank)].items():
            yield from (key + inner for inner, _ in self.tree(digest).items())

    def ranks(self) -> Iterator[int]:
        """Yield the numbers of the ranks that took the snapshot."""
        yield from range(len(self.manifest.ranks))

    def keepers(self, path: str, *, only_leaves: bool = False) -> list[int]:
        """Return the ranks that have entries of their own at or below a path.

        Args:
            path: The path without a rank: ``<key>/<path>``.
            only_leaves: Whether to ignore containers.
        """
        key, slash, inner = path.partition("/")
        keepers = []
        for rank in self.ranks():
            digest = self.manifest.ranks[str(rank)].get(key)
            if digest is not None:
                tree, inner_path = self.tree(digest), slash + inner
                entries = chain(
                    filter(None, [tree.get(inner_path)]),
                    (entry for _, entry in tree.items_below(f"{inner_path}/")),
                )
                if any(not (only_leaves and isinstance(e, ContainerEntry)) for e in entries):
                    keepers.append(rank)
        return keepers

    def find(self, path: str) -> tuple[str, Entry, Entries] | None:
        """Find an entry by its path.

        A path that begins with a rank means an entry that the rank sees. A path that begins with
        ``global`` means a global entry. Any other path means a global entry, or else rank 0's.

        Returns:
            The path without its rank, the entry, and all entries below the same key; None if there
            is no such entry.

        Raises:
            TypeError: The path is not a str.
        """
        _check_path(path)
        head, slash, tail = path.partition("/")
        if (
            slash
            and head in self.manifest.ranks
            and tail.partition("/")[0] in (trees := self._seen_by(int(head)))
        ):
            bare = tail
        elif slash and self._means_global(head):
            bare, trees = tail, self._layers([(self.manifest.shared, None)])
        else:
            bare, trees = path, self._seen_by(None)
        key, slash, inner = bare.partition("/")
        entry = trees[key].get(slash + inner) if key in trees else None
        return None if entry is None else (bare, entry, trees[key])

    def entry(self, path: str, *, only_leaves: bool = False) -> tuple[str, Entry, Entries]:
        """Find an entry as :meth:`find` does, but raise an error if several may be meant.

        Args:
            path: The path.
            only_leaves: Whether several ranks may have containers of their own at the path.

        Raises:
            EntryNotFoundError: There is no entry of this path. Or the path has no rank, and several
                ranks have entries of their own at or below it. The message names them.
        """
        match = self.find(path)
        if match is None:
            raise self._absent(path)
        # If no rank but 0 has leaves of its own there, none is left out.
        if not only_leaves or any(rank > 0 for rank in self.keepers(path, only_leaves=True)):
            self.check_one_keeper(path, self._rivals(path, match))
        return match

    def has(self, path: str) -> bool:
        """Whether a path means exactly one entry."""
        match = self.find(path)
        return match is not None and len(self._rivals(path, match)) < 2

    def _rivals(self, path: str, match: tuple[str, Entry, Entries]) -> list[int]:
        """Return the ranks whose own entries a path without a rank may mean.

        Args:
            path: The path that the user gave.
            match: The result of :meth:`find` for this path.
        """
        full, entry, entries = match
        if full != path or self.row.world_size == 1:
            return []
        is_global = entries.owner(full[len(full.partition("/")[0]) :]) is None
        return [] if is_global and not isinstance(entry, ContainerEntry) else self.keepers(path)

    def check_one_keeper(self, path: str, keepers: list[int], asked: str | None = None) -> None:
        """Check that a path without a rank means the entry of only one rank.

        Args:
            path: The path.
            keepers: The ranks that have an entry of their own at the path.
            asked: The path that the user gave, if it is only a prefix of ``path``.

        Raises:
            EntryNotFoundError: Several ranks have an entry at the path.
        """
        if len(keepers) > 1:
            names = ", ".join(f"'{rank}/{asked or path}'" for rank in keepers[:4])
            more = f" and {len(keepers) - 4} more" if len(keepers) > 4 else ""
            raise EntryNotFoundError(
                f"{self.label} has {path!r} for {rank_names(keepers)}, each its own; say which: "
                f"{names}{more}"
            )

    def listed(self, start: str = "") -> Iterator[Listed]:
        """Yield each entry whose path begins with a text.

        Args:
            start: The text. If it begins with a rank and a slash, the method yields the entries
                that this rank sees. If it begins with ``global/``, the method yields only global
                entries. Otherwise it yields global entries and the entries of all ranks.
        """
        head, slash, tail = start.partition("/")
        shared, ranks = self.manifest.shared, self.manifest.ranks
        if slash and head in ranks:
            for path, entry, entries in _walk_below(self.trees(int(head)), tail):
                owner = entries.owner(path[len(path.partition("/")[0]) :])
                yield Listed(f"{head}/{path}", f"{head}/{path}", entry, owner)
            return
        lead = f"{GLOBAL}/" if slash and self._means_global(head) else ""
        for path, entry, _ in _walk_below(self._layers([(shared, None)]), start[len(lead) :]):
            yield Listed(lead + path, lead + path, entry, None)
        for rank, trees in () if lead else ranks.items():
            for path, entry, _ in _walk_below(self._layers([(trees, int(rank))]), start):
                yield Listed(f"{rank}/{path}", path, entry, int(rank))

    @staticmethod
    def is_pattern(path: str) -> bool:
        """Whether a path contains wildcards, and so may be a glob."""
        return _WILDCARDS.search(path) is not None

    def matching(self, pattern: str) -> list[Listed]:
        """Return the tensors and values whose paths match a glob. ``*`` matches slashes too.

        If the pattern is itself the path of entries, only these entries are returned.

        Raises:
            TypeError: The pattern is not a str.
        """
        _check_path(pattern)
        matches = re.compile(translate(pattern)).match
        start = _WILDCARDS.split(pattern, maxsplit=1)[0]
        candidates = [
            each for each in self.listed(start) if not isinstance(each.entry, ContainerEntry)
        ]
        exact = [each for each in candidates if each.path == pattern]
        return exact or [each for each in candidates if matches(each.path)]

    def _means_global(self, component: str) -> bool:
        """Whether the first component of a path is the word ``global``, and not a key."""
        return component == GLOBAL and all(component not in trees for trees in self._subtrees())

    def _subtrees(self) -> list[dict[str, bytes]]:
        return [self.manifest.shared, *self.manifest.ranks.values()]

    def _absent(self, path: str) -> EntryNotFoundError:
        head, _, tail = path.partition("/")
        bare = tail if head.isdigit() else path
        if bare.partition("/")[0] in self.manifest.thinned:
            return EntryNotFoundError(
                f"{self.label} has no entry {path!r} any more: {self.thinned_text()}"
            )
        asking = int(head) if head in self.manifest.ranks else 0
        keepers = self.keepers(bare)
        if keepers and asking not in keepers:
            return EntryNotFoundError(
                f"{self.label} has no entry {path!r}: it is kept for {rank_names(keepers)} alone; "
                f"read it as '{keepers[0]}/{bare}'"
            )
        return EntryNotFoundError(
            f"{self.label} has no entry {path!r}{nearest(bare, self._paths())}"
        )

    def thinned_text(self) -> str:
        """Return which keys the snapshot has lost by thinning, and advice, for a message."""
        keys = ", ".join(map(key_of, self.manifest.thinned))
        return (
            f"it was thinned, and has lost {keys:.500}. To resume, restore a whole snapshot, such "
            "as Store.latest(); only the other keys of this one can be restored"
        )

    def _paths(self) -> list[str]:
        """Return all paths, without ranks; an empty list if there are too many to list."""
        subtrees = self._subtrees()
        trees = {(key, digest): None for subtree in subtrees for key, digest in subtree.items()}
        if self.row.stats.entries >= 1e5 or len(trees) >= 1e3:
            return []
        return list({key + p: None for key, digest in trees for p, _ in self.tree(digest).items()})

    def chunks(self, path: str, entry: Entry) -> list[tuple[Digest, int]]:
        """Return the digest and the raw length of each chunk of an entry.

        The result is empty if the entry itself contains its bytes.

        Raises:
            DamagedError: Shape, length and digests of the entry do not fit each other.
            UnsupportedFormatError: Only a later version of casnap can read the entry.
        """
        payload = entry.payload
        if payload.nbytes <= INLINE_BYTES:
            return []
        cells = self.cells(path, entry)
        digests = split_digests(self.digests(payload, cells, path))
        return list(zip(digests, cells.sizes(), strict=True))

    def cells(self, path: str, entry: Entry) -> Grid:
        """Return the grid that cuts the bytes of an entry into cells.

        Raises:
            DamagedError: Shape and length of the entry do not fit each other.
            UnsupportedFormatError: Only a later version of casnap can read the entry.
        """
        if unknown_in(entry):
            check_known(self.label, [(path, entry)])
        nbytes, chunk_size = entry.payload.nbytes, self.store.config.chunk_size
        if not isinstance(entry, TensorEntry):
            return grid_of((nbytes,), 1, chunk_size)
        count = prod(entry.shape)
        itemsize = nbytes // max(count, 1)
        is_consistent = min(entry.shape, default=1) > 0 and itemsize * count == nbytes
        if not is_consistent or itemsize > chunk_size:
            raise DamagedError(
                f"{self.label}: {path} claims {nbytes} bytes for the shape {list(entry.shape)}",
                (path,),
            )
        return grid_of(entry.shape, itemsize, chunk_size)

    def digests(self, payload: Payload, cells: Grid, path: str) -> bytes:
        """Return the concatenated digests of a payload's chunks.

        Args:
            payload: The payload.
            cells: The grid of the entry.
            path: The path of the entry, for messages.

        Raises:
            DamagedError: There are more or fewer digests than cells, or a list is damaged.
        """
        digests = payload.digests
        if not 0 <= payload.depth <= MAX_LIST_DEPTH:
            raise DamagedError(
                f"{self.label}: {path} claims a list of depth {payload.depth}", (path,)
            )
        for _ in range(payload.depth):
            if len(digests) > DIGEST_SIZE * max(cells.count, 1):
                break
            digests = self._joined_lists(digests, cells.count, path)
        if len(digests) != DIGEST_SIZE * cells.count:
            raise DamagedError(
                f"{self.label}: {path} lists {len(digests) / DIGEST_SIZE:g} chunks where its shape "
                f"has {cells.count}",
                (path,),
            )
        return digests

    def named_chunks(self, payload: Payload) -> dict[Digest, None]:
        """Return the digests of the chunks that a payload names, as the keys of a dict.

        Raises:
            DamagedError: A list of digests is malformed.
        """
        if not 0 <= payload.depth <= MAX_LIST_DEPTH or len(payload.digests) % DIGEST_SIZE:
            raise DamagedError(f"{self.label} has an entry with a malformed list of digests")
        named = dict.fromkeys(split_digests(payload.digests))
        for _ in range(payload.depth):
            lists = map(self._list, named)
            named = dict.fromkeys(digest for listed in lists for digest in split_digests(listed))
        return named

    def _joined_lists(self, digests: bytes, most: int, path: str) -> bytes:
        """Return the concatenated digests in some lists. Stop reading once there are too many.

        Args:
            digests: The concatenated digests of the lists.
            most: The most digests to expect.
            path: The path of the entry, for messages.
        """
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
        listed = self.store.node(digest)
        if len(listed) > DIGEST_SIZE * LIST_DIGESTS:
            raise DamagedError(f"the list {digest.hex()} is longer than a list may be")
        return listed


def _check_path(path: object) -> None:
    if not isinstance(path, str):
        raise TypeError(
            "a path in a snapshot is a str, like 'model/weight'; got "
            f"{with_article(type(path).__name__)}"
        )


def _walk_below(trees: Mapping[str, Entries], start: str) -> Iterator[tuple[str, Entry, Entries]]:
    """Yield the paths that begin with a text, each with its entry and its key's entries."""
    for key, entries in sorted(trees.items()):
        if key.startswith(start) or start.startswith(f"{key}/"):
            for inner, entry in entries.items_below(start[len(key) :]):
                yield key + inner, entry, entries
