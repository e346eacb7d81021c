"""Durations as people write them: ``30s``, ``15m``, ``24h``, ``7d``, ``2w``, ``1.5h``."""

from __future__ import annotations

import re

import click

from casnap.cli.output import quoted

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def duration(text: str) -> float:
    """Return the seconds of a duration; the ``type`` of an option.

    Raises:
        click.BadParameter: It is none; says what can be written.
    """
    if text == "0":
        return 0.0
    found = _DURATION.fullmatch(text)
    if found is None:
        raise click.BadParameter(
            f"{quoted(text)} is no duration; write 30s, 15m, 24h, 7d, 2w, 1.5h or 0"
        )
    return float(found[1]) * _SECONDS[found[2]]
