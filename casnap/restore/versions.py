"""The versions of modules that a loader is given with a state.

``state_dict()`` of a module notes the versions of its submodules beside its items, by their names,
and ``load_state_dict`` looks them up by the names that they have there. A submodule whose version
it does not find takes the items for those of its oldest version, and may change them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from casnap.format.entries import ContainerEntry, unknown_in
from casnap.format.names import component_of
from casnap.restore.key_state import KeyState
from casnap.restore.loading import Loading
from casnap.state.containers import without_wrappers
from casnap.state.flatten import Known, Reopened, decode
from casnap.storage import Contents


def with_versions(state: KeyState, known: Known) -> dict[str, Reopened]:
    """Return the dicts of a key whose loader looks for versions, built with those that it finds.

    They are the stored ones, by the names that the submodules have here. ``dcp.save`` stores none,
    for example. Then they are those of the live state, as ``dcp.load`` gives them.

    Args:
        state: The key.
        known: What was read, decoded.
    """
    versioned = {}
    for path, live in state.mappings():
        metadata, stored = getattr(live, "_metadata", None), known.get(path)
        if isinstance(metadata, Mapping) and isinstance(stored, Reopened):
            versioned[path] = _versioned(stored, live)
    return versioned


_COUNT = "num_batches_tracked"
"""What BatchNorm has from its second version on, and adds to a state of its first."""


def added_by_module(
    contents: Contents, state: KeyState, module: torch.nn.Module, missing: Iterable[str]
) -> set[str]:
    """Return which paths that a key lacks its module adds, since it was of an older version.

    Of the modules of torch that is BatchNorm. What others change is not known.
    """
    counts = {path for path in missing if path.endswith(_COUNT)}
    entry = state.entries.get(state.component)
    if not counts or not isinstance(entry, ContainerEntry) or unknown_in(entry):
        return set()
    loading = Loading(contents)
    loading.add(state.component, entry)
    container = decode(loading.load().values(), allow_pickle=False)[state.component]
    taken = container.build([None] * entry.count)
    if getattr(taken, "_metadata", None) is None:
        return set()  # then it is given the versions that it has now
    versions = _by_live_names(taken, state.current)
    added = {
        f"{state.component}/{component_of(f'{name}.{_COUNT}'.removeprefix('.'))}"
        for name, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, torch.nn.modules.batchnorm._NormBase)
        and (versions.get(name, {}).get("version") or 1) < 2
    }
    return added & counts


def _versioned(stored: Reopened, live: Mapping[Any, Any]) -> Reopened:
    def build(children: list[Any]) -> Any:
        value = stored.build(children)
        if not isinstance(value, dict):
            return value
        ordered: Any = value if isinstance(value, OrderedDict) else OrderedDict(value)
        ordered._metadata = OrderedDict(_by_live_names(value, live))
        return ordered

    return stored._replace(build=build)


def _by_live_names(stored: Mapping[Any, Any], live: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return the metadata of a stored dict by the names that the submodules have here.

    They keep their own names as well. A dict without metadata is given those of the live one.
    """
    taken, current = getattr(stored, "_metadata", None), getattr(live, "_metadata", {})
    if taken is None or taken.keys() == current.keys():
        return current if taken is None else taken
    by_live_name, stored_names = dict(taken), _by_plain_name(taken, stored)
    for plain_name, names in _by_plain_name(current, live).items():
        if plain_name not in stored_names:
            continue
        # The innermost is the module itself; those around it are wrappers, of either side.
        sources = [None] * len(names) + stored_names[plain_name]
        for name, source in zip(reversed(names), reversed(sources), strict=False):
            by_live_name[name] = current[name] if source is None else taken[source]
    return by_live_name


def _by_plain_name(names: Iterable[str], keys: Iterable[Any]) -> dict[str, list[str]]:
    """Return names by what they are without wrappers; the outermost comes first."""
    plain_names = without_wrappers(names, keys)
    by_plain_name: dict[str, list[str]] = {}
    for name in sorted(plain_names, key=len):
        by_plain_name.setdefault(plain_names[name], []).append(name)
    return by_plain_name
