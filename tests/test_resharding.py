"""Saved in one layout, restored in another: any sharding of any tensor from any other, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import Shard

from casnap import Snapshot, StateDict, Store
from casnap.errors import StateError, UnsupportedTypeError
from casnap.flatten import flatten
from casnap.region import Region
from casnap.sharding import Shards
from tests import spreading
from tests.bitwise import noise, raw
from tests.cli_calls import document, invoke
from tests.ranks import World
from tests.sharded import LAYOUTS, Training, assert_same, expected, full_state, training
from tests.spreading import InRows, OnMesh, Way, is_right, spread

Worlds = Callable[[int], World]

CHUNK = 64 << 10

# --- a training state, in every layout from every other -------------------------------------------

WORLDS = {4: LAYOUTS, 2: ("fsdp2",), 3: ("fsdp2",), 8: ("fsdp2",)}
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
        given = training(layout, 1)
        # Directly, DDP's names have a `module.` that others lack.
        direct = as_it_is(given) if layout != "ddp" else {}
        Store(folder).take({"train": given, **direct}, f"{layout} on {size}")


@pytest.fixture(scope="module")
def saved(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store of one training state that was saved in each layout."""
    folder = str(tmp_path_factory.mktemp("resharding") / "store")
    Store(folder, chunk_size=CHUNK)
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


def load(folder: str, layout: str, every: bool) -> None:
    store, given = Store(folder), training(layout, 2)
    kinds = [kind for *_, kind in kinds_of(given.state_dict())]
    where = {name: id(parameter) for name, parameter in given.model.named_parameters()}
    for number, source in enumerate(SOURCES):
        spoil(given)
        assert not store[source].restore({"train": given})
        check(given.state_dict())
        if layout == "ddp" or source.startswith("ddp"):
            continue
        if every or number % 2:
            spoil(given)
            assert not store[source].restore(as_it_is(given))
            check(given.state_dict())
        if every or not number % 2:
            # As after a crash: the optimizer has no state yet.
            spoil(given)
            anew = without_steps(given.model)
            assert not store[source].restore(as_it_is(anew))
            check(anew.state_dict())
            assert [kind for *_, kind in kinds_of(anew.state_dict())] == kinds
    store[ALONE].restore({"train": given})
    assert_same(full_state(given.state_dict()), wanted(1))
    assert {name: id(parameter) for name, parameter in given.model.named_parameters()} == where


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize(
    ("size", "layout"), [(size, layout) for size, some in WORLDS.items() for layout in some]
)
def test_a_training_state_from_every_layout(
    world: Worlds, saved: str, size: int, layout: str, every: bool
) -> None:
    world(size).run(load, saved, layout, every)


def test_a_training_state_in_one_process_without_a_group(saved: str) -> None:
    for source in SOURCES:
        given = without_steps(training("plain", 2).model)
        Store(saved)[source].restore({"train": given})
        check(given.state_dict())
        if not source.startswith("ddp"):
            anew = without_steps(training("plain", 3).model)
            Store(saved)[source].restore(as_it_is(anew))
            check(anew.state_dict())


def test_a_sharded_snapshot_is_read_without_ranks(saved: str) -> None:
    whole = wanted(1)
    for source in SOURCES:
        snapshot = Store(saved)[source]
        manifest = snapshot.get_manifest()
        for path in ("model/blocks.1.down.weight", "optim/state/embedding.weight/exp_avg"):
            assert torch.equal(snapshot.read_object(f"train/{path}"), whole[path])
            rank = snapshot.world_size - 1
            out = torch.zeros(whole[path].shape, dtype=torch.float64)
            assert snapshot.read_object(f"{rank}/train/{path}", out) is out
            assert torch.equal(out, whole[path].double())
            part = snapshot.read_object(f"train/{path}", index=(slice(5, 90, 7), slice(-3, None)))
            assert torch.equal(part, whole[path][5:90:7, -3:])
            assert manifest[f"{rank}/train/{path}"].shape == tuple(whole[path].shape)
        state = snapshot.get_state_dict_for_key("train")
        assert torch.equal(state["model"]["head.weight"], whole["model/head.weight"])


def test_the_command_shows_sharded_snapshots(saved: str) -> None:
    names = {row["name"]: row for row in document("ls", saved)["snapshots"]}
    assert names.keys() == set(SOURCES)
    boxed, plain = f"{saved}/fsdp_tp on 4", f"{saved}/{ALONE}"
    assert document("show", boxed)["world_size"] == 4
    shown = document("show", boxed, "train/model/blocks.0.down.weight")
    assert (shown["shape"], shown["boxes"]) == ([96, 384], 4)
    assert "boxes" in invoke("show", boxed, "2/train/model/blocks.0.down.weight").stdout
    assert document("diff", plain, f"{saved}/fsdp2 on 3")["changed"] == []
    assert document("check", saved, "--data")


# --- any tensor, spread in any way, from any other ------------------------------------------------

_numbers = count()
Asked = tuple[int, tuple[int, ...], torch.dtype, Way, Way]
"""Seed, shape, dtype, and how the tensor is spread when taken and when restored."""


def whole_of(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
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
    given = dict(state)
    Snapshot(path).restore({"state": state})
    return [
        seed
        for seed, shape, dtype, _, way in asked
        if not is_right(state[f"{seed}"], whole_of(seed, shape, dtype))
        or (way is not None and state[f"{seed}"] is not given[f"{seed}"])
    ]


@st.composite
def spreads(draw: st.DrawFn, before: int, after: int) -> list[Asked]:
    asked = []
    for seed in range(draw(st.integers(1, 24))):
        shape, dtype = draw(spreading.shapes()), draw(st.sampled_from(spreading.DTYPES))
        ways = [spreading.ways(shape, dtype, size) for size in (before, after)]
        asked.append((seed, shape, dtype, *map(draw, ways)))
    return asked


def check_any(world: Worlds, store: Path, before: int, after: int, examples: int) -> None:
    @settings(max_examples=examples)
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
    Store(folder, chunk_size=CHUNK)
    return folder


@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 3), (2, 8), (1, 4)])
def test_any_spread_from_any_other(
    world: Worlds, any_store: Path, before: int, after: int
) -> None:
    check_any(world, any_store, before, after, 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("after", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("before", [1, 2, 3, 4, 8])
def test_any_spread_from_any_other_long(
    world: Worlds, any_store: Path, before: int, after: int
) -> None:
    check_any(world, any_store, before, after, 25)
