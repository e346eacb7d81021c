"""Takes: all new, nothing changed, one tensor in a hundred changed; a live state compared."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from tools.bench import peers, states
from tools.bench.limits import RawDisk, blake3_seconds
from tools.bench.measure import Times, remove, rotated, seconds, settle
from tools.bench.settings import MIB, Settings
from tools.bench.table import Row, timed
from tools.bench.workload import Workload

_PAIRS = 2
_UNCHANGED = 3
_CHANGED_SHARE = 0.01


class Saves(Workload):
    """Takes, and the saves of peers."""

    def __init__(self, settings: Settings, workload: str) -> None:
        """Take the state once into the store of the incremental takes."""
        super().__init__(settings, workload)
        self.disk = RawDisk(settings, self.nbytes)
        self.times: Times = defaultdict(list)
        self.ratios: Times = defaultdict(list)
        self.changed = 0
        self.store = settings.path("save", "incremental", "store")
        self.very_first = self._take()

    def repetition(self, turn: int) -> None:
        """Measure every contender once, casnap more often, each beside its limit."""
        self._first_takes()
        self._unchanged_takes()
        self._changed_take(turn)
        savers = peers.savers()
        for name in rotated(list(savers), turn):
            path = self.settings.path("save", "peer")
            settle()
            self.times[name].append(seconds(savers[name], self.state, path))
            remove(path)

    def _first_takes(self) -> None:
        before = self.disk.write()
        self.times["write"].append(before)
        for _ in range(_PAIRS):
            folder = self.settings.path("save", "first")
            folder.mkdir()
            settle()
            took = seconds(peers.casnap_take, self.state, folder / "step")
            remove(folder)
            after = self.disk.write()
            self.times["first"].append(took)
            self.times["write"].append(after)
            self.ratios["write"].append((before + after) / 2 / took)
            before = after

    def _unchanged_takes(self) -> None:
        witness = self.store / f"witness_{self._names}"
        peers.casnap_witness(self.state, witness)
        for _ in range(_UNCHANGED):
            settle()
            before = blake3_seconds(self.state.values())
            took = self._take()
            after = blake3_seconds(self.state.values())
            self.times["blake3"] += [before, after]
            self.times["unchanged"].append(took)
            self.ratios["blake3"].append((before + after) / 2 / took)
            compared = seconds(peers.casnap_compare, self.state, self._last())
            self.times["compare"].append(compared)
            self.ratios["compare"].append(after / compared)
            witnessed = seconds(peers.casnap_witness, self.state, witness)
            self.times["witness"].append(witnessed)
            self.ratios["witness"].append(took / witnessed)

    def _changed_take(self, turn: int) -> None:
        some = states.some(self.state, _CHANGED_SHARE, turn)
        states.step(some)
        self.changed = states.nbytes_of(some)
        settle()
        self.times["changed"].append(self._take())

    def _take(self) -> float:
        self._names += 1
        return seconds(peers.casnap_take, self.state, self._last())

    def _last(self) -> Path:
        return self.store / f"step_{self._names}"


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload."""
    saves = Saves(settings, workload)
    saves.repeat()
    remove(settings.path("save"))
    return [row.to_json() for row in _rows(saves)]


def _rows(saves: Saves) -> list[Row]:
    times, nbytes, size = saves.times, saves.nbytes, saves.size
    names = list(peers.savers())
    fastest = min(names, key=lambda name: statistics.median(times[name]))
    first = f"first take, all new, durable: {size}"
    unchanged = f"take with nothing changed: {size}"
    compared = f"comparison of a live state with a snapshot, all equal: {size}"
    witnessed = f"comparison of a live state with a witness, all equal: {size}"
    changed = f"take with 1 % of tensors ({saves.changed / MIB:.0f} MiB) changed: {size}"
    return [
        timed(first, peers.CASNAP, times["first"], nbytes),
        timed(first, f"{peers.CASNAP}, the first of a process", [saves.very_first], nbytes),
        timed(first, "limit: O_DIRECT write + fsync", times["write"], nbytes).at_least(
            saves.ratios["write"], " of the limit", 0.9
        ),
        *(
            timed(first, f"{name}, synced", times[name], nbytes).at_least(
                _against(times[name], times["first"], _PAIRS), "× as fast", 1
            )
            for name in names
        ),
        timed(unchanged, peers.CASNAP, times["unchanged"], nbytes),
        timed(unchanged, "limit: BLAKE3, all cores", times["blake3"], nbytes).at_least(
            saves.ratios["blake3"], " of the limit", 0.85
        ),
        timed(compared, peers.CASNAP, times["compare"], nbytes).at_least(
            saves.ratios["compare"], " of the speed of BLAKE3", 0.91
        ),
        timed(witnessed, peers.CASNAP, times["witness"], nbytes).at_least(
            saves.ratios["witness"], "× as fast as a take with nothing changed", 1
        ),
        timed(changed, peers.CASNAP, times["changed"]),
        timed(changed, f"fastest peer's save: {fastest}", times[fastest]).at_least(
            _against(times[fastest], times["changed"], 1), "× as fast", 6
        ),
    ]


def _against(theirs: list[float], ours: list[float], each: int) -> list[float]:
    """Return the ratios per repetition, of which ours has ``each`` samples."""
    return [
        other / statistics.mean(ours[turn * each : (turn + 1) * each])
        for turn, other in enumerate(theirs)
    ]
