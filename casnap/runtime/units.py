"""Sizes and times as people write them: one grammar for Python, the command and the environment."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TypeAlias

Size: TypeAlias = int | str
"""Bytes: a number, or a text such as ``500MB`` or ``4GiB``."""
Duration: TypeAlias = float | str | timedelta
"""A time: seconds, a text such as ``30s`` or ``7d``, or a timedelta."""

_BYTES = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([kmgt]?)(i?)b?")
_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_MOST_SECONDS = timedelta.max.total_seconds()


def parsed_size(text: str, thousand: int = 1000) -> int | None:
    """Return a number of bytes: ``5GB`` is 5·10⁹, ``5GiB`` 5·2³⁰; None for what is none.

    Args:
        text: The text.
        thousand: How many bytes ``1kB`` has.
    """
    match = _BYTES.fullmatch(text.strip().lower())
    if match is None or (match[3] and not match[2]):
        return None
    step = (1024 if match[3] else thousand) ** " kmgt".index(match[2] or " ")
    return int(float(match[1]) * step) if "." in match[1] else int(match[1]) * step


def parsed_time(text: str) -> float | None:
    """Return the seconds of a time such as ``1.5h``, or of ``0``; None for what is none."""
    match = _TIME.fullmatch(text)
    if match is None:
        return 0.0 if text == "0" else None
    return float(match[1]) * _SECONDS[match[2]]


def bytes_of(option: str, value: object, least: int = 1) -> int:
    """Return a :data:`Size` that a user gave as a number of bytes.

    Args:
        option: What it is for, for messages.
        value: The size.
        least: The least that it can be.

    Raises:
        TypeError: It is neither a number nor a text.
        ValueError: It is another number, or the text is no size.
    """
    nbytes = parsed_size(value) if isinstance(value, str) else value
    if isinstance(nbytes, float) and nbytes.is_integer():
        nbytes = int(nbytes)
    if isinstance(nbytes, int) and not isinstance(nbytes, bool) and nbytes >= least:
        return nbytes
    error = ValueError if isinstance(value, str | int | float) else TypeError
    raise error(
        f"{option} is a number of bytes from {least} on, such as 500_000_000, '500MB' or '4GiB'; "
        f"got {value!r:.80}"
    )


def seconds_of(option: str, value: object, *, above_zero: bool = False) -> float:
    """Return a :data:`Duration` that a user gave in seconds.

    Args:
        option: What it is for, for messages.
        value: The time.
        above_zero: Whether it cannot be 0.

    Raises:
        TypeError: It is neither a number, a text nor a timedelta.
        ValueError: It is another number, or the text is no time.
    """
    seconds = value
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        seconds = parsed_time(value)
    if isinstance(seconds, int | float) and not isinstance(seconds, bool):
        is_enough = seconds > 0 if above_zero else seconds >= 0
        if is_enough and seconds <= _MOST_SECONDS:
            return float(seconds)
    error = ValueError if isinstance(value, str | int | float | timedelta) else TypeError
    least = "above 0" if above_zero else "from 0 on"
    raise error(
        f"{option} is a time {least}: a number of seconds, or such as '30s', '12h', '7d' or a "
        f"timedelta; got {value!r:.80}"
    )


def bytes_if_given(option: str, value: object, least: int = 1) -> int | None:
    """Return what :func:`bytes_of` does; None for None."""
    return None if value is None else bytes_of(option, value, least)


def seconds_if_given(option: str, value: object) -> float | None:
    """Return what :func:`seconds_of` does; None for None."""
    return None if value is None else seconds_of(option, value)
