"""Stepping through the calls of some work, to have each fail, be killed, or stand still in turn."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

STEP = int(os.environ.get("CASNAP_SWEEP_STEP", "4"))
"""``make soak`` sets 1, and runs all tests that are marked ``sweep``."""


def sweep(times: int = 1) -> Iterator[int]:
    """Count the calls to strike: the first, then every fourth; each one in ``make soak``.

    Args:
        times: Strike at so many times fewer, for dear cases; in ``make soak`` at each one too.
    """
    return itertools.count(0, STEP if STEP == 1 else STEP * times)


def spread(count: int, offset: int, most: int = 3) -> range:
    """Return a few of so many calls, at equal distances; each one in ``make soak``.

    Args:
        count: How many calls there are.
        offset: Which to begin with. Tests that differ in it strike at other calls.
        most: How many to return at most.
    """
    step = 1 if STEP == 1 else -(-count // most)
    return range(offset % step, count, step)
