"""The format of a store: the table, features and settings; what a writer does not know."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import casnap
from casnap import Retention, Snapshot, Store
from casnap.errors import StoreError, UnsupportedFormatError
from casnap.format.digest import Digest
from casnap.format.records import Row, encode, pack_key, root_key, seal, unseal
from casnap.format.tree import Branch
from casnap.state.stateful import StateDict
from casnap.storage.reading.table import Table
from casnap.storage.snapshots.changes import Changes
from tests.support.cli_calls import document, invoke
from tests.support.written import put_next_root

LARGE = {"notes": "x" * 60_000, "loss": 0.5, "step": 7}


def state(n: int) -> dict[str, StateDict]:
    return {"s": StateDict(x=torch.full((30_000,), float(n)), step=n)}


def newest_record(store: Store) -> dict[str, Any]:
    """Return the fields of the newest root."""
    data = store._view.repository.backend.read(root_key(store._view.repository.newest().seq))
    fields: dict[str, Any] = msgspec.msgpack.decode(unseal(b"r", data, "the root"))
    return fields


def bytes_in(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def assert_restores(store: Store, name: str, n: int) -> None:
    target = {"s": StateDict(x=torch.zeros(30_000), step=0)}
    store[name].restore(target)
    assert target["s"]["step"] == n
    assert torch.equal(target["s"]["x"], state(n)["s"]["x"])


# --- the table --------------------------------------------------------------------------------


def test_a_take_beside_20000_snapshots_writes_little(tmp_path: Path) -> None:
    store = Store(tmp_path / "s").make()
    row = store.take({"s": StateDict(step=0)}, "first").row
    Changes(store._view.repository).commit(lambda *_: {f"run/step_{i}": row for i in range(20_000)})
    assert len(store.snapshots()) == 20_001
    table = store._view.repository.table(store._view.repository.newest())
    assert any(isinstance(table.node(Digest(d)), Branch) for _, d, _ in table.children)
    before = bytes_in(tmp_path / "s")
    for i in range(10):
        store.take({"s": StateDict(step=i)}, f"run/step_{i}_again")
    assert (bytes_in(tmp_path / "s") - before) / 10 < 16_000
    assert store.latest("run") is not None
    assert store["run/step_777"].commit_id == row.commit.hex()


def test_large_metadata_stand_apart(tmp_path: Path) -> None:
    """What one snapshot says of itself is not written again with those beside it."""
    store = Store(tmp_path / "s").make()
    sizes = [bytes_in(tmp_path / "s")]
    for n in range(30):
        store.take({"s": StateDict(n=n)}, f"run/step_{n}", metadata={**LARGE, "n": n})
        sizes.append(bytes_in(tmp_path / "s"))
    grown = [b - a for a, b in pairwise(sizes)]
    # Two copies of its own, and little else.
    assert max(grown) < 150_000
    assert [s.metadata.user["n"] for s in store.snapshots()] == list(range(30))
    kept = store.prune(Retention(keep_best=("n", 3, "max"))).kept
    assert [v.row.metadata["n"] for v in kept] == [27, 28, 29]
    listed = document("ls", str(tmp_path / "s"))["snapshots"]
    assert [s["metadata"]["n"] for s in listed] == [27, 28, 29]
    store.tag("run/step_27", "best")
    store.gc(grace=0, repack=1.0)
    assert store.check(data=True).damages == []
    assert Store(tmp_path / "s")["run/step_27"].metadata.user == {**LARGE, "n": 27}
    assert bytes_in(tmp_path / "s/casnap-store/packs") < 3 * 150_000


def damage_metadata(store: Store, name: str, cache_dir: Path) -> None:
    """Flip a bit of a snapshot's metadata, at all their places."""
    node = Digest(store._view.row_of(name).metadata_node)
    for place in store._view.repository.index.find_all(store._view.repository.view(), node):
        path = Path(store.uri) / "casnap-store" / pack_key(place.pack)
        content = bytearray(path.read_bytes())
        content[place.offset + 9] ^= 1
        path.write_bytes(content)
    shutil.rmtree(cache_dir, ignore_errors=True)


def test_damaged_metadata_stop_no_retention(tmp_path: Path, cache_dir: Path) -> None:
    """Takes go on; and what might be the best is kept."""
    store = Store(tmp_path / "s").make()
    for n, name in enumerate("abcd"):
        store.take(state(n), name, metadata={**LARGE, "loss": n})
    damage_metadata(store, "b", cache_dir)
    store = Store(tmp_path / "s").make()
    store.take(state(9), "e", retention=Retention(keep_best=("loss", 1)))
    assert [s.name for s in store.snapshots()] == ["a", "b", "e"]
    report = store.prune(Retention(keep_best=("loss", 1), keep_last=1), dry_run=True)
    assert {v.name: v.reasons for v in report.kept}["b"] == ("its metadata cannot be read",)
    # Rules that ask for no metadata do not miss them.
    store.prune(Retention(keep_last=1))
    assert [s.name for s in store.snapshots()] == ["e"]


def test_damaged_metadata_hurt_their_snapshot_alone(tmp_path: Path, cache_dir: Path) -> None:
    store = Store(tmp_path / "s").make()
    store.take(state(1), "a", metadata=LARGE)
    store.take(state(2), "b", metadata={**LARGE, "n": 2})
    damage_metadata(store, "a", cache_dir)
    damages = Store(tmp_path / "s").check(data=True).damages
    assert {(h.snapshot, h.path) for d in damages for h in d.hurts} == {("a", "")}
    listed = document("ls", str(tmp_path / "s"))["snapshots"]
    assert [s["metadata"] for s in listed] == [None, {**LARGE, "n": 2}]
    assert "(metadata damaged)" in invoke("ls", str(tmp_path / "s")).stdout
    assert_restores(Store(tmp_path / "s"), "a", 1)


def test_the_longest_metadata_there_are(tmp_path: Path) -> None:
    """Some take more as a node than as JSON."""
    store = Store(tmp_path / "s").make()
    longest: dict[str, Any] = {"x": [1.0] * 16_300}
    store.take(state(1), "a", metadata=longest)
    assert len(store._view.repository.node(Digest(store._view.row_of("a").metadata_node))) > 146_000
    assert Store(tmp_path / "s")["a"].metadata.user == longest


# --- features and settings ----------------------------------------------------------------------

WRITES: dict[str, Callable[[Store], Any]] = {
    "take": lambda s: s.take(state(2), "b"),
    "async_take": lambda s: s.async_take(state(2), "b").wait(),
    "overwrite": lambda s: s.take(state(2), "a", overwrite=True),
    "delete": lambda s: s.delete("a"),
    "tag": lambda s: s.tag("a", "best"),
    "prune": lambda s: s.prune(Retention(keep_within=1e-9)),
    "gc": lambda s: s.gc(grace=0),
    "repair": lambda s: s.repair(),
}


def with_root(store: Store, **fields: Any) -> None:
    """Put the next root, with some more fields, as a later version might."""
    root = store._view.repository.newest()
    said = {**newest_record(store), "seq": root.seq + 1, "commit": b"f" * 16, **fields}
    store._view.repository.backend.put_if_absent(root_key(root.seq + 1), seal(b"r", encode(said)))


@pytest.mark.parametrize("write", WRITES)
def test_what_a_writer_does_not_know_it_refuses(tmp_path: Path, write: str) -> None:
    """It would drop it: the next root is made of what it knows of this one."""
    store = Store(tmp_path / "s").make()
    for name in ("a", "c"):
        store.take(state(1), name)
    with_root(store, holograms=1)
    seq = store._view.repository.newest().seq
    with pytest.raises(UnsupportedFormatError, match=r"holograms; update casnap"):
        WRITES[write](store)
    assert store._view.repository.newest().seq == seq
    assert_restores(Store(tmp_path / "s"), "a", 1)


def test_a_feature_that_comes_while_a_take_runs(tmp_path: Path) -> None:
    """The root that the new one follows counts, not the one that the take began with."""
    store = Store(tmp_path / "s").make()
    done = []

    def progress(_what: str, _done: int, _total: int) -> None:
        if not done:
            done.append(with_root(Store(tmp_path / "s"), write_features=["holograms"]))

    with pytest.raises(UnsupportedFormatError, match="holograms"):
        store.take(state(1), "a", progress=progress)
    assert store.snapshots() == []


@pytest.mark.parametrize("write", WRITES)
def test_settings_are_kept(tmp_path: Path, write: str) -> None:
    """By every writer, also where it does not know what they mean."""
    store = Store(tmp_path / "s").make()
    for n, name in enumerate("ac"):
        store.take(state(n), name)
    root = store._view.repository.newest()
    settings = {**root.settings, "colour": ["red", 1]}
    assert put_next_root(store._view.repository.backend, root, settings=settings)
    WRITES[write](store)
    assert store._view.repository.newest().settings == settings


LATER = {"later": [1, {"x": b"y"}], "life": "of a later kind", "thin": {"k": 1}}


def test_notes_are_kept(tmp_path: Path) -> None:
    """By all that write a row anew, also where they do not know what the notes mean."""
    store = Store(tmp_path / "s").make()
    for n in range(3):
        store.take({**state(n), "optim": StateDict(y=n)}, f"run/step_{n}")

    def forge(table: Table, _seq: int) -> dict[str, Row | None]:
        return {name: row.with_notes(LATER) for name, row in table.items_in()}

    assert Changes(store._view.repository).commit(forge)
    store.tag("run/step_0", "best")
    store.untag("run/step_0", "best")
    store.publish("stable", "run/step_2")
    store.rewind("run/step_1")
    assert [*store.thin({"optim/**": 1})] == ["run/step_0"]
    Store(tmp_path / "s", mirror=tmp_path / "m").wait_mirrored(60)
    assert store.gc(grace=0, recode_after=1).recoded_snapshots
    store.take(state(3), "run/step_3")
    rows = dict(store._view.repository.table(store._view.repository.newest()).items_in())
    thinned = {"recoded": True, "thin": ["optim/**"], "thinned": True}
    (aside,) = (name for name in rows if "rewound" in name)
    assert {name: row.notes for name, row in rows.items()} == {
        "run/step_0": {**LATER, **thinned},
        "run/step_1": LATER,
        aside: {**LATER, "rewound": True},
        "run/step_3": {},
    }
    assert Store(tmp_path / "m")._view.row_of(aside).notes.keys() == {"from", "life", "rewound"}


def test_a_take_does_not_list_what_has_a_name_for_each_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the folder of the store, nor the index: both grow with each take."""
    Store(tmp_path / "s").take(state(0), "a")
    listed = []
    real = os.listdir

    def listdir(folder: Any) -> list[str]:
        listed.append(Path(f"/proc/self/fd/{folder}").readlink())
        return real(folder)

    monkeypatch.setattr("os.listdir", listdir)
    Snapshot.take(tmp_path / "s/b", state(1))
    Snapshot(tmp_path / "s/b").restore(state(0))
    assert listed
    assert not {tmp_path / "s", tmp_path / "s/casnap-store/index"} & set(listed)


def test_each_root_names_its_writer(tmp_path: Path) -> None:
    store = Store(tmp_path / "s").make()
    assert newest_record(store)["writer"] == f"casnap {casnap.__version__}"
    with_root(store, writer="rascnap 9")
    store.take(state(1), "a")
    assert newest_record(store)["writer"] == f"casnap {casnap.__version__}"


# --- numbers of roots -------------------------------------------------------------------------


def put_root_number(store: Store, seq: int) -> None:
    """Put the newest root once more, under another number."""
    fields = {**newest_record(store), "seq": seq}
    path = Path(store.uri) / "casnap-store" / root_key(seq)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(seal(b"r", msgspec.msgpack.encode(fields)))


def test_check_looks_for_no_million_roots(tmp_path: Path) -> None:
    """It takes a gap in their numbers for one damage."""
    store = Store(tmp_path / "s").make()
    store.take(state(1), "run/1")
    put_root_number(store, 3_000_000)
    report = Store(store.uri).check()
    assert report.ok
    assert report.root == 3_000_000
    assert [d.message for d in report.history] == ["the roots 2 to 2999999 are missing"]
    assert_restores(Store(store.uri), "run/1", 1)


def test_the_last_number_of_a_root_closes_a_store_for_writers_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "s").make()
    store.take(state(1), "run/1")
    put_root_number(store, (1 << 48) - 1)
    full = Store(store.uri)
    with pytest.raises(StoreError, match="the last number that a root can have"):
        full.tag("run/1", "best")
    with pytest.raises(StoreError, match="casnap cp"):
        full.take(state(2), "run/2")
    assert_restores(Store(store.uri), "run/1", 1)
    other = Store(tmp_path / "other")
    Store(store.uri).copy("run/1", to=other)
    assert_restores(other, "run/1", 1)
