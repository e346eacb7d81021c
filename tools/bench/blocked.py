"""async_take: for how long it blocks, from the second take on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench import peers, states
from tools.bench.limits import memcpy_seconds
from tools.bench.measure import Times, fsync_tree, remove, rotated, seconds, settle
from tools.bench.settings import Settings
from tools.bench.table import Row, timed
from tools.bench.workload import Workload

DEFAULT = "dcp.async_save, default"
KEPT = "dcp.async_save, kept stager"
TORCHSNAPSHOT = "torchsnapshot.async_take (does not copy: later changes show)"

Start = Callable[[Path], Callable[[], object]]
"""Starts a save to a path; returns, once unblocked, what waits until it is durable."""


class Blocked(Workload):
    """Saves in the background, beside a copy of the state that is warm."""

    def __init__(self, settings: Settings, workload: str) -> None:
        """Let every contender save once, so that its buffers are warm."""
        super().__init__(settings, workload)
        self.copy = states.like(self.state)
        self.blocked: Times = defaultdict(list)
        self.durable: Times = defaultdict(list)
        self.memcpy: Times = defaultdict(list)
        self.ratios: Times = defaultdict(list)
        self.stager = peers.kept_stager()
        self.starts: dict[str, Start] = {
            DEFAULT: lambda path: self._dcp(path, None),
            KEPT: lambda path: self._dcp(path, self.stager),
        }
        if peers.installed("torchsnapshot"):
            self.starts[TORCHSNAPSHOT] = self._torchsnapshot
        self._ours("warm-up")
        self._peer(KEPT)
        self.blocked.clear()
        self.durable.clear()
        self.ratios.clear()
        self.memcpy.clear()

    def repetition(self, turn: int) -> None:
        """Measure casnap after a change of all tensors and after none, then the peers."""
        states.step(self.state.values())
        self._ours("changed")
        self._ours("unchanged")
        for name in rotated(list(self.starts), turn):
            states.step(self.state.values())
            self._peer(name)

    def _ours(self, kind: str) -> None:
        settle()
        self._names += 1
        path = self.settings.path("blocked", "store", f"step_{self._names}")
        before = memcpy_seconds(self.state, self.copy)
        took = self._timed(kind, self._casnap, path)
        after = memcpy_seconds(self.state, self.copy)
        self.memcpy[kind] += [before, after]
        self.ratios[kind].append(took / ((before + after) / 2))

    def _peer(self, name: str) -> None:
        settle()
        path = self.settings.path("blocked", "peer")
        self._timed(name, self.starts[name], path)
        remove(path)

    def _timed(self, name: str, start: Start, path: Path) -> float:
        waits: list[Callable[[], object]] = []
        blocked = seconds(lambda: waits.append(start(path)))
        self.blocked[name].append(blocked)
        self.durable[name].append(blocked + seconds(waits[0]))
        return blocked

    def _casnap(self, path: Path) -> Callable[[], object]:
        from casnap import Snapshot, StateDict

        return Snapshot.async_take(str(path), {"model": StateDict(**self.state)}).wait

    def _dcp(self, path: Path, stager: Any) -> Callable[[], object]:
        future = peers.dcp_async_save(self.state, path, stager)

        def wait() -> None:
            future.result()
            fsync_tree(path)

        return wait

    def _torchsnapshot(self, path: Path) -> Callable[[], object]:
        import torchsnapshot

        app_state = {"model": torchsnapshot.StateDict(**self.state)}
        pending = torchsnapshot.Snapshot.async_take(str(path), app_state)

        def wait() -> None:
            pending.wait()
            fsync_tree(path)

        return wait


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload."""
    blocked = Blocked(settings, workload)
    blocked.repeat()
    blocked.stager.close()
    remove(settings.path("blocked"))
    return [row.to_json() for row in _rows(blocked)]


def _rows(run: Blocked) -> list[Row]:
    size = run.size
    work = f"async_take, time blocked from the second on, all tensors changed: {size}"
    still = f"async_take, time blocked from the second on, nothing changed: {size}"
    ours, nbytes = run.blocked["changed"], run.nbytes
    rows = [
        timed(work, peers.CASNAP, ours, nbytes),
        timed(work, "limit: warm memcpy, all cores", run.memcpy["changed"], nbytes).at_most(
            run.ratios["changed"], "× its time", 1.25
        ),
    ]
    for name in run.starts:
        ratios = [a / b for a, b in zip(ours, run.blocked[name], strict=True)]
        bound = None if name == TORCHSNAPSHOT else 1
        row = timed(work, name, run.blocked[name], nbytes)
        rows.append(row.at_most(ratios, "× its time", bound))
    rows += [
        timed(still, peers.CASNAP, run.blocked["unchanged"], nbytes),
        timed(still, "limit: warm memcpy, all cores", run.memcpy["unchanged"], nbytes).at_most(
            run.ratios["unchanged"], "× its time", 1.25
        ),
    ]
    durable = f"the same, until durable: {size}"
    rows += [
        timed(durable, f"{peers.CASNAP}, all tensors changed", run.durable["changed"], nbytes),
        timed(durable, f"{peers.CASNAP}, nothing changed", run.durable["unchanged"], nbytes),
        *(timed(durable, f"{name}, synced", run.durable[name], nbytes) for name in run.starts),
    ]
    return rows
