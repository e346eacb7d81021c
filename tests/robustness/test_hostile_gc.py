"""Stores that were written to do harm, under what changes them: gc, prune, tag, repair, check.

Whatever a hostile store says, the work on it ends soon, in little memory and with a typed error if
any; nothing outside of the store is touched; and a snapshot that could be read before can be after.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from casnap import Retention, Store
from casnap.format.entries import LIST_DIGESTS
from casnap.format.records import MAX_NODE_BYTES, encode
from casnap.format.tree import TABLE_FANOUT, most_in_node
from tests.support.assault import CHANGES, LOOKS, Forge, assail, good_is_whole
from tests.support.faults import in_child, memory_folder
from tests.support.forger import (
    ABSENT,
    GOOD,
    HUGE,
    STATE,
    Forger,
    branch,
    chunks,
    limit_memory,
    one_plane,
    tensor,
)

pytestmark = pytest.mark.sampled


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with memory_folder() as top:
        monkeypatch.setenv("CASNAP_CACHE_DIR", str(top / "casnap-cache"))
        yield top / "store"


def plain(forger: Forger) -> None:
    """Publish a snapshot that is as it should be."""
    forger.publish({"s": forger.tree(STATE, ["/x", GOOD])})


def test_what_is_no_lie(folder: Path) -> None:
    """So whatever is refused below is refused for what is wrong with it."""
    forger = Forger(folder)
    forger.keep_good()
    plain(forger)
    for work in [*LOOKS.values(), *CHANGES.values()]:
        if work not in (CHANGES["delete"], CHANGES["prune"]):
            work(Store(folder, create=False))
    assert [s.name for s in Store(folder).snapshots()] == ["good", "evil", "after"]


# --- roots ------------------------------------------------------------------------------------


def condemned(forger: Forger, seq: Any) -> dict[bytes, Any]:
    """Condemn all the good packs."""
    return dict.fromkeys(forger.good_packs, seq)


def rooted(change: Callable[[Forger], dict[str, Any]]) -> Forge:
    def forge(forger: Forger) -> None:
        forger.root = change(forger)
        plain(forger)

    return forge


ROOTS: dict[str, Callable[[Forger], dict[str, Any]]] = {
    "condemned_long_ago": lambda f: {"condemned": condemned(f, 0)},
    "condemned_before_all": lambda f: {"condemned": condemned(f, -5)},
    "condemned_now": lambda f: {"condemned": condemned(f, 2)},
    "condemned_in_the_future": lambda f: {"condemned": condemned(f, 1 << 50)},
    "condemned_far_in_the_future": lambda f: {"condemned": condemned(f, (1 << 63) - 1)},
    "condemned_as_text": lambda f: {"condemned": condemned(f, "1")},
    "condemned_short_id": lambda f: {"condemned": {b"x": 1, b"": 1}},
    "condemned_long_id": lambda f: {"condemned": {b"x" * 100_000: 1}},
    "condemned_many": lambda f: {"condemned": {struct.pack("<QQ", i, 0): 1 for i in range(5_000)}},
    "fence_of_the_future": lambda f: {"fence": 1 << 50},
    "fence_before_all": lambda f: {"fence": -(1 << 50)},
    "fence_right_ahead": lambda f: {"fence": 3},
    "fence_and_condemned": lambda f: {"fence": 1 << 50, "condemned": condemned(f, 1)},
    "lost_odd": lambda f: {"lost": b"x" * 33},
    "lost_much": lambda f: {"lost": bytes(32 * 100_000)},
    "lost_as_text": lambda f: {"lost": "x"},
    "time_nan": lambda f: {"time": math.nan},
    "time_infinite": lambda f: {"time": math.inf},
    "time_before_all": lambda f: {"time": -math.inf},
    "time_huge": lambda f: {"time": 1e300},
    "time_negative": lambda f: {"time": -1e300},
    "time_as_text": lambda f: {"time": "now"},
    "commit_empty": lambda f: {"commit": b""},
    "commit_long": lambda f: {"commit": b"x" * 100_000},
    "commit_as_text": lambda f: {"commit": "x"},
    "seq_huge": lambda f: {"seq": (1 << 63) - 1},
    "no_segments": lambda f: {"segments": []},
    "absent_segments": lambda f: {"segments": [[bytes(16), 1, 0]] * 5_000},
    "segment_of_odd_id": lambda f: {"segments": [[b"../../outside/casnap-snapshot.json", 1, 0]]},
    "table_list": lambda f: {"table": [f.add(b"\x00" * 320), None]},
    "table_absent": lambda f: {"table": [ABSENT, None]},
}


@pytest.mark.parametrize("case", ROOTS)
def test_roots(folder: Path, case: str) -> None:
    assail(folder, rooted(ROOTS[case]))


@pytest.mark.parametrize(
    "count", [0, -1, -(1 << 40), 1 << 40, (1 << 63) - 1, -(1 << 63), 1 << 63, 1.5, "9"]
)
def test_counts_of_a_segment(folder: Path, count: Any) -> None:
    """The root says how many records a segment has; that is no reason to look so often."""

    def forge(forger: Forger) -> None:
        forger.count = count
        plain(forger)

    assail(folder, forge)


@pytest.mark.parametrize("pack", [b"\xff" * 16, b"\xff" * 6 + bytes(10), bytes(16)])
def test_ids_of_the_future(folder: Path, pack: bytes) -> None:
    """Numbers of roots in ids may be anything."""

    def forge(forger: Forger) -> None:
        forger.pack = pack  # type: ignore[assignment]
        plain(forger)
        for key in (f"packs/fe/{'fe' * 16}", f"index/{'ff' * 16}", f"index/{'00' * 16}"):
            path = forger.folder / "casnap-store" / key
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"left over")

    assail(folder, forge, readable=True)


# --- segments, places and footers -------------------------------------------------------------

BODIES: dict[str, Callable[[bytes], bytes]] = {
    "records": lambda body: body[:4] + struct.pack("<Q", 1 << 60) + body[12:],
    "all_records": lambda body: body[:4] + b"\xff" * 8 + body[12:],
    "packs": lambda body: b"\xff" * 4 + body[4:],
    "deltas": lambda body: body[:12] + struct.pack("<Q", 1 << 60) + body[20:],
    "bases_of_no_deltas": lambda body: body[:12] + struct.pack("<Q", 1) + body[20:] + bytes(40),
    "wrapped": lambda body: struct.pack("<IQ", 0, ((1 << 64) - 16) // 53) + body[12:],
    "no_packs": lambda body: struct.pack("<IQ", 0, 4) + body[36:],
    "unsorted": lambda body: body[:36] + body[-53:] + body[36:-53],
    "other_pack": lambda body: body[:68] + b"\xff" * 4 + body[72:],
    "same_pack_twice": lambda body: struct.pack("<I", 2) + body[4:36] + body[20:36] + body[36:],
    "head_alone": lambda body: body[:20],
    "nothing": lambda body: b"",
}


@pytest.mark.parametrize("case", BODIES)
def test_segments(folder: Path, case: str) -> None:
    def forge(forger: Forger) -> None:
        forger.body = BODIES[case]
        plain(forger)

    assail(folder, forge)


FOOTERS: dict[str, Callable[[bytes], bytes]] = {
    "count": lambda footer: footer[:-48] + b"\xff" * 4 + footer[-44:],
    "deltas": lambda footer: footer[:-44] + b"\xff" * 4 + footer[-40:],
    "no_count": lambda footer: footer[:-48] + bytes(4) + footer[-44:],
    "nothing": lambda footer: b"",
    "no_digest": lambda footer: footer[:-32],
}


@pytest.mark.parametrize("case", FOOTERS)
def test_footers(folder: Path, case: str) -> None:
    def forge(forger: Forger) -> None:
        forger.footer = FOOTERS[case]
        plain(forger)

    assail(folder, forge, readable=True)


MOST = (1 << 32) - 1
PLACES: dict[str, tuple[int, ...]] = {
    "beyond_the_end": (0, 1 << 40, 400, 400, 0),
    "beyond_all_files": (0, (1 << 64) - 1, 400, 400, 0),
    "overflow": (0, (1 << 63) - 1, MOST, MOST, 0),
    "huge": (0, 0, MOST, MOST, 0),
    "large_node": (0, 0, MAX_NODE_BYTES, MAX_NODE_BYTES, 0),
    "huge_as_stored": (0, 0, MOST, 400, 1),
    "huge_as_raw": (0, 0, 400, MOST, 1),
    "empty": (0, 0, 0, 400, 0),
    "unknown_codec": (0, 0, 400, 400, 99),
    "no_zstd": (0, 0, 400, 400, 1),
}


@pytest.mark.parametrize("whole", [True, False], ids=["of two", "alone"])
@pytest.mark.parametrize("case", PLACES)
def test_places(folder: Path, case: str, whole: bool) -> None:
    """Of a chunk and a node: the only place, or a second one behind one that is damaged."""

    def forge(forger: Forger) -> None:
        raw = bytes(range(200)) * 2
        chunk = forger.add(raw, stored=bytes(400))
        tree = forger.tree(STATE, ["/x", tensor([100], chunks(400, chunk))])
        for digest in (chunk, tree):
            if whole:
                forger.more.append((digest, PLACES[case]))
            else:
                forger.places[digest] = PLACES[case]
        forger.publish({"s": tree})

    assail(folder, forge)


# --- trees ------------------------------------------------------------------------------------


def zeros(forger: Forger, size: int) -> bytes:
    """Add so many zeros, compressed to almost nothing."""
    raw = bytes(size)
    return forger.add(raw, one_plane(raw), codec=1)


def listing(payload: Callable[[Forger], list[Any]]) -> Forge:
    """Return what publishes a tensor of this payload."""

    def forge(forger: Forger) -> None:
        forger.publish({"s": forger.tree(STATE, ["/x", tensor([100], payload(forger))])})

    return forge


def grown(forger: Forger) -> list[Any]:
    one = forger.add(ABSENT * LIST_DIGESTS)
    for _ in range(3):
        one = forger.add(one * LIST_DIGESTS)
    return chunks(400, one, 4)


LISTS: dict[str, Callable[[Forger], list[Any]]] = {
    "one_digest_a_million_times": lambda f: chunks(400, zeros(f, 32 << 20), 1),
    "the_largest_node": lambda f: chunks(400, zeros(f, MAX_NODE_BYTES), 1),
    "many_large_nodes": lambda f: chunks(
        400, b"".join(zeros(f, (20 << 20) + 32 * i) for i in range(30)), 1
    ),
    "lists_that_grow": grown,
    "too_deep": lambda f: chunks(400, f.add(ABSENT), 5),
    "depth_of_a_byte": lambda f: chunks(400, f.add(ABSENT), 255),
    "depth_of_more": lambda f: chunks(400, f.add(ABSENT), 1 << 40),
    "depth_below_none": lambda f: chunks(400, f.add(ABSENT), -1),
    "no_digests": lambda f: chunks(400, b"x" * 33, 0),
    "list_of_no_digests": lambda f: chunks(400, f.add(b"x" * 33), 1),
    "a_list_of_a_tree": lambda f: chunks(400, f.tree(STATE), 1),
    "inline_and_digests": lambda f: [16, bytes(16), ABSENT, 0],
    "absent": lambda f: chunks(400, ABSENT),
}


@pytest.mark.parametrize("case", LISTS)
def test_lists(folder: Path, case: str) -> None:
    assail(folder, listing(LISTS[case]), readable=True)


TREES: dict[str, Callable[[Forger], bytes]] = {
    "list_of_lists": lambda f: branch(f, ["", branch(f, ["", f.tree(STATE), 1]), 1]),
    "one_leaf_many_times": lambda f: branch(
        f, *([f"{i:06}", leaf, 1] for leaf in [f.tree(STATE)] for i in range(5_000))
    ),
    "counts": lambda f: branch(f, ["", f.tree(STATE), HUGE], ["a", f.tree(STATE), HUGE]),
    "deep": lambda f: f.add(b"\x92\xa1l" + b"\x91" * 100_000),
    "endless": lambda f: f.add(b"\x92\xa1l\xdd\xff\xff\xff\xff"),
    "a_large_node": lambda f: zeros(f, 32 << 20),
    "absent": lambda f: ABSENT,
    "short": lambda f: b"x",
}


@pytest.mark.parametrize("case", TREES)
def test_trees(folder: Path, case: str) -> None:
    assail(folder, lambda f: f.publish({"s": TREES[case](f)}), readable=True)


@pytest.mark.parametrize("case", [case for case in TREES if case != "short"])
def test_tables(folder: Path, case: str) -> None:
    """The same trees as the table of snapshots."""

    def forge(forger: Forger) -> None:
        forger.table = TREES[case](forger)
        forger.publish({})

    assail(folder, forge)


def test_a_row_many_times(folder: Path) -> None:
    """A table whose list names one leaf over and over."""

    def forge(forger: Forger) -> None:
        leaf = forger.tree(*map(list, sorted(forger.rows.items())))
        forger.table = branch(forger, *([f"{i:06}", leaf, 1] for i in range(500)))
        forger.publish({})

    assail(folder, forge)


# --- rows -------------------------------------------------------------------------------------

ROWS: dict[str, dict[str, Any]] = {
    "seq_below_none": {"seq": -(1 << 63)},
    "seq_huge": {"seq": (1 << 63) - 1},
    "time_nan": {"time": math.nan},
    "time_infinite": {"time": math.inf},
    "time_huge": {"time": 1e300},
    "time_negative": {"time": -1e300},
    "world_of_none": {"world_size": 0},
    "world_huge": {"world_size": 1 << 62},
    "stats_nan": {"stats": [100, 100, 3, math.nan]},
    "stats_negative": {"stats": [-1, -(1 << 63), -1, -1e300]},
    "stats_huge": {"stats": [(1 << 63) - 1] * 3},
    "commit_empty": {"commit": b""},
    "commit_long": {"commit": b"x" * 1_000_000},
    "metadata_of_extremes": {"metadata": {"step": -(1 << 63), "loss": math.nan, "": [None] * 1000}},
    "metadata_of_text": {"metadata": {"step": "x" * 1_000_000}},
    "many_tags": {"tags": [f"{i}" for i in range(100_000)]},
    "odd_tags": {"tags": ["", "-x", "\x1b[2J", "x" * 100_000]},
    "tags_of_numbers": {"tags": [1, 2]},
    "manifest_of_nothing": {"manifest": [b"", None]},
    "manifest_with_hint": {"manifest": [ABSENT, [b"p" * 16, (1 << 64) - 1, 1 << 63, 1 << 63, 9]]},
    "manifest_outside": {"manifest": [ABSENT, [b"../outside", 0, 9, 9, 0]]},
}


@pytest.mark.parametrize("case", ROWS)
def test_rows(folder: Path, case: str) -> None:
    def forge(forger: Forger) -> None:
        forger.row = ROWS[case]
        plain(forger)

    assail(folder, forge)


NAMES = [
    *("../outside", "../../outside", "a/../../outside", "..", ".", "", "/", "//", "a//b", "/a"),
    *("roots", "packs", "index", "tmp", "casnap.json", "roots/0/1", "casnap-snapshot.json"),
    *(
        "a\0b",
        "a\nb",
        "\x1b[2J\x1b]0;x\x07",
        "\u202e\u200b\ufeff",
        "x" * 1_000_000,
        "a/b",
        "good/x",
    ),
]


def named(forger: Forger) -> None:
    """Publish a snapshot under many names, and one that leads out of the store."""
    tree = forger.tree(STATE, ["/x", GOOD])
    manifest = forger.add(encode({"global": {"s": tree}, "ranks": {"0": {}}}))
    row = forger.rows["good"] | {"manifest": [manifest, None], "tags": []}
    outer = f"{forger.folder.parent}/outside"
    forger.rows |= {name: row | {"seq": 0} for name in [*NAMES, outer, outer.lstrip("/")]}
    forger.publish({"s": tree})


def test_names_that_lead_out(folder: Path) -> None:
    assail(folder, named, readable=True)


@pytest.mark.parametrize("count", [100, pytest.param(100_000, marks=pytest.mark.slow)])
def test_very_many_rows(folder: Path, count: int) -> None:
    """Very many snapshots of one manifest, in leaves as they should be."""

    forger = Forger(folder)
    forger.keep_good()
    tree = forger.tree(STATE, ["/x", GOOD])
    manifest = forger.add(encode({"global": {"s": tree}, "ranks": {"0": {}}}))
    good = forger.rows["good"]
    row = good | {"manifest": [manifest, None], "seq": 0}
    children = []
    most = most_in_node(TABLE_FANOUT)
    for start in range(0, count, most):
        items = [[f"a/{i:06}", row] for i in range(start, min(start + most, count))]
        children.append([items[0][0], forger.tree(*items), len(items)])
    children.append(["good", forger.tree(["good", good]), 1])
    while len(children) > most:
        runs = [children[i : i + most] for i in range(0, len(children), most)]
        children = [[run[0][0], branch(forger, *run), sum(n for *_, n in run)] for run in runs]
    forger.table = branch(forger, *children)
    forger.publish({"s": tree})

    def work() -> None:
        limit_memory()
        store = Store(folder, create=False)
        assert store.gc(grace=0).snapshots == count + 1
        assert len(store.snapshots()) == count + 1
        assert store.check().snapshots == count + 1
        assert len(store.prune(Retention(keep_last=10)).deleted) == count - 10
        assert store.gc(grace=0).snapshots == 11
        good_is_whole(store)

    assert in_child(work) == 0
