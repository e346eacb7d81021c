"""Takes of a tiny state: what does the 20,000th of a store without gc cost, beside the 100th?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from casnap import Snapshot, StateDict
from tools.bench.measure import files_below, remove, seconds
from tools.bench.settings import Settings
from tools.bench.table import Row, timed

_TIMED = 101
_EARLY = 100
_KB_EACH = 16.0


class Run:
    """A store of its own, and takes of two numbers into it."""

    def __init__(self, folder: Path) -> None:
        """Take nothing yet."""
        self.folder = folder
        self.times: list[float] = []

    def take(self) -> float:
        """Take, and return the seconds of it."""
        number = len(self.times)
        state = {"progress": StateDict(step=number, loss=1 / (number + 1))}
        path = self.folder / f"step_{number}"
        self.times.append(seconds(Snapshot.take, str(path), state))
        return self.times[-1]

    def nbytes(self) -> int:
        """Return the bytes of all files."""
        return sum(path.stat().st_size for path in files_below(self.folder))


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows; ``workload`` names the only one.

    The late takes alternate with the early takes of a second run, since the machine's speed drifts.
    """
    last = 1_000 if settings.quick else 20_000
    long = Run(settings.path("tiny", "first", "step").parent)
    while len(long.times) < last:
        long.take()
    each = long.nbytes() / last
    young = Run(settings.path("tiny", "second", "step").parent)
    while len(young.times) < _EARLY:
        young.take()
    ratios = [long.take() / young.take() for _ in range(_TIMED)]
    remove(settings.path("tiny"))
    rows = [
        timed(workload, f"casnap, takes {last:,}–{last + _TIMED - 1:,}", long.times[last:]).at_most(
            ratios, "× its time", 1.2
        ),
        timed(
            workload,
            f"casnap, takes {_EARLY}–{_EARLY + _TIMED - 1} of a second run, alternating",
            young.times[_EARLY:],
        ),
        Row(workload, f"bytes in the store, per take of {last:,}", f"{each / 1e3:.1f} kB").within(
            each / 1e3, _KB_EACH, f"≤ {_KB_EACH:g} kB"
        ),
    ]
    return [row.to_json() for row in rows]
