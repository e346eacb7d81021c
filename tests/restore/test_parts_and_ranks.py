"""Snapshots of many ranks in one process: parts of tensors, keys in two scopes."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casnap import NewStore, StateDict, Store
from casnap.errors import EntryNotFoundError, MismatchError
from casnap.format.region import Region
from casnap.restore.loading import Loading
from tests.support.bitwise import assert_same, noise, raw
from tests.support.boxes import regions
from tests.support.cli_calls import document
from tests.support.faults import CHUNK
from tests.support.written import write

_numbers = count()


@pytest.fixture(scope="module")
def store():
    return Store("memory://parts", create=NewStore(chunk_size=CHUNK)).make()


@pytest.fixture
def disk(tmp_path, cache_dir):
    return Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)).make()


# --- parts ------------------------------------------------------------------------------------

# Cells of many rows, of one row, below the first axis; one cell; in the entry itself.
SHAPES = [(20_000,), (9, 16384), (3, 20_000), (150, 7, 11), (2, 3, 2, 9000), (33, 1000), (3, 2), ()]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool]


@st.composite
def tensors(draw):
    shape = draw(st.sampled_from(SHAPES))
    return noise(draw(st.sampled_from(DTYPES)), shape)


def written(store, tensor):
    """Write a snapshot of one tensor; return it, and the entry."""
    snapshot = write(store, f"run/{next(_numbers)}", {"m": {"x": tensor}})
    _, entry, _ = snapshot.contents.entry("m/x")
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
def test_parts_are_filled_and_nothing_else_is_read(store, data, tensor):
    snapshot, entry = written(store, tensor)
    shape, whole = tuple(tensor.shape), Region.whole(tuple(tensor.shape))
    parts = []
    for region in data.draw(st.lists(regions(shape), max_size=3)):
        layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
        parts.append((region, LAYOUTS[layout](region.sizes, tensor.dtype)))
    messages = []
    loading = Loading(snapshot.contents, lambda *numbers: messages.append(numbers))
    loading.add("m/x", entry, parts)
    wanted = []

    def fetch(wants, how):
        wanted.extend(wants)
        snapshot.contents.store.fetch(wanted, how)

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
        assert messages[-1] == ("reading", nbytes, nbytes)


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
    return write(store, "world", [rank_state(r) for r in range(3)], own=own)


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_sees_what_is_global_and_its_own(world, rank):
    assert_same(world.read_object(f"{rank}/m"), rank_state(rank)["m"])
    assert_same(world.read_object(f"{rank}/m/where"), rank_state(rank)["m"]["where"])
    assert_same(world.read_object(f"{rank}/m/w", index=(3, slice(490, 510))), WEIGHT[3, 490:510])
    result = dict(world.contents.entries(rank))
    assert list(result) == sorted(result)
    assert result == {p: world.contents.entry(f"{rank}/{p}")[1] for p in result}
    assert ("data/at" in result, "m/late" in result) == (rank > 0, rank == 1)


def test_new_ranks_see_what_is_global_alone(world):
    assert set(dict(world.contents.entries(3))) == {"m/w", "m/where", "m/where/name"}
    with pytest.raises(EntryNotFoundError):
        world.read_object("3/m/w")


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


def test_show(disk):
    states = [rank_state(r) for r in range(3)]
    own = [*OWN, "m", *(f"m/where/at/{i}" for i in range(3))]
    write(disk, "run/w", states, own=own)
    name = f"{disk.uri}/run/w"
    result = document("show", name)
    assert [k["entry"] for k in result["keys"]] == ["m", "0/m", "1/data", "1/m", "2/data", "2/m"]
    assert sum(k["logical_bytes"] for k in result["keys"]) == result["logical_bytes"]
    for path in ("m/w", "2/m/w"):
        assert document("show", name, path)["chunk_count"] == 3
    children = document("show", name, "1/m")["children"]
    assert [c["entry"] for c in children] == ["1/m/late", "1/m/seed", "1/m/w", "1/m/where"]
    assert document("show", name, "2/m/seed")["value"] == 2
