"""Rows of the result, and the Markdown table that they make."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

HEADINGS = ("work", "contender", "median", "rate", "casnap against it", "to reach", "")


@dataclass(frozen=True)
class Row:
    """One line: what was done, by whom, how long, and how casnap stands to it."""

    work: str
    contender: str
    median: str
    rate: str = ""
    ratio: str = ""
    target: str = ""
    verdict: str = ""

    def at_least(self, samples: Sequence[float], unit: str, bound: float | None = None) -> Row:
        """Return the row with a ratio that should be ``bound`` or more."""
        reached = statistics.median(samples)
        target = "" if bound is None else f"≥ {bound:g}"
        verdict = "" if bound is None else _verdict(reached >= bound)
        return replace(self, ratio=_spread(samples, unit), target=target, verdict=verdict)

    def at_most(self, samples: Sequence[float], unit: str, bound: float | None = None) -> Row:
        """Return the row with a ratio that should be ``bound`` or less."""
        reached = statistics.median(samples)
        target = "" if bound is None else f"≤ {bound:g}"
        verdict = "" if bound is None else _verdict(reached <= bound)
        return replace(self, ratio=_spread(samples, unit), target=target, verdict=verdict)

    def within(self, value: float, bound: float, target: str) -> Row:
        """Return the row with an absolute target, ``value`` at most ``bound``."""
        return replace(self, target=target, verdict=_verdict(value <= bound))

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self)


def timed(work: str, contender: str, samples: Sequence[float], nbytes: int | None = None) -> Row:
    """Return a row of the median of some seconds, with a rate where bytes are given."""
    median = statistics.median(samples)
    rate = "" if nbytes is None else f"{nbytes / median / 1e9:.2f} GB/s"
    return Row(work, contender, duration(median), rate)


def duration(value: float) -> str:
    """Return seconds as text with three significant digits."""
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.2f} s"


def render(rows: Sequence[Row]) -> str:
    """Return the Markdown table; the name of the work stands in its first row only."""
    lines = [_line(HEADINGS), _line(["---"] * len(HEADINGS))]
    before = None
    for row in rows:
        work = "" if row.work == before else row.work
        before = row.work
        cells = (row.contender, row.median, row.rate, row.ratio, row.target, row.verdict)
        lines.append(_line((work, *cells)))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _spread(samples: Sequence[float], unit: str) -> str:
    median = statistics.median(samples)
    if len(samples) == 1:
        return f"{median:.3g}{unit}"
    return f"{median:.3g}{unit} ({min(samples):.2g}–{max(samples):.2g})"


def _verdict(reached: bool) -> str:
    return "ok" if reached else "**miss**"
