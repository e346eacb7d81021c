"""Gather the facts that a report shows from a store, without reading a tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

from casnap import Diff
from casnap.extending import Progress

_MOST_RUNS = 12
"""How many runs are shown in full: those with the newest snapshots."""
_MOST_MODULES = 160
_MOST_PARTS = 32
"""How many times a path is split: deeper modules are not told apart."""
_SEPARATORS = re.compile(r"[/.]")
_NUMBER = re.compile(r"[0-9]{1,18}")

T = TypeVar("T")
ModulePath: TypeAlias = tuple[str, ...]
"""The modules that lead to an entry, and its own name."""


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
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ModuleChanges:
    """For each module and snapshot, the share of bytes that differ from the snapshot before.

    Modules that never change are left out.

    Attributes:
        snapshots: The names of the snapshots, without the first one, which follows no other.
        modules: The names of the modules.
        shares: For each module, a list of shares from 0 to 1, one for each snapshot.
    """

    snapshots: list[str]
    modules: list[str]
    shares: list[list[float]]


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
        stored_bytes: The bytes of all packs and of the index.
        live_bytes: The part of these bytes that the snapshots of the store need.
        saved_bytes: How many bytes deltas and compression save.
    """

    stored_bytes: int
    live_bytes: int
    saved_bytes: int


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
    """

    uri: str
    chunk_size: int
    snapshots: int
    logical_bytes: int
    space: Space
    runs: list[RunFacts]
    more_runs: int


def gather(
    uri: str,
    chunk_size: int,
    snapshots: Sequence[tuple[T, SnapshotFacts]],
    space: Space,
    sizes_in: Callable[[T], Iterable[tuple[str, int]]],
    compare: Callable[[T, T], Diff],
    most: int,
    progress: Progress | None = None,
) -> Facts:
    """Gather the facts of a report on some snapshots.

    Args:
        uri: The store.
        chunk_size: The size of its chunks, in bytes.
        snapshots: The snapshots, in the order of their commits: any object by which the caller
            knows the snapshot, its *handle*, and the facts.
        space: The space that the whole store takes up.
        sizes_in: Given a handle, returns the paths of all tensors and values, with their bytes.
        compare: Given two handles, returns the differences between the snapshots.
        most: How many snapshots of each run to compare with the one before.
        progress: Called as ``progress(phase, done, total)``.
    """
    by_folder: dict[str, list[tuple[T, SnapshotFacts]]] = {}
    for snapshot, facts in snapshots:
        folder = facts.name.rpartition("/")[0]
        # Put last again, so that folders end up in the order of their newest snapshots.
        by_folder[folder] = by_folder.pop(folder, [])
        by_folder[folder].append((snapshot, facts))
    newest = list(reversed(by_folder))
    runs = [
        _run(folder, by_folder[folder], sizes_in, compare, most, progress)
        for folder in newest[:_MOST_RUNS]
    ]
    return Facts(
        uri=uri,
        chunk_size=chunk_size,
        snapshots=len(snapshots),
        logical_bytes=sum(facts.logical_bytes for _, facts in snapshots),
        space=space,
        runs=runs,
        more_runs=len(newest) - len(runs),
    )


def metrics_in(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a snapshot's metadata that charts can draw."""
    return {
        key: float(value)
        for key, value in metadata.items()
        if type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)
    }


def _run(
    folder: str,
    snapshots: list[tuple[T, SnapshotFacts]],
    sizes_in: Callable[[T], Iterable[tuple[str, int]]],
    compare: Callable[[T, T], Diff],
    most: int,
    progress: Progress | None,
) -> RunFacts:
    compared = snapshots[-most - 1 :]
    sizes = _summed((_modules_of(path), nbytes) for path, nbytes in sizes_in(compared[-1][0]))
    sizes = {parts: nbytes for parts, nbytes in sizes.items() if nbytes}
    changes = _changes(compared, compare, sizes, progress)
    return RunFacts(folder, [facts for _, facts in snapshots], changes, sizes)


def _modules_of(path: str) -> ModulePath:
    """Split the path of an entry into modules. Entries of all ranks count as one rank's."""
    head, slash, tail = path.partition("/")
    if slash and _NUMBER.fullmatch(head):
        path = f"ranks/{tail}"
    return tuple(_SEPARATORS.split(path, _MOST_PARTS))


def _changes(
    compared: Sequence[tuple[T, SnapshotFacts]],
    compare: Callable[[T, T], Diff],
    sizes: dict[ModulePath, int],
    progress: Progress | None,
) -> ModuleChanges:
    columns: list[dict[ModulePath, int]] = []
    for number, ((before, _), (after, _)) in enumerate(pairwise(compared)):
        if progress is not None:
            progress("comparing snapshots", number, len(compared) - 1)
        columns.append(
            _summed((_modules_of(c.path), c.changed_bytes) for c in compare(before, after).changes)
        )
    changed = {
        parts for column in columns for parts, nbytes in column.items() if nbytes
    } & sizes.keys()
    depth = _depth(changed)
    totals = _summed((parts[:depth], nbytes) for parts, nbytes in sizes.items())
    columns = [_summed((parts[:depth], n) for parts, n in column.items()) for column in columns]
    modules = sorted({parts[:depth] for parts in changed}, key=_naturally)
    return ModuleChanges(
        [facts.name for _, facts in compared[1:]],
        [".".join(module) for module in modules[:_MOST_MODULES]],
        [
            [min(1.0, column.get(module, 0) / totals[module]) for column in columns]
            for module in modules[:_MOST_MODULES]
        ],
    )


def _summed(sizes: Iterable[tuple[ModulePath, int]]) -> dict[ModulePath, int]:
    summed: dict[ModulePath, int] = {}
    for parts, nbytes in sizes:
        summed[parts] = summed.get(parts, 0) + nbytes
    return summed


def _naturally(parts: ModulePath) -> list[tuple[int, int, str]]:
    """Return a key by which to sort a path, so that 10 comes after 9."""
    return [(0, int(part), "") if _NUMBER.fullmatch(part) else (1, 0, part) for part in parts]


def _depth(paths: Collection[ModulePath]) -> int:
    """Return the most parts of a path to show, so that few enough different paths are left."""
    depth = max(map(len, paths), default=1)
    while depth > 1 and len({parts[:depth] for parts in paths}) > _MOST_MODULES:
        depth -= 1
    return depth
