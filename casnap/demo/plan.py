"""The settings of one run of the demo."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from casnap.errors import CasnapError

# With more threads, so small a model hardly trains faster, and slower where cores are shared.
THREADS = 1


class DemoError(CasnapError):
    """The demo cannot go on."""


@dataclass(frozen=True)
class Plan:
    """The settings of a training process.

    Attributes:
        store: The store's folder.
        run: The prefix of this run's snapshots.
        start: The snapshot to start from; None for the newest of the run, if any.
        takes: Whether snapshots are taken on the way.
        scratch: The folder that ``torch.save`` writes to.
        seed: The seed of everything random.
        threads: The number of threads that torch uses.
        base_steps: Steps of the training before the fine-tuning.
        steps: Steps of the fine-tuning.
        adapter_steps: How many of them train the adapters alone.
        take_every: Steps from one take to the next.
        width: Width of the model, a multiple of 32.
        layers: Number of transformer layers.
        context: Bytes of text that the model sees at once.
        batch: Windows of text in a step.
    """

    store: str
    run: str
    start: str | None
    takes: bool
    scratch: str
    seed: int
    threads: int
    base_steps: int
    steps: int
    adapter_steps: int
    take_every: int
    width: int = 256
    layers: int = 6
    context: int = 64
    batch: int = 8


def plan_for(folder: str, number: int, *, steps: int, quick: bool, seed: int | None) -> Plan:
    """Plan the run; ``scratch`` is still to be named."""
    every = max(1, steps // 20)
    plan = Plan(
        store=folder,
        run=f"run{number}",
        start=None,
        takes=True,
        scratch="",
        seed=number if seed is None else seed,
        threads=THREADS,
        base_steps=60,
        steps=steps,
        adapter_steps=max(1, steps * 3 // 4 // every) * every,
        take_every=every,
    )
    return replace(plan, base_steps=4, width=64, layers=2) if quick else plan


def next_run(folder: Path) -> int:
    """Return the number of the first run that ``folder`` does not hold yet.

    Raises:
        DemoError: The folder is a file, or holds something other than a store.
    """
    if not folder.exists():
        return 1
    if not folder.is_dir():
        raise DemoError(f"{folder} is not a folder; name a new one")
    if not folder.joinpath("casnap-store").exists() and any(folder.iterdir()):
        raise DemoError(
            f"{folder} holds something other than a casnap store; name a new or an empty folder"
        )
    found = (re.fullmatch(r"run(\d+)", path.name) for path in folder.iterdir())
    return max((int(match[1]) for match in found if match), default=0) + 1
