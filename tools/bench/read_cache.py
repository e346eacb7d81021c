"""Restores through the read cache, beside a local store of the same bytes and without the cache.

The snapshots are open before the clock starts: to open one on a server makes a client, which costs
the same with a cache and without, and has a row of its own.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from casnap import Snapshot, StateDict
from casnap.backends.local_files.file_io import write_at
from casnap.runtime.buffers import Slot, release_memory
from tests.support.servers import Bucket, shared
from tools.bench import peers, states
from tools.bench.measure import PeakMemory, Times, drop, remove, seconds, settle, warm
from tools.bench.object_store import environment
from tools.bench.settings import MIB, Settings
from tools.bench.states import State
from tools.bench.table import Row, timed

WORKLOADS = ("restore from an S3 server on this machine",)

_FILE = 48 * MIB
_PLENTY = 1 << 50


class Restores:
    """Restores of one state, from a server and from this disk."""

    def __init__(self, settings: Settings, bucket: Bucket) -> None:
        self.far = f"{bucket.uri}/run/step_1"
        self.near = settings.path("near", "step_1")
        self.cache = settings.path("cache", "chunks")
        self.raw = settings.path("raw", "0").parent
        os.environ["CASNAP_CACHE_DIR"] = str(self.cache.parent)
        self.state = states.fp32(settings.nbytes // 2, 200)
        self.target = states.like(self.state)
        self.nbytes = states.nbytes_of(self.state.values())
        self.slot = Slot(_FILE)
        self.times: Times = defaultdict(list)
        self.ratios: Times = defaultdict(list)
        self.extra = 0
        for path in (self.far, str(self.near)):
            Snapshot.take(path, {"model": StateDict(**self.state)})
        release_memory()
        # In a run of its own, since looking at memory takes time.
        with PeakMemory() as peak:
            self._far(_PLENTY)(self.target)
        self.extra = peak.extra

    def repetition(self) -> None:
        """Restore without the cache, into it, and out of it with a warm and a cold page cache."""
        remove(self.cache)
        plain = self._time("plain", self._far(0))
        first = self._time("first", self._far(_PLENTY))
        self.ratios["first"].append((first - plain) / self._time("write", self._write))
        remove(self.raw)
        self.times["open"].append(seconds(self._far, _PLENTY))
        for name, prepare in (("warm", warm), ("cold", drop)):
            near = [self._prepared(f"near {name}", prepare, self._near) for _ in range(2)]
            far = self._prepared(f"far {name}", prepare, lambda: self._far(_PLENTY))
            near.append(self._prepared(f"near {name}", prepare, self._near))
            # The first run of a kind pays for all that is cold besides the files.
            self.ratios[name].append((near[1] + near[2]) / 2 / far)
        if not states.same(self.state, self.target):
            raise RuntimeError("casnap did not bring the state back")

    def _near(self) -> Callable[[State], object]:
        return _restoring(Snapshot(str(self.near)))

    def _far(self, cache_bytes: int) -> Callable[[State], object]:
        return _restoring(Snapshot(self.far, cache_bytes=cache_bytes))

    def _prepared(
        self, name: str, prepare: Callable[..., None], opened: Callable[[], Callable[..., object]]
    ) -> float:
        restore = opened()
        for folder in (self.near.parent, self.cache):
            prepare(folder)
        return self._time(name, restore)

    def _time(self, name: str, work: Callable[..., object]) -> float:
        settle()
        took = seconds(work, *([] if work == self._write else [self.target]))
        self.times[name].append(took)
        return took

    def _write(self) -> None:
        """Write as many bytes to this disk, as the cache writes them."""
        self.raw.mkdir(exist_ok=True)
        for number, start in enumerate(range(0, self.nbytes, _FILE)):
            fd = os.open(self.raw / str(number), os.O_CREAT | os.O_WRONLY)
            write_at(fd, self.slot.view[: min(_FILE, self.nbytes - start)], 0)
            os.close(fd)


def _restoring(snapshot: Snapshot) -> Callable[[State], object]:
    return lambda state: snapshot.restore({"model": StateDict(**state)})


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload."""
    with ExitStack() as stack:
        server = stack.enter_context(shared("seaweedfs", settings.path("servers", "s").parent))
        bucket = stack.enter_context(server.bucket())
        stack.enter_context(environment(bucket))
        done = Restores(settings, bucket)
        for _ in range(settings.repeat):
            done.repetition()
        return [row.to_json() for row in _rows(done, workload)]


def _rows(done: Restores, workload: str) -> list[Row]:
    times, nbytes = done.times, done.nbytes
    size = f"{workload}, {nbytes / MIB:.0f} MiB"
    rows = [
        timed(size, f"{peers.CASNAP}, no read cache", times["plain"], nbytes),
        timed(size, f"{peers.CASNAP}, which fills the cache", times["first"], nbytes).at_most(
            done.ratios["first"], " of writing the bytes, added", 1
        ),
        timed(size, "writing the bytes to this disk", times["write"], nbytes),
    ]
    for name in ("warm", "cold"):
        work = f"second {size}, {name}"
        rows += [
            timed(work, f"{peers.CASNAP}, from the cache", times[f"far {name}"], nbytes),
            timed(work, f"{peers.CASNAP}, local store", times[f"near {name}"], nbytes).at_least(
                done.ratios[name], " of a local restore", 0.9
            ),
        ]
    memory = Row(f"extra memory of a {size}", peers.CASNAP, f"{done.extra / MIB:.0f} MiB")
    return [
        *rows,
        timed(f"opening a snapshot for a {size}", peers.CASNAP, times["open"]),
        memory.within(done.extra / MIB, 600, "≤ 600 MiB"),
    ]
