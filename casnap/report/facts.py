"""Gather the facts that a report shows from a store, without reading a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from casnap import Diff, TensorHealth
from casnap.extending import Progress
from casnap.report.changes import ModuleChanges, ModulePath, changes_of, group_of, sizes_of

_MOST_RUNS = 12
"""How many runs are shown in full: those with the newest snapshots."""

T = TypeVar("T")


@dataclass(frozen=True)
class SnapshotFacts:
    """The facts of one snapshot.

    Attributes:
        name: Its name in the store.
        time: When it was taken, in seconds since the epoch.
        seconds: How long the take took.
        entries: How many entries its state has.
        logical_bytes: The bytes of its state.
        new_bytes: The bytes that its take added to the store.
        stored_bytes: The stored bytes that it refers to.
        unique_bytes: The stored bytes that no other snapshot refers to: deleting this one frees
            them.
        metrics: The numbers in its metadata.
        not_finite: The names of the metadata that are NaN or infinite.
        norms: The norms of groups of tensors whose paths differ in numbers alone, by group, if the
            take measured them.
        unhealthy: For each group with NaN or infinite elements, how many of its tensors have some.
        notes: Why no rule can delete it: its tags, or a note that a mirror lacks it.
    """

    name: str
    time: float
    seconds: float
    entries: int
    logical_bytes: int
    new_bytes: int
    stored_bytes: int
    unique_bytes: int
    metrics: dict[str, float]
    not_finite: tuple[str, ...]
    norms: dict[str, float]
    unhealthy: dict[str, int]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run: the snapshots of one folder, in the order of their commits.

    Attributes:
        folder: The name of the folder in the store; empty for the store itself.
        snapshots: The facts of each snapshot.
        changes: The changes in the last snapshots.
        sizes: Path → the bytes below it in the last snapshot.
    """

    folder: str
    snapshots: list[SnapshotFacts]
    changes: ModuleChanges
    sizes: dict[ModulePath, int]


@dataclass(frozen=True)
class Space:
    """The space that a store takes up.

    Attributes:
        stored_bytes: The bytes of all its files.
        live_bytes: The part of these bytes that the snapshots of the store need.
        saved_bytes: How many bytes deltas and compression save.
        waiting: What will free the other bytes, in words.
    """

    stored_bytes: int
    live_bytes: int
    saved_bytes: int
    waiting: str


@dataclass(frozen=True)
class Plan:
    """The snapshots that rules do not keep.

    Attributes:
        rules: The rules, in words.
        deleted: The names of these snapshots.
        freed_bytes: How many bytes a collection frees after they are deleted.
    """

    rules: str
    deleted: tuple[str, ...]
    freed_bytes: int


@dataclass(frozen=True)
class Owed:
    """The snapshots that the mirror of a store lacks.

    Attributes:
        mirror: The URI of the mirror.
        names: The names of these snapshots.
        new_bytes: The bytes that their takes added to the store.
        trouble: Why the mirror does not get them, in words; empty if that is not known.
    """

    mirror: str
    names: tuple[str, ...]
    new_bytes: int
    trouble: str


@dataclass(frozen=True)
class Service:
    """A follower of a store, and the snapshot that it serves.

    Attributes:
        label: Its host and process.
        follows: The folder and the tag that it follows, in words.
        name: The name of the snapshot that it serves; empty if it serves none.
        number: The number of the version; 0 if it serves none.
        noted_time: When it noted that, in seconds since the epoch, by its own clock.
        is_doubtful: Whether it seems to be dead.
    """

    label: str
    follows: str
    name: str
    number: int
    noted_time: float
    is_doubtful: bool


@dataclass(frozen=True)
class Facts:
    """The facts of a report.

    Attributes:
        uri: The store.
        chunk_size: The size of its chunks, in bytes.
        snapshots: How many snapshots were chosen.
        logical_bytes: The bytes of their states.
        space: The space that the store takes up.
        runs: The runs that are shown, the run with the newest snapshot first.
        more_runs: How many runs are not shown.
        unread: How many further snapshots were chosen that only a newer casnap can read.
        plan: The snapshots that go next; None if no rules were given.
        owed: The snapshots that the mirror lacks; None if the store has no mirror.
        services: The followers of the store.
    """

    uri: str
    chunk_size: int
    snapshots: int
    logical_bytes: int
    space: Space
    runs: list[RunFacts]
    more_runs: int
    unread: int = 0
    plan: Plan | None = None
    owed: Owed | None = None
    services: tuple[Service, ...] = ()


def gather(
    uri: str,
    chunk_size: int,
    snapshots: Sequence[tuple[str, T]],
    space: Space,
    facts_of: Callable[[T, bool], SnapshotFacts],
    sizes_in: Callable[[T], Iterable[tuple[str, int]]],
    compare: Callable[[T, T], Diff],
    most: int,
    progress: Progress | None = None,
) -> Facts:
    """Gather the facts of a report on some snapshots.

    Args:
        uri: The store.
        chunk_size: The size of its chunks, in bytes.
        snapshots: The snapshots, in the order of their commits: for each, its name, and a *handle*,
            which is any object by which the caller knows the snapshot.
        space: The space that the whole store takes up.
        facts_of: Given a handle, returns the facts of the snapshot; with norms if it is told that
            the snapshot is one of the last ones of a run that is shown.
        sizes_in: Given a handle, returns the paths of all tensors and values, with their bytes.
        compare: Given two handles, returns the differences between the snapshots.
        most: How many snapshots of each run to compare with the one before.
        progress: Called as ``progress(phase, done, total)``.
    """
    by_folder: dict[str, list[T]] = {}
    for name, handle in snapshots:
        folder = name.rpartition("/")[0]
        # Put last again, so that folders end up in the order of their newest snapshots.
        by_folder[folder] = by_folder.pop(folder, [])
        by_folder[folder].append(handle)
    newest = list(reversed(by_folder))
    runs, more = newest[:_MOST_RUNS], newest[_MOST_RUNS:]
    shown = [
        _run(folder, by_folder[folder], facts_of, sizes_in, compare, most, progress)
        for folder in runs
    ]
    others = [facts_of(handle, False) for folder in more for handle in by_folder[folder]]
    described = [*others, *(facts for run in shown for facts in run.snapshots)]
    return Facts(
        uri=uri,
        chunk_size=chunk_size,
        snapshots=len(snapshots),
        logical_bytes=sum(facts.logical_bytes for facts in described),
        space=space,
        runs=shown,
        more_runs=len(more),
    )


def metrics_in(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a snapshot's metadata that charts can draw."""
    return {key: value for key, value in _numbers_in(metadata) if abs(value) < 1e300}


def not_finite_in(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of a snapshot's metadata whose values are NaN or infinite."""
    return tuple(key for key, value in _numbers_in(metadata) if not math.isfinite(value))


def norms_of(health: Mapping[str, TensorHealth]) -> tuple[dict[str, float], dict[str, int]]:
    """Return the norm of each group of tensors, and how many tensors of it are not finite.

    Args:
        health: What a take has measured, by path.
    """
    norms: dict[str, float] = {}
    unhealthy: dict[str, int] = {}
    for path, measured in health.items():
        group = group_of(path)
        norms[group] = math.hypot(norms.get(group, 0.0), measured.norm)
        if not measured.is_finite:
            unhealthy[group] = unhealthy.get(group, 0) + 1
    return norms, unhealthy


def _numbers_in(metadata: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in metadata.items():
        # An int may be too large for a float.
        if type(value) is float or (type(value) is int and abs(value) < 1e300):
            yield key, float(value)


def _run(
    folder: str,
    snapshots: list[T],
    facts_of: Callable[[T, bool], SnapshotFacts],
    sizes_in: Callable[[T], Iterable[tuple[str, int]]],
    compare: Callable[[T, T], Diff],
    most: int,
    progress: Progress | None,
) -> RunFacts:
    compared = snapshots[-most - 1 :]
    first = len(snapshots) - len(compared)
    facts = [facts_of(handle, number >= first) for number, handle in enumerate(snapshots)]

    def diffs() -> Iterator[Diff]:
        for number, (before, after) in enumerate(pairwise(compared)):
            if progress is not None:
                progress("comparing snapshots", number, len(compared) - 1)
            yield compare(before, after)

    sizes = sizes_of(sizes_in(compared[-1]))
    changes = changes_of([each.name for each in facts[first + 1 :]], diffs(), sizes)
    return RunFacts(folder, facts, changes, sizes)
