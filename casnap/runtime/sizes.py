"""Numbers for people: of bytes, and of things."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Return a number of bytes as text in decimal units, such as "1.5 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.95 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"


def amount(count: int, thing: str) -> str:
    """Return a number and a noun, in the plural unless the number is 1."""
    if count != 1:
        thing = f"{thing[:-1]}ies" if thing.endswith("ry") else f"{thing}s"
    return f"{count:,} {thing}"
