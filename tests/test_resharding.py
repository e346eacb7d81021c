"""Saved in one layout, restored in another: any sharding of any tensor from any other, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casnap import Snapshot, Store
from casnap.flatten import flatten
from casnap.region import Region
from casnap.sharding import Shards
from tests.cli_calls import document, invoke
from tests.ranks import World
from tests.sharded import LAYOUTS, Training, assert_same, expected, full_state, model, training

Worlds = Callable[[int], World]

CHUNK = 64 << 10
ALONE = "plain on 1"
WORLD_SIZES = {4: LAYOUTS, 2: ("fsdp2",), 3: ("fsdp2", "ddp"), 8: ("fsdp2", "fsdp_tp")}
SOURCES = (ALONE, *(f"{layout} on {size}" for size, some in WORLD_SIZES.items() for layout in some))


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)


def as_it_is(given: Training) -> dict[str, Any]:
    return {"model": given.model, "optim": given.optimizer}


def save(folder: str, layouts: tuple[str, ...]) -> None:
    store = Store(folder)
    for layout in layouts:
        given = training(layout, 1)
        state = {"train": given, **(as_it_is(given) if layout != "ddp" else {})}
        store.take(state, f"{layout} on {dist.get_world_size() if dist.is_initialized() else 1}")


@pytest.fixture(scope="module")
def saved(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with one training state, saved in each layout."""
    folder = tmp_path_factory.mktemp("resharding") / "store"
    Store(folder, chunk_size=CHUNK)
    save(str(folder), ("plain",))
    for size, layouts in WORLD_SIZES.items():
        world(size).run(save, str(folder), layouts)
    return folder


def spoil(given: Training) -> None:
    """Overwrite all that a restore should bring back."""
    moments = [t for state in given.optimizer.state.values() for t in state.values()]
    with torch.no_grad():
        for tensor in (*given.model.parameters(), *given.model.buffers(), *moments):
            tensor.fill_(-1.0)


def check(state: Any) -> None:
    """Check that all that this rank holds of a ``Training`` is that of seed 1."""
    wanted, seen = expected(1), set()
    for leaf in flatten(state, "s"):
        path, content = leaf.path.removeprefix("s/"), leaf.content
        if isinstance(content, bytes):
            continue
        seen.add(path)
        whole = wanted[path]
        if isinstance(content, Shards):
            for box, part in zip(content.boxes, content.tensors, strict=True):
                assert torch.equal(part, whole[box.within(Region.whole(content.shape))]), path
        else:
            assert torch.equal(content, whole), path
    assert seen == wanted.keys()


def load(folder: str, layout: str) -> None:
    store = Store(folder)
    given = training(layout, 2)
    before = {path: t.data_ptr() for path, t in local_tensors(given).items()}
    for source in SOURCES:
        spoil(given)
        assert not store[source].restore({"train": given})
        check(given.state_dict())
    assert_same(full_state(given.state_dict()), expected(1))
    assert before.keys() == local_tensors(given).keys()
    if layout == "ddp":
        return
    for source in SOURCES:
        if source.startswith("ddp"):
            continue
        spoil(given)
        assert not store[source].restore(as_it_is(given))
        check(given.state_dict())
        # As after a crash: the optimizer has made no step.
        fresh = model(layout, 2)
        anew = Training(fresh, optimizer_of(fresh))
        assert not store[source].restore(as_it_is(anew))
        check(anew.state_dict())
        kinds = {p: type(t) for p, t in local_tensors(given).items()}
        assert kinds == {p: type(t) for p, t in local_tensors(anew).items()}


def local_tensors(given: Training) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": tensor
        for name, parameter in given.model.named_parameters()
        for key, tensor in given.optimizer.state[parameter].items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_from_every_other(world: Worlds, saved: Path, layout: str) -> None:
    world(4).run(load, str(saved), layout)
