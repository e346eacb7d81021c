"""What this version does with a store that a later version has written into.

Each case is forged. The page of the format has the same table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from casnap import StateDict, Store
from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.digest import Digest, digest_of
from casnap.format.records import encode
from casnap.maintenance.damage import Hurt
from tests.support.cli_calls import document, invoke
from tests.support.forger import GOOD, STATE, Forger, branch, chunks, inline, tensor
from tests.support.later import (
    DATA,
    LATER,
    REFUSED,
    WORKS,
    Forge,
    forged,
    good_items,
    leaf_with,
    outcomes,
    publish,
)
from tests.support.mutations import Parts

ENTRY_IS_REFUSED = {"restore": REFUSED, "read": REFUSED}

ENTRIES: dict[str, Forge] = {
    "sort": leaf_with(lambda p: ["z", p, {"of": "a later version"}]),
    "kind of value": leaf_with(lambda p: ["v", p, "qubit"]),
    "kind of container": leaf_with(lambda p: ["c", p, "bag", 3]),
    "kind of tensor": leaf_with(lambda p: ["t", p, "float32", [1000], "hologram", False, None]),
    "dtype": leaf_with(lambda p: ["t", p, "float99", [1000], "tensor", False, None]),
    "dtype of less than a byte": leaf_with(lambda p: ["t", p, "int4", [8000], "tensor"]),
    "long double of numpy": leaf_with(lambda p: ["t", p, "<f16", [250], "ndarray"]),
    "quantization scheme": leaf_with(
        lambda p: ["t", p, "qint8", [4000], "tensor", False, ["per_block", b"", b"", 0]]
    ),
    "element of a tensor": leaf_with(
        lambda p: ["t", p, "float32", [1000], "tensor", False, None, [1]]
    ),
    "element of a quantization": leaf_with(
        lambda p: ["t", p, "qint8", [4000], "tensor", False, ["per_tensor_affine", b"", b"", 0, 1]]
    ),
    "element of a value": leaf_with(lambda p: ["v", p, "bytes", "zip"]),
    "element of a container": leaf_with(lambda p: ["c", p, "dict", 1, "ordered"]),
    "element of a payload": leaf_with(lambda p: ["v", [*p, 7], "bytes"]),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_what_is_unknown_costs_one_entry(tmp_path: Path, case: str) -> None:
    done = outcomes(forged(tmp_path / "store", ENTRIES[case]))
    assert {name: how for name, how in done.items() if how != WORKS} == ENTRY_IS_REFUSED


def refused(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, REFUSED)


def tree_of(top: Callable[[Forger], bytes]) -> Forge:
    return lambda forger: publish(forger, top(forger))


def longer_list(forger: Forger) -> bytes:
    items = good_items(forger)
    first, second = forger.tree(items[0]), forger.tree(*items[1:])
    return branch(forger, ["", first, 1, "of", 3], ["/x", second, 2, None])


def with_row(**fields: Any) -> Forge:
    def forge(forger: Forger) -> None:
        forger.row = fields
        publish(forger, forger.tree(*good_items(forger)))

    return forge


def with_root(**fields: Any) -> Forge:
    def forge(forger: Forger) -> None:
        forger.root = fields
        publish(forger, forger.tree(*good_items(forger)))

    return forge


def with_more_of(change: Callable[[Parts], None]) -> Forge:
    """Forge a snapshot, and then more in what stands above it."""

    def forge(forger: Forger) -> None:
        publish(forger, forger.tree(*good_items(forger)))
        change(Parts(forger.folder))

    return forge


def more_in_the_record(parts: Parts) -> None:
    config = msgspec.json.decode(parts.read("casnap.json"))
    parts.put_config({**config, "colour": "red"}, in_root=True)


def more_in_references(parts: Parts) -> None:
    """Also in stats, which stand beside them."""
    [table, hint] = parts.root["table"]
    sort, rows = msgspec.msgpack.decode(parts.node(table))
    for _, row in rows:
        row["manifest"].append("more")
        row["stats"].append(7)
    raw = encode([sort, rows])
    parts.root["table"] = [digest_of(raw), hint, "more"]
    parts.root["segments"] = [[*ref, "more"] for ref in parts.root["segments"]]
    parts.add_pack(b"t", [(digest_of(raw), raw, len(raw), 0, b"")])


def longer_spec(forger: Forger) -> bytes:
    (path, (sort, _, *others)), *items = good_items(forger)
    spec = encode([["x", "y"], None, None, "more"])
    return forger.tree([path, [sort, inline(spec), *others]], *items)


READS = ("restore", "read", "restore another key", "read a neighbour")
CHANGES = ("take", "tag", "gc", "repair", "untag", "thin", "prune", "delete", "gc after that")

CASES: dict[str, tuple[Forge, dict[str, str]]] = {
    "element of a leaf": (
        tree_of(lambda f: f.add(encode(["l", good_items(f), {"sum": 7}]))),
        {},
    ),
    "element of a list and its children": (tree_of(longer_list), {}),
    "sort of node": (
        tree_of(lambda f: f.add(encode(["x", good_items(f)]))),
        refused("restore", "read", "read a neighbour", "show", "show the entry", "diff", "du")
        | refused("gc", "cp"),
    ),
    "field of a row": (with_row(colour=["red", 1, b"x"]), {}),
    "field of a manifest": (
        lambda f: publish(f, f.tree(*good_items(f)), colour={"red": 1}),
        {},
    ),
    "field of casnap.json": (with_more_of(more_in_the_record), {}),
    "element of a reference, and of stats": (with_more_of(more_in_references), {}),
    "element of a spec": (tree_of(longer_spec), {}),
    "feature of a row": (
        with_row(features=["holograms"]),
        refused(*READS, "show", "show the entry", "diff", "cp"),
    ),
    "write feature of a root": (
        with_root(write_features=["holograms"]),
        refused(*CHANGES),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_unknown_around_entries(tmp_path: Path, case: str) -> None:
    forge, expected = CASES[case]
    done = outcomes(forged(tmp_path / "store", forge))
    assert {name: how for name, how in done.items() if how != WORKS} == expected


def test_a_read_feature_of_a_root_refuses_the_store(tmp_path: Path) -> None:
    forged(tmp_path / "store", with_root(read_features=["holograms"]))
    done = outcomes(tmp_path / "store")
    assert set(done.values()) == {REFUSED}


def test_unknown_entries_are_named(tmp_path: Path) -> None:
    """In the error of a restore all of them; and wherever entries are listed."""

    def forge(forger: Forger) -> None:
        items = [["", ["c", [0, b"", b"", 0], "bag", 2]], ["/x", ["z", [1, b"x", b"", 0]]]]
        publish(forger, forger.tree(*items))

    folder = forged(tmp_path / "store", forge)
    with pytest.raises(
        UnsupportedFormatError, match=r"s has the kind of container 'bag', s/x has the sort 'z'"
    ):
        Store(folder)[LATER].get_state_dict_for_key("s")
    assert Store(folder)[LATER].get_manifest()["0/s/x"].kind == "unknown"
    found = document("show", folder / LATER, "s/x")
    assert (found["type"], found["unknown"]) == ("unknown", "the sort 'z'")
    assert "the sort 'z'; update casnap" in invoke("show", folder / LATER, "s/x").output
    said = {d.message: list(d.hurts) for d in Store(folder).check().unsupported}
    assert said["a newer casnap wrote the sort 'z'; update casnap"] == [Hurt(LATER, "s/x")]


def test_a_snapshot_with_a_feature_is_listed_as_such(tmp_path: Path) -> None:
    folder = forged(tmp_path / "store", with_row(features=["holograms"]))
    assert "update casnap to read it: holograms" in invoke("ls", folder, "--wide").output
    assert [s["unknown_features"] for s in document("ls", folder)["snapshots"]] == [
        [],
        ["holograms"],
    ]
    [said] = Store(folder).check().unsupported
    assert "features holograms" in said.message
    assert list(said.hurts) == [Hurt(LATER, "")]
    Store(folder)
    with pytest.raises(UnsupportedFormatError, match=r"evil.*holograms.*update casnap"):
        Store(folder).copy(to=tmp_path / "copy")
    assert [s.name for s in Store(tmp_path / "copy").snapshots()] == ["good"]


def raw_row(folder: Path, name: str) -> Any:
    """Return a row as it is stored."""
    store = Store(folder)._view.repository
    table = store.newest().table
    assert table is not None
    _, rows = msgspec.msgpack.decode(store.node(Digest(table.digest)))
    return dict(rows)[name]


def test_unknown_fields_survive(tmp_path: Path) -> None:
    colour = ["red", 1, b"x", 1.5]

    def forge(forger: Forger) -> None:
        forger.row = {"colour": colour}
        publish(forger, forger.tree(*good_items(forger)), shade={"dark": 7})

    folder = forged(tmp_path / "store", forge)
    store = Store(folder)
    store.take({"s": StateDict(x=1)}, "after")
    store.tag(LATER, "best")
    assert raw_row(folder, LATER)["colour"] == colour
    store.untag(LATER, "best")
    thinned = store.thin({"other": 1})
    assert thinned
    row = raw_row(folder, LATER)
    assert row["colour"] == colour
    manifest = msgspec.msgpack.decode(store._view.repository.node(Digest(row["manifest"][0])))
    assert manifest["shade"] == {"dark": 7}
    assert list(manifest["global"]) == ["s"]
    store.rewind("good")
    [name] = [s.name for s in store.snapshots() if s.name.endswith(LATER)]
    assert raw_row(folder, name)["colour"] == colour
    store.copy(name, to=tmp_path / "copy")
    assert "colour" not in raw_row(tmp_path / "copy", name)


def test_elements_of_references_are_dropped(tmp_path: Path) -> None:
    """Where a row is written anew, it has those that this version knows."""
    folder = forged(tmp_path / "store", with_more_of(more_in_references))
    assert raw_row(folder, LATER)["manifest"][2:] == ["more"]
    assert raw_row(folder, LATER)["stats"][4:] == [7]
    Store(folder).tag(LATER, "best")
    assert raw_row(folder, LATER)["manifest"][2:] == raw_row(folder, LATER)["stats"][4:] == []
    root = Parts(folder).root
    assert root["table"][2:] == []
    assert [ref[3:] for ref in root["segments"]] == [[]] * len(root["segments"])


def test_a_damaged_place_beside_one_of_an_unknown_codec(tmp_path: Path) -> None:
    """The chunk may be whole: nothing says that it is lost, or gives it up."""

    def forge(forger: Forger) -> None:
        forger.add(DATA, stored=bytes(len(DATA)))
        chunk = forger.add(DATA, stored=b"of a later version", codec=9)
        publish(forger, forger.tree(STATE, ["/x", tensor([1000], chunks(len(DATA), chunk))]))

    store = Store(forged(tmp_path / "store", forge))
    with pytest.raises(UnsupportedFormatError, match="s/x"):
        store[LATER].read_object("s/x")
    report = store.check(data=True)
    assert [(d.kind, list(d.hurts)) for d in report.damages] == [("changed", [])]
    assert [list(d.hurts) for d in report.unsupported] == [[Hurt(LATER, "s/x")]]
    with pytest.raises(UnsupportedFormatError, match="nothing was given up"):
        store.repair()
    store.gc(grace=0, repack=1)
    codecs = [p.codec for p in Parts(tmp_path / "store").places[digest_of(DATA)]]
    assert 9 in codecs


@pytest.mark.parametrize("kept", [["table", "segments"], []])
def test_a_root_takes_missing_fields_for_empty(tmp_path: Path, kept: list[str]) -> None:
    folder = forged(tmp_path / "store", with_root())
    parts = Parts(folder)
    parts.put_root({name: parts.root[name] for name in ["seq", "commit", *kept]})
    store = Store(folder)
    assert [s.name for s in store.snapshots()] == (["good", LATER] if kept else [])
    assert store.check(data=True).ok
    assert store._view.repository.newest().time == 0.0


def test_rows_of_very_many_fields_are_refused(tmp_path: Path) -> None:
    folder = forged(tmp_path / "store", with_row(**{f"x{i}": i for i in range(300)}))
    with pytest.raises(DamagedError, match="300 unknown fields"):
        Store(folder).snapshots()


@pytest.mark.parametrize("count", [4096, 4097])
def test_a_leaf_longer_than_a_leaf_may_be(tmp_path: Path, count: int) -> None:
    items = [STATE, *([f"/x/{i:04}", GOOD] for i in range(count - 1))]
    folder = forged(tmp_path / "store", tree_of(lambda f: f.tree(*items)))
    report = Store(folder).check()
    assert [d.kind for d in report.damages] == ["malformed"] * (count > 4096)
