"""The Merkle tree: sorted keys with values in leaves, and lists of nodes above the leaves.

The hash of a key decides whether a node ends after that key. So a tree depends on its content
alone, not on the order of changes: equal content has equal digests, and a change rewrites one leaf
and the lists above it. Trees hold digests, never places. A tree with one leaf has no list. Prolly
trees, as in Noms and Dolt, have the same idea.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from operator import ge, itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct

from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.decoding import decoder
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of
from casnap.format.records import encode

V = TypeVar("V")

_MOST_KEY_CHARS = 1 << 20
_MOST_BELOW = 1 << 32  # the most items below a node

Put = Callable[[bytes], Digest]
"""Stores a node and returns its digest."""
Load = Callable[[Digest], bytes]
"""Returns the verified bytes of a node."""
Child = tuple[str, bytes, int]
"""A child of a list of nodes: its first key, its digest, and the number of items below it."""
_CHILD_FIELDS = 3


class LeafNode(Struct, Generic[V], frozen=True, array_like=True, tag="l"):
    """A leaf of a tree: keys in ascending order, each with its value."""

    items: list[tuple[str, V]]


class Branch(Struct, frozen=True, array_like=True, tag="b"):
    """A list of nodes: the nodes of the level below, in ascending order of their keys."""

    children: list[Child]


ENTRY_FANOUT, TABLE_FANOUT = 256, 8
"""The fanouts of the trees: how many items, or children, a node has on average.

A take changes many entries at once, so the trees of entries have few, but large nodes. A change of
the table of snapshots rewrites one row, so its nodes are small.
"""
MAX_LEVELS = DIGEST_SIZE - 1
"""The most levels of lists. Byte n of a key's hash decides whether a node of level n ends."""


def most_in_node(fanout: int) -> int:
    """Return the most items of a leaf, or children of a list.

    Args:
        fanout: The average number of items or children.
    """
    return 16 * fanout


def _hash(key: str) -> bytes:
    # Each key of a tree comes here, and naming an error handler takes time.
    return digest_of(key.encode() if key.isascii() else key.encode("utf-8", "surrogatepass"))


@cache
def _decoder(value_type: Any) -> Any:
    return decoder(LeafNode[value_type] | Branch)  # type: ignore[arg-type]


class _Claim(NamedTuple):
    """What a list says about a node below it. The node is checked against it when it is read.

    Attributes:
        first_key: The first key of the node.
        size: The number of items below the node.
        end: A key that is greater than all keys of the node; None for the last node.
        depth: The number of lists above the node.
    """

    first_key: str
    size: int
    end: str | None
    depth: int


def _is_past(key: str, prefix: str) -> bool:
    """Whether a key comes after all keys with a prefix."""
    return key > prefix and not key.startswith(prefix)


def _entries(node: LeafNode[Any] | Branch) -> Sequence[tuple[Any, ...]]:
    return node.children if isinstance(node, Branch) else node.items


_key_in = itemgetter(0)
_Change = tuple[str, V | None]


def build(items: Mapping[str, V], put_node: Put, fanout: int = ENTRY_FANOUT) -> Digest:
    """Store a new tree, and return the digest of its top node.

    Args:
        items: The keys and values.
        put_node: Stores the bytes of a node, and returns its digest.
        fanout: The average number of items, or children, in a node.
    """
    levels: _Levels[V] = _Levels(fanout, put_node)
    levels.add_items(sorted(items.items(), key=_key_in))
    top = levels.top()
    return Digest(top[1]) if top else put_node(encode(LeafNode([])))


class _Levels(Generic[V]):
    """Writes a tree from left to right. Each level has one open node, which still grows.

    A full node is stored only once its level gets another item or child. If none comes, the node is
    the top of the tree, and needs no list above it.

    Args:
        fanout: The average number of items, or children, in a node.
        put_node: Stores the bytes of a node, and returns its digest.
    """

    def __init__(self, fanout: int, put_node: Put) -> None:
        self._fanout = fanout
        self._put_node = put_node
        self._runs: list[list[Any]] = [[]]
        self._full = [False]
        self._key_chars = 0

    def add_items(self, items: Iterable[tuple[str, V]]) -> None:
        """Add the next items.

        Their keys must be in ascending order, and greater than all keys that were added before.
        """
        run, is_full, key_chars = self._runs[0], self._full[0], self._key_chars
        fanout, most_items = self._fanout, most_in_node(self._fanout)
        for item in items:
            if is_full:
                self._close(0)
                run, key_chars = self._runs[0], 0
            run.append(item)
            key = item[0]
            key_chars += len(key)
            is_full = (
                not _hash(key)[0] % fanout or len(run) == most_items or key_chars >= _MOST_KEY_CHARS
            )
        self._full[0], self._key_chars = is_full, key_chars

    def add_node(self, child: Child, level: int) -> None:
        """Add a node that is already stored, with all that is below it.

        Args:
            child: The node's first key, digest, and number of items.
            level: The level of the node; 0 for a leaf. :meth:`closed_to` must have returned True
                for it.
        """
        upper = level + 1
        self._reach(upper)
        if self._full[upper]:
            self._close(upper)
        run = self._runs[upper]
        run.append(child)
        ends = not _hash(child[0])[upper] % self._fanout or len(run) == most_in_node(self._fanout)
        self._full[upper] = ends and upper < MAX_LEVELS

    def closed_to(self, level: int) -> bool:
        """Store the full nodes up to ``level``; return whether these levels have no open node left.

        If they have none, the caller can add a stored node of ``level`` without reading it.
        """
        self._reach(level)
        for i in range(level + 1):
            if self._full[i]:
                self._close(i)
            if self._runs[i]:
                return False
        return True

    def _reach(self, level: int) -> None:
        while level >= len(self._runs):
            self._runs.append([])
            self._full.append(False)

    def _close(self, level: int) -> None:
        run = self._runs[level]
        self._runs[level], self._full[level] = [], False
        if level == 0:
            self._key_chars = 0
            child = (run[0][0], self._put_node(encode(LeafNode(run))), len(run))
        else:
            node = self._put_node(encode(Branch(run)))
            child = (run[0][0], node, sum(map(itemgetter(2), run)))
        self.add_node(child, level)

    def top(self) -> Child | None:
        """Store all open nodes, and return the top of the tree; None if the tree has no item."""
        level = 0
        while True:
            is_last = not any(self._runs[level + 1 :])
            if is_last and level > 0 and len(self._runs[level]) == 1:
                child: Child = self._runs[level][0]
                return child
            if self._runs[level]:
                self._close(level)
            elif is_last:
                return None
            level += 1


class Tree(Generic[V]):
    """A stored tree. It reads a node when it first needs the node.

    Args:
        top: The digest of the top node; None for a tree without items.
        load: Returns the verified bytes of a node.
        value_type: The type of the values.
        fanout: The average number of items, or children, in a node.
        accepts: Whether a key is valid. The tree skips items with invalid keys, and leaves them out
            of a leaf that it rewrites.
        decode_one: Decodes one value. It is used for leaves that cannot be decoded as a whole,
            since a later version of casnap wrote them.

    Attributes:
        children: The nodes below the top node; if the top node is a leaf, that leaf itself.
        rejected: The keys that were skipped so far, up to about 1 MiB of characters.
    """

    def __init__(
        self,
        top: Digest | None,
        load: Load,
        value_type: Any,
        fanout: int = ENTRY_FANOUT,
        accepts: Callable[[str], bool] | None = None,
        decode_one: Callable[[Raw], V] | None = None,
    ) -> None:
        self._load = load
        self._accepts = accepts
        self.rejected: set[str] = set()
        self._rejected_chars = 0
        self._decoder = _decoder(value_type)
        self._fanout = fanout
        self._decode_one = decode_one or decoder(value_type).decode
        self._last: tuple[Digest, LeafNode[V]] | None = None
        self._claims: dict[bytes, _Claim] = {}
        self.children: list[Child] = []
        if top is None:
            return
        node = self._node(top)
        if isinstance(node, Branch):
            self.children = node.children
        elif node.items:
            self.children = [(node.items[0][0], top, len(node.items))]
            self._last = (top, self._accepted(node))

    def _node(self, digest: Digest) -> LeafNode[V] | Branch:
        try:
            data = self._load(digest)
            node = self._decoded(data)
        except UnsupportedFormatError as e:
            raise UnsupportedFormatError(f"tree node {digest.hex()} {e}") from e
        except (msgspec.DecodeError, RecursionError, ValueError) as e:
            raise DamagedError(f"tree node {digest.hex()} cannot be decoded: {e}") from e
        keys = [item[0] for item in _entries(node)]
        if any(map(ge, keys, islice(keys, 1, None))):
            raise DamagedError(f"tree node {digest.hex()} is out of order")
        # Counting the characters takes time, and only a large node can have too many.
        is_large = isinstance(node, LeafNode) and len(data) > _MOST_KEY_CHARS
        too_many_chars = is_large and sum(map(len, keys[:-1])) >= _MOST_KEY_CHARS
        if len(keys) > most_in_node(self._fanout) or too_many_chars:
            raise DamagedError(f"tree node {digest.hex()} is longer than a node may be")
        if isinstance(node, Branch):
            self._note_claims(digest, node.children)
        return node

    def _decoded(self, data: bytes) -> LeafNode[V] | Branch:
        try:
            node: LeafNode[V] | Branch = self._decoder.decode(data)
        except msgspec.ValidationError:
            return self._decoded_one_by_one(data)
        return node

    def _decoded_one_by_one(self, data: bytes) -> LeafNode[V] | Branch:
        """Decode a node value by value, since a later version of casnap may have written it."""
        kind, below, *_ = decoder(list[Raw]).decode(data)
        sort = decoder(str).decode(kind)
        if sort == "l":
            pairs = decoder(list[tuple[str, Raw]]).decode(below)
            return LeafNode([(key, self._decode_one(value)) for key, value in pairs])
        if sort == "b":
            children = decoder(list[list[Raw]]).decode(below)
            cut = msgspec.msgpack.encode([child[:_CHILD_FIELDS] for child in children])
            return Branch(decoder(list[Child]).decode(cut))
        raise UnsupportedFormatError(f"is of the unknown sort {sort[:40]!r}; update casnap")

    def _note_claims(self, digest: Digest, children: list[Child]) -> None:
        if any(len(d) != DIGEST_SIZE or not 0 < count <= _MOST_BELOW for _, d, count in children):
            raise DamagedError(f"tree node {digest.hex()} has a list with malformed entries")
        claim = self._claims.get(digest)
        level, end = (1, None) if claim is None else (claim.depth + 1, claim.end)
        if level > MAX_LEVELS:
            raise DamagedError(f"tree node {digest.hex()} is a list where a leaf should be")
        ends = [*(first_key for first_key, _, _ in children[1:]), end]
        self._claims.update(
            (d, _Claim(first_key, count, end, level))
            for (first_key, d, count), end in zip(children, ends, strict=False)
        )

    def node(self, digest: Digest) -> LeafNode[V] | Branch:
        """Return a node that a list of this tree names. The leaf that was read last is cached.

        Raises:
            DamagedError: The node is missing or damaged, or is not as the list says.
        """
        if self._last is not None and self._last[0] == digest:
            return self._last[1]
        node = self._node(digest)
        self._check_claim(digest, node)
        if isinstance(node, LeafNode):
            node = self._accepted(node)
            self._last = (digest, node)
        return node

    def _accepted(self, node: LeafNode[V]) -> LeafNode[V]:
        """Return a leaf without the items whose keys ``accepts`` refuses.

        These keys are added to ``rejected``, up to a bound.
        """
        if self._accepts is None:
            return node
        bad = {key for key, _ in node.items if not self._accepts(key)}
        for key in bad:
            if self._rejected_chars < _MOST_KEY_CHARS and key not in self.rejected:
                self.rejected.add(key)
                self._rejected_chars += len(key)
        return LeafNode([item for item in node.items if item[0] not in bad]) if bad else node

    def _check_claim(self, digest: Digest, node: LeafNode[V] | Branch) -> None:
        """Check that a node is as the list above it says. Otherwise an edit could lose items.

        Raises:
            DamagedError: The first key, the range of keys or the number of items differs.
        """
        claim, entries = self._claims[digest], _entries(node)
        count = sum(c for _, _, c in node.children) if isinstance(node, Branch) else len(entries)
        fits = count == claim.size and entries[0][0] == claim.first_key
        if not fits or (claim.end is not None and entries[-1][0] >= claim.end):
            raise DamagedError(f"tree node {digest.hex()} is not the one that it is listed as")

    def leaf(self, digest: Digest) -> list[tuple[str, V]]:
        """Return the items of one leaf.

        Raises:
            DamagedError: The node is missing or damaged, or is not a leaf.
        """
        node = self.node(digest)
        if isinstance(node, Branch):
            raise DamagedError(f"tree node {digest.hex()} is a list where a leaf should be")
        return node.items

    def __len__(self) -> int:
        return sum(count for _, _, count in self.children)

    def get(self, key: str) -> V | None:
        """Return the value of a key; None if the tree does not have the key."""
        items = next(self._leaves(self.children, key), [])
        at = bisect_left(items, key, key=_key_in)
        return items[at][1] if at < len(items) and items[at][0] == key else None

    def items(self, start: str = "") -> Iterator[tuple[str, V]]:
        """Yield the items in ascending order of their keys, from the key ``start`` on."""
        for items in self._leaves(self.children, start):
            yield from items[bisect_left(items, start, key=_key_in) :]

    def _leaves(self, children: list[Child], start: str) -> Iterator[list[tuple[str, V]]]:
        """Yield the items of each leaf.

        The first leaf is the one where ``start`` is, or would be.
        """
        for child in children[max(bisect_right(children, start, key=_key_in) - 1, 0) :]:
            node = self.node(Digest(child[1]))
            if isinstance(node, Branch):
                yield from self._leaves(node.children, start)
            else:
                yield node.items

    def read_ahead(self, prefix: str, cache: Callable[[list[Digest]], object]) -> None:
        """Have the nodes cached that hold keys with a prefix, those of each level together.

        Args:
            prefix: The prefix.
            cache: Reads and caches nodes. A leaf that it finds missing or damaged is left to the
                later reads.

        Raises:
            DamagedError: A node above the leaves is missing or damaged.
        """
        children = self.children
        while children:
            start = max(bisect_right(children, prefix, key=_key_in) - 1, 0)
            stop = bisect_left(children, True, start + 1, key=lambda c: _is_past(c[0], prefix))
            children = children[start:stop]
            with suppress(DamagedError):
                cache([Digest(digest) for _, digest, _ in children])
            below = list[Child]()
            for _, digest, _ in children:
                node = self.node(Digest(digest))
                if not isinstance(node, Branch):
                    return
                below += node.children
            children = below

    def items_below(self, prefix: str) -> Iterator[tuple[str, V]]:
        """Yield the items whose keys begin with ``prefix``."""
        for key, value in self.items(prefix):
            if not key.startswith(prefix):
                return
            yield key, value

    def items_in(self, folder: str = "") -> Iterator[tuple[str, V]]:
        """Yield the items whose keys lie in a folder or in its subfolders.

        The folder "" holds all items.
        """
        return self.items_below(f"{folder}/" if folder else "")

    def edit(self, changes: Mapping[str, V | None], put_node: Put) -> Digest | None:
        """Store a changed copy of this tree. Only nodes that differ are stored.

        Args:
            changes: The new value for each key that changes; None removes the key.
            put_node: Stores the bytes of a node, and returns its digest.

        Returns:
            The digest of the new top node; None if no item is left.
        """
        levels: _Levels[V] = _Levels(self._fanout, put_node)
        self._edit_nodes(
            levels, self.children, self._height(), sorted(changes.items(), key=_key_in)
        )
        top = levels.top()
        if top is None:
            return None
        digest = Digest(top[1])
        # An edit may leave lists of one node at the top: the tree begins below them.
        while digest in self._claims:
            node = self.node(digest)
            if isinstance(node, LeafNode) or len(node.children) > 1:
                break
            digest = Digest(node.children[0][1])
        return digest

    def _height(self) -> int:
        """Return the level of the nodes in ``children``: 0 for leaves."""
        height, children = 0, self.children
        while children and isinstance(node := self.node(Digest(children[0][1])), Branch):
            height, children = height + 1, node.children
        return height

    def _edit_nodes(
        self, levels: _Levels[V], children: list[Child], level: int, todo: list[_Change[V]]
    ) -> None:
        """Add some nodes of one level to a new tree, and apply changes to the items below them.

        A node without changes below it is added as it is, without being read.

        Args:
            levels: Writes the new tree.
            children: The nodes.
            level: Their level; 0 for leaves.
            todo: The changed items, in ascending order of their keys. The new value None removes an
                item.
        """
        if not children:
            self._merge(levels, [], todo)
        for i, child in enumerate(children):
            is_last = i == len(children) - 1
            stop = len(todo) if is_last else bisect_left(todo, children[i + 1][0], key=_key_in)
            own_items, todo = todo[:stop], todo[stop:]
            if not own_items and levels.closed_to(level):
                levels.add_node(child, level)
                continue
            node = self.node(Digest(child[1]))
            if isinstance(node, Branch) != (level > 0):
                raise DamagedError(f"tree node {child[1].hex()} is at another level than others")
            if isinstance(node, Branch):
                self._edit_nodes(levels, node.children, level - 1, own_items)
            else:
                self._merge(levels, node.items, own_items)

    @staticmethod
    def _merge(levels: _Levels[V], items: list[tuple[str, V]], todo: list[_Change[V]]) -> None:
        merged: dict[str, V | None] = {**dict(items), **dict(todo)}
        kept_items = {key: value for key, value in merged.items() if value is not None}
        levels.add_items(sorted(kept_items.items(), key=_key_in))
