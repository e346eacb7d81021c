"""The Merkle tree: sorted keys in leaves, and one list of leaves on top.

A leaf ends after a key whose hash says so, so a tree depends on what it holds alone, not on the
order of the changes that led there: equal content has equal digests, and a change rewrites one
leaf and the list. Trees hold digests, never places. A tree of one leaf is that leaf.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice, zip_longest
from operator import ge
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from casnap.digest import DIGEST_SIZE, Digest, digest_of
from casnap.errors import DamagedError
from casnap.format import encode

V = TypeVar("V")

_MOST_ITEMS = 4096
_MOST_KEY_CHARS = 1 << 20

Put = Callable[[bytes], Digest]
"""Stores a node and returns its digest."""
Load = Callable[[Digest], bytes]
"""Returns the verified bytes of a node."""


class Leaf(Struct, Generic[V], frozen=True, array_like=True, tag="l"):
    """Keys in order, each with its value."""

    items: list[tuple[str, V]]


class Branch(Struct, frozen=True, array_like=True, tag="b"):
    """The leaves in order: first key, digest, number of items."""

    children: list[tuple[str, bytes, int]]


@cache
def _decoder(value_type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(Leaf[value_type] | Branch)


def _ends_leaf(key: str) -> bool:
    return digest_of(key.encode("utf-8", "surrogatepass"))[0] == 0


def _cut(items: Iterable[tuple[str, V]]) -> Iterator[tuple[list[tuple[str, V]], bool]]:
    """Yield the items of each leaf, and whether it ended by itself or for want of more."""
    run: list[tuple[str, V]] = []
    key_chars = 0
    for item in items:
        run.append(item)
        key_chars += len(item[0])
        if len(run) == _MOST_ITEMS or key_chars >= _MOST_KEY_CHARS or _ends_leaf(item[0]):
            yield run, True
            run, key_chars = [], 0
    if run:
        yield run, False


def _close(children: Sequence[tuple[str, bytes, int]], put: Put) -> Digest:
    if len(children) == 1:
        return Digest(children[0][1])
    return put(encode(Branch(list(children))))


def build(items: Mapping[str, V], put: Put) -> Digest:
    """Store a tree of these items and return the digest of its top."""
    children = [
        (run[0][0], put(encode(Leaf(run))), len(run)) for run, _ in _cut(sorted(items.items()))
    ]
    return _close(children, put) if children else put(encode(Leaf([])))


class Tree(Generic[V]):
    """A stored tree, read node by node as it is asked.

    Args:
        top: The digest of its top node; None for a tree without items.
        load: Gives the verified bytes of a node.
        value_type: What the leaves hold.
    """

    def __init__(self, top: Digest | None, load: Load, value_type: Any) -> None:
        self._load = load
        self._decoder = _decoder(value_type)
        self._leaves: dict[Digest, list[tuple[str, V]]] = {}
        self._claims: dict[bytes, tuple[str, int, str | None]] = {}
        self.children: list[tuple[str, bytes, int]] = []
        if top is None:
            return
        node = self._node(top)
        if isinstance(node, Branch):
            self.children = node.children
            if any(
                len(digest) != DIGEST_SIZE or not 0 < count <= _MOST_ITEMS
                for _, digest, count in self.children
            ):
                raise DamagedError(f"tree node {top.hex()} lists what is no leaf")
            ends = [first for first, _, _ in self.children[1:]]
            self._claims = {
                digest: (first, count, end)
                for (first, digest, count), end in zip_longest(self.children, ends)
            }
        elif node.items:
            self._leaves[top] = node.items
            self.children = [(node.items[0][0], top, len(node.items))]

    def _node(self, digest: Digest) -> Leaf[V] | Branch:
        try:
            node: Leaf[V] | Branch = self._decoder.decode(self._load(digest))
        except (msgspec.DecodeError, RecursionError, ValueError) as e:
            raise DamagedError(f"tree node {digest.hex()} cannot be decoded: {e}") from e
        keys = [item[0] for item in (node.children if isinstance(node, Branch) else node.items)]
        if any(map(ge, keys, islice(keys, 1, None))):
            raise DamagedError(f"tree node {digest.hex()} is out of order")
        return node

    def leaf(self, digest: Digest) -> list[tuple[str, V]]:
        """Return the items of one leaf; the last one read is kept."""
        items = self._leaves.get(digest)
        if items is None:
            node = self._node(digest)
            if isinstance(node, Branch):
                raise DamagedError(f"tree node {digest.hex()} is a list where a leaf should be")
            items = node.items
            self._check_claim(digest, items)
            self._leaves = {digest: items}
        return items

    def _check_claim(self, digest: Digest, items: list[tuple[str, V]]) -> None:
        """Check that a leaf is what the list says: else an edit would write what nobody reads."""
        first, count, end = self._claims[digest]
        fits = len(items) == count and items[0][0] == first
        if not fits or (end is not None and items[-1][0] >= end):
            raise DamagedError(f"tree node {digest.hex()} is not the leaf that it is listed as")

    def __len__(self) -> int:
        return sum(count for _, _, count in self.children)

    def _child(self, key: str) -> int:
        return max(bisect_right(self.children, key, key=lambda c: c[0]) - 1, 0)

    def get(self, key: str) -> V | None:
        """Return the value of a key, or None."""
        if not self.children:
            return None
        items = self.leaf(Digest(self.children[self._child(key)][1]))
        at = bisect_left(items, key, key=lambda item: item[0])
        return items[at][1] if at < len(items) and items[at][0] == key else None

    def items(self, start: str = "") -> Iterator[tuple[str, V]]:
        """Yield the items in order of their keys, from ``start`` on."""
        for _, digest, _ in self.children[self._child(start) :]:
            items = self.leaf(Digest(digest))
            yield from items[bisect_left(items, start, key=lambda item: item[0]) :]

    def below(self, prefix: str) -> Iterator[tuple[str, V]]:
        """Yield the items whose key begins with ``prefix``."""
        for key, value in self.items(prefix):
            if not key.startswith(prefix):
                return
            yield key, value

    def edited(self, changes: Mapping[str, V | None], put: Put) -> Digest | None:
        """Store this tree with some items set, or (None) removed; return the digest of its top.

        Only leaves that change are stored.
        """
        todo: dict[int, dict[str, V | None]] = {}
        for key, value in changes.items():
            todo.setdefault(self._child(key), {})[key] = value
        children: list[tuple[str, bytes, int]] = []
        open_run: list[tuple[str, V]] = []
        for i, child in enumerate(self.children or [("", b"", 0)]):
            if i not in todo and not open_run and child[1]:
                children.append(child)
                continue
            merged = dict(self.leaf(Digest(child[1]))) if child[1] else {}
            for key, value in todo.get(i, {}).items():
                merged.pop(key, None) if value is None else merged.update({key: value})
            last = i >= len(self.children) - 1
            run, open_run = open_run + sorted(merged.items()), []
            for items, ended in _cut(run):
                if ended or last:
                    children.append((items[0][0], put(encode(Leaf(items))), len(items)))
                else:
                    open_run = items
        return _close(children, put) if children else None
