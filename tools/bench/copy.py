"""Copies between stores: to and from an S3 server of this machine, and between folders of its disk.

The server runs on the same cores, so that both sides of a ratio pay for it. The limits are raw puts
and ranged gets of the same bytes by the same client, and ``cp -r`` with a sync.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from casnap import StateDict, Store
from casnap.backends import backend_at
from casnap.runtime.buffers import release_memory
from tests.support.servers import Bucket, shared
from tools.bench import peers, states
from tools.bench.measure import PeakMemory, Times, fsync_tree, remove, seconds, settle
from tools.bench.object_store import RawObjects, environment
from tools.bench.settings import MIB, Settings
from tools.bench.table import Row, timed

REMOTE = "cp to and from an S3 server on this machine"
LOCAL = "cp between folders of the disk"
WORKLOADS = (LOCAL, REMOTE)
_MOST_MIB = 600


class Copies:
    """Copies of one store of one snapshot, and of a second one that shares its weights."""

    def __init__(self, settings: Settings) -> None:
        self.folder = settings.path(f"copied-{os.urandom(4).hex()}", "source").parent
        self.source = Store(self.folder / "source")
        self.state = states.fp32(settings.nbytes // 2, 200)
        self.nbytes = states.nbytes_of(self.state.values())
        self.times: Times = defaultdict(list)
        self.ratios: Times = defaultdict(list)
        self.share = self.extra = 0.0
        self.requests = 0
        self._take("step_0")
        self._take("step_1")

    def _take(self, name: str) -> None:
        self.source.take({"model": StateDict(**self.state), "step": StateDict(name=name)}, name)

    def beside(
        self, limit: str, raw: Callable[[], object], name: str, work: Callable[[], object]
    ) -> None:
        """Time a copy between two runs of its limit.

        The first one is not timed: looking at its memory takes time, and so does fresh memory.
        """
        if name not in self.ratios:
            release_memory()
            with PeakMemory() as peak:
                work()
            self.extra = max(self.extra, peak.extra)
            self.ratios[name] = []
            return
        before = self._time(limit, raw)
        took = self._time(name, work)
        after = self._time(limit, raw)
        self.ratios[name].append((before + after) / 2 / took)

    def second(self, to: Store) -> None:
        """Copy the second snapshot, whose weights are there, and note what that sends."""
        before = sum(to.requests.values())
        reports: list[Any] = []
        self._time("weights there", lambda: reports.append(self.source.copy("step_1", to=to)))
        self.requests = max(self.requests, sum(to.requests.values()) - before)
        self.share = max(self.share, reports[0].sent_bytes / self.nbytes)

    def _time(self, name: str, work: Callable[[], object]) -> float:
        settle()
        took = seconds(work)
        self.times[name].append(took)
        return took

    def rows(self, workload: str, limits: dict[str, tuple[str, float]]) -> list[Row]:
        """Return the rows: each copy, then its limit."""
        size = f"{workload}, {self.nbytes / MIB:.0f} MiB"
        rows = []
        for name, (limit, bound) in limits.items():
            work = f"{name}: {size}"
            rows.append(timed(work, peers.CASNAP, self.times[name], self.nbytes))
            row = timed(work, f"limit: {limit}", self.times[limit], self.nbytes)
            rows.append(row.at_least(self.ratios[name], " of the limit", bound))
        work = f"cp of a snapshot whose weights are there: {size}"
        row = timed(work, peers.CASNAP, self.times["weights there"])
        rows.append(row.at_most([self.share * 100], " % of the bytes", 1))
        if self.requests:
            row = Row(work, f"{peers.CASNAP}, requests there", str(self.requests))
            rows.append(row.within(self.requests, 12, "≤ 12"))
        memory = Row(f"extra memory of cp: {size}", peers.CASNAP, f"{self.extra / MIB:.0f} MiB")
        return [*rows, memory.within(self.extra / MIB, _MOST_MIB, f"≤ {_MOST_MIB} MiB")]


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload."""
    copies = Copies(settings)
    for turn in range(settings.repeat + 1):
        if workload == LOCAL:
            _between_folders(copies, copies.folder / f"to-{turn}")
    if workload == LOCAL:
        return [row.to_json() for row in copies.rows(workload, {"cp": ("cp -r and sync", 0.8)})]
    with ExitStack() as stack:
        folder = settings.path("servers", "s").parent
        server = stack.enter_context(shared("seaweedfs", folder))
        bucket = stack.enter_context(server.bucket())
        stack.enter_context(environment(bucket))
        raw = RawObjects(backend_at(f"{bucket.uri}/raw"), copies.nbytes)
        for turn in range(settings.repeat + 1):
            _through_the_bucket(copies, raw, bucket, turn)
    limits = {"cp to the bucket": ("puts", 0.8), "cp from the bucket": ("gets", 0.8)}
    return [row.to_json() for row in copies.rows(workload, limits)]


def _between_folders(copies: Copies, to: Path) -> None:
    raws = [to.with_name(f"raw-{n}") for n in range(2)]
    unused = iter(raws)

    def limit() -> None:
        raw = next(unused)
        subprocess.run(["cp", "-r", copies.source.uri, raw], check=True)
        fsync_tree(raw)

    copies.beside("cp -r and sync", limit, "cp", lambda: _copy(copies, to))
    copies.second(Store(to))
    for folder in (to, *raws):
        remove(folder)


def _copy(copies: Copies, to: object) -> None:
    copies.source.copy("step_0", to=to)  # type: ignore[arg-type]


def _through_the_bucket(copies: Copies, raw: RawObjects, bucket: Bucket, turn: int) -> None:
    there = f"{bucket.uri}/copy-{turn}"
    copies.beside("puts", raw.put, "cp to the bucket", lambda: _copy(copies, there))
    remote, back = Store(there), copies.folder / f"back-{turn}"
    copies.beside("gets", raw.get, "cp from the bucket", lambda: remote.copy("step_0", to=back))
    remove(back)
    copies.second(Store(there))
