"""A state of 50,000 small tensors: the take, and opening it for one of them."""

from __future__ import annotations

import statistics
from typing import Any

from tools.bench import peers, states
from tools.bench.measure import remove, seconds, settle, warm
from tools.bench.read_object import open_and_read, opened_rows, torchsnapshot_read
from tools.bench.settings import Settings
from tools.bench.table import Row, timed

_ELEMENTS = 256
_LIMIT = 0.050


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows; ``workload`` names the only one."""
    count = 5_000 if settings.quick else 50_000
    state = states.fp32(count * _ELEMENTS * 4, count)
    rows = _ours(settings, workload, state)
    rows += _theirs(settings, workload, state)
    return [row.to_json() for row in rows]


def _ours(settings: Settings, work: str, state: states.State) -> list[Row]:
    took = []
    for turn in range(settings.repeat):
        path = settings.path("many", str(turn), "step")
        settle()
        took.append(seconds(peers.casnap_take, state, path))
    warm(path.parent)
    names = list(state)[:: len(state) // (2 * settings.repeat)]
    here = [seconds(open_and_read, path, n) for n in names]
    work_of_take = f"{work}: first take"
    rows = [
        timed(work_of_take, peers.CASNAP, took).within(statistics.median(took), 2, "≤ 2 s"),
        *opened_rows(settings, f"{work}: open + one read_object", path, names, here, _LIMIT),
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
