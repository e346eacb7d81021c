"""Takes by several ranks: one snapshot, each byte stored once, entries shared or per rank."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import casnap.storage.writing.handovers
import casnap.storage.writing.session
import casnap.take.ranks.exchange
from casnap import NewStore, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import (
    DamagedError,
    RankError,
    SnapshotExistsError,
    StateError,
    StorageFullError,
)
from casnap.format.codec import Codec
from casnap.ranks.group import Group
from casnap.runtime import buffers
from casnap.take.commit import TakeCommit
from tests.support.damaged import damage_everywhere
from tests.support.faults import assert_no_orphans
from tests.support.faulty import Call, Fault, FaultyBackend

MIB = 1 << 20


def weights(seed: int, mib: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(mib * MIB // 8, 2, generator=generator),
        "b": torch.randn(1000, generator=generator),
        "c": torch.randn(700, 513, generator=generator),
    }


def take_equal(path: str, options: dict[str, Any]) -> dict[str, Any]:
    snapshot = Snapshot.take(
        path, {"model": StateDict(weights(1)), "step": StateDict(n=7, name="run")}, **options
    )
    return {"commit": snapshot.commit_id, "stats": snapshot.stats, "world": snapshot.world_size}


@pytest.mark.parametrize(
    ("size", "options"),
    [(4, {}), (2, {"replicated": ["**"]})],
)
def test_equal_bytes_are_stored_once(world, tmp_path, size, options):
    taken = world(size).run(take_equal, str(tmp_path / "many/x"), options)
    assert len({t["commit"] for t in taken}) == 1
    assert taken[0]["world"] == size

    Store(tmp_path / "one").make()
    alone = Snapshot.take(tmp_path / "one/x", {"model": StateDict(weights(1))})
    assert alone.stats.new_bytes == pytest.approx(taken[0]["stats"].new_bytes, rel=0.01)
    many = Snapshot(tmp_path / "many/x")
    assert many.contents.manifest.shared.keys() == {"model", "step"}
    assert many.contents.manifest.ranks == {str(r): {} for r in range(size)}
    assert many.contents.manifest.shared["model"] == alone.contents.manifest.shared["model"]
    restored = StateDict()
    many.restore({"model": restored})
    for name, tensor in weights(1).items():
        assert torch.equal(restored[name], tensor)


def take_in_disagreement(folder: str, what: str) -> None:
    odd = dist.get_rank() == 1
    state = {"model": StateDict(weights(1))}
    if what == "path":
        Snapshot.take(f"{folder}/{'b' if odd else 'a'}", state)
    elif what == "keys":
        Snapshot.take(f"{folder}/a", {**state, **({"more": StateDict()} if odd else {})})
    elif what == "options":
        Snapshot.take(f"{folder}/a", state, overwrite=odd)
    elif what == "state":
        Snapshot.take(f"{folder}/a", {"model": StateDict(x=object() if odd else 1)})


@pytest.mark.parametrize("what", ["path", "keys", "options", "state"])
def test_ranks_that_disagree_are_told_so(world, tmp_path, what):
    outcomes = world(3).run(take_in_disagreement, str(tmp_path), what, expect_errors=True)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, StateError), outcome
        if rank != 1:
            assert "rank 1" in str(outcome)
    assert list(Store(tmp_path).snapshots()) == []
    world(3).run(take_equal, str(tmp_path / "a"), {})


def take_taken(path: str) -> None:
    Snapshot.take(path, {"model": StateDict(weights(1))})


def test_a_taken_name_is_refused_on_all_ranks(world, tmp_path):
    world(2).run(take_taken, str(tmp_path / "a"))
    outcomes = world(2).run(take_taken, str(tmp_path / "a"), expect_errors=True)
    assert all(isinstance(o, SnapshotExistsError) for o in outcomes)


def take_compressed(folder: str) -> None:
    state = {"model": StateDict(x=torch.full((200_000,), dist.get_rank()))}
    Store(folder).async_take(state, "s").wait()


def test_the_codec_of_the_store_counts(world, tmp_path):
    Store(tmp_path, create=NewStore(codec="zstd")).make()
    world(2).run(take_compressed, str(tmp_path))
    contents = Store(tmp_path)["s"].contents
    for rank in range(2):
        path, entry, _ = contents.entry(f"{rank}/model/x")
        digests = [digest for digest, _ in contents.chunks(path, entry)]
        places = contents.store.index.find(contents.store.view(), digests)
        assert {place.codec for place in places} == {Codec.PLANES}


def take_with_small_slots(path: str, cores: int) -> None:
    """Take as on a machine of so many cores, where each buffer holds few chunks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    state = {f"{i}": torch.randn(1 << 18, generator=generator) for i in range(12)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
        for module in (buffers, casnap.take.ranks.exchange):
            patch.setattr(module, "SLOT_BYTES", MIB)
        patch.setattr(buffers, "_pools", {})
        Store(path).take({"model": StateDict(state)}, "x", timeout=20)


def test_more_cores_than_buffers(world, tmp_path):
    """Threads that wait for other ranks must leave buffers to the threads that have work."""
    Store(tmp_path / "store", create=NewStore(chunk_size=1 << 16)).make()
    world(2).run(take_with_small_slots, str(tmp_path / "store"), 16)
    assert Store(tmp_path / "store").check(data=True).ok


def take_what_one_rank_saw_damaged(path: str) -> list[int]:
    store = Store(path)
    if dist.get_rank() == 1:
        with pytest.raises(DamagedError):
            store["a"].read_object("model/a")
    takes = (store.take({"model": StateDict(weights(1))}, f"b/{i}") for i in range(3))
    return [taken.stats.new_bytes for taken in takes]


def test_what_any_rank_saw_damaged_is_stored_anew_once(world, tmp_path):
    snapshot = Store(tmp_path).take({"model": StateDict(weights(1))}, "a")
    digest, _ = snapshot.contents.chunks("model/a", snapshot.get_manifest()["0/model/a"])[0]
    damage_everywhere(tmp_path, digest)
    first, *later = world(2).run(take_what_one_rank_saw_damaged, str(tmp_path))[1]
    assert first > MIB // 2
    assert max(later) < 10_000
    assert torch.equal(Store(tmp_path)["a"].read_object("model/a"), weights(1)["a"])


def take_of_many_records(path: str, weight: int) -> int:
    """Take what no single segment of rank 0 is to hold; return how many the root names then."""
    own = torch.randn(70_000, generator=torch.Generator().manual_seed(dist.get_rank()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(casnap.storage.writing.session, "MOST_RECORDS", 0)
        patch.setattr(casnap.storage.writing.handovers, "MERGE_MOST", weight)
        store = Store(path, create=NewStore(chunk_size=1 << 16))
        store.take({"mine": StateDict(x=own)}, "x")
    return len(store._view.repository.newest().segments)


@pytest.mark.parametrize(("weight", "segments"), [(1000, 2), (1, 4)])
def test_ranks_write_few_segments_of_many_records(world, tmp_path, weight, segments):
    """One of rank 0, and one of others for each so many records; not one of each rank."""
    assert world(4).run(take_of_many_records, str(tmp_path / "s"), weight) == [segments] * 4
    store = Store(tmp_path / "s")
    for rank in range(4):
        own = torch.randn(70_000, generator=torch.Generator().manual_seed(rank))
        assert torch.equal(store["x"].read_object(f"{rank}/mine/x"), own)
    assert store.check(data=True).ok
    store.gc(grace=0)
    assert_no_orphans(tmp_path / "s")


def take_without_room(path: str, most_records: int, hurt: str) -> str:
    """Take where rank 1 finds the disk full when it hands over, or writes a segment for others."""
    own = torch.randn(70_000, generator=torch.Generator().manual_seed(dist.get_rank()))
    backend = FaultyBackend(LocalBackend(Path(path)))
    store = Store(backend)
    if dist.get_rank() == 1:
        backend.faults.append(Fault(full_disk, *hurt.split()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(casnap.storage.writing.session, "MOST_RECORDS", most_records)
        with pytest.raises(StorageFullError) as e:
            store.take({"mine": StateDict(x=own)}, "x", timeout=60)
    return str(e.value)


def full_disk(_: Call) -> None:
    raise StorageFullError("no space left, on purpose")


@pytest.mark.parametrize(
    ("most_records", "hurt"), [(0, "write index/*"), (0, "sync *"), (1 << 16, "sync *")]
)
def test_no_rank_leaves_what_it_handed_over_on_a_full_disk(world, tmp_path, most_records, hurt):
    """Others have handed over already when one finds no room; the next try needs theirs."""
    path = tmp_path / "s"
    Store(path).make()
    errors = world(3).run(take_without_room, str(path), most_records, hurt)
    assert all("no space left, on purpose" in error for error in errors)
    assert_no_orphans(path)


def take_while_rank_0_fails(path: str) -> str:
    """Take; rank 0 fails where ranks send each other what segments are to hold."""
    lead, all_to_all, calls = TakeCommit.lead, Group.all_to_all, itertools.count()

    def failing(group: Group, *args: Any, **options: Any) -> Any:
        # Before come the commit id, the handovers, and the ranks that write.
        if next(calls) == 3:
            raise MemoryError("on purpose")
        return all_to_all(group, *args, **options)

    def failing_lead(*args: Any) -> Any:
        patch.setattr(Group, "all_to_all", failing)
        return lead(*args)

    own = torch.randn(70_000, generator=torch.Generator().manual_seed(dist.get_rank()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(casnap.storage.writing.session, "MOST_RECORDS", 0)
        patch.setattr(TakeCommit, "lead", failing_lead)
        with pytest.raises((MemoryError, RankError)) as e:
            Store(path).take({"mine": StateDict(x=own)}, "x", timeout=60)
    return str(e.value)


def test_no_rank_takes_the_error_of_rank_0_for_records(world, tmp_path):
    Store(tmp_path / "s").make()
    first, *others = world(3).run(take_while_rank_0_fails, str(tmp_path / "s"))
    assert first == "on purpose"
    assert all("rank 0 failed: MemoryError: on purpose" in error for error in others)
    assert_no_orphans(tmp_path / "s")
