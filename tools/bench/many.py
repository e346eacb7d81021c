"""States of 50,000 small tensors and of 1,000,000 numbers: a take, and opening it for one."""

from __future__ import annotations

import statistics
from typing import Any

from tools.bench import peers, states
from tools.bench.measure import remove, seconds, settle, warm
from tools.bench.read_object import open_and_read, opened_rows, torchsnapshot_read
from tools.bench.settings import Settings
from tools.bench.table import Row, timed

WORKLOADS = ("50,000 entries", "1,000,000 entries, all numbers")
_ELEMENTS = 256


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one state: of tensors, with peers, or of numbers, without."""
    if "numbers" in workload:
        count = 100_000 if settings.quick else 1_000_000
        numbers = {f"number.{i}": i * 7 for i in range(count)}
        rows = _ours(settings, workload, numbers, take=6, read=0.060)
    else:
        count = 5_000 if settings.quick else 50_000
        state = states.fp32(count * _ELEMENTS * 4, count)
        rows = _ours(settings, workload, state, take=1.5, read=0.050)
        rows += _theirs(settings, workload, state)
    return [row.to_json() for row in rows]


def _ours(
    settings: Settings, work: str, state: dict[str, Any], *, take: float, read: float
) -> list[Row]:
    took = []
    for turn in range(settings.repeat):
        path = settings.path("many", str(turn), "step")
        settle()
        took.append(seconds(peers.casnap_take, state, path))
    warm(path.parent)
    names = list(state)[:: len(state) // (2 * settings.repeat)]
    here = [seconds(open_and_read, path, n) for n in names]
    row = timed(f"{work}: first take", peers.CASNAP, took)
    rows = [
        row.within(statistics.median(took), take, f"≤ {take:g} s"),
        *opened_rows(
            settings,
            f"{work}: open + one read_object",
            path,
            names,
            here,
            read,
            limit_loading="numbers" in work,
        ),
    ]
    remove(settings.path("many"))
    return rows


def _theirs(settings: Settings, work: str, state: states.State) -> list[Row]:
    """Measure the peers once each: some need half a minute."""
    rows = []
    for name, save in peers.savers().items():
        if name == peers.DCP_2:
            continue
        path = settings.path("many", "peer")
        settle()
        took = seconds(save, state, path)
        rows.append(timed(f"{work}: save, once", f"{name}, synced", [took]))
        if name == peers.TORCHSNAPSHOT:
            took = seconds(torchsnapshot_read, path, next(iter(state)))
            rows.append(timed(f"{work}: open + one read_object, once", name, [took]))
        remove(path)
    return rows
