"""Ranks at a remote place: rank 0 reads roots and trees for all."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.backends.base import Target
from casnap.backends.remote.scatter import runs
from casnap.errors import CasnapError
from casnap.format.digest import Digest
from casnap.format.records import Place, pack_key
from casnap.runtime.typing import override
from tests.support.far import FarFolder
from tests.support.ranks import Worlds
from tests.support.servers import Bucket

RANKS = 3


def state(step: int) -> dict[str, StateDict]:
    """Return large tensors and many small ones, equal on all ranks, and what each has alone."""
    rank = dist.get_rank()
    many = {f"layer.{i}": torch.full((30,), float(i)) for i in range(1000)}
    large = torch.arange(1 << 20, dtype=torch.float32) + step
    own = {f"own.{i}": torch.full((30,), float(i + rank)) for i in range(200)}
    return {"model": StateDict(many, large=large), "mine": StateDict(own, step=step)}


def requests(store: Store) -> list[tuple[str, str]]:
    """Return what this rank asked since the last call, other than gets of chunks."""
    backend = store._view.repository.backend
    assert isinstance(backend, FarFolder)
    log, backend.log = backend.log, []
    return log


def take_and_restore(path: str, caches: str) -> list[list[tuple[str, str]]]:
    """Take twice and restore on this rank; return its requests of each."""
    if caches:
        os.environ["CASNAP_CACHE_DIR"] = f"{caches}/{dist.get_rank()}"
    store = Store(FarFolder(path), create=NewStore(chunk_size=64 << 10)).make()
    dist.barrier()
    seen = [requests(store)]
    for step in (1, 2):
        store.take(state(step), f"step_{step}")
        seen.append(requests(store))
    # As another job, which knows nothing yet.
    os.environ["CASNAP_CACHE_DIR"] = f"{caches or path}/again-{dist.get_rank() if caches else 0}"
    store = Store(FarFolder(path), create=False)
    snapshot = store["step_1"]
    seen.append(requests(store))
    dist.barrier()
    found = state(5)
    snapshot.restore(found)
    seen.append(requests(store))
    assert torch.equal(found["model"]["large"], state(1)["model"]["large"])
    assert torch.equal(found["mine"]["own.7"], state(1)["mine"]["own.7"])
    return seen


def tree_packs(path: Path) -> set[str]:
    """Return the packs that hold tree nodes or lists of the snapshots of a store."""
    store, digests = Store(path, create=False), set[Digest]()
    repository = store._view.repository
    load = repository.node

    def node(digest: Digest, hint: Place | None = None) -> bytes:
        digests.add(digest)
        return load(digest, hint)

    with mock.patch.object(repository, "node", node):
        for snapshot in store.snapshots():
            contents = snapshot.contents
            for rank in contents.ranks():
                for entry_path, entry in contents.entries(rank):
                    contents.chunks(entry_path, entry)
    view = repository.view()
    return {pack_key(p.pack) for d in digests for p in repository.index.find_all(view, d)}


@pytest.mark.parametrize("hosts", ["one", "three"])
def test_rank_0_reads_roots_and_trees_for_all(world: Worlds, tmp_path: Path, hosts: str) -> None:
    """Another rank asks only for what is its own, and once a host for the index."""
    caches = str(tmp_path / "caches") if hosts == "three" else ""
    seen = world(RANKS).run(take_and_restore, str(tmp_path / "store"), caches)
    trees = tree_packs(tmp_path / "store")
    for _, *takes, _, restoring in seen[1:]:
        for log in takes:
            asked = [(kind, key) for kind, key in log if not key.startswith("index/")]
            assert all(key.startswith("packs") for _, key in asked)
            # A host looks once at what it relies on.
            assert len([kind for kind, _ in asked if kind != "put"]) <= 1
        read = [key for kind, key in restoring if not key.startswith("index/")]
        # None, if the other ranks of its host were faster.
        assert {kind for kind, _ in restoring} <= {"get"}
        assert all(key.startswith("packs/") for key in read)
        # A cache that others write to just then keeps no node, and the rank reads that itself.
        assert 2 * len(trees.intersection(read)) <= len(trees)
    index = [
        [key for log in of_rank for kind, key in log if kind == "get" and key.startswith("index/")]
        for of_rank in seen
    ]
    # Once for the job that takes and once for the one that restores, for all ranks of a host.
    hosts_read = index if hosts == "three" else [[key for keys in index for key in keys]]
    assert all(max(Counter(keys).values()) <= 2 for keys in hosts_read)


def restore_what_is_gone(path: str, caches: str) -> str:
    """Restore on this rank after the packs were deleted; return what was raised."""
    os.environ["CASNAP_CACHE_DIR"] = f"{caches}/{dist.get_rank()}"
    store = Store(FarFolder(path), create=False)
    snapshot = store["step_1"]
    # Rank 0 knows the manifest, so it begins to read the trees below it.
    assert snapshot.contents.manifest.shared
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{path}/casnap-store/packs")
    dist.barrier()
    try:
        snapshot.restore(state(5))
    except CasnapError as e:
        return type(e).__name__
    return ""


def test_trees_that_are_gone(world: Worlds, tmp_path: Path) -> None:
    """Rank 0 leaves them out; every rank says so when it needs them."""
    path = tmp_path / "store"
    world(RANKS).run(take_only, str(path))
    raised = world(RANKS).run(restore_what_is_gone, str(path), str(tmp_path / "caches"))
    assert set(raised) <= {"DamagedError", "RankError"}
    assert "DamagedError" in raised


def take_only(path: str) -> None:
    Store(FarFolder(path), create=NewStore(chunk_size=64 << 10)).take(state(1), "step_1")


def take_by_path(path: str, options: dict[str, Any], caches: str) -> dict[str, int]:
    """Take by a path, as a job's first take on a host a rank; return this rank's requests."""
    os.environ["CASNAP_CACHE_DIR"] = f"{caches}/by-path-{dist.get_rank()}"
    snapshot = Snapshot.take(path, state(1), storage_options=options)
    return dict(snapshot.store._view.repository.backend.requests)


def test_ranks_that_take_by_a_path_only_put(world: Worlds, bucket: Bucket, tmp_path: Path) -> None:
    """Rank 0 makes the store, probes its server, and tells the others all that they would ask."""
    path = f"{bucket.uri}/run/step_1"
    for requests in world(RANKS).run(take_by_path, path, bucket.storage_options, str(tmp_path))[1:]:
        assert set(requests) == {"put"}
    store = Store(f"{bucket.uri}/run", create=False, storage_options=bucket.storage_options)
    assert [snapshot.name for snapshot in store.snapshots()] == ["step_1"]
    assert store.check()


class Ranged(FarFolder):
    """Counts the bytes that a server would send from packs: those between near runs, too."""

    sent = 0

    @override
    def filled(self, key: str, targets: Sequence[Target], use: Callable[[int], None]) -> None:
        if key.startswith("packs/"):
            nbytes = sum(part.stop - part.start for part in runs(targets))
            with self._noting:  # several threads read
                self.sent += nbytes
        super().filled(key, targets, use)


def large(step: int) -> dict[str, StateDict]:
    return {"m": StateDict(w=torch.arange(8 << 20, dtype=torch.float32) + step)}


def bytes_sent(path: str) -> int:
    """Restore on this rank; return how many bytes it was sent."""
    backend, found = Ranged(path), large(2)
    Store(backend, create=False)["s"].restore(found, read_once=True)
    assert torch.equal(found["m"]["w"], large(1)["m"]["w"])
    return backend.sent


def test_each_byte_is_sent_once(world: Worlds, tmp_path: Path) -> None:
    """Ranks of a host take turns in a pack, but not so often that each is sent all of it."""
    Store(FarFolder(tmp_path / "store")).take(large(1), "s")
    sent = world(2).run(bytes_sent, str(tmp_path / "store"))
    assert 1 <= sum(sent) / (32 << 20) < 1.1
