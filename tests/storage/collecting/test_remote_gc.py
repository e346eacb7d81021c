"""Maintenance of a remote store: sizes from lists, deletes in batches."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.backends import announcement
from casnap.backends.announcement import Announcement
from casnap.format.records import (
    pack_key,
)
from casnap.maintenance.usage import disk_usage
from casnap.runtime.typing import override
from casnap.storage.commit_log.roots import newest_root
from casnap.storage.packs.pack_writer import new_id
from tests.support.garbage import collecting
from tests.support.remote import RemoteDouble
from tests.support.written import put_next_root

pytestmark = pytest.mark.usefixtures("collected_by_hand")


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
    total = disk_usage(store._view.repository).nbytes
    listed = [size for f in ("packs", "index", "roots") for size in backend.sizes(f).values()]
    assert total == sum(listed)
    assert backend.requests.get("head", 0) == 0
    assert store.check().ok
    assert backend.requests.get("head", 0) == 0
    gone = next(key for key, size in backend.sizes("packs").items() if size > 500_000)
    backend.delete(gone)
    assert [d.kind for d in store.check().damages if d.object == gone] == ["missing"]


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
    store = Store(RemoteDouble(name), create=NewStore(chunk_size=64 << 10))
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


def dense(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-(2**62), 2**62, (1 << 17,), generator=generator)


class SlowDouble(RemoteDouble):
    """One that a take is slower with than a collection."""

    @override
    def write(self, key: str, content: memoryview | bytes) -> None:
        super().write(key, content)
        time.sleep(0.1)


@pytest.mark.parametrize("how", ["async_take", "copy"])
def test_beside_collectors_without_grace(tmp_path: Path, how: str) -> None:
    """Each relies on what others let go meanwhile."""
    name = str(tmp_path / "bucket")
    store = Store(SlowDouble(name), create=NewStore(chunk_size=64 << 10))
    source = Store(tmp_path / "source", create=NewStore(chunk_size=64 << 10))
    store.take({"s": StateDict(shared=dense(0))}, "first")
    with collecting(Store(RemoteDouble(name))):
        for step in range(3):
            state = {"s": StateDict(shared=dense(0), own=dense(step + 1))}
            if how == "copy":
                source.take(state, f"step_{step}")
                source.copy(f"step_{step}", to=store)
            else:
                pending = store.async_take(state, f"step_{step}")
                # What the pending take relies on, no snapshot needs any more.
                store.delete("first" if step == 0 else f"step_{step - 1}")
                pending.wait()
    assert store.check(data=True).ok
    assert torch.equal(store["step_2"].read_object("s/shared"), dense(0))


def test_a_take_that_goes_on_for_long_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcement, "_AFTER", 0.0)
    backend = RemoteDouble(str(tmp_path))
    store, seen = Store(backend), list[list[int]]()

    def look(*_: object) -> None:
        seen.append(RemoteDouble(str(tmp_path)).announced_bases(60))

    store.take(state_of(0), "first", progress=look)
    assert seen[-1] == [0]
    backend.reset()
    store.take(state_of(1), "second")
    assert [kind for kind, key in backend.log if key.startswith("tmp/take-")] == ["put", "delete"]
    assert backend.announced_bases(60) == []


def test_announcements_of_dead_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = RemoteDouble(str(tmp_path))
    store = Store(backend)
    store.take(state_of(0), "gone")
    now = time.time()
    dead = Announcement(backend, 1, at_once=True)
    assert backend.announced_bases(60) == [1]
    assert backend.names("tmp")
    store.delete("gone")
    assert store.gc(grace=0).freed_bytes == 0
    monkeypatch.setattr(time, "time", lambda: now + 3700)
    assert store.gc(grace=0).freed_bytes > 300_000 * 4
    assert backend.names("tmp") == []
    # Its clock is a day ahead: it is not seen.
    monkeypatch.setattr(time, "time", lambda: now + 86400)
    dead._put()
    monkeypatch.setattr(time, "time", lambda: now)
    assert backend.announced_bases(60) == []


def test_no_root_is_put_for_what_a_take_under_way_may_need(tmp_path: Path) -> None:
    """A take is announced late, when the fence has passed it."""
    store = Store(RemoteDouble(str(tmp_path)))
    for name in "ab":
        store.take(state_of(0), name)
    store.delete("a")
    orphans(store._view.repository.backend, 1)
    store.gc(grace=0)
    assert store._view.repository.newest().fence > 1
    store._view.repository.backend.write(pack_key(new_id(1)), b"of that take")
    with store._view.repository.backend.announced(1, at_once=True):
        for _ in range(3):
            before = store._view.repository.newest().seq
            store.gc(grace=0)
        assert store._view.repository.newest().seq == before
    assert store.gc(grace=0).freed_bytes == len(b"of that take")
