"""Parse durations (``30s``), shares (``5%``, ``0.05``) and sizes (``5GB``) as people write them."""

from __future__ import annotations

import re

import click

from casnap.cli.output import quote
from casnap.runtime.units import parsed_size, parsed_time

_WAYS = "write 30s, 15m, 24h, 7d, 2w"
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)(%?)")


def duration(text: str) -> float:
    """Return the seconds of a duration above 0; the ``type`` of an option.

    Raises:
        click.BadParameter: The text is not such a duration.
    """
    seconds = parsed_time(text)
    if not seconds:
        raise click.BadParameter(f"{quote(text)} is not a duration; {_WAYS} or 1.5h")
    return seconds


def duration_or_none(text: str) -> float:
    """Return the seconds of a duration, which may be ``0``; the ``type`` of an option.

    Raises:
        click.BadParameter: The text is not a duration.
    """
    seconds = parsed_time(text)
    if seconds is None:
        raise click.BadParameter(f"{quote(text)} is not a duration; {_WAYS}, 1.5h or 0")
    return seconds


def size_in_bytes(text: str) -> int:
    """Return a number of bytes above 0, as ``type`` of an option: ``5GB`` is 5·10⁹, ``5GiB`` 5·2³⁰.

    Raises:
        click.BadParameter: The text is not a size.
    """
    nbytes = parsed_size(text)
    if not nbytes:
        raise click.BadParameter(f"{quote(text)} is not a size; write 500MB, 5GB or 4GiB")
    return nbytes


def share(text: str) -> float:
    """Return a share from 0 to 1; the ``type`` of an option.

    Raises:
        click.BadParameter: The text is not a share.
    """
    match = _SHARE.fullmatch(text)
    value = float(match[1]) / (100 if match[2] else 1) if match else 2
    if value > 1:
        raise click.BadParameter(f"{quote(text)} is not a share; write it like 5% or 0.05")
    return value


def positive_share(text: str) -> float:
    """Return a share above 0; the ``type`` of an option.

    Raises:
        click.BadParameter: The text is not such a share.
    """
    value = share(text)
    if not value:
        raise click.BadParameter(f"{quote(text)} is nothing; write it like 5% or 0.05")
    return value
