"""The keys of the documents that commands print, and those that docs/json.md lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent.parent / "docs" / "json.md"
EVERYWHERE = {"version", "requests"}
_SNAPSHOT = "store, name, path, commit"
# Maps whose keys are a user's, or kinds, files and paths.
_MAPS = {
    *("requests", "metadata", "settings", "metrics", "module_bytes", "refused", "tied", "equal"),
    *("value", "losses", "gc", "old", "new", "environment"),
}


def listed_keys(command: str) -> set[str]:
    """Return the keys that the page lists for a command."""
    _, _, section = PAGE.read_text().partition(f"\n## {command}\n")
    rows = [row for row in section.partition("\n## ")[0].splitlines() if row.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    return _leaves({key for name in listed for key in _meant(name)})


def _meant(name: str) -> Iterator[str]:
    """Yield the keys that a name on the page stands for, as `a.{SNAPSHOT, b}` for five."""
    before, _, inner = name.rstrip("}").rpartition("{")
    for key in inner.replace("SNAPSHOT", _SNAPSHOT).split(", "):
        yield before + key


def keys_of(*documents: dict[str, Any]) -> set[str]:
    """Return the keys of documents of a command, but for those that every command prints."""
    return _leaves({key for document in documents for key in _keys(document, "")})


def _leaves(found: set[str]) -> set[str]:
    """Leave out the keys of lists and maps whose elements have keys of their own."""
    return {key for key in found if not any(k.startswith((f"{key}[]", f"{key}.")) for k in found)}


def _keys(value: dict[str, Any], before: str) -> Iterator[str]:
    for key, child in value.items():
        if not before and key in EVERYWHERE:
            continue
        path = f"{before}{key}"
        yield path
        if isinstance(child, dict) and key not in _MAPS:
            yield from _keys(child, f"{path}.")
        elif isinstance(child, list):
            for each in child:
                if isinstance(each, dict):
                    yield from _keys(each, f"{path}[].")
