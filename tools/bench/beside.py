"""async_take beside training: the time that training on one core loses to one save."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tools.bench import peers, states
from tools.bench.limits import CORES, memcpy_seconds
from tools.bench.measure import Times, fsync_tree, remove, rotated, seconds, settle
from tools.bench.settings import Settings
from tools.bench.table import Row, duration, timed
from tools.bench.workload import Workload

BOUNDED = f"{peers.CASNAP}, threads=1"
KEPT = "dcp.async_save, kept stager, synced"
WORKLOADS = (states.FP32,)
_MOST_GIB = 1.1
_QUIET_STEPS = 40
_ALLOWED_SECONDS = 0.05
# What a take took before its threads were bound and its chunks ordered: at most 0.7 s for 1.1 GB.
_DURABLE_BEFORE = 0.7 / 1.1e9
_TIMES_BEFORE = 1.2
_WIDTH, _LAYERS = 256, 8

Start = Callable[[Path], Callable[[], object]]
"""Starts a save to a path; returns, once unblocked, what waits until it is durable."""


class Beside(Workload):
    """A loop of small steps, from which each contender saves all tensors, just changed."""

    def __init__(self, settings: Settings, workload: str) -> None:
        """Let every contender save once, so that its buffers are warm."""
        super().__init__(settings, workload)
        self.copy = states.like(self.state)
        self.layers = [torch.randn(_WIDTH, _WIDTH) / _WIDTH for _ in range(_LAYERS)]
        self.lost: Times = defaultdict(list)
        self.blocked: Times = defaultdict(list)
        self.durable: Times = defaultdict(list)
        self.memcpy: Times = defaultdict(list)
        self.others: Times = defaultdict(list)
        self.stager = peers.kept_stager()
        self.starts: dict[str, Start] = {
            peers.CASNAP: lambda path: self._casnap(path, None),
            BOUNDED: lambda path: self._casnap(path, 1),
            KEPT: self._dcp,
        }
        self.repetition(0)
        for times in (self.lost, self.blocked, self.durable, self.memcpy, self.others):
            times.clear()

    def repetition(self, turn: int) -> None:
        """Measure each contender once, beside a warm copy of the state."""
        for name in rotated(list(self.starts), turn):
            states.step(self.state.values())
            settle()
            self.memcpy[name].append(memcpy_seconds(self.state, self.copy))
            torch.set_num_threads(1)
            try:
                self._save_beside(name)
            finally:
                torch.set_num_threads(CORES)

    def _save_beside(self, name: str) -> None:
        self._names += 1
        path = self.settings.path("beside", name.partition(",")[0], f"step_{self._names}")
        quiet = statistics.median(seconds(self._step) for _ in range(_QUIET_STEPS))
        waits: list[Callable[[], object]] = []
        start, others = time.perf_counter(), _others_seconds()
        blocked = seconds(lambda: waits.append(self.starts[name](path)))
        waiter = threading.Thread(target=waits[0])
        waiter.start()
        lost = blocked
        while waiter.is_alive():
            lost += seconds(self._step) - quiet
        self.durable[name].append(time.perf_counter() - start)
        self.others[name].append(_others_seconds() - others)
        self.blocked[name].append(blocked)
        self.lost[name].append(lost)
        if name == KEPT:
            remove(path)

    def _step(self) -> None:
        x = torch.ones(_WIDTH, _WIDTH)
        for layer in self.layers:
            x = torch.tanh(x @ layer) + x

    def _casnap(self, path: Path, threads: int | None) -> Callable[[], object]:
        from casnap import Snapshot, StateDict

        app_state = {"model": StateDict(**self.state)}
        return Snapshot.async_take(str(path), app_state, threads=threads).wait

    def _dcp(self, path: Path) -> Callable[[], object]:
        future = peers.dcp_async_save(self.state, path, self.stager)

        def wait() -> None:
            future.result()
            fsync_tree(path)

        return wait


def _others_seconds() -> float:
    """Return the processor time of all threads but this one: other work beside it adds nothing."""
    return time.process_time() - time.thread_time()


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload."""
    run = Beside(replace(settings, gib=min(settings.gib, _MOST_GIB)), workload)
    run.repeat()
    run.stager.close()
    remove(settings.path("beside"))
    return [row.to_json() for row in _rows(run)]


def _rows(run: Beside) -> list[Row]:
    work = f"training time lost to one async_take, training on one core: {run.size}"
    rows = []
    for name in run.starts:
        row = timed(work, name, run.lost[name])
        ours, memcpy = run.lost[peers.CASNAP], statistics.median(run.memcpy[name])
        if name == KEPT:
            ratios = [a / b for a, b in zip(ours, run.lost[name], strict=True)]
            row = row.at_most(ratios, "× its time", 1)
        else:
            bound = memcpy + _ALLOWED_SECONDS
            target = f"≤ a warm memcpy + 50 ms ({duration(bound)})"
            row = row.within(statistics.median(run.lost[name]), bound, target)
        rows.append(row)
    rows += [timed(f"of that, blocked: {run.size}", n, run.blocked[n]) for n in run.starts]
    durable = f"the same, until durable: {run.size}"
    bound = _TIMES_BEFORE * _DURABLE_BEFORE * run.nbytes
    for name in run.starts:
        row = timed(durable, name, run.durable[name], run.nbytes)
        if name == peers.CASNAP:
            target = f"≤ {_TIMES_BEFORE:g}× 0.7 s for 1.1 GB ({duration(bound)})"
            row = row.within(statistics.median(run.durable[name]), bound, target)
        rows.append(row)
    others = f"processor time of all threads but the training's: {run.size}"
    rows += [timed(others, name, run.others[name]) for name in run.starts]
    return rows
