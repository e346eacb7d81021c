"""Takes of a tiny state: what does the 20,000th that is kept, the 10,000th that is not, cost?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from casnap import Retention, Snapshot, StateDict
from tools.bench.measure import files_below, private_bytes, remove, seconds
from tools.bench.settings import MIB, Settings
from tools.bench.table import Row, timed

KEPT, LET_GO = "take of two numbers", "take of two numbers, keep_last=3"
_TIMED = 101
_EARLY = 100
_KB_EACH = 16.0
_MOST_MIB = 10.0


class Run:
    """A store of its own, and takes of two numbers into it."""

    def __init__(self, folder: Path, retention: Retention | None = None) -> None:
        """Take nothing yet."""
        self.folder = folder
        self.retention = retention
        self.times: list[float] = []

    def take(self) -> float:
        """Take, and return the seconds of it."""
        number = len(self.times)
        state = {"progress": StateDict(step=number, loss=1 / (number + 1))}
        path = self.folder / f"step_{number}"
        self.times.append(
            seconds(lambda: Snapshot.take(str(path), state, retention=self.retention))
        )
        return self.times[-1]

    def take_until(self, count: int) -> None:
        """Take until there were so many takes."""
        while len(self.times) < count:
            self.take()

    def sizes(self) -> tuple[int, int, int, int]:
        """Return how many files there are, and their bytes: of roots, and of all else."""
        roots, others = [], []
        for path in files_below(self.folder):
            (roots if "roots" in path.parts else others).append(path.stat().st_size)
        return len(roots), sum(roots), len(others), sum(others)


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload.

    The late takes alternate with the early takes of a second run, since the machine's speed drifts.
    """
    keep = Retention(keep_last=3) if workload == LET_GO else None
    last = 1_000 if settings.quick else 20_000 if keep is None else 10_000
    long = Run(settings.path("tiny", "first", "step").parent, keep)
    long.take_until(_EARLY)
    memory = private_bytes()
    long.take_until(last // 2)
    half = long.sizes()
    long.take_until(last)
    grown = private_bytes() - memory
    roots, root_bytes, others, other_bytes = long.sizes()
    each = (root_bytes + other_bytes) / last
    young = Run(settings.path("tiny", "second", "step").parent, keep)
    young.take_until(_EARLY)
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
        Row(
            workload,
            f"private memory, growth from take {_EARLY} to {last:,}",
            f"{grown / MIB:.1f} MiB",
        ).within(grown / MIB, _MOST_MIB, f"≤ {_MOST_MIB:g} MiB"),
    ]
    if keep is not None:
        rows += [
            Row(workload, f"files and bytes after {when:,} takes, roots aside", text)
            for when, text in (
                (last // 2, f"{half[2]}; {half[3] / 1e6:.2f} MB"),
                (last, f"{others}; {other_bytes / 1e6:.2f} MB"),
            )
        ]
        text = f"{roots / last:.2f}; {root_bytes / last / 1e3:.1f} kB"
        rows.append(Row(workload, "roots of each take, and their bytes", text))
    return [row.to_json() for row in rows]
