"""Apply the option ``rename=``, which maps names in a snapshot to names in the live state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from casnap.errors import MismatchError

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str | None]


def renamed(snapshot: str, paths: Mapping[str, str], rename: Rename) -> dict[str, str]:
    """Apply ``rename`` to the names in a snapshot.

    Args:
        snapshot: The snapshot, for messages.
        paths: The names in the snapshot, each with its path, for messages.
        rename: A mapping or function from a name in the snapshot to the name in the live state, or
            to None to leave the name out. A name that a mapping lacks stays.

    Returns:
        Name in the live state → name in the snapshot.

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
