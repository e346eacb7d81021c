"""What an average costs: ``python -m tools.averaging [dtype] [snapshots] [MiB] [tensors]``.

Prints the processor time of verified restores of all snapshots and a take of something new; that of
the average; and that of its arithmetic alone, by torch, in memory that is in the core's cache.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch

from casnap import StateDict, Store

REPETITIONS, BLOCK = 5, 1 << 15


def cost(work: Callable[[], object]) -> float:
    """Return the processor time of some work, in seconds."""
    before = time.process_time()
    work()
    return time.process_time() - before


def arithmetic(dtype: torch.dtype, snapshots: int, elements: int) -> None:
    """Sum, divide and cast blocks as an average does."""
    blocks = [torch.randn(BLOCK).to(dtype) for _ in range(snapshots)]
    total, wide = torch.empty(BLOCK), torch.empty(BLOCK)
    torch.set_num_threads(1)
    for _ in range(elements // BLOCK):
        total.copy_(blocks[0])
        for block in blocks[1:]:
            total.add_(block if dtype == torch.float32 else wide.copy_(block))
        blocks[0].copy_(total.div_(snapshots))


def main(name: str = "bfloat16", snapshots: int = 2, mib: int = 1024, tensors: int = 200) -> None:
    """Print the costs, as medians of interleaved repetitions."""
    dtype = getattr(torch, name)
    elements = (mib << 20) // dtype.itemsize
    state = {f"w{i}": torch.randn(elements // tensors).to(dtype) for i in range(tensors)}
    target = {path: torch.zeros_like(tensor) for path, tensor in state.items()}
    names = [f"run/{number}" for number in range(snapshots)]
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)

        def take(into: str) -> None:
            store.take({"model": StateDict(**state)}, into, overwrite=True)

        def restore() -> None:
            for each in names:
                store[each].restore({"model": StateDict(**target)})

        for number in range(snapshots + REPETITIONS):
            for tensor in state.values():
                tensor += 0.01 * (number + 1)
            if number < snapshots:
                take(names[number])
                continue
            if number == snapshots:
                restore()
            alike = cost(restore) + cost(lambda: take("new/take"))
            mean = cost(lambda: store.average(names, "new/mean", overwrite=True))
            costs.append((alike, mean, cost(lambda: arithmetic(dtype, snapshots, elements))))
            store.delete("new/mean")
            store.gc(grace=0)
    alike, mean, alone = (median(column) for column in zip(*costs, strict=True))
    ratio = median(mean / alike for alike, mean, _ in costs)
    print(f"{snapshots} restores and a take {alike:.2f} s, average {mean:.2f} s: {ratio:.2f} ×")
    print(f"its arithmetic alone {alone:.2f} s: {alone / alike:.2f} ×")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
