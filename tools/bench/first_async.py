"""The first async_take of a process: for how long it blocks, and what time of processors it takes.

Each is a process of its own, in turns, so the memory for copies is fresh. On a virtual machine, the
memory that no process has touched before costs most.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tools.bench import peers, states
from tools.bench.fresh import call
from tools.bench.measure import Times, remove, rotated
from tools.bench.settings import Settings
from tools.bench.table import Row, timed

CLONE = "clone of each tensor"
DCP = "dcp.async_save, default"
CONTENDERS = (peers.CASNAP, CLONE, DCP)


def once(settings: Settings, contender: str, workload: str) -> list[float]:
    """Return the seconds that it blocks, by the clock and of processors, in this new process."""
    state, path = states.build(workload, settings.nbytes), settings.path("first", "step_1")
    peers.kept_stager().close()  # what it imports is not measured
    clock, processors = time.perf_counter(), time.process_time()
    waiting = _begin(contender, state, path)
    figures = [time.perf_counter() - clock, time.process_time() - processors]
    if contender != CLONE:
        waiting()
    return figures


def _begin(contender: str, state: states.State, path: Path) -> Any:
    if contender == CLONE:
        return [tensor.clone() for tensor in state.values()]
    if contender == DCP:
        return peers.dcp_async_save(state, path, None).result
    from casnap import Snapshot, StateDict

    return Snapshot.async_take(str(path), {"model": StateDict(**state)}).wait


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload."""
    clock: Times = defaultdict(list)
    processors: Times = defaultdict(list)
    for turn in range(settings.repeat):
        for name in rotated(CONTENDERS, turn):
            blocked, busy = call(once, settings, contender=name, workload=workload)
            clock[name].append(blocked)
            processors[name].append(busy)
            remove(settings.path("first"))
    rows: list[Row] = []
    for title, times in (("time blocked", clock), ("time of processors", processors)):
        work = f"first async_take of a process, {title}: {workload}"
        rows += [timed(work, name, times[name]) for name in CONTENDERS]
    return [row.to_json() for row in rows]
