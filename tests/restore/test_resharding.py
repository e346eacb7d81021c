"""A state saved in one sharding is restored in any other, bit by bit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import StateError, UnsupportedTypeError
from casnap.format.region import Region
from casnap.state.flatten import flatten
from casnap.state.sharded import Shards
from tests.support import spreading
from tests.support.bitwise import noise, raw
from tests.support.ranks import Worlds
from tests.support.sharded import LAYOUTS, Training, assert_same, expected, full_state, training
from tests.support.spreading import Way, is_right, spread
from tests.support.sweep import STEP
from tests.support.torches import needs_torch

CHUNK = 64 << 10

# --- a training state, in every layout from every other -------------------------------------------

WORLDS = {4: LAYOUTS, 2: ("fsdp2",), 3: ("fsdp2",)}
if STEP == 1:
    WORLDS[8] = ("fsdp2",)  # `make soak`
ALONE = "plain on 1"
SOURCES = (ALONE, *(f"{layout} on {size}" for size, some in WORLDS.items() for layout in some))

wanted = lru_cache(1)(expected)


def without_steps(module: nn.Module) -> Training:
    """Return the model with an optimizer that has made no step."""
    return Training(module, torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0))


def as_it_is(given: Training) -> dict[str, Any]:
    return {"model": given.model, "optim": given.optimizer}


def save(folder: str, layouts: tuple[str, ...]) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    for layout in layouts:
        inputs = training(layout, 1)
        # Directly, DDP's names have a `module.` that others lack.
        direct = as_it_is(inputs) if layout != "ddp" else {}
        Store(folder).take({"train": inputs, **direct}, f"{layout} on {size}")


@pytest.fixture(scope="module")
def saved(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store of one training state that was saved in each layout."""
    folder = str(tmp_path_factory.mktemp("resharding") / "store")
    Store(folder, create=NewStore(chunk_size=CHUNK)).make()
    save(folder, ("plain",))
    for size, layouts in WORLDS.items():
        world(size).run(save, folder, layouts)
    return folder


def spoil(given: Training) -> None:
    """Overwrite all that a restore should bring back."""
    moments = [t for state in given.optimizer.state.values() for t in state.values()]
    with torch.no_grad():
        for tensor in (*given.model.parameters(), *given.model.buffers(), *moments):
            tensor.fill_(-1.0)


def check(state: Any) -> None:
    """Check that all that this rank holds of a ``Training`` is that of seed 1."""
    whole, seen = wanted(1), set()
    for path, content, _ in kinds_of(state):
        seen.add(path)
        if isinstance(content, Shards):
            for box, part in zip(content.boxes, content.tensors, strict=True):
                assert torch.equal(part, whole[path][box.within(Region.whole(content.shape))]), path
        else:
            assert torch.equal(content, whole[path]), path
    assert seen == whole.keys()


def kinds_of(state: Any) -> list[tuple[str, Any, str]]:
    """Return path, content and type of all tensors of a state."""
    leaves = ((leaf.path.removeprefix("s/"), leaf.content) for leaf in flatten(state, "s"))
    return [
        (path, content, type(getattr(content, "value", content)).__name__)
        for path, content in leaves
        if not isinstance(content, bytes)
    ]


def load(folder: str, layout: str, forms: list[int], sources: Sequence[str] = SOURCES) -> None:
    """Restore the state from each source.

    Args:
        folder: The store.
        layout: The layout that the state is restored into.
        forms: What is restored from the first source: the state as torch's functions give it (0),
            the model and its optimizer themselves (1), or, as after a crash, with an optimizer
            that has no state yet (2). The next source takes the next form, and so on.
        sources: What it is restored from.
    """
    store, given = Store(folder), training(layout, 2)
    kinds = [kind for *_, kind in kinds_of(given.state_dict())]
    where = {name: id(parameter) for name, parameter in given.model.named_parameters()}
    for number, source in enumerate(sources):
        # Directly, DDP's names differ from the others'.
        ddp = layout == "ddp" or source.startswith("ddp")
        for form in {0 if ddp else (number + form) % 3 for form in forms}:
            spoil(given)
            loaded = without_steps(given.model) if form == 2 else given
            state = {"train": given} if form == 0 else as_it_is(loaded)
            assert not store[source].restore(state)
            check(loaded.state_dict())
            assert form != 2 or [kind for *_, kind in kinds_of(loaded.state_dict())] == kinds
    store[ALONE].restore({"train": given})
    assert_same(full_state(given.state_dict()), wanted(1))
    assert {name: id(parameter) for name, parameter in given.model.named_parameters()} == where


TARGETS = [(size, layout) for size, some in WORLDS.items() for layout in some]


@pytest.mark.parametrize(("size", "layout"), TARGETS)
def test_a_training_state_from_every_layout(
    world: Worlds, saved: str, size: int, layout: str
) -> None:
    """One source in one form, both of which differ from target to target."""
    number = TARGETS.index((size, layout)) + 1
    sources = SOURCES[1:]
    world(size).run(load, saved, layout, [number % 3], [sources[number % len(sources)]])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "layout"), TARGETS)
def test_a_training_state_from_every_layout_in_all_forms(
    world: Worlds, saved: str, size: int, layout: str
) -> None:
    world(size).run(load, saved, layout, [0, 1, 2])


def test_a_training_state_in_one_process_without_a_group(saved: str) -> None:
    for source in SOURCES:
        inputs = without_steps(training("plain", 2).model)
        Store(saved)[source].restore({"train": inputs})
        check(inputs.state_dict())
        if not source.startswith("ddp"):
            anew = without_steps(training("plain", 3).model)
            Store(saved)[source].restore(as_it_is(anew))
            check(anew.state_dict())


# --- any tensor, spread in any way, from any other ------------------------------------------------

_numbers = count()
Asked = tuple[int, tuple[int, ...], torch.dtype, Way, Way]
"""Seed, shape, dtype, and how the tensor is spread when taken and when restored."""


def whole_of(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with torch.random.fork_rng():
        # torch.manual_seed would format the stack three times, for devices that are not there.
        torch.default_generator.manual_seed(seed)
        return noise(dtype, shape)


def take_any(path: str, asked: list[Asked]) -> None:
    state = {
        f"{seed}": spread(whole_of(seed, shape, dtype), way) for seed, shape, dtype, way, _ in asked
    }
    Snapshot.take(path, {"state": StateDict(state)})


def restore_any(path: str, asked: list[Asked]) -> list[int]:
    """Return the seeds of what is not as it was."""
    state = StateDict(
        {
            f"{seed}": spread(torch.zeros(shape, dtype=dtype), way)
            for seed, shape, dtype, _, way in asked
        }
    )
    options = dict(state)
    Snapshot(path).restore({"state": state})
    return [
        seed
        for seed, shape, dtype, _, way in asked
        if not is_right(state[f"{seed}"], whole_of(seed, shape, dtype))
        or (way is not None and state[f"{seed}"] is not options[f"{seed}"])
    ]


@st.composite
def spreads(draw: st.DrawFn, before: int, after: int) -> list[Asked]:
    questions = []
    for seed in range(draw(st.integers(1, 32))):
        shape, dtype = draw(spreading.shapes()), draw(st.sampled_from(spreading.DTYPES))
        ways = [spreading.ways(shape, dtype, size) for size in (before, after)]
        questions.append((seed, shape, dtype, *map(draw, ways)))
    return questions


def check_any(world: Worlds, store: Path, before: int, after: int, examples: int) -> None:
    @settings(max_examples=examples, phases=(Phase.explicit, Phase.generate))
    @given(spreads(before, after))
    def as_it_was(asked: list[Asked]) -> None:
        path = f"{store}/{next(_numbers)}"
        world(before).run(take_any, path, asked)
        assert world(after).run(restore_any, path, asked) == [[]] * after
        snapshot = Snapshot(path)
        for seed, shape, dtype, *_ in asked:
            assert raw(snapshot.read_object(f"state/{seed}")) == raw(whole_of(seed, shape, dtype))

    as_it_was()


@pytest.fixture(scope="module")
def any_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("any") / "store"
    Store(folder, create=NewStore(chunk_size=CHUNK)).make()
    return folder


@needs_torch("2.10", "strided shards of an uneven tensor contradict their placements")
@pytest.mark.parametrize(("before", "after"), [(4, 4), (2, 3), (1, 4)])
def test_any_spread_from_any_other(world: Worlds, any_store: Path, before: int, after: int) -> None:
    check_any(world, any_store, before, after, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("after", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("before", [1, 2, 3, 4, 8])
def test_any_spread_from_any_other_long(
    world: Worlds, any_store: Path, before: int, after: int
) -> None:
    check_any(world, any_store, before, after, 25)


# --- other kinds of shards ------------------------------------------------------------------------


def flat_model(value: float) -> nn.Module:
    module = nn.Sequential(nn.Linear(7, 501), nn.Linear(501, 3))
    for number, parameter in enumerate(module.parameters()):
        nn.init.constant_(parameter, value + number)
    return module


class OfFSDP1:
    """A model of FSDP's first version, whose state is made of ShardedTensors."""

    def __init__(self, value: float) -> None:
        self.module = FullyShardedDataParallel(flat_model(value), device_id=torch.device("cpu"))

    def _as_shards(self) -> Any:
        kind = StateDictType.SHARDED_STATE_DICT
        return FullyShardedDataParallel.state_dict_type(
            self.module, kind, ShardedStateDictConfig(_use_dtensor=False)
        )

    def state_dict(self) -> dict[str, Any]:
        with self._as_shards():
            return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._as_shards():
            self.module.load_state_dict(state)

    def values(self) -> list[float]:
        with FullyShardedDataParallel.summon_full_params(self.module):
            return [t.unique().item() for t in self.module.parameters()]


def through_fsdp1(folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch has deprecated it
        store, size = Store(folder), dist.get_world_size()
        if size == 2:
            store.take({"model": OfFSDP1(1.0)}, "fsdp1")
            store.take({"model": fully_shard(flat_model(5.0))}, "fsdp2")
        for name, value in (("fsdp1", 1.0), ("fsdp2", 5.0)):
            inputs = OfFSDP1(9.0)
            assert type(inputs.state_dict()["0.weight"]).__name__ == "ShardedTensor"
            store[name].restore({"model": inputs})
            assert inputs.values() == [value, value + 1, value + 2, value + 3]
            sharded = fully_shard(flat_model(9.0))
            store[name].restore({"model": sharded})
            full = [t.full_tensor().unique().item() for t in sharded.parameters()]
            assert full == inputs.values()


def test_fsdp1_to_fsdp2_and_back(world: Worlds, tmp_path: Path) -> None:
    folder = str(tmp_path / "store")
    for size in (2, 3):
        world(size).run(through_fsdp1, folder)
    plain = flat_model(9.0)
    Store(folder)["fsdp1"].restore({"model": plain})
    assert [t.unique().item() for t in plain.parameters()] == [1, 2, 3, 4]


def table(whole: torch.Tensor, shift: int) -> DTensor:
    """Return a table as torchrec has it: some ranks hold several runs of rows, some none."""
    size, rank = dist.get_world_size(), dist.get_rank()
    edges = [0, 3, 700, 701, 2500, len(whole)]
    owners = [0, 1, 0, size - 1, 1]
    rows = [
        (start, stop)
        for start, stop, owner in zip(edges, edges[1:], owners, strict=False)
        if (owner + shift) % size == rank
    ]
    local = LocalShardsWrapper(
        [whole[start:stop].clone() for start, stop in rows], [(start, 0) for start, _ in rows]
    )
    mesh = init_device_mesh("cpu", (size,))
    return DTensor.from_local(
        local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride(), run_check=False
    )


def through_tables(path: str, takes: bool) -> None:
    whole = whole_of(1, (5000, 16), torch.float32)
    if takes:
        Snapshot.take(path, {"tables": StateDict(t=table(whole, 0))})
    state = StateDict(t=table(torch.zeros(5000, 16), 1))
    Snapshot(path).restore({"tables": state})
    assert is_right(state["t"], whole)
    tables = Tables(table(torch.zeros(5000, 16), 1))
    Snapshot(path).restore({"tables": tables})
    assert is_right(tables.table, whole)


class Tables:
    """A model's tables, of which nobody knows how they are loaded."""

    def __init__(self, table: DTensor) -> None:
        self.table = table

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for tensor in self.table.to_local().local_shards():
            tensor.zero_()
        for tensor, read in zip(
            self.table.to_local().local_shards(), state["t"].to_local().local_shards(), strict=True
        ):
            tensor.copy_(read)


@needs_torch("2.9", "DTensor.from_local takes no columns of several shards")
def test_tables_of_several_shards_a_rank(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "store/s")
    world(4).run(through_tables, path, True)
    world(3).run(through_tables, path, False)
    tensor = Snapshot(path).read_object("tables/t")
    assert raw(tensor) == raw(whole_of(1, (5000, 16), torch.float32))


def refused(path: str, what: str) -> tuple[str, str]:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    value: Any = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    if what == "partial":
        value = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    elif what == "plain on one":
        value = value.redistribute(placements=[Replicate()])
        value = torch.ones(6, 4) if rank else value
    elif what == "another shape":
        value = distribute_tensor(torch.ones(6 + rank, 4), mesh, [Shard(0)], src_data_rank=None)
    elif what in ("not held", "overlapping"):
        rows, start = (2, rank * 3) if what == "not held" else (4, rank * 2)
        value = DTensor.from_local(
            LocalShardsWrapper([torch.ones(rows, 4)], [(start, 0)]),
            mesh,
            [Shard(0)],
            shape=torch.Size((6, 4)),
            stride=(4, 1),
            run_check=False,
        )
    with pytest.raises((StateError, UnsupportedTypeError)) as caught:
        Snapshot.take(path, {"state": StateDict(x=value)})
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("what", "hint"),
    [
        ("partial", "redistribute it first"),
        ("plain on one", "is sharded, but not on rank 1"),
        ("another shape", "all ranks must hold pieces of one tensor"),
        ("not held", "the ranks hold 16 of 24 elements"),
        ("overlapping", "shards overlap only if they are the same"),
    ],
)
def test_what_makes_no_sense_is_refused_on_all_ranks(
    world: Worlds, tmp_path: Path, what: str, hint: str
) -> None:
    for kind, said in world(2).run(refused, str(tmp_path / "store/s"), what):
        assert kind in ("StateError", "UnsupportedTypeError")
        assert "state/x" in said
        assert re.search(hint, said), said
    assert Store(tmp_path / "store").snapshots() == []


# --- the same weights cost nothing on another world -----------------------------------------------


def take_again(folder: str, layout: str, name: str) -> tuple[int, int]:
    stats = Store(folder).take({"train": training(layout, 1)}, name).stats
    return stats.new_bytes, stats.logical_bytes


def test_the_same_weights_are_stored_once_on_all_worlds(world: Worlds, tmp_path: Path) -> None:
    folder = str(tmp_path / "store")
    store = Store(folder)
    trees, first = set(), 0
    for number, (size, layout) in enumerate(
        [(1, "plain"), (2, "ddp"), (4, LAYOUTS[-1]), (3, "fsdp2")]
    ):
        new, logical = world(size).run(take_again, folder, layout, f"{number}")[0]
        first = first or new
        trees.add(store[f"{number}"].contents.manifest.shared["train"])
        assert new >= logical if number == 0 else new <= 0.005 * first, (size, layout, new)
    assert len(trees) == 1
