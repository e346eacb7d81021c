"""Diff and usage are right, and read no more than they must."""

from __future__ import annotations

import os
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.comparing.changes import Change
from casnap.comparing.diff import diff
from casnap.errors import EntryNotFoundError, StoreError
from casnap.format.digest import Digest, digest_of, split_digests
from casnap.format.entries import Payload, TensorEntry
from casnap.format.tree import Branch
from casnap.maintenance.usage import Usage, disk_usage, shared_bytes, usage
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.contents import Contents
from tests.support.faults import in_child

CHUNK = 64 << 10


@pytest.fixture
def store() -> Store:
    return Store(f"memory://{uuid.uuid4().hex}", create=NewStore(chunk_size=CHUNK)).make()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """Count how often each node is asked for."""
    counted: Counter[bytes] = Counter()
    node = Repository.node

    def counting(self: Repository, digest: Digest, hint: Any = None) -> bytes:
        counted[digest] += 1
        return node(self, digest, hint)

    monkeypatch.setattr(Repository, "node", counting)
    return counted


def take(store: Store, name: str, /, **values: Any) -> Contents:
    return store.take({"s": StateDict(**values)}, name).contents


def chunks_of_floats(count: int) -> torch.Tensor:
    """Return a tensor of so many different chunks."""
    return torch.arange(count * CHUNK // 4, dtype=torch.float32)


def by_path(changes: list[Change]) -> dict[str, tuple[str, int, int]]:
    return {c.path: (c.kind, c.changed_bytes, c.total_bytes) for c in changes}


# --- diff -------------------------------------------------------------------------------------


def test_equal_snapshots_do_not_differ(store: Store, reads: Counter[bytes]) -> None:
    a, b = (
        take(store, "a", x=1, t=chunks_of_floats(2)),
        take(store, "b", x=1, t=chunks_of_floats(2)),
    )
    reads.clear()
    assert not diff(a, b)
    assert diff(a, b).changes == []
    assert set(reads) == {a.row.manifest.digest}


def test_changes_count_the_chunks_that_differ(store: Store) -> None:
    weight = chunks_of_floats(3)
    a = take(store, "a", weight=weight, gone=torch.ones(100), step=1, name="x", flat=[1, 2])
    weight[CHUNK // 4] += 1
    b = take(store, "b", weight=weight, new=torch.ones(100), step=2, name="x", flat=[1, 2])
    found = diff(a, b)
    assert by_path(found.of("added")) == {"s/new": ("added", 400, 400)}
    assert by_path(found.of("removed")) == {"s/gone": ("removed", 0, 400)}
    changed = by_path(found.of("changed"))
    assert changed["s/weight"] == ("changed", CHUNK, 3 * CHUNK)
    assert changed["s/step"] == ("changed", 1, 1)
    assert set(changed) == {"s", "s/weight", "s/step"}  # s: its keys are others
    assert found.changed_bytes == sum(c.changed_bytes for c in found.changes)
    assert [c.path for c in found.changes] == sorted(c.path for c in found.changes)


def test_a_change_carries_both_entries(store: Store) -> None:
    a, b = take(store, "a", t=torch.ones(4, 8)), take(store, "b", t=torch.ones(8, 8))
    (change,) = diff(a, b).changes
    assert isinstance(change.old, TensorEntry)
    assert isinstance(change.new, TensorEntry)
    assert (change.old.shape, change.new.shape) == ((4, 8), (8, 8))
    (added,) = diff(take(store, "c"), b).of("added")
    assert added.old is None


def test_equal_bytes_in_another_shape_are_changed_by_no_bytes(store: Store) -> None:
    t = chunks_of_floats(2)
    a, b = take(store, "a", t=t), take(store, "b", t=t.reshape(2, -1))
    assert by_path(diff(a, b).changes) == {"s/t": ("changed", 0, 2 * CHUNK)}


def test_a_longer_tensor_counts_what_the_old_one_lacks(store: Store) -> None:
    a, b = take(store, "a", t=chunks_of_floats(2)), take(store, "b", t=chunks_of_floats(5))
    assert by_path(diff(a, b).changes) == {"s/t": ("changed", 3 * CHUNK, 5 * CHUNK)}
    assert by_path(diff(b, a).changes) == {"s/t": ("changed", 0, 2 * CHUNK)}


def test_whole_keys_come_and_go(store: Store) -> None:
    a = store.take({"m": StateDict(x=1)}, "a").contents
    b = store.take({"m": StateDict(x=1), "n": StateDict(y=torch.ones(64))}, "b").contents
    assert {p: k for p, (k, _, _) in by_path(diff(a, b).changes).items()} == {
        "n": "added",
        "n/y": "added",
    }
    assert {c.kind for c in diff(b, a).changes} == {"removed"}


def test_what_belongs_to_a_rank_is_named_by_it(store: Store) -> None:
    from casnap import RNGState

    torch.manual_seed(1)
    a = store.take({"rng": RNGState()}, "a").contents
    torch.manual_seed(2)
    b = store.take({"rng": RNGState()}, "b").contents
    paths = [c.path for c in diff(a, b).changes]
    assert "0/rng/torch" in paths
    assert all(b.entry(path) for path in paths)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1000, dtype=torch.bfloat16),
        torch.ones(1000, dtype=torch.complex128),
        torch.ones(1000, dtype=torch.bool),
        torch.ones(1000, dtype=torch.uint16),
        np.ones(1000, dtype=">f8"),
        np.full(1000, "abc"),
        np.ones(1000, dtype="datetime64[s]"),
        "x" * 1000,
        list(range(100_000)),
        dict.fromkeys(range(100)),
    ],
    ids=lambda value: str(getattr(value, "dtype", type(value).__name__)),
)
def test_the_chunks_of_every_kind_of_entry_are_found(store: Store, value: object) -> None:
    a, b = take(store, "a", v=value), take(store, "b", v=None)
    change = next(c for c in diff(b, a).changes if c.path == "s/v")
    assert change.changed_bytes == change.total_bytes > 64
    entry = a.entry("s/v")[1]
    assert sum(n for _, n in a.chunks("s/v", entry)) == entry.payload.nbytes


def test_only_leaves_that_differ_are_read(store: Store, reads: Counter[bytes]) -> None:
    values: dict[str, Any] = {f"v{i}": i for i in range(5000)}
    a = take(store, "a", **values)
    values["v77"] = -1
    b = take(store, "b", **values)
    old, new = (c.tree(c.manifest.shared["s"]) for c in (a, b))
    leaves = [{digest for _, digest, _ in tree.children} for tree in (old, new)]
    assert len(leaves[0]) > 5
    a, b = (Contents(store._view.repository, c.name, c.row) for c in (a, b))
    reads.clear()
    assert by_path(diff(a, b).changes) == {"s/v77": ("changed", 1, 1)}
    assert not set(reads) & leaves[0] & leaves[1]
    # Two manifests, two lists of leaves, the two leaves that differ; each once.
    assert set(reads.values()) == {1}
    assert len(reads) == 6


def test_trees_of_two_heights(store: Store, reads: Counter[bytes]) -> None:
    """Where a list ends, there is a list of lists; all that reads trees goes through it."""
    values: dict[str, Any] = {f"k{i:04}": i for i in range(2000)}
    # A key that is the first of a leaf, and ends the list of leaves.
    ends = [k for k in values if digest_of(f"/{k}".encode())[0] == 0]
    further = (f"{ends[2]}-{i}" for i in range(1_000_000))
    end = next(k for k in further if digest_of(f"/{k}".encode())[1] == 0)
    low, high = take(store, "low", **values), take(store, "high", **values, **{end: -1})
    tree = high.tree(high.manifest.shared["s"])
    assert isinstance(tree.node(Digest(tree.children[0][1])), Branch)
    assert len(low.tree(low.manifest.shared["s"]).children) > 5
    low, high = (Contents(store._view.repository, c.name, c.row) for c in (low, high))
    reads.clear()
    assert by_path(diff(low, high).changes).keys() == {"s", f"s/{end}"}
    assert set(reads.values()) == {1}
    assert store.check(data=True).damages == []
    store.delete("low")
    store.gc(grace=0, exclusive=True)
    assert store["high"].read_object("s") == {**values, end: -1}
    assert len(dict(high.tree(high.manifest.shared["s"]).items())) == 2002


def test_lists_of_chunks_are_read_where_entries_differ(store: Store, reads: Counter[bytes]) -> None:
    same, other = chunks_of_floats(6), chunks_of_floats(7)
    a = take(store, "a", same=same, other=other)
    other[0] += 1
    b = take(store, "b", same=same, other=other)
    listed = a.entry("s/same")[1].payload
    assert listed.depth == 1
    reads.clear()
    assert by_path(diff(a, b).changes) == {"s/other": ("changed", CHUNK, 7 * CHUNK)}
    assert not set(reads) & set(split_digests(listed.digests))
    for contents in (a, b):
        assert reads[contents.entry("s/other")[1].payload.digests] == 1


def test_stores_of_different_chunks_cannot_be_compared(store: Store) -> None:
    other = Store(f"memory://{uuid.uuid4().hex}", create=NewStore(chunk_size=2 * CHUNK)).make()
    with pytest.raises(StoreError, match="one store"):
        diff(take(store, "a", x=1), take(other, "a", x=2))


def test_stores_of_equal_chunks_can(store: Store) -> None:
    other = Store(f"memory://{uuid.uuid4().hex}", create=NewStore(chunk_size=CHUNK)).make()
    t = chunks_of_floats(3)
    assert not diff(take(store, "a", t=t), take(other, "a", t=t))


# --- usage ------------------------------------------------------------------------------------


def references(contents: Contents) -> set[bytes]:
    """Return the digests of all that a snapshot refers to, by looking at everything."""

    def below(payload: Payload) -> Iterator[bytes]:
        level = list(split_digests(payload.digests))
        yield from level
        for _ in range(payload.depth):
            level = [d for node in level for d in split_digests(contents.store.node(node))]
            yield from level

    found: set[bytes] = {contents.row.manifest.digest}
    subtrees = [contents.manifest.shared, *contents.manifest.ranks.values()]
    for digest in {digest for subtree in subtrees for digest in subtree.values()}:
        tree = contents.tree(digest)
        found |= {digest, *(leaf for _, leaf, _ in tree.children)}
        entries = dict(tree.items())
        found.update(d for entry in entries.values() for d in below(entry.payload))
    return found


def expected(store: Store, snapshots: list[Contents]) -> list[Usage]:
    repository = store._view.repository
    view = repository.view()
    every = {c.name: references(c) for c in (s.contents for s in Store(store.uri).snapshots())}

    def stored(digests: set[bytes]) -> int:
        places = repository.index.find(view, [Digest(d) for d in digests])
        return sum(found.stored_size for found in places)

    usages = []
    for c in snapshots:
        others: set[bytes] = set().union(*(every[name] for name in every if name != c.name))
        logical, all_of_it = c.row.stats.logical_bytes, every[c.name]
        usages.append(Usage(c.name, logical, stored(all_of_it), stored(all_of_it - others)))
    return usages


def test_usage_by_hand(store: Store) -> None:
    t = chunks_of_floats(3)
    take(store, "a", t=t)
    t[0] = -1
    take(store, "b", t=t)
    a, b = store.usage()
    assert (a.name, b.name) == ("a", "b")
    assert a.logical_bytes == store["a"].stats.logical_bytes
    for found in (a, b):
        nodes = found.stored_bytes - 3 * CHUNK
        assert 0 < nodes < 1000
        assert found.unique_bytes == CHUNK + nodes
    assert b.unique_bytes == store["b"].stats.new_bytes


@pytest.mark.parametrize("seed", range(6))
def test_usage_is_what_counting_everything_gives(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    state: dict[str, Any] = {f"v{i}": i for i in range(600)}
    state |= {f"t{i}": torch.full((CHUNK // 2,), i, dtype=torch.float32) for i in range(4)}
    state["long"] = chunks_of_floats(6)
    kept = [dict(state)]
    for i in range(12):
        if rng.random() < 0.3:
            state = dict(rng.choice(kept))
        for key in rng.sample(sorted(state), rng.choice((0, 1, 3))):
            state[key] = rng.choice((rng.random(), torch.full((100,), rng.randrange(3))))
        kept.append(dict(state))
        store.take({"s": StateDict(**state), f"k{i % 3}": StateDict(x=i % 2)}, f"run{i % 2}/{i}")
        if rng.random() < 0.2:
            store.delete(f"run{i % 2}/{i}")
    for prefix in (None, "run0"):
        snapshots = [s.contents for s in store.snapshots(prefix)]
        assert usage(snapshots, store._view.repository) == expected(store, snapshots)


def test_a_view_sees_what_others_share(store: Store) -> None:
    t = chunks_of_floats(2)
    take(store, "run1/a", t=t)
    take(store, "run2/a", t=t)
    (alone,) = store.usage("run1")
    assert alone.unique_bytes == 0
    store.delete("run2/a")
    (alone,) = store.usage("run1")
    assert alone.unique_bytes == alone.stored_bytes > 2 * CHUNK


def test_no_snapshots_no_usage(store: Store) -> None:
    assert store.usage() == []
    assert disk_usage(store._view.repository).kept_bytes == 0


def test_what_neighbours_share_is_read_once(store: Store, reads: Counter[bytes]) -> None:
    values: dict[str, Any] = {f"v{i}": i for i in range(5000)}
    for step in range(4):
        values["v77"] = step
        take(store, f"s{step}", **values)
    reads.clear()
    told: list[tuple[str, int, int]] = []
    usage(
        [s.contents for s in store.snapshots()], store._view.repository, lambda *a: told.append(a)
    )
    assert told == [("reading snapshots", i, 4) for i in range(5)]
    tree = store["s0"].contents.tree(store["s0"].contents.manifest.shared["s"])
    leaves = {digest for _, digest, _ in tree.children}
    # Once to see what it is, once for what it holds; not once more for each snapshot.
    assert max(reads[leaf] for leaf in leaves) <= 2


def test_what_another_host_deletes_and_collects_meanwhile_is_left_out(tmp_path: Path) -> None:
    """This host has read nothing of it before."""

    def on_another_host(work: Callable[[Store], object]) -> None:
        def use() -> None:
            os.environ["CASNAP_CACHE_DIR"] = str(tmp_path / "another_host")
            work(Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)))

        assert in_child(use) == 0

    def take_three(store: Store) -> None:
        for step in range(3):
            take(store, f"step_{step}", t=chunks_of_floats(2) + step)

    def delete_and_collect(store: Store) -> None:
        store.delete("step_1")
        store.gc(grace=0, repack=1.0)

    on_another_host(take_three)
    store = Store(tmp_path / "store")
    told: list[int] = []

    def progress(_phase: str, done: int, _total: int) -> None:
        if not told:
            on_another_host(delete_and_collect)
        told.append(done)

    snapshots = [s.contents for s in store.snapshots()]
    usages = usage(snapshots, store._view.repository, progress)
    assert told == [0, 1, 0, 1, 2]
    assert usages == store.usage()
    assert [u.name for u in usages] == ["step_0", "step_2"]


def test_disk_usage_is_all_that_the_disk_gave(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in range(20):
        store.take({"s": StateDict(step=step)}, f"step_{step}")
    (tmp_path / "casnap-store/tmp" / ("0" * 24)).write_bytes(bytes(50_000))
    files = [f for f in (tmp_path / "casnap-store").rglob("*") if f.is_file()]
    roots = [f for f in files if "roots" in f.parts]
    disk = disk_usage(store._view.repository)
    assert disk.nbytes == sum(f.stat().st_blocks * 512 for f in files)
    assert disk.other_bytes > 50_000 + sum(f.stat().st_size for f in roots)


def test_shared_bytes_looks_at_earlier_snapshots_alone(store: Store) -> None:
    t = chunks_of_floats(6)
    a = take(store, "a", t=t, small=torch.ones(4))
    t[0] = -1
    b = take(store, "b", t=t, other=t[: CHUNK // 4])

    def shared(contents: Contents, path: str) -> int:
        return shared_bytes(contents, path, contents.entry(path)[1])

    assert shared(a, "s/t") == 0
    assert shared(b, "s/t") == 5 * CHUNK
    assert shared(b, "s/other") == 0
    assert shared(a, "s/small") == 0  # stands in the tree, in no chunk
    c = take(store, "c", moved=t[CHUNK // 4 :])
    assert shared(c, "s/moved") == 5 * CHUNK
    store.delete("a")
    assert shared(b, "s/t") == 0
    assert shared(c, "s/moved") == 5 * CHUNK


def test_shared_bytes_stops_when_all_is_found(store: Store, reads: Counter[bytes]) -> None:
    for step in range(5):
        last = take(store, f"s{step}", step=step, t=chunks_of_floats(2))
    entry = last.entry("s/t")[1]
    told: list[tuple[str, int, int]] = []
    assert shared_bytes(last, "s/t", entry, lambda *a: told.append(a)) == 2 * CHUNK
    assert told == [("looking through earlier snapshots", 0, 4)]


def test_a_path_that_is_not_there_names_the_nearest(store: Store) -> None:
    with pytest.raises(EntryNotFoundError, match="s/weight"):
        take(store, "a", weight=1).entry("s/wieght")
