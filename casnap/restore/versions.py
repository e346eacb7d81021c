"""The versions of modules that a loader is given with a state.

``state_dict()`` of a module notes the versions of its submodules beside its items, by their names,
and ``load_state_dict`` looks them up by the names that they have there. A submodule whose version
it does not find takes the items for those of its oldest version, and may change them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from casnap.restore.key_state import KeyState
from casnap.state.containers import without_wrappers
from casnap.state.flatten import Known, Reopened


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
            versioned[path] = _versioned(stored, metadata)
    return versioned


def _versioned(stored: Reopened, live: Mapping[str, Any]) -> Reopened:
    def build(children: list[Any]) -> Any:
        value = stored.build(children)
        if not isinstance(value, dict):
            return value
        taken = getattr(value, "_metadata", None)
        ordered: Any = value if isinstance(value, OrderedDict) else OrderedDict(value)
        ordered._metadata = OrderedDict(live if taken is None else _by_live_names(taken, live))
        return ordered

    return stored._replace(build=build)


def _by_live_names(stored: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored metadata by the names that the submodules have here, and by their own."""
    if stored.keys() == live.keys():
        return dict(stored)
    by_live_name, stored_names = dict(stored), _by_plain_name(stored)
    for plain_name, names in _by_plain_name(live).items():
        if plain_name not in stored_names:
            continue
        # The innermost is the module itself; those around it are wrappers, of either side.
        sources = [None] * len(names) + stored_names[plain_name]
        for name, source in zip(reversed(names), reversed(sources), strict=False):
            by_live_name[name] = live[name] if source is None else stored[source]
    return by_live_name


def _by_plain_name(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names by what they are without wrappers; the outermost comes first."""
    plain_names = without_wrappers(names)
    by_plain_name: dict[str, list[str]] = {}
    for name in sorted(plain_names, key=len):
        by_plain_name.setdefault(plain_names[name], []).append(name)
    return by_plain_name
