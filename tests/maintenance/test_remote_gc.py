"""Maintenance of a remote store: sizes from lists, deletes in batches."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
import torch

from casnap import StateDict, Store
from casnap.format.records import (
    Digest,
    PackId,
    Place,
    Segment,
    SegmentId,
    SegmentRef,
    encode_segment,
    pack_key,
    segment_key,
)
from casnap.maintenance.stored_files import StoredFiles
from casnap.maintenance.usage import disk_usage
from casnap.storage.chunks.pack import new_id
from casnap.storage.log.roots import newest_root, put_next_root
from tests.support.remote import RemoteDouble


def state_of(seed: int) -> dict[str, StateDict]:
    drawn = torch.Generator().manual_seed(seed)
    return {"m": StateDict(a=torch.randn(300_000, generator=drawn), b=torch.arange(50_000.0))}


def orphans(backend: RemoteDouble, count: int) -> None:
    """Leave packs of writers that died long ago."""
    for _ in range(count):
        backend.write(pack_key(new_id(0)), b"left over")
    root = newest_root(backend)
    assert put_next_root(backend, root) is not None


def test_deletes_go_in_batches(tmp_path: Path) -> None:
    name = str(tmp_path)
    store = Store(RemoteDouble(name))
    for n in range(3):
        store.take(state_of(n), f"step_{n}")
    store.delete("step_1")
    orphans(RemoteDouble(name), 5500)
    backend = RemoteDouble(name)
    told: list[tuple[str, int, int]] = []
    report = Store(backend).gc(grace=0, progress=lambda *what: told.append(what))
    assert report.deleted_packs > 5500
    assert report.freed_bytes > 5500 * len(b"left over") + 300_000 * 4
    assert backend.requests["delete"] <= 7
    assert backend.requests.get("head", 0) == 0
    assert sum(kind == "list" and key == "packs" for kind, key in backend.log) <= 2 * 6
    done = [done for what, done, total in told if what == "deleting"]
    assert len(done) >= 6
    assert done[-1] >= 5500
    assert Store(RemoteDouble(name)).check(data=True).ok


def test_a_collector_with_nothing_to_do(tmp_path: Path) -> None:
    """It lists packs and segments, reads the index, and looks for a newer root."""
    name = str(tmp_path)
    store = Store(RemoteDouble(name))
    for n in range(3):
        store.take(state_of(n), f"step_{n}")
    for _ in range(3):
        store.gc(grace=0)
    backend = RemoteDouble(name)
    report = Store(backend).gc(grace=0)
    assert not report.deleted_packs
    # Two of these open the store.
    assert backend.requests["list"] <= 2
    assert backend.count <= 8, backend.log


def test_few_roots_are_read_for_their_times(tmp_path: Path) -> None:
    name = str(tmp_path)
    store = Store(RemoteDouble(name))
    for n in range(60):
        store.take({"m": StateDict(a=torch.full((10,), n))}, "again", overwrite=True)
    backend = RemoteDouble(name)
    Store(backend).gc(grace=3600)
    roots = [key for kind, key in backend.log if kind == "get" and key.startswith("roots/")]
    assert len(roots) <= 15, roots


def test_check_and_usage_list_the_packs(tmp_path: Path) -> None:
    name = str(tmp_path)
    store = Store(RemoteDouble(name))
    for n in range(4):
        store.take(state_of(n), f"step_{n}")
    backend = RemoteDouble(name)
    store = Store(backend)
    total = disk_usage(store.objects).nbytes
    listed = [size for f in ("packs", "index") for size in backend.sizes(f).values()]
    assert total == sum(listed)
    assert backend.requests.get("head", 0) == 0
    assert store.check().ok
    assert backend.requests.get("head", 0) == 0
    gone = next(key for key, size in backend.sizes("packs").items() if size > 500_000)
    backend.delete(gone)
    assert [d.kind for d in store.check().damages if d.object == gone] == ["missing"]


def grown(before: int) -> str:
    return f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024:.0f} MiB more"


def test_a_check_reads_several_footers_at_once(tmp_path: Path) -> None:
    name = str(tmp_path)
    store = Store(RemoteDouble(name))
    for n in range(12):
        store.take({"m": StateDict(a=torch.full((300,), n))}, f"step_{n}")
    backend = RemoteDouble(name)
    backend.latency = 0.02
    assert Store(backend).check().ok
    assert 4 < backend.most_at_once <= backend.in_flight


def test_a_check_reads_the_nodes_of_a_commit_together(tmp_path: Path) -> None:
    """Each small snapshot has a table, a manifest, a tree and lists, each node twice."""
    name, count = str(tmp_path), 20
    store = Store(RemoteDouble(name), chunk_size=64 << 10)
    for n in range(count):
        store.take({f"k{k}": StateDict(a=torch.randn(20_000)) for k in range(4)}, f"step_{n}")
    backend = RemoteDouble(name)
    store = Store(backend)
    backend.reset()
    backend.latency = 0.02
    assert store.check().ok
    # The nodes of several commits are read at once, as the footers are.
    assert backend.trips < 25, backend.trips
    # Roots, footers of two packs a commit, segments; and the nodes of a commit by one request.
    assert backend.requests["get"] <= 4 * count + 20, backend.requests


@pytest.mark.slow
def test_a_million_packs(tmp_path: Path) -> None:
    """Half of them are garbage. Their folders are listed one by one, and 500 batches deleted."""
    name, count = str(tmp_path), 1_000_000
    backend = RemoteDouble(name)
    Store(backend).take(state_of(0), "first")
    root = newest_root(backend)
    refs = []
    for _ in range(5):
        packs = [PackId(new_id(0)) for _ in range(count // 10)]
        for pack in packs:
            backend.write(pack_key(pack), b"x" * 100)
        records = [(Digest(pack * 2), Place(pack, 0, 10, 10, 0)) for pack in packs for _ in (1, 2)]
        ident = SegmentId(new_id(root.seq))
        backend.write(segment_key(ident), encode_segment(Segment(tuple(packs), records)))
        refs.append(SegmentRef(ident, len(records)))
    root = put_next_root(backend, root, segments=(*root.segments, *refs)) or root
    for _ in range(count // 2):
        backend.write(pack_key(new_id(0)), b"left over")
    backend.reset()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    store = Store(RemoteDouble(name))
    store.objects.view()
    print(f"index: {time.process_time() - started:.1f} s of processor time, {grown(before)}")
    files = StoredFiles(store.objects, root)
    assert len(files.packs) > count
    print(f"listing: {time.process_time() - started:.1f} s, {grown(before)}")
    del files
    report = store.gc(grace=0)
    print(f"all: {time.process_time() - started:.1f} s, {grown(before)}")
    assert report.deleted_packs >= count // 2
    assert backend.requests == {}
    double = store.objects.backend
    assert isinstance(double, RemoteDouble)
    assert double.requests.get("head", 0) == 0
    assert double.requests["delete"] <= 2 * count // 1000 + 10
