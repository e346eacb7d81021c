"""Shares as people write them: ``5%``, ``0.05``."""

from __future__ import annotations

import re

import click

from casnap.cli.output import quoted

_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)(%?)")


def share(text: str) -> float:
    """Return a share from 0 to 1; the ``type`` of an option.

    Raises:
        click.BadParameter: It is none; says what can be written.
    """
    found = _SHARE.fullmatch(text)
    value = float(found[1]) / (100 if found[2] else 1) if found else 2
    if value > 1:
        raise click.BadParameter(f"{quoted(text)} is no share; write it like 5% or 0.05")
    return value


def positive_share(text: str) -> float:
    """Return a share above 0; the ``type`` of an option.

    Raises:
        click.BadParameter: It is none, or nothing.
    """
    value = share(text)
    if not value:
        raise click.BadParameter(f"{quoted(text)} is nothing; write it like 5% or 0.05")
    return value
