"""Run the benchmark and print its table: ``python -m tools.bench --help``."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench import (
    beside,
    blocked,
    codec,
    copy,
    dcp,
    device,
    files,
    first_async,
    gc,
    long_run,
    machine,
    many,
    memory,
    mirror,
    object_store,
    ranks,
    ranks_plan,
    read_cache,
    read_object,
    restore,
    save,
    stays,
    tiny,
)
from tools.bench.fresh import call
from tools.bench.limits import calibrated
from tools.bench.settings import GIB, Settings
from tools.bench.states import WORKLOADS
from tools.bench.table import Row, render

Measure = Callable[..., list[dict[str, Any]]]

SECTIONS: dict[str, tuple[Measure, tuple[str, ...]]] = {
    "save": (save.measure, WORKLOADS),
    "async": (blocked.measure, WORKLOADS),
    "first": (first_async.measure, WORKLOADS[:1]),
    "beside": (beside.measure, beside.WORKLOADS),
    "restore": (restore.measure, WORKLOADS),
    "dcp": (dcp.measure, WORKLOADS),
    "read": (read_object.measure, ("read_object of 10 MB from 10 GB, warm",)),
    "scattered": (read_object.measure_scattered, read_object.SCATTERED),
    "many": (many.measure, many.WORKLOADS),
    "memory": (memory.measure, ("extra memory",)),
    "ranks": (ranks.measure, ranks.WORLDS),
    "gc": (gc.measure, ("garbage", "take meanwhile")),
    "long": (long_run.measure, (long_run.GROWTH, *long_run.COST, long_run.BYTES)),
    "tiny": (tiny.measure, (tiny.KEPT, tiny.LET_GO)),
    "s3": (object_store.measure, object_store.WORKLOADS),
    "device": (device.measure, device.WORKLOADS),
    "stays": (stays.measure, stays.WORKLOADS),
    "codec": (codec.measure, codec.WORKLOADS),
    "mirror": (mirror.measure, mirror.WORKLOADS),
    "copy": (copy.measure, copy.WORKLOADS),
    "files": (files.measure, files.WORKLOADS),
    "cache": (read_cache.measure, read_cache.WORKLOADS),
    "plan": (ranks_plan.measure, ranks_plan.WORKLOADS),
}
# These need not know how the disk is fastest.
_WITHOUT_DISK = {"beside", "s3", "copy", "cache", "mirror", "codec", "device", "stays"}
_QUICK_NAMES = {"10 GB": "1 GB", "50,000": "5,000", "1,000,000": "100,000"}


def main() -> int:
    """Measure, print; return 1 if a section failed, 0 otherwise (a miss is not a failure)."""
    options = _options()
    quick = options.quick
    gib = options.gib or (0.25 if quick else 2.0)
    # What stays on an accelerator is measured on small machines, with large states.
    needed = 6 * gib if options.only == ["stays"] else max(14 * gib, 3 if quick else 14)
    needed = int(needed * GIB)
    Path(options.dir).mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(options.dir).free < needed:
        sys.exit(f"{options.dir}: {needed / GIB:.0f} GiB must be free; choose another --dir")
    folder = Path(tempfile.mkdtemp(prefix="casnap-bench-", dir=options.dir))
    settings = Settings(
        folder=str(folder),
        gib=gib,
        repeat=options.repeat or (2 if quick else 5),
        quick=quick,
        with_peers=not options.no_peers,
    )
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        names = options.only or list(SECTIONS)
        if not _WITHOUT_DISK.issuperset(names):
            settings = calibrated(settings)
        rows, failed = _measured(settings, names)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = machine.heading(settings, time.monotonic() - started) + "\n\n" + render(rows) + "\n"
    if options.out:
        Path(options.out).write_text(text)
    else:
        print(text)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, within two minutes")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="may be repeated")
    parser.add_argument("--gib", type=float, help="size of the workloads (2; quick: 0.25)")
    parser.add_argument("--repeat", type=int, help="interleaved repetitions (5; quick: 2)")
    parser.add_argument("--no-peers", action="store_true", help="leave them out of s3")
    parser.add_argument("--out", help="write the table to this file instead of standard output")
    parser.add_argument("--dir", default=".", help="a folder on the disk to be measured")
    return parser.parse_args()


def _measured(settings: Settings, names: list[str]) -> tuple[list[Row], bool]:
    """Return the rows and whether a section failed; what an interrupted run has is kept."""
    rows: list[Row] = []
    failed = False
    for name, workload in [(n, each) for n in names for each in SECTIONS[n][1]]:
        title = _named(workload, settings)
        start = time.monotonic()
        try:
            rows += [Row(**row) for row in call(SECTIONS[name][0], settings, workload=title)]
        except RuntimeError as error:
            failed = True
            rows.append(Row(f"{name}: {title}", "failed", "", verdict="**miss**"))
            print(f"  {error}", file=sys.stderr)
        except KeyboardInterrupt:
            rows.append(Row(f"{name}: {title}", "interrupted", ""))
            return rows, True
        print(f"{name}, {title}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return rows, failed


def _named(workload: str, settings: Settings) -> str:
    if settings.quick:
        for full, small in _QUICK_NAMES.items():
            workload = workload.replace(full, small)
    return workload


if __name__ == "__main__":
    sys.exit(main())
