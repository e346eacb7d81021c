"""Make elements of HTML and SVG as text, with all content escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NewType

Markup = NewType("Markup", str)
"""Text in which all content from a store is escaped."""


def text(content: str) -> Markup:
    """Return a text as markup: escaped, with replacement characters for unprintable ones."""
    return Markup(escape("".join(c if c.isprintable() else "\ufffd" for c in content)))


def joined(parts: Iterable[Markup]) -> Markup:
    """Return pieces of markup, one after the other."""
    return Markup("".join(parts))


def element(name: str, *content: Markup, **attributes: str | float) -> Markup:
    """Return an element of HTML or SVG.

    Args:
        name: Its name.
        content: The elements and texts in it.
        attributes: Its attributes. Underscores in names become hyphens; an underscore at the end is
            dropped, as in ``class_``.
    """
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{pairs}>{''.join(content)}</{name}>")


def _attribute(value: str | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else text(str(value))
