"""Restores that keep what the tensors hold: each cell is hashed, and read only if it differs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import DamagedError
from casnap.integrations.dcp import CasnapReader
from casnap.storage.reading import repository
from tests.support.bitwise import assert_same, noise, raw
from tests.support.ranks import Worlds
from tests.support.reads import counted
from tests.support.remote import RemoteDouble

CHUNK = 64 << 10


class Tuned(nn.Module):
    """A base that stays, with a tied weight, and an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(400, 400) for _ in range(4))
        self.tied = self.base[0].weight
        self.adapter = nn.Linear(400, 60, bias=False)

    def step(self) -> None:
        with torch.no_grad():
            self.adapter.weight.add_(1)


BASE = 4 * (400 * 400 + 400) * 4
ADAPTER = 400 * 60 * 4


def changed(values: torch.Tensor, *indices: int) -> torch.Tensor:
    """Return a copy in which some elements differ, counted row by row."""
    other = values.clone(memory_format=torch.contiguous_format)
    for index in indices:
        other.reshape(-1).view(torch.uint8)[index * values.itemsize] ^= 1
    return other


def rolled_back(store: Store, taken: Any, live: Any, **options: Any) -> tuple[Any, int]:
    """Take a tensor, restore it into another one; return that, and how many bytes were kept."""
    store.take({"s": StateDict(x=taken)}, "step")
    state = StateDict(x=live)
    report = store["step"].restore({"s": state}, reuse=True, **options)
    assert not report
    return state["x"], report.kept_bytes


# --- what is not read -----------------------------------------------------------------------------


def test_a_rollback_reads_only_what_was_trained(store: Store) -> None:
    model = Tuned()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    store.take({"model": model}, "step")
    base, adapter = model.base[1].weight, model.adapter.weight.clone()
    for verb in ("restore", "load_into"):
        model.step()
        snapshot, backend = counted(store["step"])
        if verb == "restore":
            report = snapshot.restore({"model": model}, reuse=True)
        else:
            report = snapshot.load_into(model, reuse=True)
        assert torch.equal(model.adapter.weight, adapter)
        assert_same(dict(model.state_dict()), before)
        assert model.base[1].weight is base
        assert report.kept_bytes == BASE + 400 * 400 * 4  # the tied one by both of its names
        packs = sum(n for key, _, n in backend.reads if key.startswith("packs/"))
        assert ADAPTER <= packs < ADAPTER + (64 << 10), verb  # and nodes


@pytest.mark.filterwarnings("ignore:torch.distributed is ")
def test_a_load_by_dcp_reads_only_what_differs(store: Store) -> None:
    taken = {"x": noise(torch.int32, (100, 1000)), "text": "words"}
    store.take({"s": StateDict(taken)}, "step")
    live = {"s": {"x": changed(taken["x"], 17_000), "text": ""}}
    snapshot, backend = counted(store["step"])
    reader = CasnapReader(snapshot.store, reuse=True)
    dcp.load(live, checkpoint_id="step", storage_reader=reader, no_dist=True)
    assert_same(live, {"s": taken})
    packs = sum(n for key, _, n in backend.reads if key.startswith("packs/"))
    assert 64_000 <= packs < 2 * 64_000


def test_on_a_bucket_a_rollback_needs_requests_for_the_adapter_alone(tmp_path: Path) -> None:
    model, there = Tuned(), RemoteDouble(str(tmp_path / "bucket"))
    Store(there, create=NewStore(chunk_size=CHUNK)).take({"model": model}, "step")
    counts = []
    for options in ({}, {"reuse": True}):
        model.step()
        snapshot = Store(there)["step"]
        snapshot.get_manifest()  # the host keeps the trees
        there.reset()
        snapshot.restore({"model": model}, **options)
        counts.append((there.count, there.read_bytes))
    (_, all_bytes), (few, few_bytes) = counts
    assert all_bytes > BASE
    assert few_bytes < ADAPTER + CHUNK
    assert few <= 3
    there.reset()
    assert snapshot.restore({"model": model}, reuse=True).kept_bytes > BASE + ADAPTER
    assert there.requests["get"] <= 1, there.log  # the newest root
    assert there.read_bytes < CHUNK


def test_only_cells_that_differ_are_read(store: Store) -> None:
    taken = noise(torch.float32, (100, 1000))  # cells of 16 rows
    live = changed(taken, 0, 1, 20_000, 99_999)
    x, kept = rolled_back(store, taken, live)
    assert x is live
    assert_same(live, taken)
    assert kept == taken.nbytes - (16 + 16 + 4) * 4000


def test_progress_counts_what_is_kept(store: Store) -> None:
    taken, seen = noise(torch.float32, (100, 1000)), []
    rolled_back(store, taken, changed(taken, 5), progress=lambda *each: seen.append(each))
    assert max(seen)[1] == taken.nbytes


# --- targets of all kinds -------------------------------------------------------------------------


def in_memory(values: torch.Tensor, how: str) -> torch.Tensor:
    """Return a tensor of these values that lies otherwise in memory."""
    if how == "turned":
        return values.t().contiguous().t()
    if how == "spaced":
        return torch.zeros(*values.shape, 2, dtype=values.dtype)[..., 1].copy_(values)
    if how == "odd":
        flat = torch.zeros(values.nbytes + 1, dtype=torch.uint8)[1:]
        return flat.copy_(values.reshape(-1).view(torch.uint8)).view(torch.int8).view(values.shape)
    if how == "inference":
        with torch.inference_mode():
            return values.clone()
    assert how == "leaf"
    return values.clone().requires_grad_()


@pytest.mark.parametrize("how", ["turned", "spaced", "odd", "inference", "leaf"])
def test_of_any_layout(store: Store, how: str) -> None:
    dtype = torch.int8 if how == "odd" else torch.float32
    taken = noise(dtype, (300, 1000))
    live = in_memory(changed(taken, 50), how)
    address = live.data_ptr()
    x, kept = rolled_back(store, taken, live)
    assert x is live
    assert live.data_ptr() == address
    assert raw(live) == raw(taken)
    rows = 64 if how == "odd" else 16
    assert kept == taken.nbytes - rows * 1000 * taken.itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool])
def test_of_any_dtype(store: Store, dtype: torch.dtype) -> None:
    taken = noise(dtype, (500_000,))
    live = taken.clone()
    live[:10] = 0 if dtype is not torch.bool else ~taken[:10]
    x, kept = rolled_back(store, taken, live)
    assert raw(x) == raw(taken)
    assert kept == taken.nbytes - CHUNK


def test_what_is_cast_is_read(store: Store) -> None:
    taken = noise(torch.bfloat16, (100, 1000))
    x, kept = rolled_back(store, taken, taken.to(torch.float32))
    assert raw(x) == raw(taken.to(torch.float32))
    assert kept == 0


def test_equal_bytes_of_another_dtype_are_read(store: Store) -> None:
    taken = noise(torch.int32, (100, 1000))
    x, kept = rolled_back(store, taken, taken.view(torch.float32).clone())
    assert torch.equal(x, taken.to(torch.float32))
    assert kept == 0


def test_targets_that_overlap(store: Store) -> None:
    """They are put together in memory of their own, of what they hold and what is read."""
    base = noise(torch.int32, (100_000,))
    store.take({"s": StateDict(all=base, some=base[20_000:], windows=base.unfold(0, 3, 1))}, "step")
    live = changed(base, 3)
    state = StateDict(all=live, some=live[20_000:], windows=live.unfold(0, 3, 1))
    report = store["step"].restore({"s": state}, reuse=True)
    assert_same(live, base)
    assert state["windows"].data_ptr() == state["some"].data_ptr() - 80_000 == live.data_ptr()
    windows = (100_000 - 2) * 3 * 4  # in cells of 4096 rows
    assert report.kept_bytes == (400_000 - CHUNK) + 320_000 + (windows - 4096 * 12)


def test_overlapping_targets_that_held_other_values_than_now(store: Store) -> None:
    """Each holds what it had when it was taken, but both cannot: new tensors get both."""
    x, y = noise(torch.int32, (60_000,)), noise(torch.int32, (60_000,))
    store.take({"s": StateDict(x=x, y=y)}, "step")
    live = x.clone()
    state = StateDict(x=live, y=live)
    report = store["step"].restore({"s": state}, reuse=True)
    assert_same(state["x"], x)
    assert_same(state["y"], y)
    assert report.kept_bytes == x.nbytes


class Wrapper:
    """A loader that is not known to casnap, as those of trainers: it gets new tensors."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight.zero_()
        self.weight.copy_(state["weight"])


def test_a_loader_that_is_not_known_gets_new_tensors(store: Store) -> None:
    taken = noise(torch.int32, (100, 1000))
    store.take({"w": Wrapper(taken)}, "step")
    live = Wrapper(changed(taken, 0))
    snapshot, backend = counted(store["step"])
    report = snapshot.restore({"w": live}, reuse=True)
    assert_same(live.weight, taken)
    assert report.kept_bytes == taken.nbytes - 16 * 4000
    assert backend.nbytes < 3 * CHUNK


def test_what_is_kept_is_copied_before_anything_is_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader gets what the tensor held, also if that is filled in place under another key."""
    monkeypatch.setattr(repository, "_WINDOW", 1)
    held, other = noise(torch.int32, (100, 1000)), noise(torch.int32, (100, 1000))
    store.take({"a": StateDict(x=other), "w": Wrapper(held)}, "step")
    live, given = held.clone(), list[torch.Tensor]()
    wrapper = Wrapper(live)
    monkeypatch.setattr(wrapper, "load_state_dict", lambda state: given.append(state["weight"]))
    report = store["step"].restore({"a": StateDict(x=live), "w": wrapper}, reuse=True)
    assert_same(live, other)
    assert_same(given, [held])
    assert report.kept_bytes == held.nbytes


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_states_that_are_not_all_tensors_on_both_sides(store: Store) -> None:
    def state(**more: Any) -> StateDict:
        quantized = torch.quantize_per_tensor(torch.ones(50_000), 0.1, 0, torch.qint8)
        return StateDict(
            text="x" * 100_000, quantized=quantized, sparse=torch.eye(50).to_sparse(), **more
        )

    kept = noise(torch.int32, (100, 1000))
    store.take({"s": state(kept=kept, gone=torch.ones(50_000))}, "step")
    live = state(kept=kept.clone(), gone=7)
    report = store["step"].restore({"s": live}, reuse=True)
    assert_same(dict(live), dict(state(kept=kept, gone=torch.ones(50_000))))
    assert report.kept_bytes == kept.nbytes


def test_an_optimizer_and_its_moments(store: Store) -> None:
    def stepped(steps: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(300, 300, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(steps):
            model.weight.grad = torch.full_like(model.weight, step + 1.0)
            optimizer.step()
        return model, optimizer

    model, optimizer = stepped(3)
    store.take({"m": model, "o": optimizer}, "step")
    for steps, kept in ((3, 3 * 360_000), (4, 0), (0, 0)):
        live_model, live = stepped(steps)
        report = store["step"].restore({"m": live_model, "o": live}, reuse=True)
        assert_same(dict(live_model.state_dict()), dict(model.state_dict()))
        assert_same(live.state_dict()["state"], optimizer.state_dict()["state"])
        assert report.kept_bytes == kept


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_random_states(tmp_path: Path, codec: str) -> None:
    """Any elements of any tensors differ, or none."""
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)).make()
    store.configure(codec=codec)
    drawn = random.Random(0)
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
    for number in range(4):
        taken = StateDict()
        for name in range(drawn.randrange(1, 6)):
            shape = [drawn.randrange(1, 60) for _ in range(drawn.randrange(1, 3))]
            taken[f"{name}"] = noise(drawn.choice(dtypes), [*shape, drawn.randrange(0, 60)])
        store.take({"s": taken}, f"{number}")
        live = StateDict()
        for name, values in taken.items():
            indices = [drawn.randrange(values.numel()) for _ in range(2)] if values.numel() else []
            live[name] = changed(values, *indices[: drawn.randrange(3)])
        store[f"{number}"].restore({"s": live}, reuse=True)
        assert_same(dict(live), dict(taken))


# --- damage -----------------------------------------------------------------------------------


def test_damage_of_what_is_held_is_not_noticed(store: Store) -> None:
    """The tensor has the bytes that the snapshot names, and nothing is read."""
    model = Tuned()
    store.take({"model": model}, "step")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    stored = raw(model.base[2].weight)[:64]
    for pack in Path(store.uri).glob("casnap-store/packs/**/*"):
        content = pack.read_bytes() if pack.is_file() else b""
        if stored in content:
            pack.write_bytes(content.replace(stored, bytes(64)))
    assert store["step"].restore({"model": model}, reuse=True).kept_bytes
    assert_same(dict(model.state_dict()), expected)
    with pytest.raises(DamagedError, match=r"base\.2\.weight"):
        store["step"].restore({"model": model})
    with torch.no_grad():
        model.base[2].weight[0] += 1
    with pytest.raises(DamagedError, match=r"base\.2\.weight"):
        store["step"].restore({"model": model}, reuse=True)


# --- ranks ------------------------------------------------------------------------------------


def restore_on_ranks(path: str, read_once: bool | None) -> None:
    """Rank 0 holds all, rank 1 the first half of what it has, others nothing."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(1_200_000, dtype=torch.int32).reshape(1200, 1000)
    parts = {
        "rows": (whole.chunk(size)[rank], Shard(0)),
        "columns": (whole.chunk(size, 1)[rank], Shard(1)),
        "all": (whole, Replicate()),
        "plain": (whole, None),
    }

    def state(there: float) -> StateDict:
        values: dict[str, Any] = {}
        for name, (part, placement) in parts.items():
            values[name] = part.clone(memory_format=torch.contiguous_format)
            values[name][int(there * len(part)) :] = -1
            if placement is not None:
                values[name] = DTensor.from_local(
                    values[name], mesh, [placement], shape=whole.shape, stride=(1000, 1)
                )
        return StateDict(values)

    Snapshot.take(path, {"s": state(1.0)}, replicated=["s/plain"])
    live = state([1.0, 0.5, 0.0][rank])
    report = Snapshot(path).restore({"s": live}, reuse=True, read_once=read_once)
    for name, (part, _) in parts.items():
        value = live[name]
        assert torch.equal(value.to_local() if isinstance(value, DTensor) else value, part), name
    # No rank has a cell of whole rows of the columns; a few cells are cut by the edges.
    most = [1.0, 0.5, 0.0][rank] * sum(p.nbytes for n, (p, _) in parts.items() if n != "columns")
    assert most - 6 * CHUNK <= report.kept_bytes <= most


@pytest.mark.parametrize("read_once", [True, False, None])
def test_a_rank_that_has_all_reads_together_with_others(
    world: Worlds, tmp_path: Path, read_once: bool | None
) -> None:
    Store(tmp_path / "run", create=NewStore(chunk_size=CHUNK)).make()
    world(3).run(restore_on_ranks, str(tmp_path / "run" / "step"), read_once)
