"""Durations as people write them: ``30s``, ``15m``, ``24h``, ``7d``, ``2w``, ``1.5h``."""

from __future__ import annotations

import re

import click

from casnap.cli.output import quoted

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])")
_WAYS = "write 30s, 15m, 24h, 7d, 2w"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def duration(text: str) -> float:
    """Return the seconds of a duration, more than none; the ``type`` of an option.

    Raises:
        click.BadParameter: It is none; says what can be written.
    """
    seconds = _seconds(text)
    if not seconds:
        raise click.BadParameter(f"{quoted(text)} is no duration; {_WAYS} or 1.5h")
    return seconds


def duration_or_none(text: str) -> float:
    """Return the seconds of a duration, which may be ``0``; the ``type`` of an option.

    Raises:
        click.BadParameter: It is none; says what can be written.
    """
    seconds = 0.0 if text == "0" else _seconds(text)
    if seconds is None:
        raise click.BadParameter(f"{quoted(text)} is no duration; {_WAYS}, 1.5h or 0")
    return seconds


def _seconds(text: str) -> float | None:
    found = _DURATION.fullmatch(text)
    return float(found[1]) * _SECONDS[found[2]] if found else None
