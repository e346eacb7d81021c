"""Sizes and times as people write them: one grammar for Python, the command and the environment."""

from __future__ import annotations

import re
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, TypeAlias

Size: TypeAlias = int | str
"""Bytes: a number, or a text such as ``500MB`` or ``4GiB``."""
Duration: TypeAlias = float | str | timedelta
"""A time: seconds, a text such as ``30s`` or ``7d``, or a timedelta."""

_BYTES = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([kmgt]?)(i?)b?")
_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_MOST_SECONDS = timedelta.max.total_seconds()


def parsed_size(text: str, thousand: int = 1000) -> int | None:
    """Return the bytes of a text: ``5GB`` is 5·10⁹, ``5GiB`` is 5·2³⁰; None if it is not a size.

    Args:
        text: The text.
        thousand: The number of bytes of ``1kB``: 1000 or 1024.
    """
    match = _BYTES.fullmatch(text.strip().lower())
    if match is None or (match[3] and not match[2]):
        return None
    step = (1024 if match[3] else thousand) ** " kmgt".index(match[2] or " ")
    return int(float(match[1]) * step) if "." in match[1] else int(match[1]) * step


def parsed_time(text: str) -> float | None:
    """Return the seconds of a text such as ``1.5h`` or ``0``; None if it is not a time."""
    match = _TIME.fullmatch(text)
    if match is None:
        return 0.0 if text == "0" else None
    return float(match[1]) * _SECONDS[match[2]]


def whole_number(value: object) -> int | None:
    """Return a whole number of any type, such as NumPy's, as an int; None for other values.

    A bool does not count as a number: a caller who passes one means something else.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    # NumPy registers its timedelta as an Integral, too; it has no __index__.
    return int(value) if hasattr(value, "__index__") else None


def is_number(value: object) -> bool:
    """Whether a value is a real number of any type, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def count_of(option: str, value: object, least: int = 1) -> int:
    """Return the value of an option that counts something, as an int.

    Args:
        option: The name of the option, for messages.
        value: The value that the user gave.
        least: The least value that is allowed.

    Raises:
        ValueError: The value is not a whole number, or is less than ``least``.
    """
    count = whole_number(value)
    if count is None or count < least:
        raise ValueError(f"{option} is a whole number from {least} on; got {value!r:.80}")
    return count


def count_if_given(option: str, value: object, least: int = 1) -> int | None:
    """Return the result of :func:`count_of`; None if the value is None."""
    return None if value is None else count_of(option, value, least)


def bytes_of(option: str, value: object, least: int = 1) -> int:
    """Return a :data:`Size` that a user gave, in bytes.

    Args:
        option: The name of the option, for messages.
        value: The size.
        least: The least number of bytes that is allowed.

    Raises:
        TypeError: The value is neither a number nor a text.
        ValueError: The number is not whole or is less than ``least``, or the text is not a size.
    """
    size = parsed_size(value) if isinstance(value, str) else value
    nbytes = int(size) if isinstance(size, float) and size.is_integer() else whole_number(size)
    if nbytes is not None and nbytes >= least:
        return nbytes
    error = ValueError if isinstance(value, str | Real) else TypeError
    raise error(
        f"{option} is a number of bytes from {least} on, such as 500_000_000, '500MB' or '4GiB'; "
        f"got {value!r:.80}"
    )


def seconds_of(option: str, value: object, *, above_zero: bool = False) -> float:
    """Return a :data:`Duration` that a user gave, in seconds.

    Args:
        option: The name of the option, for messages.
        value: The time.
        above_zero: Whether the time must be greater than 0.

    Raises:
        TypeError: The value is neither a number, a text nor a timedelta.
        ValueError: The number is negative, too large, or 0 where 0 is forbidden; or the text is not
            a time.
    """
    seconds: Any = value
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        seconds = parsed_time(value)
    if is_number(seconds):
        is_enough = seconds > 0 if above_zero else seconds >= 0
        if is_enough and seconds <= _MOST_SECONDS:
            return float(seconds)
    error = ValueError if isinstance(value, str | Real | timedelta) else TypeError
    least = "above 0" if above_zero else "from 0 on"
    raise error(
        f"{option} is a time {least}: a number of seconds, or such as '30s', '12h', '7d' or a "
        f"timedelta; got {value!r:.80}"
    )


def bytes_if_given(option: str, value: object, least: int = 1) -> int | None:
    """Return the result of :func:`bytes_of`; None if the value is None."""
    return None if value is None else bytes_of(option, value, least)


def seconds_if_given(option: str, value: object) -> float | None:
    """Return the result of :func:`seconds_of`; None if the value is None."""
    return None if value is None else seconds_of(option, value)
