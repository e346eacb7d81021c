"""Restores in place, verified, from a warm page cache and from the disk."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench import peers, states
from tools.bench.limits import RawDisk
from tools.bench.measure import Times, drop, remove, rotated, seconds, settle, warm
from tools.bench.settings import MIB, Settings
from tools.bench.table import Row, timed

_PAIRS = 2
DIRECT = "limit: O_DIRECT read"
BUFFERED = "limit: read through the page cache"


class Restores:
    """One workload, saved by every contender, and the figures of loading it."""

    def __init__(self, settings: Settings, workload: str) -> None:
        """Save the state by every contender, and see that each brings it back bit for bit."""
        self.settings = settings
        self.workload = workload
        state = states.build(workload, settings.nbytes)
        self.nbytes = states.nbytes_of(state.values())
        self.target = states.like(state)
        self.loads: dict[str, Callable[[], object]] = {}
        self.paths: dict[str, Path] = {}
        self.warm: Times = defaultdict(list)
        self.cold: Times = defaultdict(list)
        self.ratios: Times = defaultdict(list)
        contenders = peers.loaders()
        contenders[peers.CASNAP] = (peers.casnap_take, peers.casnap_restore)
        for number, (name, (save, load)) in enumerate(contenders.items()):
            path = settings.path("restore", str(number), "saved")
            save(state, path)
            self.paths[name] = path.parent
            self.loads[name] = partial(load, self.target, path)
            self._check(name, state)
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

    def cold_repetition(self, turn: int) -> None:
        """Load by every contender from the disk, casnap between raw reads, more than once."""
        limits = {DIRECT: False, BUFFERED: True}
        before = {name: self._raw(name, buffered=buffered) for name, buffered in limits.items()}
        for _ in range(_PAIRS):
            took = self._cold(peers.CASNAP)
            after = {name: self._raw(name, buffered=buffered) for name, buffered in limits.items()}
            for name in limits:
                self.ratios[name].append((before[name] + after[name]) / 2 / took)
            before = after
        for name in rotated([name for name in self.loads if name != peers.CASNAP], turn):
            self._cold(name)

    def _raw(self, name: str, *, buffered: bool) -> float:
        took = self.disk.read(buffered=buffered)
        self.cold[name].append(took)
        return took

    def _cold(self, name: str) -> float:
        drop(self.paths[name])
        took = seconds(self.loads[name])
        self.cold[name].append(took)
        return took


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload."""
    restores = Restores(settings, workload)
    for turn in range(settings.repeat):
        restores.warm_repetition(turn)
    for turn in range(settings.repeat):
        restores.cold_repetition(turn)
    restores.disk.close()
    remove(settings.path("restore"))
    return [row.to_json() for row in _rows(restores)]


def _rows(restores: Restores) -> list[Row]:
    nbytes = restores.nbytes
    size = f"{restores.workload}, {nbytes / MIB:.0f} MiB"
    warm_work = f"restore in place, verified, warm: {size}"
    cold_work = f"restore in place, verified, cold: {size}"
    ours = restores.warm[peers.CASNAP]
    rows = [timed(warm_work, peers.CASNAP, ours, nbytes)]
    for name in restores.loads:
        if name != peers.CASNAP:
            row = timed(warm_work, peers.loaded_by(name), restores.warm[name], nbytes)
            ratios = [b / a for a, b in zip(ours, restores.warm[name], strict=True)]
            rows.append(row.at_least(ratios, "× as fast", 1.5 if name == peers.DCP else None))
    ours = restores.cold[peers.CASNAP]
    rows += [
        timed(cold_work, peers.CASNAP, ours, nbytes),
        *(
            timed(cold_work, name, restores.cold[name], nbytes).at_least(
                ratios, " of the limit", 0.95
            )
            for name, ratios in restores.ratios.items()
        ),
    ]
    for name in restores.loads:
        if name != peers.CASNAP:
            row = timed(cold_work, peers.loaded_by(name), restores.cold[name], nbytes)
            ratios = [
                other / statistics.mean(ours[turn * _PAIRS : (turn + 1) * _PAIRS])
                for turn, other in enumerate(restores.cold[name])
            ]
            rows.append(row.at_least(ratios, "× as fast"))
    return rows
