"""Breadth-first search through all states of a model, so that the first trace is a shortest one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S")


class Model(Protocol[S]):
    def initial(self) -> S: ...
    def steps(self, state: S) -> Iterable[tuple[str, S]]:
        """Return what may happen next: what one says of it, and the state after it."""

    def violation(self, state: S) -> str | None:
        """Return which invariant does not hold, and for what."""


@dataclass(frozen=True)
class Found(Generic[S]):
    states: int
    seconds: float
    violation: str | None
    trace: list[str]
    final: S | None

    def __str__(self) -> str:
        if self.violation is None:
            return f"holds in {self.states} states ({self.seconds:.1f} s)"
        lines = [f"{n}. {line}" for n, line in enumerate(self.trace, 1)]
        return "\n".join([*lines, f"=> {self.violation} ({self.states} states)"])


def explore(model: Model[S], at_most: int = 10_000_000) -> Found[S]:
    """Visit every reachable state, until an invariant fails.

    Raises:
        MemoryError: There are more states than that; the bounds of the model are too wide.
    """
    # Nothing here is part of a cycle, and millions of tuples would be looked at for one.
    gc.disable()
    try:
        return _explore(model, at_most)
    finally:
        gc.enable()


def _explore(model: Model[S], at_most: int) -> Found[S]:
    began = time.process_time()
    start = model.initial()
    parents: dict[S, S | None] = {start: None}
    queue = [start]
    while queue:
        following: list[S] = []
        for state in queue:
            for _, after in model.steps(state):
                if after in parents:
                    continue
                parents[after] = state
                wrong = model.violation(after)
                if wrong is not None:
                    seconds = time.process_time() - began
                    trace = _trace(model.steps, parents, after)
                    return Found(len(parents), seconds, wrong, trace, after)
                following.append(after)
        if len(parents) > at_most:
            raise MemoryError(f"more than {at_most} states")
        queue = following
    return Found(len(parents), time.process_time() - began, None, [], None)


def _trace(
    steps: Callable[[S], Iterable[tuple[str, S]]], parents: dict[S, S | None], last: S
) -> list[str]:
    lines = []
    after, before = last, parents[last]
    while before is not None:
        lines.append(next(label for label, state in steps(before) if state == after))
        after, before = before, parents[before]
    return lines[::-1]
