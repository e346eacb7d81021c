"""The report of a diagnosis: rows, and the verdict that follows from these."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Verdict: TypeAlias = Literal["good", "fair", "bad", "unknown"]
"""Fair: a store is safe here, but the advice names a cost. Unknown: it could not be tried."""

CLOCK = 60.0
"""Clocks that are more seconds apart could mislead a collector."""
SECOND = 2.0
"""Clocks that are at most this many seconds apart count as equal: servers tell whole seconds."""


class DoctorRow(NamedTuple):
    """The finding of one probe.

    Attributes:
        name: The name of the probe.
        finding: The finding, in words.
        verdict: ``good``; ``fair``: a store is safe, but the advice names a cost; ``bad``: no store
            is safe here; ``unknown``: the probe could not be tried.
        advice: What the user should do or know; empty if the verdict is good.
    """

    name: str
    finding: str
    verdict: Verdict = "good"
    advice: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """The findings of :func:`casnap.doctor` about a place.

    Attributes:
        place: The folder or the URI.
        rows: The findings of each probe.
        other_host: The other host that took part; None if there was none.
        seconds: How long all probes took.
    """

    place: str
    rows: Sequence[DoctorRow]
    other_host: str | None
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all rows. ``unknown`` counts as ``fair``."""
        found = {row.verdict for row in self.rows}
        return "bad" if "bad" in found else "good" if found <= {"good"} else "fair"

    @property
    def ok(self) -> bool:
        """Whether the place can hold a store."""
        return self.verdict != "bad"

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        names = {
            verdict: ", ".join(row.name for row in self.rows if row.verdict == verdict)
            for verdict in ("fair", "bad", "unknown")
        }
        if names["bad"]:
            return f"bad: no store is safe in {self.place}: {names['bad']}"
        if self.verdict == "good":
            return f"good: {self.place} can hold a store"
        notes = [f"see the advice on {names['fair']}"] if names["fair"] else []
        notes += [f"not tried: {names['unknown']}"] if names["unknown"] else []
        return f"fair: {self.place} can hold a store; {'; '.join(notes)}"


def clock_row(whose: str, at: float, begun: float) -> DoctorRow:
    """Return the row that compares another clock with this host's.

    This host has just done an action that the other clock has stamped.

    Args:
        whose: The owner of the clock.
        at: When the action was done by that clock, in seconds since the epoch.
        begun: When the action began by the clock of this host.
    """
    ahead = at - min(max(at, begun), time.time())
    apart = f"{abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
    if abs(ahead) <= SECOND:
        return DoctorRow("clocks", f"that of {whose} agrees with that of this host")
    finding = f"that of {whose} is {apart}"
    if abs(ahead) <= CLOCK:
        return DoctorRow("clocks", finding)
    return DoctorRow(
        "clocks", finding, "fair", "set the clocks: a collector tells by them how old a file is"
    )


def time_text(seconds: float) -> str:
    """Return a short time as a text, in ms or s."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.1f} s"
