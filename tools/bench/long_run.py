"""Long runs: does the 1,000th take cost more than the 10th, what do collections cost, and leave?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from casnap import Retention, StateDict, Store
from casnap.backends.local.backend import LocalBackend
from casnap.storage.collecting import automatic
from casnap.storage.collecting.gc import GcReport
from tools.bench import peers, states
from tools.bench.measure import files_below, remove, seconds, settle
from tools.bench.settings import MIB, Settings
from tools.bench.table import Row, timed

GROWTH = "incremental take of 64 MiB, 1 % changed each step"
COST = (
    "collections beside takes of 64 MiB, keep_last=2",
    "collections beside takes of 64 MiB, 1 % changed, keep_last=2",
)
BYTES = "bytes of 64 MiB, 1 % changed, keep_last=3"
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
    """Return the rows of one workload."""
    if workload in COST:
        return [row.to_json() for row in _cost(settings, workload)]
    if workload == BYTES:
        return [_bytes(settings, workload).to_json()]
    return _growth(settings, workload)


def _growth(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of takes late in a run.

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


class _Rotation:
    """A store of its own, takes of which the last few are kept, and what its collections cost."""

    def __init__(self, path: Path, keep: int, share: float, gc: str) -> None:
        self.store = Store(path)
        self.store.configure(gc=gc)
        self.collector = automatic.AutomaticCollector.of(self.store._view.repository)
        self.state = states.fp32(_NBYTES, _TENSORS)
        self.times: list[float] = []
        self.processor_seconds = 0.0
        self._keep, self._share = Retention(keep_last=keep), share

    def change(self) -> None:
        states.step(states.some(self.state, self._share, len(self.times)))

    def take(self) -> None:
        state = {"model": StateDict(**self.state)}
        began = time.process_time()
        name = f"step_{len(self.times)}"
        self.times.append(seconds(lambda: self.store.take(state, name, retention=self._keep)))
        self.processor_seconds += time.process_time() - began

    def wait(self) -> float:
        """Wait for the collection under way; return the seconds."""
        worker = self.collector._worker
        return 0.0 if worker is None else seconds(worker.wait)


class _Clock:
    """The processor time of this process while it is counted."""

    def __init__(self) -> None:
        self._before = 0.0
        self._began: float | None = None

    def __call__(self) -> float:
        since = 0.0 if self._began is None else time.process_time() - self._began
        return self._before + since

    @contextmanager
    def counted(self) -> Iterator[None]:
        self._began = time.process_time()
        try:
            yield
        finally:
            self._before, self._began = self(), None


def _cost(settings: Settings, work: str) -> list[Row]:
    """Take in turns, ten at a time, with collections and without any.

    A collection that is not over after its ten takes is waited for, and counts as theirs. For the
    collector the process does nothing but these takes: neither what it does before and between
    them, nor what the run without collections spends, allows it more.
    """
    share = 0.01 if "1 %" in work else 1.0
    reports: list[GcReport] = []
    collect = automatic.collect

    def collect_and_note(*arguments: Any) -> GcReport:
        reports.append(collect(*arguments))
        return reports[-1]

    automatic.collect = collect_and_note
    clock, deleting = _Clock(), [0.0]
    automatic.time = SimpleNamespace(monotonic=time.monotonic, sleep=time.sleep, process_time=clock)
    delete_all = LocalBackend.delete_all

    def delete_and_note(*arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return delete_all(*arguments)
        finally:
            deleting[0] += time.thread_time() - began

    LocalBackend.delete_all = delete_and_note
    auto, off = (
        _Rotation(settings.path("cost", gc, "store").parent, 2, share, gc) for gc in ("auto", "off")
    )
    for each in (off, auto):
        for _ in range(10):
            each.change()
            each.take()
    auto.wait()
    reports.clear()
    off.processor_seconds = deleting[0] = 0.0
    ratios = []
    for _ in range(2 if settings.quick else 10):
        totals = []
        for each in (auto, off):
            for _ in range(10):
                each.change()
                with clock.counted() if each is auto else nullcontext():
                    each.take()
            with clock.counted() if each is auto else nullcontext():
                waited = each.wait()
            totals.append(sum(each.times[-10:]) + waited)
            deleted = deleting[0]
            off.store.gc(grace=0)
            deleting[0] = deleted
            settle()
        ratios.append(totals[0] / totals[1])
    remove(settings.path("cost"))
    spent = sum(report.processor_seconds for report in reports)
    own = max(1e-9, off.processor_seconds)
    part = spent / own
    count = len(ratios) * 10
    longest = max(auto.times[10:]) / statistics.median(off.times[10:])
    without = max(off.times[10:]) / statistics.median(off.times[10:])
    return [
        timed(
            work, f"{peers.CASNAP}, {count} takes and {len(reports)} collections", auto.times[10:]
        ).at_most(ratios, "× the time without", 1.03),
        timed(work, f"{peers.CASNAP}, without", off.times[10:]),
        Row(
            work, "the longest take, × the median without", f"{longest:.2f}; without {without:.2f}"
        ).within(longest, max(1.2, without), "≤ 1.2, or the longest without"),
        Row(work, "processor time of collections, of that of the takes", f"{part:.1%}").within(
            part, 0.05, "≤ 5 %"
        ),
        Row(work, "– of deleting the files itself", f"{deleting[0] / own:.1%}"),
    ]


def _bytes(settings: Settings, work: str) -> Row:
    """Take a thousand times; compare what the disk holds with what the kept snapshots need."""
    run = _Rotation(settings.path("rotation", "store").parent, 3, _SHARE, "auto")
    most = 0.0
    count = 60 if settings.quick else 1_000
    for number in range(count):
        run.change()
        run.take()
        if number >= 50 and number % 10 == 0:
            most = max(most, _stored(run))
    run.wait()
    needed = run.store.gc(dry_run=True).live_bytes
    row = Row(
        work,
        f"{peers.CASNAP}, stored after {count:,} takes, of what is needed",
        f"{_stored(run) / needed:.2f} ×; at most {most / needed:.2f} ×",
    ).within(_stored(run) / needed, 1.5, "≤ 1.5")
    remove(settings.path("rotation"))
    return row


def _stored(run: _Rotation) -> int:
    folder = Path(run.store.uri, "casnap-store/packs")
    total = 0
    for file in files_below(folder):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total
