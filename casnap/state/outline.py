"""Show entries as a tree with sizes, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from itertools import islice
from typing import NamedTuple

from casnap.format.entries import ContainerEntry, Entry, type_text
from casnap.runtime.sizes import size

_MOST_CHILDREN, _MOST_LINES = 20, 200


class Line(NamedTuple):
    """A line of an outline.

    Attributes:
        name: The last component of the path, indented.
        type: The type of the entry; empty for a rank.
        size: The bytes of the tensor or value, or of everything below.
    """

    name: str
    type: str
    size: str


@dataclass
class _Branch:
    type: str = ""
    nbytes: int = 0
    children: dict[str, _Branch] = field(default_factory=dict)


def outline(entries: Mapping[str, Entry]) -> list[Line]:
    """Return the lines of a tree of entries.

    Each container shows only some of its children, and the tree ends with "…" if it is long.

    Args:
        entries: The entries, by path.
    """
    top = _Branch()
    for path, entry in entries.items():
        nbytes = 0 if isinstance(entry, ContainerEntry) else entry.payload.nbytes
        branch = top
        branch.nbytes += nbytes
        for component in path.split("/"):
            branch = branch.children.setdefault(component, _Branch())
            branch.nbytes += nbytes
        branch.type = type_text(entry)
    lines = list(islice(_lines(top, ""), _MOST_LINES + 1))
    if len(lines) > _MOST_LINES:
        lines[-1] = Line("…", "", "")
    return lines


def _lines(branch: _Branch, indent: str) -> Iterator[Line]:
    for name, child in islice(branch.children.items(), _MOST_CHILDREN):
        # Names come from a store, and could hold control sequences of the terminal.
        shown = name if name.isprintable() else repr(name)
        yield Line(indent + shown, child.type, size(child.nbytes))
        yield from _lines(child, f"{indent}  ")
    if (rest := len(branch.children) - _MOST_CHILDREN) > 0:
        yield Line(f"{indent}… {rest:,} more", "", "")


def as_text(lines: Iterable[Line]) -> str:
    """Return lines as text, in columns."""
    lines = list(lines)
    widths = [max(map(len, column), default=0) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"{line.name:{widths[0]}}  {line.type:{widths[1]}}  {line.size:>{widths[2]}}".rstrip()
        for line in lines
    )


def as_html(lines: Iterable[Line]) -> str:
    """Return lines as a table, for notebooks."""
    rows = "".join(
        f'<tr><td style="text-align: left; white-space: pre">{escape(line.name)}</td>'
        f'<td style="text-align: left">{escape(line.type)}</td><td>{line.size}</td></tr>'
        for line in lines
    )
    return f"<table>{rows}</table>"
