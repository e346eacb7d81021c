"""The facts that a report shows, gathered from a store without reading a tensor."""

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
"""So many runs, those with the newest snapshots, are shown in full."""
_MOST_MODULES = 160
_MOST_PARTS = 32
"""A path is split so many times: deeper modules are not told apart."""
_SEPARATORS = re.compile(r"[/.]")
_NUMBER = re.compile(r"[0-9]{1,18}")

T = TypeVar("T")
Path: TypeAlias = tuple[str, ...]
"""The modules that lead to an entry, and its own name."""


@dataclass(frozen=True)
class SnapshotFacts:
    """One snapshot.

    Attributes:
        name: Its name in the store.
        time: When it was taken, in seconds since the epoch.
        seconds: How long the take took.
        entries: How many entries its state has.
        logical_bytes: The bytes of its state.
        new_bytes: What its take added to the store.
        stored_bytes: All that it refers to.
        unique_bytes: Bytes that no other snapshot refers to: deleting it frees these.
        metrics: The numbers in its metadata.
        notes: Why no rule can delete it: its tags, or that a mirror lacks it.
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
class Changes:
    """Which share of each module differs from the snapshot before.

    Modules that never do are left out.

    Attributes:
        snapshots: The names of the snapshots, but for the first one, which has none before it.
        modules: The modules.
        shares: For each module, a share from 0 to 1 for each snapshot.
    """

    snapshots: list[str]
    modules: list[str]
    shares: list[list[float]]


@dataclass(frozen=True)
class Run:
    """The snapshots of one folder, in the order of their commits.

    Attributes:
        folder: Its name in the store; empty for the store itself.
        snapshots: The snapshots.
        changes: What changed in the last ones of them.
        sizes: The bytes below each path of the last one.
    """

    folder: str
    snapshots: list[SnapshotFacts]
    changes: Changes
    sizes: dict[Path, int]


@dataclass(frozen=True)
class Space:
    """What a store takes up.

    Attributes:
        stored_bytes: All packs, and the index.
        live_bytes: The part of these that the snapshots of the store need.
        saved_bytes: How much larger the chunks would be without deltas and compression.
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
        space: What the store takes up.
        runs: The runs that are shown, the one with the newest snapshot first.
        more_runs: How many runs are not shown.
    """

    uri: str
    chunk_size: int
    snapshots: int
    logical_bytes: int
    space: Space
    runs: list[Run]
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
    """Gather what a report on some snapshots shows.

    Args:
        uri: The store.
        chunk_size: The size of its chunks, in bytes.
        snapshots: The snapshots, in the order of their commits: what the caller knows each by, and
            its facts.
        space: What the whole store takes up.
        sizes_in: Returns the paths of all tensors and values of a snapshot, with their bytes.
        compare: Returns what differs between two snapshots.
        most: How many snapshots of each run to compare with the one before.
        progress: Called as ``progress(phase, done, total)``.
    """
    by_folder: dict[str, list[tuple[T, SnapshotFacts]]] = {}
    for snapshot, facts in snapshots:
        folder = facts.name.rpartition("/")[0]
        # A folder with a newer snapshot comes later.
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
    """Return the numbers in the metadata of a snapshot that can be drawn."""
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
) -> Run:
    compared = snapshots[-most - 1 :]
    sizes = _summed((_parts(path), nbytes) for path, nbytes in sizes_in(compared[-1][0]))
    sizes = {parts: nbytes for parts, nbytes in sizes.items() if nbytes}
    changes = _changes(compared, compare, sizes, progress)
    return Run(folder, [facts for _, facts in snapshots], changes, sizes)


def _parts(path: str) -> Path:
    """Return the modules that lead to an entry; all ranks' own entries count as one rank's."""
    head, slash, tail = path.partition("/")
    if slash and _NUMBER.fullmatch(head):
        path = f"ranks/{tail}"
    return tuple(_SEPARATORS.split(path, _MOST_PARTS))


def _changes(
    compared: Sequence[tuple[T, SnapshotFacts]],
    compare: Callable[[T, T], Diff],
    sizes: dict[Path, int],
    progress: Progress | None,
) -> Changes:
    columns: list[dict[Path, int]] = []
    for number, ((before, _), (after, _)) in enumerate(pairwise(compared)):
        if progress is not None:
            progress("comparing snapshots", number, len(compared) - 1)
        columns.append(
            _summed((_parts(c.path), c.changed_bytes) for c in compare(before, after).changes)
        )
    changed = {
        parts for column in columns for parts, nbytes in column.items() if nbytes
    } & sizes.keys()
    depth = _depth(changed)
    totals = _summed((parts[:depth], nbytes) for parts, nbytes in sizes.items())
    columns = [_summed((parts[:depth], n) for parts, n in column.items()) for column in columns]
    modules = sorted({parts[:depth] for parts in changed}, key=_naturally)
    return Changes(
        [facts.name for _, facts in compared[1:]],
        [".".join(module) for module in modules[:_MOST_MODULES]],
        [
            [min(1.0, column.get(module, 0) / totals[module]) for column in columns]
            for module in modules[:_MOST_MODULES]
        ],
    )


def _summed(sizes: Iterable[tuple[Path, int]]) -> dict[Path, int]:
    summed: dict[Path, int] = {}
    for parts, nbytes in sizes:
        summed[parts] = summed.get(parts, 0) + nbytes
    return summed


def _naturally(parts: Path) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers by their size."""
    return [(0, int(part), "") if _NUMBER.fullmatch(part) else (1, 0, part) for part in parts]


def _depth(paths: Collection[Path]) -> int:
    """Return how many parts of the paths leave at most as many modules as are shown."""
    depth = max(map(len, paths), default=1)
    while depth > 1 and len({parts[:depth] for parts in paths}) > _MOST_MODULES:
        depth -= 1
    return depth
