"""Runs at a real server whose garbage is collected by itself, for some minutes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from casnap import NewStore, Retention, StateDict, Store
from casnap.backends.costs import REMOTE
from casnap.backends.remote.backend import RemoteBackend
from casnap.errors import SnapshotNotFoundError
from casnap.maintenance.usage import disk_usage
from casnap.storage.collecting import automatic
from casnap.storage.collecting.gc import GcReport
from tests.support.faults import start, wait
from tests.support.object_stores import store_in
from tests.support.servers import Bucket

SECONDS = float(os.environ.get("CASNAP_SOAK_SECONDS", "300"))
KEEP = Retention(keep_last=3)
WORDS = 1 << 18  # 2 MiB
# Of garbage, and between collections of a process: a day, and an hour, but for tests.
GRACE, REST = 10.0, 15.0


def state(run: int, step: int) -> dict[str, StateDict]:
    generator = torch.Generator().manual_seed(1000 * run + step)
    own = torch.randint(-(2**62), 2**62, (WORDS,), generator=generator)
    return {"s": StateDict(own=own, shared=torch.arange(WORDS), run=run, step=step)}


def train(bucket: Bucket, run: int, until: float, report: Path) -> None:
    """Take snapshots, every other one in the background; of run 1 count what collections ask."""
    os.environ["CASNAP_GC"] = "auto"
    costs = REMOTE._replace(collection_start=REST, collection_rest=REST)
    pytest.MonkeyPatch().setattr(RemoteBackend, "costs", costs)
    counted: list[dict[str, object]] = []
    store = store_in(bucket)
    if run == 1:
        count_collections(store, counted)
    step = -1
    while time.time() < until:
        step += 1
        name = f"run{run}/step_{step}"
        if step % 2:
            store.take(state(run, step), name, retention=KEEP)
        else:
            store.async_take(state(run, step), name, retention=KEEP).wait()
    report.write_text(json.dumps({"last": step, "collections": counted}))


def count_collections(store: Store, counted: list[dict[str, object]]) -> None:
    """Have takes wait for collections, so that the requests in between are theirs."""
    start_collecting = automatic.AutomaticCollector._start

    def start_and_wait(self: automatic.AutomaticCollector, repository: object) -> None:
        before = store.requests
        start_collecting(self, store._view.repository)
        if (worker := self._worker) is not None:
            worker.wait()
        last: GcReport | None = self.last_report
        assert last is not None
        requests = {kind: n - before.get(kind, 0) for kind, n in store.requests.items()}
        counted.append(
            {
                "requests": {kind: n for kind, n in requests.items() if n},
                "condemned": last.condemned_packs,
                "deleted": last.deleted_packs,
                "freed": last.freed_bytes,
            }
        )

    automatic.AutomaticCollector._start = start_and_wait  # type: ignore[method-assign, assignment]


def read(bucket: Bucket, until: float, report: Path) -> None:
    """Restore the newest again and again; one that was let go meanwhile is named as such."""
    store, reads, gone = store_in(bucket), 0, 0
    while time.time() < until:
        snapshot = store.latest(f"run{reads % 2}")
        if snapshot is None:
            continue
        run, step = reads % 2, int(snapshot.name.rpartition("_")[2])
        try:
            assert torch.equal(snapshot.read_object("s/own"), state(run, step)["s"]["own"])
        except SnapshotNotFoundError:
            gone += 1
        reads += 1
    report.write_text(json.dumps({"reads": reads, "gone": gone}))


def collect(bucket: Bucket, until: float, report: Path) -> None:
    """Collect as from cron."""
    store, freed, count = store_in(bucket), 0, 0
    while time.time() < until:
        freed += store.gc(grace=GRACE).freed_bytes
        count += 1
        time.sleep(REST)
    report.write_text(json.dumps({"collections": count, "freed": freed}))


@pytest.mark.slow
@pytest.mark.servers
@pytest.mark.timeout(SECONDS * 2 + 300)
def test_runs_in_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    store_in(bucket, create=NewStore(chunk_size=1 << 20)).configure(gc=GRACE)
    until = time.time() + SECONDS
    roles: dict[str, Callable[[Path], None]] = {
        "run0": partial(train, bucket, 0, until),
        "run1": partial(train, bucket, 1, until),
        "reader": partial(read, bucket, until),
        "cron": partial(collect, bucket, until),
    }
    pids = {role: start(partial(work, tmp_path / role)) for role, work in roles.items()}
    assert {role: wait(pid) for role, pid in pids.items()} == dict.fromkeys(roles, 0)
    reports = {role: json.loads((tmp_path / role).read_text()) for role in roles}
    print(json.dumps(reports, indent=1))
    store = store_in(bucket)
    kept = [(r, reports[f"run{r}"]["last"] - n) for r in (0, 1) for n in range(3)]
    assert {s.name for s in store.snapshots()} == {f"run{r}/step_{step}" for r, step in kept}
    for run, step in kept:
        own = store[f"run{run}/step_{step}"].read_object("s/own")
        assert torch.equal(own, state(run, step)["s"]["own"])
    before = disk_usage(store._view.repository)
    print(before)
    store.gc(grace=0)
    after = disk_usage(store._view.repository)
    print(after)
    assert store.check(data=True).ok
    assert after.nbytes < 1.2 * 7 * WORDS * 8 + (1 << 20)
    assert reports["cron"]["freed"] > 0
    assert len(reports["run1"]["collections"]) > SECONDS / REST / 4
