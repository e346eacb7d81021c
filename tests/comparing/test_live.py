"""``Snapshot.compare`` finds each difference of a live state, names it, and changes nothing."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from casnap import Diff, NewStore, RNGState, Snapshot, StateDict, Store
from casnap.errors import DamagedError
from tests.support.bitwise import noise
from tests.support.ranks import Worlds
from tests.support.reads import counted
from tests.support.states import states

CHUNK = 64 << 10


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)).make()


def found(diff: Diff) -> dict[str, tuple[str, str]]:
    return {change.path: (change.kind, change.role) for change in diff.changes}


class Run:
    """A small training, whose model has buffers, ties and a module that draws in state_dict()."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 300))
        self.model[2].weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.progress = StateDict(step=0)
        self.shuffle = torch.Generator().manual_seed(3)

    def app_state(self) -> dict[str, Any]:
        return {**vars(self), "rng": RNGState()}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 300)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress["step"] += 1


def test_a_training_is_equal_until_it_goes_on(store: Store) -> None:
    run = Run()
    run.step()
    store.take(run.app_state(), "step_1")
    snapshot, backend = counted(store["step_1"])
    diff = snapshot.compare(run.app_state())
    assert diff.equal, diff
    assert not diff.left_out
    assert str(diff) == "no difference"
    assert not any(key.startswith("packs/") for key, _, n in backend.reads if n > 20_000)
    before, random = run.model[0].weight.detach().clone(), torch.get_rng_state()
    run.step()
    weight = run.model[0].weight.detach().clone()
    diff = snapshot.compare(run.app_state())
    assert diff
    assert torch.equal(run.model[0].weight, weight), "it filled a tensor"
    roles = found(diff)
    assert roles["model/0.weight"] == roles["model/2.weight"] == ("changed", "weights")
    assert roles["model/1.num_batches_tracked"] == ("changed", "counters")
    assert roles["optimizer/state/0/exp_avg"] == ("changed", "moments")
    assert roles["scheduler/last_epoch"] == ("changed", "scheduler")
    assert roles["optimizer/param_groups/0/lr"] == ("changed", "scheduler")
    assert roles["progress/step"] == ("changed", "counters")
    assert roles["rng/torch"] == ("changed", "generators")
    assert "shuffle/torch" not in roles
    elements = {change.path: change.elements for change in diff.changes}["model/0.weight"]
    assert elements is not None
    assert elements.total == 90_000
    assert elements.differing == int((before != weight).sum())
    apart = (before.double() - weight.double()).abs()
    assert elements.largest == float(apart.max())
    assert "progress/step  int  1 → 2" in str(diff)
    assert not torch.equal(torch.get_rng_state(), random)
    store["step_1"].restore(run.app_state())
    assert snapshot.compare(run.app_state()).equal


def test_a_new_optimizer_lacks_the_moments(store: Store) -> None:
    run, new = Run(), Run()
    run.step()
    snapshot = store.take(run.app_state(), "step_1")
    new.model.load_state_dict(run.model.state_dict())
    diff = snapshot.compare({"model": new.model, "optimizer": new.optimizer})
    roles = found(diff)
    assert roles["optimizer/state/0/exp_avg"] == ("removed", "moments")
    assert {kind for kind, _ in roles.values()} == {"removed", "changed"}
    lacking = ["progress", "rng", "scheduler", "shuffle"]
    assert diff.left_out == [f"{key} (the app state lacks this key)" for key in lacking]
    assert "not compared: rng" in str(diff)
    diff = snapshot.compare({"model": run.model, "more": StateDict(x=1)})
    assert found(diff) == {"more": ("added", "values"), "more/x": ("added", "values")}


def test_to_compare_draws_no_random_number(store: Store) -> None:
    class Drawing(StateDict):
        def state_dict(self) -> dict[str, Any]:
            torch.rand(1)
            return super().state_dict()

    state = {"drawing": Drawing(x=1), "rng": RNGState()}
    snapshot = store.take(state, "step")
    before = torch.get_rng_state()
    assert snapshot.compare(state).equal
    assert torch.equal(torch.get_rng_state(), before)


@given(state=states)
def test_any_state_is_equal_to_itself(state: Any) -> None:
    snapshot = Store("memory://compared").take({"s": StateDict(x=state)}, "step", overwrite=True)
    assert snapshot.compare({"s": StateDict(x=state)}).equal


# --- tensors --------------------------------------------------------------------------------------


def compared(store: Store, taken: Any, live: Any) -> Diff:
    snapshot = store.take({"s": StateDict(x=taken)}, "step", overwrite=True)
    return snapshot.compare({"s": StateDict(x=live)})


DTYPES = [torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool, torch.uint8]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (3,), (300, 301)])
def test_each_element_that_differs_counts(
    store: Store, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    taken = torch.ones(shape).to(dtype)
    live = taken.clone()
    live.view(-1)[-1] = 0 if dtype == torch.bool else 3
    (change,) = compared(store, taken, live).changes
    assert change.elements is not None
    assert (change.elements.differing, change.elements.total) == (1, taken.numel())
    assert change.elements.largest == (1.0 if dtype == torch.bool else 2.0)
    assert change.changed_bytes == taken.itemsize
    assert compared(store, taken, taken.clone()).equal


def test_what_has_no_difference_in_numbers(store: Store) -> None:
    nan = float("nan")
    taken = torch.tensor([0.0, 1.0, inf, -inf, nan, 2.0]).repeat(100)
    live = torch.tensor([-0.0, nan, inf, inf, nan, 3.0]).repeat(100)
    (change,) = compared(store, taken, live).changes
    elements = change.elements
    assert elements is not None
    assert (elements.differing, elements.nan, elements.largest) == (400, 100, inf)
    assert elements.largest_relative == inf
    (change,) = compared(store, torch.zeros(100), -torch.zeros(100)).changes
    assert change.elements is not None
    assert (change.elements.differing, change.elements.largest) == (100, 0.0)


@pytest.mark.parametrize("typestr", ["<f4", ">i8", "<c16", "|S3", "<U2"])
def test_arrays_of_numpy(store: Store, typestr: str) -> None:
    taken = np.array([b"a", b"b"] if typestr[1] == "S" else [1, 2]).astype(typestr).repeat(20_000)
    live = taken.copy()
    live[7] = live[-1]
    (change,) = compared(store, taken, live).changes
    assert change.elements is not None
    assert (change.elements.differing, change.elements.total) == (1, 40_000)
    assert change.elements.largest == (0.0 if typestr[1] in "SU" else 1.0)


def test_memory_of_any_layout(store: Store) -> None:
    taken = noise(torch.float32, (300, 1000))
    for live in (taken.t().contiguous().t(), taken.repeat(1, 2)[:, :1000]):
        assert compared(store, taken, live).equal
    live[3, 5] = 7
    (change,) = compared(store, taken, live).changes
    assert change.elements is not None
    assert change.elements.differing == 1


def test_other_shapes_and_dtypes(store: Store) -> None:
    taken = torch.ones(100)
    for live in (torch.ones(10, 10), torch.ones(100, dtype=torch.float64), "text", [1], 5):
        changes = [c for c in compared(store, taken, live).changes if c.path == "s/x"]
        assert [(c.kind, c.elements) for c in changes] == [("changed", None)]
    assert changes[0].types == "float32 [100] → int"
    (change,) = compared(store, "x" * 200_000, "x" * 199_999 + "y").changes
    assert (change.kind, change.difference) == ("changed", "")


def test_only_chunks_that_differ_are_read(store: Store) -> None:
    taken = noise(torch.float32, (1000, 1000))  # cells of 16 rows
    live = taken.clone()
    live[500] += 1
    store.take({"s": StateDict(x=taken)}, "step")
    snapshot, backend = counted(store["step"])
    assert snapshot.compare({"s": StateDict(x=live)})
    assert 64_000 <= backend.nbytes < 2 * CHUNK


def test_damage_of_what_differs_is_an_error(store: Store) -> None:
    taken = noise(torch.float32, (100, 1000))
    snapshot = store.take({"s": StateDict(x=taken)}, "step")
    for pack in Path(store.uri).glob("casnap-store/packs/**/*"):
        if pack.is_file():
            content = bytearray(pack.read_bytes())
            content[5000:6000] = bytes(1000)
            pack.write_bytes(content)
    assert snapshot.compare({"s": StateDict(x=taken.clone())}).equal
    with pytest.raises(DamagedError, match="s/x"):
        snapshot.compare({"s": StateDict(x=taken + 1)})


# --- ranks ----------------------------------------------------------------------------------------


def sharded(values: torch.Tensor, placements: list[Any], number: int = 0) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = DTensor.from_local(values, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, placements)


def taken_by_ranks(path: Path, shard: int) -> list[Any]:
    rank, values = dist.get_rank(), torch.arange(90_000.0).view(300, 300)
    state = {
        "s": StateDict(x=sharded(values, [Shard(shard)]), own=rank, same=torch.ones(100)),
        "rng": RNGState(),
    }
    torch.manual_seed(rank)
    snapshot = Store(path / "store").take(state, "step")
    results: list[Any] = [snapshot.compare(state).equal]
    values[299, 299] = 0  # the last rank holds it
    state["s"]["x"] = sharded(values, [Shard(shard)])
    state["s"]["own"] += rank
    diff = snapshot.compare(state)
    return [*results, {c.path: c.elements and c.elements.total for c in diff.changes}]


@pytest.mark.parametrize("shard", [0, 1])
def test_each_rank_compares_its_own(world: Worlds, tmp_path: Path, shard: int) -> None:
    first, last = world(2).run(taken_by_ranks, tmp_path, shard)
    assert first == [True, {}]
    assert last == [True, {"s/x": 45_000, "s/own": 1}]
    # Of another world, a rank sees what is global.
    whole = StateDict(x=torch.arange(90_000.0).view(300, 300), own=0, same=torch.ones(100))
    diff = Snapshot(tmp_path / "store" / "step").compare({"s": whole})
    assert diff.equal, diff


def compared_by_ranks(path: Path) -> tuple[list[str], list[str]]:
    values = torch.arange(90_000.0).view(300, 300)
    state = {"s": StateDict(x=sharded(values, [Shard(0)])), "own": StateDict(x=dist.get_rank())}
    diff = Snapshot(path / "store" / "step").compare(state)
    return [change.path for change in diff.changes], diff.left_out


def test_ranks_that_the_take_did_not_have(world: Worlds, tmp_path: Path) -> None:
    values = torch.arange(90_000.0).view(300, 300)
    state = {"s": StateDict(x=values), "own": RNGState()}
    Store(tmp_path / "store").take(state, "step")
    first, last = world(2).run(compared_by_ranks, tmp_path)
    assert last == ([], ["own (kept for rank 0 alone; this is rank 1)"])
    assert "s/x" not in first[0]
