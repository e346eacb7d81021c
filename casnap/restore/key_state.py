"""One key of an app state to restore, and the entries of the snapshot to read for this rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from casnap.format.entries import ContainerEntry, Entry, ValueEntry, unknown_in
from casnap.format.names import component_of
from casnap.restore.loaders import known_loader
from casnap.restore.loading import Loading
from casnap.restore.restore_report import RestoreReport
from casnap.state.containers import DICT_KINDS, container_builder, live_components
from casnap.state.flatten import Known, Reopened, live_parts
from casnap.state.parts import check_state
from casnap.state.stateful import StateDict, Stateful
from casnap.state.tensors import ORDINARY_TYPES
from casnap.state.values import PLAIN_TYPES
from casnap.storage import Contents

_NO_CONTAINERS = frozenset({*ORDINARY_TYPES, *PLAIN_TYPES})


@dataclass(frozen=True)
class KeyState:
    """One key of the app state to restore.

    Attributes:
        component: The first component of the key's paths.
        stateful: The value in the app state.
        current: What its ``state_dict()`` returns now.
        entries: The entries to read from the snapshot for this rank, by path.
        known: Path → part of ``current`` that is kept, since ``entries`` lacks the path.
        rewritten: The path prefixes of submodules that may change names or values while they load.
        unchecked: The path prefixes of submodules that check their names themselves.
        skipped: Paths that must not be loaded.
    """

    component: str
    stateful: Stateful
    current: Any
    entries: Mapping[str, Entry]
    known: Known = field(default_factory=dict)
    rewritten: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    skipped: frozenset[str] = frozenset()

    def mappings(self) -> Iterator[tuple[str, Mapping[Any, Any]]]:
        """Yield the dicts in the current state, with their paths."""
        return _mappings(self.current, self.component)

    def without(self, paths: Collection[str]) -> KeyState:
        """Return the key without the entries at some paths and everything below these."""
        if not paths:
            return self
        left_out = set(paths)
        entries = {p: e for p, e in self.entries.items() if left_out.isdisjoint(_upwards(p))}
        return replace(self, entries=entries)


def packed_lists(
    contents: Contents, state: KeyState, paths: Iterable[str]
) -> dict[str, Sequence[Any]]:
    """Read the long lists among some paths. The snapshot stores a long list as one value.

    The entry of such a list does not tell its length, and its elements have no entries.

    Args:
        contents: The snapshot.
        state: The key that the paths belong to.
        paths: Paths of lists. Those stored element by element are left out of the result.

    Returns:
        Path → list.
    """
    loading = Loading(contents)
    for path in paths:
        entry = state.entries.get(path)
        if isinstance(entry, ValueEntry) and entry.kind in ("packed_list", "packed_tuple"):
            loading.add(path, entry)
    return loading.load_values()


def _mappings(value: Any, path: str) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield the dicts in a value, with their paths; an outer dict before the dicts in it."""
    stack = [(path, value)]
    while stack:
        path, value = stack.pop()
        is_mapping = isinstance(value, Mapping)
        if is_mapping:
            yield path, value
        elif not isinstance(value, list | tuple):
            continue
        children = [*value.values()] if is_mapping else value
        # Nearly all parts of a state are tensors and numbers, which need no components.
        nested = [i for i, child in enumerate(children) if type(child) not in _NO_CONTAINERS]
        if nested:
            components = live_components(value) if is_mapping else None
            stack += [
                (f"{path}/{i if components is None else components[i]}", children[i])
                for i in reversed(nested)
            ]


def _upwards(path: str) -> Iterator[str]:
    """Yield ``path``, then the path of its parent, and so on up to the key."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def key_state(
    contents: Contents,
    key: str,
    stateful: Stateful,
    report: RestoreReport,
    rank: int,
    kept_for_others: dict[str, dict[str, list[int]]],
) -> KeyState | None:
    """Call ``state_dict()`` of a value, and find the entries of its key for this rank.

    Args:
        contents: The snapshot.
        key: The key.
        stateful: The value in the app state.
        report: Gets the key if the snapshot lacks it.
        rank: This rank.
        kept_for_others: Gets the key's component → each path that this rank cannot restore → the
            ranks that can.

    Returns:
        The key; None if the snapshot has nothing of the key for this rank.
    """
    component = component_of(key)
    trees = contents.trees(rank).get(component)
    entries = {} if trees is None else {component + inner: e for inner, e in trees.items()}
    # All ranks call state_dict(), which may itself be a collective.
    current = stateful.state_dict()
    check_state(key, stateful, current)
    state = KeyState(component, stateful, current, entries)
    if isinstance(stateful, torch.nn.Module):
        of_submodules = _of_own_submodules(contents, state, rank)
        if of_submodules is not None:
            return of_submodules
    if of_others := _kept_for_others(contents, component, rank, entries):
        kept_for_others[component] = of_others
        return _of_everyone(state, of_others)
    if trees is None:
        report.missing.append(key)
        return None
    return replace(state, entries=_reached(contents, component, rank, entries))


def entries_seen(
    contents: Contents, component: str, rank: int
) -> tuple[dict[str, Entry], dict[str, list[int]]]:
    """Return the entries of a key that a rank restores, by path.

    Args:
        contents: The snapshot.
        component: The first component of the key's paths.
        rank: The rank.

    Returns: Path → entry; and, for each path that the rank cannot restore, the ranks that can.
    There are such paths only for a new rank, which the take did not have.
    """
    trees = contents.trees(rank).get(component)
    entries = {} if trees is None else {component + inner: e for inner, e in trees.items()}
    of_others = _kept_for_others(contents, component, rank, entries)
    return _reached(contents, component, rank, entries), of_others


def _of_own_submodules(contents: Contents, state: KeyState, rank: int) -> KeyState | None:
    """Return the key of a pipeline stage, with the entries of the submodules that this rank has.

    In a pipeline each rank holds some of the submodules, its stage. A rank may hold another stage
    now than in the take.

    Returns:
        The key; None if the module was not taken as the stages of a pipeline.
    """
    shared = contents.manifest.shared.get(state.component)
    if shared is None or contents.tree(shared).get("") is not None:
        return None
    names = set(live_components(state.current))
    if not names or not state.entries.keys() >= {f"{state.component}/{name}" for name in names}:
        return None
    entries = {p: e for p, e in state.entries.items() if "/" in p and p.split("/")[1] in names}
    path, top = next(live_parts(state.current, state.component))
    versions = _versions_of_stages(contents, state, rank)

    def build(children: list[Any]) -> Any:
        value = top.build(children)
        if hasattr(value, "_metadata"):
            value._metadata = versions
        return value

    return replace(state, entries=entries, known={path: top._replace(build=build)})


def _versions_of_stages(contents: Contents, state: KeyState, rank: int) -> dict[str, Any]:
    """Return the versions of this rank's submodules, which the stages of a pipeline have stored.

    The stage of the rank with the same number is read first. If the pipeline is now cut at other
    places, that stage lacks some versions, and other stages are read too.
    """
    versions = dict[str, Any]()
    wanted = set(getattr(state.current, "_metadata", ()))
    for other in sorted(contents.ranks(), key=lambda other: other != rank):
        if wanted <= versions.keys():
            break
        digest = contents.manifest.ranks[str(other)].get(state.component)
        entry = None if digest is None else contents.tree(digest).get("")
        if isinstance(entry, ContainerEntry) and not unknown_in(entry):
            loading = Loading(contents)
            loading.add(state.component, entry)
            (leaf,) = loading.load().values()
            assert isinstance(leaf.content, bytes)
            _, build = container_builder(state.component, entry, leaf.content)
            of_stage = build([None] * entry.count)
            versions = {**getattr(of_stage, "_metadata", {}), **versions}
    return versions


def _reached(
    contents: Contents, component: str, rank: int, entries: dict[str, Entry]
) -> dict[str, Entry]:
    """Return the entries without those that this rank's own containers do not list.

    A container may have different elements on different ranks. A global entry that is no element on
    this rank is left out, with all entries below it.

    Args:
        contents: The snapshot.
        component: The first component of the key's paths.
        rank: This rank.
        entries: The entries of the key, by path: global ones and this rank's.
    """
    digest = contents.manifest.ranks.get(str(rank), {}).get(component)
    own_entries = {} if digest is None else dict(contents.tree(digest).items())
    loading = Loading(contents)
    for inner, entry in own_entries.items():
        if isinstance(entry, ContainerEntry) and not unknown_in(entry):
            loading.add(component + inner, entry)
    elements = {
        # A damaged count may be huge; a whole container has at most as many elements as entries.
        path: set(islice(container_builder(path, leaf.entry, leaf.content)[0], len(entries)))
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
) -> dict[str, list[int]]:
    """Return the paths of a key that a new rank cannot restore: they belong to other ranks.

    A new rank is one that the take did not have.

    Args:
        contents: The snapshot.
        component: The first component of the key's paths.
        rank: The rank. If the take had it, the result is empty.
        entries: The entries that the rank can restore, by path.

    Returns:
        Path → the ranks that can restore it.
    """
    holders: dict[str, list[int]] = {}
    if rank < contents.row.world_size:
        return holders
    for other_rank in contents.ranks():
        digest = contents.manifest.ranks[str(other_rank)].get(component)
        if digest is not None:
            for path in [component + inner for inner, _ in contents.tree(digest).items()]:
                if path not in entries:
                    holders.setdefault(path, []).append(other_rank)
    return holders


def _of_everyone(state: KeyState, of_others: Collection[str]) -> KeyState | None:
    """Return the key as a new rank restores it. A new rank is one that the take did not have.

    The rank gets the global entries, and keeps its live values at all other paths.

    Args:
        state: The key, with the global entries.
        of_others: The paths that only other ranks have.

    Returns:
        The key; None if nothing would be restored.
    """
    live = dict(live_parts(state.current, state.component))
    skipped, unread = set[str](), set[str]()
    for path in of_others:
        if _is_of_module(state, path):
            skipped.add(path)
            continue
        if path != state.component and path.rpartition("/")[0] not in state.entries:
            continue  # its container is not global either
        while path not in live and not _may_lack(state, path):
            path = path.rpartition("/")[0]
        if _is_of_module(state, path) or path not in live:
            skipped.add(path)
        elif path in state.entries:
            unread.add(path)  # this container cannot be put together without the part
    state = state.without(skipped | unread)
    if all(isinstance(entry, ContainerEntry) for entry in state.entries.values()):
        return None
    known = {path: value for path, value in live.items() if path not in state.entries}
    if known_loader(state.stateful) is None:
        # An unknown loader may overwrite its tensors before it reads the ones that it gets.
        known = {path: copied(value) for path, value in known.items()}
    return replace(state, known=known, skipped=frozenset(skipped))


def copied(value: Any) -> Any:
    """Return a copy of a part of a live state, for a loader that may overwrite the original."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value if isinstance(value, Reopened) else deepcopy(value)


def _may_lack(state: KeyState, path: str) -> bool:
    """Whether a value keeps its live part at a path if the state that it loads lacks the path.

    That holds for the state of a parameter in torch's optimizers, and for items of a dict in
    modules and in ``StateDict``. For anything else it is not known, and the result is False.
    """
    loader, (parent, _, _) = known_loader(state.stateful), path.rpartition("/")
    if loader is torch.optim.Optimizer:
        return parent == f"{state.component}/state"
    entry = state.entries.get(parent)
    is_in_dict = isinstance(entry, ContainerEntry) and entry.kind in DICT_KINDS
    return is_in_dict and (loader is StateDict or _is_of_module(state, path))


def _is_of_module(state: KeyState, path: str) -> bool:
    """Whether a path names a parameter, buffer or extra state of a module.

    The result is False if the value is not a module, or if the path lies below such a name.
    """
    return isinstance(state.stateful, torch.nn.Module) and path.count("/") == 1
