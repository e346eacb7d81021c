"""Numbers of bytes for people."""

from __future__ import annotations

import re

_BYTES = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([kmgt]?)(i?)b?")


def size(nbytes: float) -> str:
    """Return a number of bytes in the decimal units that disks are sold in."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.95 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"


def parsed_size(text: str) -> int | None:
    """Return a number of bytes as people write it: ``5GB`` is 5·10⁹, ``5GiB`` 5·2³⁰; or None."""
    match = _BYTES.fullmatch(text.strip().lower())
    if match is None or (match[3] and not match[2]):
        return None
    step = (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
    return int(float(match[1]) * step) if "." in match[1] else int(match[1]) * step
