"""Extra memory of a take and of a restore, each in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.bench import peers, states
from tools.bench.fresh import call
from tools.bench.measure import PeakMemory, remove, settle
from tools.bench.settings import GIB, MIB, Settings
from tools.bench.table import Row

_BOUND = 400 * MIB
_TENSORS = 200


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows; ``workload`` names the only one."""
    sizes = (2 * settings.gib,) if settings.quick else (2.0, 8.0)
    rows = []
    for gib in sizes:
        rows += _contender(settings, workload, peers.CASNAP, gib)
    for name in [] if settings.quick else peers.loaders():
        rows += _contender(settings, workload, name, sizes[0])
    return [row.to_json() for row in sorted(rows, key=lambda row: row.work)]


def _contender(settings: Settings, work: str, name: str, gib: float) -> list[Row]:
    path = settings.path("memory", "saved")
    settle()
    rows = []
    for verb in ("take", "restore in place"):
        extra = call(extra_bytes, settings, name=name, verb=verb, gib=gib, path=str(path))
        who = name if verb == "take" else peers.loaded_by(name)
        row = Row(f"{work} of {verb}, {gib:g} GiB", who, f"{extra / MIB:.0f} MiB")
        if name == peers.CASNAP:
            row = row.within(extra, _BOUND, "≤ 400 MiB")
        rows.append(row)
    remove(path.parent)
    return rows


def extra_bytes(_settings: Settings, name: str, verb: str, gib: float, path: str) -> int:
    """Return the peak of one take or restore above what the process held before, in bytes."""
    save, load = _verbs(name)
    state = states.fp32(int(gib * GIB), _TENSORS)
    work = save if verb == "take" else load
    with PeakMemory() as memory:
        work(state, Path(path))
    return memory.extra


def _verbs(name: str) -> tuple[peers.Save, peers.Load]:
    if name == peers.CASNAP:
        import casnap  # noqa: F401 - the import is not what is measured

        return peers.casnap_take, peers.casnap_restore
    return peers.loaders()[name]
