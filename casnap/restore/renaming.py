"""The option ``rename=``: names here that differ from the names in the snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from casnap.errors import MismatchError

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str | None]


def renamed(snapshot: str, paths: Mapping[str, str], rename: Rename) -> dict[str, str]:
    """Return the names in a snapshot by their names here; a name renamed to None is left out.

    Args:
        snapshot: The snapshot, for messages.
        paths: The names in the snapshot, each with its path, for messages.
        rename: The new names. A name that a mapping lacks stays.

    Raises:
        MismatchError: Two names become one.
    """
    sources: dict[str, str] = {}
    for name, path in paths.items():
        new_name = rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
        if new_name in sources:
            raise MismatchError(
                f"{snapshot}: rename= gives {paths[sources[new_name]]} and {path} the same name "
                f"{new_name!r}; nothing was read"
            )
        if new_name is not None:
            sources[new_name] = name
    return sources
