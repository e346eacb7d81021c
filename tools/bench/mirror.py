"""What a mirror costs the takes of a training run, and how far it lags behind them.

Two runs take turns, one with a mirror on an S3 server of this machine and one without. After each
take, a run trains for as long as three takes last. The server runs on the same cores, so it costs
the takes beside it too.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch

from casnap import MirrorOptions, StateDict, Store
from tests.support.servers import shared
from tools.bench import peers, states
from tools.bench.measure import remove, seconds, settle
from tools.bench.settings import MIB, Settings
from tools.bench.table import Row, timed

WORKLOADS = ("takes of a run with a mirror",)

_CHANGED_SHARE = 0.1
_TAKES = 8
_TRAINING = 3.0


class Run:
    """A training run that takes into a store of its own.

    Attributes:
        times: How long each take took, but for the first.
        lags: How many snapshots the mirror lacked when each take began.
        waits: How long it took, after the last take, until the mirror had it.
    """

    def __init__(self, settings: Settings, name: str, **mirror: Any) -> None:
        self.state = states.fp32(settings.nbytes // 4, 100)
        self.folder = settings.path("mirror", name)
        self.store = Store(self.folder, **mirror)
        self.times: list[float] = []
        self.lags: list[int] = []
        self.waits: list[float] = []
        self._steps = 0

    def take(self, pause: float) -> None:
        """Train for some seconds, then take."""
        states.step(states.some(self.state, _CHANGED_SHARE, self._steps))
        _train(pause)
        if self.store.mirror is not None:
            self.lags.append(self.store.mirror.status().snapshots)
        took = seconds(self.store.take, {"model": StateDict(**self.state)}, f"step_{self._steps}")
        if self._steps:
            self.times.append(took)
        self._steps += 1

    def end(self) -> None:
        """Wait until the mirror has all."""
        if self.store.mirror is not None:
            self.waits.append(seconds(self.store.wait_mirrored))


def _train(pause: float) -> None:
    a = torch.ones(256, 256)
    until = time.monotonic() + pause
    while time.monotonic() < until:
        a = (a @ a) / 256


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload."""
    with ExitStack() as stack:
        server = stack.enter_context(shared("seaweedfs", settings.path("servers", "s").parent))
        bucket = stack.enter_context(server.bucket())
        there = MirrorOptions(f"{bucket.uri}/run", storage_options=bucket.storage_options)
        plain, mirrored = Run(settings, "plain"), Run(settings, "mirrored", mirror=there)
        for run in (plain, mirrored):
            run.take(0)
            run.end()
        for turn in range(settings.repeat):
            for run in (plain, mirrored) if turn % 2 else (mirrored, plain):
                _repetition(run)
        rows = _rows(plain, mirrored, _ratios(plain, mirrored), workload)
    remove(settings.path("mirror"))
    return [row.to_json() for row in rows]


def _repetition(run: Run) -> None:
    settle()
    pause = _TRAINING * statistics.median(run.times or [0.5])
    for _ in range(_TAKES):
        run.take(pause)
    run.end()


def _ratios(plain: Run, mirrored: Run) -> list[float]:
    def medians(run: Run) -> list[float]:
        return [
            statistics.median(run.times[i : i + _TAKES]) for i in range(0, len(run.times), _TAKES)
        ]

    return [b / a for a, b in zip(medians(plain), medians(mirrored), strict=True)]


def _rows(plain: Run, mirrored: Run, ratios: list[float], workload: str) -> list[Row]:
    nbytes = states.nbytes_of(plain.state.values())
    size = f"{workload}, {nbytes / MIB:.0f} MiB, 10 % changed"
    lag = Row(f"lag when a take begins: {size}", peers.CASNAP, f"{max(mirrored.lags)} snapshots")
    return [
        timed(f"take: {size}", f"{peers.CASNAP}, without a mirror", plain.times),
        timed(f"take: {size}", f"{peers.CASNAP}, with a mirror", mirrored.times).at_most(
            ratios, " of the time without", 1.05
        ),
        lag.within(max(mirrored.lags), 1, "≤ 1"),
        timed(f"until the mirror has the last one: {size}", peers.CASNAP, mirrored.waits),
    ]
