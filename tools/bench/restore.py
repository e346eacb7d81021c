"""Restores in place, verified: from a warm page cache, from the disk, and soon after a take."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench import peers, states
from tools.bench.limits import RawDisk, verified_read_seconds
from tools.bench.measure import (
    Times,
    drop,
    drop_all,
    files_below,
    remove,
    rotated,
    seconds,
    settle,
    warm,
)
from tools.bench.settings import MIB, Settings
from tools.bench.table import Row, timed

_PAIRS = 2
_RESTED_SECONDS = 10
DIRECT = "limit: O_DIRECT read"
BUFFERED = "limit: read through the page cache"
BETTER = "limit: the better of these two"
VERIFIED = "limit: warm reads and BLAKE3, all cores"
_LIMITS = {DIRECT: False, BUFFERED: True}
_AGAINST_DCP = {states.FP32: 1.5, states.TRANSFORMER: 2.3}
_TIMES_SAFETENSORS = 2.2
_NO_SLOWER = 1.1


class Restores:
    """One workload, saved by every contender, and the figures of loading it."""

    def __init__(self, settings: Settings, workload: str) -> None:
        """Save the state by every contender, and see that each brings it back bit for bit."""
        self.settings = settings
        self.workload = workload
        self.state = state = states.build(workload, settings.nbytes)
        self.nbytes = states.nbytes_of(state.values())
        self.size = f"{workload}, {self.nbytes / MIB:.0f} MiB"
        self.target = states.like(state)
        self.loads: dict[str, Callable[[], object]] = {}
        self.paths: dict[str, Path] = {}
        self.warm: Times = defaultdict(list)
        self.cold: Times = defaultdict(list)
        self.ratios: Times = defaultdict(list)
        self.after: Times = defaultdict(list)
        self.rested: Times = defaultdict(list)
        contenders = peers.loaders()
        contenders[peers.CASNAP] = (peers.casnap_take, peers.casnap_restore)
        for number, (name, (save, load)) in enumerate(contenders.items()):
            path = settings.path("restore", str(number), "saved")
            save(state, path)
            self.paths[name] = path.parent
            self.loads[name] = partial(load, self.target, path)
            self._check(name, state)
        self.both = {name: contenders[name] for name in (peers.CASNAP, peers.DCP)}
        self.packs = self.paths[peers.CASNAP] / "casnap-store/packs"
        self.memory = bytearray(b"1") * sum(p.stat().st_size for p in files_below(self.packs))
        self.disk = RawDisk(settings, self.nbytes)
        self.disk.prepare_reads()

    def _check(self, name: str, state: states.State) -> None:
        for tensor in self.target.values():
            tensor.zero_()
        self.loads[name]()
        if not states.same(state, self.target):
            raise RuntimeError(f"{name} did not bring the state back")

    def warm_repetition(self, turn: int) -> None:
        """Load once by every contender from the page cache."""
        settle()
        for name in rotated(list(self.loads), turn):
            warm(self.paths[name])
            self.warm[name].append(seconds(self.loads[name]))
        warm(self.packs)
        self.warm[VERIFIED].append(verified_read_seconds(self.packs, memoryview(self.memory)))

    def cold_repetition(self, turn: int) -> None:
        """Load by every contender from the disk, casnap between raw reads, more than once."""
        before = self._raw_reads()
        for _ in range(_PAIRS):
            took = self._cold(peers.CASNAP)
            after = self._raw_reads()
            beside = {name: (before[name] + after[name]) / 2 for name in _LIMITS}
            beside[BETTER] = min(beside.values())
            self.cold[BETTER].append(beside[BETTER])
            for name, limit in beside.items():
                self.ratios[name].append(limit / took)
            before = after
        for name in rotated([name for name in self.loads if name != peers.CASNAP], turn):
            self._cold(name)

    def after_save(self, turn: int) -> None:
        """Save anew and load: at once, and once nothing is read in the background any more."""
        for name in rotated(list(self.both), turn):
            save, load = self.both[name]
            path = self.settings.path("restore", "after", "saved")
            for times, rests in ((self.after, False), (self.rested, True)):
                drop_all()
                save(self.state, path)
                if rests:
                    _rest()
                times[name].append(seconds(load, self.target, path))
                remove(path.parent)

    def _raw_reads(self) -> dict[str, float]:
        took = {name: self.disk.read(buffered=buffered) for name, buffered in _LIMITS.items()}
        for name, each in took.items():
            self.cold[name].append(each)
        return took

    def _cold(self, name: str) -> float:
        drop(self.paths[name])
        took = seconds(self.loads[name])
        self.cold[name].append(took)
        return took


def _rest() -> None:
    """Wait 10 seconds, or until casnap has read its new packs into the page cache."""
    deadline = time.monotonic() + _RESTED_SECONDS
    while time.monotonic() < deadline:
        if all(thread.name != "casnap-warm" for thread in threading.enumerate()):
            return
        time.sleep(0.01)


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload."""
    restores = Restores(settings, workload)
    for turn in range(settings.repeat):
        restores.warm_repetition(turn)
    for turn in range(settings.repeat):
        restores.cold_repetition(turn)
    for turn in range(settings.repeat):
        restores.after_save(turn)
    restores.disk.close()
    remove(settings.path("restore"))
    rows = [*_warm_rows(restores), *_cold_rows(restores), *_after_rows(restores)]
    return [row.to_json() for row in rows]


def _warm_rows(restores: Restores) -> list[Row]:
    nbytes = restores.nbytes
    work = f"restore in place, verified, warm: {restores.size}"
    ours = restores.warm[peers.CASNAP]
    limit = restores.warm[VERIFIED]
    ratios = [a / b for a, b in zip(limit, ours, strict=True)]
    rows = [
        timed(work, peers.CASNAP, ours, nbytes),
        timed(work, VERIFIED, limit, nbytes).at_least(ratios, " of the limit"),
    ]
    for name in restores.loads:
        if name == peers.CASNAP:
            continue
        theirs = restores.warm[name]
        row = timed(work, peers.loaded_by(name), theirs, nbytes)
        if name == peers.SAFETENSORS:
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            rows.append(row.at_most(ratios, "× its time", _TIMES_SAFETENSORS))
        else:
            bound = _AGAINST_DCP[restores.workload] if name == peers.DCP else None
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            rows.append(row.at_least(ratios, "× as fast", bound))
    return rows


def _cold_rows(restores: Restores) -> list[Row]:
    nbytes = restores.nbytes
    work = f"restore in place, verified, cold: {restores.size}"
    ours = restores.cold[peers.CASNAP]
    rows = [timed(work, peers.CASNAP, ours, nbytes)]
    for name, ratios in restores.ratios.items():
        row = timed(work, name, restores.cold[name], nbytes)
        rows.append(row.at_least(ratios, " of the limit", 0.95 if name == BETTER else None))
    for name in restores.loads:
        if name != peers.CASNAP:
            row = timed(work, peers.loaded_by(name), restores.cold[name], nbytes)
            ratios = [
                other / statistics.mean(ours[turn * _PAIRS : (turn + 1) * _PAIRS])
                for turn, other in enumerate(restores.cold[name])
            ]
            rows.append(row.at_least(ratios, "× as fast", 1))
    return rows


def _after_rows(restores: Restores) -> list[Row]:
    after = f"restore in place, verified, right after a take: {restores.size}"
    rested = f"restore in place, verified, up to 10 s after a take: {restores.size}"
    warm = statistics.median(restores.warm[peers.CASNAP])
    rows = []
    for work, times in ((after, restores.after), (rested, restores.rested)):
        ours, theirs = times[peers.CASNAP], times[peers.DCP]
        row = timed(work, peers.CASNAP, ours, restores.nbytes)
        if work == rested:
            row = row.at_most([a / warm for a in ours], "× a warm one", _NO_SLOWER)
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        row_of_dcp = timed(work, "dcp.load, after its own save", theirs, restores.nbytes)
        rows += [row, row_of_dcp.at_least(ratios, "× as fast", 1)]
    return rows
