"""Processor time of takes of many entries, and of the first read of a process.

To compare two checkouts, run it in turns with ``PYTHONPATH`` set to each of them::

    PYTHONPATH=. python tools/entries.py tensors 50000
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch

_TAKES = 3
_READ = """
import sys, time, torch, casnap
before = time.process_time()
casnap.Snapshot(sys.argv[1]).read_object(sys.argv[2])
print(f"open and read one, in a new process: {(time.process_time() - before) * 1e3:.1f} ms")
"""


def state_of(kind: str, count: int) -> dict[str, object]:
    """Return a state of so many entries: tensors of 1 KiB, or numbers."""
    if kind == "numbers":
        return {f"number.{i}": i * 7 for i in range(count)}
    rows = torch.rand(count, 256)
    return {f"tensor.{i}": row.clone() for i, row in enumerate(rows)}


@click.command(help=__doc__)
@click.argument("kind", type=click.Choice(["tensors", "numbers"]))
@click.argument("count", type=click.IntRange(min=1))
def main(kind: str, count: int) -> None:
    """Take several times, each into a new store, then read one entry in a new process."""
    with TemporaryDirectory(dir=".") as folder:
        base = Path(folder).resolve()
        os.environ["CASNAP_CACHE_DIR"] = str(base / "cache")
        (base / "cache").mkdir()
        from casnap import Snapshot, StateDict

        state = state_of(kind, count)
        for turn in range(_TAKES):
            path = base / f"store{turn}" / "step"
            before = time.process_time()
            Snapshot.take(str(path), {"model": StateDict(**state)})
            print(f"take {turn} of {count:,} {kind}: {time.process_time() - before:.3f} s")
        name = f"model/{next(iter(state))}"
        subprocess.run([sys.executable, "-c", _READ, str(path), name], check=True)


if __name__ == "__main__":
    main()
