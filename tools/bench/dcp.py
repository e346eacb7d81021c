"""DCP through casnap: beside DCP's own writer and reader, and beside native takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from tools.bench import peers, states
from tools.bench.measure import Times, fsync_tree, remove, rotated, seconds, settle, warm
from tools.bench.settings import Settings
from tools.bench.table import Row, timed
from tools.bench.workload import Workload

OURS = "dcp through **casnap**"
THEIRS = "dcp, FileSystemWriter(sync_files=True)"
NATIVE = "casnap, natively"


class DcpRuns(Workload):
    """Saves and loads by each contender."""

    def __init__(self, settings: Settings, workload: str) -> None:
        """Save the state once by each contender."""
        super().__init__(settings, workload)
        self.target = states.like(self.state)
        self.first: Times = defaultdict(list)
        self.unchanged: Times = defaultdict(list)
        self.blocked: Times = defaultdict(list)
        self.load: Times = defaultdict(list)
        self.saves = {OURS: self._save_ours, THEIRS: self._save_theirs, NATIVE: peers.casnap_take}
        self.loads = {OURS: self._load_ours, THEIRS: peers.dcp_load, NATIVE: peers.casnap_restore}
        self.kept = settings.path("dcp", "kept")
        for name in self.saves:
            self._save_again(name)
            self._check(name)
            self._save_in_background(name)
        self.blocked.clear()

    def repetition(self, turn: int) -> None:
        """Measure each contender once."""
        for name in rotated(list(self.saves), turn):
            settle()
            path = self.settings.path("dcp", "first", "step")
            self.first[name].append(seconds(self.saves[name], self.state, path))
            remove(path.parent)
            settle()
            self.unchanged[name].append(self._save_again(name))
            self._save_in_background(name)
            warm(self._folder(name))
            settle()
            path = self._folder(name) / "step_1"
            self.load[name].append(seconds(self.loads[name], self.target, path))

    def _folder(self, name: str) -> Path:
        return self.kept / str(list(self.saves).index(name))

    def _save_again(self, name: str) -> float:
        self._names += 1
        folder = self._folder(name)
        step = "step_1" if not folder.exists() else f"step_{self._names}"
        folder.mkdir(parents=True, exist_ok=True)
        took = seconds(self.saves[name], self.state, folder / step)
        if name == THEIRS and step != "step_1":
            remove(folder / step)
        return took

    def _check(self, name: str) -> None:
        for tensor in self.target.values():
            tensor.zero_()
        self.loads[name](self.target, self._folder(name) / "step_1")
        if not states.same(self.state, self.target):
            raise RuntimeError(f"{name} did not bring the state back")

    def _save_in_background(self, name: str) -> None:
        if name == NATIVE:
            return
        path = self.settings.path("dcp", "background", "step")
        writer = _writer(path) if name == OURS else dcp.FileSystemWriter(path, sync_files=True)
        settle()
        futures: list[Any] = []

        def start() -> None:
            futures.append(dcp.async_save({"model": self.state}, storage_writer=writer))

        self.blocked[name].append(seconds(start))
        futures[0].result()
        remove(path.parent)

    @staticmethod
    def _save_ours(state: states.State, path: Path) -> None:
        dcp.save({"model": state}, storage_writer=_writer(path))

    @staticmethod
    def _save_theirs(state: states.State, path: Path) -> None:
        dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
        fsync_tree(path)

    @staticmethod
    def _load_ours(state: states.State, path: Path) -> None:
        from casnap.integrations.dcp import CasnapReader

        dcp.load({"model": state}, storage_reader=CasnapReader(path))


def _writer(path: Path) -> Any:
    from casnap.integrations.dcp import CasnapWriter

    return CasnapWriter(path)


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload."""
    runs = DcpRuns(settings, workload)
    runs.repeat()
    remove(settings.path("dcp"))
    return [row.to_json() for row in _rows(runs)]


def _rows(runs: DcpRuns) -> list[Row]:
    size, rows = runs.size, []
    works: list[tuple[str, Times, float]] = [
        (f"dcp.save, all new, durable: {size}", runs.first, 1.5),
        (f"dcp.save with nothing changed: {size}", runs.unchanged, 5),
        (f"dcp.load, warm: {size}", runs.load, 1.5),
    ]
    for work, times, faster in works:
        rows += [
            timed(work, OURS, times[OURS], runs.nbytes),
            timed(work, THEIRS, times[THEIRS], runs.nbytes).at_least(
                _each(lambda ours, other: other / ours, times, THEIRS), "× as fast", faster
            ),
            timed(work, NATIVE, times[NATIVE], runs.nbytes).at_most(
                _each(lambda ours, other: ours / other, times, NATIVE), "× its time", 1.15
            ),
        ]
    work = f"dcp.async_save, time blocked from the second on: {size}"
    return [
        *rows,
        timed(work, OURS, runs.blocked[OURS], runs.nbytes),
        timed(work, THEIRS, runs.blocked[THEIRS], runs.nbytes).at_most(
            _each(lambda ours, other: ours / other, runs.blocked, THEIRS), "× its time", 1
        ),
    ]


def _each(ratio: Callable[[float, float], float], times: Times, name: str) -> list[float]:
    return [ratio(ours, other) for ours, other in zip(times[OURS], times[name], strict=True)]
