"""A long run: does the 1,000th incremental take cost more than the 10th?"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from tools.bench import peers, states
from tools.bench.measure import remove, seconds
from tools.bench.settings import MIB, Settings
from tools.bench.table import timed

_EARLY = range(5, 16)
_NBYTES = 64 * MIB
_TENSORS = 200
_SHARE = 0.01


class Run:
    """A store of its own and the takes into it."""

    def __init__(self, path: Path) -> None:
        """Build the state; nothing is taken yet."""
        self.path = path
        self.state = states.fp32(_NBYTES, _TENSORS)
        self.times = [0.0]

    def take(self) -> float:
        """Change 1 % of the tensors, take, and return the seconds of the take."""
        number = len(self.times)
        states.step(states.some(self.state, _SHARE, number))
        path = self.path / f"step_{number}"
        self.times.append(seconds(peers.casnap_take, self.state, path))
        return self.times[-1]


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows; ``workload`` names the only one.

    The late takes alternate with the early takes of a second run, since the disk's speed drifts
    by more than the difference that is looked for.
    """
    last = 40 if settings.quick else 1_000
    long = Run(settings.path("long", "first", "step").parent)
    late = range(last - 5, last + 6)
    while len(long.times) < late.start:
        long.take()
    young = Run(settings.path("long", "second", "step").parent)
    while len(young.times) < _EARLY.start:
        young.take()
    ratios = [long.take() / young.take() for _ in late]
    remove(settings.path("long"))
    plain = statistics.median(long.times[late.start :]) / statistics.median(
        long.times[_EARLY.start : _EARLY.stop]
    )
    rows = [
        timed(
            workload,
            f"{peers.CASNAP}, takes {late.start}–{late.stop - 1}",
            long.times[late.start :],
        ),
        timed(
            workload,
            f"{peers.CASNAP}, takes 5–15 of a second run, alternating",
            young.times[_EARLY.start :],
        ).at_most(ratios, "× its time", 1.2),
        timed(
            workload,
            f"{peers.CASNAP}, takes 5–15 of the same run, earlier",
            long.times[_EARLY.start : _EARLY.stop],
        ).at_most([plain], "× its time"),
    ]
    return [row.to_json() for row in rows]
