"""What a store must hold: a model in memory, and the takes and retentions that are drawn."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from casnap import Retention, StateDict
from tests.support.faults import KEY

# In elements of 4 bytes: less than a chunk, a few, and some that fill no whole number of them.
SIZES = (10, 5_000, 16_384, 40_000, 70_000, 90_000)
NAMES = ("a", "b", "run/1", "run/2", "run/3", "run/deep/1", "run/deep/2")

STABLE = "stable"
"""The tag that moves."""
LATE = "late"
"""The key of what only a resume needs."""

Parts = tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """A snapshot as the model has it.

    Attributes:
        number: Tells it from all others.
        parts: What its state is made of; others may have some of these, or all.
        step: What a retention counts by.
        loss: What it compares, if anything.
        tags: The tags.
        order: Its number in the order of commits.
        thinned: Whether it has lost what only a resume needs.
    """

    number: int
    parts: Parts
    step: int
    loss: int | None
    tags: frozenset[str] = frozenset()
    order: int = -1
    thinned: bool = False

    @property
    def metadata(self) -> dict[str, int]:
        told = {"number": self.number, "step": self.step}
        return told if self.loss is None else {**told, "loss": self.loss}

    def content(self) -> dict[str, Any]:
        return {
            "parts": {
                str(i): torch.arange(SIZES[part % len(SIZES)], dtype=torch.int32) * (part + 1)
                for i, part in enumerate(self.parts)
            },
            "notes": list(self.parts),
        }

    def app_state(self) -> dict[str, StateDict]:
        state = {KEY: StateDict(self.content())}
        return state if self.thinned else {**state, LATE: StateDict(m=self.moments())}

    def moments(self) -> torch.Tensor:
        """Return what only a resume needs; another snapshot may have it among its parts."""
        return torch.arange(20_000, dtype=torch.int32) * (self.parts[0] + 1)


Model = dict[str, Held]


def in_order(model: Model) -> list[str]:
    return sorted(model, key=lambda name: model[name].order)


def may_take(model: Model, name: str, *, overwrite: bool) -> bool:
    return name not in model or (overwrite and not model[name].tags)


def kept(model: Model, retention: Retention, folder: str | None) -> Model:
    """Return what is left when a retention has been applied."""
    runs: dict[str, list[str]] = defaultdict(list)
    for name in in_order(model):
        runs[name.rpartition("/")[0]].append(name)
    left = dict(model)
    for place, names in runs.items():
        if folder is None or f"{place}/".startswith(f"{folder}/"):
            stay = _kept_of_run([(name, model[name]) for name in names], retention)
            left = {name: held for name, held in left.items() if name in stay or name not in names}
    return left


def thinned(model: Model, count: int, folder: str | None) -> Model:
    """Return the model when all but so many of the newest snapshots of each run are thinned."""
    left = dict(model)
    for name, held in model.items():
        place = name.rpartition("/")[0]
        run = [other for other in in_order(model) if other.rpartition("/")[0] == place]
        is_asked = folder is None or f"{place}/".startswith(f"{folder}/")
        if is_asked and name in run[:-count] and not held.tags:
            left[name] = replace(held, thinned=True)
    return left


def published(model: Model, name: str) -> Model:
    """Return the model when a tag is moved to a snapshot."""
    moved = {n: replace(held, tags=held.tags - {STABLE}) for n, held in model.items()}
    return {**moved, name: replace(moved[name], tags=moved[name].tags | {STABLE})}


def _kept_of_run(run: list[tuple[str, Held]], retention: Retention) -> set[str]:
    stay = {name for name, held in run if held.tags}
    if retention.keep_last:
        stay |= {name for name, _ in run[-retention.keep_last :]}
    if retention.keep_every:
        stay |= {name for name, held in run if held.step % retention.keep_every == 0}
    best: Any = retention.keep_best
    for _, count, mode in best:
        sign = -1 if mode == "max" else 1
        ranked = [(sign * h.loss, -h.order, n) for n, h in run if h.loss is not None]
        stay |= {n for *_, n in sorted(ranked)[:count]} if ranked else {n for n, _ in run}
    return stay


RETENTIONS = st.one_of(
    st.builds(Retention, keep_last=st.integers(1, 2), keep_every=st.none() | st.integers(2, 3)),
    st.builds(
        Retention,
        keep_best=st.tuples(st.just("loss"), st.integers(1, 2), st.sampled_from(["min", "max"])),
    ),
)
# Several times the same parts: chunks are shared in a snapshot, between snapshots, and come back.
PARTS = st.lists(st.integers(0, 8), min_size=1, max_size=4).map(tuple)
TAKES = st.tuples(st.sampled_from(NAMES), PARTS, st.integers(0, 6), st.none() | st.integers(0, 3))
