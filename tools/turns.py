"""Processor time and bytes of two checkouts of casnap, in turns, in memory.

    python -m tools.turns FOLDER OTHER [--repeat 5] [--dir /dev/shm]

Other work beside this changes times of the clock, but hardly those of the processor.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click

Figures = dict[str, float]
_TENSORS, _TENSOR_BYTES = 200, 1310720
_SMALL_TENSORS, _NUMBERS, _TAKES, _READS = 20_000, 100_000, 1000, 200


def _processor_seconds(work: Callable[[], object]) -> float:
    gc.collect()
    before = time.process_time()
    work()
    return time.process_time() - before


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _figures(folder: Path) -> Iterator[tuple[str, float]]:
    """Yield the name and the figure of each piece of work, done by the casnap that is imported."""
    import torch

    from casnap import Retention, StateDict, Store

    torch.set_num_threads(1)
    big = StateDict(**{f"t{i}": torch.randn(_TENSOR_BYTES // 4) for i in range(_TENSORS)})
    small = StateDict(**{f"l{i // 50}.{i % 50}": torch.randn(4) for i in range(_SMALL_TENSORS)})
    yield from _figures_of("200 tensors, 250 MiB", big, folder / "big", _TENSORS * _TENSOR_BYTES)
    yield from _figures_of(
        "20,000 tensors of 4 numbers", small, folder / "small", 16 * _SMALL_TENSORS
    )
    store = Store(folder / "tiny")
    numbers = StateDict(**{f"n{i}": i for i in range(_NUMBERS)})
    yield (
        "100,000 numbers: first take, s",
        _processor_seconds(lambda: Store(folder / "numbers").take({"n": numbers}, "n")),
    )

    def take_tiny(run: str, retention: Retention | None) -> None:
        for i in range(_TAKES):
            state = {"m": StateDict(a=i, b=i * 0.5)}
            store.take(state, f"{run}/step_{i}", retention=retention)

    yield "1,000 takes of two numbers, s", _processor_seconds(lambda: take_tiny("all", None))
    yield "bytes of such a take", _bytes_in(folder / "tiny") / _TAKES
    yield (
        "1,000 takes of two numbers, keep_last=3, s",
        _processor_seconds(lambda: take_tiny("last", Retention(keep_last=3))),
    )

    def read() -> None:
        for _ in range(_READS):
            Store(folder / "tiny")["all/step_5"].read_object("0/m/a")

    yield "200 times open and read_object, s", _processor_seconds(read)


def _figures_of(name: str, state: Any, folder: Path, nbytes: int) -> Iterator[tuple[str, float]]:
    from casnap import Store

    Store(folder / "warm").take({"m": state}, "warm")
    store = Store(folder / "store")
    yield f"{name}: first take, s", _processor_seconds(lambda: store.take({"m": state}, "a"))
    yield f"{name}: bytes beside the data", _bytes_in(folder / "store") - nbytes

    def take_again() -> None:
        for i in range(3):
            store.take({"m": state}, f"b{i}")

    yield f"{name}: 3 takes, nothing changed, s", _processor_seconds(take_again)
    yield f"{name}: bytes beside the data then", _bytes_in(folder / "store") - nbytes
    yield f"{name}: restore, s", _processor_seconds(lambda: store["a"].restore({"m": state}))


def _measure_fresh(checkout: Path, folder: Path) -> Figures:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "XDG_CACHE_HOME": f"{scratch}/c"}
        command = [sys.executable, str(Path(__file__).resolve()), "--measure", scratch]
        output = subprocess.run(
            command, env=environment, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    figures: Figures = json.loads(output)
    return figures


@click.command(help=__doc__)
@click.argument("checkouts", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option("--repeat", default=5, show_default=True)
@click.option("--dir", "folder", default="/dev/shm", type=click.Path(path_type=Path))
@click.option("--measure", type=click.Path(path_type=Path), hidden=True)
def main(checkouts: tuple[Path, ...], repeat: int, folder: Path, measure: Path | None) -> None:
    """Print the medians of each checkout."""
    if measure is not None:
        print(json.dumps(dict(_figures(measure))))
        return
    runs: dict[str, dict[Path, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(repeat):
        for checkout in checkouts:
            for name, figure in _measure_fresh(checkout.resolve(), folder).items():
                runs[name][checkout].append(figure)
    for name, by_checkout in runs.items():
        print(name, *(f"{median(by_checkout[c]):.6g}" for c in checkouts), sep=" | ")


if __name__ == "__main__":
    main()
