"""The Merkle tree, against a dict: what it holds alone says what it is."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casnap.digest import Digest, digest_of
from casnap.errors import DamagedError
from casnap.format import encode
from casnap.manifest import Branch, Leaf, Tree, build


class Nodes(dict[Digest, bytes]):
    """Nodes in memory; keeps what was put in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[Digest] = []

    def put(self, node: bytes) -> Digest:
        digest = digest_of(node)
        self[digest] = node
        self.order.append(digest)
        return digest

    def tree(self, top: Digest | None) -> Tree[int]:
        return Tree(top, self.__getitem__, int)

    def built(self, items: Mapping[str, int]) -> Digest:
        return build(items, self.put)


def ends_leaf(key: str) -> bool:
    return digest_of(key.encode())[0] == 0


# Keys that end a leaf are one in 256: some are picked, so that small trees have many leaves.
ENDS = [key for key in (f"k{i}" for i in range(6000)) if ends_leaf(key)]
assert len(ENDS) > 15
keys = st.one_of(
    st.sampled_from(ENDS),
    st.integers(0, 200).map(lambda i: f"k{i}"),
    st.text(st.characters(codec="utf-8"), max_size=5),
)
models = st.dictionaries(keys, st.integers(0, 3), max_size=40)
edits = st.dictionaries(keys, st.none() | st.integers(0, 3), max_size=20)


def apply(model: dict[str, int], changes: Mapping[str, int | None]) -> dict[str, int]:
    new = {**model, **changes}
    return {key: value for key, value in new.items() if value is not None}


@given(models)
def test_a_tree_holds_what_it_was_built_from(model: dict[str, int]) -> None:
    nodes = Nodes()
    tree = nodes.tree(nodes.built(model))
    assert list(tree.items()) == sorted(model.items())
    assert len(tree) == len(model)


@given(models, keys)
def test_get(model: dict[str, int], key: str) -> None:
    nodes = Nodes()
    tree = nodes.tree(nodes.built(model))
    assert tree.get(key) == model.get(key)
    for own, value in model.items():
        assert tree.get(own) == value


@given(models, keys)
def test_items_from_a_key_on(model: dict[str, int], start: str) -> None:
    nodes = Nodes()
    tree = nodes.tree(nodes.built(model))
    assert list(tree.items(start)) == sorted(i for i in model.items() if i[0] >= start)


@given(models, st.text(st.characters(codec="utf-8"), max_size=2) | st.sampled_from(["k", "k1"]))
def test_items_below_a_prefix(model: dict[str, int], prefix: str) -> None:
    nodes = Nodes()
    tree = nodes.tree(nodes.built(model))
    assert list(tree.below(prefix)) == sorted(i for i in model.items() if i[0].startswith(prefix))


@given(models, st.lists(edits, max_size=4))
def test_a_tree_does_not_show_its_history(
    model: dict[str, int], changes: list[dict[str, int | None]]
) -> None:
    nodes = Nodes()
    top: Digest | None = nodes.built(model) if model else None
    for change in changes:
        model = apply(model, change)
        top = nodes.tree(top).edited(change, nodes.put)
        assert list(nodes.tree(top).items()) == sorted(model.items())
        assert top == (nodes.built(model) if model else None)


@given(models, edits)
def test_an_edit_stores_only_leaves_that_change(
    model: dict[str, int], change: dict[str, int | None]
) -> None:
    nodes = Nodes()
    tree = nodes.tree(nodes.built(model))
    before = {digest for _, digest, _ in tree.children}
    nodes.order.clear()
    top = tree.edited(change, nodes.put)
    after = [digest for _, digest, _ in nodes.tree(top).children]
    stored = [d for d in nodes.order if d != top or d in after]
    # A leaf that a change leaves as it is may be put again, where the change touched it.
    assert set(after) - before <= set(stored)
    touched = {tree._child(key) for key in change} if tree.children else set()
    merged = sum(ends_leaf(key) for key, value in change.items() if value is None)
    added = sum(ends_leaf(key) for key, value in change.items() if value is not None)
    assert len(stored) <= len(touched) + merged + added + 1


def test_leaves_are_bounded() -> None:
    """Keys of which none ends a leaf are cut all the same, wherever edits came."""
    inner = [key for key in (f"x{i:06}" for i in range(20_000)) if not ends_leaf(key)]
    model = dict.fromkeys(inner[:13_000], 0)
    nodes = Nodes()
    top: Digest | None = nodes.built(model)
    assert max(count for _, _, count in nodes.tree(top).children) == 4096
    dice = random.Random(3)
    for _ in range(20):
        chosen = dice.sample(inner, 5)
        change = {key: dice.choice([None, 1]) for key in chosen}
        model = apply(model, change)
        top = nodes.tree(top).edited(change, nodes.put)
        assert top == nodes.built(model)


def test_one_change_in_many_items() -> None:
    nodes = Nodes()
    model = {f"model/layer.{i}/weight": i for i in range(50_000)}
    tree = nodes.tree(nodes.built(model))
    assert 100 < len(tree.children) < 400
    nodes.order.clear()
    tree.edited({"model/layer.31415/weight": 0}, nodes.put)
    assert len(nodes.order) == 2
    assert sum(len(nodes[d]) for d in nodes.order) < 80_000


def test_reading_one_item_reads_two_nodes() -> None:
    nodes = Nodes()
    top = nodes.built({f"{i}": i for i in range(20_000)})
    loaded: list[Digest] = []

    def load(digest: Digest) -> bytes:
        loaded.append(digest)
        return nodes[digest]

    tree: Tree[int] = Tree(top, load, int)
    assert tree.get("12345") == 12345
    assert len(loaded) == 2


def test_the_empty_tree() -> None:
    nodes = Nodes()
    for top in (None, nodes.built({})):
        tree = nodes.tree(top)
        assert (len(tree), list(tree.items()), tree.get("x")) == (0, [], None)
        assert tree.edited({}, nodes.put) is None
        assert tree.edited({"x": None}, nodes.put) is None
        assert nodes.tree(tree.edited({"x": 1}, nodes.put)).get("x") == 1


DIGEST = bytes(32)


@pytest.mark.parametrize(
    "node",
    [
        b"",
        b"\xc1",
        b"\x00" * 100,
        encode(["l"]),
        encode(["l", [["key", "no int"]]]),
        encode(["x", []]),
        encode(["b", [["a", DIGEST, 1], ["a", DIGEST, 1]]]),
        encode(["b", [["b", DIGEST, 1], ["a", DIGEST, 1]]]),
        encode(["b", [["a", DIGEST[:-1], 1]]]),
        encode(["b", [["a", DIGEST, -1]]]),
        encode(["l", [["b", 1], ["a", 1]]]),
        encode(["l", [["a", 1], ["a", 1]]]),
        b"\x91" * 100_000,
    ],
)
def test_a_node_that_is_none(node: bytes) -> None:
    nodes = Nodes()
    with pytest.raises(DamagedError):
        list(nodes.tree(nodes.put(node)).items())


def test_a_list_of_lists() -> None:
    nodes = Nodes()
    inner = nodes.put(encode(Branch([("a", DIGEST, 1)])))
    tree = nodes.tree(nodes.put(encode(Branch([("a", inner, 1)]))))
    with pytest.raises(DamagedError, match="list where a leaf"):
        tree.get("a")


def test_the_bytes_of_nodes() -> None:
    """These bytes are the format: they name every manifest ever stored."""
    assert msgspec.msgpack.decode(encode(Leaf([("a", 1), ("b", 2)]))) == ["l", [["a", 1], ["b", 2]]]
    nodes = Nodes()
    assert nodes.built({"a": 1}).hex()[:16] == digest_of(encode(["l", [["a", 1]]])).hex()[:16]
