"""Shared entries and entries of one rank; groups of ranks; how often each byte is read."""

from __future__ import annotations

import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from casnap import NewStore, RNGState, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.backends.costs import LOCAL
from casnap.storage.collecting.automatic import AutomaticCollector
from tests.support import bitwise
from tests.support.links import forget_links, links
from tests.support.ranks import Worlds
from tests.support.reads import CountingBackend
from tests.support.sharded import training

CHUNK = 64 << 10
PAGE = 4096


def scopes_of(path: str) -> tuple[set[str], list[set[str]]]:
    """Return the paths of shared entries, and those of each rank."""
    contents = Snapshot(path).contents
    manifest = contents.manifest

    def paths(trees: dict[str, bytes]) -> set[str]:
        return {key + inner for key, d in trees.items() for inner, _ in contents.tree(d).items()}

    return paths(manifest.shared), [
        paths(manifest.ranks[str(rank)]) for rank in range(len(manifest.ranks))
    ]


def take_and_restore(path: str, make: Callable[[int], dict[str, Any]], options: Any) -> None:
    """Take what ``make`` makes of the rank, and check that each gets its own back."""
    rank = dist.get_rank()
    Snapshot.take(path, {k: StateDict(v) for k, v in make(rank).items()}, **options)
    found = {key: StateDict() for key in make(rank)}
    report = Snapshot(path).restore(found)
    assert not report
    for key, value in make(rank).items():
        bitwise.assert_same(dict(found[key]), value)


def tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- what is declared -----------------------------------------------------------------------------


def weights_and_step(rank: int) -> dict[str, Any]:
    return {
        "model": {"layers": {"a": tensor(1, 300, 200), "b": tensor(2, 7)}, "head": tensor(3, 99)},
        "progress": {"step": 7, "mine": rank, "tensor": tensor(rank, 100)},
    }


MODEL = {"model", "model/layers", "model/layers/a", "model/layers/b", "model/head"}
EQUAL = MODEL | {"progress", "progress/step"}
DIFFERENT = {"progress/mine", "progress/tensor"}


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({}, DIFFERENT),
        ({"replicated": ["model/layers/[ab]", "**/step"]}, DIFFERENT),
        ({"per_rank": ["model/*"]}, DIFFERENT | MODEL - {"model"}),  # the star crosses slashes
        ({"per_rank": ["*/a"], "replicated": ["model/*"]}, DIFFERENT | {"model/layers/a"}),
        ({"per_rank": ["*"]}, DIFFERENT | EQUAL),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else str(len(value)),
)
def test_globs(world: Worlds, tmp_path: Path, options: dict[str, Any], own: set[str]) -> None:
    path = str(tmp_path / "store/s")
    world(3).run(take_and_restore, path, weights_and_step, options)
    shared, ranks = scopes_of(path)
    assert ranks == [own] * 3
    assert shared == (EQUAL | DIFFERENT) - own


def take_declared_by_some(path: str) -> None:
    rank = dist.get_rank()
    replicated = ["model/**"] if rank != 1 else []
    state = {"same": tensor(1, 200_000), "other": tensor(rank, 50_000), f"only {rank}": 5}
    Snapshot.take(path, {"model": StateDict(state)}, replicated=replicated)
    found = StateDict()
    Snapshot(path).restore({"model": found})
    bitwise.assert_same(dict(found), state)


def test_what_not_all_ranks_declare_or_have_is_known_by_its_content(
    world: Worlds, tmp_path: Path
) -> None:
    path = str(tmp_path / "store/s")
    world(3).run(take_declared_by_some, path)
    shared, ranks = scopes_of(path)
    assert shared == {"model/same"}
    assert ranks == [{"model", "model/other", f"model/only {rank}"} for rank in range(3)]


def test_a_manifest_says_whose_each_entry_is(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "store/s")
    world(2).run(take_and_restore, path, weights_and_step, {})
    manifest = Snapshot(path).get_manifest()
    assert isinstance(manifest, dict)
    own = {path for path in manifest if not manifest.is_global(path)}
    assert own == {f"{rank}/{path}" for rank in range(2) for path in DIFFERENT}
    assert manifest.keys() - own == {f"{rank}/{path}" for rank in range(2) for path in EQUAL}
    with pytest.raises(KeyError, match="2/model"):
        manifest.is_global("2/model")
    assert Snapshot(path).metadata.manifest.is_global("1/model/head")


# --- any value -----------------------------------------------------------------------------------


def quantized(values: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has deprecated them
        return torch.quantize_per_tensor(values, 0.1, 3, torch.qint8)


def everything(rank: int) -> dict[str, Any]:
    """Return kinds of values that are the same on all ranks, and others that are not."""
    tied = tensor(5, 200, 300)
    odd = tensor(rank, 9000)
    return {
        "same": {
            "numpy": np.arange(50_000).reshape(100, 500),
            "names": np.array(["a", "bc"]),
            "quantized": quantized(tensor(1, 30_000)),
            "nothing": torch.zeros(0, 7),
            "scalar": torch.tensor(2.5),
            "float8": tensor(1, 70_000).to(torch.float8_e4m3fn),
            "uint16": torch.arange(40_000, dtype=torch.int32).to(torch.uint16),
            "sparse": torch.eye(300).to_sparse(),
            "tied": [tied, tied, tied.t()],
            "empty": {},
            "big": {"text": "x" * 3_000_000, "ints": list(range(20_000)), "bytes": bytes(200_000)},
        },
        "mixed": {
            "numpy": np.arange(5000) + rank,
            "float8": odd.to(torch.float8_e4m3fn),
            "quantized": quantized(odd),
            "tied": [odd, odd[:5000], odd],
            "nothing": torch.zeros(0, rank),
            "big": f"{rank}" * 1_000_000,
            "keys": OrderedDict((f"{rank + i}", i) for i in range(3)),
            "kind": [] if rank else {},
            "shape": tensor(1, 200 + rank),
            "dtype": torch.ones(500, dtype=torch.float64 if rank else torch.float32),
            "sometimes": tensor(1, 400) if rank == 1 else 5,
            "half": tensor(rank // 2, 40_000),
        },
        "empty": {},
    }


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("options", [{}, {"replicated": ["same/**"]}], ids=str)
def test_any_value_on_several_ranks(world: Worlds, tmp_path: Path, options: Any) -> None:
    path = str(tmp_path / "store/s")
    world(3).run(take_and_restore, path, everything, options)
    shared, ranks = scopes_of(path)
    for own in ranks:
        assert not any(p.partition("/")[0] in ("same", "empty") for p in own)
    assert not any(p.startswith("mixed/") and "tied" not in p for p in shared - {"mixed/keys/2"})
    whole = StateDict()
    Snapshot(path).restore({"same": whole})
    bitwise.assert_same(dict(whole), everything(5)["same"])


def odd_keys(rank: int) -> dict[str, Any]:
    return {
        key: {"own": rank, "shared": torch.arange(3), key: 1}
        for key in ("a\ud800", "a%uD800", "a/b", "a%2Fb", "", "\0", "ü")
    }


def test_keys_that_are_not_unicode_or_look_like_paths(world: Worlds, tmp_path: Path) -> None:
    world(2).run(take_and_restore, str(tmp_path / "a"), odd_keys, {})


KEYS_THAT_ARE_NO_STR = [None, (1, "x"), 0.5, 1j, b"by", torch.float32, True, ("🫠",), 2, "2"]


def take_below_such_keys(path: str) -> None:
    """Take a sharded tensor below each key, in another order of the keys on each rank."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    rows = torch.arange(30.0).reshape(10, 3)
    tensors = [distribute_tensor(rows + i, mesh, [Shard(0)]) for i in range(10)]
    order = slice(None, None, -1 if rank else 1)
    state = dict(list(zip(KEYS_THAT_ARE_NO_STR, tensors, strict=True))[order])
    Snapshot.take(path, {"s": StateDict(d=state)})
    given = {key: torch.zeros_like(value) for key, value in state.items()}
    found = StateDict(d=dict(given))
    assert not Snapshot(path).restore({"s": found})
    for key, value in found["d"].items():
        assert value is given[key]
        assert torch.equal(value.to_local(), state[key].to_local())


def test_shards_below_keys_that_are_no_str_are_joined(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    world(2).run(take_below_such_keys, path)
    whole = Snapshot(path).read_object("0/s/d")
    assert list(whole) == KEYS_THAT_ARE_NO_STR
    for i, value in enumerate(whole.values()):
        assert torch.equal(value, torch.arange(30.0).reshape(10, 3) + i)


def tied(value: float) -> nn.Module:
    """Return a sharded model that uses its embedding as output layer."""
    module = nn.Sequential(nn.Embedding(1031, 40), nn.Linear(40, 1031, bias=False))
    module[1].weight = module[0].weight
    nn.init.constant_(module[0].weight, value)
    return fully_shard(module)


def through_tied(path: str) -> None:
    if dist.get_world_size() == 3:
        Snapshot.take(path, {"model": tied(1.0)})
    given = tied(9.0)
    Snapshot(path).restore({"model": given})
    assert given[0].weight is given[1].weight
    assert given[0].weight.to_local().unique().tolist() == [1.0]


def test_tied_sharded_weights(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "store/s")
    for size in (3, 2):
        world(size).run(through_tied, path)
    assert Snapshot(path).stats.new_bytes < 1.2 * 1031 * 40 * 4


def take_in_any_order(path: str) -> None:
    rank = dist.get_rank()
    keys = ["model", "optim", "rng", "progress"]
    keys = keys[rank:] + keys[:rank]
    torch.manual_seed(rank)
    states = {"model": {"a": tensor(1, 999)}, "optim": {}, "progress": {"n": rank}}
    Snapshot.take(path, {k: RNGState() if k == "rng" else StateDict(states[k]) for k in keys})
    found = {k: StateDict() for k in reversed(keys) if k != "rng"}
    drawn = torch.rand(3)
    torch.manual_seed(99)
    Snapshot(path).restore({"rng": RNGState(), **found})
    assert torch.equal(torch.rand(3), drawn)
    for key, state in found.items():
        bitwise.assert_same(dict(state), states[key])


def test_the_order_of_keys_does_not_matter(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "store/s")
    world(4).run(take_in_any_order, path)
    assert scopes_of(path)[0] == {"model", "model/a", "optim", "progress"}


# --- groups of ranks ----------------------------------------------------------------------------


def in_groups(folder: str) -> tuple[str, int]:
    """Let ranks 0 and 2 take and restore, and ranks 1 and 3 at the same time, in one store."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, name = groups[rank % 2], f"{folder}/{rank % 2}"
    dist.barrier()
    for step in range(3):
        state = {"model": StateDict(w=tensor(step, 40_000)), "own": StateDict(r=rank)}
        Snapshot.take(f"{name}/{step}", state, pg=mine)
        found = {"model": StateDict(w=torch.zeros(40_000)), "own": StateDict()}
        snapshot = Snapshot(f"{name}/{step}", pg=mine)
        snapshot.restore(found)
        assert torch.equal(found["model"]["w"], tensor(step, 40_000))
        assert found["own"]["r"] == rank
    return snapshot.commit_id, snapshot.world_size


def test_two_groups_take_at_once_into_one_store(world: Worlds, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    Store(folder).make()
    results = world(4).run(in_groups, str(folder))
    assert results[0] == results[2] != results[1] == results[3]
    assert {s.name for s in Store(folder).snapshots()} == {f"{g}/{i}" for g in "01" for i in "012"}
    assert Snapshot(folder / "1/0").read_object("1/own/r") == 3


def one_by_one(path: str) -> Any:
    """Restore what all ranks took together, in groups of one rank, and in one without rank 0."""
    rank = dist.get_rank()
    Snapshot.take(path, {"model": StateDict(w=tensor(1, 30_000)), "own": StateDict(r=rank)})
    groups = [dist.new_group([r]) for r in range(3)]
    found = StateDict()
    Snapshot(path, pg=groups[rank]).restore({"model": found})
    assert torch.equal(found["w"], tensor(1, 30_000))
    two = dist.new_group([1, 2])
    if rank == 0:
        return None
    own = StateDict()
    report = Snapshot(path, pg=two).restore({"own": own})
    return own["r"], report.left_behind


def test_a_rank_is_counted_within_its_group(world: Worlds, tmp_path: Path) -> None:
    results = world(3).run(one_by_one, str(tmp_path / "store/s"))
    assert results == [None, (0, ["2/own"]), (1, ["2/own"])]


# --- how much room is made --------------------------------------------------------------------


def count_room(path: str) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    counts = list[int]()

    def count(_: object, __: object, count_bytes: Callable[[], int]) -> None:
        counts.append(count_bytes())

    sharded = distribute_tensor(tensor(1, 300, 1000), mesh, [Shard(0)])
    state = {"model": StateDict(sharded=sharded, same=tensor(2, 400, 1000))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutomaticCollector, "make_room", count)
        Snapshot.take(path, state, replicated=["model/same"])
    # The work is divided by chunks.
    assert [abs(n - 700 * 1000 * 4) <= 2 * CHUNK for n in counts] == [True] * (rank == 0)


def test_room_is_made_for_what_ranks_share_once(tmp_path: Path, world: Worlds) -> None:
    Store(tmp_path, create=NewStore(chunk_size=CHUNK)).make()
    world(2).run(count_room, str(tmp_path / "snapshot"))


# --- each byte is read once -----------------------------------------------------------------------


def save(folder: str, layout: str) -> None:
    Store(folder).take({"train": training(layout, 1)}, layout)


def reads_of(
    folder: str, name: str, layout: str, read_once: bool | None, hosts: bool = False
) -> list[tuple[str, int, int]]:
    backend = CountingBackend(LocalBackend(Path(folder)))
    snapshot, given = Store(backend)[name], training(layout, 2)
    snapshot.contents.manifest  # noqa: B018 - to open a snapshot is not to restore it
    backend.reads.clear()
    with pytest.MonkeyPatch.context() as patch:
        # Over a gap of one of these small chunks a rank would read what another one reads.
        patch.setattr("casnap.backends.base.LOCAL", LOCAL._replace(gap=0))
        if hosts:
            # As if each rank were on a host of its own.
            patch.setattr("casnap.restore.restore.boot_id", lambda: str(os.getpid()))
        snapshot.restore({"train": given}, read_once=read_once)
    return backend.reads


@pytest.mark.parametrize(
    ("before", "after", "size"),
    [
        ("ddp", "ddp", 2),
        ("plain", "fsdp2", 4),
        pytest.param("fsdp2", "plain", 3, marks=pytest.mark.slow),
        pytest.param("fsdp2", "fsdp2", 3, marks=pytest.mark.slow),
    ],
)
def test_each_byte_is_read_once(
    world: Worlds, tmp_path: Path, before: str, after: str, size: int
) -> None:
    folder = str(tmp_path / "store")
    Store(folder, create=NewStore(chunk_size=CHUNK)).make()
    world(size if before != "plain" else 1).run(save, folder, before)
    stored = Store(folder)[before].stats.new_bytes
    by_rank = world(size).run(reads_of, folder, before, after, True)
    chunks = sorted(read for reads in by_rank for read in reads if read[2] >= CHUNK)
    for (key, offset, n), (next_key, next_offset, _) in pairwise(chunks):
        # Direct reads are of whole pages.
        assert key != next_key or offset + n <= next_offset + PAGE, "read twice"
    total = sum(n for reads in by_rank for *_, n in reads)
    assert 0.9 * stored < total < 1.1 * stored
    # One rank reads all of a pack below 16 MiB; how much each rank wrote is chance.
    largest = max(
        p.stat().st_size for p in Path(folder, "casnap-store/packs").rglob("*") if p.is_file()
    )
    most = max(sum(n for *_, n in reads) for reads in by_rank)
    assert most < 1.5 * max(stored / size, largest)

    # Otherwise each rank that holds all of the state reads all of it. So it is on one host, where
    # the state is small.
    for read_once in (False, None):
        by_rank = world(size).run(reads_of, folder, before, after, read_once)
        if after in ("plain", "ddp"):
            assert all(sum(n for *_, n in reads) > 0.9 * stored for reads in by_rank)
    by_rank = world(size).run(reads_of, folder, before, after, None, True)
    assert sum(n for reads in by_rank for *_, n in reads) < 1.1 * stored


ROWS = 3 * 4 * CHUNK // 4
"""So many floats are four chunks for each of three ranks."""


def read_by_default(folder: str, case: str) -> tuple[int, bool]:
    """Restore; return how many bytes this rank has read, and whether it shared memory for that."""
    forget_links()
    whole, target = torch.arange(float(ROWS)), torch.zeros(ROWS)
    if case == "shards":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        target = distribute_tensor(target, mesh, [Shard(0)], src_data_rank=None)
        whole = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    # The device and inode of a copy are others.
    of_copy = case == "copies" and dist.get_rank() == 1
    backend = CountingBackend(LocalBackend(Path(f"{folder}-copy" if of_copy else folder)))
    with pytest.MonkeyPatch.context() as patch:
        if case not in ("little", "copies"):
            patch.setattr("casnap.restore.shared_reads._WORTH_SHARING", target.nbytes)
        if case == "no memory" and dist.get_rank() == 1:
            patch.delattr(os, "memfd_create")
        Store(backend)["s"].restore({"m": StateDict(w=target)})
    shared = any(link.shared is not None for link in links())
    forget_links()
    assert torch.equal(target, whole)
    return sum(n for key, _, n in backend.reads if key.startswith("packs/")), shared


def test_ranks_of_one_host_read_once_what_many_want_if_all_share_memory(
    world: Worlds, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    Store(store, create=NewStore(chunk_size=CHUNK)).take(
        {"m": StateDict(w=torch.arange(float(ROWS)))}, "s"
    )
    shutil.copytree(store, tmp_path / "store-copy")
    for case, size, read, shared in [
        ("all", 4, 1, True),
        ("shards", 4, 1, False),
        ("no memory", 4, 4, True),
        ("little", 4, 4, False),
        ("copies", 3, 1, True),
        # Few ranks are faster if each reads for itself.
        ("all", 3, 3, False),
    ]:
        results = world(size).run(read_by_default, str(store), case)
        assert 1 <= sum(n for n, _ in results) / (4 * ROWS * read) < 1.1, (case, size)
        assert [tried for _, tried in results] == [shared] * size, (case, size)
