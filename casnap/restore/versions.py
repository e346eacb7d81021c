"""The versions of modules, which ``load_state_dict`` gets beside the tensors.

A module's ``state_dict()`` notes the version of each submodule by name, beside the items.
``load_state_dict`` looks up each version by the name that the submodule has in the loading module.
If a version is not there, the submodule assumes that its items are of its oldest version, and may
change them.
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
    """Return, by path, the dicts of a key to which versions of modules belong, with these versions.

    They are the stored versions, under the names that the submodules have here. ``dcp.save`` stores
    none: then the versions of the live state are used, as ``dcp.load`` does.

    Args:
        state: The key.
        known: The values and containers that were read, decoded.
    """
    versioned = {}
    for path, live in state.mappings():
        metadata, stored = getattr(live, "_metadata", None), known.get(path)
        if isinstance(metadata, Mapping) and isinstance(stored, Reopened):
            versioned[path] = _versioned(stored, live)
    return versioned


_COUNT = "num_batches_tracked"
"""A buffer of BatchNorm since its version 2, which adds it to states of version 1 as it loads."""


def added_by_module(
    contents: Contents, state: KeyState, module: torch.nn.Module, missing: Iterable[str]
) -> set[str]:
    """Return the missing paths that a module adds itself when it loads an older version's state.

    These are the counts of BatchNorm, if the stored version of the layer is below 2. Other modules
    may add paths too, but casnap cannot tell.

    Args:
        contents: The snapshot.
        state: The key of the module.
        module: The module.
        missing: The paths of the module that the snapshot lacks.
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
        return set()  # the loader gets the live versions, and adds nothing
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
    """Return the versions in a stored dict, under their stored names and under the live names.

    If the stored dict has no versions, the versions in the live dict are returned.
    """
    taken, current = getattr(stored, "_metadata", None), getattr(live, "_metadata", {})
    if taken is None or taken.keys() == current.keys():
        return current if taken is None else taken
    by_live_name, stored_names = dict(taken), _by_plain_name(taken, stored)
    for plain_name, names in _by_plain_name(current, live).items():
        if plain_name not in stored_names:
            continue
        # The last name is the module's own. The names before it are those of wrappers.
        sources = [None] * len(names) + stored_names[plain_name]
        for name, source in zip(reversed(names), reversed(sources), strict=False):
            by_live_name[name] = current[name] if source is None else taken[source]
    return by_live_name


def _by_plain_name(names: Iterable[str], keys: Iterable[Any]) -> dict[str, list[str]]:
    """Group names that differ only by the parts that wrappers add.

    Args:
        names: The names of submodules.
        keys: The names of the items, which show which parts are a wrapper's.

    Returns:
        Name without wrappers' parts → the names; a wrapper's name comes before the wrapped one's.
    """
    plain_names = without_wrappers(names, keys)
    by_plain_name: dict[str, list[str]] = {}
    for name in sorted(plain_names, key=len):
        by_plain_name.setdefault(plain_names[name], []).append(name)
    return by_plain_name
