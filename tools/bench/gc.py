"""Collecting garbage: marking as a store grows, having nothing to do, and takes meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from casnap import Store
from casnap.storage.collecting.whole_marks import WholeMarks
from tools.bench import peers, states
from tools.bench.fresh import call
from tools.bench.measure import PeakMemory, remove, seconds, settle
from tools.bench.settings import GIB, MIB, Settings
from tools.bench.synthetic import Synthetic
from tools.bench.table import Row, timed

_GROWTH = ((100, 10_000), (1_000, 10_000), (100, 100_000), (300, 100_000), (1_000, 100_000))
_COLLECT = """
import itertools, sys
from casnap import Store
store = Store(sys.argv[1], create=False)
for turn in itertools.count():
    # Another share each time, since what was found for the same one is remembered.
    store.gc(repack=turn * 1e-12)
    print(turn, flush=True)
"""


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload: ``mark``, or ``takes meanwhile``."""
    if "meanwhile" in workload:
        return [row.to_json() for row in _takes_meanwhile(settings, workload)]
    rows = []
    for snapshots, chunks in _GROWTH[:1] if settings.quick else _GROWTH:
        rows += _marked(settings, workload, snapshots, chunks)
    return [row.to_json() for row in rows]


def _marked(settings: Settings, work: str, snapshots: int, chunks: int) -> list[Row]:
    path = settings.path("gc", "store")
    call(build, settings, path=str(path), snapshots=snapshots, chunks=chunks)
    settle()
    # A cache of its own makes a fresh process read all trees and segments from the store.
    cold = call(mark, settings, path=str(path), cache="cold")
    warm = call(mark, settings, path=str(path), cache="cold")
    first = call(collect, settings, path=str(path))
    again = call(collect, settings, path=str(path))
    work = f"{work}: {snapshots:,} snapshots of {chunks:,} chunks, {warm['live']:,} in all"
    largest = (snapshots, chunks) == _GROWTH[-1]
    rows = [
        timed(work, "mark, nothing cached", [cold["seconds"]]),
        timed(work, "mark, trees cached", [warm["seconds"]]),
        Row(work, "extra memory of mark", f"{cold['memory'] / MIB:.0f} MiB"),
        timed(work, f"gc that deletes {first['deleted']:,} packs", [first["seconds"]]),
        Row(work, "extra memory of that gc", f"{first['memory'] / MIB:.0f} MiB"),
        timed(work, "gc with nothing to do", [again["seconds"]]),
    ]
    if largest:
        rows[0] = rows[0].within(cold["seconds"], 60, "≤ 60 s")
        rows[2] = rows[2].within(cold["memory"], GIB, "≤ 1 GiB")
        rows[5] = rows[5].within(again["seconds"], 1, "≤ 1 s")
    remove(path.parent)
    return rows


def build(_settings: Settings, path: str, snapshots: int, chunks: int) -> None:
    """Make a synthetic store, a few of whose snapshots are deleted again."""
    synthetic = Synthetic(Path(path), chunks)
    for _ in range(snapshots + 5):
        synthetic.take()
    for step in range(5):
        synthetic.store.delete(f"run/step_{10 * step}")


def mark(settings: Settings, path: str, cache: str) -> dict[str, float]:
    """Mark what a store needs; return seconds, extra memory, and how many chunks are live."""
    os.environ["CASNAP_CACHE_DIR"] = str(settings.path("gc", cache))
    settings.path("gc", cache).mkdir(exist_ok=True)
    store = Store(path, create=False)._view.repository
    found: list[WholeMarks] = []
    with PeakMemory() as memory:
        took = seconds(lambda: found.append(WholeMarks(store, store.newest(), lambda *_: None)))
    return {"seconds": took, "memory": memory.extra, "live": found[0].count}


def collect(_settings: Settings, path: str) -> dict[str, float]:
    """Collect the garbage of a store without any grace."""
    store = Store(path, create=False)
    with PeakMemory() as memory:
        # Without copying: the chunks of a synthetic store have no bytes.
        report = store.gc(grace=0, repack=0)
    return {
        "seconds": report.seconds,
        "memory": memory.extra,
        "deleted": report.deleted_packs,
    }


class _Collector:
    """A process that collects one round after the other, and can be made to pause."""

    def __init__(self, store: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COLLECT, str(store)], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self.pause()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _takes_meanwhile(settings: Settings, work: str) -> list[Row]:
    """Take in turns beside a collector of the same store that never rests, and without it."""
    path = settings.path("gc", "busy")
    synthetic = Synthetic(path, 10_000 if settings.quick else 100_000)
    for _ in range(20 if settings.quick else 100):
        synthetic.take()
    state = states.fp32(settings.nbytes, 200)
    peers.casnap_take(state, path / "real" / "first")
    collector = _Collector(path)
    rows = []
    for title, share in (("nothing changed", 0.0), ("1 % changed", 0.01)):
        alone, beside = [], []
        for turn in range(3 * settings.repeat):
            alone.append(_take(state, path / "real" / f"{share}-alone-{turn}", share, turn))
            collector.go_on()
            beside.append(_take(state, path / "real" / f"{share}-beside-{turn}", share, -turn))
            collector.pause()
        ratios = [b / a for a, b in zip(alone, beside, strict=True)]
        rows += [
            timed(f"{work}, {title}", peers.CASNAP, alone),
            timed(f"{work}, {title}", f"{peers.CASNAP}, while gc marks", beside).at_most(
                ratios, "× its time", 1.1
            ),
        ]
    collector.end()
    remove(path.parent)
    return rows


def _take(state: states.State, path: Path, share: float, seed: int) -> float:
    if share:
        states.step(states.some(state, share, seed))
    settle()
    return seconds(peers.casnap_take, state, path)
