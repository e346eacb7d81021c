"""Say which modules of a state change from snapshot to snapshot, and which take up how much."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from casnap import Diff

_MOST_MODULES = 2000
_MOST_PARTS = 32
"""How many times a path is split: deeper modules are not told apart."""
_SEPARATORS = re.compile(r"[/.]")
_NUMBER = re.compile(r"[0-9]{1,18}")

ModulePath: TypeAlias = tuple[str, ...]
"""The names of the modules that lead to an entry, and then the name of the entry."""


class ModuleChanges(NamedTuple):
    """For each module and snapshot, the share of bytes that differ from the snapshot before.

    Modules that never change are left out.

    Attributes:
        snapshots: The names of the snapshots, without the first one, which follows no other.
        modules: The paths of the modules.
        shares: For each module, a list of shares from 0 to 1, one for each snapshot.
    """

    snapshots: list[str]
    modules: list[ModulePath]
    shares: list[list[float]]


class Module(NamedTuple):
    """A module, or several sibling modules that are alike, except for numbers in their names.

    Attributes:
        name: Its name: the path below the module that holds it, such as ``blocks.0–31``.
        nbytes: Its size in the last snapshot, in bytes.
        changed: For each snapshot, how many bytes of it differ from the snapshot before.
        counts: In how many snapshots an entry below it changed: the fewest and the most of all
            entries.
        inner: The modules that it holds.
    """

    name: str
    nbytes: int
    changed: tuple[float, ...]
    counts: tuple[int, int]
    inner: tuple[Module, ...] = ()


def sizes_of(paths: Iterable[tuple[str, int]]) -> dict[ModulePath, int]:
    """Return the bytes below each path of a snapshot, without the paths that have none.

    Args:
        paths: The paths of entries, with their bytes.
    """
    sizes = _summed((_modules_of(path), nbytes) for path, nbytes in paths)
    return {parts: nbytes for parts, nbytes in sizes.items() if nbytes}


def changes_of(
    names: list[str], diffs: Iterable[Diff], sizes: dict[ModulePath, int]
) -> ModuleChanges:
    """Return, for each module and snapshot, what share of its bytes changed.

    Args:
        names: The names of the snapshots.
        diffs: For each of them, how it differs from the one before.
        sizes: The bytes below each path of the last snapshot. Paths that it lacks are left out.
    """
    columns = [
        _summed((_modules_of(c.path), c.changed_bytes) for c in diff.changes) for diff in diffs
    ]
    changed = {
        parts for column in columns for parts, nbytes in column.items() if nbytes
    } & sizes.keys()
    depth = _depth(sizes)
    totals = _summed((parts[:depth], nbytes) for parts, nbytes in sizes.items())
    columns = [_summed((parts[:depth], n) for parts, n in column.items()) for column in columns]
    modules = sorted({parts[:depth] for parts in changed}, key=_naturally)[:_MOST_MODULES]
    shares = [
        [min(1.0, column.get(module, 0) / totals[module]) for column in columns]
        for module in modules
    ]
    return ModuleChanges(names, modules, shares)


def modules_of(sizes: dict[ModulePath, int], changes: ModuleChanges) -> tuple[Module, ...]:
    """Return the modules of a run as trees, with siblings that are alike merged into one.

    Args:
        sizes: The bytes below each path of the last snapshot.
        changes: The share of each module that changed, by snapshot.
    """
    depth = _depth(sizes)
    totals = _summed((parts[:depth], nbytes) for parts, nbytes in sizes.items())
    shares = dict(zip(changes.modules, changes.shares, strict=True))
    never = [0.0] * len(changes.snapshots)
    leaves = []
    for parts in sorted(totals, key=_naturally)[:_MOST_MODULES]:
        changed = tuple(share * totals[parts] for share in shares.get(parts, never))
        count = sum(map(bool, changed))
        leaves.append((parts, Module("", totals[parts], changed, (count, count))))
    return _trees(leaves)


def named_by_counts(
    modules: Sequence[Module], number: int, above: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield (kind, path) of modules, by whether they changed in each snapshot, some or none.

    The kind is "each", "some" or "never". If it differs among the inner modules of a module, these
    are yielded in its place.

    Args:
        modules: The modules.
        number: How many snapshots there are.
        above: The path of the module that holds them.
    """
    for module in modules:
        fewest, most = module.counts
        path = above + module.name
        if not most:
            yield "never", path
        elif fewest == number:
            yield "each", path
        elif module.inner:
            yield from named_by_counts(module.inner, number, f"{path}.")
        else:
            yield "some", path


def _trees(leaves: list[tuple[ModulePath, Module]]) -> tuple[Module, ...]:
    """Return leaves as trees of modules, grouped by the beginnings of their paths."""
    found = []
    for name, group in groupby(leaves, key=lambda leaf: leaf[0][0]):
        below = [(parts[1:], leaf) for parts, leaf in group]
        own = [leaf._replace(name="(itself)") for parts, leaf in below if not parts]
        inner = _trees([leaf for leaf in below if leaf[0]])
        if not inner:
            found.append(own[0]._replace(name=name))
        elif len(inner) == 1 and not own:
            # A module that holds only one other is no row of its own.
            found.append(inner[0]._replace(name=f"{name}.{inner[0].name}"))
        else:
            found.append(_holding(name, (*own, *inner)))
    return _folded(found)


def _holding(name: str, inner: tuple[Module, ...]) -> Module:
    return Module(
        name,
        sum(module.nbytes for module in inner),
        tuple(map(sum, zip(*(module.changed for module in inner), strict=True))),
        (min(m.counts[0] for m in inner), max(m.counts[1] for m in inner)),
        inner,
    )


def _folded(modules: list[Module]) -> tuple[Module, ...]:
    """Merge sibling modules that are alike and whose names differ only in a number at the start."""
    alike: dict[tuple[object, ...], list[Module]] = {}
    for module in modules:
        head, _, rest = module.name.partition(".")
        name = ("", rest) if _NUMBER.fullmatch(head) else (head, rest)
        alike.setdefault((name, *_look(module)), []).append(module)
    return tuple(_merged(group, is_named=True) for group in alike.values())


def _look(module: Module) -> tuple[object, ...]:
    """Return a key that is equal for alike modules: their inner modules, and how much changes."""
    share = sum(module.changed) / (module.nbytes * len(module.changed) or 1)
    return module.counts, round(share, 1), tuple((m.name, *_look(m)) for m in module.inner)


def _merged(group: Sequence[Module], *, is_named: bool = False) -> Module:
    first = group[0]
    if len(group) == 1:
        return first
    name = first.name
    if is_named:
        _, dot, rest = name.partition(".")
        name = f"{_span([int(m.name.partition('.')[0]) for m in group])}{dot}{rest}"
    inner = tuple(_merged(of_all) for of_all in zip(*(m.inner for m in group), strict=True))
    changed = tuple(map(sum, zip(*(m.changed for m in group), strict=True)))
    return Module(name, sum(m.nbytes for m in group), changed, first.counts, inner)


def _span(numbers: list[int]) -> str:
    """Return sorted numbers as text, such as "0–6, 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)


def _modules_of(path: str) -> ModulePath:
    """Split the path of an entry into modules. Entries of all ranks count as one rank's."""
    head, slash, tail = path.partition("/")
    if slash and _NUMBER.fullmatch(head):
        path = f"ranks/{tail}"
    return tuple(_SEPARATORS.split(path, _MOST_PARTS))


def group_of(path: str) -> str:
    """Return the path of an entry with a star for each number in it, as a group of tensors."""
    return ".".join("*" if _NUMBER.fullmatch(part) else part for part in _modules_of(path))


def _summed(sizes: Iterable[tuple[ModulePath, int]]) -> dict[ModulePath, int]:
    summed: dict[ModulePath, int] = {}
    for parts, nbytes in sizes:
        summed[parts] = summed.get(parts, 0) + nbytes
    return summed


def _naturally(parts: ModulePath) -> list[tuple[int, int, str]]:
    """Return a key by which to sort a path, so that 10 comes after 9."""
    return [(0, int(part), "") if _NUMBER.fullmatch(part) else (1, 0, part) for part in parts]


def _depth(paths: Collection[ModulePath]) -> int:
    """Return how many parts of each path to show, so that few enough different paths are left."""
    depth = max(map(len, paths), default=1)
    while depth > 1 and len({parts[:depth] for parts in paths}) > _MOST_MODULES:
        depth -= 1
    return depth
