"""Snapshots of many ranks in one process: tensors in boxes, keys in two scopes, parts."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casnap import StateDict, Store
from casnap.errors import EntryNotFoundError, MismatchError
from casnap.format.entries import BoxedTensorEntry
from casnap.format.names import rank_names
from casnap.format.records import pack_key
from casnap.format.region import Region
from casnap.maintenance.diff import Change
from casnap.restore.loading import Loading
from casnap.state.tensors import Leaf
from tests.support.bitwise import assert_same, noise, raw
from tests.support.boxes import regions, tilings
from tests.support.cli_calls import document, invoke
from tests.support.damaged import change, flip, record_of, repair, safetensors
from tests.support.faults import CHUNK
from tests.support.written import write

_numbers = count()


@pytest.fixture(scope="module")
def store():
    return Store("memory://boxes", chunk_size=CHUNK).make()


@pytest.fixture
def disk(tmp_path, cache_dir):
    return Store(tmp_path / "store", chunk_size=CHUNK).make()


def halves(rows, columns, parts=2):
    """Return the boxes of shards of a last dimension."""
    step = columns // parts
    return tuple(((0, i * step), (rows, step)) for i in range(parts))


# --- parts ------------------------------------------------------------------------------------

# Cells of many rows, of one row, below the first axis; one cell; in the entry itself.
SHAPES = [(20_000,), (9, 16384), (3, 20_000), (150, 7, 11), (2, 3, 2, 9000), (33, 1000), (3, 2), ()]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool]


@st.composite
def tensors(draw):
    shape = draw(st.sampled_from(SHAPES))
    boxes = draw(st.none() | tilings(shape))
    return noise(draw(st.sampled_from(DTYPES)), shape), boxes


def written(store, tensor, boxes):
    """Write a snapshot of one tensor; return its contents and the entry."""
    cut = {} if boxes is None else {"m/x": boxes}
    snapshot = write(store, f"run/{next(_numbers)}", {"m": {"x": tensor}}, boxes=cut)
    _, entry, _ = snapshot.contents.entry("m/x")
    assert isinstance(entry, BoxedTensorEntry) == (boxes is not None)
    return snapshot, entry


LAYOUTS = {
    "contiguous": lambda sizes, dtype: torch.zeros(sizes, dtype=dtype),
    "transposed": lambda sizes, dtype: torch.zeros(sizes[::-1], dtype=dtype).permute(
        tuple(reversed(range(len(sizes))))
    ),
    "in a larger one": lambda sizes, dtype: torch.zeros([n + 2 for n in sizes], dtype=dtype)[
        tuple(slice(1, n + 1) for n in sizes)
    ],
    "offset": lambda sizes, dtype: torch.zeros(torch.Size(sizes).numel() + 1, dtype=dtype)[1:].view(
        sizes
    ),
    "wider": lambda sizes, dtype: torch.zeros(
        sizes, dtype=torch.complex128 if dtype.is_complex else torch.float64
    ),
}


@given(st.data(), tensors())
def test_parts_are_filled_and_nothing_else_is_read(store, data, case):
    tensor, boxes = case
    snapshot, entry = written(store, tensor, boxes)
    shape, whole = tuple(tensor.shape), Region.whole(tuple(tensor.shape))
    parts = []
    for region in data.draw(st.lists(regions(shape), max_size=3)):
        layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
        parts.append((region, LAYOUTS[layout](region.sizes, tensor.dtype)))
    told = []
    loading = Loading(snapshot.contents, lambda *numbers: told.append(numbers))
    loading.add("m/x", entry, parts)
    wanted = []

    def fetch(wants, how):
        wanted.extend(wants)
        snapshot.contents.objects.fetch(wanted, how)

    assert loading.load(fetch=fetch) == {}
    for region, target in parts:
        expected = tensor[region.within(whole)]
        assert raw(target) == raw(expected.to(target.dtype)), region
    chunks = snapshot.contents.chunks("m/x", entry)
    cells = snapshot.contents.cells("m/x", entry)
    pairs = [
        chunks[i][0]
        for region, _ in parts
        for i in range(len(chunks))
        if cells.region(i).intersect(region)
    ]
    assert sorted(want.digest for want in wanted) == sorted(pairs)
    if wanted:
        nbytes = sum(region.numel for region, _ in parts) * tensor.itemsize
        assert told[-1] == ("reading", nbytes, nbytes)


def test_shards_of_rows_are_copied_as_bytes(store, monkeypatch):
    """No tensor is made of a chunk where bytes can be copied, also of a cell that is cut."""
    tensor = noise(torch.float32, (1000, 100))
    snapshot, entry = written(store, tensor, None)
    assert snapshot.contents.cells("m/x", entry).count == 8
    rows = [(0, 128), (128, 300), (300, 301), (301, 1000)]
    parts = [
        (Region((start, 0), (stop - start, 100)), torch.zeros(stop - start, 100))
        for start, stop in rows
    ]
    monkeypatch.setattr("casnap.restore.loading.elements_of", None)
    loading = Loading(snapshot.contents)
    loading.add("m/x", entry, parts, tensor)
    assert loading.load() == {"m/x": Leaf("m/x", entry, tensor)}
    assert torch.equal(
        torch.cat([part for _, part in parts]).view(torch.int32), tensor.view(torch.int32)
    )


def test_a_parameter_is_filled_in_place(store):
    plain = torch.nn.Parameter(torch.randn(40, 1000))
    snapshot, entry = written(store, plain, halves(40, 1000))
    target = torch.nn.Parameter(torch.zeros(40, 300))
    loading = Loading(snapshot.contents)
    loading.add("m/x", entry, [(Region((0, 350), (40, 300)), target)], target)
    assert loading.load()["m/x"].content is target
    assert torch.equal(target, plain[:, 350:650])


# --- whole tensors, and indices ---------------------------------------------------------------


def bounds(size):
    return st.none() | st.integers(-size, size)


@st.composite
def indices(draw, shape):
    axes = [
        st.integers(-n, n - 1)
        | st.builds(slice, bounds(n), bounds(n), st.none() | st.integers(1, 3))
        for n in shape
    ]
    return tuple(draw(axis) for axis in axes[: draw(st.integers(0, len(axes)))])


@given(st.data(), tensors())
def test_what_is_in_boxes_is_read_as_any_tensor(store, data, case):
    tensor, boxes = case
    if boxes is None:
        boxes = (((0,) * tensor.ndim, tuple(tensor.shape)),)
    snapshot, _ = written(store, tensor, boxes)
    assert_same(snapshot.read_object("m/x"), tensor)
    index = data.draw(indices(tensor.shape))
    assert raw(snapshot.read_object("m/x", index=index)) == raw(tensor[index])
    out = torch.zeros_like(tensor).mT if tensor.ndim == 2 else torch.zeros_like(tensor)
    out = out.mT if tensor.ndim == 2 else out
    assert snapshot.read_object("m/x", out) is out
    assert raw(out) == raw(tensor)
    state = StateDict(x=torch.zeros_like(tensor))
    live = state["x"]
    snapshot.restore({"m": state})
    assert state["x"] is live
    assert raw(live) == raw(tensor)


def test_kinds_of_entries_in_boxes(store):
    weight = torch.nn.Parameter(torch.randn(40, 1000))
    array = np.arange(40_000.0).reshape(40, 1000)
    content = {"w": weight, "a": array, "small": torch.arange(6).reshape(3, 2)}
    boxes = {"m/w": halves(40, 1000, 4), "m/a": halves(40, 1000), "m/small": halves(3, 2)}
    snapshot = write(store, "kinds", {"m": content}, boxes=boxes)
    assert_same(snapshot.read_object("m"), content)
    assert_same(
        snapshot.read_object("m/a", index=(slice(1, 30, 7), slice(480, 520))),
        array[1:30:7, 480:520],
    )
    assert_same(snapshot.read_object("m/small", index=(1, slice(None))), content["small"][1])
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(40, 1000, dtype=torch.float64))
    write(store, "module", {"m": {"w": weight}}, boxes=boxes).restore({"m": module})
    assert torch.equal(module.w, weight.double())
    with pytest.raises(MismatchError):
        snapshot.read_object("m/w", torch.zeros(40, 500))


def test_equal_boxes_are_stored_once(disk):
    """A box is a tensor of its own: as a tensor of that shape it is there already."""
    weight = torch.randn(64, 1024)
    disk.take({"m": StateDict(left=weight[:, :512].contiguous())}, "left")
    write(disk, "both", {"m": {"w": weight}}, boxes={"m/w": halves(64, 1024)})
    assert CHUNK * 2 <= disk["both"].stats.new_bytes < CHUNK * 2 + 2000
    assert disk.check(data=True).ok


# --- what a rank sees -------------------------------------------------------------------------

WEIGHT = torch.arange(40_000.0).reshape(40, 1000)
OWN = ("m/seed", "m/where/at", "m/late", "data", "data/at")


def rank_state(rank):
    state = {"m": {"w": WEIGHT, "seed": rank, "where": {"at": [rank] * 3, "name": "all"}}}
    if rank == 1:
        state["m"]["late"] = torch.full((30_000,), 1.0)
    if rank > 0:
        state["data"] = {"at": 100 * rank}
    return state


@pytest.fixture(scope="module")
def world(store):
    """A snapshot of three ranks: ``m`` is in both scopes, ``data`` is kept for ranks 1 and 2."""
    own = (*OWN, *(f"m/where/at/{i}" for i in range(3)), "m")
    return write(
        store, "world", [rank_state(r) for r in range(3)], boxes={"m/w": halves(40, 1000)}, own=own
    )


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_sees_what_is_global_and_its_own(world, rank):
    assert_same(world.read_object(f"{rank}/m"), rank_state(rank)["m"])
    assert_same(world.read_object(f"{rank}/m/where"), rank_state(rank)["m"]["where"])
    assert_same(world.read_object(f"{rank}/m/w", index=(3, slice(490, 510))), WEIGHT[3, 490:510])
    seen = dict(world.contents.entries(rank))
    assert list(seen) == sorted(seen)
    assert seen == {p: world.contents.entry(f"{rank}/{p}")[1] for p in seen}
    assert ("data/at" in seen, "m/late" in seen) == (rank > 0, rank == 1)


def test_new_ranks_see_what_is_global_alone(world):
    assert set(dict(world.contents.entries(3))) == {"m/w", "m/where", "m/where/name"}
    with pytest.raises(EntryNotFoundError):
        world.read_object("3/m/w")


def test_without_a_rank_it_is_global_or_that_of_rank_0(world):
    assert_same(world.read_object("m"), rank_state(0)["m"])
    assert world.read_object("m/seed") == 0
    assert_same(world.read_object("m/w"), WEIGHT)


def test_the_manifest_has_every_rank(world):
    manifest = world.get_manifest()
    assert {p for p in manifest if p.endswith("m/seed")} == {f"{r}/m/seed" for r in range(3)}
    assert manifest["0/m/w"] == manifest["2/m/w"]
    assert len(manifest) == 9 + 12 + 11
    assert world.metadata.world_size == 3


def test_own_entries_win(store):
    """A faulty writer may put an entry into both scopes; a rank's own entry then wins."""
    snapshot = write(store, "twice", [{"m": {"x": 0}}, {"m": {"x": 1}}], own=["m/x"])
    both = {**snapshot.contents.manifest.shared}
    contents = snapshot.contents
    contents.manifest.shared["m"] = contents.manifest.ranks["1"]["m"]
    try:
        assert contents.trees(0)["m"].get("/x") != contents.trees(1)["m"].get("/x")
        assert contents.trees(None)["m"].get("/x") == contents.trees(1)["m"].get("/x")
        assert [p for p, _ in contents.trees(0)["m"].items()] == ["/x"]
    finally:
        contents.manifest.shared.update(both)


@pytest.mark.parametrize(
    ("path", "of", "read"),
    [
        ("m/late", "rank 1", "1/m/late"),
        ("0/m/late", "rank 1", "1/m/late"),
        ("2/m/late", "rank 1", "1/m/late"),
        ("data", "ranks 1 and 2", "1/data"),
        ("data/at", "ranks 1 and 2", "1/data/at"),
        ("3/data/at", "ranks 1 and 2", "1/data/at"),
    ],
)
def test_what_is_kept_for_others_says_so(world, path, of, read):
    with pytest.raises(EntryNotFoundError, match=f"is kept for {of} alone; read it as '{read}'"):
        world.read_object(path)
    world.read_object(read)


def test_who_keeps_what(world):
    keepers = world.contents.keepers
    assert keepers("m/seed") == keepers("m/where/at") == keepers("m") == [0, 1, 2]
    assert keepers("m/where") == [0, 1, 2]  # something below it
    assert keepers("data") == [1, 2]
    assert keepers("m/late") == [1]
    assert keepers("m/w") == keepers("nowhere") == keepers("m/see") == []
    with pytest.raises(EntryNotFoundError, match="nearest: m/seed"):
        world.read_object("2/m/sed")
    assert rank_names(range(1)) == "rank 0"
    assert rank_names([0, 1, 5]) == "ranks 0, 1 and 5"
    assert rank_names(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_rank_0_restores(world):
    state = StateDict(w=torch.zeros(40, 1000, dtype=torch.float64), seed=9)
    live = state["w"]
    world.restore({"m": state})
    assert_same({**state.data, "w": WEIGHT}, rank_state(0)["m"])
    assert state["w"] is live
    assert torch.equal(live, WEIGHT.double())
    with pytest.raises(MismatchError, match="data"):
        world.restore({"data": StateDict()})


# --- comparing and counting -------------------------------------------------------------------


def test_diff_of_two_worlds(disk):
    changed = WEIGHT.clone()
    changed[39, 0] = -1
    states = [rank_state(r) for r in range(2)]
    own = [*OWN, "m", *(f"m/where/at/{i}" for i in range(3))]
    cut = {"m/w": halves(40, 1000, 4)}
    a = write(disk, "a", states, boxes=cut, own=own).contents
    states[0]["m"]["w"], states[1]["m"]["seed"] = changed, 7
    write(disk, "b", states, boxes=cut, own=own)
    seed, w = sorted(disk.diff("a", "b").changes, key=lambda c: c.path)
    assert (seed.path, seed.kind, w.path) == ("1/m/seed", "changed", "m/w")
    assert (w.changed_bytes, w.total_bytes) == (40_000, 160_000)
    assert not disk.diff("a", "a")
    # Cut in another way: what is the same in the same box counts as unchanged.
    boxes = (((0, 0), (40, 250)), ((0, 250), (40, 250)), ((0, 500), (40, 500)))
    write(disk, "c", states, boxes={"m/w": boxes}, own=own)
    write(disk, "d", states, own=own)
    assert [c.changed_bytes for c in disk.diff("b", "c").changes] == [80_000]
    assert [c.changed_bytes for c in disk.diff("c", "d").changes] == [160_000]
    assert [c.changed_bytes for c in disk.diff("d", "b").changes] == [160_000]
    assert isinstance(a.entry("m/w")[1], BoxedTensorEntry)


def test_moving_from_one_scope_to_the_other(disk):
    write(disk, "a", [{"m": {"x": 1}}, {"m": {"x": 1}}])
    write(disk, "b", [{"m": {"x": 1}}, {"m": {"x": 2}}], own=["m/x"])
    changes = [(c.path, c.kind) for c in disk.diff("a", "b").changes]
    assert changes == [("0/m/x", "added"), ("1/m/x", "added"), ("m/x", "removed")]
    assert all(isinstance(c, Change) for c in disk.diff("a", "b").changes)


def test_what_all_ranks_share_is_counted_once(disk):
    state = {"m": {"x": torch.arange(51_200)}}
    write(disk, "a", [state] * 3, own=["m", "m/x"])
    (found,) = disk.usage()
    assert 409_600 < found.stored_bytes == found.unique_bytes < 411_000
    write(disk, "b", [state] * 2, own=["m", "m/x"])
    assert [u.unique_bytes < 500 for u in disk.usage()] == [True, True]
    assert disk.gc(grace=0).condemned_packs == 0
    assert disk.check(data=True).ok


def test_show(disk):
    states = [rank_state(r) for r in range(3)]
    own = [*OWN, "m", *(f"m/where/at/{i}" for i in range(3))]
    write(disk, "run/w", states, boxes={"m/w": halves(40, 1000)}, own=own)
    name = f"{disk.uri}/run/w"
    found = document("show", name)
    assert [k["entry"] for k in found["keys"]] == ["m", "0/m", "1/data", "1/m", "2/data", "2/m"]
    assert sum(k["logical_bytes"] for k in found["keys"]) == found["logical_bytes"]
    for path in ("m/w", "2/m/w"):
        shown = document("show", name, path)
        assert (shown["box_count"], shown["chunk_count"]) == (2, 4)
        assert "boxes" in invoke("show", name, path).stdout
    assert "box_count" not in document("show", name, "1/m/late")
    children = document("show", name, "1/m")["children"]
    assert [c["entry"] for c in children] == ["1/m/late", "1/m/seed", "1/m/w", "1/m/where"]
    assert document("show", name, "2/m/seed")["value"] == 2


# --- damage -----------------------------------------------------------------------------------


def torch_file(folder, weight):
    torch.save({"w": weight}, folder / "w.pt")
    return folder / "w.pt"


def numpy_file(folder, weight):
    np.save(folder / "w.npy", weight.numpy())
    return folder / "w.npy"


SOURCES = {
    "safetensors": lambda f, w: safetensors(f / "w.safetensors", {"w": w}),
    "torch": torch_file,
    "numpy": numpy_file,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_box_is_healed_from_a_file(disk, tmp_path, source):
    """The file holds the tensor whole; its boxes are cut out of it."""
    weight = torch.randn(40, 1000)
    write(disk, "a", {"m": {"w": weight}}, boxes={"m/w": halves(40, 1000, 4)})
    folder = Path(disk.uri)
    digest, place = record_of(folder, weight[:, 250:500].contiguous())
    change(folder / "casnap-store" / pack_key(place.pack), flip(place.offset + 5))
    (damage,) = disk.check(data=True).damages
    assert (damage.digest, [h.path for h in damage.hurts]) == (digest.hex(), ["m/w"])
    report = repair(folder, SOURCES[source](tmp_path, weight))
    assert (report.ok, report.healed_chunks, report.skipped) == (True, 1, [])
    assert torch.equal(Store(folder)["a"].read_object("m/w"), weight)
