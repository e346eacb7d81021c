"""Numbers of bytes for people."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Return a number of bytes as text in decimal units, such as "1.5 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.95 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
