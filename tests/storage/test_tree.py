"""The Merkle tree, against a dict: what it holds alone says what it is."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.digest import Digest, digest_of
from casnap.format.records import encode
from casnap.format.tree import (
    ENTRY_FANOUT,
    MAX_LEVELS,
    TABLE_FANOUT,
    Branch,
    LeafNode,
    Tree,
    build,
    most_in_node,
)


class Nodes(dict[Digest, bytes]):
    """Nodes in memory; keeps what was put in turn."""

    def __init__(self, fanout: int = ENTRY_FANOUT) -> None:
        super().__init__()
        self.fanout = fanout
        self.order: list[Digest] = []

    def put(self, node: bytes) -> Digest:
        digest = digest_of(node)
        self[digest] = node
        self.order.append(digest)
        return digest

    def tree(self, top: Digest | None) -> Tree[int]:
        return Tree(top, self.__getitem__, int, self.fanout)

    def built(self, items: Mapping[str, int]) -> Digest:
        return build(items, self.put, self.fanout)

    def nodes_of(self, top: Digest | None) -> set[Digest]:
        """Return the digests of all nodes of a tree."""
        found: set[Digest] = set()
        pending = [] if top is None else [top]
        while pending:
            found.add(digest := pending.pop())
            sort, entries = msgspec.msgpack.decode(self[digest])
            pending += [Digest(child) for _, child, _ in entries] if sort == "b" else []
        return found


# With 2, nodes end at every second key, so small trees have many levels.
fanouts = st.sampled_from([ENTRY_FANOUT, TABLE_FANOUT, 2])


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


@given(models, fanouts)
def test_a_tree_holds_what_it_was_built_from(model: dict[str, int], fanout: int) -> None:
    nodes = Nodes(fanout)
    tree = nodes.tree(nodes.built(model))
    assert list(tree.items()) == sorted(model.items())
    assert len(tree) == len(model)


@given(models, keys, fanouts)
def test_get(model: dict[str, int], key: str, fanout: int) -> None:
    nodes = Nodes(fanout)
    tree = nodes.tree(nodes.built(model))
    assert tree.get(key) == model.get(key)
    for own, value in model.items():
        assert tree.get(own) == value


@given(models, keys, fanouts)
def test_items_from_a_key_on(model: dict[str, int], start: str, fanout: int) -> None:
    nodes = Nodes(fanout)
    tree = nodes.tree(nodes.built(model))
    assert list(tree.items(start)) == sorted(i for i in model.items() if i[0] >= start)


@given(
    models,
    st.text(st.characters(codec="utf-8"), max_size=2) | st.sampled_from(["k", "k1"]),
    fanouts,
)
def test_items_below_a_prefix(model: dict[str, int], prefix: str, fanout: int) -> None:
    nodes = Nodes(fanout)
    tree = nodes.tree(nodes.built(model))
    assert list(tree.items_below(prefix)) == sorted(
        i for i in model.items() if i[0].startswith(prefix)
    )


@given(models, st.lists(edits, max_size=4), fanouts)
def test_a_tree_does_not_show_its_history(
    model: dict[str, int], changes: list[dict[str, int | None]], fanout: int
) -> None:
    nodes = Nodes(fanout)
    top: Digest | None = nodes.built(model) if model else None
    for change in changes:
        model = apply(model, change)
        top = nodes.tree(top).edit(change, nodes.put)
        assert list(nodes.tree(top).items()) == sorted(model.items())
        assert top == (nodes.built(model) if model else None)


@given(models, edits, fanouts)
def test_an_edit_stores_only_what_is_new_or_was_touched(
    model: dict[str, int], change: dict[str, int | None], fanout: int
) -> None:
    nodes = Nodes(fanout)
    before = nodes.built(model)
    nodes.order.clear()
    after = nodes.tree(before).edit(change, nodes.put)
    new = nodes.nodes_of(after) - nodes.nodes_of(before)
    assert new <= set(nodes.order)
    # A node that a change touched, and that stays as it is, may be put again, as is the top.
    touched = len(change) * (1 + len(nodes.nodes_of(before)))
    assert len(nodes.order) <= len(new) + touched + 1


def test_leaves_are_bounded() -> None:
    """Keys of which none ends a leaf are cut all the same, wherever edits came."""
    inner = [key for key in (f"x{i:06}" for i in range(20_000)) if not ends_leaf(key)]
    model = dict.fromkeys(inner[:13_000], 0)
    nodes = Nodes()
    top: Digest | None = nodes.built(model)
    assert max(count for _, _, count in nodes.tree(top).children) == most_in_node(ENTRY_FANOUT)
    dice = random.Random(3)
    for _ in range(5):
        chosen = dice.sample(inner, 5)
        change = {key: dice.choice([None, 1]) for key in chosen}
        model = apply(model, change)
        top = nodes.tree(top).edit(change, nodes.put)
        assert top == nodes.built(model)


def test_one_change_in_many_items() -> None:
    nodes = Nodes()
    model = {f"model/layer.{i}/weight": i for i in range(50_000)}
    tree = nodes.tree(nodes.built(model))
    assert 100 < len(nodes) < 400
    nodes.order.clear()
    tree.edit({"model/layer.31415/weight": 0}, nodes.put)
    # A leaf, and the list above it at each level.
    assert len(nodes.order) == 3
    assert sum(len(nodes[d]) for d in nodes.order) < 30_000


def test_one_change_of_the_table_writes_little() -> None:
    """However many items there are: that is what the table of snapshots is made of."""
    dice = random.Random(1)
    for items, most in ((100, 2_500), (20_000, 4_500)):
        nodes = Nodes(TABLE_FANOUT)
        model = {f"run/step_{i}": i for i in range(items)}
        top = nodes.built(model)
        written = []
        for _ in range(100):
            nodes.order.clear()
            key = f"run/step_{dice.randrange(items)}"
            nodes.tree(top).edit({key: -1}, nodes.put)
            written.append(sum(len(nodes[d]) for d in nodes.order))
        assert sum(written) / len(written) < most, items


def test_the_levels_of_a_tree_are_bounded() -> None:
    """A chain of lists, each of one list, ends in an error, not in a stack overflow."""
    nodes = Nodes(TABLE_FANOUT)
    top = nodes.put(encode(LeafNode([("a", 1)])))
    for _ in range(MAX_LEVELS):
        top = nodes.put(encode(Branch([("a", top, 1)])))
    assert nodes.tree(top).get("a") == 1
    assert nodes.tree(nodes.tree(top).edit({"b": 2}, nodes.put)).get("a") == 1
    top = nodes.put(encode(Branch([("a", top, 1)])))
    with pytest.raises(DamagedError, match="list where a leaf"):
        nodes.tree(top).get("a")


def test_leaves_at_two_levels() -> None:
    nodes = Nodes(TABLE_FANOUT)
    leaves = [nodes.put(encode(LeafNode([(key, 1)]))) for key in "ab"]
    inner = nodes.put(encode(Branch([("b", leaves[1], 1)])))
    tree = nodes.tree(nodes.put(encode(Branch([("a", leaves[0], 1), ("b", inner, 1)]))))
    assert list(tree.items()) == [("a", 1), ("b", 1)]
    with pytest.raises(DamagedError, match="another level"):
        tree.edit({"b": 2}, nodes.put)


def test_reading_one_item_reads_one_node_of_each_level() -> None:
    nodes = Nodes()
    top = nodes.built({f"{i}": i for i in range(20_000)})
    assert 50 < len(nodes) < 200
    loaded: list[Digest] = []

    def load(digest: Digest) -> bytes:
        loaded.append(digest)
        return nodes[digest]

    tree: Tree[int] = Tree(top, load, int)
    assert tree.get("12345") == 12345
    assert len(loaded) == 3


def test_the_empty_tree() -> None:
    nodes = Nodes()
    for top in (None, nodes.built({})):
        tree = nodes.tree(top)
        assert (len(tree), list(tree.items()), tree.get("x")) == (0, [], None)
        assert tree.edit({}, nodes.put) is None
        assert tree.edit({"x": None}, nodes.put) is None
        assert nodes.tree(tree.edit({"x": 1}, nodes.put)).get("x") == 1


DIGEST = bytes(32)


@pytest.mark.parametrize(
    "node",
    [
        b"",
        b"\xc1",
        b"\x00" * 100,
        encode(["l"]),
        encode(["l", [["key", "no int"]]]),
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


def test_a_node_of_the_future() -> None:
    nodes = Nodes()
    with pytest.raises(UnsupportedFormatError, match="unknown sort 'x'; update casnap"):
        list(nodes.tree(nodes.put(encode(["x", []]))).items())


def test_the_bytes_of_nodes() -> None:
    """These bytes are the format: they name every manifest ever stored."""
    assert msgspec.msgpack.decode(encode(LeafNode([("a", 1), ("b", 2)]))) == [
        "l",
        [["a", 1], ["b", 2]],
    ]
    nodes = Nodes()
    assert nodes.built({"a": 1}).hex()[:16] == digest_of(encode(["l", [["a", 1]]])).hex()[:16]


@pytest.mark.parametrize("folder", ["", "a", "run", "run/1", "zz"])
def test_of_a_folder_only_its_part_of_the_table_is_read_ahead(folder: str) -> None:
    nodes = Nodes()
    names = [f"{run}/{step}/{i}" for run in ("a", "run", "z") for step in range(9) for i in "xyz"]
    top = build(dict.fromkeys(names, 1), nodes.put, fanout=2)
    ahead: list[Digest] = []
    read = set[Digest]()
    prefix = f"{folder}/" if folder else ""
    Tree[int](top, nodes.__getitem__, int, 2).read_ahead(prefix, ahead.extend)

    def load(digest: Digest) -> bytes:
        read.add(digest)
        return nodes[digest]

    assert [*dict(Tree[int](top, load, int, 2).items_in(folder))] == [
        name for name in names if name.startswith(prefix)
    ]
    # The reading goes on until a key shows that the folder has ended.
    assert len(ahead) == len({*ahead})
    assert read - {top} >= {*ahead} - {top}
    assert len(read - {*ahead, top}) <= 1 + MAX_LEVELS
