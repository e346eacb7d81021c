"""One key of an app state to restore, and the entries that this rank gets for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from casnap.format.entries import ContainerEntry, Entry
from casnap.format.names import component_of, rank_names
from casnap.restore.loading import Loading
from casnap.restore.restore_report import RestoreReport
from casnap.state.containers import container_builder
from casnap.state.flatten import flatten
from casnap.state.parts import check_state
from casnap.state.stateful import Stateful
from casnap.state.tensors import Leaf
from casnap.storage.catalog.contents import Contents


@dataclass(frozen=True)
class KeyState:
    """One key of the app state to restore.

    Attributes:
        component: The first component of the key's paths.
        stateful: The value in the app state.
        current: Its state now.
        entries: The entries in the snapshot for this rank, by path.
        known_leaves: Leaves that are known and need not be read.
        rewritten: Prefixes of paths whose names or values the module may change while it loads.
        unchecked: Prefixes of paths whose names only the module itself can check.
        skipped: Paths that must not be loaded into the module.
    """

    component: str
    stateful: Stateful
    current: Any
    entries: Mapping[str, Entry]
    known_leaves: Mapping[str, Leaf] = field(default_factory=dict)
    rewritten: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    skipped: frozenset[str] = frozenset()


def key_state(
    contents: Contents, key: str, stateful: Stateful, report: RestoreReport, rank: int
) -> KeyState | None:
    """Return a key with its current state and its entries.

    Returns:
        None if the snapshot has nothing of the key for this rank; the report says what is missing.
    """
    component = component_of(key)
    trees = contents.trees(rank).get(component)
    entries = {} if trees is None else {component + inner: e for inner, e in trees.items()}
    # All ranks call state_dict(), which may itself be a collective.
    current = stateful.state_dict()
    check_state(key, stateful, current)
    state = KeyState(component, stateful, current, entries)
    if isinstance(stateful, torch.nn.Module):
        of_submodules = _of_own_submodules(contents, state)
        if of_submodules is not None:
            return of_submodules
    of_other_ranks = _kept_for_others(contents, component, rank, entries)
    if not of_other_ranks and trees is not None:
        return replace(state, entries=_reached(contents, component, rank, entries))
    report.missing += of_other_ranks or [key]
    return None


def _of_own_submodules(contents: Contents, state: KeyState) -> KeyState | None:
    """Return the key with the entries of this module's own submodules; None if it is no pipeline.

    It is one if each rank took other submodules, its stage of the pipeline. The pipeline may be cut
    at other places now.
    """
    shared = contents.manifest.shared.get(state.component)
    if shared is None or contents.tree(shared).get("") is not None:
        return None
    names = {component_of(name) for name in state.current}
    if not names or not state.entries.keys() >= {f"{state.component}/{name}" for name in names}:
        return None
    entries = {p: e for p, e in state.entries.items() if "/" in p and p.split("/")[1] in names}
    current = {state.component: next(flatten(state.current, state.component))}
    return replace(state, entries=entries, known_leaves=current)


def _reached(
    contents: Contents, component: str, rank: int, entries: dict[str, Entry]
) -> dict[str, Entry]:
    """Leave out global entries that only containers of other ranks hold."""
    digest = contents.manifest.ranks.get(str(rank), {}).get(component)
    own_entries = {} if digest is None else dict(contents.tree(digest).items())
    loading = Loading(contents)
    for inner, entry in own_entries.items():
        if isinstance(entry, ContainerEntry):
            loading.add(component + inner, entry)
    elements = {
        path: set(container_builder(path, leaf.entry, leaf.content)[0])
        for path, leaf in loading.load().items()
        if isinstance(leaf.entry, ContainerEntry) and isinstance(leaf.content, bytes)
    }
    if not elements:
        return entries
    reached = dict[str, Entry]()
    for path, entry in entries.items():  # a container comes before its elements
        parent, _, name = path.rpartition("/")
        if not parent or (parent in reached and name in elements.get(parent, (name,))):
            reached[path] = entry
    return reached


def _kept_for_others(
    contents: Contents, component: str, rank: int, entries: Mapping[str, Entry]
) -> list[str]:
    """Return why a rank that did not take part in the take cannot restore a key."""
    if rank < contents.row.world_size:
        return []
    holders: dict[str, list[int]] = {}
    for other_rank in contents.ranks():
        digest = contents.manifest.ranks[str(other_rank)].get(component)
        if digest is not None:
            for path in [component + inner for inner, _ in contents.tree(digest).items()]:
                holders.setdefault(path, []).append(other_rank)
    return [
        f"{path} is kept for {rank_names(ranks)} alone; rank {rank} is new"
        for path, ranks in holders.items()
        if path not in entries
    ]
