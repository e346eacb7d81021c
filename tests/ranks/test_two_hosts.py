"""Takes and restores on two hosts, whose line is cut or one of which dies."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from casnap import NewStore, RNGState, StateDict, Stateful, Store
from casnap.errors import RankError
from tests.support.faults import CHUNK, assert_no_orphans
from tests.support.hosts import two_hosts, yard_of
from tests.support.yard import SOON, Seen, watch

RANKS = 4
SHORT, LONG = 3.0, 60.0
ROWS, COLUMNS = 501, 402  # no shard edge is a cell edge
PATHS = ("0/model/w", "0/model/v", "0/model/same")


def numbers(step: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + seed)
    return torch.randn((ROWS, COLUMNS), generator=generator)


@cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def sharded(whole: torch.Tensor, shape: tuple[int, ...], *placements: Placement) -> DTensor:
    """Return this rank's part of a tensor, on a mesh of all ranks."""
    mesh = mesh_of(shape)
    own = whole
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            own = own.chunk(shape[dim], placement.dim)[mesh.get_local_rank(dim)]
    return DTensor.from_local(
        own.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def app_state(step: int, *, as_taken: bool = True) -> dict[str, Stateful]:
    """Return what this rank holds at a step, sharded as when it is taken, or otherwise."""
    w, v, same = (numbers(step, seed) for seed in range(3))
    first = sharded(w, (4,), Shard(0)) if as_taken else sharded(w, (2, 2), Replicate(), Shard(1))
    second = sharded(v, (4,), Shard(1)) if as_taken else sharded(v, (2, 2), Shard(0), Shard(1))
    rank = dist.get_rank()
    return {
        "model": StateDict(w=first, v=second, same=same),
        "mine": StateDict(x=torch.full((50_000,), float(10 * step + rank)), step=step),
        "rng": RNGState(),
    }


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def assert_holds(state: dict[str, Any], step: int, *, as_taken: bool = True) -> None:
    expected: dict[str, Any] = app_state(step, as_taken=as_taken)
    for name in ("w", "v", "same"):
        assert torch.equal(local(state["model"][name]), local(expected["model"][name])), name
    assert torch.equal(state["mine"]["x"], expected["mine"]["x"])
    assert state["mine"]["step"] == step


def assert_store(path: Path, steps: set[int]) -> None:
    """Check that a store holds just the snapshots of some steps, whole, and can free the rest."""
    store = Store(path, create=False)
    assert {snapshot.name for snapshot in store.snapshots()} == {f"step_{step}" for step in steps}
    for step in steps:
        for seed, where in enumerate(PATHS):
            assert torch.equal(store[f"step_{step}"].read_object(where), numbers(step, seed))
        for rank in range(RANKS):
            x = store[f"step_{step}"].read_object(f"{rank}/mine/x")
            assert torch.equal(x, torch.full((50_000,), float(10 * step + rank)))
    store.gc(grace=0)
    assert_no_orphans(path)
    assert store.check(data=True).ok


# --- nothing fails ------------------------------------------------------------------------------


def take_and_restore(path: str) -> tuple[str, int, list[str]]:
    """Take twice, restore in all ways; return this host, what it shares, what it keeps."""
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    store.take(app_state(1), "step_1")
    shared = Path("/proc/self/maps").read_text().count("/memfd:casnap-")
    assert store.async_take(app_state(2), "step_2").wait().name == "step_2"
    for read_once, as_taken in ((True, False), (False, True)):
        state = app_state(0, as_taken=as_taken)
        store["step_1"].restore(state, read_once=read_once)
        assert_holds(state, 1, as_taken=as_taken)
    state = app_state(0)
    store["step_2"].restore(state)
    assert_holds(state, 2)
    dist.barrier()
    return os.uname().nodename, shared, os.listdir("/dev/shm")  # noqa: PTH208


def test_ranks_of_two_hosts_take_and_restore(disk_path: Path) -> None:
    with two_hosts(disk_path, __name__) as hosts:
        hosts.start(take_and_restore, str(disk_path / "store"))
        outcomes = hosts.outcomes()
    # Each rank shares memory with the other rank of its host.
    assert outcomes == [(f"host-{number}", 2, []) for number in (0, 0, 1, 1)]
    assert_store(disk_path / "store", {1, 2})


# --- a fault in the middle ----------------------------------------------------------------------


def do(verb: str, store: Store, step: int, timeout: float, progress: Any = None) -> None:
    """Take a step, or restore the first one."""
    how: dict[str, Any] = {"timeout": timeout, "progress": progress}
    if verb == "take":
        store.take(app_state(step), f"step_{step}", **how)
    elif verb == "async_take":
        store.async_take(app_state(step), f"step_{step}", **how).wait()
    else:
        state: dict[str, Any] = app_state(0)
        try:
            store["step_1"].restore(state, read_once=True, **how)
        except RankError:
            assert state["mine"]["step"] == 0, "a part of the state was loaded"
            raise
        assert_holds(state, 1)


def suffer(path: str, folder: str, verb: str, timeout: float, striking: int) -> Seen:
    """Do something, in the middle of which a rank has the test strike."""
    store, yard = Store(path, create=NewStore(chunk_size=CHUNK)), yard_of(folder)
    store.take(app_state(1), "step_1")

    def strike(what: str, done: int, total: int) -> None:
        if 0 < done < total and not yard.text("reached"):
            yard.leave("reached", f"{done} of {total}")
            yard.wait("struck")

    progress = strike if dist.get_rank() == striking else None
    seen = watch(lambda: do(verb, store, 2, timeout, progress))
    # A rank that ends sooner would look like one that died.
    yard.leave(f"seen-{dist.get_rank()}")
    yard.wait("all have seen")
    return seen


def go_on(path: str) -> None:
    store = Store(path, create=False)
    store.take(app_state(3), "step_3", timeout=LONG)
    do("restore", store, 1, LONG)
    dist.barrier()


def suffer_and_go_on(path: str, folder: str, verb: str, timeout: float, striking: int) -> Seen:
    seen = suffer(path, folder, verb, timeout, striking)
    go_on(path)
    return seen


@pytest.mark.parametrize(
    ("verb", "striking", "end"),
    [pytest.param("take", 3, 0, marks=pytest.mark.slow), ("restore", 0, 1)],
)
def test_the_line_between_the_hosts_is_cut(
    disk_path: Path, verb: str, striking: int, end: int
) -> None:
    """No rank hears of the other host any more, and those of host 1 cannot ask the store."""
    path = disk_path / "store"
    with two_hosts(disk_path, __name__) as hosts:
        hosts.start(suffer_and_go_on, str(path), str(disk_path), verb, SHORT, striking)
        hosts.wait("reached")
        hosts.cut(end)
        hosts.tell("struck")
        for rank in range(RANKS):
            hosts.wait(f"seen-{rank}")
        hosts.mend(end)
        hosts.tell("all have seen")
        outcomes = hosts.outcomes()
    for rank, seen in enumerate(outcomes):
        assert seen.error == "RankError", seen
        assert seen.ranks == ((2, 3) if rank < 2 else (0, 1)), seen
        assert ("ranks 2 and 3 did not answer" if rank < 2 else "ranks 0 and 1") in seen.text
        assert seen.seconds < 3 * SHORT + SOON
    assert_store(path, {1, 3})


@pytest.mark.parametrize(
    ("verb", "killed"),
    [
        ("take", 1),
        pytest.param("async_take", 0, marks=pytest.mark.slow),
        pytest.param("restore", 0, marks=pytest.mark.slow),
    ],
)
def test_a_host_dies(disk_path: Path, verb: str, killed: int) -> None:
    gone, left = [((0, 1), (2, 3)), ((2, 3), (0, 1))][killed]
    path = disk_path / "store"
    with two_hosts(disk_path / "first", __name__) as hosts:
        hosts.start(suffer, str(path), str(disk_path / "first"), verb, LONG, 2)
        hosts.wait("reached")
        hosts.kill(killed)
        hosts.tell("struck")
        for rank in left:
            hosts.wait(f"seen-{rank}")
        hosts.tell("all have seen")
        outcomes = hosts.outcomes()
    assert [outcomes[rank] for rank in gone] == [None, None]
    for rank in left:
        seen = outcomes[rank]
        assert seen.error == "RankError", seen
        assert seen.ranks == gone, seen
        assert seen.seconds < LONG / 2
    with two_hosts(disk_path / "second", __name__) as hosts:
        hosts.start(go_on, str(path))
        hosts.outcomes()
    assert_store(path, {1, 3})
